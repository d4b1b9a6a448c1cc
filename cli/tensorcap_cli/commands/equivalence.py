"""`tcap equivalence`: the files that the Equivalence method exchanges."""

from __future__ import annotations

from typing import Any

import click

from tensorcap.wording import one_line
from tensorcap_cli.commands.localize import localize_options, localize_sides
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_json


@click.command("equivalence", cls=Command, short_help="Write and read the files of the Equivalence method.")
@click.argument("reference", metavar="[REF]", type=click.Path(), required=False)
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@click.option("--stage2", metavar="FILE", type=click.Path(), help="Write R of each module, as JSON.")
@click.option("--stage3", metavar="FILE", type=click.Path(), help="Write the faults, as JSON.")
@click.option(
    "--from", "source", metavar="FILE", type=click.Path(), help="Read a stage 2 or 3 JSON; no archives."
)
@localize_options
@json_option
def command(
    reference: str | None,
    target: str | None,
    *,
    stage2: str | None,
    stage3: str | None,
    source: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Localize as `tcap localize` does, and write the result in the files of the Equivalence method.

    \b
        tcap equivalence ref.h5 tgt.h5 --stage2 stage2.json --stage3 stage3.json
        tcap equivalence ref.h5 --target-model port.py:target --stage3 stage3.json

    With --from such a file is read, and its faults are printed:

    \b
        tcap equivalence --from stage2.json --stage3 stage3.json

    Exit status: 0 nobody is accused, and nothing is wrong or missing; 1 somebody is, or something is; 2 wrong
    usage; 3 an input file cannot be read.
    """
    if source is not None:
        has_others = reference is not None or stage2 is not None
        if has_others or any(options[name] for name in ("reference_model", "target_model", "target_repeat")):
            raise click.UsageError("--from FILE is all that is read, expected --stage3 or --json at most.")
        status = _print_faults(source, stage3, as_json=as_json)
    elif reference is None or not (stage2 or stage3):
        raise click.UsageError("Missing argument: expected REF and --stage2 or --stage3, or --from FILE.")
    else:
        status = _write_stages(reference, target, stage2, stage3, options, as_json=as_json)
    click.get_current_context().exit(status)


def _write_stages(
    reference: str,
    target: str | None,
    stage2: str | None,
    stage3: str | None,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    from tensorcap.reports import equivalence
    from tensorcap_cli.text.localization import print_localization
    from tensorcap_formats.errors import UsageError

    localization, note, sides = localize_sides(reference, target, options)
    if not localization.own_errors:
        raise UsageError(
            "--stage2, --stage3: own errors are not known, expected --reference-model or --target-model"
        )
    components = equivalence.components(localization.own_errors, localization.suspects)
    if stage2:
        equivalence.write_stage(stage2, equivalence.stage2(components))
    if stage3:
        equivalence.write_stage(stage3, equivalence.stage3(equivalence.faults(components)))
    print_localization(localization, note, sides, as_json=as_json)
    return localization.exit_status


def _print_faults(source: str, stage3: str | None, *, as_json: bool) -> int:
    from tensorcap.reports import equivalence

    faults = equivalence.read_faults(source)
    if stage3:
        equivalence.write_stage(stage3, equivalence.stage3(faults))
    if as_json:
        from tensorcap_formats.json_values import json_value

        print_json({"format": "tensorcap-faults", "version": 1, "faults": json_value(faults)})
    elif not faults:
        click.secho("No component failed.", fg="green", bold=True)
    for place, fault in enumerate(faults if not as_json else (), 1):
        click.secho(f"{place}. {one_line(fault.component)} ({fault.pattern})", fg="red", bold=True)
        click.echo(f"   {fault.root_cause}: {one_line(fault.description)}")
    return int(bool(faults))
