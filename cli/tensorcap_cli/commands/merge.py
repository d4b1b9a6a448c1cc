"""`tcap merge`: the archives of all ranks of a run as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result, size_text
from tensorcap_cli.text.progress import byte_bar

if TYPE_CHECKING:
    from tensorcap_formats.merge import Merged

_PROBLEMS = 20  # that are printed; --json has all


@click.command("merge", cls=Command, short_help="Put the archives of all ranks of a run together.")
@click.argument("archives", metavar="RANK_ARCHIVE...", type=click.Path(), nargs=-1, required=True)
@click.option(
    "-o", "--output", metavar="ARCHIVE", type=click.Path(), required=True, help="The archive to write."
)
@click.option(
    "--reference",
    metavar="ARCHIVE",
    type=click.Path(),
    help="A run of the whole model: its shapes show what no rule was recorded of.",
)
@click.option(
    "--rule",
    "rules",
    metavar="GLOB=RULE",
    multiple=True,
    help="The rule of tensors whose keys match; before all others, may be repeated.",
)
@json_option
def command(
    archives: tuple[str, ...], *, output: str, reference: str | None, rules: tuple[str, ...], as_json: bool
) -> None:
    """Put the archives that the ranks of one run have written together, one RANK_ARCHIVE of each.

    A capture under torchrun writes NAME.rankN.h5 for each process:

    \b
        torchrun --nproc-per-node 2 -m tensorcap_cli capture script \\
            -o tgt.h5 -- model.py
        tcap merge tgt.rank*.h5 -o tgt.h5
        tcap compare ref.h5 tgt.h5

    Commands that read archives take the ranks themselves too, in quotes: tcap compare ref.h5 'tgt.rank*.h5'.

    How a tensor is put together is known, in this order, by --rule; as recorded, of DTensors; if all ranks
    hold the same; by the shape that the tensor of the same key has in --reference; and by other tensors of
    the run: the same tensor elsewhere, or one that all ranks hold and that is the sum, or the parts joined.
    The values of the reference are never looked at. What nothing shows keeps its rank in the key. Rules:

    \b
        replicated                each rank holds all of it: checked bit for bit
        concat -1                 each holds a part along an axis, here the last
        concat -1 parts=2         each part is of two, as of a fused gate and up
        concat -1 parts=64,16,16  of these sizes, as fused queries, keys, values
        concat -1 parts=64,16,16 copies=1,2,2
                                  and keys and values of each two ranks are copies
        concat 1 copies=2         ranks 0 and 1 hold the same, 2 and 3, and so on,
                                  as KV heads fewer than ranks
        concat 1 rounds=2         half of the ranks hold all, and so does the rest
        concat -1 cut=50257       what is behind is padding, as of a vocabulary
        sum, avg, max, min        each holds a term of all elements

    \b
        tcap merge tgt.rank*.h5 -o tgt.h5 \\
            --rule '*.gate_up_proj=concat -1 parts=2'

    What ranks hold unlike though the rule says the same is a mistake of the run: it is printed, and compare
    finds it. tcap ls and show print the rule of each tensor.

    Exit status: 0 written; 1 written, with a problem, or it could not be; 2 wrong usage, or a rank is
    missing, there twice, or of another run; 3 an archive cannot be read.
    """
    from tensorcap_formats.merge import merge

    parted = [text.partition("=") for text in rules]
    for glob, _, rule in parted:
        if not glob or not rule:
            raise click.UsageError("--rule expects GLOB=RULE, as '*.gate_up_proj=concat -1 parts=2'.")
    with byte_bar("merging") as bar:
        merged = merge(
            archives,
            output,
            reference=reference,
            rules={glob: rule for glob, _, rule in parted},
            progress=bar,
        )
    print_result(merged, print_merged, as_json=as_json)


def print_merged(merged: Merged) -> None:
    """Print what was merged, by which rules, and what is wrong with it."""
    ranks = counted(merged.ranks, "rank")
    click.echo(f"{merged.path}: {counted(merged.records, 'tensor')} of {ranks}, {size_text(merged.nbytes)}")
    for (rule, known), count in sorted(merged.rules.items(), key=lambda entry: -entry[1]):
        click.echo(f"  {count:>6}  {rule} ({one_line(known)})")
    for problem in merged.problems[:_PROBLEMS]:
        click.echo(f"{problem.key}: {one_line(problem.text)}")
    if len(merged.problems) > _PROBLEMS:
        click.echo(f"… {len(merged.problems) - _PROBLEMS} more problems; all with --json")
    unmerged = [problem.key for problem in merged.problems if problem.kind == "unmerged"]
    if any(key.partition("/")[2].startswith("@root/input") for key in unmerged):
        click.echo(
            "Ranks were given unlike inputs: if each had rows of its own, --rule '*=concat 0' joins them."
        )
    elif unmerged:
        click.echo("--reference ARCHIVE, a run of the whole model, or --rule says how these belong together.")
