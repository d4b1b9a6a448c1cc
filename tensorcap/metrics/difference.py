"""The metrics of a pair of tensors, as in `specs/metrics.md`, and the tolerance that a user allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensorcap.metrics.error_bins import Histogram
from tensorcap_formats.errors import UsageError
from tensorcap_formats.light_dataclass import light_dataclass

Number = bool | int | float | complex
Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The error that a user allows: `atol + rtol * |reference|` for each element.

    Attributes:
        rtol: Relative to the reference element, no unit.
        atol: In the tensors' own unit.
    """

    rtol: float
    atol: float

    @classmethod
    def parse(cls, rtol: float | None, atol: float | None) -> Tolerance | None:
        """Parse the options of a user: None if both are missing; if one is, it is zero (CMP-12).

        Raises:
            UsageError: One of them is negative, infinite or NaN.
        """
        for name, value in (("rtol", rtol), ("atol", atol)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name}: is {value!r}, expected a finite number of at least 0")
        return None if rtol is None and atol is None else cls(rtol or 0.0, atol or 0.0)


@light_dataclass(frozen=True, slots=True)
class Nonfinite:
    """Counts of elements that are not finite; a complex element counts by its modulus."""

    nan: int = 0
    posinf: int = 0
    neginf: int = 0


@light_dataclass(frozen=True, slots=True)
class Difference:
    """How far a target tensor lies from its reference. None stands for undefined.

    Formulas and edge cases are those of `specs/metrics.md`. An index is one number for each axis.

    Attributes:
        elements: Values on each side.
        measured: Elements that errors are taken over: finite on both sides, and no mask sentinel on both.
        same_bits: Whether dtype and all bits are equal.
        max_abs: Largest absolute error, exact for integers.
        max_abs_index: Where it is; None if there is no error.
        max_abs_reference: The reference's value there.
        max_abs_target: The target's value there.
        mean_abs: Mean absolute error.
        max_rel: Largest `|error / reference|` over elements whose reference is not zero, no unit.
        max_rel_index: Where it is; None if there is no such error.
        mean_rel: Mean of these relative errors.
        mse: Mean squared error.
        rmse: Root of the mean squared error.
        relative_frobenius: Norm of the error over norm of the reference, no unit.
        relative_linf: Largest absolute error over largest `|reference|`, no unit.
        calc_diff: Squared error over the sum of both squared norms, no unit.
        psnr_db: Peak signal-to-noise ratio in decibels, the peak being the largest `|reference|`.
        sqnr_db: Signal-to-noise ratio in decibels.
        cosine: Cosine of the angle between both, no unit; None if one of them is all zeros.
        pearson: Pearson's correlation, no unit; None if one of them is constant.
        max_ulp: Largest distance in values that the target's dtype can represent.
        row_error_median: Median of the relative errors of rows, no unit: ε in `specs/policy.md`.
        row_error_p95: Their 95th percentile.
        row_error_max: The largest of them.
        zero_rows: Rows with an error whose reference is all zeros.
        outlier: Largest error relative to the reference element and its row, no unit: κ there.
        outlier_index: Where it is; None if there is no error.
        p50_abs: Median of the absolute errors, rounded up to a bin.
        p90_abs: Their 90th percentile.
        p99_abs: Their 99th percentile.
        p999_abs: Their 99.9th percentile.
        errors: Histogram of absolute errors, in the bins of `error_bins`.
        unequal: Count of measured elements with any error.
        mismatches: Count of measured elements with an error above the tolerance; None without one.
        zero_reference_errors: Count of measured elements that are zero in the reference only.
        needed_rtol: Least relative tolerance that all elements pass without an absolute one.
        needed_atol: Least absolute tolerance that all elements pass without a relative one.
        nonfinite_reference: NaN and infinities of the reference.
        nonfinite_target: NaN and infinities of the target.
        mask_mismatches: Count of elements that are NaN, +inf, -inf or finite on one side only.
        mask_index: The first of these.
        sentinels: Count of elements that are a mask sentinel on both sides.
        sentinels_lost: Count of elements that are a sentinel in the reference and -inf in the target.
        mismatch_index: An element above the tolerance: that of the largest error if it is, else the first;
            None if there is none.
    """

    elements: int
    measured: int
    same_bits: bool
    max_abs: int | float | None
    max_abs_index: Index | None
    max_abs_reference: Number | None
    max_abs_target: Number | None
    mean_abs: float | None
    max_rel: float | None
    max_rel_index: Index | None
    mean_rel: float | None
    mse: float | None
    rmse: float | None
    relative_frobenius: float | None
    relative_linf: float | None
    calc_diff: float | None
    psnr_db: float | None
    sqnr_db: float | None
    cosine: float | None
    pearson: float | None
    max_ulp: int | None
    row_error_median: float | None
    row_error_p95: float | None
    row_error_max: float | None
    zero_rows: int
    outlier: float | None
    outlier_index: Index | None
    p50_abs: float | None
    p90_abs: float | None
    p99_abs: float | None
    p999_abs: float | None
    errors: Histogram
    unequal: int
    mismatches: int | None
    zero_reference_errors: int
    needed_rtol: float | None
    needed_atol: int | float | None
    nonfinite_reference: Nonfinite
    nonfinite_target: Nonfinite
    mask_mismatches: int
    mask_index: Index | None
    sentinels: int
    sentinels_lost: int
    mismatch_index: Index | None = None
