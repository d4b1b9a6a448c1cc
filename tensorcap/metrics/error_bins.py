"""Histograms of errors that can be added up, and quantiles of them that bound the true ones (MET-11, MET-28).

The bin of an absolute error is the exponent of a float64 and the two leading bits of its mantissa: its number
is the bits of the error shifted right by 50, and 0 is for no error at all. Row errors are binned as float32,
by the exponent and five bits of the mantissa. Both histograms have 8,192 bins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

import numpy as np

from tensorcap.metrics.kernel_state import ERROR_SHIFT, ROW_BINS, ROW_SHIFT
from tensorcap_formats.dtypes import Array

BINS: Final = ROW_BINS
_SHIFT: Final = 50
_INFINITE: Final = 0x7FF << 2
_INFINITE_ROW: Final = 0xFF << 5
_MIDDLE: Final = 2.0 ** (1 / 64)

Sketch = tuple[tuple[int, int], ...]


def empty() -> Array:
    """Return a histogram in which nothing is counted."""
    return np.zeros(BINS, np.int64)


def add_float64(histogram: Array, errors: Array) -> None:
    """Count absolute errors, float64 and at least 0."""
    bins = np.maximum(errors.view(np.int64) >> _SHIFT, errors != 0)
    histogram += np.bincount(bins, minlength=BINS)


def add_float32(histogram: Array, errors: Array) -> None:
    """Count absolute errors, float32 and at least 0, in the bins that compiled code counts in."""
    counts = np.bincount(errors.view(np.int32) >> ERROR_SHIFT, minlength=1)
    for number, count in sketch_float32(counts, int(np.count_nonzero(errors == 0))):
        histogram[number] += count


def add_rows(histogram: Array, errors: Array) -> None:
    """Count errors of rows, any float dtype and at least 0."""
    bins = errors.astype(np.float32).view(np.int32) >> ROW_SHIFT
    histogram += np.bincount(bins, minlength=BINS)


def sketch(histogram: Array) -> Sketch:
    """Return the bins that are not empty, in order, with their counts."""
    (bins,) = (histogram != 0).nonzero()  # of bools, six times as fast as of integers
    return tuple(map(_entry, bins.tolist(), histogram[bins].tolist()))


def sketch_float32(counts: Array, zeros: int) -> Sketch:
    """Return the bins of errors that are counted by the bits of a float32 shifted right.

    Args:
        counts: Any unsigned or signed integers; changed.
        zeros: How many of those in the first bin are no errors.
    """
    counts[0] -= zeros
    (bins,) = (counts != 0).nonzero()
    errors = map(_entry, _FROM_FLOAT32[bins].tolist(), counts[bins].tolist())
    return (_entry(0, zeros), *errors) if zeros else tuple(errors)


def joined(one: Sketch, other: Sketch) -> Sketch:
    """Return the bins of the errors of both."""
    counts = dict(one)
    for number, count in other:
        counts[number] = counts.get(number, 0) + count
    return tuple(sorted(counts.items()))


@lru_cache(maxsize=1 << 16)
def _entry(number: int, count: int) -> tuple[int, int]:
    """Return the same object for the same entry: small tensors by the thousand have the same few."""
    return number, count


def quantiles(errors: Sequence[tuple[int, int]], permilles: Sequence[int]) -> list[float]:
    """Return upper edges of the bins up to which shares of the errors lie.

    Args:
        errors: Bins and counts in order, at least one.
        permilles: The shares in thousandths, above 0; rounded up to a whole error.

    Returns:
        The edges, each at most 25 % above the true quantile; 0 for no error.

    Example:
        >>> quantiles(((0, 5), (4092, 4), (4096, 1)), [500, 900, 901])  # bins up to 1.25 and up to 2.5
        [0.0, 1.25, 2.5]
    """
    return [_UPPER_EDGES[number] for number in _bins_at(errors, permilles)]


def row_quantiles(errors: Sequence[tuple[int, int]], permilles: Sequence[int]) -> list[float]:
    """As `quantiles` for row errors, but the middles of the bins: within 2.3 %."""
    return [_ROW_MIDDLES[number] for number in _bins_at(errors, permilles)]


def _bins_at(errors: Sequence[tuple[int, int]], permilles: Sequence[int]) -> list[int]:
    counts = list(accumulate([count for _, count in errors]))
    return [errors[bisect_left(counts, -(-counts[-1] * p // 1000))][0] for p in permilles]


def _upper_edges() -> list[float]:
    bits = np.minimum(np.arange(1, BINS + 1), _INFINITE) << _SHIFT
    edges: list[float] = bits.view(np.float64).tolist()
    return [0.0, *edges[1:]]


def _row_middles() -> list[float]:
    lower = (np.arange(_INFINITE_ROW + 1, dtype=np.int32) << ROW_SHIFT).view(np.float32)
    middles: list[float] = (lower.astype(np.float64) * _MIDDLE).tolist()
    return middles + [math.nan] * (BINS - len(middles))


def _from_float32() -> Array:
    """Map bins of float32 errors to those of float64 with the same upper edge; the last is for infinity.

    Below 2**-126, where a float32 has fewer bits in its mantissa, they are wider than others.
    """
    bits = np.arange(1, 2 + (0xFF << 2), dtype=np.int32) << ERROR_SHIFT
    bits[-1] = bits[-2]
    edges = bits.view(np.float32).astype(np.float64).view(np.int64) >> _SHIFT
    edges[-2] = (1023 + 128) << 2  # 2**128, which float32 has not
    edges[-1] = _INFINITE + 1
    numbers: Array = edges - 1
    return numbers


_FROM_FLOAT32: Final = _from_float32()
_UPPER_EDGES: Final = _upper_edges()
_ROW_MIDDLES: Final = _row_middles()
