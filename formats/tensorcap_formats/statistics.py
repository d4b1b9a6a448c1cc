"""Statistics of a tensor, computed block by block while it is written or read.

Definitions are normative in `specs/archive.md`: minimum, maximum, mean and l2 are over the finite
elements and are None if there is none (l2 also if it is beyond float64); NaN, +inf, -inf and zeros
are counted over all elements; for complex values the first four are of the modulus.
"""

from __future__ import annotations

import math
import threading
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.light_dataclass import light_dataclass

_ROW: Final = 8192  # elements that are summed at a time, so that sums do not depend on how blocks are cut
_ROWS: Final = 16  # at a time: their float64 scratch, 1 MiB, stays in a core's L2 cache
_TINY_SQUARES: Final = 2.0**-900  # a smaller sum of squares of a row is computed again, of values scaled up
_TINY_SCALE: Final = 2.0**600
_WIDE: Final = ("float64", "complex128")  # no other dtype has values of such size
_ONES: Final = np.ones((2 * _ROW, 1))  # a packed dtype has two values an element


class _Scratch(threading.local):
    """Memory that each thread reuses: new pages for each tensor would cost more than its statistics."""

    def __init__(self) -> None:
        self._array = np.empty(_ROW)

    def array(self, size: int) -> Array:
        if self._array.size < size:
            self._array = np.empty(size)
        return self._array[:size]


_SCRATCH: Final = _Scratch()


@light_dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one tensor.

    Attributes:
        minimum: Smallest finite value.
        maximum: Largest finite value.
        mean: Mean of the finite values, in float64.
        l2: Square root of the sum of squares of the finite values, in float64; None if that overflows.
        nan: Count of NaN.
        posinf: Count of +inf.
        neginf: Count of -inf.
        zeros: Count of zeros of either sign.
    """

    minimum: float | int | None
    maximum: float | int | None
    mean: float | None
    l2: float | None
    nan: int
    posinf: int
    neginf: int
    zeros: int


class StatisticsBuilder:
    """Computes statistics of blocks of stored elements; the result does not depend on how they are cut.

    Example:
        >>> from tensorcap_formats.dtypes import dtype
        >>> builder = StatisticsBuilder(dtype("float32"))
        >>> builder.add(np.array([3.0, -4.0, np.inf], np.float32))
        >>> builder.result()
        Statistics(minimum=-4.0, maximum=3.0, mean=-0.5, l2=5.0, nan=0, posinf=1, neginf=0, zeros=0)
    """

    def __init__(self, logical: DType) -> None:
        self._dtype = logical
        self._rest: Array = np.empty(0, logical.storage)
        self._finite = self._nan = self._posinf = self._neginf = self._zeros = 0
        self._minimum: float | int | None = None
        self._maximum: float | int | None = None
        self._sum = 0.0
        self._squares = 0.0
        self._scale = 1.0
        self._tiny_squares = 0.0  # of values times _TINY_SCALE
        self._may_be_tiny = logical.name in _WIDE

    def add(self, bits: Array) -> None:
        """Add one-dimensional stored elements."""
        if self._rest.size:
            missing = _ROW - self._rest.size
            self._rest = np.concatenate([self._rest, bits[:missing]])
            bits = bits[missing:]
            if self._rest.size < _ROW:
                return
            self._add_rows(self._rest, 1)
            self._rest = self._rest[:0]
        rows = bits.size // _ROW
        for row in range(0, rows, _ROWS):
            count = min(_ROWS, rows - row)
            self._add_rows(bits[row * _ROW : (row + count) * _ROW], count)
        if rows * _ROW < bits.size:
            self._rest = bits[rows * _ROW :].copy()

    def result(self) -> Statistics:
        """The statistics of everything that was added."""
        if self._rest.size:
            self._add_rows(self._rest, 1)
            self._rest = self._rest[:0]
        n = self._finite
        l2 = self._l2()
        return Statistics(
            self._minimum,
            self._maximum,
            self._sum / n * self._scale if n else None,
            l2 if n and math.isfinite(l2) else None,
            self._nan,
            self._posinf,
            self._neginf,
            self._zeros,
        )

    def _l2(self) -> float:
        if self._tiny_squares and self._scale == 1.0 and self._squares < 2.0**-200:
            squares = self._squares * _TINY_SCALE * _TINY_SCALE + self._tiny_squares
            return math.sqrt(squares) / _TINY_SCALE
        return math.sqrt(self._squares) * self._scale  # tiny values do not count beside it

    def _add_rows(self, bits: Array, rows: int) -> None:
        """Add `rows` rows of `_ROW` elements, or one shorter row."""
        kind = self._dtype.kind
        if kind == "complex":
            with np.errstate(invalid="ignore", over="ignore"):  # signalling NaN; a modulus beyond float64
                values = decode(bits, self._dtype)
                self._zeros += int(values.size - np.count_nonzero(values))
                values = np.abs(values.astype(np.complex128))
        else:
            values = decode(bits, self._dtype)
            if kind == "bool":
                values = values.view(np.uint8)
        low, high = values.min().item(), values.max().item()
        if kind != "complex" and not low > 0 and not high < 0:  # true of NaN too
            self._zeros += int(np.count_nonzero(values == 0))
        if self._dtype.is_inexact and not (math.isfinite(low) and math.isfinite(high)):
            finite = np.isfinite(values)
            self._nan += int(np.count_nonzero(np.isnan(values)))
            self._posinf += int(np.count_nonzero(values == np.inf))
            self._neginf += int(np.count_nonzero(values == -np.inf))
            finite_values = values[finite]
            if not finite_values.size:
                return
            self._finite -= values.size - finite_values.size
            values = np.where(finite, values, 0)
            low, high = finite_values.min().item(), finite_values.max().item()
        self._finite += values.size
        self._minimum = low if self._minimum is None else min(self._minimum, low)
        self._maximum = high if self._maximum is None else max(self._maximum, high)
        self._add_sums(values, rows, max(abs(low), abs(high)))

    def _add_sums(self, values: Array, rows: int, largest: float) -> None:
        scratch = _SCRATCH.array(values.size)
        scratch[:] = values
        if largest > 1e150 > self._scale:  # squares would overflow: from here on, sums are of scaled values
            self._sum *= 2.0**-600
            self._squares *= 2.0**-1200
            self._scale = 2.0**600
        if self._scale != 1.0:
            scratch *= 1 / self._scale
        vectors = scratch.reshape(rows, 1, -1)
        for total in np.matmul(vectors, _ONES[: vectors.shape[2]]).ravel().tolist():
            self._sum += total
        may_be_tiny = self._may_be_tiny and largest > 0 and self._scale == 1.0
        for row, total in enumerate(np.matmul(vectors, vectors.transpose(0, 2, 1)).ravel().tolist()):
            if total < _TINY_SQUARES and may_be_tiny:
                values = vectors[row, 0] * _TINY_SCALE
                self._tiny_squares += float(values @ values)
            else:
                self._squares += total
