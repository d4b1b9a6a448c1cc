"""What two runs differ in before any tensor does, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import one_line

if TYPE_CHECKING:
    from tensorcap.comparison.preflight import Item, Preflight

_ITEMS: Final = 10
_MINOR: Final = 4


def print_preflight(found: Preflight, *, is_brief: bool) -> None:
    """Print what differs apart from the tensors, what explains a divergence first.

    Args:
        found: What was found.
        is_brief: Leave out what is equal, and most of what explains nothing.
    """
    from tensorcap.comparison.preflight import item_text

    explaining, minor = found.explaining, [item for item in found.items if not item.explains]
    if explaining:
        click.echo()
        click.secho("BEFORE ANY TENSOR  these alone make outputs differ", fg="red", bold=True)
        for item in explaining[:_ITEMS]:
            click.echo(f"  {item_text(item)}")
        if len(explaining) > _ITEMS:
            click.echo(f"  … {len(explaining) - _ITEMS} more: tcap preflight lists them")
    if minor and is_brief:
        shown = ", ".join(_short_item(item) for item in minor[:_MINOR])
        more = f", … {len(minor) - _MINOR} more" if len(minor) > _MINOR else ""
        click.echo(f"also other {shown}{more}")
    if is_brief:
        return
    if minor:
        click.echo("\nDIFFERENT, which alone is no mistake")
        for item in minor:
            click.echo(f"  {item_text(item)}")
    click.echo()
    click.echo(f"equal        {', '.join(found.equal) or 'nothing'}")
    for kind, reason in found.unchecked.items():
        click.echo(f"not checked  {kind}: {one_line(reason)}")


def _short_item(item: Item) -> str:
    from tensorcap.comparison.preflight import side_texts

    ours, theirs = side_texts(item, 24)
    return f"{one_line(item.name)} ({ours} / {theirs})"
