"""Sensitivities as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.output import number_text, print_table, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorcap.sensitivities import ArchiveSensitivity, LayerGroup, Sensitivity

_FEW = 5  # layers that are left out, and named


def print_sensitivity(result: Sensitivity) -> None:
    """Print what layers cost, and which have to stay."""
    click.echo(f"{result.metric_text}: {number_text(result.total, 3)} as it is, ", nl=False)
    click.echo(f"{number_text(result.floor, 3)} with all layers the reference's")
    _print_groups(result.groups, "layer" if result.by == "layer" else result.by)
    if result.blocks:
        click.echo("Blocks of which no layer was measured by itself:")
        _print_groups(result.blocks, "block")
    if result.left_out:
        click.secho(f"{counted(len(result.left_out), 'layer')} left out:", fg="yellow")
        for layer, reason in list(result.left_out.items())[:_FEW]:
            click.echo(f"  {layer}: {one_line(reason)}")
        if len(result.left_out) > _FEW:
            click.echo(f"  and {len(result.left_out) - _FEW} more")
    what = "layer" if result.by == "layer" else result.by
    if result.outliers:
        names = ", ".join(group.name for group in result.outliers)
        verb = "stands" if len(result.outliers) == 1 else "stand"
        click.secho(f"{names} {verb} out.", fg="red", bold=True)
    else:
        click.secho(f"No {what} stands out.", fg="green", bold=True)
    _print_kept(result)
    known = f" and {result.known_runs} known ones" if result.known_runs else ""
    click.echo(f"{counted(result.runs, 'run')} of models{known}, of {counted(result.layers, 'layer')}")


def print_own_errors(result: ArchiveSensitivity) -> None:
    """Print the layers of two archives by the errors that they make themselves."""
    rows = [
        (layer.name, number_text(layer.own, 3), number_text(layer.predicted, 3), layer.text)
        for layer in result.layers
    ]
    print_table(("layer", "own error", "predicted", "weight"), rows, left=(0, 3))
    click.echo("How much of them reaches the output is not known of archives: give the two models.")


def _print_groups(groups: Sequence[LayerGroup], what: str) -> None:
    if not groups:
        return
    rows = [
        (
            group.name,
            "cannot run" if group.alone is None else number_text(group.alone, 3),
            number_text(group.kept, 3),
            size_text(group.bytes_saved) if group.bytes_saved >= 0 else f"-{size_text(-group.bytes_saved)}",
        )
        for group in groups
    ]
    print_table((what, "it alone", "it kept", "saves"), rows)


def _print_kept(result: Sensitivity) -> None:
    if not result.goal:
        return
    if result.is_reached is False:
        click.secho(f"The goal {result.goal} is not reached with all layers kept.", fg="red", bold=True)
        return
    if not result.keep:
        click.secho(f"The goal {result.goal} is reached as it is.", fg="green")
        return
    loss = "" if result.reached is None else f", at {number_text(result.reached, 3)}"
    kept = f"{counted(len(result.keep), 'layer')} kept ({size_text(result.bytes_kept)} more)"
    click.secho(f"The goal {result.goal} is reached with {kept}{loss}:", fg="green")
    for layer in result.keep:
        click.echo(f"  {layer}")
