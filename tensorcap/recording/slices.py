"""Which part of a tensor is recorded: slices, each for the sites or keys that a glob names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tensorcap.window import parse_window
from tensorcap_formats.errors import UsageError, abbreviate

_GIVEN: Final = re.compile(r"(?:(.+)=)?(\[[^\[\]]*\])", re.DOTALL)
_ENTRY: Final = re.compile(r"([+-]?\d{1,18})?:([+-]?\d{1,18})?(:(\+?[1-9]\d{0,17})?)?")


class NothingLeftError(Exception):
    """A slice would leave no element of a tensor; the text says which."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices as a user gave them; the first one whose glob fits counts.

    Attributes:
        parts: Of each the text, `[..., :64]` or `GLOB=[:, -1:]`, the glob, and the entries.
    """

    parts: tuple[tuple[str, str, tuple[str, ...]], ...] = ()

    @classmethod
    def parse(cls, texts: str | Iterable[str]) -> Slices:
        """Read the slices of a user.

        Raises:
            UsageError: One is no slice; an integer, which would drop an axis, is none.

        Example:
            >>> Slices.parse("*.self_attn=[:, -1:]").parts
            (('*.self_attn=[:, -1:]', '*.self_attn', (':', '-1:')),)
        """
        return cls(tuple(map(_parse, (texts,) if isinstance(texts, str) else texts)))

    @property
    def texts(self) -> tuple[str, ...]:
        """The slices as they were given."""
        return tuple(text for text, _, _ in self.parts)


@lru_cache(maxsize=1024)  # a model has few shapes
def window(entries: tuple[str, ...], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """What entries of a slice leave of a shape.

    Returns:
        A slice for each axis, or None for all of it, also where it has fewer axes than there are entries.

    Raises:
        NothingLeftError: There are elements, and none of them would be left.
    """
    if len(entries) - entries.count("...") > len(shape):
        return None
    text = f"[{', '.join(entries)}]"
    ranges = [r for r in parse_window(text, shape) if isinstance(r, range)]
    if all(len(r) == n for r, n in zip(ranges, shape, strict=True)):
        return None
    if all(shape) and not all(map(len, ranges)):
        raise NothingLeftError(f"slice {text} leaves nothing of shape {list(shape)}")
    return tuple(slice(r.start, r.stop, r.step) for r in ranges)


def _parse(text: str) -> tuple[str, str, tuple[str, ...]]:
    found = _GIVEN.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"slice {abbreviate(text)!r}: expected [..., :64] or GLOB=[:, -1:]")
    entries = tuple(entry.strip() for entry in found[2][1:-1].split(","))
    for entry in entries:
        if entry != "..." and not _ENTRY.fullmatch(entry):
            raise UsageError(
                f"slice {abbreviate(text)!r}: {abbreviate(entry)!r} is no slice such as :64",
                hint="A slice keeps every axis: instead of -1 write -1:.",
            )
    if entries.count("...") > 1:
        raise UsageError(f"slice {abbreviate(text)!r}: has more than one '...'")
    return text, found[1] or "*", entries
