"""Cards of HTML by which objects show themselves in a notebook: short, legible on light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

Tone = Literal["plain", "green", "red"]
ROWS: Final = 8  # of a table; a card says how many more there are
_LONGEST: Final = 160  # characters of a text: its middle is left out
_COLOURS: Final[Mapping[Tone, str]] = {"plain": "#7f8792", "green": "#2a9d4a", "red": "#d64541"}
_CARD: Final = (
    "border-left:4px solid {colour};padding:.2em .8em;margin:.3em 0;font-size:13px;line-height:1.45"
)
_TABLE: Final = "border-collapse:collapse;margin:.3em 0"
_CELL: Final = "text-align:left;padding:.05em .9em .05em 0;border:0;font-family:monospace"
_QUIET: Final = "opacity:.7"


def card(
    title: str,
    facts: Mapping[str, str] | None = None,
    *,
    lines: Sequence[str] = (),
    head: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    count: int | None = None,
    tone: Tone = "plain",
) -> str:
    """HTML of an object; all text is escaped, and what is not printable is left out.

    Args:
        title: What it is, in a line.
        facts: Further things by name; empty ones are left out.
        lines: Sentences.
        head: Names of the table's columns.
        rows: Its rows; the first eight are shown.
        count: How many rows there are in all, if `rows` has the first ones alone.
        tone: Colour of the card's edge: whether the object is a verdict.
    """
    parts = [f"<b>{_text(title)}</b>"]
    named = [f"<span style='{_QUIET}'>{_text(k)}</span> {_text(v)}" for k, v in (facts or {}).items() if v]
    parts += ["<br>" + " &nbsp; ".join(named)] if named else []
    parts += [f"<br>{_text(line)}" for line in lines]
    if rows:
        parts.append(_table(head, rows[:ROWS]))
        more = (len(rows) if count is None else count) - min(len(rows), ROWS)
        parts += [f"<span style='{_QUIET}'>… {more} more</span>"] if more > 0 else []
    return f"<div style='{_CARD.format(colour=_COLOURS[tone])}'>{''.join(parts)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = "".join(f"<th style='{_CELL};{_QUIET}'>{_text(name)}</th>" for name in head)
    body = "".join(
        "<tr style='background:none'>"
        + "".join(f"<td style='{_CELL}'>{_text(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f"<table style='{_TABLE}'><tr style='background:none'>{names}</tr>{body}</table>"


def _text(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    half = (_LONGEST - 1) // 2
    line = line if len(line) <= _LONGEST else f"{line[:half]}…{line[-half:]}"
    return f"<bdi>{html.escape(line)}</bdi>"
