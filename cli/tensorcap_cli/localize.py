"""`tcap localize`: which module is guilty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.output import StageLines, one_line, print_json
from tensorcap_cli.workload_options import made_target, target_options

if TYPE_CHECKING:
    from tensorcap.localization.suspect import Localization
    from tensorcap.workload.workload import Workload
    from tensorcap_formats.archive import Archive

_SHOWN = 5


@click.command("localize", short_help="Rank the modules that may be guilty, with reasons.")
@click.argument("reference", metavar="[REF]", type=click.Path(), required=False)
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@click.option(
    "--reference",
    "model",
    metavar="MODEL",
    help="The trusted model, to be replayed: FILE.py:FUNCTION, or a Hugging Face model; by default that of "
    "REF's own run; none: archives alone.",
)
@click.option(
    "--into",
    metavar="WORKLOAD",
    help="The target, to be run on REF's values: FILE.py:FUNCTION, or a Hugging Face model.",
)
@click.option("--repeat", metavar="TGT2", type=click.Path(), help="Another run of the target: its noise.")
@click.option("--map", "mapping", metavar="FILE", type=click.Path(), help="As for `tcap compare`.")
@click.option("--compute-dtype", metavar="DTYPE", help="Precision in which TGT computed, if it does not say.")
@click.option(
    "--from", "source", metavar="FILE", type=click.Path(), help="A stage 2 or 3 JSON of Equivalence."
)
@click.option(
    "--stage2", metavar="FILE", type=click.Path(), help="Write R of each module as Equivalence does."
)
@click.option("--stage3", metavar="FILE", type=click.Path(), help="Write the faults as Equivalence does.")
@target_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    reference: str | None,
    target: str | None,
    *,
    source: str | None,
    stage2: str | None,
    stage3: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Name the module that is guilty of what TGT does otherwise than REF.

    The trusted model is run on the target's values (see `tcap replay`), so that each module's own error is
    told from what it inherited. Of each suspect it says both, and which usual mistake explains its values;
    besides, where errors begin in the order of execution, and where values stop being finite.

    \b
        tcap localize ref.h5 tgt.h5
        tcap localize ref.h5 tgt.h5 --reference model.py:reference --repeat tgt2.h5

    Whoever has the target and not the reference's model has the target run on the reference's values (see
    `tcap inject`); TGT may be left out then, and --dtype and others are the target's:

    \b
        tcap localize ref.h5 --into port.py:target

    Where no model can be run, two archives still say something, and it is said that this is weaker:

    \b
        tcap localize ref.h5 tgt.h5 --reference none

    --stage2 and --stage3 write what the Equivalence method exchanges, and --from reads either:

    \b
        tcap localize --from stage2.json --stage3 stage3.json

    Exit status: 0 nobody is accused, and nothing is wrong or missing; 1 somebody is, or something is; 2 wrong
    usage; 3 an input file cannot be read.
    """
    if source is not None:
        if (
            reference is not None
            or stage2 is not None
            or any(options[n] for n in ("model", "into", "repeat"))
        ):
            raise click.UsageError("--from FILE is all that is read, expected --stage3 or --json at most.")
        status = _from_file(source, stage3, as_json=as_json)
    elif reference is None or (target is None and options["into"] is None):
        raise click.UsageError("Missing argument: expected REF TGT, REF --into WORKLOAD, or --from FILE.")
    else:
        status = _localized(reference, target, stage2, stage3, options, as_json=as_json)
    click.get_current_context().exit(status)


def _localized(
    reference: str,
    target: str | None,
    stage2: str | None,
    stage3: str | None,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    from tensorcap.localization.localization import localize
    from tensorcap.reports import equivalence
    from tensorcap_formats.errors import UsageError
    from tensorcap_formats.open import open_archive

    model, into = options.pop("model"), options.pop("into")
    given = {name: options.pop(name) for name in ("mapping", "compute_dtype")}
    given["target_repeat"] = options.pop("repeat")
    options = {**options, "inputs": options.pop("input_file")}
    with open_archive(reference) as trusted:
        target_model = None if into is None else _made(into, trusted, options)
        if into is not None:  # the options are the target's
            options = dict.fromkeys(options)
        is_replayed = model != "none" and (model is not None or into is None)
        reference_model, note = _replayed(model, trusted, options) if is_replayed else (None, "")
        found = localize(
            trusted,
            target,
            reference_model=reference_model,
            target_model=target_model,
            progress=StageLines(),
            **given,
        )
    if stage2 or stage3:
        if not found.own_errors:
            raise UsageError("--stage2, --stage3: own errors are not known, expected a model or --into")
        results = equivalence.components(found.own_errors)
        if stage2:
            equivalence.write_stage(stage2, equivalence.stage2(results))
        if stage3:
            equivalence.write_stage(stage3, equivalence.stage3(equivalence.faults(results)))
    _tell(found, note, as_json=as_json)
    return found.exit_status


def _made(model: str | None, trusted: Archive, options: dict[str, Any]) -> Workload:
    recipe, inputs = made_target(model, trusted, dict(options))
    return recipe.build(inputs)


def _replayed(model: str | None, trusted: Archive, options: dict[str, Any]) -> tuple[Workload | None, str]:
    """The reference's workload, or none and why, if it was not asked for by name."""
    from tensorcap_formats.errors import UsageError

    try:
        return _made(model, trusted, options), ""
    except UsageError as error:
        if model is not None or trusted.info.workload.path:
            raise
        return None, f"{error}; name the model by --reference to have more than archives say."


def _from_file(source: str, stage3: str | None, *, as_json: bool) -> int:
    from tensorcap.reports import equivalence

    faults = equivalence.read_faults(source)
    content = equivalence.stage3(faults)
    if stage3:
        equivalence.write_stage(stage3, content)
    if as_json:
        from tensorcap_formats.json_values import json_value

        print_json({"format": "tensorcap-faults", "version": 1, "faults": json_value(faults)})
    elif not faults:
        click.secho("No component failed.", fg="green", bold=True)
    for place, fault in enumerate(faults if not as_json else (), 1):
        click.secho(f"{place}. {one_line(fault.component)} ({fault.pattern})", fg="red", bold=True)
        click.echo(f"   {fault.root_cause}: {one_line(fault.description)}")
    return int(bool(faults))


def _tell(found: Localization, note: str, *, as_json: bool) -> None:
    from tensorcap.reports.suspects import context_lines, suspect_lines

    notes = [*found.notes, *([note] if note else [])]
    if as_json:
        print_json({**found.to_json(), "notes": notes})
        return
    for text in notes:
        click.secho(one_line(text), fg="yellow")
    if not found.suspects:
        click.secho("Nobody is accused.", fg="yellow" if found.open else "green", bold=True)
    for place, suspect in enumerate(found.suspects[:_SHOWN], 1):
        heading, *details = suspect_lines(place, suspect)
        click.secho(one_line(heading), fg="red", bold=True)
        for detail in details:
            click.echo(f"   {one_line(detail)}")
    if len(found.suspects) > _SHOWN:
        click.echo(f"and {len(found.suspects) - _SHOWN} more")
    for text in context_lines(found):
        click.echo(one_line(text))
