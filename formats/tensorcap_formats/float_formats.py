"""Floating-point formats: the one table of their parameters, rounding to them, and numbers of their values.

Definitions: IEEE 754; OCP OFP8 (e4m3fn, e5m2); OCP MX 1.0 (e8m0fnu, fp6, fp4); the `fnuz` and `b11`
variants as in LLVM APFloat and ml_dtypes; tf32 is NVIDIA's arithmetic on float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating-point format.

    Attributes:
        exponent_bits: Stored bits of the exponent.
        mantissa_bits: Stored bits of the mantissa, without the leading one.
        bias: Subtracted from a stored exponent.
        special: Which patterns are no finite numbers. "ieee": all-ones exponents are infinite or NaN; "fn":
            only all ones is NaN; "fnuz": only the pattern of minus zero is; "finite": none.
        is_signed: Whether it has a sign, a zero and subnormals; e8m0fnu has positive powers of two only.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: Literal["ieee", "fn", "fnuz", "finite"] = "ieee"
    is_signed: bool = True

    @property
    def bits(self) -> int:
        """Width of one number."""
        return self.exponent_bits + self.mantissa_bits + self.is_signed

    @property
    def epsilon(self) -> float:
        """The machine epsilon: the distance from 1 to the next value."""
        return 2.0**-self.mantissa_bits

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of one rounding to nearest: half the epsilon."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def least_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias if self.is_signed else -self.bias

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value of full precision."""
        return math.ldexp(1, self.least_exponent)

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal if the format has them."""
        return math.ldexp(1, self.least_exponent - self.mantissa_bits)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        pattern = self.largest_number - (self.special == "ieee")
        exponent = pattern >> self.mantissa_bits
        return math.ldexp(1 + (pattern & self._ones) * self.epsilon, exponent - self.bias)

    @property
    def largest_number(self) -> int:
        """The number that `numbers` gives the largest value; if the format has infinity, that of infinity."""
        top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        if self.special == "ieee":
            return top
        return top + self._ones - (self.special == "fn")

    @property
    def _ones(self) -> int:
        return (1 << self.mantissa_bits) - 1

    def numbers(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round finite values to nearest, ties to even, and number the results from zero outwards (MET-27).

        Args:
            values: float64, any shape.

        Returns:
            int64, 0 for zero and negative for negative values. A format without sign has no such numbers.

        Example:
            >>> FLOAT_FORMATS["bfloat16"].numbers(np.array([-0.0, 2.0**-133, 1.0, 1.001, 1e39])).tolist()
            [0, 1, 16256, 16256, 32640]
        """
        magnitude = np.abs(values)
        bits, dropped = magnitude.view(np.int64), 52 - self.mantissa_bits
        if dropped:
            bits = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped
        normal = bits - ((self.least_exponent + 1022) << self.mantissa_bits)
        if self.least_exponent > -1022:  # else its subnormals are those of float64
            below = np.rint(np.minimum(magnitude, self.smallest_normal) / self.smallest).astype(np.int64)
            normal = np.where(magnitude < self.smallest_normal, below, normal)
        numbers: NDArray[np.int64] = np.minimum(normal, self.largest_number)
        return np.where(np.signbit(values), -numbers, numbers)


FLOAT_FORMATS: Final[Mapping[str, FloatFormat]] = {
    "float64": FloatFormat(11, 52, 1023),
    "float32": FloatFormat(8, 23, 127),
    "tf32": FloatFormat(8, 10, 127),
    "float16": FloatFormat(5, 10, 15),
    "bfloat16": FloatFormat(8, 7, 127),
    "float8_e3m4": FloatFormat(3, 4, 3),
    "float8_e4m3": FloatFormat(4, 3, 7),
    "float8_e4m3fn": FloatFormat(4, 3, 7, "fn"),
    "float8_e4m3fnuz": FloatFormat(4, 3, 8, "fnuz"),
    "float8_e4m3b11fnuz": FloatFormat(4, 3, 11, "fnuz"),
    "float8_e5m2": FloatFormat(5, 2, 15),
    "float8_e5m2fnuz": FloatFormat(5, 2, 16, "fnuz"),
    "float8_e8m0fnu": FloatFormat(8, 0, 127, "fn", is_signed=False),
    "float6_e2m3fn": FloatFormat(2, 3, 1, "finite"),
    "float6_e3m2fn": FloatFormat(3, 2, 3, "finite"),
    "float4_e2m1fn": FloatFormat(2, 1, 1, "finite"),
}

# Dtypes that hold several numbers of a format
_COMPOSITES: Final = {
    "float64": ("complex128",),
    "float32": ("complex64",),
    "float16": ("complex32",),
    "float4_e2m1fn": ("float4_e2m1fn_x2",),
}

# The format of the numbers in each float or complex dtype, and tf32
DTYPE_FORMATS: Final[Mapping[str, FloatFormat]] = {
    dtype: form for name, form in FLOAT_FORMATS.items() for dtype in (name, *_COMPOSITES.get(name, ()))
}
UNIT_ROUNDOFFS: Final[Mapping[str, float]] = {
    dtype: form.unit_roundoff for dtype, form in DTYPE_FORMATS.items()
}

# The least finite value of each dtype that an added mask may have
LEAST_FINITE: Final[Mapping[str, float]] = {
    name: -FLOAT_FORMATS[name].largest for name in ("float16", "bfloat16", "float32", "float64")
}
# Finite values that stand for minus infinity in masks, the largest one first (MET-4)
MASK_SENTINELS: Final = tuple(sorted((-1e9, *LEAST_FINITE.values()), reverse=True))


def rounded(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Round to the nearest value of a format, ties to even; what is beyond its range becomes its largest.

    Values stay as they are if there is no such format, if it is float64, or if it has no sign.

    Args:
        values: float64, any shape.
        name: Of the format.

    Example:
        >>> rounded(np.array([1.00390625, 3.0, 500.0]), "float8_e4m3fn").tolist()
        [1.0, 3.0, 448.0]
    """
    form = FLOAT_FORMATS.get(name)
    if form is None or name == "float64" or not form.is_signed:
        return values
    exponent = np.frexp(values)[1] - 1
    step = np.ldexp(1.0, np.maximum(exponent, form.least_exponent) - form.mantissa_bits)
    return np.asarray(np.clip(np.rint(values / step) * step, -form.largest, form.largest))
