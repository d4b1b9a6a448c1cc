"""Hooks on torch modules: each call's inputs before it, each call's outputs after it.

A hook returns nothing, keeps nothing, and runs no torch function that a mode of the user would see. The
values are on their way to the disk before it returns, so what is written in place later does not matter.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tensorcap.adapters._torch_tensors import NotCapturableError, stored
from tensorcap.recorder import Call, Point, Recorder
from tensorcap.structure import Kinds, walk
from tensorcap_formats.errors import WriteError
from tensorcap_formats.keys import escape

KINDS: Final = Kinds(
    tensors=(torch.Tensor, np.ndarray),
    opaque=(nn.Module,),
    texts=(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_SIMPLE: Final = (type(None), bool, int, str)
_COMPILED: Final = "inside a compiled graph (torch.compile)"
_TRACED: Final = "under torch.jit.trace"


@contextmanager
def tap(
    modules: Mapping[str, nn.Module],
    root: nn.Module,
    names: Collection[str],
    recorder: Recorder,
    *,
    inputs: bool,
) -> Iterator[None]:
    """Hook the named modules, and the root, until the block ends, however it ends."""
    signatures: dict[Any, list[str]] = {}
    with ExitStack() as hooks:
        for name, module in modules.items():
            is_root = module is root
            if name not in names and not (is_root and recorder.points[name].is_capturable):
                continue
            arguments = _argument_names(module, signatures)
            hook = _Hook(
                arguments, recorder.points[name], recorder, inputs=inputs or is_root, is_root=is_root
            )
            hooks.callback(module.register_forward_pre_hook(hook.before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(hook.after, with_kwargs=True).remove)
        yield


class _Hook:
    """The two hooks of one module; holds no module and, between calls, no tensor."""

    def __init__(
        self, arguments: list[str], point: Point, recorder: Recorder, *, inputs: bool, is_root: bool
    ) -> None:
        self._point = point
        self._recorder = recorder
        self._inputs = inputs
        self._is_root = is_root
        self._slots = tuple(f"input.{escape(name)}" for name in arguments)
        self._keyword_slots: dict[str, str] = {}
        self._note_compiled = _noting(recorder, point)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._note_compiled()
            return
        if torch._C._get_tracing_state() is not None:
            self._recorder.lose(self._point, "output", _TRACED)
            return
        recorder, point = self._recorder, self._point
        is_outermost = self._is_root and not (recorder.is_under_way(point) and _is_nested(module))
        call = recorder.enter(point, id(kwargs), ends_step=is_outermost)
        if call is None:
            return
        if is_outermost:
            autocast = _autocast_dtype()
            if autocast is not None:
                recorder.facts["compute_dtype"] = autocast
        if self._inputs:
            with _unseen():
                self._record_inputs(call, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        call = self._recorder.leave(self._point, id(kwargs))
        if call is None:
            return
        if not self._recorder.is_paused and self._recorder.failure is None:
            with _unseen():
                self._record(call, "output", output, required=False)
        self._recorder.finish(call)

    def _record_inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        required = self._is_root
        for slot, value in zip(self._slots, args, strict=False):
            self._record(call, slot, value, required=required)
        for i, value in enumerate(args[len(self._slots) :]):
            self._record(call, f"input.args.{i}", value, required=required)
        for name, value in kwargs.items():
            self._record(call, self._keyword_slot(name), value, required=required)

    def _keyword_slot(self, name: str) -> str:
        slot = self._keyword_slots.get(name)
        if slot is None:
            slot = self._keyword_slots[name] = f"input.{escape(name)}"
        return slot

    def _record(self, call: Call, slot: str, value: object, *, required: bool) -> None:
        """Record all leaves of a value; trouble with it must not become trouble of the model."""
        try:
            if type(value) is torch.Tensor:
                self._record_tensor(call, slot, value, required=required)
            elif type(value) in _SIMPLE:
                self._recorder.value(call, slot, value, required=required)
            else:
                for leaf in walk(value, KINDS):
                    name = f"{slot}.{escape(leaf.name)}" if leaf.name else slot
                    if leaf.is_tensor:
                        self._record_tensor(call, name, leaf.value, required=required)
                    elif leaf.reason:
                        self._recorder.lose(call.point, name, leaf.reason)
                    else:
                        self._recorder.value(call, name, leaf.value, required=required)
        except WriteError:
            raise
        except Exception as error:
            self._recorder.lose(call.point, slot, f"{type(error).__name__}: {error}")

    def _record_tensor(self, call: Call, slot: str, tensor: Any, *, required: bool) -> None:
        try:
            found = stored(tensor)
        except NotCapturableError as error:
            self._recorder.lose(call.point, slot, str(error))
            return
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            self._recorder.lose(call.point, slot, f"{type(error).__name__}: {reason}")
            return
        self._recorder.tensor(call, slot, found.bits, found.dtype, found.shape, required=required)


def record_inputs(inputs: Any, recorder: Recorder) -> None:
    """Record the tensors that a run is given as `given.NAME` of the root, before its first call."""
    call = Call(recorder.points[""], 0, 0, 0, ends_step=False)
    with torch.no_grad(), _unseen():
        for leaf in walk(inputs, KINDS):
            if leaf.is_tensor:
                found = stored(leaf.value)
                slot = f"given.{escape(leaf.name)}"
                recorder.tensor(call, slot, found.bits, found.dtype, found.shape, required=True)


def _argument_names(module: nn.Module, known: dict[Any, list[str]]) -> list[str]:
    """Names of the positional parameters of `forward`; none where it is not written in Python.

    Args:
        module: The module.
        known: Names by function, of the modules seen before: a model has few classes and many modules.
    """
    forward = getattr(module, "_orig_mod", module).forward
    function = getattr(forward, "__func__", forward)
    names = known.get(function)
    if names is None:
        try:
            parameters = inspect.signature(forward).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = known[function] = [p.name for p in parameters if p.kind in positional]
    return names


def _is_nested(module: nn.Module) -> bool:
    """Whether the module's call, from whose hook this is asked, is within another call of it.

    The stack of frames is the only one that no exception can leave wrong.
    """
    code = nn.Module._call_impl.__code__
    calls = 0
    frame = inspect.currentframe()
    while frame is not None and calls < 2:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls == 2


def _autocast_dtype() -> str | None:
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def _noting(recorder: Recorder, point: Point) -> Callable[[], None]:
    """A function that the compiler runs while it builds a graph, and leaves out of the graph."""

    def note() -> None:
        recorder.lose(point, "output", _COMPILED)

    # What torch.compiler.assume_constant_result does, without importing the compiler
    note._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return note


def _unseen() -> AbstractContextManager[Any]:
    """Keep what a hook does out of the sight of modes that the user has switched on."""
    if not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack():
        return _NOTHING
    stack = ExitStack()
    if torch._C._len_torch_dispatch_stack() and "torch.utils._python_dispatch" in sys.modules:
        from torch.utils._python_dispatch import _disable_current_modes

        stack.enter_context(_disable_current_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    return stack


_NOTHING: Final = nullcontext()
