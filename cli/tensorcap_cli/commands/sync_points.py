"""`tcap sync-points`: operations of a compiled program beside the nodes of the reference's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from tensorcap_cli.options.archives import json_option, map_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result
from tensorcap_cli.text.progress import spinner

if TYPE_CHECKING:
    from tensorcap.comparison import Sort, SyncMetric, SyncPoints
    from tensorcap.reports.next_step import NextStep


@click.command("sync-points", cls=Command, short_help="Pair a compiled program's operations with nodes.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@map_option
@click.option(
    "--metric",
    type=click.Choice(["psnr", "mean-abs", "mean-squared", "max-abs", "mean-relative"]),
    default="psnr",
    metavar="NAME",
    help="What is printed, coloured and sorted by: psnr, mean-abs, mean-squared, max-abs or mean-relative.",
)
@click.option(
    "--sort",
    type=click.Choice(["operation", "similarity"]),
    default="operation",
    help="Order of the target's operations, or the least similar first.",
)
@click.option(
    "--bands",
    metavar="GREEN/RED",
    help="Green from and red below, in dB of PSNR; without it those of the precision, 40/25 for 16 bits.",
)
@click.option("--all", "show_all", is_flag=True, help="A row for every point, also for those without values.")
@json_option
def command(
    reference: str,
    target: str,
    *,
    mapping: str | None,
    metric: str,
    sort: str,
    bands: str | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Pair the operations of a compiled program with the nodes that they compute, and say how each compares.

    TGT is the capture of a compiled program (tcap capture coreai), whose run says which operation holds the
    value of which node. REF is a capture of the graph that it was compiled from (tcap capture torch --level
    export --coreai), a folder NAME.aimodelintermediates, or the program under another configuration.

    Each point has both names, the module, the source line, and one of: pass, fail (the policy's verdict, as
    in tcap compare), holds another value (the operation has the value of a node near it: no mistake),
    explained (it differs, and what is computed from it agrees), shape ambiguous, no target value (fused
    away), no reference value, excluded, not mapped. A FAILURE SOURCE fails although all that it is computed
    from agrees: look there first. Colours are bands of the metric, a way to look: a green point may fail.

    \b
        tcap sync-points ref.h5 tgt.h5
        tcap sync-points ref.aimodelintermediates tgt.h5 --sort similarity
        tcap sync-points fp32.h5 fp16.h5 --metric max-abs --bands 50/30

    Exit status: 0 all that is required agrees, as for tcap compare; 1 it does not; 2 wrong usage, or neither
    run is of a compiled program; 3 an archive or a tensor cannot be read.
    """
    from tensorcap.comparison import Bands, sync_points
    from tensorcap.reports.next_step import NOTHING, NextStep, Sides

    chosen = None if bands is None else Bands.parse(bands)
    with spinner("comparing"):
        result = sync_points(
            reference, target, metric=cast("SyncMetric", metric), bands=chosen, mapping=mapping
        )

    def print_text(points: SyncPoints) -> None:
        from tensorcap.reports.sync_points_text import sync_point_lines

        for line in sync_point_lines(points, sort=cast("Sort", sort), show_all=show_all):
            if line.shade:
                click.echo(click.style(line.text[:1], fg=line.shade) + line.text[1:])
            else:
                click.secho(line.text, bold=line.is_heading or None)

    def next_step(points: SyncPoints) -> NextStep:
        if points.exit_status == 0:
            return NextStep(NOTHING)
        return NextStep("which operation is wrong, and how", Sides(reference, target).command("localize"))

    print_result(result, print_text, as_json=as_json, next_step=next_step)
