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
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters._torch.description import tree
from tensorcap.adapters._torch.direct import direct_calls, is_call_of
from tensorcap.adapters._torch.gradients import Gradients
from tensorcap.adapters._torch.leaves import KINDS, Leaves, unseen
from tensorcap.adapters._torch.obstacles import COMPILED, around_forward, fused_layers, holds_compiled
from tensorcap.adapters._torch.phase import phase_of
from tensorcap.adapters._torch.scripted import scripted_as_written
from tensorcap.adapters._torch.substituting import Exchange
from tensorcap.adapters._torch.tensors import stored
from tensorcap.recording.point import Point
from tensorcap.recording.recorder import Call, Recorder
from tensorcap.recording.structure import walk
from tensorcap_formats.keys import escape, module_site

_TRACED: Final = "under torch.jit.trace"
_REMOVED: Final = "its hook was removed before the block ended"
_OVERTAKEN: Final = "a hook that was added in the block came after ours and may have changed it"
_ADDED: Final = "added in the block, so without a hook"
_REPLACED: Final = "another module took its place in the block, without a hook"
_MAYBE_COMPILED: Final = "not seen to be called, or inside code that torch.compile made before"
_PAUSED: Final = "the capture was paused when it returned"
_BEGUN_BEFORE: Final = "its call began before recording did"


@contextmanager
def tap(
    modules: Mapping[str, nn.Module],
    root: nn.Module,
    names: Collection[str],
    leaves: Leaves,
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


@dataclass(slots=True)
class Tapped:
    """What the two hooks of one module have in common; holds no module and, between calls, no tensor.

    Attributes:
        point: Where it is recorded.
        recorder: By what.
        leaves: What takes its values.
        slots: Of its positional arguments.
        inputs: Whether they are recorded.
        is_root: Whether it is the model itself.
        gradients: What follows its values into a backward pass.
        exchange: What puts other values in the place of its own.
        before_id: The key of our hook among those before a call.
        after_id: The key of our hook among those after a call.
        keyword_slots: Of the keywords that were seen.
    """

    point: Point
    recorder: Recorder
    leaves: Leaves
    slots: tuple[str, ...]
    inputs: bool
    is_root: bool
    gradients: Gradients | None = None
    exchange: Exchange | None = None
    before_id: int = -1
    after_id: int = -1
    keyword_slots: dict[str, str] = field(default_factory=dict)

    def begin(self, module: nn.Module, token: int) -> Call | None:
        """A call begins, by the module's `__call__` or by its `forward`.

        Args:
            module: The module.
            token: As long as the call lasts, that of no other in this thread.

        Returns:
            The call, or None if nothing of it is to be recorded.
        """
        recorder, point = self.recorder, self.point
        if self.gradients is not None:
            self.gradients.end(token)  # of a call that failed
        if torch._C._get_tracing_state() is not None:
            recorder.lose(point, "output", _TRACED)
            return None
        if torch._C._current_graph_task_id() != -1:
            recorder.recompute(point, token)
            if self.gradients is not None:
                self.gradients.repeat(point, token)
            return None
        is_outermost = self.is_root and not (recorder.is_under_way(point) and _is_nested(module))
        call = recorder.enter(point, token, is_outermost=is_outermost)
        if call is not None and is_outermost:
            autocast = _autocast_dtype()
            if autocast is not None:
                recorder.facts["compute_dtype"] = autocast
        if call is not None and self.gradients is not None:
            self.gradients.begin(call)
        return call

    def record_inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record what a call is given."""
        required = self.is_root
        with unseen():
            if required and not call.number:  # a nested call is of the same step
                names = [slot.removeprefix("input.") for slot in self.slots]
                self.recorder.note_phase(call.step, phase_of(names, args, kwargs))
            for slot, value in self._named(args, kwargs):
                self.leaves.record(call, slot, value, required=required)
        self.follow_inputs(call.token, args, kwargs)

    def given(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record what a call is given, and say what it goes on with."""
        if self.inputs:
            self.record_inputs(call, args, kwargs)
        if self.exchange is None:
            return args, kwargs
        slots = [slot for slot, _ in self._named(args, kwargs)]
        with unseen():
            values = self.exchange.values(call, "input", slots, [*args, *kwargs.values()])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def follow_inputs(self, token: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow what the call of a token is given, which may repeat another in a backward pass."""
        if self.gradients is not None and self.gradients.inputs:
            with unseen():
                for slot, value in self._named(args, kwargs):
                    self.gradients.follow(token, slot, value)

    def follow_output(self, token: int, output: object) -> None:
        """Follow what the call of a token returns."""
        if self.gradients is not None:
            with unseen():
                self.gradients.follow(token, "output", output)
            self.gradients.end(token)

    def end(self, call: Call | None, output: Any) -> Any:
        """The call that `leave` found returns; record what it returns, and say what its caller gets."""
        recorder = self.recorder
        if call is None:
            if recorder.is_recording and torch._C._current_graph_task_id() == -1:
                recorder.lose(self.point, "output", _BEGUN_BEFORE)
            return output
        if recorder.is_paused:
            recorder.lose(self.point, "output", _PAUSED)
        elif recorder.failure is None:
            with unseen():
                self.leaves.record(call, "output", output, required=False)
            self.follow_output(call.token, output)
            if self.exchange is not None:
                with unseen():
                    output = self.exchange.values(call, "output", ["output"], [output])[0]
        recorder.finish(call)
        return output

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """The arguments of a call by slot."""
        slots = self.slots
        yield from zip(slots, args, strict=False)
        for i, value in enumerate(args[len(slots) :]):
            yield f"input.args.{i}", value
        for name, value in kwargs.items():
            yield self._keyword_slot(name), value

    def _keyword_slot(self, name: str) -> str:
        slot = self.keyword_slots.get(name)
        if slot is None:
            slot = self.keyword_slots[name] = f"input.{escape(name)}"
        return slot


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
    with torch.no_grad(), unseen():
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


def _is_nested(module: nn.Module) -> bool:
    """Whether the module's call, from whose hook this is asked, is within another call of it.

    The stack of frames is the only one that no exception can leave wrong.
    """
    calls = 0
    frame = inspect.currentframe()
    while frame is not None and calls < 2:
        if is_call_of(frame, module):
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
        recorder.lose(point, "output", COMPILED)

    # What torch.compiler.assume_constant_result does, without importing the compiler
    note._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return note
