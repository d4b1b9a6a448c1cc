"""Measure with numpy alone: any dtypes, integers exactly. The compiled engine is tested against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tensorcap.metrics.error_bins import Histogram, add_float32, add_float64, add_rows, empty
from tensorcap.metrics.kernel_state import BLOCK
from tensorcap.metrics.operands import Operands
from tensorcap.metrics.scaled_sums import Moments, Scaled
from tensorcap.metrics.totals import Totals
from tensorcap.metrics.value_blocks import classify, split_wide
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.float_formats import MASK_SENTINELS

UNIT: Final = 8192  # elements: the float64 scratch of one block stays in a core's L2 cache
_EXACT: Final = 2**53  # float64 holds every integer up to here
_MODERATE: Final = 2.0**400  # squares of values between its inverse and itself neither overflow nor vanish


class NumpyEngine:
    """Adds blocks of stored elements of both sides; memory does not grow with the tensor.

    Example:
        >>> from tensorcap_formats.dtypes import dtype
        >>> operands = Operands(dtype("float32"), dtype("float32"), (2, 2))
        >>> engine = NumpyEngine(operands)
        >>> engine.add(np.float32([1, 2, 3, 4]), np.float32([1, 2, 3, 4.5]))
        >>> difference = engine.totals().difference(operands)
        >>> difference.max_abs, difference.max_abs_index, difference.mean_abs
        (0.5, (1, 1), 0.125)
    """

    unit = UNIT

    def __init__(self, operands: Operands, start: int = 0) -> None:
        """Begin with nothing added.

        Args:
            operands: The pair.
            start: Number of the first value that will be added; it begins a block.
        """
        self._operands = operands
        self._at = start
        self._wide: Any = np.complex128 if operands.is_complex else np.float64
        self._is_narrow = all(
            side.kind == "float" and side.itemsize <= 4 for side in (operands.reference, operands.target)
        )
        self._has_sentinels = all(side.kind == "float" for side in (operands.reference, operands.target))
        self._row = min(operands.row, BLOCK)
        self._totals = Totals(same_bits=operands.reference.name == operands.target.name)
        self._errors = empty()
        self._rows = empty()

    def add(self, reference: Array, target: Array) -> None:
        """Add stored elements: one-dimensional, as many on both sides, up to the end of a block."""
        packed = self._operands.reference.packed
        end = self._at + reference.size * packed
        first = 0
        with np.errstate(all="ignore"):  # an error may well exceed float64: it is infinite then (MET-1)
            while self._at < end:
                stop = min(self._operands.cut(self._at, UNIT, UNIT), end)
                last = first + (stop - self._at) // packed
                self._add_block(reference[first:last], target[first:last])
                self._at, first = stop, last

    def totals(self) -> Totals:
        """Return the totals of everything that was added."""
        self._totals.errors, self._totals.rows = Histogram.of(self._errors), Histogram.of(self._rows)
        return self._totals

    def _add_block(self, reference: Array, target: Array) -> None:
        totals, operands = self._totals, self._operands
        is_equal = operands.reference.name == operands.target.name and np.array_equal(
            reference.view(np.uint8), target.view(np.uint8)
        )
        totals.same_bits = totals.same_bits and is_equal
        x = decode(reference, operands.reference)
        totals.elements += x.size
        if is_equal and self._add_equal(x):
            return
        y = x if is_equal else decode(target, operands.target)
        if operands.is_exact:
            self._add_integers(x, y)
        else:
            self._add_floats(x, y)

    def _add_equal(self, x: Array) -> bool:
        """Add a block that is equal on both sides, in a fraction of the time.

        Returns:
            Whether it was added: not if some of its elements are not measured.
        """
        totals = self._totals
        wide = x.astype(self._wide)
        parts = wide.view(np.float64)
        least, largest = float(parts.min()), float(parts.max())
        if not (math.isfinite(least + largest) and (self._operands.is_exact or least > MASK_SENTINELS[0])):
            return False
        totals.measured += x.size
        self._errors[0] += x.size
        totals.zeros += x.size - int(np.count_nonzero(x))
        totals.peak = max(
            totals.peak, float(np.abs(wide).max()) if self._operands.is_complex else max(-least, largest)
        )
        squares, powers = _squares(parts, self._row * (wide.itemsize // 8))
        _add_rows_to((*totals.squares[:2], totals.dot), squares, powers)
        self._rows[0] += int(np.count_nonzero(squares))
        if not self._operands.is_complex:
            exponent = _exponent(parts)
            centred = _moments(_scaled(parts, exponent), None, [exponent, exponent])
            totals.moments.add(centred)
            for span in totals.spans:
                span.add(*((int(x.min()), int(x.max())) if self._operands.is_exact else (least, largest)))
        return True

    def _add_integers(self, x: Array, y: Array) -> None:
        totals, tolerance = self._totals, self._operands.tolerance
        wide = x.astype(np.float64), y.astype(np.float64)
        totals.measured += x.size
        for span, side in zip(totals.spans, (x, y), strict=True):
            span.add(int(side.min()), int(side.max()))
        exact = exact_difference(x, y)
        errors: Array = exact.astype(np.float64)
        largest = int(exact.max())
        totals.exact_sum += int(exact.sum()) if largest < 2**48 else int(exact.astype(object).sum())
        if tolerance:
            bound = tolerance.atol + tolerance.rtol * np.abs(wide[0])
            above = errors > bound if largest <= _EXACT else exact.astype(object) > bound.astype(object)
            self._count_mismatches(above)
        self._offer_error(exact, largest, x, y)
        moduli = np.abs(wide[0])
        add_float64(self._errors, errors)
        self._add_errors(moduli, errors, None)
        self._add_sums(*wide, errors, moduli, errors, None)

    def _add_floats(self, x: Array, y: Array) -> None:
        totals, tolerance = self._totals, self._operands.tolerance
        (x_high, x_low), (y_high, y_low) = split_wide(x, self._wide), split_wide(y, self._wide)
        # Beyond 2**53 an integer is the sum of two float64. If both sides are close the first difference
        # is exact, so that an error of one is not lost; if they are not, rounding does not matter.
        d = (y_high - x_high) + (y_low - x_low)
        x_wide, y_wide = x_high + x_low, y_high + y_low
        measured = self._set_apart(x_wide, y_wide, d)
        totals.measured += x.size if measured is None else int(np.count_nonzero(measured))
        moduli, errors = np.abs(x_wide), np.abs(d)
        if tolerance:
            bound = np.full(x.size, tolerance.atol)
            if tolerance.rtol:  # zero times an infinite modulus would be NaN
                bound += tolerance.rtol * moduli
            self._count_mismatches(~((errors <= bound) & (errors < np.inf)))
        if not self._operands.is_complex and (measured is None or measured.any()):
            for span, side in zip(totals.spans, (x_wide, y_wide), strict=True):
                kept = side if measured is None else side[measured]
                span.add(float(kept.min()), float(kept.max()))
        self._offer_error(errors, float(errors.max()), x, y)
        self._add_errors(moduli, errors, measured)
        if self._is_narrow:
            singles = np.abs(y_wide.astype(np.float32) - x_wide.astype(np.float32))
            add_float32(self._errors, singles if measured is None else singles[measured])
        else:
            add_float64(self._errors, errors if measured is None else errors[measured])
        self._add_distances(x_wide, y_wide)
        self._add_sums(x_wide, y_wide, d, moduli, errors, measured)

    def _count_mismatches(self, above: Array) -> None:
        totals, count = self._totals, int(np.count_nonzero(above))
        totals.mismatches += count
        if count and totals.mismatch_at is None:
            totals.mismatch_at = self._at + int(above.argmax())

    def _set_apart(self, x: Array, y: Array, d: Array) -> Array | None:
        """Compare the masks, and write zeros to elements that are not measured (MET-2 to MET-4).

        Returns:
            Which elements are measured; None for all.
        """
        totals = self._totals
        hidden = np.zeros(x.size, np.bool_)
        if self._has_sentinels and not x.min() > MASK_SENTINELS[0]:  # so also for NaN
            trusted = np.isin(x, MASK_SENTINELS)
            hidden = trusted & np.isin(y, MASK_SENTINELS)
            totals.sentinels += int(np.count_nonzero(hidden))
            totals.sentinels_lost += int(np.count_nonzero(trusted & (y == -np.inf)))
        if not hidden.any() and np.isfinite(x).all() and np.isfinite(y).all():
            return None
        parts = [side.view(np.float64).reshape(x.size, -1) for side in (x, y, d)]  # real and imaginary
        classes = [classify(part) for part in parts[:2]]
        for counts, side in zip(totals.nonfinite, classes, strict=True):
            infinite = (side >= 2).any(axis=1)
            negative = (side[:, 0] == 3) if side.shape[1] == 1 else np.zeros(1, np.bool_)
            counts[0] += int(np.count_nonzero((side == 1).any(axis=1) & ~infinite))
            counts[1] += int(np.count_nonzero(infinite) - np.count_nonzero(negative))
            counts[2] += int(np.count_nonzero(negative))
        unlike = (classes[0] != classes[1]).any(axis=1)
        if unlike.any():
            totals.masks += int(np.count_nonzero(unlike))
            if totals.mask_at is None:
                totals.mask_at = self._at + int(unlike.argmax())
        lost = ((classes[0] | classes[1]) != 0) | hidden[:, None]
        for part in parts:
            part[lost] = 0
        measured: Array = ~lost.all(axis=1)
        return measured

    def _offer_error(self, errors: Array, largest: int | float, x: Array, y: Array) -> None:
        self._totals.unequal += int(np.count_nonzero(errors))
        if largest > self._totals.error.value:
            i = int(errors.argmax())
            self._totals.error.offer(largest, self._at + i)
            self._totals.error_values = x[i].item(), y[i].item()

    def _add_errors(self, moduli: Array, errors: Array, measured: Array | None) -> None:
        """Add relative errors, and errors of elements whose reference is zero."""
        totals = self._totals
        is_zero = moduli == 0
        totals.zero_reference_errors += int(np.count_nonzero(errors[is_zero]))
        totals.zeros += int(np.count_nonzero(is_zero if measured is None else is_zero & measured))
        ratios = np.divide(errors, moduli, out=np.zeros(errors.size), where=~is_zero)
        i = int(ratios.argmax())
        totals.ratio.offer(float(ratios[i]), self._at + i)
        totals.ratios_sum += float(ratios.sum())

    def _add_distances(self, x: Array, y: Array) -> None:
        if self._operands.format is not None:
            numbers = (self._operands.format.numbers(side) for side in (x, y))
            self._totals.max_ulp = max(self._totals.max_ulp, int(exact_difference(*numbers).max()))

    def _add_sums(
        self, x: Array, y: Array, d: Array, moduli: Array, errors: Array, measured: Array | None
    ) -> None:
        totals, row = self._totals, self._row * (x.itemsize // 8)
        totals.peak = max(totals.peak, float(moduli.max()))
        exponent = _exponent(errors)
        totals.errors_sum.add(float(_scaled(errors, exponent).sum()), exponent)
        sides = [side.view(np.float64) for side in (x, y, d)]
        squares = [_squares(side, row) for side in sides]
        for total, (values, powers) in zip(totals.squares, squares, strict=True):
            _add_rows_to((total,), values, powers)
        exponents_xy = [_exponent(side) for side in sides[:2]]
        x_scaled, y_scaled = (_scaled(s, e) for s, e in zip(sides[:2], exponents_xy, strict=True))
        totals.dot.add(float((x_scaled * y_scaled).sum()), sum(exponents_xy))
        self._add_rows(squares[0], squares[2], moduli, errors)
        if not self._operands.is_complex:
            if measured is not None:
                x_scaled, y_scaled = x_scaled[measured], y_scaled[measured]
            totals.moments.add(_moments(x_scaled, y_scaled, exponents_xy))

    def _add_rows(
        self,
        reference: tuple[Array, Array | None],
        error: tuple[Array, Array | None],
        moduli: Array,
        errors: Array,
    ) -> None:
        totals, size = self._totals, moduli.size
        (rr, r_powers), (dd, d_powers) = reference, error
        kept = rr > 0
        totals.zero_rows += int(np.count_nonzero(~kept & (dd > 0)))
        if not kept.any():
            return
        zero = np.zeros(rr.size, np.int64)
        shift = (zero if d_powers is None else d_powers) - (zero if r_powers is None else r_powers)
        ratios = np.ldexp(np.sqrt(dd[kept]) / np.sqrt(rr[kept]), shift[kept])
        add_rows(self._rows, ratios)
        lengths = np.full(rr.size, self._row)
        lengths[-1] = size - self._row * (rr.size - 1)
        rms = np.sqrt(rr / lengths)
        if r_powers is not None:
            rms = np.ldexp(rms, r_powers)
        if totals.peak > 1e300:  # the sum of two such numbers may overflow
            moduli, errors, rms = moduli * 2.0**-64, errors * 2.0**-64, rms * 2.0**-64
        rms[~kept] = np.inf
        outliers = errors / (moduli + np.repeat(rms, lengths))
        i = int(outliers.argmax())
        totals.outlier.offer(float(outliers[i]), self._at + i)


def exact_difference(x: Array, y: Array) -> Array:
    """`|x - y|` of integers or bools of any widths, without wrapping.

    Returns:
        uint64, or Python integers if a difference may be larger than that.

    Example:
        >>> exact_difference(np.array([2**62, -1]), np.array([-(2**62), 0]))
        array([9223372036854775808,                   1], dtype=uint64)
    """
    x, y = (side.astype(np.int64 if side.dtype.kind == "i" else np.uint64) for side in (x, y))
    if x.dtype != y.dtype:
        signed, unsigned = (x, y) if x.dtype.kind == "i" else (y, x)
        if unsigned.max() <= np.uint64(2**63 - 1):
            x, y = x.astype(np.int64), y.astype(np.int64)
        elif signed.min() >= 0:
            x, y = x.astype(np.uint64), y.astype(np.uint64)
        else:
            exact: Array = np.abs(x.astype(object) - y.astype(object))
            return exact
    difference: Array = np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)
    return difference


def _exponent(values: Array) -> int:
    """Return the power of two to divide by before squaring; 0 for all values in the usual range."""
    largest = max(-float(values.min()), float(values.max()))
    if 1 / _MODERATE < largest < _MODERATE or not largest or math.isinf(largest):
        return 0
    return math.frexp(largest)[1]


def _scaled(values: Array, exponent: int) -> Array:
    return np.ldexp(values, -exponent) if exponent else values


def _squares(values: Array, row: int) -> tuple[Array, Array | None]:
    """Compute sums of squares of rows, and the powers of two that values were divided by, None for none."""
    largest = _by_row(np.maximum, np.abs(values), row)
    is_moderate = ((largest > 1 / _MODERATE) & (largest < _MODERATE)) | (largest == 0) | (largest == np.inf)
    if is_moderate.all():
        return _by_row(np.add, values * values, row), None
    powers = np.frexp(largest)[1].astype(np.int64)
    scaled = np.ldexp(values, -np.repeat(powers, row)[: values.size])
    return _by_row(np.add, scaled * scaled, row), powers


def _by_row(operation: np.ufunc, values: Array, row: int) -> Array:
    """Compute sums or maxima of whole rows, and of the values left after them."""
    whole = values.size // row * row
    results: Array = operation.reduce(values[:whole].reshape(-1, row), axis=1)
    return results if whole == values.size else np.append(results, operation.reduce(values[whole:]))


def _add_rows_to(totals: Sequence[Scaled], squares: Array, powers: Array | None) -> None:
    """Add sums of squares of rows, as `_squares` gives them."""
    if powers is None:
        for total in totals:
            total.add(float(squares.sum()))
        return
    for value, power in zip(squares.tolist(), powers.tolist(), strict=True):
        for total in totals:
            total.add(value, 2 * power)


def _moments(x: Array, y: Array | None, exponents: list[int]) -> Moments:
    """Compute moments of both sides, or, without `y`, of two equal ones."""
    if not x.size:
        return Moments()
    x_mean = float(x.mean())
    x = x - x_mean
    xx = float((x * x).sum())
    if y is None:
        return Moments(x.size, [x_mean, x_mean], [xx, xx], xx, exponents)
    y_mean = float(y.mean())
    y = y - y_mean
    return Moments(x.size, [x_mean, y_mean], [xx, float((y * y).sum())], float((x * y).sum()), exponents)
