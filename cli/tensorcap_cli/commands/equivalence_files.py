"""`tcap equivalence archives`, and `localize --from`: the method's files without an experiment."""

from __future__ import annotations

from typing import Any

import click

from tensorcap_cli.commands.localize import localize_options, localize_sides
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.equivalence import print_faults
from tensorcap_cli.text.output import print_json


@click.command("archives", cls=Command, short_help="Write stage 2 and 3 files of two archives.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@click.option("--stage2", metavar="FILE", type=click.Path(), help="Write R of each module, as JSON.")
@click.option("--stage3", metavar="FILE", type=click.Path(), help="Write the faults, as JSON.")
@localize_options
@json_option
def archives_command(
    reference: str,
    target: str | None,
    *,
    stage2: str | None,
    stage3: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Localize as `tcap localize` does, and write the result in the files of the Equivalence method.

    \b
        tcap equivalence archives ref.h5 tgt.h5 --stage2 stage2.json --stage3 stage3.json
        tcap equivalence archives ref.h5 --target-model port.py:target --stage3 stage3.json

    Exit status: 0 nobody is accused, and nothing is wrong or missing; 1 somebody is, or something is; 2 wrong
    usage; 3 an input file cannot be read.
    """
    from tensorcap.reports import equivalence
    from tensorcap_cli.text.localization import print_localization
    from tensorcap_formats.errors import UsageError

    if not (stage2 or stage3):
        raise click.UsageError("nothing to write, expected --stage2 or --stage3.")
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
    click.get_current_context().exit(localization.exit_status)


def localize_files(source: str, stage3: str | None, *, as_json: bool) -> None:
    """Print the faults of a file of stage 2 or 3, and write them; end with 1 if there are any.

    Args:
        source: The file.
        stage3: Where to write a file of stage 3, or None.
        as_json: Whether to print JSON.
    """
    from tensorcap.reports import equivalence
    from tensorcap_formats.json_values import json_value

    faults = equivalence.read_faults(source)
    if stage3:
        equivalence.write_stage(stage3, equivalence.stage3(faults))
    if as_json:
        print_json({"format": "tensorcap-faults", "version": 1, "faults": json_value(faults)})
    else:
        print_faults(faults)
    click.get_current_context().exit(int(bool(faults)))
