"""Stand-ins for packages of the Neuron runtime, with which sources of NxD run on a CPU without it (NRN-171).

1. A finder that is asked last answers for packages that are not installed, if sources of NxD or a user's file
   import them; every name in them is a stand-in.
2. While sources are imported, stand-ins may be used as one uses what one imports: called, indexed, derived
   from. Nothing is computed then. A function that one of them decorates is code for a device.
3. While a model runs, what computes with a stand-in is refused: only calls of a short list are answered.
   Each call is recorded, with its place.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple, NoReturn

from tensorcap.wording import counted
from tensorcap_formats.errors import CaptureError

SOURCES: Final = ("neuronx_distributed_inference", "neuronx_distributed")  # packages that ask for stand-ins
_ABSENT: Final = (  # the compiler, the runtime, their kernels, and clients of storage that a run does not use
    "torch_xla",
    "torch_neuronx",
    "neuronxcc",
    "libneuronxla",
    "nki",
    "nkilib",
    "blobfile",
    "islpy",
    "boto3",
    "botocore",
    "awscrt",
    "s3transfer",
)
_CLASSES: Final = "torch.classes.neuron"  # of the runtime, named in annotations
_PLATFORM: Final = "NEURON_PLATFORM_TARGET_OVERRIDE"  # the variable that torch_neuronx itself obeys
_VALUES: Final[dict[str, Any]] = {
    "torch_neuronx.utils.utils.SUPPORTED_TYPES": {},
    "torch_neuronx.__version__": "",
}


def _platform(*_: Any, **__: Any) -> str:
    return os.environ.get(_PLATFORM, "trn2")


def _same(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values


_MARKER: Final = "neuronx_distributed_inference.models.layer_boundary_marker.ModuleMarker"
_CONFIGURATION: Final = "configuration that only kernels read"
_ANSWERED: Final[dict[str, tuple[Callable[..., Any] | None, str]]] = {
    # by name: what answers, None for a further stand-in; and why that is right on a CPU
    "torch_neuronx.utils.get_platform_target": (_platform, "the name of a device, for sizes of kernels"),
    "torch_neuronx.utils.utils.get_platform_target": (
        _platform,
        "the name of a device, for sizes of kernels",
    ),
    "neuronxcc.nki._pre_prod_kernels.collectives.CollectivesConfig": (None, _CONFIGURATION),
    "neuronxcc.nki._private_kernels.collectives.CollectivesConfig": (None, _CONFIGURATION),
    "nkilib.core.moe.moe_cte.moe_cte_utils.SkipMode": (None, _CONFIGURATION),
    f"{_MARKER}Start.forward_impl": (_same, "a mark for the compiler, which changes no value"),
    f"{_MARKER}End.forward_impl": (_same, "a mark for the compiler, which changes no value"),
}


class StandInCall(NamedTuple):
    """A call of a stand-in while something ran, and how often it was made there."""

    name: str
    place: str
    times: int


_calls: Counter[tuple[str, str]] = Counter()


def stand_in_calls() -> tuple[StandInCall, ...]:
    """The calls of stand-ins since they were installed, but for those that imports made; in order."""
    return tuple(StandInCall(name, place, count) for (name, place), count in _calls.items())


def stand_in_note() -> str:
    """One sentence on the calls of stand-ins; empty if there was none."""
    totals: Counter[str] = Counter()
    for call in stand_in_calls():
        totals[call.name] += call.times
    if not totals:
        return ""
    listed = "; ".join(
        f"{name} ({counted(count, 'call')}: {_ANSWERED[name][1]})" for name, count in totals.items()
    )
    return f"stand-ins for the Neuron runtime, which is not installed, were called: {listed}"


def install_stand_ins() -> None:
    """Answer for packages of the Neuron runtime that are not installed, from now on."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    import torch

    if find_spec("torch_neuronx") is None:
        setattr(torch.classes, "neuron", _Module(_CLASSES))  # noqa: B010 # torch has no such attribute
    sys.meta_path.append(_Finder())


def place_of(frame: FrameType, line: int) -> str:
    """The file of a frame, of sources below the folder that holds them, and the line."""
    path = Path(frame.f_code.co_filename)
    root = next((package for package in SOURCES if package in path.parts), None)
    short = path.name if root is None else "/".join(path.parts[path.parts.index(root) :])
    return f"{short}:{line}"


class _StandIn:
    """Something of a package that is not there: good for imports, refused while a model runs."""

    def __init__(self, name: str) -> None:
        self._stand_in_name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _member(self._stand_in_name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if not _is_importing(frame):
            return _answer(self._stand_in_name, args, kwargs, frame)
        if self._stand_in_name in _ANSWERED and _ANSWERED[self._stand_in_name][0] is not None:
            return _answer(self._stand_in_name, args, kwargs, None)
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType):
            return _device_code(args[0])
        if len(args) == 1 and not kwargs and isinstance(args[0], type):
            return args[0]
        return _StandIn(f"{self._stand_in_name}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        name = self._stand_in_name

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            if (frame := sys._getframe(1)) and not _is_importing(frame):
                _refuse(f"{cls.__qualname__}, which derives from {name},", frame)
            return object.__new__(cls)

        return (type(name.rpartition(".")[2], (), {"__new__": make, "__module__": name.rpartition(".")[0]}),)

    def __getitem__(self, item: Any) -> Any:
        return _StandIn(f"{self._stand_in_name}[…]")

    def __or__(self, other: Any) -> Any:
        return self._while_importing(self)

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(self._while_importing(()))

    def __bool__(self) -> bool:
        return bool(self._while_importing(False))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _StandIn):
            return self._stand_in_name == other._stand_in_name
        return bool(self._while_importing(False))

    def __hash__(self) -> int:
        return hash(self._stand_in_name)

    def __repr__(self) -> str:
        return f"<stand-in for {self._stand_in_name}>"

    def __instancecheck__(self, instance: object) -> bool:
        return False  # nothing is an instance of a class that is not there

    def __enter__(self) -> NoReturn:
        _refuse(self._stand_in_name, sys._getframe(1))

    def __exit__(self, *_: object) -> None:
        """Never reached: entering is refused."""

    def _while_importing(self, value: Any) -> Any:
        frame = sys._getframe(2)
        if not _is_importing(frame):
            _refuse(self._stand_in_name, frame)
        return value


class _Module(ModuleType):
    """A package or module that is not there."""

    def __getattr__(self, name: str) -> Any:
        known = f"{self.__name__}.{name}" in _VALUES
        if name.startswith("__") and name.endswith("__") and not known:
            raise AttributeError(name)
        return _member(self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    """Finds what nothing else found, for sources of NxD and for files of the user."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _ABSENT or not _asks_for_stand_ins(sys._getframe(1)):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be run."""


def _member(owner: str, name: str) -> Any:
    full = f"{owner}.{name}"
    return _VALUES[full] if full in _VALUES else _StandIn(full)


def _asks_for_stand_ins(frame: FrameType | None) -> bool:
    """Whether what imports is sources of NxD, a stand-in, or no installed package: those go without."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "importlib":
        frame = frame.f_back
    if frame is None:
        return False
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package in (*SOURCES, *_ABSENT):
        return True
    paths = sysconfig.get_paths()
    installed = (paths["purelib"], paths["platlib"], paths["stdlib"])
    file = frame.f_code.co_filename
    return not file.startswith(installed) and "site-packages" not in file


def _is_importing(frame: FrameType | None) -> bool:
    """Whether code of a module or a class is at work, of any file, or of sources further up."""
    if frame is not None and not frame.f_code.co_flags & CO_OPTIMIZED:
        return True
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and package in SOURCES:
            return True
        frame = frame.f_back
    return False


def _answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Any:
    """Answer a call that is on the list; a call while something runs has a frame, and is recorded."""
    if name not in _ANSWERED:
        _refuse(name, frame)
    if frame is not None:
        _calls[name, place_of(frame, frame.f_lineno)] += 1
    answer, _ = _ANSWERED[name]
    return _StandIn(f"{name}()") if answer is None else answer(*args, **kwargs)


def _device_code(function: FunctionType) -> Callable[..., Any]:
    """A function that only a device runs: its name answers, or is refused."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _answer(name, args, kwargs, sys._getframe(1))

    return call


def _refuse(name: str, frame: FrameType | None) -> NoReturn:
    place = "" if frame is None else f"{place_of(frame, frame.f_lineno)}: "
    raise CaptureError(
        f"{place}{name} is a stand-in, expected a port that a CPU runs without it",
        hint="Is it configured for CPUs (on_cpu=True, no flag of a kernel)? Else only a device runs it.",
    )
