"""Measure pairs with compiled code: all real dtypes that are not packed, in their usual ranges."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from tensorcap.metrics import kernel_state as layout
from tensorcap.metrics.difference import Number
from tensorcap.metrics.error_bins import add_counts, empty
from tensorcap.metrics.kernel_state import Kernel
from tensorcap.metrics.machine_code import load
from tensorcap.metrics.operands import Operands
from tensorcap.metrics.scaled_sums import Moments, Scaled
from tensorcap.metrics.totals import Largest, Span, Totals
from tensorcap_formats.dtypes import DTYPES, Array, decode
from tensorcap_formats.float_formats import FLOAT_FORMATS

_LINE_BYTES: Final = 64


class OutOfRangeError(Exception):
    """Compiled code met values that it does not measure, as floats whose squares overflow; numpy does."""


class CompiledEngine:
    """Adds blocks of stored elements of both sides, as `NumpyEngine` does, several times as fast.

    An engine is for one thread; it releases the GIL.
    """

    unit = layout.BLOCK

    def __init__(self, operands: Operands, start: int = 0, memory: Array | None = None) -> None:
        """Load the kernels, or compile them if they never were.

        Args:
            operands: The pair; `can_measure` is true for it.
            start: Number of the first value that will be added; it begins a block.
            memory: What `new_memory` gave, which no other engine uses at the same time; its own if None.
        """
        kernel = self.kernel(operands)
        self._is_wide = kernel == "wide"
        self._feed = load(kernel or "narrow")
        self._operands = operands
        self._dtypes = operands.reference, operands.target
        self._at = start
        self._has_same_bits = operands.reference.name == operands.target.name
        self._values: tuple[Number, Number] | None = None
        self._mismatch_at: int | None = None
        self._state = self.new_memory() if memory is None else memory
        self._state[: layout.ACCUMULATORS] = 0
        if self._is_wide:
            self._state[layout.WIDE_ERRORS : layout.WIDE_ACCUMULATORS] = 0
        floats = self._state.view(np.float64)
        self._counts = self._state[layout.COUNTS : layout.SUMS]
        self._sums = floats[layout.SUMS : layout.SUMS + 8]
        self._maxima = floats[layout.MAXIMA : layout.PLACES]
        self._places = self._state[layout.PLACES : layout.SPANS]
        self._spans = floats[layout.SPANS : layout.MOMENTS]
        self._places[:] = -1
        self._spans[:] = np.inf, -np.inf, np.inf, -np.inf
        tolerance = operands.tolerance
        self._settings = (
            operands.row,
            tolerance.atol if tolerance else 0.0,
            tolerance.rtol if tolerance else 0.0,
            *_counted_format(operands.target.name, self._is_wide, operands.format is not None),
            _address(self._state),
        )

    @staticmethod
    def new_memory() -> Array:
        """Allocate the memory of an engine, for one pair after the other; it begins on a cache line."""
        words = np.empty(layout.WIDE_WORDS + _LINE_BYTES // 8, np.int64)
        first = -_address(words) % _LINE_BYTES // 8
        return words[first : first + layout.WIDE_WORDS]

    @staticmethod
    def kernel(operands: Operands) -> Kernel | None:
        """Return the kernel that measures the pair; None if only numpy does: complex, packed dtypes."""
        return _kernel(operands.reference.name, operands.target.name)

    @staticmethod
    def can_measure(operands: Operands) -> bool:
        """Whether there is a kernel for the pair."""
        return CompiledEngine.kernel(operands) is not None

    def add(self, reference: Array, target: Array) -> None:
        """Add stored elements: one-dimensional, as many on both sides, up to the end of a block.

        Raises:
            OutOfRangeError: The wide kernel does not measure them; all was in vain.
        """
        sides = []
        for bits, dtype in zip((reference, target), self._dtypes, strict=True):
            sides += [_address(bits), *_widening(dtype.name)]
        self._feed(*sides, reference.size, self._at, *self._settings)
        if self._is_wide and self._counts[layout.REFUSED]:
            raise OutOfRangeError
        if self._has_same_bits and reference.itemsize == 1:  # several bytes may be NaN
            self._has_same_bits = np.array_equal(reference, target)
        place = int(self._places[layout.ERROR])
        if place >= self._at:
            i = place - self._at
            x, y = (
                decode(bits[i : i + 1], d) for bits, d in zip((reference, target), self._dtypes, strict=True)
            )
            self._values = x[0].item(), y[0].item()
        if self._mismatch_at is None and self._counts[layout.MISMATCHES]:
            self._mismatch_at = self._find_mismatch(reference, target)
        self._at += reference.size

    def _find_mismatch(self, reference: Array, target: Array) -> int | None:
        """Find the first element above the tolerance in stored elements that hold one, as numpy does."""
        from tensorcap.metrics.numpy_engine import NumpyEngine

        engine = NumpyEngine(self._operands, self._at)
        engine.add(reference, target)
        return engine.totals().mismatch_at

    def totals(self) -> Totals:
        """Return the totals of everything that was added."""
        counts, sums, spans = self._counts.tolist(), self._sums.tolist(), self._spans.tolist()
        measured = counts[layout.ELEMENTS] - counts[layout.APART]
        is_exact = self._operands.is_exact
        error = self._largest(layout.ERROR)
        if is_exact:
            error.value = int(error.value)
        return Totals(
            elements=counts[layout.ELEMENTS],
            measured=measured,
            same_bits=self._has_same_bits and not counts[layout.UNLIKE],
            unequal=counts[layout.UNEQUAL],
            mismatches=counts[layout.MISMATCHES],
            mismatch_at=self._mismatch_at,
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
            max_ulp=counts[layout.ULPS] % 2**64,  # of float64 they may fill an unsigned word
            error=error,
            error_values=self._values,
            ratio=self._largest(layout.RATIO),
            outlier=self._largest(layout.OUTLIER),
            peak=max(abs(spans[0]), abs(spans[1])) if measured else 0.0,
            spans=(Span(*spans[:2]), Span(*spans[2:4])),
            exact_sum=counts[layout.EXACT_SUM] if self._is_wide else int(sums[0]) if is_exact else 0,
            errors_sum=Scaled(sums[0]),
            ratios_sum=sums[7],
            squares=(Scaled(sums[3]), Scaled(sums[5]), Scaled(sums[1])),
            dot=Scaled(sums[6]),
            moments=self._moments(),
            errors=self._error_histogram(measured - counts[layout.UNEQUAL]),
            rows=self._state[layout.ROWS : layout.ACCUMULATORS].view(np.uint32).astype(np.int64),
        )

    def _error_histogram(self, zeros: int) -> Array:
        # what is set apart is taken from the first table, which may have counted fewer: the sum is right
        if self._is_wide:
            tables = self._state[layout.WIDE_ERRORS : layout.WIDE_ACCUMULATORS].view(np.uint32)
            wide: Array = (tables[: layout.ROW_BINS] + tables[layout.ROW_BINS :]).astype(np.int64)
            return wide
        histogram = empty()
        one, two, three, four = (
            self._state[layout.ERRORS : layout.ROWS].view(np.uint32).reshape(4, layout.ERROR_BINS)
        )
        add_counts(histogram, one + two + three + four, zeros)
        return histogram

    def _largest(self, which: int) -> Largest:
        place = int(self._places[which])
        return Largest(float(self._maxima[which]), place) if place >= 0 else Largest(0.0)

    def _moments(self) -> Moments:
        count, *rest = self._state.view(np.float64)[layout.MOMENTS : layout.MOMENTS + 6].tolist()
        return Moments(int(count), rest[:2], rest[2:4], rest[4])


def _address(array: Array) -> int:
    """As `array.ctypes.data`, in a tenth of the time."""
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _kernel(reference: str, target: str) -> Kernel | None:
    """Return the kernel for two dtypes: the narrow one if float32 holds both, and their differences."""
    sides = DTYPES[reference], DTYPES[target]
    if any(side.kind == "complex" or side.packed > 1 for side in sides):
        return None
    if all(side.kind == "float" and side.itemsize <= 4 for side in sides):
        return "narrow"
    if all(side.kind != "float" and side.itemsize <= 2 for side in sides):
        return "narrow"
    return "wide" if all(side.kind == "float" or side.name in layout.KINDS for side in sides) else None


@cache
def _widening(name: str) -> tuple[int, int]:
    """Return how a dtype is widened, and the address of its table."""
    return layout.KINDS.get(name, layout.BY_TABLE), _address(_table(name))


@cache
def _table(name: str) -> Array:
    """Return the values of all bytes, for dtypes that are widened by a table; it stays where it is."""
    if DTYPES[name].itemsize > 1:
        return np.zeros(256, np.float32)
    return np.ascontiguousarray(decode(np.arange(256, dtype=np.uint8), DTYPES[name]), np.float32)


@cache
def _counted_format(target: str, is_wide: bool, is_counted: bool) -> tuple[float, int, int]:
    """Return scale, shift and cap of the format that distances are counted in (see `kernels.feed`)."""
    if not is_counted:
        return 1.0, 0, 0
    form = FLOAT_FORMATS[target]
    least, mantissa_bits = (-1022, 52) if is_wide else (-126, 23)
    return 2.0 ** (least - form.least_exponent), mantissa_bits - form.mantissa_bits, form.largest_number
