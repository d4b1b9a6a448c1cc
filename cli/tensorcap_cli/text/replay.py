"""A replay as text."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.output import DASH, number_text, print_table

if TYPE_CHECKING:
    from tensorcap.rerun import Replay

_SHOWN: Final = 20


def print_replay(result: Replay, *, show_all: bool = False) -> None:
    """Print which modules have an error of their own, and how those of leaves compare with the twin's.

    Args:
        result: The replay.
        show_all: Whether R is printed of each leaf.
    """
    _print_own_errors(result)
    _print_ratios(result, show_all=show_all)


def _print_ratios(result: Replay, *, show_all: bool) -> None:
    """Print R of the results of leaves: their least, median and largest, or each."""
    measured = {own.key: own for own in result.own_errors if own.key in result.leaf_ratios}
    if not measured:
        return
    ratios = sorted(result.leaf_ratios.values())
    low, middle, high = (number_text(r, 3) for r in (ratios[0], median(ratios), ratios[-1]))
    click.echo(
        f"R of {counted(len(ratios), 'result')} of leaves, against the model itself in {result.precision} "
        f"on the same values: {low} to {high}, median {middle}."
    )
    if show_all:
        rows = [
            (own.module, own.key, DASH if own.error is None else number_text(own.error, 3), number_text(r, 3))
            for own, r in zip(measured.values(), result.leaf_ratios.values(), strict=True)
        ]
        print_table(("MODULE", "KEY", "OWN ERROR", "R"), rows, left=(0, 1), flexible=1)


def _print_own_errors(result: Replay) -> None:
    for note in result.notes:
        click.secho(note, fg="yellow")
    if result.is_self and not result.exit_status:
        click.secho(
            f"The model gives its own {counted(len(result.own_errors), 'tensor')} back bit for bit.",
            fg="green",
        )
        return
    bad = sorted(result.bad, key=lambda own: own.made != "result" or not own.is_leaf)
    if not bad:
        judged = counted(len(result.own_errors) - len(result.unjudged), "tensor")
        what = "No module makes" if not result.exit_status else "No module that could be judged makes"
        color = "yellow" if result.exit_status else "green"
        click.secho(f"{what} an error of its own: {judged} within rounding.", fg=color, bold=True)
        return
    from tensorcap.comparison import describe_test

    rows = []
    for own in bad[:_SHOWN]:
        error = DASH if own.error is None else number_text(own.error, 3)
        ratio = DASH if own.ratio is None else number_text(own.ratio, 3)
        bad_findings = [f for f in own.findings if f.status in ("suspect", "diverged")]
        tests = ", ".join(dict.fromkeys(describe_test(f.test) for f in bad_findings))
        rows.append((own.module, own.key, own.status, error, ratio, tests or DASH))
    print_table(("MODULE", "KEY", "STATUS", "OWN ERROR", "R", "TESTS"), rows, left=(0, 1, 2, 5), flexible=1)
    if len(bad) > _SHOWN:
        click.echo(f"and {len(bad) - _SHOWN} more")
    for finding in bad[0].findings:
        if finding.status in ("suspect", "diverged"):
            click.echo(f"  {one_line(finding.text)}")
