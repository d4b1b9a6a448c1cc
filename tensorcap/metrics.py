"""How far one tensor lies from another, measured in one pass over blocks of both.

Definitions are normative in `specs/comparison.md`. This is the plain numpy engine: float64 sums, integers
exactly. A faster one has to offer the same two methods, `update` and `result`, and the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.errors import UsageError

BLOCK: Final = 8192  # elements: the float64 scratch of one block stays in a core's L2 cache
_EXACT: Final = 2**53  # float64 holds every integer up to here
_MODERATE: Final = 2.0**400  # squares of values between its inverse and itself neither overflow nor vanish

Number = bool | int | float | complex


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much error somebody allows: `atol + rtol * |reference|` for each element.

    Attributes:
        rtol: Relative to the reference element, no unit.
        atol: In the tensors' own unit.
    """

    rtol: float
    atol: float

    @classmethod
    def given(cls, rtol: float | None, atol: float | None) -> Tolerance | None:
        """What a user gave: None for nothing at all; of two, the one left out is zero (CMP-12).

        Raises:
            UsageError: One of them is negative, infinite or NaN.
        """
        for name, value in (("rtol", rtol), ("atol", atol)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name}: is {value!r}, expected a finite number of at least 0")
        return None if rtol is None and atol is None else cls(rtol or 0.0, atol or 0.0)


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """Counts of elements that are no finite number; of a complex element, by its modulus."""

    nan: int = 0
    posinf: int = 0
    neginf: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a target tensor lies from its reference. None stands for undefined (CMP-20 to CMP-30).

    Attributes:
        elements: Values on each side.
        measured: Those that are finite on both sides, over which the errors are taken.
        same_bits: Whether dtype and all bits are equal.
        max_abs: Largest absolute error, exact for integers; None where nothing was measured.
        max_abs_index: Where it is, one number for each axis; None where there is no error.
        max_abs_reference: The reference's value there.
        max_abs_target: The target's value there.
        mean_abs: Mean absolute error.
        relative_frobenius: Norm of the error over norm of the reference, no unit.
        cosine: Cosine of the angle between both, no unit; None where one of them is all zeros.
        psnr_db: Peak signal-to-noise ratio in decibels, the peak being the largest `|reference|`.
        unequal: Count of measured elements with any error.
        mismatches: Count of measured elements with an error above the tolerance; None without one.
        nonfinite_reference: NaN and infinities of the reference.
        nonfinite_target: NaN and infinities of the target.
        mask_mismatches: Count of elements that are NaN, +inf, -inf or finite on one side only.
        mask_index: The first of these, one number for each axis.
    """

    elements: int
    measured: int
    same_bits: bool
    max_abs: int | float | None
    max_abs_index: tuple[int, ...] | None
    max_abs_reference: Number | None
    max_abs_target: Number | None
    mean_abs: float | None
    relative_frobenius: float | None
    cosine: float | None
    psnr_db: float | None
    unequal: int
    mismatches: int | None
    nonfinite_reference: Nonfinite
    nonfinite_target: Nonfinite
    mask_mismatches: int
    mask_index: tuple[int, ...] | None


class _Sum:
    """A sum of products that neither overflows nor vanishes: `value * 2**exponent`."""

    def __init__(self) -> None:
        self.value = 0.0
        self.exponent = 0

    def add(self, value: float, exponent: int) -> None:
        if not value:
            return
        if not self.value:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.value = math.ldexp(self.value, self.exponent - exponent)
            self.exponent = exponent
        elif exponent < self.exponent:
            value = math.ldexp(value, exponent - self.exponent)
        self.value += value

    def log10(self) -> float:
        return math.log10(self.value) + self.exponent * math.log10(2)


class DifferenceBuilder:
    """Add blocks of stored elements of both sides; memory does not grow with the tensor.

    Example:
        >>> from tensorcap_formats.dtypes import dtype
        >>> builder = DifferenceBuilder(dtype("float32"), dtype("float32"), (2, 2))
        >>> builder.update(np.float32([1, 2, 3, 4]), np.float32([1, 2, 3, 4.5]))
        >>> d = builder.result()
        >>> d.max_abs, d.max_abs_index, d.mean_abs
        (0.5, (1, 1), 0.125)
    """

    def __init__(
        self, reference: DType, target: DType, shape: tuple[int, ...], *, tolerance: Tolerance | None = None
    ) -> None:
        kinds = {reference.kind, target.kind}
        self._dtypes = reference, target
        self._is_exact = not kinds & {"float", "complex"}
        self._wide: Any = np.complex128 if "complex" in kinds else np.float64
        self._shape = (*shape[:-1], (shape or (1,))[-1] * reference.packed) if reference.packed > 1 else shape
        self._tolerance = tolerance
        self._at = self._measured = self._unequal = self._mismatches = self._masks = 0
        self._same_bits = reference.name == target.name
        self._max: int | float = 0
        self._max_at: tuple[int, Number, Number] | None = None
        self._mask_at: int | None = None
        self._peak = 0.0
        self._exact_sum = 0
        self._errors = _Sum()  # |d|
        self._squares = _Sum(), _Sum(), _Sum()  # reference, target, d
        self._dot = _Sum()
        self._nonfinite = [[0, 0, 0], [0, 0, 0]]

    def update(self, reference: Array, target: Array) -> None:
        """Count stored elements in: one-dimensional, as many on both sides.

        Sums come out bit-equal however a tensor is cut, as long as each block but the last is a multiple
        of `BLOCK` elements.
        """
        with np.errstate(all="ignore"):  # an error may well exceed float64: it is infinite then (CMP-20)
            for start in range(0, reference.size, BLOCK):
                self._add_block(reference[start : start + BLOCK], target[start : start + BLOCK])

    def result(self) -> Difference:
        """The difference of everything that was added."""
        n = self._measured
        index, at_reference, at_target = self._max_at or (None, None, None)
        return Difference(
            elements=self._at,
            measured=n,
            same_bits=self._same_bits,
            max_abs=self._max if n else None,
            max_abs_index=self._unravel(index),
            max_abs_reference=at_reference,
            max_abs_target=at_target,
            mean_abs=self._mean() if n else None,
            relative_frobenius=self._relative_frobenius() if n else None,
            cosine=self._cosine() if n else None,
            psnr_db=self._psnr() if n else None,
            unequal=self._unequal,
            mismatches=self._mismatches if self._tolerance else None,
            nonfinite_reference=Nonfinite(*self._nonfinite[0]),
            nonfinite_target=Nonfinite(*self._nonfinite[1]),
            mask_mismatches=self._masks,
            mask_index=self._unravel(self._mask_at),
        )

    def _add_block(self, reference: Array, target: Array) -> None:
        if self._same_bits:
            self._same_bits = np.array_equal(reference.view(np.uint8), target.view(np.uint8))
        x, y = decode(reference, self._dtypes[0]), decode(target, self._dtypes[1])
        if self._is_exact:
            self._add_integers(x, y)
        else:
            self._add_floats(x, y)
        self._at += x.size

    def _add_integers(self, x: Array, y: Array) -> None:
        errors = exact_difference(x, y)
        largest = int(errors.max())
        floats = errors.astype(np.float64)
        wide = x.astype(np.float64), y.astype(np.float64)
        self._measured += x.size
        self._exact_sum += int(errors.sum()) if largest < 2**48 else int(errors.astype(object).sum())
        if self._tolerance:
            bound = self._tolerance.atol + self._tolerance.rtol * np.abs(wide[0])
            above = floats > bound if largest <= _EXACT else errors.astype(object) > bound.astype(object)
            self._mismatches += int(np.count_nonzero(above))
        self._add_largest(errors, largest, x, y)
        self._add_sums(*wide, floats, floats)

    def _add_floats(self, x: Array, y: Array) -> None:
        (x_high, x_low), (y_high, y_low) = _split(x, self._wide), _split(y, self._wide)
        # Beyond 2**53 an integer is the sum of two float64. Where both sides are close the first difference
        # is exact, so that an error of one is not lost; where they are not, rounding does not matter.
        d = (y_high - x_high) + (y_low - x_low)
        x_wide, y_wide = x_high + x_low, y_high + y_low
        if np.isfinite(x_wide).all() and np.isfinite(y_wide).all():
            self._measured += x.size
        else:
            self._set_apart(x_wide, y_wide, d)
        errors = np.abs(d)
        if self._tolerance:
            bound = np.full(x.size, self._tolerance.atol)
            if self._tolerance.rtol:  # zero times an infinite modulus would be NaN
                bound += self._tolerance.rtol * np.abs(x_wide)
            within = (errors <= bound) & (errors < np.inf)
            self._mismatches += int(x.size - np.count_nonzero(within))
        self._add_largest(errors, float(errors.max()), x, y)
        self._add_sums(x_wide, y_wide, d, errors)

    def _set_apart(self, x: Array, y: Array, d: Array) -> None:
        """Compare the masks, and put zeros where one side or both are not finite (CMP-22, CMP-23)."""
        parts = [side.view(np.float64).reshape(x.size, -1) for side in (x, y, d)]  # real and imaginary
        classes = [_classify(part) for part in parts[:2]]
        for counts, found in zip(self._nonfinite, classes, strict=True):
            infinite = (found >= 2).any(axis=1)
            negative = (found[:, 0] == 3) if found.shape[1] == 1 else np.zeros(1, np.bool_)
            counts[0] += int(np.count_nonzero((found == 1).any(axis=1) & ~infinite))
            counts[1] += int(np.count_nonzero(infinite) - np.count_nonzero(negative))
            counts[2] += int(np.count_nonzero(negative))
        unlike = (classes[0] != classes[1]).any(axis=1)
        if unlike.any():
            self._masks += int(np.count_nonzero(unlike))
            if self._mask_at is None:
                self._mask_at = self._at + int(unlike.argmax())
        lost = (classes[0] | classes[1]) != 0
        self._measured += int(np.count_nonzero(~lost.all(axis=1)))
        for part in parts:
            part[lost] = 0

    def _add_largest(self, errors: Array, largest: int | float, x: Array, y: Array) -> None:
        self._unequal += int(np.count_nonzero(errors))
        if largest > self._max:
            i = int(errors.argmax())
            self._max = largest
            self._max_at = self._at + i, x[i].item(), y[i].item()

    def _add_sums(self, x: Array, y: Array, d: Array, errors: Array) -> None:
        self._peak = max(self._peak, float(np.abs(x).max()))
        exponent = _exponent(errors)
        self._errors.add(float(_scaled(errors, exponent).sum()), exponent)
        sides = [side.view(np.float64) for side in (x, y, d)]
        exponents = [_exponent(side) for side in sides]
        sides = [_scaled(side, exponent) for side, exponent in zip(sides, exponents, strict=True)]
        for total, side, exponent in zip(self._squares, sides, exponents, strict=True):
            total.add(float(side.dot(side)), 2 * exponent)
        self._dot.add(float(sides[0].dot(sides[1])), exponents[0] + exponents[1])

    def _mean(self) -> float:
        if self._is_exact:
            return self._exact_sum / self._measured
        return float(np.ldexp(self._errors.value / self._measured, self._errors.exponent))

    def _relative_frobenius(self) -> float:
        reference, _, error = self._squares
        if not error.value:
            return 0.0
        if not reference.value:
            return math.inf
        ratio = math.sqrt(error.value) / math.sqrt(reference.value)
        return float(np.ldexp(ratio, (error.exponent - reference.exponent) // 2))  # both are even

    def _cosine(self) -> float | None:
        reference, target, _ = self._squares
        if not reference.value or not target.value:
            return None
        (m, e), (n, f) = math.frexp(reference.value), math.frexp(target.value)
        norms = math.ldexp(math.sqrt(m * n * (1 + (e + f) % 2)), (e + f) // 2)  # one root: exact for y = x
        shift = self._dot.exponent - (reference.exponent + target.exponent) // 2
        return max(-1.0, min(1.0, float(np.ldexp(self._dot.value / norms, shift))))

    def _psnr(self) -> float:
        error = self._squares[2]
        if not error.value:
            return math.inf
        if not self._peak or math.isinf(error.value):
            return -math.inf
        return 20 * math.log10(self._peak) - 10 * (error.log10() - math.log10(self._measured))

    def _unravel(self, flat: int | None) -> tuple[int, ...] | None:
        return None if flat is None else tuple(int(i) for i in np.unravel_index(flat, self._shape))


def exact_difference(x: Array, y: Array) -> Array:
    """`|x - y|` of integers or bools of any widths, without wrapping.

    Returns:
        uint64, or Python integers where a difference may be larger than that.

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


def _split(values: Array, wide: Any) -> tuple[Array, Array | float]:
    """Values as a sum of two floats that holds 64-bit integers exactly; the second is mostly 0."""
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        low = values & values.dtype.type(0xFFFFFFFF)
        return (values - low).astype(wide), low.astype(np.float64)
    return values.astype(wide), 0.0


def _classify(parts: Array) -> Array:
    """0 for finite, 1 for NaN, 2 for +inf, 3 for -inf."""
    classes = np.isnan(parts).astype(np.uint8)
    classes[parts == np.inf] = 2
    classes[parts == -np.inf] = 3
    return classes


def _exponent(values: Array) -> int:
    """The power of two to divide by before squaring; 0 for all values in the usual range."""
    largest = max(-float(values.min()), float(values.max()))
    if 1 / _MODERATE < largest < _MODERATE or not largest or math.isinf(largest):
        return 0
    return math.frexp(largest)[1]


def _scaled(values: Array, exponent: int) -> Array:
    return np.ldexp(values, -exponent) if exponent else values
