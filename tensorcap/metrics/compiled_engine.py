"""Measure pairs with compiled code: all real dtypes that are not packed, in their usual ranges."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Final

import numpy as np

from tensorcap.metrics import kernel_state as layout
from tensorcap.metrics.difference import Number
from tensorcap.metrics.error_bins import Histogram, histogram_float32
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


class EngineMemory:
    """The state of an engine, for one pair after the other, and views of its parts (see `kernel_state`).

    Attributes:
        address: Of the state, which begins on a cache line.
        task: A table of one task.
        task_address: Its address.
        integers: Counts, sums, maxima, places, spans, moments and bins of rows, as int64.
        floats: The same, as float64.
        errors: Tables of absolute errors of the narrow kernel.
        wide_errors: Those of the wide kernel.
    """

    def __init__(self) -> None:
        words = np.zeros(layout.WIDE_WORDS + _LINE_BYTES // 8, np.int64)
        first = -address_of(words) % _LINE_BYTES // 8
        state = words[first : first + layout.WIDE_WORDS]
        self.address = address_of(state)
        self.task = np.zeros((1, layout.TASK_WORDS), np.int64)
        self.task_address = address_of(self.task)
        self.integers = state[: layout.ERRORS]
        self.floats = self.integers.view(np.float64)
        tables = state[layout.ERRORS :].view(np.uint32)
        errors, rows, wide = (
            2 * (at - layout.ERRORS) for at in (layout.ROWS, layout.ACCUMULATORS, layout.WIDE_ACCUMULATORS)
        )
        self.errors = tables[:errors].reshape(4, layout.ERROR_BINS)
        self._rows = tables[errors:rows]
        self.wide_errors = tables[wide - 2 * layout.ROW_BINS : wide].reshape(2, layout.ROW_BINS)
        self.integers[:] = _NOTHING

    def clear(self, *, is_wide: bool) -> None:
        """Forget what was added before."""
        first, last = self._row_bins()
        self._rows[first : last + 1] = 0
        self.integers[:] = _NOTHING
        self.errors[:] = 0
        if is_wide:
            self.wide_errors[:] = 0

    def row_histogram(self) -> Histogram:
        """Return the histogram of errors of rows."""
        first, last = self._row_bins()
        return Histogram.of(self._rows[first : last + 1], first)

    def _row_bins(self) -> list[int]:
        """Return the first and the last bin of rows that may not be empty: a small part of the table."""
        bins: list[int] = self.integers[layout.ROW_SPAN : layout.ROW_SPAN + 2].tolist()
        return bins


def _nothing() -> Array:
    integers = np.zeros(layout.ERRORS, np.int64)
    integers[layout.PLACES : layout.SPANS] = -1
    integers[layout.ROW_SPAN : layout.ROW_SPAN + 2] = layout.ROW_BINS, -1
    integers.view(np.float64)[layout.SPANS : layout.MOMENTS] = np.inf, -np.inf, np.inf, -np.inf
    return integers


class CompiledEngine:
    """Adds blocks of stored elements of both sides, as `NumpyEngine` does, several times as fast.

    An engine is for one thread; it releases the GIL.
    """

    unit = layout.BLOCK

    def __init__(self, operands: Operands, start: int = 0, memory: EngineMemory | None = None) -> None:
        """Load the kernels, or compile them if they never were.

        Args:
            operands: The pair; `can_measure` is true for it.
            start: Number of the first value that will be added; it begins a block.
            memory: Which no other engine uses at the same time; its own if None.
        """
        kernel = self.kernel(operands)
        self._is_wide = kernel == "wide"
        self._feed = load(kernel or "narrow")
        self._operands = operands
        self._dtypes = operands.reference, operands.target
        self._at = start
        self._has_same_bits = operands.reference.name == operands.target.name
        self._values: tuple[Number, Number] | None = None
        self._memory = EngineMemory() if memory is None else memory
        self._memory.clear(is_wide=self._is_wide)
        self._memory.task[0] = task_words(operands)

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
        x, y = self._dtypes
        task = self._memory.task
        task[0, layout.TASK_X] = address_of(reference)
        task[0, layout.TASK_Y] = address_of(target)
        task[0, layout.TASK_SIZE : layout.TASK_ROW] = reference.size, self._at
        self._feed(self._memory.task_address, 1, self._memory.address, 0, 0, 0)
        if self._is_wide and self._memory.integers[layout.REFUSED]:
            raise OutOfRangeError
        if self._has_same_bits and reference.itemsize == 1:  # several bytes may be NaN
            self._has_same_bits = np.array_equal(reference, target)
        i = int(self._memory.integers[layout.PLACES + layout.ERROR]) - self._at
        if i >= 0:
            self._values = decode(reference[i : i + 1], x).item(), decode(target[i : i + 1], y).item()
        self._at += reference.size

    def totals(self) -> Totals:
        """Return the totals of everything that was added."""
        counts, floats = self._memory.integers.tolist(), self._memory.floats.tolist()
        places = counts[layout.PLACES : layout.SPANS]
        sums, maxima = floats[layout.SUMS : layout.MAXIMA], floats[layout.MAXIMA : layout.PLACES]
        spans, moments = floats[layout.SPANS : layout.MOMENTS], floats[layout.MOMENTS :]
        measured = counts[layout.ELEMENTS] - counts[layout.APART]
        is_exact = self._operands.is_exact
        error, ratio, outlier = (
            Largest(value, place) if place >= 0 else Largest(0.0)
            for value, place in zip(maxima[:3], places, strict=False)
        )
        if is_exact:
            error.value = int(error.value)
        return Totals(
            elements=counts[layout.ELEMENTS],
            measured=measured,
            same_bits=self._has_same_bits and not counts[layout.UNLIKE],
            unequal=counts[layout.UNEQUAL],
            mismatches=counts[layout.MISMATCHES],
            mismatch_at=places[layout.MISMATCH] if counts[layout.MISMATCHES] else None,
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
            ratio=ratio,
            outlier=outlier,
            peak=max(abs(spans[0]), abs(spans[1])) if measured else 0.0,
            spans=(Span(*spans[:2]), Span(*spans[2:4])),
            exact_sum=counts[layout.EXACT_SUM] if self._is_wide else int(sums[0]) if is_exact else 0,
            errors_sum=Scaled(sums[0]),
            ratios_sum=sums[7],
            squares=(Scaled(sums[3]), Scaled(sums[5]), Scaled(sums[1])),
            dot=Scaled(sums[6]),
            moments=Moments(int(moments[0]), moments[1:3], moments[3:5], moments[5]),
            errors=self._error_histogram(measured - counts[layout.UNEQUAL]),
            rows=self._memory.row_histogram(),
        )

    def _error_histogram(self, zeros: int) -> Histogram:
        # what is set apart is taken from the first table, which may have counted fewer: the sum is right
        if self._is_wide:
            one, two = self._memory.wide_errors
            return Histogram.of(one + two)
        return histogram_float32(self._memory.errors, zeros)


def address_of(array: Array) -> int:
    """As `array.ctypes.data`, in a tenth of the time."""
    address: int = array.__array_interface__["data"][0]
    return address


_NOTHING: Final = _nothing()


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


@lru_cache(maxsize=1024)
def task_words(operands: Operands) -> Array:
    """Return the words of a task that describe a pair, in whatever places its elements are."""
    words = np.zeros(layout.TASK_WORDS, np.int64)
    floats = words.view(np.float64)
    words[layout.TASK_X + 1 : layout.TASK_Y] = _widening(operands.reference.name)
    words[layout.TASK_Y + 1 : layout.TASK_SIZE] = _widening(operands.target.name)
    words[layout.TASK_SIZE] = operands.size
    words[layout.TASK_ROW] = operands.row
    if operands.tolerance:
        floats[layout.TASK_ATOL], floats[layout.TASK_RTOL] = operands.tolerance.atol, operands.tolerance.rtol
    is_wide = CompiledEngine.kernel(operands) == "wide"
    scale, shift, cap = _counted_format(operands.target.name, is_wide, operands.format is not None)
    floats[layout.TASK_SCALE] = scale
    words[layout.TASK_SHIFT], words[layout.TASK_CAP] = shift, cap
    return words


@cache
def _widening(name: str) -> tuple[int, int]:
    """Return how a dtype is widened, and the address of its table."""
    return layout.KINDS.get(name, layout.BY_TABLE), address_of(_table(name))


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
