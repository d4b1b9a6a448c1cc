"""A localization as text or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from tensorcap_cli.text.output import class_text, number_text, one_line, print_json

if TYPE_CHECKING:
    from tensorcap.localization.suspect import Localization, Suspect

_SHOWN: Final = 5


def print_localization(localization: Localization, note: str, *, as_json: bool) -> None:
    """Print the suspects, the first of them with reasons, and what is known besides.

    Args:
        localization: The result.
        note: A sentence that goes with its own notes, or nothing.
        as_json: JSON instead of text.
    """
    from tensorcap.reports.localization_json import localization_value
    from tensorcap.reports.verification_text import around_texts

    notes = [*localization.notes, *([note] if note else [])]
    if as_json:
        value = {
            **localization_value(localization),
            "notes": notes,
            "exit_status": localization.exit_status,
        }
        print_json({"format": "tensorcap-localization", "version": 1, **value})
        return
    for text in notes:
        click.secho(one_line(text), fg="yellow")
    if not localization.suspects:
        click.secho("Nobody is accused.", fg="yellow" if localization.open else "green", bold=True)
    for place, suspect in enumerate(localization.suspects[:_SHOWN], 1):
        _print_suspect(place, suspect)
    if len(localization.suspects) > _SHOWN:
        click.echo(f"and {len(localization.suspects) - _SHOWN} more")
    for text in around_texts(localization):
        click.echo(one_line(text))


def _print_suspect(place: int, suspect: Suspect) -> None:
    name = f" ({class_text(suspect.class_name)})" if suspect.class_name else ""
    click.secho(f"{place}. {suspect.module}{name}", fg="red", bold=True)
    numbers = {"own": suspect.own, "inherited": suspect.inherited, "total": suspect.total}
    if suspect.noise is not None:
        numbers["from run to run"] = suspect.noise
    errors = [f"{what} {number_text(value, 3)}" for what, value in numbers.items() if value is not None]
    if suspect.ratio is not None:
        errors.append(f"R {number_text(suspect.ratio, 3)}")
    click.echo(f"   error: {', '.join(errors) or suspect.status} (at {one_line(suspect.key)})")
    click.echo(f"   by {' and '.join(suspect.by)}: {one_line(suspect.reason)}")
    explanation = suspect.diagnosis
    if explanation is not None:
        click.echo(f"   explained: {one_line(explanation.text)} (leaves {number_text(explanation.after, 2)})")
        click.echo(f"   {one_line(explanation.hint)}")
    elif suspect.cause:
        click.echo(f"   root cause: {suspect.cause}")
