"""Where in a tensor the error lies: its share by index of each axis, and a map; a second, bounded pass.

Definitions are normative in `specs/location.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from tensorcap.metrics.value_blocks import classify, read_value_blocks, split_wide, values_shape
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import MASK_SENTINELS
from tensorcap_formats.records import Record

_LONGEST_AXIS: Final = 1 << 20  # sums kept for one axis; a longer one is summed by ranges of indices
_MAP: Final = 256  # cells of the map along each side at most
_LEVELS_PER_DECIBEL: Final = 2
_TOP: Final = 5  # indices of each axis


@dataclass(frozen=True, slots=True)
class AxisShare:
    """The part of the whole error that one index of an axis, or one range of indices, holds.

    Attributes:
        index: The first index.
        share: Share of the sum over the tensor, 0 to 1.
    """

    index: int
    share: float


@dataclass(frozen=True, slots=True)
class Axis:
    """How the error spreads over one axis.

    Attributes:
        axis: Number of the axis.
        size: Its count of indices.
        step: Indices in one range: 1, but for an axis of more than 2**20.
        top: Those with the largest shares, the largest first; none without error.
    """

    axis: int
    size: int
    step: int
    top: tuple[AxisShare, ...]


@dataclass(frozen=True, slots=True)
class ErrorMap:
    """A picture of the error, the leading axes merged into rows.

    Attributes:
        rows: At most 256, each for an equal part of the rows of the tensor.
        columns: At most 256, each for an equal part of the last axis.
        levels: One byte a cell, row by row: 0 without error, else `255 - 2 * dB`, dB being how far the
            cell's sum lies below the largest one, at least 1.
    """

    rows: int
    columns: int
    levels: bytes


@dataclass(frozen=True, slots=True)
class Location:
    """Where a target tensor differs from its reference.

    Attributes:
        of: What is summed: squared errors, or elements that are NaN, infinite or finite on one side only.
        axes: How it spreads over each axis.
        map: How it spreads over rows and columns.
    """

    of: Literal["squared error", "mask mismatches"]
    axes: tuple[Axis, ...]
    map: ErrorMap


def locate(
    reference: Archive,
    reference_record: Record,
    target: Archive,
    target_record: Record,
    *,
    masks: bool = False,
    largest: float | None = None,
) -> Location:
    """Find where a stored tensor differs from another of the same shape, in bounded memory.

    Args:
        reference: Holds the trusted tensor.
        reference_record: The trusted tensor.
        target: Holds the tensor under test.
        target_record: The tensor under test.
        masks: Count elements that are NaN, infinite or finite on one side only, in place of errors.
        largest: The largest absolute error if it is known; extreme ones are scaled by it, so that no
            square overflows or vanishes.

    Returns:
        The shares by axis and the map.

    Raises:
        UsageError: The shapes differ.
        ReadError: One side cannot be read.
    """
    shape = values_shape(reference_record)
    if shape != values_shape(target_record):
        raise UsageError(
            f"{reference_record.key.text}: shapes {list(shape)} and {list(values_shape(target_record))} "
            "differ, expected equal ones"
        )
    sums = _summed((reference, reference_record), (target, target_record), masks=masks, largest=largest)
    return Location("mask mismatches" if masks else "squared error", sums.axes(), sums.map())


def error_along(
    reference: tuple[Archive, Record],
    target: tuple[Archive, Record],
    axis: int,
    *,
    masks: bool = False,
) -> Array | None:
    """Sum what `locate` sums by each index of one axis.

    Args:
        reference: The trusted tensor.
        target: The tensor under test, of the same shape.
        axis: The axis, from 0.
        masks: As for `locate`.

    Returns:
        float64, one number for each index; None if the axis is too long.

    Raises:
        ReadError: One side cannot be read.
    """
    return _summed(reference, target, masks=masks, largest=None).along(axis)


def _summed(
    reference: tuple[Archive, Record], target: tuple[Archive, Record], *, masks: bool, largest: float | None
) -> _Sums:
    sums = _Sums(values_shape(reference[1]))
    weigh = _mask_mismatches if masks else _Squares(largest)
    for start, ours, theirs in read_value_blocks(reference, target, sums.columns):
        with np.errstate(all="ignore"):  # an error may well exceed float64
            sums.add(start, weigh(ours, theirs))
    return sums


class _Squares:
    """Squared errors of measured values, scaled by a power of two."""

    def __init__(self, largest: float | None) -> None:
        self._halvings = 1 if largest is not None and math.isinf(largest) else 0
        known = largest is not None and 0 < largest < math.inf
        exponent = math.frexp(float(largest))[1] if known and largest is not None else 0
        self._shift = exponent if abs(exponent) > 400 else 1023 if self._halvings else 0

    def __call__(self, ours: Array, theirs: Array) -> Array:
        kind = np.complex128 if "c" in (ours.dtype.kind, theirs.dtype.kind) else np.float64
        (x, x_low), (y, y_low) = split_wide(ours, kind), split_wide(theirs, kind)
        if self._halvings:
            x, y = x * 0.5, y * 0.5
        d = (y - x) + (np.asarray(y_low) - x_low)
        parts = d.view(np.float64).reshape(d.size, -1)
        sides = [side.view(np.float64).reshape(d.size, -1) for side in (x, y)]
        if not all(np.isfinite(side).all() for side in sides):
            parts[~(np.isfinite(sides[0]) & np.isfinite(sides[1]))] = 0
        if (
            kind is np.float64
            and x.size
            and np.fmin(np.fmin.reduce(x), np.fmin.reduce(y)) <= MASK_SENTINELS[0]
        ):
            d[np.isin(ours, MASK_SENTINELS) & np.isin(theirs, MASK_SENTINELS)] = 0
        if self._shift:
            parts = np.ldexp(parts, -self._shift)
        squares: Array = np.einsum("ij,ij->i", parts, parts)
        return squares


def _mask_mismatches(ours: Array, theirs: Array) -> Array:
    if "c" in (ours.dtype.kind, theirs.dtype.kind):
        ours, theirs = ours.astype(np.complex128), theirs.astype(np.complex128)
    mismatches: Array = (_classes(ours) != _classes(theirs)).any(axis=1).astype(np.float64)
    return mismatches


def _classes(values: Array) -> Array:
    """Classify each part of a value, real and imaginary, by row; integers are finite."""
    if values.dtype.kind not in "fc":
        return np.zeros((values.size, 1), np.uint8)
    return classify(np.ascontiguousarray(values).view(values.real.dtype).reshape(values.size, -1))


class _Sums:
    """Sums of weights by index of each axis, and by cell of the map."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape or (1,)
        self._ndim = len(shape)
        self.columns = self._shape[-1]
        self._rows = math.prod(self._shape[:-1])
        self._steps = [max(1, -(-n // _LONGEST_AXIS)) for n in self._shape]
        self._axes = [np.zeros(-(-n // step)) for n, step in zip(self._shape, self._steps, strict=True)]
        self._cells = np.zeros((min(_MAP, self._rows), min(_MAP, self.columns)))

    def add(self, start: int, weights: Array) -> None:
        """Count the weights of values from number `start` on: whole rows, or a piece of one."""
        row, column = divmod(start, self.columns)
        block = weights.reshape(-1, min(self.columns, weights.size))
        along = block.sum(axis=0)
        bins, starts = _runs(column, block.shape[1], self._steps[-1])
        self._axes[-1][bins] += np.add.reduceat(along, starts) if self._steps[-1] > 1 else along
        if self._ndim > 1:
            rest = np.arange(row, row + block.shape[0])
            totals = block.sum(axis=1)
            for axis in range(self._ndim - 2, -1, -1):
                size = self._shape[axis]
                sums = self._axes[axis]
                sums += np.bincount((rest % size) // self._steps[axis], totals, len(sums))
                rest //= size
        height, width = self._cells.shape
        places = np.arange(column, column + block.shape[1]) * width // self.columns
        firsts = np.flatnonzero(np.diff(places, prepend=-1))
        folded = np.add.reduceat(block, firsts, axis=1)
        lines = np.arange(row, row + block.shape[0]) * height // self._rows
        tops = np.flatnonzero(np.diff(lines, prepend=-1))
        self._cells[np.ix_(lines[tops], places[firsts])] += np.add.reduceat(folded, tops, axis=0)

    def along(self, axis: int) -> Array | None:
        """Return the sums by index of one axis; None if they are sums of ranges."""
        return self._axes[axis] if self._steps[axis] == 1 else None

    def axes(self) -> tuple[Axis, ...]:
        """Return the largest shares of each axis."""
        axes = []
        for axis in range(self._ndim):
            sums, step = self._axes[axis], self._steps[axis]
            total = float(sums.sum())
            shares = [
                AxisShare(i * step, float(sums[i]) / total) for i in _largest(sums, _TOP) if sums[i] > 0
            ]
            axes.append(Axis(axis, self._shape[axis], step, tuple(shares)))
        return tuple(axes)

    def map(self) -> ErrorMap:
        """Return the map, in levels."""
        cells = self._cells
        peak = float(cells.max(initial=0))
        levels = np.zeros(cells.shape, np.uint8)
        hit = cells > 0
        below = 10 * np.log10(peak / cells[hit]) if peak else cells[hit]
        levels[hit] = np.clip(np.rint(255 - _LEVELS_PER_DECIBEL * below), 1, 255)
        return ErrorMap(*cells.shape, levels.tobytes())


def _largest(sums: Array, count: int) -> list[int]:
    """Return the numbers of the largest sums, the largest first; of equal ones, the first."""
    count = min(count, sums.size)
    if not count:
        return []
    places = np.flatnonzero(sums >= np.partition(sums, sums.size - count)[sums.size - count])
    largest: list[int] = places[np.argsort(-sums[places], kind="stable")][:count].tolist()
    return largest


def _runs(column: int, count: int, step: int) -> tuple[Any, Array]:
    """Return ranges of `step` indices that a piece of a row touches, and where in the piece each begins."""
    if step == 1:
        return slice(column, column + count), np.arange(0)
    bins = np.arange(column // step, (column + count - 1) // step + 1)
    return bins, np.maximum(bins * step - column, 0)
