"""`tcap bisect`: where two runs part, by looking at few of their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.options.archives import (
    atol_option,
    compute_dtype_option,
    json_option,
    map_option,
    rtol_option,
)
from tensorcap_cli.options.neuron_sources import neuron_sources_option
from tensorcap_cli.options.run import (
    both_sides,
    make_target,
    open_reference,
    run_options,
    target_model_option,
)
from tensorcap_cli.options.sections import Command
from tensorcap_cli.options.time_limit import time_limit_option
from tensorcap_cli.text.output import option_words, print_result
from tensorcap_cli.text.progress import Bar, spinner

if TYPE_CHECKING:
    from pathlib import Path

    from tensorcap_formats.archive import Archive


@click.command(
    "bisect",
    cls=Command,
    short_help="Find where two runs part, by reading few tensors or by running the target.",
)
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@target_model_option
@rtol_option
@atol_option
@compute_dtype_option
@map_option
@click.option("--limit", type=float, metavar="E", help="Live: relative error of a good final output.")
@click.option("--check", metavar="COMMAND", help="Live: judges a run by its exit status; see below.")
@click.option(
    "--level", type=click.Choice(["module", "op"]), default="module", help="Live: how far down to go."
)
@click.option("--state", metavar="FILE", type=click.Path(), help="Live: keeps runs, to go on after a break.")
@run_options
@neuron_sources_option
@time_limit_option
@json_option
def command(
    reference: str,
    target: str | None,
    *,
    target_model: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the first result of a module that is not green, reading about log2(n) tensors of each archive.

    Results of modules are searched in order of execution, those with equal digests without being read. The
    search relies on errors that stay once they are there, and checks this on a few more; if they do not stay,
    all results up to the first bad one are read. An error too small for its place is not seen: `tcap compare`
    looks at every tensor.

    \b
        tcap bisect ref.h5 tgt.h5
        tcap bisect ref.h5 tgt.h5 --rtol 1e-2 --map map.toml

    With --target-model the target is run, about log2(n) times: what it computes up to a cut is replaced by
    what REF has there, and the final output says on which side of the cut the mistake is. The command of
    --check finds the path of a run's archive in the variable TCAP_RUN.

    \b
        tcap bisect ref.h5 --target-model port.py:target --level op
        tcap bisect ref.h5 --target-model port.py:target --check ./good.sh

    max:ID alone, of a Hugging Face model, makes both sides: the model of transformers, and MAX's own pipeline
    for it, which is run.

    \b
        tcap bisect max:google/gemma-3-1b-it --prompt Hi

    Exit status: 0 no result is bad; 1 one is, or TGT lacks one; 2 wrong usage; 3 an archive or a tensor
    cannot be read.
    """
    limits = {name: options.pop(name) for name in ("rtol", "atol", "compute_dtype")}
    live = {name: options.pop(name) for name in ("limit", "check", "level", "state")}
    mapping = options.pop("mapping")
    if target is not None:
        is_live = any(value not in (None, "module") for value in live.values())
        if target_model is not None or is_live:
            raise click.UsageError(
                "TGT is an archive, expected no --target-model, --limit, --check, --level or --state."
            )
        _bisect_archives(reference, target, mapping, limits, as_json=as_json)
    else:
        if any(value is not None for value in limits.values()):
            raise click.UsageError("--rtol, --atol and --compute-dtype are for archives, expected TGT.")
        _bisect_live(reference, target_model, mapping, live, options, as_json=as_json)


def _bisect_archives(
    reference: str, target: str, mapping: str | None, limits: dict[str, Any], *, as_json: bool
) -> None:
    from tensorcap.localization import bisect_archives
    from tensorcap.reports.next_step import Sides, after_errors
    from tensorcap_cli.text.bisection import print_bisection

    with spinner("bisecting") as bar:
        bisection = bisect_archives(
            reference, target, mapping=mapping, progress=bar and _Counted(bar), **limits
        )
    sides = Sides(reference, target, mapping or "", {"compute_dtype": limits["compute_dtype"]})
    is_bad = bisection.exit_status != 0
    print_result(
        bisection, print_bisection, as_json=as_json, next_step=lambda _: after_errors(sides, is_bad=is_bad)
    )


def _bisect_live(
    reference: str,
    target_model: str | None,
    mapping: str | None,
    live: dict[str, Any],
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from tensorcap.localization import bisect_live
    from tensorcap.reports.next_step import Sides, after_errors, after_pipeline_errors
    from tensorcap_cli.text.bisection import print_live_bisection

    with open_reference(reference, target_model, options) as (trusted, model), spinner("bisecting") as bar:
        bisection = bisect_live(
            trusted,
            make_target(model, trusted, options),
            mapping=mapping,
            reference_ops=lambda path, sites: _reference_ops(trusted, path, sites),
            progress=bar and _Counted(bar),
            **live,
        )
    is_bad = bisection.exit_status != 0
    trusted_model, pipeline = both_sides(reference)
    if pipeline is None:
        sides = Sides(reference, mapping=mapping or "", options={"target_model": target_model})
        step = after_errors(sides, is_bad=is_bad)
    else:
        models = [reference] if target_model is None else [trusted_model, target_model]
        step = after_pipeline_errors(models, option_words(options), is_bad=is_bad)
    print_result(bisection, print_live_bisection, as_json=as_json, next_step=lambda _: step)


class _Counted:
    """Shows how often something was done, and on what, in one line."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._stage = ""

    def stage(self, text: str) -> None:
        """Keep what is being done."""
        self._stage = text

    def advance(self, done: int, total: int | None) -> None:
        """Show how often."""
        self._bar.stage(f"bisecting: {done}, {self._stage}")


def _reference_ops(trusted: Archive, path: Path, sites: tuple[str, ...]) -> Path:
    """Run the reference again, as its archive says, for the ops of some modules."""
    from tensorcap.session import Recipe, capture_workload
    from tensorcap.workload import archived_inputs

    workload = Recipe.of(trusted).build(archived_inputs(trusted))
    run = capture_workload(workload, path, level="op", ops_in=sites)
    return run.path or path
