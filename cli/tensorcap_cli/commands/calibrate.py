"""`tcap calibrate`: limits from archives of known-good ports."""

from __future__ import annotations

import click

from tensorcap.wording import counted
from tensorcap_cli.options.archives import compute_dtype_option, json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_json


@click.command("calibrate", cls=Command, short_help="Find limits that known-good ports stay within.")
@click.argument("archives", metavar="REF TGT [REF TGT]...", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o", "--output", metavar="FILE", required=True, type=click.Path(), help="The file of limits, .toml."
)
@click.option(
    "--metric",
    "metrics",
    metavar="NAME",
    multiple=True,
    help="Metric to limit; may be repeated; four by default.",
)
@click.option(
    "--quantile",
    metavar="SHARE",
    type=float,
    default=0.99,
    help="Of the values of one kind of module; 0.99 by default.",
)
@click.option(
    "--margin",
    metavar="FACTOR",
    type=float,
    default=1.5,
    help="What the quantile is multiplied by; 1.5 by default.",
)
@compute_dtype_option
@json_option
def command(
    archives: tuple[str, ...],
    *,
    output: str,
    metrics: tuple[str, ...],
    quantile: float,
    margin: float,
    compute_dtype: str | None,
    as_json: bool,
) -> None:
    """Compare pairs of archives of ports that are known to be good, and write limits that they stay within.

    There is a limit for each metric and kind of module: a quantile over all tensors, times a margin. Runs
    that do not pass are left out and named. Give the file to tcap compare by --calibration.

    \b
        tcap calibrate ref1.h5 good1.h5 ref2.h5 good2.h5 -o calibration.toml

    Exit status: 0 written; 2 wrong usage, too few passing runs or too few tensors; 3 an archive cannot be
    read.
    """
    from tensorcap.comparison import CALIBRATED, calibrate, write_calibration

    done = calibrate(
        archives,
        metrics=metrics or CALIBRATED,
        quantile=quantile,
        margin=margin,
        compute_dtype=compute_dtype,
    )
    calibration = done.calibration
    write_calibration(calibration, output)
    if as_json:
        print_json({"path": output, **done.to_json()})
        return
    for reference, target, reason in done.failing:
        click.echo(f"left out: {reference} against {target}: {reason}", err=True)
    count = sum(map(len, calibration.limits.values()))
    click.echo(
        f"{output}: {counted(count, 'limit')} of {counted(len(calibration.limits), 'kind')} of modules, from "
        f"{counted(calibration.runs, 'run')} in {calibration.precision}"
    )
