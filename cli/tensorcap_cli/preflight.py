"""`tcap preflight`: what two runs differ in before any tensor does."""

from __future__ import annotations

from contextlib import nullcontext

import click

from tensorcap_cli.output import print_json


@click.command("preflight", short_help="What two runs differ in apart from their tensors.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@click.option(
    "--repeat",
    metavar="ARCHIVE",
    type=click.Path(),
    help="A second run of the reference: is it bit-equal to the first?",
)
@click.option("--map", metavar="FILE", type=click.Path(), help="As for `tcap compare`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    reference: str,
    target: str,
    *,
    repeat: str | None,
    map: str | None,  # the option's name
    as_json: bool,
) -> None:
    """Look at what can make TGT differ from REF before any module is at fault.

    Inputs, repeatability, training mode, configuration, classes of modules, parameters, attention,
    buffers, settings, precision and versions are compared; what explains a divergence is listed first. Where
    the runs have other names, what belongs together is found as by `tcap align`.
    `tcap compare` prints the same above its table.

    \b
        tcap preflight ref.h5 tgt.h5
        tcap preflight ref.h5 tgt.h5 --repeat ref-again.h5

    Exit status: 0 nothing that explains a divergence; 1 there is something; 2 wrong usage; 3 an archive
    cannot be read.
    """
    from tensorcap.alignment.aligned import sides
    from tensorcap.comparison.preflight.checklist import preflight
    from tensorcap_formats.open import open_archive

    with (
        open_archive(reference) as trusted,
        open_archive(target) as tested,
        open_archive(repeat) if repeat else nullcontext() as again,
    ):
        found = preflight(*sides(trusted, tested, map), repeat=again)
    if as_json:
        from tensorcap_formats.json_values import json_value

        print_json(
            {
                "format": "tensorcap-preflight",
                "version": 1,
                "exit_status": found.exit_status,
                **json_value(found),
            }
        )
    else:
        from tensorcap_cli.preflight_text import print_preflight

        print_preflight(found, is_brief=False)
        if not found.explaining:
            click.secho("Nothing explains a divergence.", fg="green", bold=True)
    click.get_current_context().exit(found.exit_status)
