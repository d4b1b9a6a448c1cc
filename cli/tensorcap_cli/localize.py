"""`tcap localize`: which module is guilty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.capture_text import progress
from tensorcap_cli.output import DASH, class_text, number_text, one_line, print_json
from tensorcap_cli.workload_options import made_target, target_options

if TYPE_CHECKING:
    from tensorcap.localizing import Suspect

_SHOWN = 5


@click.command("localize", short_help="Rank the modules that may be guilty, with reasons.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@click.option(
    "--reference",
    "model",
    metavar="MODEL",
    help="The trusted model, to be replayed: FILE.py:FUNCTION, or a Hugging Face model; by default that of "
    "REF's own run; none: archives alone.",
)
@click.option("--map", "mapping", metavar="FILE", type=click.Path(), help="As for `tcap compare`.")
@click.option("--compute-dtype", metavar="DTYPE", help="Precision in which TGT computed, if it does not say.")
@target_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    reference: str,
    target: str,
    *,
    model: str | None,
    mapping: str | None,
    compute_dtype: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Name the module that is guilty of what TGT does otherwise than REF.

    The trusted model is run on the target's values (see `tcap replay`), so that each module's own error is
    told from what it inherited. Of each suspect it says both, and which usual mistake explains its values.

    \b
        tcap localize ref.h5 tgt.h5
        tcap localize ref.h5 tgt.h5 --reference model.py:reference

    Where no model can be made, two archives still say something, and it is said that this is weaker:

    \b
        tcap localize ref.h5 tgt.h5 --reference none

    Exit status: 0 nobody is accused, and nothing is wrong or missing; 1 somebody is, or something is; 2 wrong
    usage; 3 an input file cannot be read.
    """
    from tensorcap.localizing import localize
    from tensorcap.reports.reporting import json_value
    from tensorcap_formats.errors import UsageError
    from tensorcap_formats.opening import open_archive

    note = ""
    workload, seed = None, None
    with open_archive(reference) as trusted:
        if model != "none":
            given = {**options, "inputs": options.pop("input_file")}
            try:
                recipe, inputs = made_target(model, trusted, given)
            except UsageError as error:
                if model is not None or isinstance(trusted.run.get("workload"), dict):
                    raise
                note = f"{error}; name the model by --reference to have more than archives say."
            else:
                workload, seed = recipe.build(inputs), int(recipe.options.get("seed", 0))
        found = localize(
            trusted,
            target,
            workload,
            mapping=mapping,
            compute_dtype=compute_dtype,
            seed=seed,
            around=progress,
        )
    notes = [*found.notes, *([note] if note else [])]
    if as_json:
        print_json(
            {
                "format": "tensorcap-localization",
                "version": 1,
                "by": found.by,
                "suspects": [
                    {
                        "module": s.module,
                        "class": s.class_name or None,
                        "key": s.key,
                        "own": json_value(s.own),
                        "inherited": json_value(s.inherited),
                        "total": json_value(s.total),
                        "reason": s.reason,
                        "diagnosis": None
                        if s.diagnosis is None
                        else {
                            "kind": s.diagnosis.kind,
                            "text": s.diagnosis.text,
                            "before": json_value(s.diagnosis.before),
                            "after": json_value(s.diagnosis.after),
                        },
                    }
                    for s in found.suspects
                ],
                "nonfinite": None
                if found.nonfinite is None
                else {"key": found.nonfinite[0], "module": found.nonfinite[1]},
                "open": list(found.open),
                "notes": notes,
                "exit_status": found.exit_status,
            }
        )
    else:
        for text in notes:
            click.secho(text, fg="yellow")
        if found.nonfinite is not None:
            click.echo(f"First tensor that is not finite on one side only: {found.nonfinite[0]}")
        if not found.suspects:
            click.secho("Nobody is accused.", fg="yellow" if found.open else "green", bold=True)
        for place, suspect in enumerate(found.suspects[:_SHOWN], 1):
            _print(place, suspect)
        if len(found.suspects) > _SHOWN:
            click.echo(f"and {len(found.suspects) - _SHOWN} more")
    click.get_current_context().exit(found.exit_status)


def _print(place: int, suspect: Suspect) -> None:
    name = f" ({class_text(suspect.class_name)})" if suspect.class_name else ""
    click.secho(f"{place}. {suspect.module}{name}", fg="red", bold=True)
    numbers = ("own", suspect.own), ("inherited", suspect.inherited), ("total", suspect.total)
    said = (f"{what} {DASH if value is None else number_text(value, 3)}" for what, value in numbers)
    click.echo(f"   error: {', '.join(said)}")
    click.echo(f"   {one_line(suspect.reason)}")
    if suspect.diagnosis is not None:
        found = suspect.diagnosis
        click.echo(f"   explained: {one_line(found.text)} (leaves {number_text(found.after, 2)})")
        click.echo(f"   {one_line(found.hint)}")
