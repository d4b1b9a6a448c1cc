"""Rows of the navigator in the order and the selection that a reader asked for, and the tree of modules."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from sys import intern
from typing import Any, Final, Literal

from tensorcap.comparison import (
    METRIC_TEXTS,
    SEVERITY,
    SHADES,
    Bands,
    Pair,
    Shade,
    contents,
    metric_values,
    peak_of,
    shade,
)
from tensorcap.runs import component_of
from tensorcap.wording import one_line, three_digits
from tensorcap_formats.archive import Archive
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import module_of, module_path, natural, unescape
from tensorcap_formats.records import Record

Colour = Literal["green", "yellow", "red", "grey"]
METRICS: Final[Mapping[str, str]] = {  # by name: what it is
    **{str(name): text for name, text in METRIC_TEXTS.items()},
    "relative": "norm of t - r over the norm of r",
    "cosine": "cosine of the angle between both",
}
ORDERS: Final = ("similarity", "execution", "name", "own error")
_RANKED: Final = {"relative": "relative_frobenius", "cosine": "cosine"}  # colours by precision, not by a band
_HIGHER_IS_BETTER: Final = ("psnr", "cosine")
_POWERS: Final = {"mean-squared": 2, "mean-relative": 0, "relative": 0}  # of the peak, that errors grow with
_SEVERITIES: Final = {status: number for number, status in enumerate(SEVERITY)}
_WORD: Final = re.compile(r"[^\W\d]+")
_PIECES: Final = re.compile(rf"{_WORD.pattern}|\d+|\W+")  # of a name: words, numbers, what is between them
WIDEST: Final = 160  # characters of a name: the middle of a longer one is left out


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor: a pair, or a record if one archive is looked at.

    Attributes:
        number: Its place in execution order of the reference, from 0; what only the target has stands behind
            what the target computed before it.
        key: Its key text.
        record: The reference's record, else the target's.
        pair: The pair; None if one archive is looked at.
        module: Path of its module, "" for the model itself.
        name: What is left of the key behind the module, shortened and printable.
        component: What kind of module that is.
        status: Of the pair, "" without one.
        colour: Of the status: green, yellow if suspect, red, or grey if nothing was judged.
        own: The error that its module made itself; None if unknown.
    """

    number: int
    key: str
    record: Record
    pair: Pair | None
    module: str
    name: str
    component: str
    status: str
    colour: Colour
    own: float | None

    @property
    def title(self) -> str:
        """The key for a reader: in one line, without its middle if it is long."""
        return shortened(self.key)

    def label(self, width: int) -> tuple[str, str]:
        """Its module and what is left of its key, abbreviated to so many characters with a space between."""
        name = self.name.removeprefix("aten.").removesuffix("/output").replace(".default", "")
        module = shortened(self.module) or "(model)"
        module, name = abbreviated(module, name, width=width - 1)
        return module, name


def shortened(name: str, limit: int = WIDEST) -> str:
    """A name in one line, of at most so many characters, without its middle.

    Example:
        >>> shortened("model.layers.0.mlp", 12)
        'model…0.mlp'
    """
    line = one_line(name)
    half = (limit - 1) // 2
    return line if len(line) <= limit else f"{line[:half]}…{line[-half:]}"


def abbreviated(*names: str, width: int) -> tuple[str, ...]:
    """Names that have so many characters in all, if they can: words lose their ends, numbers do not.

    One character after the other is taken of the longest word, down to two; the last word of each name, which
    tells most, counts as a third of its length.

    Example:
        >>> abbreviated("encoder.block.2.layer.0.SelfAttention.q", "output", width=40)
        ('encoder.block.2.layer.0.SelfAtt….q', 'output')
        >>> abbreviated("decoder.block.12.EncDecAttention", width=30)
        ('deco….block.12.EncDecAttention',)
    """
    excess = sum(map(len, names)) - width
    if excess <= 0:
        return names
    split = [_PIECES.findall(name) for name in names]
    words: list[tuple[float, int, int, int]] = []  # its negative length as it counts; name, place, length
    for name, pieces in enumerate(split):
        places = [at for at, piece in enumerate(pieces) if _WORD.match(piece)]
        words += [
            (-len(pieces[at]) / (3 if at == places[-1] else 1), name, at, len(pieces[at]))
            for at in places
            if len(pieces[at]) > 2
        ]
    heapify(words)
    lengths: dict[tuple[int, int], int] = {}
    while excess and words:
        counted, name, at, length = words[0]
        lengths[name, at] = length - 1
        excess -= 1
        if length > 3:
            heapreplace(words, (counted * (length - 1) / length, name, at, length - 1))
        else:
            heappop(words)
    for (name, at), length in lengths.items():
        split[name][at] = f"{split[name][at][: length - 1]}…"
    return tuple("".join(pieces) for pieces in split)


def rows_of_pairs(pairs: Iterable[Pair], own: Mapping[str, float | None]) -> tuple[Row, ...]:
    """Make a row of each pair that has a record on either side."""
    rows: list[Row] = []
    for pair in _in_execution_order(list(pairs)):
        record = pair.reference or pair.target
        if record is not None:
            rows.append(_row(len(rows), record, pair, own.get(pair.key)))
    return tuple(rows)


def _in_execution_order(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs in the reference's order; one that only the target has behind what the target computed before it.

    What only the reference has at that place comes first: an op, then what the target ran instead.
    """
    ordered = [pair for pair in pairs if pair.reference is not None or pair.target is None]
    alone = [pair for pair in pairs if pair.reference is None and pair.target is not None]
    before = sorted((p.target.order, place) for place, p in enumerate(ordered) if p.target is not None)
    behind: dict[int, list[Pair]] = {}
    for pair in sorted(alone, key=lambda p: p.target.order if p.target else 0):
        at = bisect_left(before, (pair.target.order if pair.target else 0,))
        place = before[at - 1][1] if at else -1
        while place + 1 < len(ordered) and ordered[place + 1].target is None:
            place += 1
        behind.setdefault(place, []).append(pair)
    rows = list(behind.get(-1, ()))
    for place, pair in enumerate(ordered):
        rows += [pair, *behind.get(place, ())]
    return rows


def rows_of_archive(archive: Archive) -> tuple[Row, ...]:
    """Make a row of each record."""
    return tuple(_row(number, record, None, None) for number, record in enumerate(archive.records))


def _row(number: int, record: Record, pair: Pair | None, own: float | None) -> Row:
    key = record.key
    if key.is_bare:
        module, _, name = unescape(key.text).replace("/", ".").rpartition(".")
        component = ""
    else:
        site = module_of(key.site)
        module, component = _module_of(site)
        inner = key.site_call[len(site) :].removeprefix(":")
        name = f"{inner}/{key.slot}" if inner else key.slot
        name = f"{name} (step {key.step})" if key.step else name
    status = pair.status if pair else ""
    name = (
        name if len(name) <= WIDEST and name.isprintable() and "%" not in name else shortened(unescape(name))
    )
    return Row(
        number,
        pair.key if pair else key.text,
        record,
        pair,
        module,
        intern(name),
        component,
        status,
        _colour(pair, record),
        own,
    )


@lru_cache(maxsize=4096)
def _module_of(site: str) -> tuple[str, str]:
    """Path and component of a module's site: one object for all its rows."""
    return module_path(site), shortened(component_of(site), 40)


def _colour(pair: Pair | None, record: Record) -> Colour:
    if pair is None:  # of one archive, values that are not finite stand out
        s = record.statistics
        return "yellow" if s is not None and s.nan else "grey"
    if pair.is_green:
        return "green"
    if not pair.is_required or pair.status in ("unjudged", "unexpected"):
        return "grey"
    return "yellow" if pair.status == "suspect" else "red"


@dataclass(frozen=True, slots=True)
class Scale:
    """Values of metrics with their colours.

    Attributes:
        bands: Bands of the five metrics of sync points.
        precision: What the target computed in, "" if unknown: relative errors and cosines go by it.
    """

    bands: Bands
    precision: str

    def value(self, row: Row, metric: str) -> float | None:
        """The value of a metric; None if nothing was measured."""
        if row.pair is None or not row.pair.is_compared:
            return None
        difference = row.pair.difference
        if metric == "relative":
            return 0.0 if difference is None else difference.relative_frobenius
        if metric == "cosine":
            return 1.0 if difference is None else difference.cosine
        return metric_values(difference).get(metric)  # type: ignore[call-overload,no-any-return] # others have none

    def text(self, row: Row, metric: str) -> str:
        """The value of a metric in three digits, "" for none."""
        value = self.value(row, metric)
        return "" if value is None else "∞" if value == math.inf else three_digits(value)

    def colour(self, row: Row, metric: str) -> Shade | None:
        """The colour of a metric's value: for a glance, and no verdict."""
        value = self.value(row, metric)
        if metric in _RANKED:
            return shade(_RANKED[metric], value, self.precision)
        if metric not in METRIC_TEXTS or row.pair is None:
            return None
        return self.bands.shade(metric, value, peak_of(row.pair.difference))  # type: ignore[arg-type] # looked up

    def dissimilarity(self, row: Row, metric: str) -> float:
        """How far a row is from its reference by a metric: larger is worse; errors for the size of values."""
        value = self.value(row, metric)
        difference = row.pair.difference if row.pair else None
        if value is None or math.isnan(value) or (difference is not None and difference.mask_mismatches):
            return math.inf
        if metric in _HIGHER_IS_BETTER:
            return -value
        peak = peak_of(row.pair.difference) if row.pair else 0.0
        return value / peak ** _POWERS.get(metric, 1) if value and peak else value

    def legend(self, metric: str) -> str:
        """What the colours of a metric mean, in a line.

        Example:
            >>> scale = Scale(Bands.of("float32"), "float32")
            >>> print(scale.legend("psnr"))
            PSNR: green from 60 dB, red below 40 dB (32-bit floats)
            >>> print(scale.legend("max-abs"))
            max-abs: green up to 0.008, red above 0.08 of the reference's largest value (32-bit floats)
        """
        name = "PSNR" if metric == "psnr" else metric
        if metric in _RANKED:
            unit = UNIT_ROUNDOFFS.get(self.precision)
            if unit is None:
                return f"{name}: not coloured, for the precision of the target is not known"
            green, red = (f"{share * unit:.2g}" for share in SHADES)
            of = " of the angle between both, in radians" if metric == "cosine" else ""
            roundings = f"{SHADES[0]:g} and {SHADES[1]:g} roundings of {self.precision}"
            return f"{name}: green up to {green}{of}, red above {red} ({roundings})"
        green, red = (f"{limit:.3g}" for limit in self.bands.limits(metric, 1.0))  # type: ignore[arg-type] # known
        if metric == "psnr":
            return f"{name}: green from {green} dB, red below {red} dB ({self.bands.name})"
        power = _POWERS.get(metric, 1)
        of = f" of {'the square of ' * (power == 2)}the reference's largest value" if power else ""
        return f"{name}: green up to {green}, red above {red}{of} ({self.bands.name})"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a reader wants to see.

    Attributes:
        sort: One of `ORDERS`.
        metric: One of `METRICS`, for the order by similarity.
        text: Words that are each a part of the key or the class; "" for all.
        status: A status, or a colour with `!` in front: `!red`; "" for all.
        component: A component; "" for all.
        under: Path of a module; "" for all.
        once: Whether of keys that hold one tensor on both sides only the first is shown.
    """

    sort: str = "similarity"
    metric: str = "psnr"
    text: str = ""
    status: str = ""
    component: str = ""
    under: str = ""
    once: bool = False

    def of(self, rows: Sequence[Row], scale: Scale, classes: Mapping[str, str]) -> list[Row]:
        """The rows that fit, in order."""
        words, prefix = self.text.casefold().split(), f"{self.under}."
        chosen = [
            row
            for row in rows
            if (not words or _has_words(row, words, classes))
            and self.status in ("", row.status, f"!{row.colour}")
            and self.component in ("", row.component)
            and (not self.under or f"{row.module}.".startswith(prefix))
        ]
        if self.once:
            chosen = _once(chosen)
        return sorted(chosen, key=self._key(scale))

    def _key(self, scale: Scale) -> Callable[[Row], Any]:
        if self.sort == "name":
            return lambda row: (natural(row.key), row.number)
        if self.sort == "execution":
            return lambda row: row.number
        if self.sort == "own error":
            return lambda row: (
                row.own is None,
                -(math.inf if row.own is None or math.isnan(row.own) else row.own),
                row.number,
            )
        return lambda row: (*_standing(row), -scale.dissimilarity(row, self.metric), row.number)


def _has_words(row: Row, words: Iterable[str], classes: Mapping[str, str]) -> bool:
    key, class_name = row.key.casefold(), classes.get(row.module, "").casefold()
    return all(word in key or word in class_name for word in words)


def _standing(row: Row) -> tuple[bool, int]:
    """What has no value comes last, what is worst of it first; all that was measured goes by its metric."""
    is_measured = row.pair is not None and row.pair.is_compared
    return not is_measured, 0 if is_measured else -_SEVERITIES.get(row.status, 0)  # type: ignore[call-overload]


def _once(rows: Iterable[Row]) -> list[Row]:
    """The first row of each tensor: keys with equal contents on both sides and one status share one."""
    known: set[object] = set()
    first = []
    for row in rows:
        same = contents(row.pair) if row.pair else row.record.digest or None
        tensor = (same, row.status) if same else row.key
        if tensor not in known:
            known.add(tensor)
            first.append(row)
    return first


@dataclass(slots=True)
class Module:
    """A module, what it has below it, and how its tensors fared.

    Attributes:
        path: Its path, "" for the model.
        children: The modules in it by name, in execution order.
        counts: Tensors in it and below, by colour.
        rows: Its own tensors.
    """

    path: str = ""
    children: dict[str, Module] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    rows: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return shortened(self.path.rpartition(".")[2], 60) or "model"

    @property
    def colour(self) -> str:
        """The worst colour in it."""
        return next((c for c in ("red", "yellow", "green") if self.counts[c]), "grey")

    @property
    def red_share(self) -> float:
        """Share of its tensors that are red, 0 to 1."""
        return self.counts["red"] / max(1, self.counts.total())

    def at(self, path: str) -> Module:
        """A module below this one.

        Raises:
            KeyError: There is none of that path.
        """
        module = self
        for part in path.split(".") if path else ():
            module = module.children[part]
        return module


def tree_of(rows: Iterable[Row]) -> Module:
    """All modules that have rows, and those around them."""
    root = Module()
    for row in rows:
        module = root
        module.counts[row.colour] += 1
        for part in row.module.split(".") if row.module else ():
            path = f"{module.path}.{part}" if module.path else part
            module = module.children.setdefault(part, Module(path))
            module.counts[row.colour] += 1
        module.rows.append(row)
    return root
