"""A k-d tree of fingerprints of one size, which finds near ones without a look at all pairs (ALN-20).

The distance of two fingerprints is the largest of four differences, each divided by the larger scale of both.
A box of fingerprints bounds it from below: no difference is smaller than the gap to the box, and no scale is
larger than the box's largest. Subtraction and division round monotonically, so the bound holds to the last
bit, and what is found is what a look at all pairs would find. (J. L. Bentley, "Multidimensional binary search
trees used for associative searching", 1975; the points of a leaf are looked up together.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array

_LEAF: Final = 64  # fingerprints in a box, at most
_FIRST: Final = 4  # boxes in which the two nearest are looked for first
_BLOCK: Final = 1 << 18  # distances that are computed at once

_AXES: Final = 4  # differences that a distance is the largest of


class FingerprintTree:
    """Fingerprints of one size, in boxes of near ones.

    Args:
        numbers: What differences are of: l2, mean, minimum, maximum of each fingerprint; (4, count) float64.
        scales: What each difference is divided by: l2, root mean square, and twice the largest magnitude.
    """

    def __init__(self, numbers: Array, scales: Array) -> None:
        self._numbers, self._scales = numbers, scales
        self._boxes = _split(numbers, scales)
        sizes = [len(box) for box in self._boxes]
        self._members = np.full((len(sizes), max(sizes)), -1)  # of each box, filled up with -1
        for row, box in zip(self._members, self._boxes, strict=True):
            row[: len(box)] = box
        order, starts = np.concatenate(self._boxes), np.cumsum([0, *sizes[:-1]])
        self._count = numbers.shape[1]
        self._lower = np.minimum.reduceat(numbers[:, order], starts, axis=1)
        self._upper = np.maximum.reduceat(numbers[:, order], starts, axis=1)
        self._largest = np.maximum.reduceat(scales[:, order], starts, axis=1)

    def two_nearest(self, others: FingerprintTree) -> tuple[Array, Array]:
        """The nearest of other fingerprints to each of these, and how far the second nearest is.

        1. In the boxes nearest to one of these, the second nearest fingerprint bounds the distance of each.
        2. All boxes that are no further away are looked up.

        Returns:
            The number of the nearest, of several the first; and the distance, infinite if there is no second.
        """
        nearest, second = np.zeros(self._count, np.int64), np.full(self._count, np.inf)
        for number, box in enumerate(self._boxes):
            bounds = self._gaps(number, others)
            first = np.argpartition(bounds, min(_FIRST, len(bounds)) - 1)[:_FIRST]
            members = np.concatenate([others._boxes[i] for i in first])
            reach = np.full(len(box), np.inf)
            if len(members) > 1:
                reach = np.partition(self._distances(box, others, members), 1)[:, 1]
            near = np.flatnonzero(bounds <= reach.max())
            at, column = np.nonzero(self._gaps_of_each(box, others, near) <= reach[:, None])
            nearest[box], second[box] = self._two_least(box, at, others, near[column])
        return nearest, second

    def _two_least(self, box: Array, at: Array, others: FingerprintTree, boxes: Array) -> tuple[Array, Array]:
        """The nearest members of some boxes of others to each of a box, and the distances of the second.

        Args:
            box: Of these.
            at: The places in it, each as often as it has boxes, in order.
            others: The others.
            boxes: One for each place.
        """
        members = others._members[boxes]
        distances = self._distances_of_pairs(box[at][:, None], others, members)
        distances[members < 0] = np.inf
        starts = np.searchsorted(at, np.arange(len(box)))
        least = np.minimum.reduceat(distances.min(1), starts)
        is_least = (distances == least[at][:, None]) & (members >= 0)
        firsts = np.where(is_least, members, others._count).min(1)
        nearest = np.minimum.reduceat(firsts, starts)
        distances[members == nearest[at][:, None]] = np.inf
        return nearest, np.minimum.reduceat(distances.min(1), starts)

    def groups(self, apart: float) -> Iterator[Array]:
        """The numbers of fingerprints that chains of neighbours no further apart than that connect.

        Boxes that are one group already, as this one is, are not looked at again, so that many equal
        fingerprints cost no more than others.
        """
        parents = np.arange(self._count)
        for number, box in enumerate(self._boxes):
            near = number + np.flatnonzero(self._gaps(number, self)[number:] <= apart)
            for start in range(0, len(near), max(1, _BLOCK // _LEAF**2)):
                own, part = _roots(parents, box), near[start : start + _BLOCK // _LEAF**2]
                members = np.concatenate([self._boxes[i] for i in part])
                if (own == own[0]).all():
                    members = members[_roots(parents, members) != own[0]]
                rows, columns = np.nonzero(self._distances(box, self, members) <= apart)
                pairs = np.stack([own[rows], _roots(parents, members)[columns]])
                for one, other in np.unique(pairs[:, pairs[0] != pairs[1]], axis=1).T:
                    _join(parents, int(one), int(other))
        roots = _roots(parents, np.arange(len(parents)))
        order = np.argsort(roots, kind="stable")
        yield from np.split(order, np.flatnonzero(np.diff(roots[order])) + 1)

    def within(self, numbers: Array, scales: Array, apart: float) -> Array:
        """The numbers of those no further than that from another fingerprint."""
        numbers, scales = numbers[:, None], scales[:, None]
        gaps = np.maximum(self._lower - numbers, numbers - self._upper)
        gaps /= np.maximum(scales, self._largest)
        near = self._members[gaps.max(0) <= apart]
        members = near[near >= 0]
        distances = np.abs(self._numbers[:, members] - numbers)
        distances /= np.maximum(self._scales[:, members], scales)
        near_ones: Array = members[distances.max(0) <= apart]
        return near_ones

    def _gaps(self, number: int, others: FingerprintTree) -> Array:
        """How far each box of others is at least from one of these."""
        lower, upper, largest = (each[:, number, None] for each in (self._lower, self._upper, self._largest))
        gaps = np.maximum(others._lower - upper, lower - others._upper)
        gaps /= np.maximum(others._largest, largest)
        bounds: Array = gaps.max(0)
        return bounds

    def _gaps_of_each(self, box: Array, others: FingerprintTree, boxes: Array) -> Array:
        """How far some boxes of others are at least from each fingerprint; negative inside of a box."""
        bounds = np.full((len(box), len(boxes)), -np.inf)
        for axis in range(_AXES):
            numbers, scales = self._numbers[axis, box][:, None], self._scales[axis, box][:, None]
            gaps = np.maximum(others._lower[axis, boxes] - numbers, numbers - others._upper[axis, boxes])
            np.maximum(bounds, gaps / np.maximum(scales, others._largest[axis, boxes]), out=bounds)
        return bounds

    def _distances(self, box: Array, others: FingerprintTree, members: Array) -> Array:
        """Distances of all pairs of some of these and some of others."""
        return self._distances_of_pairs(box[:, None], others, members[None, :])

    def _distances_of_pairs(self, rows: Array, others: FingerprintTree, columns: Array) -> Array:
        result = np.zeros(np.broadcast_shapes(rows.shape, columns.shape))
        for axis in range(_AXES):
            apart = np.abs(self._numbers[axis, rows] - others._numbers[axis, columns])
            apart /= np.maximum(self._scales[axis, rows], others._scales[axis, columns])
            np.maximum(result, apart, out=result)
        return result


def _split(numbers: Array, scales: Array) -> Sequence[Array]:
    """Halve points at the median of the axis along which they lie widest apart, down to boxes of a few."""
    boxes: list[Array] = []
    waiting = [np.arange(numbers.shape[1])]
    while waiting:
        part = waiting.pop()
        if len(part) <= _LEAF:
            boxes.append(np.sort(part))
            continue
        own = numbers[:, part]
        axis = int(((own.max(1) - own.min(1)) / scales[:, part].max(1)).argmax())
        half = len(part) // 2
        order = np.argpartition(own[axis], half)
        waiting += [part[order[half:]], part[order[:half]]]
    return boxes


def _roots(parents: Array, members: Array) -> Array:
    """The first of each member's group, by the parents of all."""
    roots = parents[members]
    while not np.array_equal(above := parents[roots], roots):
        roots = above
    parents[members] = roots
    return roots


def _join(parents: Array, one: int, other: int) -> None:
    """Make the groups of two members one."""
    one, other = (int(_roots(parents, np.array([each]))[0]) for each in (one, other))
    parents[max(one, other)] = min(one, other)
