"""What every command of `tcap capture` prints: what runs, how far it is, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from tensorcap_cli.output import plural, print_json, print_table, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from tensorcap.recording.plain_log import PlainLog
    from tensorcap.recording.summary import Summary
    from tensorcap.session.capture_session import Capture
    from tensorcap_formats.progress import Progress

_FEW: Final = 8  # as many names are printed, more are counted


class StageLines:
    """Progress of captures: prints each stage once, as a line on stderr."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def stage(self, text: str) -> None:
        """Print what begins, unless it was printed before."""
        if text not in self._printed:
            self._printed.add(text)
            self._print(text)

    def advance(self, done: int, total: int | None) -> None:
        """Show nothing: a log is made of lines."""

    def _print(self, text: str) -> None:
        click.echo(text, err=True)


class _LiveStages(StageLines):
    """The same, and below the lines how far the stage is, with the time since it began."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._stage = ""
        self._begin_seconds = time.monotonic()
        self._count = 0

    def stage(self, text: str) -> None:
        super().stage(text)
        self._stage, self._begin_seconds = text.partition(" ")[0], time.monotonic()

    def advance(self, done: int, total: int | None) -> None:
        self._count = done

    def text(self) -> str:
        """How far it is."""
        seconds = time.monotonic() - self._begin_seconds
        return f"{self._stage}: {plural(self._count, 'tensor')}, {seconds:.0f} s" if self._stage else ""

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def capture_progress(*, is_live: bool = True) -> Iterator[Progress]:
    """Print the stages of captures; on a terminal, show how far each is.

    Args:
        is_live: Whether that may be shown; a log on the terminal already shows it.
    """
    if not is_live or not sys.stderr.isatty():
        yield StageLines()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    stages = _LiveStages(console)
    with Live(
        get_renderable=lambda: Text(stages.text()),
        console=console,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield stages


def print_outcome(done: Capture, *, as_json: bool) -> int:
    """Print what came of a capture; of a dry run that has no log, what it would have recorded.

    Returns:
        The exit status: 1 if something that was asked for was not captured, or not printed.
    """
    summary = done.summary
    assert summary is not None
    status = summary.exit_status
    if done.log is not None:
        status |= _end_log(done.log)
    elif summary.path is None:
        _print_tally(done, as_json=as_json)
    elif as_json:
        print_json(summary.to_json())
    click.echo("\n".join(_lines(summary)), err=True)
    return status


def _end_log(log: PlainLog) -> int:
    if log.trouble is None or isinstance(log.trouble, BrokenPipeError):
        return 0
    click.echo(f"the printed log is not whole: {log.trouble}", err=True)
    return 1


def _lines(summary: Summary) -> Iterator[str]:
    size = size_text(summary.tensor_bytes)
    if summary.path:
        size += f" ({size_text(summary.stored_bytes)} of distinct ones stored)"
    steps = plural(summary.steps, "step")
    if set(summary.phases) - {"forward"}:
        steps += ": " + ", ".join(f"{count} {phase}" for phase, count in summary.phases.items())
    yield f"{summary.path or 'dry run'}: {plural(summary.tensors, 'tensor')}, {size}, {steps}"
    yield (
        f"modules: {len(summary.captured)} captured, {len(summary.never_called)} never called, "
        f"{len(summary.not_capturable)} not capturable, {len(summary.excluded)} excluded"
    )
    within = [
        plural(count, noun)
        for count, noun in (
            (summary.ops, "op call"),
            (len(summary.functions), "function"),
            (len(summary.probes), "probe"),
        )
        if count
    ]
    if within:
        yield f"within them: {', '.join(within)} captured"
    if 0 < len(summary.never_called) <= _FEW:
        yield f"never called: {', '.join(summary.never_called)}"
    reasons: dict[str, list[str]] = {}
    for place, reason in summary.not_capturable.items():
        reasons.setdefault(reason, []).append(place)
    for reason, places in reasons.items():
        yield f"not capturable, {reason}: {_some(places)}"
    if summary.unfinished:
        counts = [f"{site} ({count})" for site, count in summary.unfinished.items()]
        yield f"calls that were not seen to return: {_some(counts)}"
    for asked in summary.unmatched:
        yield f"nothing was captured of {asked!r}"
    if summary.stopped is not None:
        limit = size_text(summary.max_bytes or 0)
        yield f"stopped at {limit} at {summary.stopped}; later calls are not recorded"
    yield from summary.notes


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return f"{', '.join(names[:_FEW])}{more}"


def _print_tally(done: Capture, *, as_json: bool) -> None:
    records = done.tally.records
    if as_json:
        print_json(done.tally.to_json())
        return
    cells = [
        (r.key.text, r.dtype.name, "x".join(map(str, r.shape)) or "()", size_text(r.nbytes)) for r in records
    ]
    print_table(("key", "dtype", "shape", "size"), cells, left=(0, 1, 2))
    click.echo(f"{plural(len(records), 'tensor')}, {size_text(done.tally.tensor_bytes)}")
