"""`tcap report`: a comparison as one page to look at, or as Markdown for an issue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tensorcap.wording import one_line, some
from tensorcap_cli.options.archives import map_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import DASH, print_json, print_next, print_table
from tensorcap_cli.text.progress import spinner

if TYPE_CHECKING:
    from tensorcap.reports.html import ExperimentPage, Matrix, Page
    from tensorcap.reports.html.matrix import TargetColumn


@click.command("report", cls=Command, short_help="Write a comparison as one page to look at.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("targets", metavar="[TGT]…", type=click.Path(), nargs=-1)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(),
    required=True,
    help="The page, the Markdown, or the folder of plots.",
)
@click.option(
    "--markdown", is_flag=True, help="60 lines of Markdown for an issue tracker, in place of a page."
)
@click.option(
    "--png", is_flag=True, help="Plots for papers in a new folder of the name FILE, in place of a page."
)
@click.option("--force", is_flag=True, help="Replace a file that is no report.")
@map_option
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON object.")
def command(
    reference: str,
    targets: tuple[str, ...],
    *,
    output: str,
    markdown: bool,
    png: bool,
    force: bool,
    mapping: str | None,
    as_json: bool,
) -> None:
    """Write the comparison of TGT with REF as one page of HTML, to look at or to attach to an issue.

    First the verdict, the module that is guilty, the kind of mistake and the command to type next; then
    whether the comparison is fair, the suspects with pictures of their tensors, errors in execution order,
    layers and components, and all tensors. The file needs no network, and can be read with scripts blocked.

    REF and TGT are archives. REF alone is the folder that `tcap verify` wrote, that of `tcap equivalence`
    (its stages, faults and components), or a comparison of `tcap compare --save`. Several TGT, or several
    folders of `verify` and saved comparisons, make a matrix: what became of each target, and of each result
    in each of them, such as one target over time:

    \b
        tcap report ref.h5 tgt.h5 -o report.html
        tcap report verified/ -o report.html
        tcap report result.json -o report.html
        tcap report verified/ --markdown -o issue.md
        tcap report experiment/ -o report.html
        tcap report ref.h5 tgt.h5 --png -o plots/
        tcap report ref.h5 monday.h5 tuesday.h5 wednesday.h5 -o history.html
        tcap report monday.json tuesday.json -o history.html

    Two archives alone tell no own error from an inherited one: `tcap verify` runs the models, and writes the
    better report beside its files. A saved comparison has no values to draw.

    Exit status: 0 the report is written, whatever it says; 1 it cannot be written, or something else is in
    its place; 2 wrong usage; 3 an archive or a tensor cannot be read.
    """
    from tensorcap import report
    from tensorcap.reports.html import Matrix
    from tensorcap.reports.next_step import NOTHING, NextStep

    with spinner("comparing"):
        page = report(reference, targets, output, mapping=mapping, markdown=markdown, png=png, force=force)
    if as_json:
        kind = "png" if png else "markdown" if markdown else "html"
        head = {"format": "tensorcap-report", "version": 1, "path": output, "kind": kind}
        print_json({**head, "bytes": _size(Path(output)), **_report_json(page)})
        return
    click.echo(one_line(page.verdict))
    if not isinstance(page, Matrix):
        if page.culprit:
            click.echo(one_line(page.culprit))
        command = page.next.command
    else:
        rows = [_target_row(number, target) for number, target in enumerate(page.targets, 1)]
        print_table(("", "target", "tensors", "suspect"), rows, left=(1, 2, 3), flexible=(3, 1))
        command = next((t.next.command for t in page.targets if t.next.command), "")
    click.echo(f"{one_line(output)}: written, {_size(Path(output)):,} bytes", err=True)
    print_next(NextStep("", command) if command else NextStep(NOTHING))


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    files = [*path.iterdir()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _report_json(page: Page | Matrix | ExperimentPage) -> dict[str, Any]:
    from tensorcap.reports.html import ExperimentPage, Page

    if isinstance(page, ExperimentPage):
        return {"verdict": page.verdict, **_members(page, page.suspects)}
    if isinstance(page, Page):
        return {"verdict": page.verdict, **_members(page, [suspect.name for suspect in page.suspects])}
    targets = [
        {"target": one.name, "verdict": one.verdict, **_members(one, one.suspects)} for one in page.targets
    ]
    return {"verdict": page.verdict, "targets": targets, "exit_status": page.exit_status}


def _members(judged: Page | TargetColumn | ExperimentPage, suspects: Sequence[str]) -> dict[str, Any]:
    return {
        "culprit": judged.culprit or None,
        "suspects": list(suspects),
        "next": judged.next.command or None,
        "exit_status": judged.exit_status,
    }


def _target_row(number: int, target: TargetColumn) -> list[str]:
    counts = ", ".join(f"{count} {status}" for status, count, _ in target.counts)
    suspects = some([one_line(name) for name in target.suspects])
    return [str(number), one_line(target.name), counts, suspects or DASH]
