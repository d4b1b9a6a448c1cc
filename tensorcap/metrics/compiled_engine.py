"""Measure pairs of floats of at most 32 bits with compiled code."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from tensorcap.metrics import kernel_state as layout
from tensorcap.metrics.difference import Number
from tensorcap.metrics.error_bins import add_counts
from tensorcap.metrics.machine_code import load
from tensorcap.metrics.operands import Operands
from tensorcap.metrics.scaled_sums import Moments, Scaled
from tensorcap.metrics.totals import Largest, Totals
from tensorcap_formats.dtypes import Array, DType, decode

_LINE_BYTES: Final = 64


class CompiledEngine:
    """Adds blocks of stored elements of both sides, as `NumpyEngine` does, several times as fast.

    An engine is for one thread; it releases the GIL.
    """

    unit = layout.BLOCK

    def __init__(self, operands: Operands, start: int = 0) -> None:
        """Load the kernels, or compile them if they never were.

        Args:
            operands: The pair; `can_measure` is true for it.
            start: Number of the first value that will be added; it begins a block.
        """
        self._feed = load()
        self._operands = operands
        self._dtypes = operands.reference, operands.target
        self._at = start
        self._has_same_bits = operands.reference.name == operands.target.name
        self._values: tuple[Number, Number] | None = None
        words = np.zeros(layout.WORDS + _LINE_BYTES // 8, np.int64)
        first = -words.ctypes.data % _LINE_BYTES // 8
        self._state = words[first : first + layout.WORDS]
        floats = self._state.view(np.float64)
        self._counts = self._state[layout.COUNTS : layout.SUMS]
        self._sums = floats[layout.SUMS : layout.SUMS + 8]
        self._maxima = floats[layout.MAXIMA : layout.PLACES]
        self._places = self._state[layout.PLACES : layout.SPANS]
        self._spans = floats[layout.SPANS : layout.MOMENTS]
        self._places[:] = -1
        self._spans[:] = np.inf, -np.inf, np.inf, -np.inf
        tolerance = operands.tolerance
        scale, shift, largest = 1.0, 0, 0
        if operands.format is not None:
            scale = 2.0 ** (-126 - operands.format.least_exponent)
            shift = 23 - operands.format.mantissa_bits
            largest = operands.format.largest_number
        self._settings = (
            operands.row,
            tolerance.atol if tolerance else 0.0,
            tolerance.rtol if tolerance else 0.0,
            scale,
            shift,
            largest,
            self._state.ctypes.data,
        )

    @staticmethod
    def can_measure(operands: Operands) -> bool:
        """Whether both sides are floats of at most 32 bits, one in an element."""
        return all(
            side.kind == "float" and side.packed == 1 and side.itemsize <= 4
            for side in (operands.reference, operands.target)
        )

    def add(self, reference: Array, target: Array) -> None:
        """Add stored elements: one-dimensional, as many on both sides, up to the end of a block."""
        sides = []
        for bits, dtype in zip((reference, target), self._dtypes, strict=True):
            table = _table(dtype)
            sides += [bits.ctypes.data, layout.KINDS.get(dtype.name, layout.BY_TABLE), table.ctypes.data]
        self._feed(*sides, reference.size, self._at, *self._settings)
        if reference.itemsize == 1:  # several bytes may be NaN
            self._has_same_bits = self._has_same_bits and np.array_equal(reference, target)
        place = int(self._places[layout.ERROR])
        if place >= self._at:
            i = place - self._at
            x, y = (
                decode(bits[i : i + 1], d) for bits, d in zip((reference, target), self._dtypes, strict=True)
            )
            self._values = x[0].item(), y[0].item()
        self._at += reference.size

    def totals(self) -> Totals:
        """Return the totals of everything that was added."""
        counts, sums = self._counts.tolist(), self._sums.tolist()
        measured = counts[layout.ELEMENTS] - counts[layout.APART]
        totals = Totals(
            elements=counts[layout.ELEMENTS],
            measured=measured,
            same_bits=self._has_same_bits and not counts[layout.UNLIKE],
            unequal=counts[layout.UNEQUAL],
            mismatches=counts[layout.MISMATCHES],
            zeros=counts[layout.ZEROS],
            zero_reference_errors=counts[layout.ZEROS_HIT],
            nonfinite=(
                counts[layout.NONFINITE_X : layout.NONFINITE_X + 3],
                counts[layout.NONFINITE_Y : layout.NONFINITE_Y + 3],
            ),
            masks=counts[layout.MASKS],
            mask_at=counts[layout.MASK_AT] if counts[layout.MASKS] else None,
            sentinels=counts[layout.SENTINELS],
            sentinels_lost=counts[layout.SENTINELS_LOST],
            zero_rows=counts[layout.ZERO_ROWS],
            max_ulp=counts[layout.ULPS],
            error=self._largest(layout.ERROR),
            error_values=self._values,
            ratio=self._largest(layout.RATIO),
            outlier=self._largest(layout.OUTLIER),
            errors_sum=Scaled(sums[0]),
            ratios_sum=sums[7],
            squares=(Scaled(sums[3]), Scaled(sums[5]), Scaled(sums[1])),
            dot=Scaled(sums[6]),
            moments=self._moments(),
        )
        if measured:
            spans = self._spans.tolist()
            totals.peak = max(abs(spans[0]), abs(spans[1]))
            for span, least, largest in zip(totals.spans, spans[::2], spans[1::2], strict=True):
                span.add(least, largest)
        tables = self._state[layout.ERRORS : layout.ROWS].view(np.uint32).reshape(4, layout.ERROR_BINS)
        # what is set apart is taken from the first table, which may have counted fewer: the sum is right
        add_counts(totals.errors, tables.sum(axis=0, dtype=np.uint32), measured - totals.unequal)
        rows = self._state[layout.ROWS : layout.ACCUMULATORS].view(np.uint32)
        totals.rows += rows
        return totals

    def _largest(self, which: int) -> Largest:
        place = int(self._places[which])
        return Largest(float(self._maxima[which]), place) if place >= 0 else Largest(0.0)

    def _moments(self) -> Moments:
        count, *rest = self._state.view(np.float64)[layout.MOMENTS : layout.MOMENTS + 6].tolist()
        return Moments(int(count), rest[:2], rest[2:4], rest[4])


@cache
def _table(dtype: DType) -> Array:
    """Return the values of all bytes, for dtypes that are widened by a table."""
    if dtype.itemsize > 1:
        return np.zeros(256, np.float32)
    return np.ascontiguousarray(decode(np.arange(256, dtype=np.uint8), dtype), np.float32)
