"""Points within the code of torch modules: watched functions and probes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from tensorcap.adapters.torch.capture_gaps import COMPILED, is_compiled, run_while_compiling
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves, untraced
from tensorcap.recording import Call, collect_probes, find_watched, watch_functions
from tensorcap.recording.point import Kind
from tensorcap_formats.keys import PROBES, ROOT_SITE, inner_site

_SLOTS: Final = {"function": "return", "probe": "value"}  # the slot that is lost with a whole call


@contextmanager
def tap_points(watch: Iterable[str], leaves: TensorLeaves, *, eager: bool) -> Iterator[None]:
    """Record the values of watched functions and probes until the block ends.

    Args:
        watch: Functions and their variables, as in `CaptureOptions`.
        leaves: Takes the values.
        eager: Whether what is compiled runs as plain code.

    Raises:
        UsageError: A function to watch is not there, or cannot be watched.
    """
    watched = find_watched(watch, partial(_refusal, eager=eager))
    receiver = _PointReceiver(leaves)
    with watch_functions(watched, receiver), collect_probes(receiver):
        try:
            yield
        finally:
            receiver.is_over = True


class _PointReceiver:
    """Takes the values of functions and probes for one capture (`tensorcap.recording.probes.ValueReceiver`).

    Attributes:
        recorder: The recorder of the capture.
        is_over: Whether the capture is over; a call that is under way may outlive it.
    """

    def __init__(self, leaves: TensorLeaves) -> None:
        self.recorder = leaves.recorder
        self._leaves = leaves
        self.is_over = False
        self._note_compiled = self._compile_note()

    @property
    def is_under_way(self) -> bool:
        """Whether a call of the capture's model is under way in this thread, or being compiled."""
        return torch.compiler.is_compiling() or self.recorder.current is not None

    def begin(self, name: str, kind: Kind, *, is_alone: bool) -> Call | None:
        """Number a call, if its values can be recorded now."""
        if torch.compiler.is_compiling():
            self._note_compiled(name, kind)
            return None
        recorder = self.recorder
        if torch._C._get_tracing_state() is not None:
            self._lose(name, kind, "under torch.jit.trace")
            return None
        if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            # a backward pass that computes anew; one of the user's own runs without gradients
            self._recompute(name, kind)
            return None
        if not is_alone and recorder.current is None:
            self._lose(name, kind, "outside of a call of a model, while several captures were under way")
            return None
        return recorder.inner(name, kind, in_module=kind == "function")

    def take(self, call: Call, slot: str, value: object, *, only_tensors: bool = False) -> None:
        """Record a value, unless the capture is over or paused."""
        recorder = self.recorder
        if self.is_over:
            return
        if recorder.is_paused:
            recorder.lose(call.point, slot, "the capture was paused then", call=call)
        elif recorder.is_recording:
            with untraced():
                self._leaves.record(call, slot, value, only_tensors=only_tensors)

    def probed(self, name: str, value: object, *, is_alone: bool) -> None:
        """Record the value of a probe, and the module that it lies in."""
        call = self.begin(name, "probe", is_alone=is_alone)
        if call is not None:
            outer, point = self.recorder.current, call.point
            self.take(call, "value", value)
            if point.records or point.values or not point.lost:  # else it would seem to be captured
                self.take(call, "module", outer.point.site if outer else ROOT_SITE)

    def _lose(self, name: str, kind: Kind, reason: str) -> None:
        if self.recorder.is_recording:
            point = self.recorder.place(ROOT_SITE if kind == "function" else PROBES, name, kind)
            self.recorder.lose(point, _SLOTS[kind], reason)

    def _recompute(self, name: str, kind: Kind) -> None:
        """Count a call that computes anew; of a function, at the site where it was called first."""
        recorder = self.recorder
        if recorder.is_recording:
            end = inner_site("" if kind == "function" else PROBES, name)
            points = (p for p in recorder.points.values() if p.kind == kind and p.site.endswith(end))
            point = next(points, None)
            if point is not None:
                point.recomputed += 1

    def _compile_note(self) -> Callable[[str, Kind], None]:
        """Make a function that reports a point whose calls are compiled."""

        def note(name: str, kind: Kind) -> None:
            self._lose(name, kind, COMPILED)

        return run_while_compiling(note)


def _refusal(target: object, *, eager: bool) -> str:
    """Why a function, or what is around it, cannot be watched; empty if it can."""
    if not eager and is_compiled(target):
        return "compiled (torch.compile; --eager runs it as plain code)"
    if isinstance(target, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        return "scripted (torch.jit)"
    return ""
