"""Weights that were rounded to whole steps of a scale, and are floats again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array

_BITS: Final = (8, 4)  # of a weight, that are usual
_GROUPS: Final = (128, 64, 32, 256, 16)  # elements of the last axis that share a scale
_OFF_GRID: Final = 0.02  # steps that a value may be off, besides its own rounding and that of the largest
_UNCERTAIN: Final = 0.2  # steps that rounding may put a value off, to say whether it is on a grid
_LEAST_SHARE: Final = 0.5  # of the values has to say so
_MICRO: Final = 32  # values that share a scale in MXFP4
_LEVELS: Final = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of it, without signs
_CUT: Final = 8.0  # below which the largest of a group lies, in units of its scale
_HALF: Final = 0.5  # of a step, by which rounding to the nearest changes a value at most
_COLUMNS: Final = "each column"
_LEAST: Final = 64  # elements: fewer lie on a grid by chance


@dataclass(frozen=True, slots=True)
class WeightGrid:
    """The grid that a weight was rounded to.

    Attributes:
        bits: Of one weight.
        number: The format of one, if that is no whole number.
        scope: What shares a scale, in words.
        rounded: The reference's values on it, float64.
    """

    bits: int
    scope: str
    number: str = ""
    rounded: Array = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)

    @property
    def text(self) -> str:
        """The grid in words.

        Example:
            >>> WeightGrid(8, "each row").text
            'int8 with a scale for each row'
        """
        return f"{self.number or f'int{self.bits}'} with a scale for {self.scope}"


def find_weight_grid(reference: Array, target: Array, unit: float = 0.0) -> WeightGrid | None:
    """Find the symmetric grid that the target's values are the reference's rounded to.

    1. Values that may share a scale are lined up: all, each row or column, or groups of the last axis.
    2. The step is the target's largest magnitude over `2^(bits - 1) - 1`, or over one more if that is the
       lowest number of a signed type; every value of the target has to be a whole number of them, and the
       reference's nearest such number, but for rounding. A value of so many steps that rounding to its dtype
       hides that says nothing.

    Args:
        reference: float64, any shape.
        target: The same shape; floats.
        unit: Unit roundoff of the target's dtype.

    Returns:
        The grid of the fewest bits that fits; None if none does.
    """
    if reference.shape != target.shape or target.size < _LEAST or not np.isfinite(target).all():
        return None
    for bits in sorted(_BITS):
        for scope, ours, theirs in _lined_up(reference, target):
            largest = np.abs(theirs).max(axis=1, keepdims=True)
            if not largest.all():
                continue
            has_lowest = _has_lowest(theirs, largest, bits)
            step = largest / (2 ** (bits - 1) - 1 + has_lowest)
            numbers = theirs / step
            slack = _OFF_GRID + 2 * unit * np.abs(numbers)
            is_telling = slack <= _UNCERTAIN
            off = np.abs(numbers - np.rint(numbers))
            is_on_grid = is_telling.mean() >= _LEAST_SHARE and (off <= slack)[is_telling].all()
            if is_on_grid and (np.abs(ours / step - numbers) <= _HALF + slack).all():
                on_grid = np.rint(ours / step) * step
                if scope == _COLUMNS:
                    on_grid = on_grid.T
                return WeightGrid(bits, scope, rounded=on_grid.reshape(target.shape))
    return _find_microscaled(reference, target)


def _find_microscaled(reference: Array, target: Array) -> WeightGrid | None:
    """Find whether the target's values are the reference's in MXFP4: groups of 32 along one of the last axes.

    The scale is a power of two, with which the largest of a group is 4 or 6; in units of it every value has
    to be one of the format's, and the nearest one to the reference's, of which those beyond the largest are
    cut (OCP Microscaling Formats 1.0, 6.3).
    """
    for axis in range(max(0, target.ndim - 2), target.ndim)[::-1]:
        if target.shape[axis] % _MICRO:
            continue
        ours, theirs = (np.moveaxis(side, axis, -1).reshape(-1, _MICRO) for side in (reference, target))
        largest = np.abs(theirs).max(axis=1, keepdims=True)
        mantissa, exponent = np.frexp(largest)
        scale = np.where(largest > 0, np.ldexp(1.0, exponent - 3), 1.0)  # 4 is 0.5 and 6 is 0.75 of 2 ** 3
        numbers = np.abs(theirs) / scale
        is_level = np.isin(mantissa, (0.0, 0.5, 0.75)).all() and np.isin(numbers, _LEVELS).all()
        if not is_level or np.abs(numbers).max() == 0:
            continue
        at = np.searchsorted(_LEVELS, numbers)
        below = (_LEVELS[at] - _LEVELS[np.maximum(at - 1, 0)]) / 2
        above = (np.append(_LEVELS, 2 * _LEVELS[-1] - 4)[at + 1] - _LEVELS[at]) / 2
        above = np.where(at == len(_LEVELS) - 1, _CUT - _LEVELS[-1], above)
        wanted = ours * np.where(theirs < 0, -1, 1) / scale
        is_near = (wanted >= numbers - np.where(at == 0, above, below) - _OFF_GRID) & (
            wanted <= numbers + above + _OFF_GRID
        )
        if is_near.all():
            return WeightGrid(4, f"{_MICRO} values", "MXFP4", rounded=target)
    return None


def _has_lowest(rows: Array, largest: Array, bits: int) -> Array:
    """Whether the largest of each row is negative, and rather `2^(bits - 1)` steps than one less."""
    errors = []
    for levels in (2 ** (bits - 1) - 1, 2 ** (bits - 1)):
        numbers = rows / (largest / levels)
        errors.append(np.abs(numbers - np.rint(numbers)).mean(axis=1, keepdims=True))
    has_lowest: Array = (rows.min(axis=1, keepdims=True) == -largest) & (errors[1] < errors[0])
    return has_lowest


def _lined_up(reference: Array, target: Array) -> Iterator[tuple[str, Array, Array]]:
    """Both sides as rows of values that may share a scale, with that in words."""
    yield "the whole tensor", reference.reshape(1, -1), target.reshape(1, -1)
    if target.ndim < 2:
        return
    yield "each row", reference.reshape(len(reference), -1), target.reshape(len(target), -1)
    ours, theirs = (side.reshape(-1, side.shape[-1]).T for side in (reference, target))
    yield _COLUMNS, ours, theirs
    for size in _GROUPS:
        if target.shape[-1] > size and target.shape[-1] % size == 0:
            yield f"{size} values", reference.reshape(-1, size), target.reshape(-1, size)
