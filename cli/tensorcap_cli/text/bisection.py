"""Bisections as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.output import class_text, number_text

if TYPE_CHECKING:
    from tensorcap.comparison import Divergence
    from tensorcap.localization import Bisection, LiveBisection


def print_bisection(bisection: Bisection) -> None:
    """Print the first bad result of two archives."""
    divergence, first = bisection.divergence, bisection.first
    if bisection.against:
        click.echo(
            f"Errors do not stay: {bisection.against} spoke against the search, so it read on in order."
        )
    if bisection.lacking:
        lacking = counted(len(bisection.lacking), "result")
        click.secho(
            f"The target lacks {lacking} of the reference, the first {bisection.lacking[0]}.", fg="red"
        )
    for side in bisection.incomplete:
        click.secho(f"The {side} is incomplete: its run ended early.", fg="red")
    if first is None:
        color = "yellow" if bisection.exit_status else "green"
        click.secho("No result that was looked at is bad.", fg=color, bold=True)
    else:
        click.secho(f"FIRST BAD RESULT  {first.key}  ({first.status})", fg="red", bold=True)
        for finding in first.findings[:1]:
            click.echo(f"  {one_line(finding.text)}")
        if bisection.last_green is not None:
            click.echo(f"  before it {bisection.last_green.key} is {bisection.last_green.status}")
        if divergence is not None:
            _print_module(divergence)
    read = counted(len(bisection.read), "tensor")
    how = "recorded digest" if bisection.how == "index" else bisection.how
    click.echo(f"{read} of each side read, of {counted(bisection.results, 'result')} (by {how})")


def print_live_bisection(bisection: LiveBisection) -> None:
    """Print the module that is guilty, and the runs of the target that show it."""
    divergence = bisection.divergence
    for run in bisection.runs:
        error = "" if run.error is None else f"  error {number_text(run.error, 3)}"
        click.echo(f"{'good' if run.is_good else 'bad ':<5} grafted {run.cut}{error}")
    if not bisection.key:
        click.secho("The target is good as it is.", fg="green", bold=True)
        return
    what = "its own result is wrong" if bisection.blame == "module" else "what its code hands on is wrong"
    click.secho(f"GUILTY  {bisection.module}: {what}", fg="red", bold=True)
    click.echo(f"  the output becomes good when {bisection.key} is grafted")
    if divergence is not None:
        click.echo(f"  there first {divergence.pair.key} ({divergence.pair.status})")
        for finding in divergence.pair.findings:
            if finding.status != "within-rounding":
                click.echo(f"  {one_line(finding.text)}")
    for pair in bisection.ops:
        click.echo(f"  op {pair.key} is {pair.status}")
    click.echo(f"{counted(len(bisection.runs), 'run')} of the target, of {counted(bisection.cuts, 'result')}")


def _print_module(divergence: Divergence) -> None:
    name = f" ({class_text(divergence.class_name)})" if divergence.class_name else ""
    click.echo(f"  module {divergence.module}{name}: {one_line(divergence.explanation)}")
    for finding in divergence.pair.findings:
        if finding.status != "within-rounding":
            click.echo(f"  {one_line(finding.text)}")
