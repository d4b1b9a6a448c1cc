"""`tcap replay`: run a trusted model on another run's values, module by module."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import click

from tensorcap_cli.options.archives import compute_dtype_option, json_option, map_option
from tensorcap_cli.options.neuron_sources import neuron_sources_option
from tensorcap_cli.options.run import (
    make_target,
    reference_model_option,
    run_options,
    target_model_option,
)
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result
from tensorcap_cli.text.progress import StageLines


@click.command(
    "replay", cls=Command, short_help="Run a trusted model on another run's values, module by module."
)
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@reference_model_option
@target_model_option
@map_option
@compute_dtype_option
@click.option("--twin/--no-twin", default=True, help="Run the model in TGT's precision too; on by default.")
@run_options
@click.option("--all", "show_all", is_flag=True, help="The own error and R of every result of a leaf.")
@neuron_sources_option
@json_option
def command(
    reference: str,
    target: str | None,
    *,
    reference_model: str | None,
    target_model: str | None,
    mapping: str | None,
    compute_dtype: str | None,
    twin: bool,
    show_all: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the model of REF on the values of TGT, and compare what each module computes with TGT's results.

    Every module is given what the target's was given, so that no error is inherited: a result that differs is
    that module's own error. An argument that differs comes from the code of the module that calls. Only the
    target's archive is needed, not its model; if it has other names, a mapping is used.

    \b
        tcap replay ref.h5 tgt.h5 --reference-model model.py:reference
        tcap replay ref.h5 tgt.h5

    Of a target that is compiled from an exported graph (Core AI), and a reference captured as that graph,
    each operation is computed on the target's values.

    Beside it runs a twin, the same model in TGT's precision, unless that is float32: R is a result's own
    error in units of the twin's. Its range is printed, and with --all that of each leaf.

    Without TGT the model is run on its own values, which it has to give back bit for bit: do that first.

    \b
        tcap replay ref.h5 --reference-model model.py:reference

    With --target-model it is the other way round: the target's modules are run on the values of REF, and
    their results are compared with REF's. TGT is then a capture of that model, which is made if it is not
    given; the run options are for the target. Name the trusted model too if you can: run in the target's
    precision, it shows how much the computation rounds by itself.

    \b
        tcap replay ref.h5 --target-model port.py:target
        tcap replay ref.h5 --target-model port.py:target \\
            --reference-model model.py:reference

    Exit status: 0 nothing is suspect; 1 something is, was not judged, or is missing in TGT, or the run does
    not repeat itself; 2 wrong usage; 3 an input file cannot be read.
    """
    from tensorcap.reports.next_step import Sides, after_errors
    from tensorcap.rerun import replay
    from tensorcap_cli.text.replay import print_replay
    from tensorcap_formats.open import open_archive

    with open_archive(reference) as trusted:
        model = reference_model if target_model is None else target_model
        workload = make_target(model, trusted, options)
        trusted_model, tested_model = (workload, None) if target_model is None else (None, workload)
        if target_model is not None and reference_model is not None and twin:
            trusted_model = replace(make_target(reference_model, trusted, {}), seed=workload.seed)
        result = replay(
            trusted,
            target,
            reference_model=trusted_model,
            target_model=tested_model,
            mapping=mapping,
            compute_dtype=compute_dtype,
            twin=twin,
            progress=StageLines(),
        )
    models = {"reference_model": reference_model, "target_model": target_model}
    sides = Sides(reference, target or "", mapping or "", {**models, "compute_dtype": compute_dtype})
    is_bad = bool(result.bad) and not result.is_self
    print_result(
        result,
        partial(print_replay, show_all=show_all),
        as_json=as_json,
        next_step=lambda _: after_errors(sides, is_bad=is_bad),
    )
