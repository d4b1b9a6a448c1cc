"""Find and compile a script, or a module that is run as one, and put it in the place of `__main__`."""

from __future__ import annotations

import builtins
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tensorcap.workload.metadata import redact, redact_command
from tensorcap_formats.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Script:
    """A script, or a module that is run as one.

    Attributes:
        target: The file's path, or the module's name.
        arguments: What follows it on the command line.
        is_module: Whether it is a module, as after `python -m`.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def parse(cls, command: Sequence[str]) -> Script:
        """Read what would follow `python` on a command line.

        Raises:
            UsageError: It is no script and no `-m MODULE`.

        Example:
            >>> Script.parse(["-m", "bench.run", "--steps", "2"])
            Script(target='bench.run', arguments=('--steps', '2'), is_module=True)
        """
        first, *others = command or [""]
        is_module = first == "-m"
        if is_module:
            first, *others = others or [""]
        if not first or (first.startswith("-") and not is_module):
            actual = f"found {first!r}" if first else "found none"
            raise UsageError(
                f"script to capture: {actual}, expected a file or -m MODULE",
                hint="Options of tcap stand before --: tcap capture script -o ref.h5 -- script.py --its-own",
            )
        return cls(first, tuple(others), is_module)

    def describe(self) -> dict[str, Any]:
        """Describe the script for the run's metadata, without secrets."""
        kind = "module" if self.is_module else "file"
        return {kind: redact(self.target), "arguments": redact_command(self.arguments)}


def compile_script(script: Script, main: ModuleType) -> CodeType:
    """Find and compile a script, and set on `main` what Python sets on the module `__main__`.

    Raises:
        UsageError: There is no such script, or it is no Python.
    """
    return _compile_module(script, main) if script.is_module else _compile_file(script, main)


def _compile_file(script: Script, main: ModuleType) -> CodeType:
    path = Path(script.target)
    if path.is_dir():
        raise UsageError(f"{script.target}: is a folder, expected a Python file")
    try:
        source = path.read_bytes()
    except OSError as error:
        if path.exists():
            raise UsageError(f"{script.target}: {error.strerror}, expected a Python file") from error
        names = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, names)
        raise UsageError(f"{script.target}: there is no such script", hint=hint) from None
    main.__file__ = os.path.abspath(path)
    main.__loader__ = SourceFileLoader("__main__", main.__file__)
    try:
        return compile(source, main.__file__, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{script.target}: is no Python{line}: {reason}") from error


def _compile_module(script: Script, main: ModuleType) -> CodeType:
    if script.target.endswith(".py") and os.path.isfile(script.target):
        raise UsageError(f"-m {script.target}: is a file, expected a module's name", hint="Leave -m out.")
    spec = _find_spec(script.target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{script.target}.__main__")
        if spec is None:
            raise UsageError(f"-m {script.target}: a package without __main__, expected a module")
    if spec is None or spec.loader is None:
        parent = _find_spec(script.target.rpartition(".")[0]) if "." in script.target else None
        prefix = f"{parent.name}." if parent else ""
        paths = list(parent.submodule_search_locations or ()) if parent else None
        names = [prefix + module.name for module in pkgutil.iter_modules(paths)]
        hint = did_you_mean(script.target, names)
        raise UsageError(f"-m {script.target}: there is no such module", hint=hint)
    code = spec.loader.get_code(spec.name) if hasattr(spec.loader, "get_code") else None
    if code is None:
        raise UsageError(f"-m {script.target}: has no Python code")
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    main.__file__ = sys.argv[0] = spec.origin or script.target
    return code  # type: ignore[no-any-return] # loaders are known by what they can do


def _find_spec(name: str) -> ModuleSpec | None:
    """Find the module's specification; the packages around it are imported."""
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{error.name}."):
            raise  # of what a package of the user imports
        return None


@contextmanager
def as_main(script: Script) -> Iterator[ModuleType]:
    """Make the process look as if Python had been started with the script."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __cached__=None)
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    folder = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.target))
    sys.argv = [script.target, *script.arguments]
    is_safe = getattr(sys.flags, "safe_path", False)  # Python puts nothing there
    sys.path[:1] = sys.path[:1] if is_safe else [folder]
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before
