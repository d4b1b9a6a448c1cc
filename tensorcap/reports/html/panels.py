"""Two tensors and their difference as small pictures: maps, error by axis, histogram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison import Pair
from tensorcap.drawing import (
    AxisErrors,
    Histogram,
    Quantiles,
    draw_histogram,
    draw_picture,
    draw_quantiles,
    errors_along,
    finite_range,
)
from tensorcap.metrics import Difference
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import TensorcapError

LIMIT: Final = 1 << 22  # elements of a tensor that is drawn: as many as a diagnosis looks at
CELLS: Final = 48  # of a map along each side at most


@dataclass(frozen=True, slots=True)
class TensorMap:
    """One map of a panel.

    Attributes:
        name: Reference, difference or target.
        picture: A PNG as a data URL, one pixel a cell; magenta is what is not finite.
        low: The value of its first colour.
        high: The value of its last one.
    """

    name: str
    picture: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Pictures:
    """What can be drawn of a pair.

    Attributes:
        maps: Reference, difference and target; none if values are not at hand.
        cell: Rows and columns of the tensor in a cell.
        axes: How the error spreads over each axis.
        histogram: Of both sides; None without a finite value.
        quantiles: Of both sides; None as the histogram.
        missing: Why there are no pictures, as a sentence; "" if there are.
    """

    maps: tuple[TensorMap, ...] = ()
    cell: tuple[int, int] = (1, 1)
    axes: tuple[AxisErrors, ...] = ()
    histogram: Histogram | None = None
    quantiles: Quantiles | None = None
    missing: str = ""


def draw_pair(pair: Pair, archives: tuple[Archive, Archive] | None) -> Pictures:
    """Draw both tensors of a pair, leading axes merged into rows.

    A cell of all three maps shows the element of it with the largest difference, so that one wrong element
    among millions stays visible.

    Args:
        pair: The pair.
        archives: The archives that it was compared from; None if they are not at hand.
    """
    values = pair_values(pair, archives)
    return Pictures(missing=values) if isinstance(values, str) else draw_tensors(*values)


def pair_values(pair: Pair, archives: tuple[Archive, Archive] | None) -> tuple[Array, Array] | str:
    """Read both tensors of a pair as float64, or complex128, of one shape and with at least one element.

    Returns:
        In place of them, why they are not drawn, as a sentence.
    """
    reason = _why_not(pair, archives)
    if reason or archives is None or pair.reference is None or pair.target is None:
        return reason
    try:
        reference, target = archives[0].load(pair.reference), archives[1].load(pair.target)
    except (TensorcapError, OSError) as error:
        return f"The values could not be read again: {error}."
    if reference.shape != target.shape:
        shapes = f"{list(reference.shape)} and {list(target.shape)}"
        return f"Values of unlike shapes, {shapes}, are not drawn."
    if not reference.size:
        return "The tensor has no elements."
    return widened(reference), widened(target)


def _why_not(pair: Pair, archives: tuple[Archive, Archive] | None) -> str:
    if pair.reference is None or pair.target is None:
        return f"The {'reference' if pair.reference is None else 'target'} has no such tensor."
    if archives is None:
        return "Values are not at hand: a report from both archives draws them."
    unstored = [
        side for side, record in (("reference", pair.reference), ("target", pair.target)) if not record.stored
    ]
    if unstored:
        return f"Only statistics were kept of the {' and the '.join(unstored)}, no values."
    largest = max(pair.reference.size, pair.target.size)
    if largest > LIMIT:
        return f"The tensor has {largest:,} elements: those of more than {LIMIT:,} are not drawn."
    return ""


def widened(values: Array) -> Array:
    """Values as float64 or complex128."""
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)


def draw_tensors(reference: Array, target: Array) -> Pictures:
    """Draw two tensors of one shape, float64 or complex128, with at least one element.

    Of complex values the moduli are drawn, and the modulus of the difference.

    Example:
        >>> pictures = draw_tensors(np.zeros((2, 3)), np.eye(2, 3))
        >>> [one.name for one in pictures.maps], [round(axis.share, 2) for axis in pictures.axes]
        (['reference', 'difference', 'target'], [0.5, 0.5])
    """
    with np.errstate(all="ignore"):
        difference = np.asarray(np.abs(target - reference))  # of scalars no array otherwise
    difference[reference == target] = 0  # of two infinities alike, too
    difference[np.isnan(reference) & np.isnan(target)] = 0
    reference, target = (np.abs(v) if np.iscomplexobj(v) else v for v in (reference, target))
    worst, cell = _worst_of_cells(_as_rows(difference))
    planes = [
        np.take_along_axis(values.ravel(), worst.ravel(), 0).reshape(worst.shape)
        for values in (reference, difference, target)
    ]
    low, high = finite_range(planes[0], planes[2])
    largest = finite_range(planes[1], planes[1])[1]
    maps = (
        TensorMap("reference", draw_picture(planes[0], low, high, "values"), low, high),
        TensorMap("difference", draw_picture(planes[1], 0.0, largest, "errors"), 0.0, largest),
        TensorMap("target", draw_picture(planes[2], low, high, "values"), low, high),
    )
    axes = tuple(errors_along(difference, axis) for axis in range(difference.ndim))
    return Pictures(maps, cell, axes, draw_histogram(reference, target), draw_quantiles(reference, target))


def _as_rows(values: Array) -> Array:
    return values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)


def _worst_of_cells(errors: Array) -> tuple[Array, tuple[int, int]]:
    """Flat index of the element with the largest error in each cell, and rows and columns in a cell."""
    rows, columns = errors.shape
    tall, wide = -(-rows // CELLS), -(-columns // CELLS)
    down, across = -(-rows // tall), -(-columns // wide)
    padded = np.full((down * tall, across * wide), -1.0)
    padded[:rows, :columns] = np.where(np.isfinite(errors), errors, np.inf)
    cells = padded.reshape(down, tall, across, wide).transpose(0, 2, 1, 3).reshape(down, across, -1)
    within = cells.argmax(axis=2)
    row = np.arange(down)[:, None] * tall + within // wide
    column = np.arange(across) * wide + within % wide
    return row * columns + column, (tall, wide)


def worst_element(difference: Difference | None) -> str:
    """Where the largest error is and what both sides have there, as a sentence; "" if that is not known."""
    if difference is None:
        return ""
    if difference.mask_mismatches and difference.mask_index is not None:
        count = f"{difference.mask_mismatches} of {difference.elements} elements"
        place = list(difference.mask_index)
        return f"{count} are finite, NaN or infinite on one side only, the first at {place}."
    if difference.max_abs_index is None or difference.max_abs is None:
        return ""
    ours, theirs = _number(difference.max_abs_reference), _number(difference.max_abs_target)
    place = list(difference.max_abs_index)
    error = f"The largest error, {difference.max_abs:.3g}, is at {place}"
    return f"{error}: {ours} in the reference, {theirs} in the target."


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float | complex) else "nothing"
