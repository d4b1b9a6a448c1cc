"""`tcap align`: which tensor of one archive is which of another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from tensorcap_cli.options.archives import json_option, map_option, rules_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_json, print_next
from tensorcap_cli.text.progress import spinner

if TYPE_CHECKING:
    from tensorcap.alignment import Alignment
    from tensorcap.alignment.match import By
    from tensorcap.reports.next_step import NextStep, Sides


@click.command("align", cls=Command, short_help="Find which tensors of two archives belong together.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@click.option("-o", "--output", metavar="FILE", type=click.Path(), help="Write the mapping, .toml or .json.")
@click.option("--force", is_flag=True, help="Replace a FILE that is there.")
@click.option(
    "--by",
    type=click.Choice(["all", "values", "names", "none"]),
    default="all",
    help="Look at names alone, at everything but names, or compute nothing and check --map.",
)
@map_option
@rules_option
@click.option("--all", "show_all", is_flag=True, help="Entries of arguments too, and the reason of each.")
@json_option
def command(
    reference: str,
    target: str,
    *,
    output: str | None,
    force: bool,
    by: str,
    rules: str | None,
    mapping: str | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Find which tensor of TGT is which of REF by names, structure, shapes and values, and by which steps.

    Tensors may be fused, split, stacked or laid out otherwise; `{i}` stands for the indices of a list. Each
    entry names its evidence. What is left over is listed with the reason, marked `?` if none is known. --map
    begins with a mapping of yours and computes the rest. `tcap compare --map FILE` compares by the file that
    is written here, edited or not; a .json is the Equivalence method's component_mapping.json.

    \b
        tcap align ref.h5 tgt.h5
        tcap align ref.h5 tgt.h5 -o map.toml
        tcap align ref.h5 tgt.h5 --rules names.toml
        tcap align ref.h5 tgt.h5 --map mine.toml -o map.toml
        tcap compare ref.h5 tgt.h5 --map map.toml

    Exit status: 0 every tensor of REF is mapped, or it is known why not; 1 one is neither; 2 wrong usage, or
    a map that does not fit; 3 an archive cannot be read.
    """
    from tensorcap.alignment import align
    from tensorcap.reports.next_step import Sides
    from tensorcap_cli.text.alignment import print_aligned
    from tensorcap_formats.open import opened_both
    from tensorcap_formats.output_path import is_stream

    if mapping is None and by == "none":
        raise click.UsageError("--by none computes nothing, expected --map.")
    if rules is not None and by in ("values", "none"):
        raise click.UsageError(f"--by {by} looks at no names, expected no --rules.")
    if output is not None and not force and Path(output).exists() and not is_stream(Path(output)):
        raise click.UsageError(f"-o {output}: is there already; replace it with --force.")
    with opened_both(reference, target) as (trusted, tested):
        with spinner("aligning"):
            aligned = align(
                trusted, tested, mapping=mapping, rules=rules, by=cast('By | Literal["none"]', by)
            )
        if output is not None:
            title = f"What of {target} is what of {reference}.\nSpecified in specs/alignment.md."
            _write(aligned.alignment, output, title, replace=force)
        if as_json:
            print_json(aligned.to_json())
        else:
            print_aligned(aligned, show_all=show_all)
            if output is not None:
                click.echo(f"Written to {output}.", err=True)
            print_next(
                _next_step(aligned.summary.exit_status, Sides(reference, target, output or mapping or ""))
            )
    click.get_current_context().exit(aligned.summary.exit_status)


def _next_step(exit_status: int, sides: Sides) -> NextStep:
    """The step after an alignment: compare by the map; if there is none and much is left over, make one."""
    from tensorcap.reports.next_step import NextStep

    if sides.mapping or exit_status == 0:
        return NextStep("whether what belongs together agrees", sides.command("compare"))
    return NextStep("a map to edit", sides.command("align", "-o", "map.toml"))


def _write(alignment: Alignment, output: str, title: str, *, replace: bool) -> None:
    """Write a mapping in the form that the file's name asks for."""
    if output.endswith(".json"):
        from tensorcap.alignment import write_component_mapping

        for remark in write_component_mapping(alignment, output, replace=replace):
            click.echo(f"note: {remark}", err=True)
    else:
        from tensorcap.alignment import write_map

        write_map(alignment, output, title=title, replace=replace)
