"""A mapping as text: entries by evidence, what is left over, the order of execution, the coverage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import conjugated, counted, one_line
from tensorcap_cli.text.comparison import side_text
from tensorcap_cli.text.output import print_heading

if TYPE_CHECKING:
    from tensorcap.alignment import Aligned, Coverage, Entry, LeftOver, Order

_SHOWN: Final = 8  # unexplained tensors


def print_aligned(aligned: Aligned, *, show_all: bool) -> None:
    """Print a mapping.

    Args:
        aligned: The mapping, and the two archives.
        show_all: Entries of arguments, and all reasons, too.
    """
    from tensorcap.runs import ArchiveSummary

    click.echo(f"reference  {side_text(ArchiveSummary.of(aligned.reference))}")
    click.echo(f"target     {side_text(ArchiveSummary.of(aligned.target.source))}")
    entries = aligned.alignment.entries
    for evidence in dict.fromkeys(entry.evidence for entry in entries):
        print_heading(f"BY {evidence.upper()}")
        _print_entries([entry for entry in entries if entry.evidence == evidence], show_all=show_all)
    for side in ("reference", "target"):
        _print_left_over([left for left in aligned.alignment.left_over if left.side == side], side)
    click.echo()
    for sentence in aligned.alignment.failed:
        click.secho(one_line(sentence), fg="yellow")
    for sentence in aligned.summary.tokens:
        click.echo(one_line(sentence))
    summary = aligned.summary
    if summary.order is not None:
        _print_order(summary.order)
    _print_coverage(summary.reference, summary.target)


def _print_entries(entries: Sequence[Entry], *, show_all: bool) -> None:
    """Print entries; those of arguments are only counted."""
    hidden = 0
    for entry in entries:
        if not show_all and all("/input." in place for place in entry.reference):
            hidden += 1
            continue
        same = entry.reference == entry.target
        text = " + ".join(entry.reference) if same else entry.text
        click.echo(f"  {one_line(text)}{_indices(entry)}")
        steps = entry.steps or ((f"dims {entry.dims}",) if entry.dims else ())
        if steps:
            click.echo(f"    {one_line(', '.join(steps))}")
        if entry.reason and (show_all or not same or entry.steps):
            click.echo(f"    {one_line(entry.reason)}")
    if hidden:
        noun = "entry" if hidden == 1 else "entries"
        click.echo(f"  and {hidden} {noun} of arguments; all with --all")


def _indices(entry: Entry) -> str:
    from tensorcap.alignment import values_text

    texts = (f"{name} = {values_text(values)}" for name, values in entry.variables.items())
    return "".join(f"   {text}" for text in texts)


def _print_left_over(left_over: Sequence[LeftOver], side: str) -> None:
    if not left_over:
        return
    print_heading(f"LEFT OVER IN THE {side.upper()}")
    for left in sorted(left_over, key=lambda left: left.is_explained):
        mark = " " if left.is_explained else "?"
        click.echo(f"{mark} {one_line(', '.join(_folded(left.places)))}: {one_line(left.reason)}")


def _folded(places: Iterable[str]) -> list[str]:
    """Places with `{i}` for numbers, and how many there are of each."""
    from tensorcap.alignment.names import fold

    groups: dict[str, list[str]] = {}
    for place in places:
        name, numbers = fold(place)
        for letter, i in zip("ijklmnop", range(len(numbers)), strict=False):
            name = name.replace(f"{{{i}}}", f"{{{letter}}}")
        groups.setdefault(name, []).append(place)
    return [same[0] if len(same) == 1 else f"{name} ({len(same)})" for name, same in groups.items()]


def _print_order(order: Order) -> None:
    if order.is_same:
        click.echo(f"Both made {counted(order.results, 'result')} in the same order.")
        return
    click.echo(f"{order.moved} of {counted(order.results, 'result')} were made in another order:")
    for move in order.moves:
        click.echo(
            f"  {move.key} comes after {move.after or 'nothing'} in the reference, after what is "
            f"{move.target_after or 'nothing'} there in the target"
        )


def _print_coverage(reference: Coverage, target: Coverage) -> None:
    for key in reference.unexplained[:_SHOWN]:
        click.secho(f"? {key}: nothing is known of a counterpart", fg="yellow")
    if len(reference.unexplained) > _SHOWN:
        click.echo(f"… {len(reference.unexplained) - _SHOWN} more")
    for side, coverage in (("reference", reference), ("target", target)):
        click.echo(
            f"{coverage.mapped} of {coverage.records} {side} tensors {conjugated(coverage.mapped, 'are')} "
            f"mapped, {coverage.explained} {conjugated(coverage.explained, 'are')} left over and explained, "
            f"{len(coverage.unexplained)} {conjugated(len(coverage.unexplained), 'are')} not explained"
        )
    is_green = reference.mapped and not reference.unexplained
    verdict = "Every reference tensor is mapped or explained" if is_green else "Not everything is mapped"
    if is_green and target.unexplained:
        are = conjugated(len(target.unexplained), "are")
        verdict = f"{verdict}; {len(target.unexplained)} of the target {are} neither"
    verdict = f"{verdict}."
    if not reference.mapped:
        verdict = "Nothing is mapped."
    click.secho(verdict, fg="green" if is_green else "red", bold=True)
