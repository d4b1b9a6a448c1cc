"""Sums of products of any size: a float64 and a power of two, so that squares neither overflow nor vanish."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Scaled:
    """The number `value * 2**exponent`, at least 0 or a sum of products; exponents of squares are even."""

    value: float = 0.0
    exponent: int = 0

    def add(self, value: float, exponent: int = 0) -> None:
        """Add `value * 2**exponent`."""
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

    def __add__(self, other: Scaled) -> Scaled:
        total = Scaled(self.value, self.exponent)
        total.add(other.value, other.exponent)
        return total

    def __truediv__(self, divisor: Scaled | int) -> Scaled:
        if isinstance(divisor, int):
            return Scaled(self.value / divisor, self.exponent)
        return Scaled(self.value / divisor.value, self.exponent - divisor.exponent)

    def __float__(self) -> float:
        try:
            return math.ldexp(self.value, self.exponent)
        except OverflowError:
            return math.copysign(math.inf, self.value)

    def log10(self) -> float:
        """The decimal logarithm of a number above 0."""
        return math.log10(self.value) + self.exponent * math.log10(2)

    def root(self) -> Scaled:
        """The square root."""
        odd = self.exponent % 2
        return Scaled(math.sqrt(self.value * (1 + odd)), (self.exponent - odd) // 2)


def cosine(dot: Scaled, one: Scaled, other: Scaled) -> float | None:
    """`dot / sqrt(one * other)`, clipped to -1 … 1; None if a square is zero or a sum is not finite."""
    if not (one.value > 0 and other.value > 0 and math.isfinite(dot.value + one.value + other.value)):
        return None
    (m, e), (n, f) = math.frexp(one.value), math.frexp(other.value)
    norms = Scaled(m * n, e + f + one.exponent + other.exponent).root()  # one root: exact for equal sides
    return max(-1.0, min(1.0, float(dot / norms)))


@dataclass(slots=True)
class Moments:
    """Count, means and centred products of pairs of numbers, for a correlation that survives a large mean.

    Attributes:
        count: Count of pairs.
        means: Means of both sides, in units of two to the power of `exponents`.
        squares: Sums of squared distances from the mean, of both sides.
        product: Sum of the products of both distances.
        exponents: Powers of two that both sides were divided by.
    """

    count: int = 0
    means: list[float] = field(default_factory=lambda: [0.0, 0.0])
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    product: float = 0.0
    exponents: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, other: Moments) -> None:
        """Add the moments of further pairs (Chan, Golub and LeVeque)."""
        if not other.count:
            return
        for side in (0, 1):
            common = self._common(other, side)
            self._rescale(side, common)
            other._rescale(side, common)
        count = self.count + other.count
        weight = self.count * (other.count / count)
        distances = [theirs - ours for ours, theirs in zip(self.means, other.means, strict=True)]
        for side, distance in enumerate(distances):
            self.means[side] += distance * (other.count / count)
            self.squares[side] += other.squares[side] + distance * distance * weight
        self.product += other.product + distances[0] * distances[1] * weight
        self.count = count

    def correlation(self) -> float | None:
        """Pearson's correlation, or None if one side is constant."""
        return cosine(Scaled(self.product), *(Scaled(square) for square in self.squares))

    def _common(self, other: Moments, side: int) -> int:
        used = [m.exponents[side] for m in (self, other) if m.means[side] or m.squares[side]]
        return max(used, default=0)

    def _rescale(self, side: int, exponent: int) -> None:
        shift = self.exponents[side] - exponent
        self.exponents[side] = exponent
        if shift and (self.means[side] or self.squares[side]):
            self.means[side] = math.ldexp(self.means[side], shift)
            self.squares[side] = math.ldexp(self.squares[side], 2 * shift)
            self.product = math.ldexp(self.product, shift)
