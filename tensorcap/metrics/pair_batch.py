"""Measure many small pairs in one call of compiled code.

A small tensor takes longer to begin and to end with than to compare. So the tensors of many pairs are read
into one buffer a side, compared by one call (see `kernel_tasks`), and the metrics are derived from columns
with an entry for each pair. The formulas are those of `totals`, and so is every bit of the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tensorcap.metrics import kernel_state as layout
from tensorcap.metrics.compiled_engine import EngineMemory, OutOfRangeError, address_of, task_words
from tensorcap.metrics.difference import Difference, Nonfinite, Number
from tensorcap.metrics.error_bins import (
    Histogram,
    numbers_of_float32,
    quantiles_of_each,
    row_quantiles_of_each,
)
from tensorcap.metrics.kernel_state import Kernel
from tensorcap.metrics.machine_code import load
from tensorcap.metrics.operands import Operands
from tensorcap.metrics.totals import ALL_FINITE, mismatch_place
from tensorcap.metrics.value_blocks import unravel
from tensorcap_formats.dtypes import Array, decode

_MAX_ERROR_BINS: Final = {"narrow": layout.ERROR_BINS + 1, "wide": layout.ROW_BINS}


def measure_batch(
    kernel: Kernel,
    operands: Sequence[Operands],
    reference: tuple[Array, Sequence[int]],
    target: tuple[Array, Sequence[int]],
    memory: EngineMemory,
) -> list[Difference]:
    """Measure pairs that one kernel measures and whose dtypes are the same in all of them.

    Args:
        kernel: The kernel.
        operands: The pairs, at least one.
        reference: A buffer of bytes, and where each tensor begins in it, at a multiple of its itemsize.
        target: The same.
        memory: Which no engine uses at the same time.

    Raises:
        OutOfRangeError: The wide kernel does not measure one of them.
    """
    tasks = np.array([task_words(one) for one in operands])
    for word, (buffer, places) in ((layout.TASK_X, reference), (layout.TASK_Y, target)):
        tasks[:, word] = np.array(places) + address_of(buffer)
    sizes = tasks[:, layout.TASK_SIZE]
    room = int(
        np.minimum(sizes + 1, _MAX_ERROR_BINS[kernel]).sum() + np.minimum(sizes, layout.ROW_BINS).sum()
    )
    results = np.empty((len(tasks), layout.RESULT_WORDS), np.int64)
    numbers, counts = np.empty((2, room), np.int64)
    load(kernel)(address_of(tasks), len(tasks), memory.address, *map(address_of, (results, numbers, counts)))
    if kernel == "wide" and results[:, layout.REFUSED].any():
        raise OutOfRangeError
    return _Columns(kernel, operands, results, numbers, counts, (reference, target)).differences()


class _Columns:
    """Results of a call as columns, from which metrics are derived as `Totals.difference` derives them."""

    def __init__(
        self,
        kernel: Kernel,
        operands: Sequence[Operands],
        results: Array,
        numbers: Array,
        counts: Array,
        sides: Sequence[tuple[Array, Sequence[int]]],
    ) -> None:
        self._kernel = kernel
        self._operands = operands
        self._pair = operands[0]  # of the dtypes of all
        self._shapes = [pair.shape for pair in operands]
        self._results = results
        self._sides = sides
        self._floats = results.view(np.float64)
        self._measured = results[:, layout.ELEMENTS] - results[:, layout.APART]
        self._is_measured = self._measured > 0
        places = results[:, layout.PLACES : layout.SPANS]
        self._places = [[None if at < 0 else at for at in column] for column in places.T.tolist()]
        maxima = np.where(places >= 0, self._floats[:, layout.MAXIMA : layout.PLACES], 0.0)
        self._error, self._ratio, self._outlier = maxima[:, :3].T
        self._split_bins(numbers, counts)

    def _split_bins(self, numbers: Array, counts: Array) -> None:
        """Part the bins of each pair into those of errors and those of rows."""
        filled = self._results[:, layout.RESULT_ERROR_BINS :]
        kinds = np.repeat(np.tile([False, True], len(filled)), filled.reshape(-1))
        used = kinds.size
        self._row_bins = numbers[:used][kinds], counts[:used][kinds], np.cumsum(filled[:, 1])
        bins = numbers[:used][~kinds]
        if self._kernel == "narrow":
            bins = numbers_of_float32(bins)
        self._error_bins = bins, counts[:used][~kinds], np.cumsum(filled[:, 0])

    def differences(self) -> list[Difference]:
        """Derive all metrics of all pairs."""
        with np.errstate(all="ignore"):
            columns = self._counted() | self._errors() | self._relative() | self._shares()
        return [
            Difference(*values)
            for values in zip(*(columns[name] for name in Difference.__dataclass_fields__), strict=True)
        ]

    def _counted(self) -> dict[str, Sequence[object]]:
        """What was counted, and where."""
        count = self._results[:, :24].T.tolist()
        pairs = self._operands
        mask_at = _where(self._results[:, layout.MASKS] > 0, count[layout.MASK_AT])
        has_format = self._pair.format is not None
        return {
            "elements": count[layout.ELEMENTS],
            "measured": self._measured.tolist(),
            "same_bits": self._same_bits(),
            "max_ulp": _where(self._is_measured & has_format, [ulps % 2**64 for ulps in count[layout.ULPS]]),
            "zero_rows": count[layout.ZERO_ROWS],
            "unequal": count[layout.UNEQUAL],
            "mismatches": [
                number if pair.tolerance else None
                for number, pair in zip(count[layout.MISMATCHES], pairs, strict=True)
            ],
            "zero_reference_errors": count[layout.ZEROS_HIT],
            "nonfinite_reference": _nonfinite(self._results[:, layout.NONFINITE_X :][:, :3]),
            "nonfinite_target": _nonfinite(self._results[:, layout.NONFINITE_Y :][:, :3]),
            "mask_mismatches": count[layout.MASKS],
            "mask_index": self._indices(mask_at),
            "sentinels": count[layout.SENTINELS],
            "sentinels_lost": count[layout.SENTINELS_LOST],
        }

    def _errors(self) -> dict[str, Sequence[object]]:
        """Absolute errors."""
        n, is_measured, error = self._measured, self._is_measured, self._error
        largest = error.tolist()
        max_abs = _where(
            is_measured, list(map(int, largest)) if self._pair.is_exact else largest
        )  # the same objects in several fields: results by the hundred thousand are kept
        edges = quantiles_of_each(*self._error_bins, (500, 900, 990, 999))
        has_bins = self._results[:, layout.RESULT_ERROR_BINS] > 0
        mse = self._sum(1) / np.maximum(n, 1)
        values = self._values_at_error()
        mismatch_at = [
            mismatch_place(pair.tolerance, count, (value, at), pair_values, first)
            for pair, count, value, at, pair_values, first in zip(
                self._operands,
                self._results[:, layout.MISMATCHES].tolist(),
                largest,
                self._places[layout.ERROR],
                values,
                self._places[layout.MISMATCH],
                strict=True,
            )
        ]
        return {
            "max_abs": max_abs,
            "max_abs_index": self._indices(self._places[layout.ERROR]),
            "max_abs_reference": [pair and pair[0] for pair in values],
            "max_abs_target": [pair and pair[1] for pair in values],
            "mean_abs": self._mean_abs(),
            "mse": _where(is_measured, mse.tolist()),
            "rmse": _where(is_measured, np.sqrt(mse).tolist()),
            **{
                name: _where(has_bins, list(map(min, edge, largest)))
                for name, edge in zip(("p50_abs", "p90_abs", "p99_abs", "p999_abs"), edges, strict=True)
            },
            "errors": Histogram.split(*self._error_bins[:2], self._error_bins[2].tolist()),
            "needed_atol": max_abs,
            "mismatch_index": self._indices(mismatch_at),
        }

    def _relative(self) -> dict[str, Sequence[object]]:
        """Errors relative to elements and to rows."""
        results, is_measured, ratio = self._results, self._is_measured, self._ratio
        divisors = self._measured - results[:, layout.ZEROS]
        has_ratio = divisors > 0
        needed = np.where(has_ratio & (ratio != 0), np.nextafter(ratio, np.inf), 0.0)
        needed = np.where(results[:, layout.ZEROS_HIT] > 0, np.inf, needed)
        has_rows = results[:, layout.RESULT_ROW_BINS] > 0
        is_defined = has_rows | is_measured & (results[:, layout.UNEQUAL] == 0)
        median, p95, largest = (
            _where(is_defined, _where(has_rows, column, 0.0))
            for column in row_quantiles_of_each(*self._row_bins, (500, 950, 1000))
        )
        return {
            "max_rel": _where(has_ratio, ratio.tolist()),
            "max_rel_index": self._indices(self._places[layout.RATIO]),
            "mean_rel": _where(has_ratio, (self._sum(7) / divisors).tolist()),
            "row_error_median": median,
            "row_error_p95": p95,
            "row_error_max": largest,
            "outlier": _where(is_defined, self._outlier.tolist()),
            "outlier_index": self._indices(self._places[layout.OUTLIER]),
            "needed_rtol": _where(is_measured, needed.tolist()),
        }

    def _shares(self) -> dict[str, Sequence[object]]:
        """Errors and angles of the whole tensors."""
        is_measured = self._is_measured
        error, reference, target = self._sum(1), self._sum(3), self._sum(5)
        spans = self._floats[:, layout.SPANS : layout.MOMENTS]
        peak = np.where(is_measured, np.maximum(np.abs(spans[:, 0]), np.abs(spans[:, 1])), 0.0)
        is_constant = (spans[:, 0] >= spans[:, 1]) | (spans[:, 2] >= spans[:, 3])
        moments = self._floats[:, layout.MOMENTS :]
        frobenius = np.where(reference != 0, np.sqrt(error) / np.sqrt(reference), np.inf)
        linf = np.where(peak != 0, self._error / peak, np.inf)
        # numpy's own logarithm is another one on some processors
        error_log, reference_log, peak_log, count_log = (
            _map(math.log10, column, column > 0) for column in (error, reference, peak, self._measured)
        )
        is_lost = np.isinf(error)
        psnr = np.where((peak == 0) | is_lost, -np.inf, 20 * peak_log - 10 * (error_log - count_log))
        sqnr = np.where((reference == 0) | is_lost, -np.inf, 10 * (reference_log - error_log))
        return {
            "relative_frobenius": _where(is_measured, np.where(error != 0, frobenius, 0.0).tolist()),
            "relative_linf": _where(is_measured, np.where(self._error != 0, linf, 0.0).tolist()),
            "calc_diff": _where(
                is_measured, np.where(error != 0, error / (reference + target), 0.0).tolist()
            ),
            "psnr_db": _where(is_measured, np.where(error != 0, psnr, np.inf).tolist()),
            "sqnr_db": _where(is_measured, np.where(error != 0, sqnr, np.inf).tolist()),
            "cosine": _cosines(self._sum(6), reference, target, is_measured),
            "pearson": _cosines(moments[:, 5], moments[:, 3], moments[:, 4], ~is_constant),
        }

    def _sum(self, number: int) -> Array:
        return self._floats[:, layout.SUMS + number]

    def _mean_abs(self) -> Sequence[float | None]:
        if not self._pair.is_exact:
            return _where(self._is_measured, (self._sum(0) / self._measured).tolist())
        sums = self._results[:, layout.EXACT_SUM] if self._kernel == "wide" else self._sum(0).astype(np.int64)
        return [
            total / count if count else None
            for total, count in zip(sums.tolist(), self._measured.tolist(), strict=True)
        ]

    def _same_bits(self) -> list[bool]:
        dtypes = self._pair.reference, self._pair.target
        if dtypes[0].name != dtypes[1].name:
            return [False] * len(self._operands)
        same: list[bool] = (self._results[:, layout.UNLIKE] == 0).tolist()
        if dtypes[0].itemsize > 1:
            return same
        (one, places), (other, other_places) = self._sides
        return [  # several bytes may be NaN
            is_same and np.array_equal(one[at : at + pair.size], other[other_at : other_at + pair.size])
            for is_same, pair, at, other_at in zip(same, self._operands, places, other_places, strict=True)
        ]

    def _values_at_error(self) -> list[tuple[Number, Number] | None]:
        """Both values at the largest error of each pair."""
        at = self._results[:, layout.PLACES + layout.ERROR]
        columns = []
        for dtype, (buffer, places) in zip(
            (self._pair.reference, self._pair.target), self._sides, strict=True
        ):
            elements = buffer.view(dtype.storage)
            columns.append(decode(elements[np.array(places) // dtype.itemsize + np.maximum(at, 0)], dtype))
        return _where(at >= 0, list(zip(*(column.tolist() for column in columns), strict=True)))

    def _indices(self, places: Sequence[int | None]) -> list[tuple[int, ...] | None]:
        """Convert places in the tensors; places of one shape that are equal are one tuple."""
        known: dict[tuple[int | None, tuple[int, ...]], tuple[int, ...] | None] = {}
        indices = []
        for place in zip(places, self._shapes, strict=True):
            if place not in known:
                known[place] = unravel(*place)
            indices.append(known[place])
        return indices


def _where(is_defined: Array, values: list[Any], otherwise: float | None = None) -> list[Any]:
    """Return the values, or what stands for those that are not defined."""
    if is_defined.all():
        return values
    return [
        value if defined else otherwise for value, defined in zip(values, is_defined.tolist(), strict=True)
    ]


def _map(function: Callable[[float], float], column: Array, is_defined: Array) -> Array:
    """Apply a function of one number where it is defined; 0 elsewhere."""
    values = np.where(is_defined, column, 1.0).tolist()
    return np.where(is_defined, list(map(function, values)), 0.0)


def _cosines(dots: Array, ones: Array, others: Array, is_defined: Array) -> list[float | None]:
    """As `scaled_sums.cosine`, of sums without an exponent."""
    is_defined = is_defined & (ones > 0) & (others > 0) & np.isfinite(dots + ones + others)
    (m, e), (n, f) = np.frexp(ones), np.frexp(others)
    exponents = e + f
    odd = exponents % 2
    cosines = np.ldexp(dots / np.sqrt(m * n * (1 + odd)), -((exponents - odd) // 2))
    return _where(is_defined, np.clip(cosines, -1.0, 1.0).tolist())


def _nonfinite(counts: Array) -> list[Nonfinite]:
    if not counts.any():
        return [ALL_FINITE] * len(counts)
    return [Nonfinite(*row) if any(row) else ALL_FINITE for row in counts.tolist()]
