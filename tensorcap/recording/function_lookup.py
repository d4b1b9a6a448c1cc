"""Find a function to watch by its module and its name, beneath its decorators."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial, partialmethod
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from tensorcap.wording import some
from tensorcap_formats.errors import UsageError, abbreviate, did_you_mean

_USED_BY_CAPTURE: Final = ("tensorcap", "tensorcap_formats", "numpy")  # and the standard library
_FEW: Final = 12  # names that a hint lists


def find_function(module: str, name: str, where: str, refuse: Callable[[object], str]) -> FunctionType:
    """Find a function as it was written, beneath its decorators.

    Args:
        module: Name of its module, or the file of a module that is imported already.
        name: `function` or `Class.method`.
        where: The beginning of error messages.
        refuse: Returns why the object of that name cannot be watched; an empty text if it can.

    Raises:
        UsageError: There is none.
    """
    thing: Any = _module(module, where)
    owner = f"module {module!r}"
    for part in name.split("."):
        try:
            member = getattr(thing, part, None)
        except Exception as error:  # of a module that imports what it is asked for
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UsageError(f"{where}: {owner} has {part!r}, but does not give it: {reason}") from error
        if member is None:
            names = [n for n in dir(thing) if not n.startswith("__")]
            raise UsageError(
                f"{where}: {owner} has no {abbreviate(part)!r}",
                hint=did_you_mean(part, names) or _functions_hint(thing),
            )
        thing, owner = member, f"{part!r}"
    layers = list(_layers(thing))
    reason = next(filter(None, map(refuse, layers)), "")
    if reason:
        raise UsageError(f"{where}: {name} is {reason}, so that its variables cannot be seen")
    functions = [layer for layer in layers if isinstance(layer, FunctionType)]
    if not functions:
        raise UsageError(
            f"{where}: {name} is {_kind_text(thing)}, expected a Python function", hint=_functions_hint(thing)
        )
    own = [f for f in functions if f.__code__.co_name == name.rpartition(".")[2]]
    exact = [f for f in own if getattr(f.__code__, "co_qualname", "") == name]  # since Python 3.11
    chosen: FunctionType = (exact or own or [inspect.unwrap(functions[0])])[-1]
    if _is_used_by_capture(chosen):
        raise UsageError(
            f"{where}: {name} is a function that a capture itself may call; it cannot be watched"
        )
    return chosen


def _module(name: str, where: str) -> ModuleType:
    if name.endswith(".py"):
        module = _imported_from(Path(name).expanduser())
        if module is None:
            raise UsageError(f"{where}: no module was imported from {name!r}")
        return module
    if (running := _running_as_another(name)) is not None:
        return running
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UsageError(f"{where}: module {name!r} cannot be imported: {error}") from error
        raise UsageError(
            f"{where}: there is no module {abbreviate(error.name)!r}",
            hint=did_you_mean(error.name, _siblings(error.name)),
        ) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UsageError(f"{where}: module {abbreviate(name)!r} cannot be imported: {reason}") from error


def _imported_from(file: Path) -> ModuleType | None:
    """The module that was imported from a file, whatever its name."""
    path = file.resolve()
    for module in list(sys.modules.values()):
        known = inspect.getattr_static(module, "__file__", None)  # some import when they are asked
        if isinstance(known, str) and Path(known).resolve() == path:
            return module
    return None


def _running_as_another(name: str) -> ModuleType | None:
    """The module of a user's file that runs under another name: as a script, or as a workload's file."""
    if name in sys.modules or "." in name:
        return None
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return (
        _imported_from(Path(spec.origin)) if spec is not None and spec.has_location and spec.origin else None
    )


def _siblings(name: str) -> list[str]:
    """The names of the modules beside one that does not exist."""
    package, dot, _ = name.rpartition(".")
    if not dot:
        return [n for n in sys.modules if "." not in n]
    paths = getattr(sys.modules.get(package), "__path__", [])
    return [f"{package}.{module.name}" for module in pkgutil.iter_modules(paths)]


def _layers(thing: Any) -> Iterator[Any]:
    """List an object, then all that its decorators wrap, from the outside to the inside."""
    pending, visited = [thing], set[int]()
    while pending:
        layer = pending.pop(0)
        if id(layer) in visited:
            continue
        visited.add(id(layer))
        yield layer
        if isinstance(layer, type):
            continue
        inner: Iterable[Any] = [getattr(layer, "__wrapped__", None)]
        if isinstance(layer, (MethodType, staticmethod, classmethod)):
            inner = [layer.__func__]
        elif isinstance(layer, property):
            inner = [layer.fget]
        elif isinstance(layer, (partial, partialmethod, cached_property)):
            inner = [layer.func]
        elif isinstance(layer, FunctionType):
            inner = [*inner, *_closed_over(layer)]
        pending += [i for i in inner if callable(i) or isinstance(i, (staticmethod, classmethod))]


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(content, (FunctionType, MethodType, partial)):
            yield content


def _is_used_by_capture(function: FunctionType) -> bool:
    """Whether the recording of a call could itself call the function."""
    if (function.__module__ or "").partition(".")[0] in _USED_BY_CAPTURE:
        return True
    file, library = Path(function.__code__.co_filename), Path(inspect.__file__).parent
    parts = file.relative_to(library).parts if file.is_relative_to(library) else ("site-packages",)
    return parts[0] not in ("site-packages", "dist-packages")


def _kind_text(thing: object) -> str:
    if inspect.isclass(thing):
        return "a class"
    if inspect.isroutine(thing) or callable(thing):
        kind = type(thing)
        return f"a function that is not written in Python ({kind.__module__}.{kind.__qualname__})"
    return f"an object of class {type(thing).__qualname__}"


def _functions_hint(thing: object) -> str | None:
    if not isinstance(thing, (type, ModuleType)):
        return None
    names = [n for n, v in vars(thing).items() if inspect.isroutine(v) and not n.startswith("__")]
    return f"It has: {some(names, _FEW)}." if names else None
