"""Weights whose ranges somebody chose smaller than their values, for smaller steps, as AWQ's search does."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tensorcap.comparison.weight_rounding import WeightNumbers, chance_of_rows
from tensorcap_formats.dtypes import Array

_LEAST_RANGE: Final = 0.5  # of the whole, that AWQ's search may leave
_ALIKE: Final = 0.6  # steps by which ranges that are all cut alike may be off, with half of one of rounding
_MATRIX: Final = 2  # axes


def cut_of_choice(reference: Array, weight: WeightNumbers, inputs: Array | None) -> float | None:
    """Return what cutting values off makes of products, over what rounding in whole ranges would.

    It is the RMS of the errors of all products with the inputs; or of one output, over what chance allows it,
    if that is more and ranges are not all cut alike. Without inputs it is that of the weight itself, and of a
    row.

    Args:
        reference: float64, in the shape of the weight.
        weight: The target's.
        inputs: What the layer was given, `[rows, inputs]`, float64; None if that is not known.

    Returns:
        The larger ratio; None if a number that is not cut is not the nearest, or a range is less than half
        of its values.
    """
    if reference.ndim != _MATRIX or weight.steps.ndim != _MATRIX:
        return None
    rows = inputs if inputs is not None and inputs.shape[1] == reference.shape[1] else None
    energy = np.ones(reference.shape[1]) if rows is None else np.square(rows).sum(axis=0)
    made, expected = [], []
    least, most = math.inf, 0.0
    ends = len(weight.levels) - 1
    width = float(weight.levels[-1] - weight.levels[0])
    for part, own in weight.in_parts():
        off, is_below, is_above = own.misses(reference[part])
        below, above = own.halves
        beyond = np.where((own.places == ends) & (off > above), off, 0.0)
        beyond = np.where((own.places == 0) & (off < -below), off, beyond)
        if ((is_below | is_above) & (beyond == 0)).any():
            return None
        steps = _of_groups(beyond, own.steps.shape)
        least, most = min(least, float(steps.min())), max(most, float(steps.max()))
        ranges = 1 + steps / width
        if ranges.max() > 1 / _LEAST_RANGE:
            return None
        errors = own.values - reference[part]
        made.append(np.square(errors).sum(axis=1) if rows is None else np.square(rows @ errors.T).sum(axis=0))
        expected.append((own.variances * np.square(ranges)) @ energy)
    squares, independent = np.concatenate(made), np.maximum(np.concatenate(expected), 1e-300)
    total = float(np.sqrt(squares.sum() / independent.sum()))
    if most - least <= _ALIKE:
        return total
    chance = 1.0 if rows is None else chance_of_rows(rows)
    worst = float(np.sqrt(squares / independent).max()) / chance
    return max(total, worst)


def _of_groups(beyond: Array, steps: tuple[int, ...]) -> Array:
    """How many steps the values of a group lie beyond both ends, for each element.

    Args:
        beyond: How many steps a value lies beyond an end, negative below the least.
        steps: The shape of the scales: of the groups.
    """
    rows, columns = beyond.shape
    groups = steps[1] if columns % steps[1] == 0 else columns
    parts = beyond.reshape(rows, groups, -1)
    both = np.maximum(parts.max(axis=-1), 0) - np.minimum(parts.min(axis=-1), 0)
    if steps[0] == 1:
        both = np.broadcast_to(both.max(axis=0), both.shape)
    wide: Array = np.repeat(both, columns // groups, axis=1)
    return wide
