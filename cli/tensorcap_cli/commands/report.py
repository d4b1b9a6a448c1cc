"""`tcap report`: a comparison as one page to look at, or as Markdown for an issue."""

from __future__ import annotations

from pathlib import Path

import click

from tensorcap.wording import one_line
from tensorcap_cli.options.archives import map_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_json, print_next
from tensorcap_cli.text.progress import spinner


@click.command("report", cls=Command, short_help="Write a comparison as one page to look at.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(), required=True, help="The page, or the Markdown."
)
@click.option(
    "--markdown", is_flag=True, help="60 lines of Markdown for an issue tracker, in place of a page."
)
@click.option("--force", is_flag=True, help="Replace a file that is no report.")
@map_option
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON object.")
def command(
    reference: str,
    target: str | None,
    *,
    output: str,
    markdown: bool,
    force: bool,
    mapping: str | None,
    as_json: bool,
) -> None:
    """Write the comparison of TGT with REF as one page of HTML, to look at or to attach to an issue.

    First the verdict, the module that is guilty, the kind of mistake and the command to type next; then
    whether the comparison is fair, the suspects with pictures of their tensors, errors in execution order,
    layers and components, and all tensors. The file needs no network, and can be read with scripts blocked.

    REF and TGT are archives. REF alone is the folder that `tcap verify` wrote, or a comparison of
    `tcap compare --save`:

    \b
        tcap report ref.h5 tgt.h5 -o report.html
        tcap report verified/ -o report.html
        tcap report result.json -o report.html
        tcap report verified/ --markdown -o issue.md

    Two archives alone tell no own error from an inherited one: `tcap verify` runs the models, and writes the
    better report beside its files. A saved comparison has no values to draw.

    Exit status: 0 the report is written, whatever it says; 1 it cannot be written, or something else is in
    its place; 2 wrong usage; 3 an archive or a tensor cannot be read.
    """
    from tensorcap import report
    from tensorcap.reports.next_step import NOTHING, NextStep

    with spinner("comparing"):
        page = report(reference, target, output, mapping=mapping, markdown=markdown, force=force)
    size = Path(output).stat().st_size
    if as_json:
        print_json(
            {
                "format": "tensorcap-report",
                "version": 1,
                "path": output,
                "kind": "markdown" if markdown else "html",
                "bytes": size,
                "verdict": page.verdict,
                "culprit": page.culprit or None,
                "suspects": [suspect.name for suspect in page.suspects],
                "next": page.next.command or None,
                "exit_status": page.exit_status,
            }
        )
        return
    click.echo(one_line(page.verdict))
    if page.culprit:
        click.echo(one_line(page.culprit))
    click.echo(f"{one_line(output)}: written, {size:,} bytes", err=True)
    print_next(NextStep("", page.next.command) if page.next.command else NextStep(NOTHING))
