"""`tcap bisect`: where two runs part, by looking at few of their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.output import Counted, class_text, counting, number_text, one_line, plural, print_json
from tensorcap_cli.time_limit import time_limit_option
from tensorcap_cli.workload_options import made_target, target_options

if TYPE_CHECKING:
    from pathlib import Path

    from tensorcap.comparison.divergence import Divergence
    from tensorcap_formats.archive import Archive


@click.command("bisect", short_help="Find where two runs part, by reading few tensors or by running.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@click.option(
    "--into", metavar="WORKLOAD", help="The target to run: FILE.py:FUNCTION, or a Hugging Face model."
)
@click.option(
    "--rtol", type=float, metavar="R", help="Error allowed relative to |reference|; alone, atol is 0."
)
@click.option("--atol", type=float, metavar="A", help="Absolute error allowed; alone, rtol is 0.")
@click.option("--compute-dtype", metavar="DTYPE", help="Precision in which TGT computed, if it does not say.")
@click.option("--map", "mapping", metavar="FILE", type=click.Path(), help="As for `tcap compare`.")
@click.option("--limit", type=float, metavar="E", help="Live: relative error of a good final output.")
@click.option("--check", metavar="COMMAND", help="Live: judges a run by its exit status; see below.")
@click.option(
    "--level", type=click.Choice(["module", "op"]), default="module", help="Live: how far down to go."
)
@click.option("--state", metavar="FILE", type=click.Path(), help="Live: keeps runs, to go on after a break.")
@target_options
@time_limit_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    reference: str,
    target: str | None,
    *,
    into: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the first result of a module that is not green, reading about log2(n) tensors of each archive.

    Results of modules are searched in order of execution, those with equal digests without being read. That
    errors stay once they are there is checked on a few more; where they do not, all are read up to the first.
    An error too small for its place is not seen: `tcap compare` looks at every tensor.

    \b
        tcap bisect ref.h5 tgt.h5
        tcap bisect ref.h5 tgt.h5 --rtol 1e-2 --map map.toml

    Without TGT the target is run, about log2(n) times: what it computes up to a cut is replaced by what REF
    has there, and the final output says on which side of the cut the mistake is. A check is given the archive
    of a run as TCAP_RUN.

    \b
        tcap bisect ref.h5 --into port.py:target --level op
        tcap bisect ref.h5 --into port.py:target --check ./good.sh

    Exit status: 0 no result is bad; 1 one is, or TGT lacks one; 2 wrong usage; 3 an archive or a tensor
    cannot be read.
    """
    ours = {name: options.pop(name) for name in ("rtol", "atol", "compute_dtype")}
    live = {name: options.pop(name) for name in ("limit", "check", "level", "state")}
    mapping, input_file = options.pop("mapping"), options.pop("input_file")
    if target is not None:
        given = [name for name, value in live.items() if value not in (None, "module")]
        if into is not None or given:
            raise click.UsageError(
                "TGT is an archive, expected no --into, --limit, --check, --level or --state."
            )
        status = _of_archives(reference, target, mapping, ours, as_json=as_json)
    else:
        if any(value is not None for value in ours.values()):
            raise click.UsageError("--rtol, --atol and --compute-dtype are for archives, expected TGT.")
        status = _live(reference, into, mapping, live, {**options, "inputs": input_file}, as_json=as_json)
    click.get_current_context().exit(status)


def _of_archives(
    reference: str, target: str, mapping: str | None, given: dict[str, Any], *, as_json: bool
) -> int:
    from tensorcap.localization.archive_bisection import bisect_archives

    with counting("bisecting") as tell:
        found = bisect_archives(reference, target, mapping=mapping, progress=Counted(tell), **given)
    divergence, first = found.divergence, found.first
    if as_json:
        print_json(found.to_json())
        return found.exit_status
    if found.against:
        click.echo(f"Errors do not stay: {found.against} spoke against the search, so it read on in order.")
    if found.lacking:
        lacking = plural(len(found.lacking), "result")
        click.secho(f"The target lacks {lacking} of the reference, the first {found.lacking[0]}.", fg="red")
    if first is None:
        color = "yellow" if found.lacking else "green"
        click.secho("No result that was looked at is bad.", fg=color, bold=True)
    else:
        click.secho(f"FIRST BAD RESULT  {first.key}  ({first.status})", fg="red", bold=True)
        for finding in first.findings[:1]:
            click.echo(f"  {one_line(finding.text)}")
        if found.last_green is not None:
            click.echo(f"  before it {found.last_green.key} is {found.last_green.status}")
        if divergence is not None:
            _print_module(divergence)
    read = plural(len(found.read), "tensor")
    click.echo(f"{read} of each side read, of {plural(found.results, 'result')} (by {found.how})")
    return found.exit_status


def _live(
    reference: str,
    into: str | None,
    mapping: str | None,
    live: dict[str, Any],
    options: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    from tensorcap.localization.live_bisection import bisect_live
    from tensorcap_formats.open import open_archive

    with open_archive(reference) as trusted, counting("bisecting") as tell:
        recipe, inputs = made_target(into, trusted, options)
        found = bisect_live(
            trusted,
            recipe.build(inputs),
            mapping=mapping,
            reference_ops=lambda path, sites: _reference_ops(trusted, path, sites),
            progress=Counted(tell),
            **live,
        )
    divergence = found.divergence
    if as_json:
        print_json(found.to_json())
        return found.exit_status
    for run in found.runs:
        error = "" if run.error is None else f"  error {number_text(run.error, 3)}"
        click.echo(f"{'good' if run.is_good else 'bad ':<5} grafted {run.cut}{error}")
    if not found.key:
        click.secho("The target is good as it is.", fg="green", bold=True)
        return found.exit_status
    what = "its own result is wrong" if found.blame == "module" else "what its code hands on is wrong"
    click.secho(f"GUILTY  {found.module}: {what}", fg="red", bold=True)
    click.echo(f"  the output becomes good when {found.key} is grafted")
    if divergence is not None:
        click.echo(f"  there first {divergence.pair.key} ({divergence.pair.status})")
        for finding in divergence.pair.findings:
            if finding.status != "within-rounding":
                click.echo(f"  {one_line(finding.text)}")
    for pair in found.ops:
        click.echo(f"  op {pair.key} is {pair.status}")
    click.echo(f"{plural(len(found.runs), 'run')} of the target, of {plural(found.cuts, 'result')}")
    return found.exit_status


def _reference_ops(trusted: Archive, path: Path, sites: tuple[str, ...]) -> Path:
    """Run the reference again, as its archive says, for the ops of some modules."""
    from tensorcap.session.capture_session import capture_workload
    from tensorcap.session.recipe import Recipe
    from tensorcap.workload.workload import archived_inputs

    workload = Recipe.of(trusted).build(archived_inputs(trusted))
    capture_workload(workload, path, level="op", ops_in=sites)
    return path


def _print_module(divergence: Divergence) -> None:
    name = f" ({class_text(divergence.class_name)})" if divergence.class_name else ""
    click.echo(f"  module {divergence.module}{name}: {one_line(divergence.explanation)}")
    for finding in divergence.pair.findings:
        if finding.status != "within-rounding":
            click.echo(f"  {one_line(finding.text)}")
