"""`tcap replay`: run a trusted model on another run's values, module by module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from tensorcap_cli.capture_text import capture_progress
from tensorcap_cli.output import DASH, StageLines, number_text, one_line, plural, print_json, print_table
from tensorcap_cli.workload_options import made_target, target_options

_SHOWN = 20


@click.command("replay", short_help="Run a trusted model on another run's values, module by module.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@click.option(
    "--reference",
    "model",
    metavar="MODEL",
    help="The trusted model: FILE.py:FUNCTION, or a Hugging Face model; by default that of REF's own run. "
    "With --target it is run in the target's precision, and only if it is named.",
)
@click.option(
    "--target",
    "under_test",
    metavar="WORKLOAD",
    help="The target: run it on REF's values, instead of the trusted model on TGT's.",
)
@click.option("--map", "mapping", metavar="FILE", type=click.Path(), help="As for `tcap compare`.")
@click.option("--compute-dtype", metavar="DTYPE", help="Precision in which TGT computed, if it does not say.")
@click.option("--twin/--no-twin", default=True, help="Run the model in TGT's precision too; on by default.")
@target_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    reference: str,
    target: str | None,
    *,
    model: str | None,
    under_test: str | None,
    mapping: str | None,
    compute_dtype: str | None,
    twin: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the model of REF on what TGT holds, and hold what each module makes of it against TGT's results.

    Every module is given what the target's was given, so that no error is inherited: what differs is made by
    that module. An argument that differs is made by the code of the module that calls. The target itself is
    not needed, only its archive; where it has other names a mapping is used.

    \b
        tcap replay ref.h5 tgt.h5 --reference model.py:reference
        tcap replay ref.h5 tgt.h5

    Without TGT the model is run on its own values, which it has to give back bit for bit: do that first.

    \b
        tcap replay ref.h5 --reference model.py:reference

    The other way round, the target's modules are run on what REF holds, and their results are held against
    REF's. TGT is then a capture of that workload, which is made if it is not given; options that change a
    model or its inputs are for the target. Name the trusted model too, where you can: it says how much the
    computation rounds by itself.

    \b
        tcap replay ref.h5 --target port.py:target
        tcap replay ref.h5 --target port.py:target --reference model.py:reference

    Exit status: 0 nothing is suspect; 1 something is, was not judged, or is missing in TGT, or the run does
    not repeat itself; 2 wrong usage; 3 an input file cannot be read.
    """
    from tensorcap.rerun.module_replay import replay
    from tensorcap_formats.open import open_archive

    given = {**options, "inputs": options.pop("input_file")}
    with open_archive(reference) as trusted, capture_progress() as progress:
        recipe, inputs = made_target(model if under_test is None else under_test, trusted, given)
        workload = recipe.build(inputs)
        reference_model, target_model = (workload, None) if under_test is None else (None, workload)
        if under_test is not None and model is not None and twin:
            own_recipe, own_inputs = made_target(model, trusted, {})
            reference_model = replace(own_recipe.build(own_inputs), seed=workload.seed)
        found = replay(
            trusted,
            target,
            reference_model=reference_model,
            target_model=target_model,
            mapping=mapping,
            compute_dtype=compute_dtype,
            twin=twin,
            progress=StageLines(),
        )
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)
    click.get_current_context().exit(found.exit_status)


def _print(found: Any) -> None:
    for note in found.notes:
        click.secho(note, fg="yellow")
    if found.is_self and not found.exit_status:
        click.secho(
            f"The model gives its own {plural(len(found.own_errors), 'tensor')} back bit for bit.", fg="green"
        )
        return
    bad = sorted(found.bad, key=lambda own: own.made != "result" or not own.is_leaf)
    if not bad:
        judged = plural(len(found.own_errors) - len(found.unjudged), "tensor")
        what = "No module makes" if not found.exit_status else "No module that could be judged makes"
        color = "yellow" if found.exit_status else "green"
        click.secho(f"{what} an error of its own: {judged} within rounding.", fg=color, bold=True)
        return
    from tensorcap.comparison.policy import describe_test

    rows = []
    for own in bad[:_SHOWN]:
        error = DASH if own.error is None else number_text(own.error, 3)
        ratio = DASH if own.ratio is None else number_text(own.ratio, 3)
        bad_findings = [f for f in own.findings if f.status in ("suspect", "diverged")]
        tests = ", ".join(dict.fromkeys(describe_test(f.test) for f in bad_findings))
        rows.append((own.module, own.key, own.status, error, ratio, tests or DASH))
    print_table(("MODULE", "KEY", "STATUS", "OWN ERROR", "R", "TESTS"), rows, left=(0, 1, 2, 5), flexible=1)
    if len(bad) > _SHOWN:
        click.echo(f"and {len(bad) - _SHOWN} more")
    for finding in bad[0].findings:
        if finding.status in ("suspect", "diverged"):
            click.echo(f"  {one_line(finding.text)}")
