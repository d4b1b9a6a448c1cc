"""What two runs differ in before any tensor does, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import one_line
from tensorcap_cli.text.output import print_heading

if TYPE_CHECKING:
    from tensorcap.comparison.preflight import Item, Preflight

_ITEMS: Final = 10
_FEW: Final = 4


def print_brief_preflight(preflight: Preflight, *, is_green: bool) -> None:
    """Print what explains a divergence, and the first of what differs besides.

    Args:
        preflight: What differs apart from tensors.
        is_green: Whether there is no divergence to explain: then what could explain one is no alarm.
    """
    if is_green:
        _print_though_green(preflight)
        minor = [item for item in preflight.items if not item.explains]
    else:
        minor = _print_explaining(preflight)
    if minor:
        click.echo(f"also different: {_short_items(minor)}")


def _print_though_green(preflight: Preflight) -> None:
    """Print what could explain a divergence, of which there is none."""
    from tensorcap.comparison.preflight import item_text

    settings = []
    for item in preflight.explaining:
        if item.kind in ("inputs", "repeat", "mode"):
            click.echo(f"note: {item_text(item)}")
        else:
            settings.append(item)
    if settings:
        click.echo(f"differs, though all that was compared agrees: {_short_items(settings)}")


def print_whole_preflight(preflight: Preflight) -> None:
    """Print what explains a divergence, what differs besides, what is equal, and what was not checked."""
    from tensorcap.comparison.preflight import item_text

    minor = _print_explaining(preflight)
    if minor:
        click.echo("\nDIFFERENT, which alone is no mistake")
        for item in minor:
            click.echo(f"  {item_text(item)}")
    click.echo()
    click.echo(f"equal        {', '.join(preflight.equal) or 'nothing'}")
    for kind, reason in preflight.unchecked.items():
        click.echo(f"not checked  {kind}: {one_line(reason)}")
    if not preflight.explaining:
        click.secho("Nothing explains a divergence.", fg="green", bold=True)


def _print_explaining(preflight: Preflight) -> list[Item]:
    """Print what explains a divergence; return what differs besides."""
    from tensorcap.comparison.preflight import item_text

    explaining = preflight.explaining
    if explaining:
        print_heading("BEFORE ANY TENSOR  these alone make outputs differ", fg="red")
        for item in explaining[:_ITEMS]:
            click.echo(f"  {item_text(item)}")
        if len(explaining) > _ITEMS:
            click.echo(f"  … {len(explaining) - _ITEMS} more: tcap preflight lists them")
    return [item for item in preflight.items if not item.explains]


def _short_items(items: Sequence[Item]) -> str:
    more = f", … {len(items) - _FEW} more" if len(items) > _FEW else ""
    return ", ".join(map(_short_item, items[:_FEW])) + more


def _short_item(item: Item) -> str:
    from tensorcap.comparison.preflight import item_text, side_texts

    if item.kind == "hyperparameters":
        return item_text(item).removesuffix(".")
    if item.kind in ("parameters", "buffers") and item.name in item.text:
        return f"{item.text[:1].lower()}{item.text[1:]}".removesuffix(".")
    ours, theirs = side_texts(item, 24)
    if item.kind == "modules" and ours == item.name:
        return f"class {one_line(item.name)} ({theirs} in the target)"
    return f"{one_line(item.name)} ({ours} / {theirs})"
