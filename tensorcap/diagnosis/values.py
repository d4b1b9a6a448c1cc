"""Values of a pair as float64 arrays, and the arithmetic that several families of hypotheses need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]  # float64; also masks and indices of them


def relative_error(observed: Values, predicted: Values) -> float:
    """Divide the norm of the difference by the larger of the two norms; 0 if both are zero.

    Example:
        >>> relative_error(np.array([3.0, 4.0]), np.array([0.0, 0.0]))
        1.0
    """
    size = max(_norm(observed), _norm(predicted))
    return _norm(observed - predicted) / size if size else 0.0


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
