"""What every command of `tcap capture` prints: what runs, how far it is, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import counted, some
from tensorcap_cli.text.output import print_json, print_table, size_text

if TYPE_CHECKING:
    from tensorcap.recording import PlainLog, Summary
    from tensorcap.session import Capture

_FEW: Final = 8  # names that are printed; the others are counted


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
    steps = counted(summary.steps, "step")
    if set(summary.phases) - {"forward"}:
        steps += ": " + ", ".join(f"{count} {phase}" for phase, count in summary.phases.items())
    yield f"{summary.path or 'dry run'}: {counted(summary.tensors, 'tensor')}, {size}, {steps}"
    yield (
        f"modules: {len(summary.captured)} captured, {len(summary.never_called)} never called, "
        f"{len(summary.not_capturable)} not capturable, {len(summary.excluded)} excluded"
    )
    within = [
        counted(count, noun)
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
    yield from _reasons(summary.not_capturable, "not capturable, ")
    yield from _reasons(summary.fused)
    yield from _reasons(summary.held)
    if summary.unfinished:
        counts = [f"{site} ({count})" for site, count in summary.unfinished.items()]
        yield f"calls that were not seen to return: {some(counts, _FEW)}"
    for asked in summary.unmatched:
        yield f"nothing was captured of {asked!r}"
    if summary.stopped is not None:
        limit = size_text(summary.max_bytes or 0)
        yield f"stopped at {limit} at {summary.stopped}; later calls are not recorded"
    yield from summary.notes


def _reasons(reasons_by_place: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """A line for each reason, with the places that it is of."""
    places_by_reason: dict[str, list[str]] = {}
    for place, reason in reasons_by_place.items():
        places_by_reason.setdefault(reason, []).append(place)
    for reason, places in places_by_reason.items():
        yield f"{prefix}{reason}: {some(places, _FEW)}"


def _print_tally(done: Capture, *, as_json: bool) -> None:
    records = done.tally.records
    if as_json:
        print_json(done.tally.to_json())
        return
    cells = [
        (r.key.text, r.dtype.name, "x".join(map(str, r.shape)) or "()", size_text(r.nbytes)) for r in records
    ]
    print_table(("key", "dtype", "shape", "size"), cells, left=(0, 1, 2))
    click.echo(f"{counted(len(records), 'tensor')}, {size_text(done.tally.tensor_bytes)}")
