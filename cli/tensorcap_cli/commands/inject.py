"""`tcap inject`: run a target on a reference's tensors."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tensorcap_cli.options.archives import exclude_option, json_option, map_option, only_option, output_option
from tensorcap_cli.options.neuron_sources import neuron_sources_option
from tensorcap_cli.options.run import (
    like_option,
    make_target_recipe,
    open_reference,
    run_options,
    target_model_option,
)
from tensorcap_cli.options.sections import Command
from tensorcap_cli.options.time_limit import time_limit_option
from tensorcap_cli.text.progress import StageLines


@click.command(
    "inject", cls=Command, short_help="Run a target with the reference's tensors in place of its own."
)
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@target_model_option
@output_option
@click.option(
    "--inject-inputs", metavar="GLOB", multiple=True, help="Replace these arguments; all by default."
)
@click.option("--inject-outputs", metavar="GLOB", multiple=True, help="Replace these results (graft).")
@click.option("--steps", metavar="0,1,5-9", help="Only in these calls of the model.")
@click.option("--calls", metavar="0,1,5-9", help="Only in these calls of a module in a step.")
@map_option
@only_option
@exclude_option
@click.option(
    "--eager", is_flag=True, help="Run compiled code and fused attention of torch.nn as plain code."
)
@click.option("--dry-run", is_flag=True, help="Run, list what would be replaced, write nothing.")
@like_option
@run_options
@neuron_sources_option
@time_limit_option
@json_option
def command(
    reference: str,
    target: str | None,
    *,
    target_model: str | None,
    output: str | None,
    like: str | None,
    mapping: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a target with the tensors of REF in the place of its own.

    Each module is given what the reference's was given, so that its result shows its own error and no
    inherited one. The argument that it would have been given is recorded before it is replaced, and shows
    what goes wrong between modules. Globs are for the target's names. The result is an archive that says what
    was replaced; compare it with the reference as any other.

    \b
        tcap inject ref.h5 --target-model port.py:target -o own.h5
        tcap compare ref.h5 own.h5

    Without --target-model the reference's own run is repeated, with the changes that the run options ask for.
    --inject-outputs replaces results, and then no arguments unless --inject-inputs names some:

    \b
        tcap inject ref.h5 --dtype bfloat16 -o own.h5
        tcap inject ref.h5 --target-model port.py:target -o graft.h5 \\
            --inject-outputs '*layers.7'

    max:ID alone, of a Hugging Face model, makes both sides: the model of transformers, whose archive is kept
    as own.reference.h5, and MAX's own pipeline, which is given its tensors.

    \b
        tcap inject max:google/gemma-3-1b-it --prompt Hi -o own.h5
        tcap compare own.reference.h5 own.h5

    If the target has other names or layouts, a mapping is used in reverse: --map, or a computed one. For that
    the target is run once more without injection, unless TGT is the archive of that run.

    What the reference's call is not given, such as a cache that only the target has, is no failure if the
    mapping explains it: tcap align shows how.

    Exit status: 0 all that was asked for was replaced wherever it was called; 1 something was not, or the
    run failed; 2 wrong usage, or a tensor that does not fit; 3 an input file cannot be read.
    """
    from tensorcap.rerun import inject
    from tensorcap_cli.text.injection import print_injection
    from tensorcap_formats.errors import UsageError
    from tensorcap_formats.open import open_archive

    if (output is None) is not dry_run:
        raise UsageError("expected -o ARCHIVE or --dry-run, and not both")
    injected: dict[str, Any] = {
        "inputs": options.pop("inject_inputs") or None,
        "outputs": options.pop("inject_outputs") or (),
        "steps": options.pop("steps") or (),
        "calls": options.pop("calls") or (),
    }
    recording = {name: options.pop(name) for name in ("only", "exclude", "eager")}
    with ExitStack() as files:
        keep = None if output is None else Path(output).with_suffix(f".reference{Path(output).suffix}")
        trusted, target_model = files.enter_context(open_reference(reference, target_model, options, keep))
        before = trusted if like is None else files.enter_context(open_archive(like))
        recipe, inputs = make_target_recipe(target_model, before, options)
        capture = inject(
            trusted,
            recipe.build(inputs),
            output,
            **injected,
            mapping=mapping,
            target=target,
            run={"workload": recipe.describe()},
            progress=StageLines(),
            **recording,
        )
        status = print_injection(capture, as_json=as_json)
    if status:
        click.get_current_context().exit(status)
