"""One run of a graph that tells of itself, recorded by the notes that were taken when it was made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np

from tensorcap.adapters.max.engine import NoBitsError, bits
from tensorcap.adapters.max.trace_events import Enter, Event, Leave, Lost, Passed, Plain, Printed, Tensor
from tensorcap.recording.record_filter import NothingLeftError
from tensorcap.recording.recorder import Call, Recorder
from tensorcap_formats.keys import PROBES, ROOT_SITE, inner_site, module_site

_NOT_RUN: Final = "the graph did not run what computes it"


def play(
    events: Sequence[Event],
    given: Sequence[Any],
    fed: Sequence[Any],
    found: Sequence[Any],
    recorder: Recorder,
    names: Collection[str],
    *,
    inputs: bool,
    printed: Callable[[str], Any] = lambda _: None,
) -> None:
    """Tell a recorder what happened in a run.

    Args:
        events: What was noted when the graph was made.
        given: What the model was given, before anything was exchanged.
        fed: What its graph was.
        found: What it gave out besides its own outputs.
        recorder: Records.
        names: Of the modules whose calls are recorded; the model's own inputs are in any case.
        inputs: Whether the arguments of modules are.
        printed: Gives what the graph printed with a label; None if it printed nothing with that.
    """
    stack: list[tuple[Call | None, bool]] = []  # and whether it is of the model itself
    for token, event in enumerate(events, 1):
        if isinstance(event, Enter):
            is_root = not event.name
            call = None
            if is_root or event.name in names:
                call = recorder.enter(recorder.points[event.name], token, is_outermost=is_root)
            stack.append((call, is_root))
        elif isinstance(event, Passed):
            call = recorder.inner(event.name, "probe", in_module=False)
            if call is not None and recorder.wants(call, "module"):
                recorder.value(call, "module", module_site(event.module) if event.module else ROOT_SITE)
            stack.append((call, False))
        elif isinstance(event, Leave):
            call, _ = stack.pop()
            if call is not None and call.token and recorder.leave(call.point, call.token):
                recorder.finish(call)
        else:
            call, is_root = stack[-1]
            is_input = event.slot.partition(".")[0] == "input"
            if call is None or (is_input and not (inputs or is_root)):
                continue
            required = is_root and is_input
            if isinstance(event, Lost):
                recorder.lose(call.point, event.slot, event.reason, call=call, required=required)
            elif isinstance(event, Plain):
                if recorder.wants(call, event.slot, required=required):
                    recorder.value(call, event.slot, event.value, required=required)
            elif isinstance(event, Printed):
                array = printed(event.label)
                if array is None:
                    recorder.lose(call.point, event.slot, _NOT_RUN, call=call, required=required)
                else:
                    record(recorder, call, event.slot, array, required=required)
            elif isinstance(event, Tensor):
                source = found if not event.is_input else given if is_root else fed
                record(recorder, call, event.slot, source[event.at], required=required)


def record(recorder: Recorder, call: Call, slot: str, array: Any, *, required: bool = False) -> None:
    """Record one array of any framework, if it is wanted."""
    if not recorder.wants(call, slot, required=required):
        return
    try:
        stored, dtype = bits(array)
        if recorder.has_slices and not required:
            part = recorder.part(call, slot, stored.shape)
            stored = stored if part is None else np.array(stored[part], order="C")
    except (NoBitsError, NothingLeftError) as error:
        recorder.lose(call.point, slot, str(error), call=call, required=required)
        return
    recorder.tensor(call, slot, stored, dtype, stored.shape, required=required)


def symbolic_shapes(events: Sequence[Event]) -> Iterator[tuple[str, list[str]]]:
    """Dimensions as MAX names them, by `SITE/SLOT`, of shapes that are not known before a run."""
    path: list[str] = []
    for event in events:
        if isinstance(event, Enter):
            path.append(module_site(event.name))
        elif isinstance(event, Passed):
            path.append(inner_site(PROBES, event.name))
        elif isinstance(event, Leave) and path:
            path.pop()
        elif isinstance(event, Tensor) and path and not all(dim.isdigit() for dim in event.dims):
            yield f"{path[-1]}/{event.slot}", list(event.dims)
