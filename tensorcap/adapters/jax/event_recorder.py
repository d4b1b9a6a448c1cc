"""What compiled code hands over while it runs: events with the arrays of calls, recorded in one thread.

JAX calls back from threads of its own. A recorder numbers steps by thread, so all events are recorded in one
that is ours, and each is recorded before the code goes on: nothing is queued, and no memory is needed for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tensorcap.adapters.array_records import record_bits
from tensorcap.recording import Call, Kind, Point, Recorder, Substitution
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key

_PAUSED = "the capture was paused when it returned"
_EARLIER = "its call began before recording did"
_OWN_RESULT = "the model itself returns it, and nothing of the run comes after that"


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf of an argument or a result.

    Attributes:
        slot: Its slot.
        position: Which of the arrays of the event it is; None if it is none.
        value: What it is, if it is no array.
        reason: Why it has no value.
        is_replaceable: Whether an archived array can stand for it.
    """

    slot: str
    position: int | None = None
    value: Any = None
    reason: str = ""
    is_replaceable: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A moment of a run.

    Attributes:
        kind: A call begins or ends, or a probe is passed.
        point: The point of the module; None of a probe.
        token: Of the call, as it was traced: in a loop several calls have the same.
        is_outermost: Whether it is a call of the model, from outside.
        name: Of a probe.
        module: The site of the module that a probe lies in.
    """

    kind: Literal["begin", "end", "probe"]
    point: Point | None
    token: int = 0
    is_outermost: bool = False
    name: str = ""
    module: str = ""


class EventRecorder:
    """Records the events of runs, and chooses the arrays that go on."""

    def __init__(self, recorder: Recorder, substitution: Substitution | None) -> None:
        self._recorder = recorder
        self._substitution = substitution
        self._open: dict[int, deque[Call | None]] = defaultdict(deque)
        self._thread = ThreadPoolExecutor(1, "tensorcap")
        self._is_over = False

    def close(self) -> None:
        """Record nothing any more."""
        self._is_over = True
        self._thread.shutdown()

    def take(self, event: Event, entries: Sequence[Entry], *arrays: Any) -> None:
        """Record an event."""
        if not self._is_over:
            values = [np.asarray(array) for array in arrays]
            self._thread.submit(self._record, event, entries, values).result()

    def exchange(self, event: Event, entries: Sequence[Entry], *arrays: Any) -> list[Array]:
        """Record an event, and return the arrays that go on: the archived ones, or the run's own."""
        values = [np.asarray(array) for array in arrays]
        if self._is_over:
            return values
        return self._thread.submit(self._record_and_replace, event, entries, values).result()

    def _record(self, event: Event, entries: Sequence[Entry], arrays: Sequence[Array]) -> Call | None:
        if event.point is None:
            self._probe(event, entries, arrays)
            return None
        return (self._begin if event.kind == "begin" else self._end)(event, event.point, entries, arrays)

    def _begin(
        self, event: Event, point: Point, entries: Sequence[Entry], arrays: Sequence[Array]
    ) -> Call | None:
        call = self._recorder.enter(point, event.token, is_outermost=event.is_outermost)
        self._open[event.token].append(call)
        if call is not None:
            self._leaves(call, entries, arrays, required=event.is_outermost)
        return call

    def _end(
        self, event: Event, point: Point, entries: Sequence[Entry], arrays: Sequence[Array]
    ) -> Call | None:
        recorder = self._recorder
        calls = self._open[event.token]
        if not calls:  # under vmap, a beginning without arrays comes once for all elements
            calls.append(recorder.enter(point, event.token))
        call = calls.popleft()  # of several at once the first ends first
        recorder.leave(point, event.token)
        if call is None:
            if recorder.is_recording:
                recorder.lose(point, "output", _EARLIER)
            return None
        if recorder.is_paused:
            recorder.lose(point, "output", _PAUSED)
        elif recorder.failure is None:
            self._leaves(call, entries, arrays)
        recorder.finish(call)
        return call

    def _probe(self, event: Event, entries: Sequence[Entry], arrays: Sequence[Array]) -> None:
        recorder = self._recorder
        call = recorder.inner(event.name, "probe", in_module=False)
        if call is None:
            return
        self._leaves(call, entries, arrays)
        point = call.point
        is_seen = point.records or point.values or not point.lost  # else it would seem to be captured
        if is_seen and recorder.wants(call, "module"):
            recorder.value(call, "module", event.module)

    def _leaves(
        self, call: Call, entries: Sequence[Entry], arrays: Sequence[Array], *, required: bool = False
    ) -> None:
        recorder = self._recorder
        for entry in entries:
            if entry.reason:
                recorder.lose(call.point, entry.slot, entry.reason, call=call, required=required)
            elif entry.position is not None:
                array = np.asarray(arrays[entry.position], order="C")
                record_bits(recorder, call, entry.slot, bits_of(array), dtype_of(array), required=required)
            elif recorder.wants(call, entry.slot, required=required):
                recorder.value(call, entry.slot, entry.value, required=required)

    def _record_and_replace(self, event: Event, entries: Sequence[Entry], arrays: list[Array]) -> list[Array]:
        call = self._record(event, entries, arrays)
        substitution = self._substitution
        if call is None or substitution is None or not self._recorder.is_recording:
            return arrays
        kind: Kind = "input" if event.kind == "begin" else "output"
        records = substitution.planned(call.point.site, call.step, call.number, kind)
        if records is None or substitution.failure is not None:
            return arrays
        left = dict(records)
        for entry in entries:
            if entry.position is None and not entry.reason:
                continue
            key, record = call.key(entry.slot), left.pop(entry.slot, None)
            if record is None:
                substitution.note_absent(key)
            elif event.is_outermost and kind == "output":
                substitution.note_left(key, _OWN_RESULT)
            elif entry.position is None or not entry.is_replaceable:
                substitution.note_left(key, entry.reason, is_held=not entry.reason)
            else:
                try:
                    own = arrays[entry.position]
                    arrays[entry.position] = self._archived(substitution, key, record, own)
                except UsageError as error:  # the run goes on with its own values, and the capture raises it
                    substitution.failure = error
                    return arrays
        for slot in left:
            substitution.note_left(call.key(slot))
        return arrays

    def _archived(self, substitution: Substitution, key: Key, record: Any, own: Array) -> Array:
        """The archived array in the dtype of the run's own."""
        if record.shape != own.shape and substitution.leaves_misfit(key):
            reason = f"it has the shape {list(record.shape)}, and the model {list(own.shape)}"
            substitution.note_left(key, reason)
            return own
        bits, cast_text = substitution.read_as(key, record, dtype_of(own), own.shape)
        substitution.note_injected(key, cast_text)
        return bits.view(own.dtype).reshape(own.shape)
