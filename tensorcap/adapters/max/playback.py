"""One run of an instrumented graph, recorded by the trace events of its graph."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap.adapters.max.engine import InferenceSession, load_buffer
from tensorcap.adapters.max.tensors import stored
from tensorcap.adapters.max.trace_events import (
    EnterModule,
    EnterProbe,
    Event,
    GraphTensor,
    Leave,
    LostValue,
    PlainValue,
    PrintedTensor,
)
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.recording import Absence, Call, NothingLeftError, Recorder
from tensorcap_formats.keys import PROBES, ROOT_SITE, inner_site, module_site

_NOT_RUN: Final = "the graph did not run what computes it"


def play_back(
    events: Sequence[Event],
    model_inputs: Sequence[Any],
    graph_inputs: Sequence[Any],
    taps: Sequence[Any],
    recorder: Recorder,
    names: Collection[str],
    *,
    with_inputs: bool,
    printed: Callable[[str], Any],
) -> None:
    """Report the calls of a run to a recorder, in the order in which the model was traced.

    Args:
        events: The trace events of the graph.
        model_inputs: The arrays that the model was given, before any was replaced.
        graph_inputs: The arrays that its graph was given.
        taps: The outputs of the graph behind the model's own.
        recorder: Records the calls.
        names: The modules whose calls are recorded; the model's own inputs always are.
        with_inputs: Whether the arguments of modules are recorded.
        printed: Returns the tensor that the graph printed with a label; None if it printed none.
    """
    stack: list[tuple[Call | None, bool]] = []  # and whether it is of the model itself
    for token, event in enumerate(events, 1):
        if isinstance(event, EnterModule):
            is_root = not event.name
            call = None
            if is_root or event.name in names:
                call = recorder.enter(recorder.points[event.name], token, is_outermost=is_root)
            stack.append((call, is_root))
        elif isinstance(event, EnterProbe):
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
            if call is None or (is_input and not (with_inputs or is_root)):
                continue
            required = is_root and is_input
            if isinstance(event, LostValue):
                absence: Absence | None = "held" if event.is_held else None
                recorder.lose(
                    call.point, event.slot, event.reason, call=call, required=required, absence=absence
                )
            elif isinstance(event, PlainValue):
                if recorder.wants(call, event.slot, required=required):
                    recorder.value(call, event.slot, event.value, required=required)
            elif isinstance(event, PrintedTensor):
                array = printed(event.label)
                if array is None:
                    recorder.lose(call.point, event.slot, _NOT_RUN, call=call, required=required)
                else:
                    record_array(recorder, call, event.slot, array, required=required)
            elif isinstance(event, GraphTensor):
                arrays = taps if not event.is_input else model_inputs if is_root else graph_inputs
                record_array(recorder, call, event.slot, arrays[event.position], required=required)


def record_array(recorder: Recorder, call: Call, slot: str, array: Any, *, required: bool = False) -> None:
    """Record one array of any framework, if it is wanted."""
    if not recorder.wants(call, slot, required=required):
        return
    try:
        bits, dtype = stored(array)
        if recorder.has_slices and not required:
            part = recorder.part(call, slot, bits.shape)
            bits = bits if part is None else np.array(bits[part], order="C")
    except (NotCapturableError, NothingLeftError) as error:
        recorder.lose(call.point, slot, str(error), call=call, required=required)
        return
    recorder.tensor(call, slot, bits, dtype, bits.shape, required=required)


def symbolic_shapes(events: Sequence[Event]) -> Iterator[tuple[str, list[str]]]:
    """The shapes that are unknown before a run, by `SITE/SLOT`, with dimensions as MAX names them."""
    path: list[str] = []
    for event in events:
        if isinstance(event, EnterModule):
            path.append(module_site(event.name))
        elif isinstance(event, EnterProbe):
            path.append(inner_site(PROBES, event.name))
        elif isinstance(event, Leave) and path:
            path.pop()
        elif isinstance(event, GraphTensor) and path and not all(dim.isdigit() for dim in event.dims):
            yield f"{path[-1]}/{event.slot}", list(event.dims)


@contextmanager
def capture_prints(session: InferenceSession, events: Sequence[Event]) -> Iterator[Callable[[str], Any]]:
    """Have the graphs of a session print into files in the block; afterwards they print on the screen.

    Each run has a folder of its own, since the next print with a label replaces the last.

    Args:
        session: The session.
        events: The trace events of the graph that is run; if it prints nothing, nothing is changed.

    Yields:
        A function that returns the tensor printed with a label, within the block; None if there is none.
    """
    if not any(isinstance(event, PrintedTensor) for event in events):
        yield lambda label: None
        return
    with tempfile.TemporaryDirectory(prefix="tensorcap-") as folder:
        session.set_debug_print_options("BINARY_MAX_CHECKPOINT", output_directory=folder)
        try:
            yield lambda label: _read_printed(Path(folder) / f"{label}.max")
        finally:
            session.set_debug_print_options("COMPACT")


def _read_printed(path: Path) -> Any:
    return load_buffer(path) if path.exists() else None
