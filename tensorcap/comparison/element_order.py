"""In which order along its axes a tensor holds the elements of another one (CMP-250)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array

_MOST: Final = 1 << 22  # elements that are sorted
_LONGEST: Final = 1024  # indices of an axis, each of which is held against each
_CHANCE: Final = 1e-6  # that elements of no order would fit one as well


@dataclass(frozen=True, slots=True)
class ElementOrder:
    """Where a target has what its reference has at each index of each axis.

    Attributes:
        orders: By axis, the target's index for each of the reference's.
        error: The relative Frobenius error that is left in this order, no unit.
        evidence: What the elements that moved say for it, less what any order of so many indices may be made
            to fit; in nats.
    """

    orders: tuple[tuple[int, ...], ...]
    error: float
    evidence: float

    @property
    def is_proven(self) -> bool:
        """Whether chance has less than one in a million to find such an order."""
        return self.evidence >= -math.log(_CHANCE)

    @property
    def moved(self) -> tuple[int, ...]:
        """The axes whose order is another one."""
        return tuple(axis for axis, order in enumerate(self.orders) if order != tuple(range(len(order))))


def find_order(reference: Array, target: Array) -> ElementOrder | None:
    """Find the order in which a target holds the elements of a reference, axis by axis.

    1. What an index of an axis holds is known, whatever the order along the others, by its sorted elements.
    2. Each index of the reference takes the nearest one of the target's that is left, the surest first: that
       whose nearest is nearest.
    3. The evidence is the lesser of two against what chance does. Of the elements that moved, as many orders
       as are unlike each other, were they shuffled one by one; and by what factor the order makes their error
       smaller, each. The freedom, which is taken off, is all orders of the indices that moved, along each
       axis: one element for each index is evidence of nothing.

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
    there = y[np.ix_(*orders)]
    error = float(np.linalg.norm(there - x)) / size
    return ElementOrder(orders, error, _evidence(x, y, there, orders))


def _evidence(x: Array, y: Array, there: Array, orders: Iterable[tuple[int, ...]]) -> float:
    """What an order is proven by, in nats: see `ElementOrder` and `find_order`.

    Args:
        x: The reference.
        y: The target.
        there: The target in the reference's order.
        orders: By axis, the target's index for each of the reference's.
    """
    moved = [np.array(order) != np.arange(len(order)) for order in orders]
    has_moved = np.zeros(x.shape, bool)
    for axis, indices in enumerate(moved):
        np.moveaxis(has_moved, axis, 0)[indices] = True
    elements = x[has_moved]
    if not elements.size:
        return 0.0
    counts = np.unique(elements, return_counts=True)[1]
    shuffles = math.lgamma(elements.size + 1) - sum(math.lgamma(count + 1) for count in counts if count > 1)
    errors = (float(np.linalg.norm((side - x)[has_moved])) for side in (y, there))
    before, after = errors
    fit = elements.size * math.log(before / after) if before and after else math.inf if before else 0.0
    return min(shuffles, fit) - sum(math.lgamma(indices.sum() + 1) for indices in moved)


def _order_along(reference: Array, target: Array, axis: int) -> tuple[int, ...]:
    """The target's index for each one of the reference along an axis."""
    x, y = (np.sort(np.moveaxis(side, axis, 0).reshape(side.shape[axis], -1)) for side in (reference, target))
    distances = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
    order = [0] * len(x)
    for index in np.argsort(distances.min(axis=1), kind="stable"):
        order[index] = int(distances[index].argmin())
        distances[:, order[index]] = np.inf
    return tuple(order)
