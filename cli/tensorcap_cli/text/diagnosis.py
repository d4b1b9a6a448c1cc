"""A diagnosis as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.output import DASH, number_text, percent_text, print_table

if TYPE_CHECKING:
    from tensorcap.diagnosis import Diagnosis, Explanation

_NEAREST: Final = 5


def print_diagnosis(found: Diagnosis, *, show_all: bool) -> None:
    """Print what explains a pair, or what was tried."""
    pair = found.key if found.key == found.target_key else f"{found.key} and {found.target_key}"
    if found.status == "identical":
        click.echo(f"{one_line(pair)}: the values are identical")
        _print_notes(found)
        return
    error = "of other shapes" if found.before is None else f"relative error {number_text(found.before, 3)}"
    precision = (
        f", one rounding in {found.precision} is {number_text(found.rounding, 2)}" if found.precision else ""
    )
    click.echo(f"{one_line(pair)}: {error}{precision}")
    for explanation in found.explanations:
        _print_explanation(explanation)
    if not found.explanations:
        click.echo(f"no hypothesis explains it, of {counted(len(found.tried), 'kind')} tried")
    if show_all or not found.explanations:
        _print_tried(found, show_all)
    _print_notes(found)


def _print_explanation(one: Explanation) -> None:
    before = "" if one.before is None else f" of {number_text(one.before, 3)}"
    fitted = f", {counted(one.parameters, 'number')} fitted" if one.parameters else ""
    click.echo(f"  {one_line(one.text)}")
    click.echo(f"    [{one.kind}] leaves {number_text(one.after, 2)}{before}{fitted}")
    if one.hint:
        click.echo(f"    {one_line(one.hint)}")


def _print_tried(found: Diagnosis, show_all: bool) -> None:
    rows = [
        [kind, percent_text(left) if left <= 1 else DASH]
        for kind, left in list(found.tried.items())[: None if show_all else _NEAREST]
    ]
    if rows:
        print_table(["tried", "left"], rows)
        if len(rows) < len(found.tried):
            click.echo(f"and {len(found.tried) - len(rows)} more; see them with --all")


def _print_notes(found: Diagnosis) -> None:
    for note in found.notes:
        click.echo(one_line(note))
