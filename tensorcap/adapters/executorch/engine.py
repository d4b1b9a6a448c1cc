"""ExecuTorch's packages: the runtime for Python, ETRecord and the Inspector; nothing else imports them."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import executorch  # noqa: F401 # the framework's own name, by which its absence is reported
import torch

from tensorcap_formats.errors import CaptureError, NotAnArchiveError, UsageError, abbreviate, missing_package

_METHOD: Final = "forward"
_SLACK_BYTES: Final = 1 << 20  # of the buffer for values, beside these


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings and logs of the tools."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


VERSION: Final = version("executorch")
with quiet():
    try:
        from executorch.devtools import Inspector
        from executorch.devtools.etrecord import parse_etrecord
        from executorch.extension.pybindings import portable_lib
    except ModuleNotFoundError as error:  # of a package that its own metadata ask for
        raise missing_package("capturing an executorch model", error.name or "", extra="executorch") from None


@dataclass(frozen=True)
class Event:
    """An operator that a run called.

    Attributes:
        name: As the runtime calls it, `native_call_addmm.out`.
        handles: Debug handles of the nodes that it computes.
        delegate: The backend that computed it; "" for a portable kernel.
        results: What it returned.
    """

    name: str
    handles: tuple[int, ...]
    delegate: str
    results: tuple[Any, ...]


def read_record(path: Path) -> Any:
    """Read an ETRecord; returns the exported program in the edge dialect.

    Raises:
        UsageError: There is none at the path.
        NotAnArchiveError: It is no ETRecord, or has no such program.
    """
    if not path.is_file():
        raise UsageError(
            f"{path}: there is no such file, expected the ETRecord of the program",
            hint="executorch.devtools.generate_etrecord writes it, and --etrecord names it.",
        )
    try:
        with quiet():
            record = parse_etrecord(str(path))
    except Exception as error:  # of any kind: it unpacks a zip file of serialized programs
        reason = abbreviate(str(error).strip().partition("\n")[0], 200)
        raise NotAnArchiveError(f"{path}: is no ETRecord of ExecuTorch {VERSION}: {reason}") from None
    program = record.edge_dialect_program
    if hasattr(program, "exported_program"):
        program = program.exported_program()
    if program is None:
        raise NotAnArchiveError(f"{path}: has no program in the edge dialect, expected one")
    return program


def execute(
    path: Path,
    inputs: Sequence[torch.Tensor],
    *,
    record: Path | None = None,
    value_bytes: int = 0,
) -> tuple[list[Any], list[Event]]:
    """Run a program.

    Args:
        path: Of the program.
        inputs: Its inputs.
        record: Its ETRecord; None for a run without events.
        value_bytes: How many bytes all values take that events keep.

    Returns:
        The outputs, and the events in their order.

    Raises:
        CaptureError: The runtime cannot load or run it.
    """
    try:
        with quiet():
            options = {"enable_etdump": True, "debug_buffer_size": 2 * value_bytes + _SLACK_BYTES}
            module = portable_lib._load_for_executorch(str(path), **({} if record is None else options))
            outputs = [
                value.clone() if isinstance(value, torch.Tensor) else value
                for value in module.run_method(_METHOD, tuple(inputs))
            ]
            return outputs, [] if record is None else _events(module, record)
    except RuntimeError as error:
        reason = abbreviate(str(error).strip().partition("\n")[0], 300)
        raise CaptureError(f"{path}: ExecuTorch cannot run it: {reason}") from error


def _events(module: Any, record: Path) -> list[Event]:
    """The events of the last run."""
    with tempfile.TemporaryDirectory() as folder:
        dump, buffer = os.path.join(folder, "etdump"), os.path.join(folder, "values")
        module.write_etdump_result_to_file(dump, buffer)
        inspector = Inspector(etdump_path=dump, etrecord=str(record), debug_buffer_path=buffer)
        return [
            Event(
                event.name,
                _handles(event.debug_handles),
                (event.delegate_backend_name or "a delegate") if event.is_delegated_op else "",
                tuple(
                    value.clone() if isinstance(value, torch.Tensor) else value
                    for value in event.debug_data or ()
                ),
            )
            for block in inspector.event_blocks
            if block.name == "Execute"
            for event in block.events
        ]


def _handles(handles: Any) -> tuple[int, ...]:
    if handles is None:
        return ()
    return (handles,) if isinstance(handles, int) else tuple(handles)
