"""`tcap recover`: save what a capture that was killed had written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorcap.wording import counted
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import print_result
from tensorcap_cli.text.progress import byte_bar

if TYPE_CHECKING:
    from tensorcap_formats.writing.recovery import Recovered


@click.command("recover", cls=Command, short_help="Save what a killed capture had written.")
@click.argument("path", metavar="ARCHIVE", type=click.Path())
@click.option(
    "-o", "--output", metavar="ARCHIVE", type=click.Path(), help="Put it here instead of in its place."
)
@json_option
def command(path: str, *, output: str | None, as_json: bool) -> None:
    """Finish ARCHIVE, whose capture was killed or ran out of disk.

    ARCHIVE is where it was to be; ARCHIVE.partial and ARCHIVE.journal lie beside it. Every tensor that the
    journal confirms and whose bytes have the right checksum is kept. The result is marked incomplete. It
    may be interrupted and repeated.

    \b
        tcap recover ref.h5
        tcap recover ref.h5 -o saved.h5

    Exit status: 0 all that was confirmed is saved, 1 some of it is lost or the disk is full, 2 wrong usage,
    3 there is nothing to recover, or a capture is still at work.
    """
    from tensorcap_formats.writing import recover

    with byte_bar("checking") as bar:
        saved = recover(path, output=output, progress=bar)
    print_result(saved, _print, as_json=as_json)


def _print(saved: Recovered) -> None:
    kind = "whole, only its last rename was missing" if saved.was_complete else "incomplete"
    click.echo(f"{saved.path}: {counted(saved.records, 'tensor')} saved, {saved.lost} lost; {kind}")
