"""What a graph prints, read back: a folder for each run, since a label's next print replaces its last."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorcap.adapters.max.engine import InferenceSession, load_buffer
from tensorcap.adapters.max.trace_events import Event, Printed


@contextmanager
def printing(session: InferenceSession, events: Sequence[Event]) -> Iterator[Callable[[str], Any]]:
    """Have what a session's graphs print in the block go to files; on the screen it goes afterwards.

    Args:
        session: The session.
        events: What happens in the graph that is run; if nothing of it is printed, nothing is changed.

    Returns:
        What gives, within the block, the tensor that was printed with a label; None if there is none.
    """
    if not any(isinstance(event, Printed) for event in events):
        yield lambda label: None
        return
    with tempfile.TemporaryDirectory(prefix="tensorcap-") as folder:
        session.set_debug_print_options("BINARY_MAX_CHECKPOINT", output_directory=folder)
        try:
            yield lambda label: _read(Path(folder) / f"{label}.max")
        finally:
            session.set_debug_print_options("COMPACT")


def _read(path: Path) -> Any:
    return load_buffer(path) if path.exists() else None
