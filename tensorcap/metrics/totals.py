"""Counts, sums and largest values of a pair of tensors, from either engine; metrics are derived from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tensorcap.metrics.difference import Difference, Nonfinite, Number, Tolerance
from tensorcap.metrics.error_bins import Histogram, quantiles, row_quantiles
from tensorcap.metrics.operands import Operands
from tensorcap.metrics.scaled_sums import Moments, Scaled, cosine
from tensorcap.metrics.value_blocks import unravel


@dataclass(slots=True)
class Largest:
    """The largest value so far, at least 0, and the number of its element, None as long as it is 0."""

    value: int | float = 0
    at: int | None = None

    def offer(self, value: int | float, at: int | None) -> bool:
        """Take a value if it is larger; return whether it was."""
        if value > self.value:
            self.value, self.at = value, at
            return True
        return False


@dataclass(slots=True)
class Span:
    """Least and largest value of one side."""

    least: int | float = math.inf
    largest: int | float = -math.inf

    def add(self, least: int | float, largest: int | float) -> None:
        """Widen it to two further values."""
        self.least, self.largest = min(self.least, least), max(self.largest, largest)

    @property
    def is_constant(self) -> bool:
        """Whether there is one value at most."""
        return self.least >= self.largest


@dataclass(slots=True)
class Totals:
    """Counts, sums and largest values of a part of two tensors, or of the whole.

    Parts are added in the order of their elements; sums then do not depend on the threads.

    Attributes:
        elements: Count of values, measured or not.
        measured: Values that errors are taken over.
        same_bits: Whether dtype and all bits are equal.
        unequal: Measured elements with an error.
        mismatches: Measured elements with an error above the tolerance; `mismatch_at` is the first.
        zeros: Measured elements whose reference is zero.
        zero_reference_errors: Elements of these that have an error.
        nonfinite: Counts of NaN, +inf and -inf, of the reference and of the target.
        masks: Elements that are NaN, infinite or finite on one side only; `mask_at` is the first.
        sentinels: Elements that are a mask sentinel on both sides.
        sentinels_lost: Elements that are a sentinel in the reference and -inf in the target.
        zero_rows: Rows with an error and a reference of zeros.
        max_ulp: Largest distance in representable values.
        error: Largest absolute error; `error_values` are both values there.
        ratio: Largest relative error.
        outlier: Largest error relative to element and row.
        peak: Largest modulus of the reference.
        spans: Least and largest value of both sides; unset for complex values.
        exact_sum: Sum of the absolute errors of integers.
        errors_sum: Sum of absolute errors.
        ratios_sum: Sum of relative errors.
        squares: Sums of squares of reference, target and error.
        dot: Sum of products of both sides.
        moments: For the correlation.
        errors: Histogram of absolute errors.
        rows: Histogram of the relative errors of rows whose reference is not all zeros.
    """

    elements: int = 0
    measured: int = 0
    same_bits: bool = True
    unequal: int = 0
    mismatches: int = 0
    mismatch_at: int | None = None
    zeros: int = 0
    zero_reference_errors: int = 0
    nonfinite: tuple[list[int], list[int]] = field(default_factory=lambda: ([0, 0, 0], [0, 0, 0]))
    masks: int = 0
    mask_at: int | None = None
    sentinels: int = 0
    sentinels_lost: int = 0
    zero_rows: int = 0
    max_ulp: int = 0
    error: Largest = field(default_factory=Largest)
    error_values: tuple[Number, Number] | None = None
    ratio: Largest = field(default_factory=Largest)
    outlier: Largest = field(default_factory=Largest)
    peak: float = 0.0
    spans: tuple[Span, Span] = field(default_factory=lambda: (Span(), Span()))
    exact_sum: int = 0
    errors_sum: Scaled = field(default_factory=Scaled)
    ratios_sum: float = 0.0
    squares: tuple[Scaled, Scaled, Scaled] = field(default_factory=lambda: (Scaled(), Scaled(), Scaled()))
    dot: Scaled = field(default_factory=Scaled)
    moments: Moments = field(default_factory=Moments)
    errors: Histogram = field(default_factory=Histogram)
    rows: Histogram = field(default_factory=Histogram)

    def add(self, other: Totals) -> None:
        """Add the totals of the part that follows."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.same_bits = self.same_bits and other.same_bits
        for ours, theirs in zip(self.nonfinite, other.nonfinite, strict=True):
            ours[:] = [one + two for one, two in zip(ours, theirs, strict=True)]
        self.mask_at = other.mask_at if self.mask_at is None else self.mask_at
        self.mismatch_at = other.mismatch_at if self.mismatch_at is None else self.mismatch_at
        self.max_ulp = max(self.max_ulp, other.max_ulp)
        if self.error.offer(other.error.value, other.error.at):
            self.error_values = other.error_values
        self.ratio.offer(other.ratio.value, other.ratio.at)
        self.outlier.offer(other.outlier.value, other.outlier.at)
        self.peak = max(self.peak, other.peak)
        for span, wider in zip(self.spans, other.spans, strict=True):
            span.add(wider.least, wider.largest)
        for total, part in zip(
            (self.errors_sum, self.dot, *self.squares),
            (other.errors_sum, other.dot, *other.squares),
            strict=True,
        ):
            total.add(part.value, part.exponent)
        self.moments.add(other.moments)
        self.errors += other.errors
        self.rows += other.rows

    def difference(self, operands: Operands) -> Difference:
        """Derive all metrics from the totals of whole tensors."""
        measures = _Measures(self, operands)
        n, is_exact, index = self.measured, operands.is_exact, partial(unravel, shape=operands.shape)
        in_reference, in_target = self.error_values or (None, None)
        edges = measures.quantiles()
        row_errors = measures.row_errors()
        mse = self.squares[2] / max(n, 1)
        max_abs = self.error.value if is_exact else float(self.error.value)
        max_rel = float(self.ratio.value) if n > self.zeros else None
        return Difference(
            elements=self.elements,
            measured=n,
            same_bits=self.same_bits,
            max_abs=max_abs if n else None,
            max_abs_index=index(self.error.at),
            max_abs_reference=in_reference,
            max_abs_target=in_target,
            mean_abs=measures.mean_abs() if n else None,
            max_rel=max_rel,
            max_rel_index=index(self.ratio.at),
            mean_rel=self.ratios_sum / (n - self.zeros) if n > self.zeros else None,
            mse=float(mse) if n else None,
            rmse=float(mse.root()) if n else None,
            relative_frobenius=measures.relative_frobenius() if n else None,
            relative_linf=measures.relative_linf() if n else None,
            calc_diff=measures.calc_diff() if n else None,
            psnr_db=measures.psnr() if n else None,
            sqnr_db=measures.sqnr() if n else None,
            cosine=cosine(self.dot, *self.squares[:2]) if n else None,
            pearson=measures.pearson(),
            max_ulp=self.max_ulp if n and operands.format else None,
            row_error_median=row_errors[0],
            row_error_p95=row_errors[1],
            row_error_max=row_errors[2],
            zero_rows=self.zero_rows,
            outlier=float(self.outlier.value) if row_errors[0] is not None else None,
            outlier_index=index(self.outlier.at),
            p50_abs=edges[0],
            p90_abs=edges[1],
            p99_abs=edges[2],
            p999_abs=edges[3],
            errors=self.errors,
            unequal=self.unequal,
            mismatches=self.mismatches if operands.tolerance else None,
            zero_reference_errors=self.zero_reference_errors,
            needed_rtol=measures.needed_rtol(max_rel) if n else None,
            needed_atol=max_abs if n else None,
            nonfinite_reference=_nonfinite(self.nonfinite[0]),
            nonfinite_target=_nonfinite(self.nonfinite[1]),
            mask_mismatches=self.masks,
            mask_index=index(self.mask_at),
            sentinels=self.sentinels,
            sentinels_lost=self.sentinels_lost,
            mismatch_index=index(
                mismatch_place(
                    operands.tolerance,
                    self.mismatches,
                    (self.error.value, self.error.at),
                    self.error_values,
                    self.mismatch_at,
                )
            ),
        )


def mismatch_place(
    tolerance: Tolerance | None,
    mismatches: int,
    largest: tuple[int | float, int | None],
    values: tuple[Number, Number] | None,
    first: int | None,
) -> int | None:
    """Place of an element above the tolerance: of the largest error if it is, else of the first.

    Args:
        tolerance: The tolerance.
        mismatches: How many elements are above it.
        largest: The largest error, and its place.
        values: Both values there.
        first: Place of the first that is above.
    """
    if tolerance is None or not mismatches:
        return None
    error, at = largest
    reference = values[0] if values else 0
    modulus = math.hypot(reference.real, reference.imag)  # infinite, where abs() would fail
    is_above = not error <= tolerance.atol + (tolerance.rtol * modulus if tolerance.rtol else 0)
    return at if is_above and at is not None else first


ALL_FINITE: Final = Nonfinite()


def _nonfinite(counts: Sequence[int]) -> Nonfinite:
    return Nonfinite(*counts) if any(counts) else ALL_FINITE  # nearly always, of pairs by the thousand


_COUNTS = (
    "elements",
    "measured",
    "unequal",
    "mismatches",
    "zeros",
    "zero_reference_errors",
    "masks",
    "sentinels",
    "sentinels_lost",
    "zero_rows",
    "exact_sum",
    "ratios_sum",
)


class _Measures:
    """The formulas of specs/metrics.md, section 3, over totals in which something was measured."""

    def __init__(self, totals: Totals, operands: Operands) -> None:
        self._totals = totals
        self._operands = operands
        self._reference, self._target, self._error = totals.squares

    def mean_abs(self) -> float:
        totals = self._totals
        if self._operands.is_exact:
            return totals.exact_sum / totals.measured
        return float(totals.errors_sum / totals.measured)

    def relative_frobenius(self) -> float:
        if not self._error.value:
            return 0.0
        if not self._reference.value:
            return math.inf
        return float(self._error.root() / self._reference.root())

    def relative_linf(self) -> float:
        if not self._totals.error.value:
            return 0.0
        return self._totals.error.value / self._totals.peak if self._totals.peak else math.inf

    def calc_diff(self) -> float:
        if not self._error.value:
            return 0.0
        return float(self._error / (self._reference + self._target))

    def psnr(self) -> float:
        if not self._error.value:
            return math.inf
        if not self._totals.peak or math.isinf(self._error.value):
            return -math.inf
        noise = self._error.log10() - math.log10(self._totals.measured)
        return 20 * math.log10(self._totals.peak) - 10 * noise

    def sqnr(self) -> float:
        if not self._error.value:
            return math.inf
        if not self._reference.value or math.isinf(self._error.value):
            return -math.inf
        return 10 * (self._reference.log10() - self._error.log10())

    def pearson(self) -> float | None:
        is_constant = any(span.is_constant for span in self._totals.spans)
        return None if is_constant else self._totals.moments.correlation()

    def row_errors(self) -> Sequence[float | None]:
        """Median, 95th percentile and the largest."""
        rows = self._totals.rows
        if rows:
            return row_quantiles(rows, (500, 950, 1000))
        return [0.0 if self._totals.measured and not self._totals.unequal else None] * 3

    def quantiles(self) -> Sequence[float | None]:
        if not self._totals.errors:
            return [None] * 4
        largest = float(self._totals.error.value)
        return [min(edge, largest) for edge in quantiles(self._totals.errors, (500, 900, 990, 999))]

    def needed_rtol(self, max_rel: float | None) -> float:
        if self._totals.zero_reference_errors:
            return math.inf
        # the next float64 up: the product with a reference may be rounded down, and must not fall short
        return math.nextafter(max_rel, math.inf) if max_rel else 0.0
