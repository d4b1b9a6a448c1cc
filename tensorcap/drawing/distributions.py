"""How values and errors are spread, as shapes of an SVG: error by axis, histogram, quantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.drawing.maps import finite_range
from tensorcap_formats.dtypes import Array

_SIZE: Final = 48  # of the box of quantiles along each side
_QUANTILES: Final = 49
_BINS: Final = 48  # of a histogram, and of the error by axis


@dataclass(frozen=True, slots=True)
class AxisErrors:
    """How the squared error spreads over one axis.

    Attributes:
        axis: Number of the axis.
        size: Its length.
        bars: An SVG path of bars in a box of 48 by 20, each for an equal part of the axis.
        worst: The index, or the first of the range of indices, with the largest part.
        share: That part, 0 to 1.
    """

    axis: int
    size: int
    bars: str
    worst: int
    share: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many elements of both tensors have which value.

    Attributes:
        reference: Points of a polyline in a box of 48 by 20.
        target: The same of the target.
        low: The value at its left.
        high: The value at its right.
    """

    reference: str
    target: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of the target against those of the reference (a QQ plot), on one scale.

    On the diagonal both have the same distribution, whatever the order of their elements.

    Attributes:
        points: Points of a polyline in a box of 48 by 48, the reference to the right, the target up.
        low: The value at its left and bottom.
        high: The value at its right and top.
    """

    points: str
    low: float
    high: float


def errors_along(difference: Array, axis: int) -> AxisErrors:
    """Sum squared errors over all other axes; elements that are not finite count as the largest error."""
    finite = difference[np.isfinite(difference)]
    largest = float(finite.max(initial=0.0)) or 1.0
    shares = np.where(np.isfinite(difference), difference / largest, 1.0) ** 2  # scaled: no square overflows
    sums = shares.sum(axis=tuple(i for i in range(difference.ndim) if i != axis))
    whole = float(sums.sum())
    step = -(-len(sums) // _BINS)
    binned = np.add.reduceat(sums, np.arange(0, len(sums), step))
    top = float(binned.max()) or 1.0
    wide = _BINS / len(binned)
    bars = "".join(
        f"M{at * wide:.4g},20v-{20 * v / top:.1f}h{0.85 * wide:.3g}V20z"
        for at, v in enumerate(binned)
        if v > 0.002 * top
    )
    worst = int(sums.argmax())
    return AxisErrors(axis, len(sums), bars, worst, float(sums[worst]) / whole if whole else 0.0)


def draw_histogram(reference: Array, target: Array) -> Histogram | None:
    """Count the finite values of both sides; None if all are one value, or none is finite."""
    low, high = finite_range(reference, target)
    if not (math.isfinite(high - low) and high > low):
        return None
    counts = [
        np.histogram(values[np.isfinite(values)], _BINS, (low, high))[0] for values in (reference, target)
    ]
    top = max(int(c.max()) for c in counts) or 1
    # By the root of the count: tails are what differs, and a count of one is to be seen.
    lines = [
        " ".join(f"{at + 0.5:g},{20 - 19 * math.sqrt(c / top):.1f}" for at, c in enumerate(of_side))
        for of_side in counts
    ]
    return Histogram(lines[0], lines[1], low, high)


def quantile_pairs(reference: Array, target: Array) -> tuple[Array, Array] | None:
    """Quantiles of the finite values of both, the same shares of each: the least, the largest, 47 between.

    Returns:
        None if a side has no finite value.
    """
    sides = [values[np.isfinite(values)] for values in (reference, target)]
    if not all(side.size for side in sides):
        return None
    shares = np.linspace(0, 1, _QUANTILES)
    ours, theirs = (np.quantile(side, shares, method="inverted_cdf") for side in sides)
    return ours, theirs


def draw_quantiles(reference: Array, target: Array) -> Quantiles | None:
    """Draw a QQ plot of the finite values of both; None if all are one value, or a side has none."""
    low, high = finite_range(reference, target)
    pairs = quantile_pairs(reference, target)
    if pairs is None or not (math.isfinite(high - low) and high > low):
        return None
    right, up = (_SIZE * (side - low) / (high - low) for side in pairs)
    points = " ".join(f"{x:.1f},{_SIZE - y:.1f}" for x, y in zip(right, up, strict=True))
    return Quantiles(points, low, high)
