"""Counts and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FEW: Final = 3  # items of a list that are named; the others are counted


def some(names: Sequence[str]) -> str:
    """Join the first few of some names, and say how many more there are.

    Example:
        >>> some(["a", "b"]), some(["a", "b", "c", "d", "e"])
        ('a, b', 'a, b, c, and 2 more')
    """
    more = f", and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    Example:
        >>> counted(1, "tensor"), counted(2, "tensor")
        ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
