"""`tcap preflight`: what two runs differ in before any tensor does."""

from __future__ import annotations

import click

from tensorcap_cli.options.archives import json_option, map_option, reference_repeat_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result


@click.command("preflight", cls=Command, short_help="What two runs differ in apart from their tensors.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@reference_repeat_option
@map_option
@json_option
def command(
    reference: str,
    target: str,
    *,
    reference_repeat: str | None,
    mapping: str | None,
    as_json: bool,
) -> None:
    """Look at what can make TGT differ from REF before any module is at fault.

    Inputs, repeatability, training mode, configuration, classes of modules, parameters, attention,
    buffers, settings, precision and versions are compared; what explains a divergence is listed first. If
    the runs have other names, what belongs together is checked as by `tcap align`.
    `tcap compare` prints the same above its table.

    \b
        tcap preflight ref.h5 tgt.h5
        tcap preflight ref.h5 tgt.h5 --reference-repeat ref-again.h5

    Exit status: 0 nothing that explains a divergence; 1 there is something; 2 wrong usage; 3 an archive
    cannot be read.
    """
    from tensorcap import preflight
    from tensorcap.reports.next_step import NextStep, Sides
    from tensorcap_cli.text.preflight import print_whole_preflight

    checklist = preflight(reference, target, mapping=mapping, reference_repeat=reference_repeat)
    step = NextStep("whether the tensors agree", Sides(reference, target, mapping or "").command("compare"))
    print_result(checklist, print_whole_preflight, as_json=as_json, next_step=lambda _: step)
