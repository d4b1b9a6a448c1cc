"""Values as evidence: statistics that no change of layout alters, and how much their agreement proves.

A tensor's *fingerprint* is its mean, l2, minimum and maximum. Transposing, squeezing or permuting it changes
none of them; those of a concatenation follow from those of its parts. Runs drift apart, by rounding and more
with depth, so agreement is measured by rank: how much nearer the nearest tensor is than the next one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.alignment.match.fingerprint_tree import FingerprintTree
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics

FEW: Final = 8  # elements: a smaller tensor proves nothing
UNRELATED: Final = 0.1  # a usual distance of tensors that have nothing to do with each other
_FREE: Final = 3  # numbers of a fingerprint that are independent of each other, taken low
_LEAST_ROUNDING: Final = 2.0**-22  # of float32 and finer: sums in another order differ by more than rounding


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Statistics of a tensor that no change of layout alters.

    Attributes:
        size: Number of elements.
        mean: Their mean.
        l2: Root of the sum of their squares.
        minimum: The smallest.
        maximum: The largest.
    """

    size: int
    mean: float
    l2: float
    minimum: float
    maximum: float

    @classmethod
    def concatenated(cls, parts: Sequence[Fingerprint]) -> Fingerprint:
        """The fingerprint of all elements of several tensors."""
        size = sum(part.size for part in parts)
        return cls(
            size,
            sum(part.mean * part.size for part in parts) / size,
            math.hypot(*(part.l2 for part in parts)),
            min(part.minimum for part in parts),
            max(part.maximum for part in parts),
        )

    def distance(self, other: Fingerprint) -> float:
        """A lower bound of the relative distance of the values; infinite if sizes differ."""
        if self.size != other.size:
            return math.inf
        rms = max(self.l2, other.l2) / math.sqrt(self.size)
        peak = max(abs(self.minimum), abs(self.maximum), abs(other.minimum), abs(other.maximum))
        return max(
            abs(self.l2 - other.l2) / max(self.l2, other.l2),
            abs(self.mean - other.mean) / rms,
            abs(self.minimum - other.minimum) / peak,
            abs(self.maximum - other.maximum) / peak,
        )

    def times(self, factor: float) -> Fingerprint:
        """The fingerprint of all elements times a factor."""
        ends = sorted((self.minimum * factor, self.maximum * factor))
        return Fingerprint(self.size, self.mean * factor, self.l2 * abs(factor), *ends)


class Fingerprints:
    """The fingerprints of an archive's records, each computed once.

    Args:
        archive: The archive.
        uses_values: Whether values may be looked at; else nothing is known of any record.
        may_read: Whether tensors may be read for their statistics.

    Attributes:
        uses_values: Whether values may be looked at.
        rounding: Relative rounding of the coarsest dtype among the records asked for.
    """

    def __init__(self, archive: Archive, *, uses_values: bool, may_read: bool) -> None:
        self._archive = archive
        self.uses_values = uses_values
        self._may_read = may_read
        self._by_row: dict[int, Fingerprint | None] = {}
        self._statistics: dict[int, Statistics | None] = {}
        self.rounding = _LEAST_ROUNDING

    def fingerprint(self, record: Record) -> Fingerprint | None:
        """A record's fingerprint; None if it proves nothing: few elements, all equal, not finite."""
        if record.row not in self._by_row:
            self._by_row[record.row] = self._compute(record)
        return self._by_row[record.row]

    def joint_fingerprint(self, records: Iterable[Record]) -> Fingerprint | None:
        """The fingerprint of several records together; None if one of them has none."""
        known = [self.fingerprint(record) for record in records]
        if not known or not all(known):
            return None
        joint = Fingerprint.concatenated([p for p in known if p])
        return joint if math.isfinite(joint.l2) else None

    def _compute(self, record: Record) -> Fingerprint | None:
        size = record.size
        statistics = self.statistics(record) if size >= FEW else None
        if statistics is None or statistics.minimum is None or statistics.maximum is None:
            return None
        if statistics.mean is None or not statistics.l2 or statistics.minimum == statistics.maximum:
            return None
        self.rounding = max(self.rounding, rounding_of(record))
        numbers = (statistics.mean, statistics.l2, statistics.minimum, statistics.maximum)
        return Fingerprint(size, *map(float, numbers))

    def statistics(self, record: Record) -> Statistics | None:
        """A record's statistics, read once if the index has none; None if unknown or not to be used."""
        if record.dtype.packed > 1 or not self.uses_values:
            return None
        if record.statistics is not None:
            return record.statistics
        if record.row not in self._statistics:
            self._statistics[record.row] = None
            if self._may_read and record.stored:
                with suppress(TensorcapError):
                    self._statistics[record.row] = self._archive.statistics(record)
        return self._statistics[record.row]


def statistics_distance(one: Statistics, other: Statistics, size: int) -> float:
    """A lower bound of the distance of two tensors, as `Fingerprint.distance`, for any values.

    Constant tensors and few elements have a distance too; if other elements are not finite, it is infinite.
    """
    if (one.nan, one.posinf, one.neginf) != (other.nan, other.posinf, other.neginf):
        return math.inf
    if one.l2 is None or other.l2 is None or one.minimum is None or other.minimum is None:
        return 0.0 if one == other else math.inf
    if one.l2 == other.l2 == 0:
        return 0.0
    mine, theirs = (
        Fingerprint(size, *(float(x or 0) for x in (s.mean, s.l2, s.minimum, s.maximum)))
        for s in (one, other)
    )
    return mine.distance(theirs)


class NearestFingerprints:
    """Fingerprints by size, to find near ones of each other or of another one.

    Args:
        fingerprints: By name.
    """

    def __init__(self, fingerprints: Mapping[str, Fingerprint]) -> None:
        self._names: dict[int, list[str]] = defaultdict(list)
        for name, one in fingerprints.items():
            self._names[one.size].append(name)
        self._trees = {
            size: _tree([fingerprints[name] for name in names]) for size, names in self._names.items()
        }

    def within(self, apart: float, one: Fingerprint) -> list[str]:
        """The names of those whose distance from another fingerprint is at most `apart`."""
        if one.size not in self._trees:
            return []
        names, (numbers, scales) = self._names[one.size], _rows([one])
        return [names[i] for i in self._trees[one.size].within(numbers[:, 0], scales[:, 0], apart)]

    def groups(self, rounding: float) -> list[tuple[str, ...]]:
        """The names, those together that are equal within rounding: a block's result and its last layer's."""
        equal = (
            tuple(sorted(self._names[size][i] for i in group))
            for size, tree in self._trees.items()
            for group in tree.groups(rounding)
        )
        return sorted(equal)


def rounding_of(record: Record) -> float:
    """Unit roundoff of a record's dtype, 2^-22 at least; 0 for whole numbers and truth values."""
    if not record.dtype.is_inexact:
        return 0.0
    return max(UNIT_ROUNDOFFS[record.dtype.name], _LEAST_ROUNDING)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two groups of equal values that are nearest to each other.

    Attributes:
        distance: Between them.
        other: To the nearest that could be meant instead.
        nats: What that proves: the logarithm of how seldom chance comes so near.
    """

    distance: float
    other: float
    nats: float


def agreements(
    reference: Sequence[Fingerprint], target: Sequence[Fingerprint], rounding: float
) -> dict[tuple[int, int], Agreement]:
    """Find mutual nearest neighbours of two lists of fingerprints, by their positions.

    Args:
        reference: Fingerprints, no two equal within rounding.
        target: The same of the other side.
        rounding: Below which distances mean nothing.
    """
    nearest: dict[tuple[int, int], Agreement] = {}
    sizes: list[dict[int, list[int]]] = [defaultdict(list), defaultdict(list)]
    for side, fingerprints in zip(sizes, (reference, target), strict=True):
        for i, fingerprint in enumerate(fingerprints):
            if math.isfinite(fingerprint.l2):
                side[fingerprint.size].append(i)
    for size in sizes[0].keys() & sizes[1].keys():
        rows_of_size, columns_of_size = sizes[0][size], sizes[1][size]
        trees = _tree([reference[i] for i in rows_of_size]), _tree([target[j] for j in columns_of_size])
        right, right_next = trees[0].two_nearest(trees[1])
        left, left_next = trees[1].two_nearest(trees[0])
        for i, j in enumerate(right):
            if left[j] != i:
                continue
            distance = reference[rows_of_size[i]].distance(target[columns_of_size[j]])
            other = float(min(right_next[i], left_next[j], UNRELATED))
            agreement = Agreement(distance, other, proof(distance, other, rounding))
            nearest[rows_of_size[i], columns_of_size[j]] = agreement
    return nearest


def proof(distance: float, other: float, rounding: float) -> float:
    """What a distance proves, in nats, if the next best is `other` away; 0 if counts differ."""
    if math.isinf(distance):
        return 0.0
    nats = _FREE * math.log(max(min(other, UNRELATED), rounding) / max(distance, rounding))
    return min(max(nats, 0.0), WEIGHTS.tensor_most)


def _tree(fingerprints: Sequence[Fingerprint]) -> FingerprintTree:
    return FingerprintTree(*_rows(fingerprints))


def _rows(fingerprints: Sequence[Fingerprint]) -> tuple[Array, Array]:
    """What a `FingerprintTree` holds of fingerprints of one size."""
    numbers = np.array([(one.l2, one.mean, one.minimum, one.maximum) for one in fingerprints]).T.copy()
    l2, peak = numbers[0], np.maximum(np.abs(numbers[2]), np.abs(numbers[3]))
    return numbers, np.stack([l2, l2 / math.sqrt(fingerprints[0].size), peak, peak])
