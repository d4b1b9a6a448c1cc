"""`tcap check`: whether an archive is whole and its bytes are what was written."""

from __future__ import annotations

import click

from tensorcap_cli.output import plural, print_json, progress, size_text


@click.command("check", short_help="Check structure, sizes and checksums of an archive.")
@click.argument("archive", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(archive: str, *, as_json: bool) -> None:
    """Read all of ARCHIVE and check structure, sizes and checksums; print a line for each problem.

    What may well be meant, as a run that ended early, is a warning and changes nothing in the exit status.

    \b
        tcap check ref.h5

    Exit status: 0 no problem, 2 wrong usage, 3 problems found, or ARCHIVE cannot be opened.
    """
    from tensorcap_formats.check import check_archive
    from tensorcap_formats.open import open_archive

    with open_archive(archive) as opened, progress("checking") as bar:
        result = check_archive(opened, progress=bar)
    if as_json:
        print_json({"path": archive, **result.to_json()})
    else:
        for problem in result.problems:
            kind = "warning: " if problem.is_warning else ""
            click.echo(f"{kind}{problem.key or archive}: {problem.what}")
        wrong = sum(not problem.is_warning for problem in result.problems)
        outcome = plural(wrong, "problem") if wrong else "no problem"
        click.echo(
            f"{archive}: {plural(result.records, 'tensor')}, {size_text(result.nbytes)}: {outcome} found"
        )
    click.get_current_context().exit(result.exit_status)
