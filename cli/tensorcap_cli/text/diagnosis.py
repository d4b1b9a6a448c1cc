"""A diagnosis as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.output import DASH, number_text, percent_text, print_table

if TYPE_CHECKING:
    from tensorcap.diagnosis import Diagnosis, Explanation

_NEAREST: Final = 5


def print_diagnosis(diagnosis: Diagnosis, *, show_all: bool) -> None:
    """Print what explains a pair, or what was tried."""
    pair = (
        diagnosis.key
        if diagnosis.key == diagnosis.target_key
        else f"{diagnosis.key} and {diagnosis.target_key}"
    )
    if diagnosis.status == "identical":
        click.echo(f"{one_line(pair)}: the values are identical")
        _print_notes(diagnosis)
        return
    error = (
        "of other shapes"
        if diagnosis.before is None
        else f"relative error {number_text(diagnosis.before, 3)}"
    )
    precision = (
        f", one rounding in {diagnosis.precision} is {number_text(diagnosis.rounding, 2)}"
        if diagnosis.precision
        else ""
    )
    click.echo(f"{one_line(pair)}: {error}{precision}")
    for explanation in diagnosis.explanations:
        _print_explanation(explanation)
    if not diagnosis.explanations:
        click.echo(f"no hypothesis explains it, of {counted(len(diagnosis.tried), 'kind')} tried")
    if show_all or not diagnosis.explanations:
        _print_tried(diagnosis, show_all)
    _print_notes(diagnosis)


def _print_explanation(one: Explanation) -> None:
    before = "" if one.before is None else f" of {number_text(one.before, 3)}"
    fitted = f", {counted(one.parameters, 'number')} fitted" if one.parameters else ""
    click.echo(f"  {one_line(one.text)}")
    click.echo(f"    [{one.kind}] leaves {number_text(one.after, 2)}{before}{fitted}")
    if one.hint:
        click.echo(f"    {one_line(one.hint)}")


def _print_tried(diagnosis: Diagnosis, show_all: bool) -> None:
    rows = [
        [kind, percent_text(left) if left <= 1 else DASH]
        for kind, left in list(diagnosis.tried.items())[: None if show_all else _NEAREST]
    ]
    if rows:
        print_table(["tried", "left"], rows)
        if len(rows) < len(diagnosis.tried):
            click.echo(f"and {len(diagnosis.tried) - len(rows)} more; see them with --all")


def _print_notes(diagnosis: Diagnosis) -> None:
    for text in diagnosis.failed:
        click.secho(one_line(text), fg="yellow")
    for note in diagnosis.notes:
        click.echo(one_line(note))
