"""Values of a pair as float64 arrays, and the arithmetic that several families of hypotheses need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]  # float64; also masks and indices of them

_LEAST_SLICES: Final = 8  # of an axis whose slices are held against each other: fewer tell no deviation
_NEAR: Final = 0.01  # of a number that changes nothing: how well another one is known matters


def relative_error(observed: Values, predicted: Values) -> float:
    """Divide the norm of the difference by the larger of the two norms; 0 if both are zero.

    Example:
        >>> relative_error(np.array([3.0, 4.0]), np.array([0.0, 0.0]))
        1.0
    """
    size = max(_norm(observed), _norm(predicted))
    return _norm(observed - predicted) / size if size else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """How far observed values are on the way from some values to others.

    Attributes:
        value: 0 at the start, 1 at the end, no unit.
        error: Its standard error.
        log_chance: Natural logarithm of the chance that noise makes such a step; 0 if it is not known.
    """

    value: float
    error: float
    log_chance: float


def estimate_step(observed: Values, end: Values, start: Values) -> Step:
    """Estimate by least squares how far observed values are on the way from `start` to `end`.

    Errors of elements are often those of their row or channel, as of a weight that was rounded. So the
    standard error is estimated from slices along each axis, too (Liang and Zeger 1986), and the axis by which
    the step is least certain counts. Student's t of a step of 0 has as many degrees of freedom as there are
    slices, less one.

    Args:
        observed: Any shape.
        end: The same shape, other values than `start`.
        start: The same shape.

    Example:
        >>> start = np.ones((10, 10))
        >>> round(estimate_step(start + 0.5, start + 1, start).value, 3)
        0.5
    """
    way = end - start
    square = float(np.vdot(way, way))
    if not square or not math.isfinite(square):
        return Step(0.0, math.inf, 0.0)
    value = float(np.vdot(way, observed - start)) / square
    products = way * (observed - start - value * way)
    error, log_chance = math.inf, 0.0
    for sums in _sums_of_slices(products):
        count = sums.size
        own = math.sqrt(count / (count - 1) * float(np.vdot(sums, sums))) / square
        t_square = (value / own) ** 2 if own else math.inf
        own_chance = -count / 2 * math.log1p(t_square / (count - 1))
        if error == math.inf or own_chance > log_chance:
            error, log_chance = own, own_chance
    return Step(value, error, log_chance)


def _sums_of_slices(products: Values) -> Iterator[Values]:
    """Sum slices along each axis that is long enough to tell their deviation; elements, if one is."""
    long = [axis for axis, size in enumerate(products.shape) if size >= _LEAST_SLICES]
    for axis in long:
        yield products.sum(axis=other_axes(products, axis))
    if long:
        yield products.reshape(-1)


def number_text(value: float, neutral: float, error: float = 0.0) -> str:
    """Write a number with six digits, or as many as tell it from the one that would change nothing.

    Args:
        value: The number.
        neutral: The number that changes nothing.
        error: Its standard error; told of a number that is near to the neutral one.

    Example:
        >>> number_text(2.5, 1.0), number_text(1.0000002, 1.0), number_text(1.00134, 1.0, 1.5e-5)
        ('2.5', '1.0000002', '1.00134 ± 1.5e-05')
    """
    texts = (f"{value:.{digits}g}" for digits in range(6, 18))
    text = next((text for text in texts if float(text) != neutral), f"{neutral:g}")
    is_near = 0 < error < abs(value - neutral) < _NEAR * abs(neutral)
    return f"{text} ± {error:.2g}" if is_near else text


def classes(values: Values) -> Values:
    """Number what each element is: 0 for finite ones, 1 for NaN, 2 and 3 for the infinities.

    Example:
        >>> classes(np.array([0.5, np.nan, np.inf, -np.inf])).tolist()
        [0, 1, 2, 3]
    """
    return np.select([np.isnan(values), values == np.inf, values == -np.inf], [1, 2, 3])


def finite_or_marked(values: Values, mark: float) -> Values:
    """Put multiples of a number for what is not finite, so that other places of it are a difference.

    Example:
        >>> finite_or_marked(np.array([0.5, np.nan, np.inf, -np.inf]), 10.0).tolist()
        [0.5, 10.0, 20.0, 30.0]
    """
    kinds = classes(values)
    return np.where(kinds == 0, values, mark * kinds)


def evenly_spaced(count: int, most: int) -> Values:
    """Choose up to `most` of `count` indices, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def other_axes(values: Values, axis: int) -> tuple[int, ...]:
    """List all axes but one, which is counted from 0."""
    return tuple(other for other in range(values.ndim) if other != axis)


def fit_factors(products: Values, squares: Values) -> Values:
    """Divide sums of products by sums of squares: factors by least squares; 1 for what is all zero."""
    return np.divide(products, squares, out=np.ones_like(squares), where=squares > 0)


def listed(numbers: Sequence[int] | Values, most: int) -> str:
    """Join the first of some numbers; an ellipsis stands for the others.

    Example:
        >>> listed([4, 2, 7], 2)
        '4, 2, …'
    """
    return ", ".join(map(str, numbers[:most])) + (", …" if len(numbers) > most else "")


def _norm(values: Values) -> float:
    flat = values.reshape(-1)
    return math.sqrt(float(np.dot(flat, flat)))
