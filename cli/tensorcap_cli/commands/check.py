"""`tcap check`: whether an archive is whole and its bytes are what was written."""

from __future__ import annotations

import click

from tensorcap.wording import counted
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_json, size_text
from tensorcap_cli.text.progress import byte_bar


@click.command("check", cls=Command, short_help="Check structure, sizes and checksums of an archive.")
@click.argument("archive", type=click.Path())
@json_option
def command(archive: str, *, as_json: bool) -> None:
    """Read all of ARCHIVE and check structure, sizes and checksums; print a line for each problem.

    What may well be meant, as a run that ended early, is a warning and changes nothing in the exit status.

    \b
        tcap check ref.h5

    Exit status: 0 no problem, 2 wrong usage, 3 problems found, or ARCHIVE cannot be opened.
    """
    from tensorcap import check

    with byte_bar("checking") as bar:
        result = check(archive, progress=bar)
    if as_json:
        print_json({"path": archive, **result.to_json()})
    else:
        for problem in result.problems:
            kind = "warning: " if problem.is_warning else ""
            click.echo(f"{kind}{problem.key or archive}: {problem.what}")
        warnings = sum(problem.is_warning for problem in result.problems)
        count = len(result.problems) - warnings
        outcomes = [
            f"{counted(count, 'problem')} found" if count else "",
            counted(warnings, "warning") if warnings else "",
        ]
        outcome = ", ".join(filter(None, outcomes)) or "no problem found"
        click.echo(f"{archive}: {counted(result.records, 'tensor')}, {size_text(result.nbytes)}: {outcome}")
    click.get_current_context().exit(result.exit_status)
