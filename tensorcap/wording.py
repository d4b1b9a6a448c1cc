"""Counts, lists and foreign text in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FEW: Final = 3  # items of a list that are named; the others are counted


def some(names: Sequence[str], few: int = FEW) -> str:
    """Join the first few of some names, and say how many more there are.

    Example:
        >>> some(["a", "b"]), some(["a", "b", "c", "d", "e"])
        ('a, b', 'a, b, c, and 2 more')
    """
    more = f", and {len(names) - few} more" if len(names) > few else ""
    return ", ".join(names[:few]) + more


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    Example:
        >>> counted(1, "tensor"), counted(2, "tensor")
        ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def one_line(text: str) -> str:
    r"""Text of a file, for a terminal: in one line, and without what a terminal would obey.

    Example:
        >>> one_line("out of\n  memory\x1b[2J")
        'out of memory [2J'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def printable(line: str) -> str:
    r"""A line with `?` for each character that a terminal would obey; its spaces stay.

    Example:
        >>> printable("a  b\x1b[2J")
        'a  b?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in line)
