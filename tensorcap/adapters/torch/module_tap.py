"""The tap of one torch module: records the arguments and results of its calls, and may replace them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.torch.direct_calls import is_call_of
from tensorcap.adapters.torch.gradients import Gradients
from tensorcap.adapters.torch.injector import Copies, inject, write_back
from tensorcap.adapters.torch.phase import phase_of
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves, untraced
from tensorcap.recording import Call, Point, Recorder, Substitution
from tensorcap_formats.keys import escape


@dataclass(slots=True)
class ModuleTap:
    """The state that the two hooks of one module share; holds no module and, between calls, no tensor.

    Attributes:
        point: The point of the module.
        recorder: The recorder of the capture.
        leaves: Takes the values.
        slots: The slots of its positional arguments.
        inputs: Whether arguments are recorded.
        is_root: Whether it is the model itself.
        gradients: Follows its values into a backward pass, if gradients are recorded.
        substitution: The archived tensors that take the place of its values, if there are any.
        before_id: The key of our hook among those before a call.
        after_id: The key of our hook among those after a call.
        keyword_slots: The slots of the keywords that were seen.
        copies: Of calls under way, by token: what stands in the place of their arguments.
    """

    point: Point
    recorder: Recorder
    leaves: TensorLeaves
    slots: tuple[str, ...]
    inputs: bool
    is_root: bool
    gradients: Gradients | None = None
    substitution: Substitution | None = None
    before_id: int = -1
    after_id: int = -1
    keyword_slots: dict[str, str] = field(default_factory=dict)
    copies: dict[int, Copies] = field(default_factory=dict)

    def begin(self, module: nn.Module, token: int) -> Call | None:
        """Begin a call, by the module's `__call__` or by its `forward`.

        Args:
            module: The module.
            token: Names the call; no other under way in this thread has the same.

        Returns:
            The call, or None if nothing of it is to be recorded.
        """
        recorder, point = self.recorder, self.point
        if self.gradients is not None:
            self.gradients.end(token)  # of a call that failed
        if torch._C._get_tracing_state() is not None:
            recorder.lose(point, "output", "under torch.jit.trace")
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
        """Record the arguments of a call."""
        required = self.is_root
        with untraced():
            if required and not call.number:  # a nested call is of the same step
                names = [slot.removeprefix("input.") for slot in self.slots]
                self.recorder.note_phase(call.step, phase_of(names, args, kwargs))
            for slot, value in self._named(args, kwargs):
                self.leaves.record(call, slot, value, required=required)
        self.follow_inputs(call.token, args, kwargs)

    def process_inputs(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record the arguments of a call, and return those that it goes on with."""
        if self.inputs:
            self.record_inputs(call, args, kwargs)
        if self.substitution is None:
            return args, kwargs
        slots = [slot for slot, _ in self._named(args, kwargs)]
        with untraced():
            copies = self.copies[call.token] = []
            values = inject(self.substitution, call, "input", slots, [*args, *kwargs.values()], copies=copies)
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def follow_inputs(self, token: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow the gradients of a call's arguments; in a backward pass it may repeat an earlier call."""
        if self.gradients is not None and self.gradients.inputs:
            with untraced():
                for slot, value in self._named(args, kwargs):
                    self.gradients.follow(token, slot, value)

    def follow_output(self, token: int, output: object) -> None:
        """Follow the gradients of a call's result."""
        if self.gradients is not None:
            with untraced():
                self.gradients.follow(token, "output", output)
            self.gradients.end(token)

    def end(self, call: Call | None, output: Any) -> Any:
        """Record the result of a call that `Recorder.leave` returned, and return what its caller gets."""
        recorder = self.recorder
        if call is None:
            if recorder.is_recording and torch._C._current_graph_task_id() == -1:
                recorder.lose(self.point, "output", "its call began before recording did")
            return output
        if recorder.is_paused:
            recorder.lose(self.point, "output", "the capture was paused when it returned")
        elif recorder.failure is None:
            with untraced():
                self.leaves.record(call, "output", output, required=False)
            self.follow_output(call.token, output)
            write_back(self.copies.pop(call.token, []))
            if self.substitution is not None:
                with untraced():
                    (output,) = inject(self.substitution, call, "output", ["output"], [output])
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


def _is_nested(module: nn.Module) -> bool:
    """Whether the module's call, in whose hook this runs, is within another call of it.

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
