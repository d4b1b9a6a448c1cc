"""`tcap view`: look at one archive, or at two and where they differ, in a browser."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import webbrowser
from contextlib import ExitStack

import click

from tensorcap.wording import one_line
from tensorcap_cli.options.archives import map_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.progress import spinner


@click.command("view", cls=Command, short_help="Look at tensors and where they differ, in a browser.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="[TGT]", type=click.Path(), required=False)
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=0, help="Port of the page; any if 0."
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@map_option
def command(reference: str, target: str | None, *, port: int, no_browser: bool, mapping: str | None) -> None:
    """Serve a page to look at REF, or at TGT beside REF, until interrupted (Ctrl-C).

    A list of all tensors (sort, filter, walk by keyboard), where what is selected stands among the modules
    and what it is computed of, its source with the line marked, and both tensors and their difference as
    maps of any two axes, with statistics, metrics, what tests say, and a diagnosis on demand.

    REF and TGT are archives, also such that are still being written. REF alone is one archive to browse, the
    folder that `tcap verify` wrote, or a comparison of `tcap compare --save`:

    \b
        tcap view ref.h5 tgt.h5
        tcap view verified/
        tcap view ref.h5

    The page is for this machine alone, at an address with a random part that is new each time. To see it
    from another machine, forward the port as the second line says. Keys: `?` on the page lists them.

    Exit status: 0 interrupted; 2 wrong usage, or the port is in use; 3 an archive cannot be read.
    """
    from tensorcap import view

    waiting = ExitStack()

    def announce(address: str) -> None:
        waiting.close()
        click.echo(address)
        number = address.split(":")[2].partition("/")[0]
        click.echo(f"from another machine: ssh -L {number}:127.0.0.1:{number} {_login()}", err=True)
        click.echo("Ctrl-C ends it.", err=True)
        if not no_browser and _has_screen():
            webbrowser.open(address)

    with waiting:
        waiting.enter_context(spinner("comparing" if target else "opening"))
        try:
            view(reference, target, mapping=mapping, port=port, opened=announce)
        except KeyboardInterrupt:  # how a page is closed
            click.echo("Closed.", err=True)


def _has_screen() -> bool:
    """Whether a browser would open a window, and not take over the terminal."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _login() -> str:
    """How this machine is called for ssh."""
    try:
        return one_line(f"{getpass.getuser()}@{socket.gethostname()}")
    except (OSError, KeyError):  # a process without a user name
        return "THIS_MACHINE"
