"""Hooks on torch modules: each call's inputs before it, each call's outputs after it.

A hook returns nothing, save where a substitution has another value to go on with, keeps nothing, and runs no
torch function that a mode of the user would see. The values are on their way to the disk before it returns,
and before they are exchanged, so what is written in place later does not matter.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.torch.capture_gaps import COMPILED, around_forward, fused_layers, holds_compiled
from tensorcap.adapters.torch.description import tree
from tensorcap.adapters.torch.direct_calls import direct_calls
from tensorcap.adapters.torch.gradients import Gradients
from tensorcap.adapters.torch.scripted import scripted_as_written
from tensorcap.adapters.torch.substitution import Exchange
from tensorcap.adapters.torch.tapped import Tapped
from tensorcap.adapters.torch.tensor_leaves import KINDS, TensorLeaves, untraced
from tensorcap.adapters.torch.tensors import stored
from tensorcap.recording.point import Point
from tensorcap.recording.recorder import Call, Recorder
from tensorcap.recording.structure import walk
from tensorcap_formats.keys import escape, module_site

_REMOVED: Final = "its hook was removed before the block ended"
_OVERTAKEN: Final = "a hook that was added in the block came after ours and may have changed it"
_ADDED: Final = "added in the block, so without a hook"
_REPLACED: Final = "another module took its place in the block, without a hook"
_MAYBE_COMPILED: Final = "not seen to be called, or inside code that torch.compile made before"


@contextmanager
def tap(
    modules: Mapping[str, nn.Module],
    root: nn.Module,
    names: Collection[str],
    leaves: TensorLeaves,
    *,
    inputs: bool,
    gradients: Gradients | None = None,
    exchange: Exchange | None = None,
) -> Iterator[None]:
    """Hook the named modules, and the root, until the block ends, however it ends.

    What came into the model, or took our hooks away, during the block is told when it ends.
    """
    recorder = leaves.recorder
    signatures: dict[Any, list[str]] = {}
    hooked: list[tuple[nn.Module, Tapped]] = []
    layers = fused_layers(modules.values())
    held = {id(module) for parts in layers.values() for module in parts}
    points = {id(module): recorder.points[name] for name, module in modules.items() if name in names}
    with ExitStack() as hooks:
        for name, module in modules.items():
            is_root = module is root
            if name not in names and not (is_root and recorder.points[name].is_capturable):
                continue
            slots = tuple(f"input.{escape(n)}" for n in argument_names(module, signatures))
            point, with_inputs = recorder.points[name], inputs or is_root
            tapped = Tapped(point, recorder, leaves, slots, with_inputs, is_root, gradients, exchange)
            if id(module) in held:
                inner = [points[id(m)] for m in layers.get(id(module), ()) if id(m) in points]
                inner = [other for other in inner if other is not point]
                hooks.enter_context(around_forward(module, tapped, inner, _noting(recorder, point)))
                continue
            before = module.register_forward_pre_hook(_Before(tapped), with_kwargs=True)
            after = module.register_forward_hook(_After(tapped), with_kwargs=True)
            tapped.before_id, tapped.after_id = before.id, after.id
            hooks.callback(before.remove)
            hooks.callback(after.remove)
            hooked.append((module, tapped))
        hooks.enter_context(direct_calls(hooked))
        hooks.enter_context(scripted_as_written())
        try:
            yield
        finally:
            _tell_removed(hooked)
            _tell_unseen(modules, root, recorder)


def _tell_removed(hooked: Iterable[tuple[nn.Module, Tapped]]) -> None:
    for module, tapped in hooked:
        if not (tapped.before_id in module._forward_pre_hooks and tapped.after_id in module._forward_hooks):
            tapped.recorder.lose(tapped.point, "output", _REMOVED)


def _tell_unseen(modules: Mapping[str, nn.Module], root: nn.Module, recorder: Recorder) -> None:
    """Tell of the modules that no hook of ours was on, or maybe in vain."""
    known = set(map(id, modules.values()))
    for name, module in tree(root)[0].items():
        if name not in modules:
            if id(module) not in known:
                recorder.add_point(name, module_site(name), _ADDED)
        elif module is not modules[name]:
            recorder.lose(recorder.points[name], "output", _REPLACED)
    answers: dict[type, bool] = {}
    for name, module in modules.items():
        if holds_compiled(module, answers):
            prefix = f"{name}." if name else ""
            for inner, point in recorder.points.items():
                is_silent = not (point.calls or point.lost or point.reason)
                if inner and inner.startswith(prefix) and is_silent:
                    recorder.lose(point, "output", _MAYBE_COMPILED)


class _Hook:
    """A hook of ours. A copy of the model, and a pickle, get one in its place that does nothing."""

    def __init__(self, tapped: Tapped) -> None:
        self._tapped = tapped

    def __reduce__(self) -> tuple[Any, ...]:
        # takes any arguments and returns None; a pickle that names nothing of ours can be read anywhere
        return getattr, (nullcontext(), "__exit__")


class _Before(_Hook):
    def __init__(self, tapped: Tapped) -> None:
        super().__init__(tapped)
        self._note_compiled = _noting(tapped.recorder, tapped.point)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            self._note_compiled()
            return None
        tapped = self._tapped
        token = id(sys._getframe(1))
        call = tapped.begin(module, token)
        if call is None:
            tapped.follow_inputs(token, args, kwargs)
            return None
        hooks: Any = module._forward_hooks
        if next(reversed(hooks), None) != tapped.after_id and not _is_last(hooks, tapped.after_id):
            hooks[tapped.after_id] = hooks.pop(tapped.after_id)  # in time for this call
        if tapped.inputs or tapped.exchange is not None:
            hooks = module._forward_pre_hooks
            if next(reversed(hooks), None) != tapped.before_id and not _is_last(hooks, tapped.before_id):
                hooks[tapped.before_id] = hooks.pop(tapped.before_id)  # in time for the next call
                tapped.recorder.lose(tapped.point, "input", _OVERTAKEN, required=tapped.is_root)
            given = tapped.given(call, args, kwargs)
            return None if tapped.exchange is None else given
        return None


class _After(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return None
        tapped = self._tapped
        recorder, point = tapped.recorder, tapped.point
        token = id(sys._getframe(1))
        call = recorder.leave(point, token)
        if call is None:
            tapped.follow_output(token, output)
        elif recorder.is_recording:
            hooks: Any = module._forward_hooks
            if next(reversed(hooks), None) != tapped.after_id and not _is_last(hooks, tapped.after_id):
                recorder.lose(point, "output", _OVERTAKEN)
        result = tapped.end(call, output)
        return None if result is output else result


def _is_last(hooks: Any, own: int) -> bool:
    """Whether no hook of somebody else comes after ours, or ours is not there."""
    if own not in hooks:
        return True
    for key in reversed(hooks):
        if key == own:
            return True
        if not isinstance(hooks[key], _Hook):
            return False
    return True


def record_inputs(inputs: Any, recorder: Recorder) -> None:
    """Record the tensors that a run is given as `given.NAME` of the root, before its first call."""
    call = Call(recorder.points[""], 0, 0)
    with torch.no_grad(), untraced():
        for leaf in walk(inputs, KINDS):
            if leaf.is_tensor:
                found = stored(leaf.value)
                slot = f"given.{escape(leaf.name)}"
                recorder.tensor(call, slot, found.bits, found.dtype, found.shape, required=True)


def argument_names(module: nn.Module, known: dict[Any, list[str]]) -> list[str]:
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


def _noting(recorder: Recorder, point: Point) -> Callable[[], None]:
    """A function that the compiler runs while it builds a graph, and leaves out of the graph."""

    def note() -> None:
        recorder.lose(point, "output", COMPILED)

    # What torch.compiler.assume_constant_result does, without importing the compiler
    note._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return note
