"""Histograms of errors that can be added up, and quantiles of them that bound the true ones (MET-11, MET-28).

The bin of an absolute error is the exponent of a float64 and the two leading bits of its mantissa: its number
is the bits of the error shifted right by 50, and 0 is for no error at all. Row errors are binned as float32,
by the exponent and five bits of the mantissa. Both histograms have 8,192 bins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from tensorcap.metrics.kernel_state import ERROR_SHIFT, ROW_BINS, ROW_SHIFT
from tensorcap_formats.dtypes import Array

BINS: Final = ROW_BINS
_SHIFT: Final = 50
_INFINITE: Final = 0x7FF << 2
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
    counts = np.bincount(errors.view(np.int32) >> ERROR_SHIFT, minlength=_FROM_FLOAT32.size)
    add_counts(histogram, counts, int(np.count_nonzero(errors == 0)))


def add_counts(histogram: Array, counts: Array, zeros: int) -> None:
    """Add counts by the bits of a float32 shifted right; `zeros` of those in the first bin are no errors."""
    histogram[_FROM_FLOAT32] += counts[: _FROM_FLOAT32.size]
    histogram[_FROM_FLOAT32[0]] -= zeros
    histogram[0] += zeros


def add_rows(histogram: Array, errors: Array) -> None:
    """Count errors of rows, any float dtype and at least 0."""
    bins = errors.astype(np.float32).view(np.int32) >> ROW_SHIFT
    histogram += np.bincount(bins, minlength=BINS)


def sketch(histogram: Array) -> Sketch:
    """Return the bins that are not empty, in order, with their counts."""
    bins = np.flatnonzero(histogram != 0)  # of bools, six times as fast as of integers
    return tuple(zip(bins.tolist(), histogram[bins].tolist(), strict=True))


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
    edges = []
    for number in _bins_at(errors, permilles):
        bits = np.int64(min(number + 1, _INFINITE) << _SHIFT)
        edges.append(float(bits.view(np.float64)) if number else 0.0)
    return edges


def row_quantiles(errors: Sequence[tuple[int, int]], permilles: Sequence[int]) -> list[float]:
    """As `quantiles` for row errors, but the middles of the bins: within 2.3 %."""
    numbers = _bins_at(errors, permilles)
    return [float(np.int32(number << ROW_SHIFT).view(np.float32)) * _MIDDLE for number in numbers]


def _bins_at(errors: Sequence[tuple[int, int]], permilles: Sequence[int]) -> list[int]:
    counts = list(accumulate(count for _, count in errors))
    return [errors[bisect_left(counts, -(-counts[-1] * p // 1000))][0] for p in permilles]


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
