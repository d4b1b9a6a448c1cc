"""What a capture records and how the archive is written: the options of `tensorcap.capture`, parsed once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap_formats.errors import UsageError, abbreviate

Level = Literal["module", "op", "export"]
LEVELS: Final[tuple[Level, ...]] = Level.__args__  # type: ignore[attr-defined] # no public name for it

_SLICE: Final = re.compile(r"(?:(.+)=)?(\[[^\[\]]*\])", re.DOTALL)
_SLICE_ENTRY: Final = re.compile(r"([+-]?\d{1,18})?:([+-]?\d{1,18})?(:(\+?[1-9]\d{0,17})?)?")
_SPAN: Final = re.compile(r"(\d{1,18})(-(\d{1,18})?)?")
_OPEN: Final = sys.maxsize  # where a span ends that has no end
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?", re.IGNORECASE)
_BYTES_OF_UNIT: Final = {
    "b": 1,
    **{f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", 1)},
}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of tensors, and the sites or keys of which only this part is recorded.

    Attributes:
        text: As the user wrote it: `[..., :64]` or `GLOB=[:, -1:]`.
        glob: The sites or keys; `*` if the user named none.
        entries: The slice of each axis, or `...`.
    """

    text: str
    glob: str
    entries: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """What a capture records and how the archive is written: the arguments of `tensorcap.capture`, parsed.

    Attributes:
        decompositions: The converter whose table an exported graph is decomposed by; empty for none.
        params: Whether the values of parameters and buffers are recorded; None for digests and statistics.
        steps: The steps that are recorded, all if empty.
        sample: How many calls of each site are recorded at most; None for all.
        slices: Of which tensors only a part is recorded; the first one whose glob fits counts.
        max_bytes: No tensor is recorded that would make the archive hold more bytes; None for no limit.
    """

    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    inputs: bool = True
    level: Level = "module"
    decompositions: str = ""
    ops_in: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()
    grads: bool = False
    params: bool | None = None
    eager: bool = False
    steps: tuple[range, ...] = ()
    sample: int | None = None
    slices: tuple[TensorSlice, ...] = ()
    max_bytes: int | None = None
    injectable: tuple[str, ...] = ()
    inner: bool = False
    stats_only: bool = False
    container: str | None = None
    fsync: bool = False

    def __post_init__(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            UsageError: There is no such level; `ops_in` is set but no ops are recorded, or `decompositions`
                but no graph is exported.
        """
        if self.level not in LEVELS:
            raise UsageError(f"level {self.level!r}: expected one of {', '.join(LEVELS)}")
        if self.ops_in and self.level == "module":
            raise UsageError(
                "ops_in is of ops, and the level is module", hint="Take level op, or level export."
            )
        if self.decompositions and self.level != "export":
            raise UsageError(
                f"decompositions {self.decompositions!r}: of exported graphs, and the level is {self.level}",
                hint="Take level export.",
            )

    @classmethod
    def parse(cls, **values: Any) -> CaptureOptions:
        """Read options as a user writes them: globs, steps and sizes may be texts.

        Args:
            values: Options by name, as `tensorcap.capture` takes them.

        Raises:
            UsageError: One of them cannot be read, leaves nothing, or contradicts another.

        Example:
            >>> CaptureOptions.parse(only="*.mlp", steps="0,5-9").describe()
            {'include': ['*.mlp'], 'exclude': [], 'steps': '0,5-9', 'inputs': True}
        """
        return cls(**{name: _PARSERS.get(name, _unchanged)(value) for name, value in values.items()})

    @property
    def limits_calls(self) -> bool:
        """Whether steps, calls or bytes are limited, so that some calls of a site may not be recorded."""
        return bool(self.steps) or self.sample is not None or self.max_bytes is not None

    def allows_call(self, step: int, ordinal: int) -> bool:
        """Whether a call is recorded, as far as the limits on steps and calls go.

        Args:
            step: Number of its step.
            ordinal: How many calls of the site came before it in the run.
        """
        if self.steps and not any(step in span for span in self.steps):
            return False
        return self.sample is None or ordinal < self.sample

    def describe(self) -> dict[str, Any]:
        """The entry `scope` of the run's metadata: the globs, `inputs`, and what is not as by default."""
        always = {"include": list(self.only), "exclude": list(self.exclude)}
        limits = {
            "steps": ",".join(map(span_text, self.steps)),
            "sample": self.sample,
            "max_bytes": self.max_bytes,
            "slices": [part.text for part in self.slices],
        }
        level = {"level": self.level} if self.level != "module" else {}
        rest = {
            "decompositions": self.decompositions,
            "ops_in": list(self.ops_in),
            "watch": list(self.watch),
            "grads": self.grads,
            "params": self.params,
            "eager": self.eager,
            "inner": self.inner,
        }
        return {**always, **_set_only(limits), "inputs": self.inputs, **level, **_set_only(rest)}


def _set_only(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are not as by default: None, False or empty."""
    return {name: value for name, value in values.items() if value}


def as_tuple(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Globs, or other texts, as a tuple; a single one may be a plain text."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def parse_steps(steps: str | Iterable[range | int]) -> tuple[range, ...]:
    """Read numbers of steps, and spans of them; a span without an end is open.

    Args:
        steps: A text such as `0,5-9`, or numbers and ranges.

    Raises:
        UsageError: It is no such list.

    Example:
        >>> parse_steps("0,5-9"), parse_steps([0, range(5, 10)])
        ((range(0, 1), range(5, 10)), (range(0, 1), range(5, 10)))
    """
    if not isinstance(steps, str):
        return tuple(map(_as_span, steps))
    spans = []
    for part in steps.split(","):
        match = _SPAN.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"steps {abbreviate(steps)!r}: {abbreviate(part)!r} is no step, expected numbers such as "
                "0,1,5-9 or 5-"
            )
        start = int(match[1])
        stop = start + 1 if match[2] is None else _OPEN if match[3] is None else int(match[3]) + 1
        if stop <= start:
            raise UsageError(f"steps {abbreviate(steps)!r}: {part.strip()!r} ends before it begins")
        spans.append(range(start, stop))
    return tuple(spans)


def _as_span(steps: range | int) -> range:
    span = range(steps, steps + 1) if isinstance(steps, int) else steps
    if span.start < 0 or span.step != 1 or not span:
        raise UsageError(f"steps: found {span!r}, expected numbers from 0 on, such as range(5, 10)")
    return span


def span_text(span: range) -> str:
    """A span as `parse_steps` reads it."""
    if len(span) == 1:
        return str(span.start)
    return f"{span.start}-" if span.stop == _OPEN else f"{span.start}-{span.stop - 1}"


def parse_size(text: str) -> int:
    """Read a size in bytes, which may have a unit: kB is 1000 bytes, KiB is 1024.

    Raises:
        UsageError: It is no size.

    Example:
        >>> parse_size("2GiB"), parse_size("1.5 MB"), parse_size("4096")
        (2147483648, 1500000, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"size {abbreviate(text)!r}: expected bytes such as 4096, 500MB or 2GiB")
    return int(float(match[1]) * _BYTES_OF_UNIT[(match[2] or "B").lower()])


def _parse_max_bytes(limit: int | str | None) -> int | None:
    limit_bytes = parse_size(limit) if isinstance(limit, str) else limit
    if limit_bytes is not None and limit_bytes < 1:
        raise UsageError(f"max_bytes {limit!r}: expected at least 1")
    return limit_bytes


def _parse_sample(count: int | None) -> int | None:
    if count is not None and count < 1:
        raise UsageError(f"sample {count!r}: expected at least 1")
    return count


def parse_slices(texts: str | Iterable[str]) -> tuple[TensorSlice, ...]:
    """Read slices of tensors.

    Args:
        texts: `[..., :64]`, or `GLOB=[:, -1:]`; one or several.

    Raises:
        UsageError: One is no slice; an integer is none, as it would drop an axis.

    Example:
        >>> parse_slices("*.self_attn=[:, -1:]")
        (TensorSlice(text='*.self_attn=[:, -1:]', glob='*.self_attn', entries=(':', '-1:')),)
    """
    return tuple(map(_parse_slice, as_tuple(texts)))


def _parse_slice(text: str) -> TensorSlice:
    match = _SLICE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"slice {abbreviate(text)!r}: expected [..., :64] or GLOB=[:, -1:]")
    entries = tuple(entry.strip() for entry in match[2][1:-1].split(","))
    for entry in entries:
        if entry != "..." and not _SLICE_ENTRY.fullmatch(entry):
            raise UsageError(
                f"slice {abbreviate(text)!r}: {abbreviate(entry)!r} is no slice such as :64",
                hint="A slice keeps every axis: instead of -1 write -1:.",
            )
    if entries.count("...") > 1:
        raise UsageError(f"slice {abbreviate(text)!r}: has more than one '...'")
    return TensorSlice(text, match[1] or "*", entries)


def _unchanged(value: Any) -> Any:
    return value


_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {  # the others are given as they are kept
    "only": as_tuple,
    "exclude": as_tuple,
    "ops_in": as_tuple,
    "watch": as_tuple,
    "injectable": as_tuple,
    "steps": parse_steps,
    "sample": _parse_sample,
    "max_bytes": _parse_max_bytes,
    "slices": parse_slices,
}
