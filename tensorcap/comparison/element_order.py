"""In which order along its axes a tensor holds the elements of another one (CMP-250)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array

_MOST: Final = 1 << 22  # elements that are sorted
_LONGEST: Final = 1024  # indices of an axis, each of which is held against each


@dataclass(frozen=True, slots=True)
class ElementOrder:
    """Where a target has what its reference has at each index of each axis.

    Attributes:
        orders: By axis, the target's index for each of the reference's.
        error: The relative Frobenius error that is left in this order, no unit.
    """

    orders: tuple[tuple[int, ...], ...]
    error: float

    @property
    def moved(self) -> tuple[int, ...]:
        """The axes whose order is another one."""
        return tuple(axis for axis, order in enumerate(self.orders) if order != tuple(range(len(order))))


def find_order(reference: Array, target: Array) -> ElementOrder | None:
    """Find the order in which a target holds the elements of a reference, axis by axis.

    1. What an index of an axis holds is known, whatever the order along the others, by its sorted elements.
    2. Each index of the reference takes the nearest one of the target's that is left, the surest first: that
       whose nearest is nearest.

    Args:
        reference: The one, finite floats, any shape.
        target: The other, the same shape.

    Returns:
        The order, whatever error it leaves; None if tensors are too large, not finite, or of zeros.

    Example:
        >>> there = np.arange(6.0).reshape(2, 3)
        >>> found = find_order(there, there[::-1][:, [1, 2, 0]])
        >>> found.orders, found.moved, found.error
        (((1, 0), (2, 0, 1)), (0, 1), 0.0)
    """
    x, y = (np.asarray(side, np.float64) for side in (reference, target))
    size = float(np.linalg.norm(x))
    if x.size > _MOST or max(x.shape, default=0) > _LONGEST or not size:
        return None
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    orders = tuple(_order_along(x, y, axis) for axis in range(x.ndim))
    error = float(np.linalg.norm(y[np.ix_(*orders)] - x)) / size
    return ElementOrder(orders, error)


def _order_along(reference: Array, target: Array, axis: int) -> tuple[int, ...]:
    """The target's index for each one of the reference along an axis."""
    x, y = (np.sort(np.moveaxis(side, axis, 0).reshape(side.shape[axis], -1)) for side in (reference, target))
    distances = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    order = [0] * len(x)
    for index in np.argsort(distances.min(axis=1), kind="stable"):
        order[index] = int(distances[index].argmin())
        distances[:, order[index]] = np.inf
    return tuple(order)
