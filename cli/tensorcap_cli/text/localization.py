"""A localization as text or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import one_line
from tensorcap_cli.text.output import print_json, print_next

if TYPE_CHECKING:
    from tensorcap.localization import Localization
    from tensorcap.reports.next_step import Sides

_SHOWN: Final = 5


def print_localization(
    localization: Localization, note: str, sides: Sides, *, as_json: bool, show_all: bool = False
) -> None:
    """Print the suspects, the first of them with reasons, and what is known besides.

    Args:
        localization: The result.
        note: A sentence that goes with its own notes, or nothing.
        sides: Both sides and their models, as the next command names them.
        as_json: JSON instead of text.
        show_all: All suspects, in each layer.
    """
    from tensorcap.reports.next_step import after_localization
    from tensorcap.reports.suspects import context_lines, suspect_lines

    notes = [*localization.notes, *([note] if note else [])]
    if as_json:
        print_json({**localization.to_json(), "notes": notes})
        return
    for text in notes:
        click.secho(one_line(text), fg="yellow")
    if not localization.suspects:
        click.secho("Nobody is accused.", fg="yellow" if localization.open else "green", bold=True)
    for number, suspect in enumerate(localization.suspects[: None if show_all else _SHOWN], 1):
        heading, *details = suspect_lines(number, suspect, show_all=show_all)
        click.secho(one_line(heading), fg="red", bold=True)
        for detail in details:
            click.echo(f"   {one_line(detail)}")
    if len(localization.suspects) > _SHOWN and not show_all:
        click.echo(f"and {len(localization.suspects) - _SHOWN} more; see them with --all")
    for text in context_lines(localization):
        click.echo(one_line(text))
    print_next(after_localization(localization, sides))
