"""Histograms of errors that can be added up, and quantiles of them that bound the true ones (MET-11, MET-28).

The bin of an absolute error is the exponent of a float64 and the two leading bits of its mantissa: its number
is the bits of the error shifted right by 50, and 0 is for no error at all. Row errors are binned as float32,
by the exponent and five bits of the mantissa. Both histograms have 8,192 bins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, overload

import numpy as np

from tensorcap.metrics.kernel_state import ERROR_SHIFT, ROW_BINS, ROW_SHIFT
from tensorcap_formats.dtypes import Array

BINS: Final = ROW_BINS
_SHIFT: Final = 50
_INFINITE: Final = 0x7FF << 2
_INFINITE_ROW: Final = 0xFF << 5
_MIDDLE: Final = 2.0 ** (1 / 64)

_NUMBER: Final = np.dtype("<u2")
_COUNT: Final = np.dtype("<i8")


class Histogram(Sequence[tuple[int, int]]):
    """Numbers of the bins that are not empty, in order, each with its count.

    They are packed, numbers before counts, since results by the hundred thousand hold a histogram each.

    Example:
        >>> list(Histogram([0, 4092], [5, 4]))
        [(0, 5), (4092, 4)]
    """

    __slots__ = ("_packed",)

    def __init__(self, numbers: Sequence[int] | Array = (), counts: Sequence[int] | Array = ()) -> None:
        self._packed = np.asarray(numbers, _NUMBER).tobytes() + np.asarray(counts, _COUNT).tobytes()

    @classmethod
    def of(cls, table: Array, first: int = 0) -> Histogram:
        """Take the counts of all bins from the one with number `first` on."""
        (bins,) = (table != 0).nonzero()  # of bools, six times as fast as of integers
        return cls(bins + first, table[bins])

    @classmethod
    def split(cls, numbers: Array, counts: Array, ends: Sequence[int]) -> list[Histogram]:
        """Take histograms that lie one after the other, each up to the end that is given."""
        number_bytes, count_bytes = numbers.astype(_NUMBER).tobytes(), counts.astype(_COUNT).tobytes()
        histograms, start = [], 0
        for end in ends:
            histogram = cls.__new__(cls)
            histogram._packed = number_bytes[2 * start : 2 * end] + count_bytes[8 * start : 8 * end]
            histograms.append(histogram)
            start = end
        return histograms

    def columns(self) -> tuple[list[int], list[int]]:
        """Return the numbers, and the counts."""
        size = len(self)
        counts = np.frombuffer(self._packed, _COUNT, size, size * _NUMBER.itemsize)
        return np.frombuffer(self._packed, _NUMBER, size).tolist(), counts.tolist()

    def __add__(self, other: Histogram) -> Histogram:
        table = empty()
        for numbers, counts in (self.columns(), other.columns()):
            table[numbers] += np.asarray(counts, np.int64)  # of no counts, too
        return Histogram.of(table)

    def __len__(self) -> int:
        return len(self._packed) // (_NUMBER.itemsize + _COUNT.itemsize)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(*self.columns(), strict=True)

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, int]]: ...
    def __getitem__(self, at: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Histogram({tuple(self)!r})"


def empty() -> Array:
    """Return a table of all bins in which nothing is counted."""
    return np.zeros(BINS, np.int64)


def add_float64(table: Array, errors: Array) -> None:
    """Count absolute errors, float64 and at least 0."""
    bins = np.maximum(errors.view(np.int64) >> _SHIFT, errors != 0)
    table += np.bincount(bins, minlength=BINS)


def add_float32(table: Array, errors: Array) -> None:
    """Count absolute errors, float32 and at least 0, in the bins that compiled code counts in."""
    bins = np.where(errors == 0, 0, (errors.view(np.int32) >> ERROR_SHIFT) + 1)
    table[_OF_FLOAT32] += np.bincount(bins, minlength=_OF_FLOAT32.size)


def histogram_float32(tables: Array, zeros: int) -> Histogram:
    """Add up errors that are counted by the bits of a float32 shifted right.

    Args:
        tables: A row for each table, unsigned.
        zeros: How many of those in the first bin are no errors.
    """
    counts = np.empty(tables.shape[1] + 1, tables.dtype)
    np.add.reduce(tables, axis=0, out=counts[1:])
    counts[0] = zeros
    counts[1] -= zeros
    (bins,) = (counts != 0).nonzero()
    return Histogram(_OF_FLOAT32[bins], counts[bins])


def numbers_of_float32(bins: Array) -> Array:
    """Return the numbers of bins that compiled code counts in: 0 for no error, else by a float32."""
    return _OF_FLOAT32[bins]


def add_rows(table: Array, errors: Array) -> None:
    """Count errors of rows, any float dtype and at least 0."""
    bins = errors.astype(np.float32).view(np.int32) >> ROW_SHIFT
    table += np.bincount(bins, minlength=BINS)


def quantiles(errors: Histogram, permilles: Sequence[int]) -> list[float]:
    """Return upper edges of the bins up to which shares of the errors lie.

    Args:
        errors: At least one.
        permilles: The shares in thousandths, above 0; rounded up to a whole error.

    Returns:
        The edges, each at most 25 % above the true quantile; 0 for no error.

    Example:
        >>> errors = Histogram([0, 4092, 4096], [5, 4, 1])  # no error, up to 1.25, up to 2.5
        >>> quantiles(errors, [500, 900, 901])
        [0.0, 1.25, 2.5]
    """
    return [_UPPER_EDGES[number] for number in _bins_at(errors, permilles)]


def row_quantiles(errors: Histogram, permilles: Sequence[int]) -> list[float]:
    """As `quantiles` for row errors, but the middles of the bins: within 2.3 %."""
    return [_ROW_MIDDLES[number] for number in _bins_at(errors, permilles)]


def quantiles_of_each(
    numbers: Array, counts: Array, ends: Array, permilles: Sequence[int]
) -> list[list[float]]:
    """Return quantiles, as `quantiles` does, of histograms that lie one after the other (see `split`).

    Args:
        numbers: Of their bins, those of each in order.
        counts: Of the errors in each bin, at least 1.
        ends: Where each of them ends; one that is empty has a quantile without meaning.
        permilles: As for `quantiles`.
    """
    return [
        [_UPPER_EDGES[number] for number in bins] for bins in _bins_of_each(numbers, counts, ends, permilles)
    ]


def row_quantiles_of_each(
    numbers: Array, counts: Array, ends: Array, permilles: Sequence[int]
) -> list[list[float]]:
    """As `quantiles_of_each` for row errors."""
    return [
        [_ROW_MIDDLES[number] for number in bins] for bins in _bins_of_each(numbers, counts, ends, permilles)
    ]


def _bins_of_each(numbers: Array, counts: Array, ends: Array, permilles: Sequence[int]) -> Iterator[Array]:
    sums = np.concatenate([[0], np.cumsum(counts)])
    before, after = sums[np.concatenate([[0], ends[:-1]])], sums[ends]
    bins = np.concatenate([numbers, [0]])  # the last is for an empty histogram at the end
    for permille in permilles:
        wanted = before + -(-(after - before) * permille // 1000)
        yield bins[np.searchsorted(sums[1:], wanted)].tolist()


def _bins_at(errors: Histogram, permilles: Sequence[int]) -> list[int]:
    numbers, counts = errors.columns()
    sums = list(accumulate(counts))
    return [numbers[bisect_left(sums, -(-sums[-1] * p // 1000))] for p in permilles]


def _upper_edges() -> list[float]:
    bits = np.minimum(np.arange(1, BINS + 1), _INFINITE) << _SHIFT
    edges: list[float] = bits.view(np.float64).tolist()
    return [0.0, *edges[1:]]


def _row_middles() -> list[float]:
    lower = (np.arange(_INFINITE_ROW + 1, dtype=np.int32) << ROW_SHIFT).view(np.float32)
    middles: list[float] = (lower.astype(np.float64) * _MIDDLE).tolist()
    return middles + [math.nan] * (BINS - len(middles))


def _from_float32() -> Array:
    """Map a bin of no error, and those of float32 errors, to those of float64 with the same upper edge.

    The last is for infinity. Below 2**-126, where a float32 has fewer bits in its mantissa, they are wider
    than others.
    """
    bits = np.arange(1, 2 + (0xFF << 2), dtype=np.int32) << ERROR_SHIFT
    bits[-1] = bits[-2]
    edges = bits.view(np.float32).astype(np.float64).view(np.int64) >> _SHIFT
    edges[-2] = (1023 + 128) << 2  # 2**128, which float32 has not
    edges[-1] = _INFINITE + 1
    numbers: Array = np.concatenate([[0], edges - 1])
    return numbers


_OF_FLOAT32: Final = _from_float32()
_UPPER_EDGES: Final = _upper_edges()
_ROW_MIDDLES: Final = _row_middles()
