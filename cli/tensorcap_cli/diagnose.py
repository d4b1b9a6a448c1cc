"""`tcap diagnose`: which mistake would make a tensor of the target of that of the reference."""

from __future__ import annotations

import click

from tensorcap_cli.output import print_json, working


@click.command("diagnose", short_help="Test what mistake explains the values of one pair.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@click.argument("key", metavar="KEY")
@click.option("--target-key", metavar="KEY", help="The tensor of TGT, where it has another key.")
@click.option(
    "--map",
    metavar="FILE",
    type=click.Path(),
    help="What belongs together, as `tcap align` writes it; `none` pairs equal keys alone.",
)
@click.option("--compute-dtype", metavar="DTYPE", help="Precision in which TGT computed, if it does not say.")
@click.option("--all", "show_all", is_flag=True, help="All that was tried, with what it left.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    reference: str,
    target: str,
    key: str,
    *,
    target_key: str | None,
    map: str | None,  # the option's name
    compute_dtype: str | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Test hypotheses on the values of tensor KEY in REF and TGT, and name those that explain the difference.

    A factor, an offset, another order, another activation or norm, a clamp, another tensor in its place, and
    more: each that holds is printed with the error that it leaves. Nothing is guessed: what does not leave
    next to nothing is not printed.

    \b
        tcap diagnose ref.h5 tgt.h5 0/model.norm/output

    Exit status: 0 a hypothesis explains the difference, or there is none; 1 none does; 2 wrong usage; 3 an
    archive or a tensor cannot be read.
    """
    from tensorcap.alignment.aligned import sides
    from tensorcap.diagnosis.diagnosis import diagnose
    from tensorcap_formats.open import open_archive

    with open_archive(reference) as trusted, open_archive(target) as tested, working("diagnosing"):
        trusted, tested = (trusted, tested) if target_key else sides(trusted, tested, map)
        found = diagnose(trusted, tested, key, target_key=target_key, compute_dtype=compute_dtype)
    if as_json:
        from tensorcap_formats.json_values import json_value

        print_json(json_value(found.to_json()))
    else:
        from tensorcap_cli.diagnose_text import print_diagnosis

        print_diagnosis(found, show_all=show_all)
    click.get_current_context().exit(found.exit_status)
