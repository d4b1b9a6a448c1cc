"""Which part of a tensor is recorded: slices, each for the sites or keys that a glob names.

How much of what is wanted is recorded: which steps, how many calls, which part, how many bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from tensorcap.runs.window import parse_window
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


_SPAN: Final = re.compile(r"(\d{1,18})(-(\d{1,18})?)?")
_OPEN: Final = sys.maxsize  # where a span ends that has no end
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?", re.IGNORECASE)
_UNITS: Final = {
    "b": 1,
    **{f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", 1)},
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user narrowed a capture to, beside globs.

    Attributes:
        steps: Only these; all where it is empty.
        sample: At most the first so many calls of each site, over all steps; all where it is None.
        max_bytes: Record no tensor that would make the archive hold more than this; None for no limit.
        slices: What part of tensors is recorded.
    """

    steps: tuple[range, ...] = ()
    sample: int | None = None
    max_bytes: int | None = None
    slices: Slices = field(default_factory=Slices)

    @classmethod
    def of(
        cls,
        *,
        steps: str | Iterable[range | int] = (),
        sample: int | None = None,
        max_bytes: int | str | None = None,
        slices: str | Iterable[str] = (),
    ) -> Limits:
        """The limits that a user gave, as texts or as numbers.

        Raises:
            UsageError: One of them cannot be read, or leaves nothing.
        """
        if sample is not None and sample < 1:
            raise UsageError(f"sample {sample!r}: expected at least 1")
        most = parse_size(max_bytes) if isinstance(max_bytes, str) else max_bytes
        if most is not None and most < 1:
            raise UsageError(f"max_bytes {max_bytes!r}: expected at least 1")
        spans = parse_steps(steps) if isinstance(steps, str) else map(_span, steps)
        return cls(tuple(spans), sample, most, Slices.parse(slices))

    @property
    def are_none(self) -> bool:
        """Whether every call is recorded, as far as limits go."""
        return not self.steps and self.sample is None and self.max_bytes is None

    def allow(self, step: int, ordinal: int) -> bool:
        """Whether a call is recorded.

        Args:
            step: Number of its step.
            ordinal: How many calls of the site came before it in the run.
        """
        if self.steps and not any(step in span for span in self.steps):
            return False
        return self.sample is None or ordinal < self.sample

    def unmet(self, steps: int) -> tuple[str, ...]:
        """The steps that were asked for and are beyond a run of so many, each span as a text."""
        return tuple(f"steps {span_text(span)}" for span in self.steps if span.start >= steps)

    def describe(self) -> dict[str, Any]:
        """The limits that were given, as the run's metadata keep them."""
        found: dict[str, Any] = {}
        if self.steps:
            found["steps"] = ",".join(map(span_text, self.steps))
        if self.sample is not None:
            found["sample"] = self.sample
        if self.max_bytes is not None:
            found["max_bytes"] = self.max_bytes
        if self.slices.texts:
            found["slices"] = list(self.slices.texts)
        return found


def parse_steps(text: str) -> tuple[range, ...]:
    """Read numbers of steps, and spans of them; a span without an end is open.

    Raises:
        UsageError: It is no such list.

    Example:
        >>> parse_steps("0,5-9")
        (range(0, 1), range(5, 10))
    """
    spans = []
    for part in text.split(","):
        found = _SPAN.fullmatch(part.strip())
        if found is None:
            raise UsageError(
                f"steps {abbreviate(text)!r}: {abbreviate(part)!r} is no step, expected numbers such as "
                "0,1,5-9 or 5-"
            )
        start = int(found[1])
        stop = start + 1 if found[2] is None else _OPEN if found[3] is None else int(found[3]) + 1
        if stop <= start:
            raise UsageError(f"steps {abbreviate(text)!r}: {part.strip()!r} ends before it begins")
        spans.append(range(start, stop))
    return tuple(spans)


def parse_size(text: str) -> int:
    """Read a size in bytes, which may have a unit: kB is 1000 bytes, KiB is 1024.

    Raises:
        UsageError: It is no size.

    Example:
        >>> parse_size("2GiB"), parse_size("1.5 MB"), parse_size("4096")
        (2147483648, 1500000, 4096)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"size {abbreviate(text)!r}: expected bytes such as 4096, 500MB or 2GiB")
    return int(float(found[1]) * _UNITS[(found[2] or "B").lower()])


def _span(steps: range | int) -> range:
    """A span of the Python API."""
    if isinstance(steps, int):
        steps = range(steps, steps + 1)
    if steps.start < 0 or steps.step != 1 or not steps:
        raise UsageError(f"steps: found {steps!r}, expected numbers from 0 on, such as range(5, 10)")
    return steps


def span_text(span: range) -> str:
    """A span as `parse_steps` reads it."""
    if len(span) == 1:
        return str(span.start)
    return f"{span.start}-" if span.stop == _OPEN else f"{span.start}-{span.stop - 1}"
