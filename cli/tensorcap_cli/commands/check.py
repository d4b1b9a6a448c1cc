"""`tcap check`: whether an archive is whole and its bytes are what was written."""

from __future__ import annotations

import click

from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import plural, print_json, size_text
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
    from tensorcap_formats.check import check_archive
    from tensorcap_formats.open import open_archive

    with open_archive(archive) as opened:
        nbytes = sum(record.nbytes for record in opened.records)
        with byte_bar("checking") as bar:
            problems = check_archive(opened, progress=bar.advance if bar else None)
        count = len(opened)
    wrong = sum(not problem.is_warning for problem in problems)
    if as_json:
        found = [{"key": p.key, "what": p.what, "is_warning": p.is_warning} for p in problems]
        print_json({"path": archive, "records": count, "bytes": nbytes, "problems": found})
    else:
        for problem in problems:
            kind = "warning: " if problem.is_warning else ""
            click.echo(f"{kind}{problem.key or archive}: {problem.what}")
        outcome = plural(wrong, "problem") if wrong else "no problem"
        click.echo(f"{archive}: {plural(count, 'tensor')}, {size_text(nbytes)}: {outcome} found")
    click.get_current_context().exit(3 if wrong else 0)
