"""The values that a floating-point format can represent, numbered from zero outwards (MET-27)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array


@dataclass(frozen=True, slots=True)
class Format:
    """A format with a sign, subnormals, and equal steps between two powers of two.

    Attributes:
        mantissa_bits: That are stored.
        least_exponent: Of the least normal value.
        largest: Number of the largest value; where the format has infinity, of that.
    """

    mantissa_bits: int
    least_exponent: int
    largest: int

    def numbers(self, values: Array) -> Array:
        """Round finite values to nearest, ties to even, and number the results, zero being 0.

        Args:
            values: float64, any shape.

        Returns:
            int64, negative for negative values.

        Example:
            >>> FORMATS["bfloat16"].numbers(np.array([-0.0, 2.0**-133, 1.0, 1.001, 1e39])).tolist()
            [0, 1, 16256, 16256, 32640]
        """
        magnitude = np.abs(values)
        bits, dropped = magnitude.view(np.int64), 52 - self.mantissa_bits
        if dropped:
            bits = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped
        normal = bits - ((self.least_exponent + 1022) << self.mantissa_bits)
        if self.least_exponent > -1022:  # else its subnormals are those of float64
            least = math.ldexp(1, self.least_exponent)
            step = math.ldexp(1, self.mantissa_bits - self.least_exponent)
            below = np.rint(np.minimum(magnitude, least) * step).astype(np.int64)
            normal = np.where(magnitude < least, below, normal)
        numbers: Array = np.minimum(normal, self.largest)
        return np.where(np.signbit(values), -numbers, numbers)


FORMATS: Final = {
    "float64": Format(52, -1022, 0x7FF << 52),
    "float32": Format(23, -126, 0xFF << 23),
    "bfloat16": Format(7, -126, 0xFF << 7),
    "float16": Format(10, -14, 0x1F << 10),
    "float8_e3m4": Format(4, -2, 0x70),
    "float8_e4m3": Format(3, -6, 0x78),
    "float8_e4m3b11fnuz": Format(3, -10, 0x7F),
    "float8_e4m3fn": Format(3, -6, 0x7E),
    "float8_e4m3fnuz": Format(3, -7, 0x7F),
    "float8_e5m2": Format(2, -14, 0x7C),
    "float8_e5m2fnuz": Format(2, -15, 0x7F),
    "float6_e2m3fn": Format(3, 0, 0x1F),
    "float6_e3m2fn": Format(2, -2, 0x1F),
    "float4_e2m1fn": Format(1, 0, 0x7),
}
