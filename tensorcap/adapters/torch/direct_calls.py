"""Calls of a module's `forward` that go past its `__call__`, which alone runs hooks.

During a capture, `forward` is replaced in the class that defines it, so that no module, copy or pickle
carries anything of ours. The replacement passes on calls from `__call__`, which hooks have recorded, and
those of a compiler; if it is kept after the capture, it only passes on.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.fx import _symbolic_trace

from tensorcap.recording import Call, Point, Recorder


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


_CALL: Final = nn.Module._call_impl.__code__
_CALLERS: Final = frozenset((*_with_nested(_CALL), nn.Module._slow_forward.__code__))
_LOCK: Final = threading.RLock()
_REPLACED: Final[dict[type, Replacement]] = {}  # by the class that defines the `forward`
_OBSERVERS: Final[dict[int, tuple[Observer, ...]]] = {}  # by the module's id
_AROUND: Final[list[Callable[[nn.Module], AbstractContextManager[None]]]] = []


class Observer(Protocol):
    """Records the calls of one module; `ModuleTap` is the only implementation.

    Attributes:
        point: The point of the module.
        recorder: The recorder of the capture.
    """

    point: Point
    recorder: Recorder

    def begin(self, module: nn.Module, token: int) -> Call | None:
        """Begin a call; None if nothing of it is to be recorded."""

    def process_inputs(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record the arguments of a call, and return those that it goes on with."""

    def end(self, call: Call | None, output: Any) -> Any:
        """Record the result of a call, and return what its caller gets."""


class Replacement:
    """The function in place of the `forward` of a class, and how many use it."""

    def __init__(self, owner: type, original: FunctionType) -> None:
        self.owner = owner
        self.original = original
        self.users = 0
        self.function = _make_replacement(owner, original)


@contextmanager
def direct_calls(hooked: Iterable[tuple[nn.Module, Observer]]) -> Iterator[None]:
    """Record calls of the `forward` of these modules as their hooks record calls of the modules."""
    with ExitStack() as stack:
        for module, observer in hooked:
            _add(id(module), observer)
            stack.callback(_remove, id(module), observer)
            replacement = acquire(type(module))
            if replacement is not None:
                stack.callback(release, replacement)
        yield


@contextmanager
def around_direct_calls(around: Callable[[nn.Module], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter a context for each direct call of a `forward` that is replaced, before it is recorded."""
    _AROUND.append(around)
    try:
        yield
    finally:
        _AROUND.remove(around)


@contextmanager
def _enter_contexts(module: nn.Module) -> Iterator[None]:
    """Enter the contexts of `around_direct_calls` for a call of the module."""
    with ExitStack() as stack:
        for around in _AROUND:
            stack.enter_context(around(module))
        yield


def acquire(cls: type) -> Replacement | None:
    """Replace the `forward` that modules of the class have, until `release`.

    Returns:
        None if there is nothing to replace: it is not written in Python, or is compiled.
    """
    owner = _owner(cls)
    if owner is None or owner is nn.Module:
        return None
    with _LOCK:
        current = vars(owner)["forward"]
        replacement = _REPLACED.get(owner)
        if replacement is None or replacement.function is not current:
            if not isinstance(current, FunctionType) or hasattr(current, "_torchdynamo_orig_callable"):
                return None
            replacement = _REPLACED[owner] = Replacement(owner, current)
            type.__setattr__(owner, "forward", replacement.function)
        replacement.users += 1
    return replacement


def release(replacement: Replacement) -> None:
    """Undo one `acquire`; a `forward` that other code has put there since stays."""
    owner = replacement.owner
    with _LOCK:
        replacement.users -= 1
        if not replacement.users:
            if _REPLACED.get(owner) is replacement:
                del _REPLACED[owner]
            if vars(owner).get("forward") is replacement.function:
                type.__setattr__(owner, "forward", replacement.original)


@contextmanager
def restore_forwards() -> Iterator[None]:
    """Give every class its own `forward` back in the block, which reads code."""
    with _LOCK:
        replacements = [r for r in _REPLACED.values() if vars(r.owner).get("forward") is r.function]
        for replacement in replacements:
            type.__setattr__(replacement.owner, "forward", replacement.original)
        try:
            yield
        finally:
            for replacement in replacements:
                if replacement.users:
                    type.__setattr__(replacement.owner, "forward", replacement.function)


def is_symbolic() -> bool:
    """Whether calls are made with stand-ins for tensors, by torch.fx."""
    return bool(getattr(_symbolic_trace, "_is_fx_tracing_flag", False))


def is_call_of(frame: FrameType, module: nn.Module) -> bool:
    """Whether the frame is one that each call of the module has, by its `__call__` or its `forward`."""
    return frame.f_code in (_CALL, _FORWARD) and frame.f_locals.get("self") is module


def _owner(cls: type) -> type | None:
    """The class that defines the `forward` of modules of the class."""
    return next((base for base in cls.__mro__ if "forward" in vars(base)), None)


def _make_replacement(owner: type, original: FunctionType) -> FunctionType:
    is_compiling, get_frame, callers = torch.compiler.is_compiling, sys._getframe, _CALLERS

    @functools.wraps(original)
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_frame(1).f_code in callers:
            return original(self, *args, **kwargs)
        return _call_directly(owner, original, self, args, kwargs)

    # for readers that do not follow `__wrapped__`
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward  # type: ignore[return-value] # a function


_FORWARD: Final = next(code for code in _with_nested(_make_replacement.__code__) if code.co_name == "forward")


def _call_directly(
    owner: type, original: FunctionType, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    frame = sys._getframe(1)
    # the call of a subclass goes on in that of its base class
    if _owner(type(module)) is not owner or is_symbolic() or _is_called_already(module, frame):
        return original(module, *args, **kwargs)
    with _enter_contexts(module):
        token = id(frame)
        observers = _OBSERVERS.get(id(module), ())
        for observer in observers:
            call = observer.begin(module, token)
            if call is not None:
                args, kwargs = observer.process_inputs(call, args, kwargs)
        output = original(module, *args, **kwargs)
        if torch._C._get_tracing_state() is None:
            for observer in reversed(observers):
                output = observer.end(observer.recorder.leave(observer.point, token), output)
    return output


def _is_called_already(module: nn.Module, frame: FrameType) -> bool:
    """Whether the call came by `__call__` after all, through a function that the module has of its own.

    Such a function (accelerate sets one) stands between the two, and no other call does.
    """
    outer = frame.f_back
    while outer is not None and outer.f_code is not _CALL and outer.f_code is not _FORWARD:
        outer = outer.f_back
    return outer is not None and outer.f_code is _CALL and outer.f_locals.get("self") is module


def _add(module_id: int, observer: Observer) -> None:
    with _LOCK:
        _OBSERVERS[module_id] = (*_OBSERVERS.get(module_id, ()), observer)


def _remove(module_id: int, observer: Observer) -> None:
    with _LOCK:
        left = tuple(other for other in _OBSERVERS[module_id] if other is not observer)
        if left:
            _OBSERVERS[module_id] = left
        else:
            del _OBSERVERS[module_id]
