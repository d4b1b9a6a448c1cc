"""Are the angles of a table of sines and cosines off by more than rounding makes of them? See POL-300.

Formula: `|t - r| <= u (a + b |theta|)` of each point (cosine, sine) of the unit circle, with a and b of
`Policy.angle`. A table that is computed in low precision has angles, products of positions and frequencies,
that are off by a part of themselves: late positions are wrong by far more than a rounding of their sines, and
no error of an input says so. Points whose angle may be off by more than half a turn prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Limits
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair, PolicyTest
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record

_MOST: Final = 1 << 22  # elements that are read
_ON_CIRCLE: Final = 0.01  # how far points may lie off it, in units of its radius, squared
_FEWEST_PAIRS: Final = 2  # of an axis: one alone may lie on a circle by chance
_SAME_ANGLE: Final = 0.3  # radians: what powers of fitted frequencies may be off by after all turns
_SPREAD: Final = 0.05  # of the sizes of its elements, in units of the radius: signs lie on a circle, too


@dataclass(frozen=True, slots=True)
class Points:
    """Sines and cosines as points of circles.

    Attributes:
        reference: `cos + i sin` of each angle, complex128, pairs along the last axis.
        target: The same of the target.
        counts: Which of them count, bool, the same shape.
    """

    reference: Array
    target: Array
    counts: Array

    def error(self, unit: float) -> tuple[float, float]:
        """Return the largest error of a point, and that over what rounding makes of it at most.

        Args:
            unit: `u` of the precision.
        """
        off, times = POLICY.angle
        errors = np.where(self.counts, np.abs(self.target - self.reference), 0)
        ratios = errors / (unit * (off + times * _sizes_of_angles(self.reference)))
        return float(errors.max()), float(ratios.max())


class AnglesTest(PolicyTest):
    """Tests `angles` of float tensors that are tables of sines and cosines, in low precision."""

    names = ("angles",)
    is_local = True
    is_evidence = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge every table."""
        for pair in context.open_floats():
            if pair.precision.is_wide or not _may_be_table(pair):
                continue
            kept = _kept_by_mask(context, pair.reference)
            archives = context.reference, context.target
            points = find_points(*_values(*archives, pair), *([] if kept is None else [kept]))
            if points is None:
                continue
            error, ratio = points.error(pair.precision.unit)
            text = (
                f"sines and cosines are off by up to {error:.2g}, {ratio:.2g} times what rounding makes of "
                "their angles at most"
            )
            yield pair.key, Limits(1.0, 1.0).finding("angles", ratio, text)


def find_points(reference: Array, target: Array, kept: Array | None = None) -> Points | None:
    """Find sines and cosines in a table: of which elements the squares add up to the same everywhere.

    They are both halves of an axis, or stand side by side along it: the last one, or the second of four.

    Args:
        reference: The one, float64.
        target: The other, float64, the same shape.
        kept: Which places count, bool, of the table's axes but that of the pairs; all if None.

    Returns:
        None if it is no table of them.

    Example:
        >>> angles = np.arange(6.0)[:, None] * [1.0, 0.1]
        >>> table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        >>> points = find_points(table, table)
        >>> points is not None and np.allclose(points.reference, np.exp(1j * angles))
        True
    """
    size = float(np.sqrt(2 * np.mean(reference**2)))
    if not (np.isfinite(reference).all() and np.isfinite(target).all() and size):
        return None
    if np.abs(reference).std() < _SPREAD * size:
        return None
    for axis in (-1, *((1,) if reference.ndim == 4 else ())):
        ours, theirs = (np.moveaxis(side, axis, -1) / size for side in (reference, target))
        length = ours.shape[-1]
        if length % 2 or length < 2 * _FEWEST_PAIRS:
            continue
        half = length // 2
        for one, other in (
            (slice(0, half), slice(half, None)),
            (slice(0, None, 2), slice(1, None, 2)),
        ):
            if np.abs(ours[..., one] ** 2 + ours[..., other] ** 2 - 1).max() > _ON_CIRCLE:
                continue
            sides = [(side[..., one], side[..., other]) for side in (ours, theirs)]
            if _stillest(sides[0][1], sides[0][0]) < _stillest(*sides[0]):  # sines come first
                sides = [(cosine, sine) for sine, cosine in sides]
            points, others = (cosine + 1j * sine for cosine, sine in sides)
            if kept is None or kept.shape != points.shape[:-1]:
                kept = np.ones(points.shape[:-1], bool)
            return Points(points, others, np.broadcast_to(kept[..., None], points.shape))
    return None


def _stillest(cosine: Array, sine: Array) -> float:
    """The smallest angle of the last frequency, which is the lowest one: near 0, that of cosines is 1."""
    return float(np.abs(np.angle(cosine[..., -1] + 1j * sine[..., -1])).min())


def _sizes_of_angles(points: Array) -> Array:
    """How large angles are, whole turns included.

    1. They are followed along each axis from where they are smallest.
    2. Of frequencies that are powers of one number, the smallest angles say what all others are, if these are
       the same but for whole turns: those of a single late position are known by nothing else.

    Args:
        points: `cos + i sin`, complex128, pairs along the last axis.
    """
    angles = np.angle(points)
    sizes = np.abs(angles)
    for axis in range(points.ndim - 1):
        along = np.moveaxis(points, axis, 0)
        if len(along) < 2:
            continue
        steps = np.angle(along[1:] * along[:-1].conj())
        path = np.concatenate([np.zeros((1, *steps.shape[1:])), np.cumsum(steps, axis=0)])
        first = int(np.abs(np.angle(along)).reshape(len(along), -1).mean(axis=1).argmin())
        turned = np.abs(np.angle(along[first]) + path - path[first])
        sizes = np.maximum(sizes, np.moveaxis(turned, 0, axis))
    last = angles[..., -1:]
    with np.errstate(all="ignore"):
        powers = last * (angles[..., -2:-1] / last) ** np.arange(points.shape[-1] - 1, -1, -1)
        is_same = (np.abs(np.angle(np.exp(1j * powers) * points.conj())) < _SAME_ANGLE).all(-1, keepdims=True)
    return np.where(is_same, np.maximum(sizes, np.abs(powers)), sizes)


def _may_be_table(pair: MeasuredPair) -> bool:
    """Whether a tensor's largest element is as large as sines and cosines of its size have it."""
    record, statistics = pair.reference, pair.reference.statistics
    if (
        statistics is None
        or statistics.l2 is None
        or statistics.minimum is None
        or statistics.maximum is None
    ):
        return False
    if record.dtype.kind != "float" or not (len(record.shape) >= 2 and 16 <= record.size <= _MOST):
        return False
    if not (record.stored and pair.target.stored) or record.shape != pair.target.shape:
        return False
    radius = float(np.sqrt(2 / record.size)) * statistics.l2
    largest = max(abs(float(statistics.minimum)), abs(float(statistics.maximum)))
    return 0.5 * radius <= largest <= (1 + _ON_CIRCLE) * radius


def _values(reference: Archive, target: Archive, pair: MeasuredPair) -> tuple[Array, Array]:
    return reference.load(pair.reference).astype(np.float64), target.load(pair.target).astype(np.float64)


def _kept_by_mask(context: Context, record: Record) -> Array | None:
    """Which places a mask among the arguments of the table's call keeps, if both runs have the same one.

    Places that are left out have angles of any size: a count of none that is divided by. A mask of padding
    has them as true; one that keeps nothing is of something else.
    """
    made = record.key.rank, record.key.step, record.key.site, record.key.call
    is_result = record.key.slot.startswith("output")
    inputs = [call.inputs for call in context.calls.calls if is_result and call.place == made]
    for other in (one for arguments in inputs for one in arguments):
        key = other.key.text
        pair = context.pairs.get(key)
        if not key.endswith("mask") or pair is None or pair.status != "identical" or not other.stored:
            continue
        if len(other.shape) == len(record.shape) - 1 and other.dtype.kind == "bool":
            values = np.asarray(context.reference.load(other), bool)
            kept = ~values if key.endswith("padding_mask") else values
            return kept if kept.any() else None
    return None
