"""A model with its inputs, which is run under capture; and the inputs that an archive holds of a run."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.errors import UsageError, missing_package
from tensorcap_formats.keys import ROOT_SITE, Key, unescape

if TYPE_CHECKING:
    from tensorcap_formats.archive import Archive

MODEL_MODULES: Final = {  # a program that imports one of these may have models of the framework
    "max": "max.nn",
    "torch": "torch",
}
FRAMEWORKS: Final = ("coreai", "executorch", "jax", "onnx", *MODEL_MODULES)
_EXTRAS: Final = {"flax": "jax", **{name: name for name in FRAMEWORKS}}  # by what a file imports


@dataclass(frozen=True)
class Workload:
    """A model and its inputs.

    Attributes:
        model: The model, in the mode (evaluation or training) that it is to run in.
        inputs: Arguments by name in a mapping, or positional ones in a tuple or list.
        run: Called in place of the model, for runs of several forwards: `run(model, **inputs)`, or
            `run(model, *inputs)`.
        seed: Of the random generators before each run; if None they are left as they are.

    Example:
        >>> Workload(model=abs, inputs=(-1,)).inputs
        (-1,)
    """

    model: Any
    inputs: Mapping[str, Any] | tuple[Any, ...] | list[Any]
    run: Callable[..., Any] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse inputs that are a single argument.

        Raises:
            UsageError: The inputs are no mapping, tuple or list.
        """
        if not isinstance(self.inputs, (Mapping, tuple, list)):
            raise UsageError(
                f"inputs of a workload: found a {type(self.inputs).__name__}, expected a mapping or a tuple",
                hint="A model of one argument takes (x,), or {'name': x}.",
            )

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs as positional arguments and arguments by name, of which one is empty."""
        if isinstance(self.inputs, Mapping):
            return (), dict(self.inputs)
        return tuple(self.inputs), {}

    def call(self, model: Any) -> Any:
        """Run a model, which is or stands for that of the workload, once on the inputs.

        Returns:
            What the model, or the workload's own function, returns.

        Raises:
            UsageError: The workload's own function does not take the model and the inputs.
        """
        args, kwargs = self.arguments
        if self.run is None:
            return model(*args, **kwargs)
        _require_signature(self.run, (model, *args), kwargs)
        return self.run(model, *args, **kwargs)


def _require_signature(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a function that cannot be called with some arguments, if it says what it takes."""
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        inputs = ", ".join(["model", *["…"] * (len(args) - 1), *(f"{name}=…" for name in kwargs)])
        raise UsageError(
            f"run of a workload: {error}, expected a function that is called as run({inputs})",
            hint="It takes the model first, then the workload's inputs.",
        ) from None


class StoredInput(NamedTuple):
    """An input as an archive holds it: stored elements and their dtype."""

    bits: Array
    dtype: DType


def _is_input(key: Key) -> bool:
    return key.site == ROOT_SITE and key.slot.startswith("input.")


def archived_inputs(archive: Archive) -> dict[str, StoredInput]:
    """Read the inputs of the first step of an archived run, by argument; of a foreign file, every tensor.

    Raises:
        UsageError: The archive has no inputs, or kept only their statistics.
    """
    if archive.is_foreign and not any(_is_input(record.key) for record in archive.records):
        return {unescape(r.key.text): StoredInput(archive.read(r), r.dtype) for r in archive.records}
    inputs: dict[str, dict[str, StoredInput]] = {"given": {}, "input": {}}
    for record in archive.records:
        key = record.key
        if (key.site, key.step, key.call, key.rank) == (ROOT_SITE, 0, 0, 0):
            kind, _, name = key.slot.partition(".")
            if kind in inputs:
                inputs[kind][unescape(name)] = StoredInput(archive.read(record), record.dtype)
    run_or_model_inputs = inputs["given"] or inputs["input"]
    if not run_or_model_inputs:
        raise UsageError(f"{archive.path}: holds no inputs of the model")
    return run_or_model_inputs


def load_file(path: str) -> ModuleType:
    """Import a file by its path; it can import the modules beside it.

    Raises:
        UsageError: It is no Python file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(f"tcap_workload_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up there
    folder = str(file.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise missing_package(f"running {path}", error.name, extra=_EXTRAS[error.name]) from None
    return module
