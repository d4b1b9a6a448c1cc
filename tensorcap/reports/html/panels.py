"""Two tensors and their difference as small pictures: maps, error by axis, histogram."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison import Pair
from tensorcap.metrics import Difference
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import TensorcapError

LIMIT: Final = 1 << 22  # elements of a tensor that is drawn: as many as a diagnosis looks at
CELLS: Final = 48  # of a map along each side at most
_QUANTILES: Final = 49
_BINS: Final = 48  # of a histogram, and of the error by axis
_STOPS: Final = {  # colours of a map from its smallest value to its largest
    "values": ("440154", "3b528b", "21918c", "5ec962", "fde725"),
    "errors": ("f4f4f6", "fdd49e", "ef6548", "7f0000"),
}
_NOT_FINITE: Final = (255, 0, 255)
_STEPS: Final = 63  # colours between the stops: more cannot be told apart, and each costs bytes


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
class AxisErrors:
    """How the squared error spreads over one axis.

    Attributes:
        axis: Number of the axis.
        size: Its length.
        bars: An SVG path of bars in a box of 48 by 20, each for an equal part of the axis.
        worst: The index, or the first of the range of indices, with the largest part.
        share: That part, 0 to 1.
    """

    axis: int
    size: int
    bars: str
    worst: int
    share: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many elements of both tensors have which value.

    Attributes:
        reference: Points of a polyline in a box of 48 by 20.
        target: The same of the target.
        low: The value at its left.
        high: The value at its right.
    """

    reference: str
    target: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of the target against those of the reference (a QQ plot), on one scale.

    On the diagonal both have the same distribution, whatever the order of their elements.

    Attributes:
        points: Points of a polyline in a box of 48 by 48, the reference to the right, the target up.
        low: The value at its left and bottom.
        high: The value at its right and top.
    """

    points: str
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
    return Pictures(maps, cell, axes, draw_histogram(reference, target), _quantiles(reference, target))


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


def finite_range(*planes: Array) -> tuple[float, float]:
    """The smallest and the largest finite value; zeros without any."""
    values = np.concatenate([plane.ravel() for plane in planes])
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _ramp(stops: tuple[str, ...]) -> bytes:
    """Colours from the first stop to the last, and one for what is not finite, three bytes each."""
    colours = np.array([[int(stop[i : i + 2], 16) for i in (0, 2, 4)] for stop in stops], float)
    at = np.linspace(0, len(stops) - 1, _STEPS)
    table = np.stack([np.interp(at, range(len(stops)), colours[:, i]) for i in range(3)], axis=1)
    return np.vstack([table, _NOT_FINITE]).round().astype(np.uint8).tobytes()


_RAMPS: Final = {name: _ramp(stops) for name, stops in _STOPS.items()}


def draw_picture(values: Array, low: float, high: float, ramp: str) -> str:
    """A palette PNG as a data URL, one pixel a value.

    Args:
        values: Real ones, two-dimensional; what is not finite is magenta.
        low: The value of the first colour.
        high: That of the last one.
        ramp: `values` or `errors`.
    """
    # Halved, since a range from -1e308 to 1e308 has no width in float64.
    width = high / 2 - low / 2
    with np.errstate(all="ignore"):
        share = (values / 2 - low / 2) / width if width else np.zeros_like(values)
        pixels = np.where(np.isfinite(values), np.clip(share, 0, 1) * (_STEPS - 1), _STEPS)
    rows = pixels.round().astype(np.uint8)
    raw = np.hstack([np.zeros((len(rows), 1), np.uint8), rows]).tobytes()
    head = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 3, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", head),
            (b"PLTE", _RAMPS[ramp]),
            (b"IDAT", zlib.compress(raw, 9)),
            (b"IEND", b""),
        )
    )
    return f"data:image/png;base64,{base64.b64encode(image).decode('ascii')}"


def errors_along(difference: Array, axis: int) -> AxisErrors:
    """Sum squared errors over all other axes; elements that are not finite count as the largest error."""
    finite = difference[np.isfinite(difference)]
    largest = float(finite.max(initial=0.0)) or 1.0
    shares = np.where(np.isfinite(difference), difference / largest, 1.0) ** 2  # scaled: no square overflows
    sums = shares.sum(axis=tuple(i for i in range(difference.ndim) if i != axis))
    whole = float(sums.sum())
    step = -(-len(sums) // _BINS)
    binned = np.add.reduceat(sums, np.arange(0, len(sums), step))
    top = float(binned.max()) or 1.0
    wide = _BINS / len(binned)
    bars = "".join(
        f"M{at * wide:.4g},20v-{20 * v / top:.1f}h{0.85 * wide:.3g}V20z"
        for at, v in enumerate(binned)
        if v > 0.002 * top
    )
    worst = int(sums.argmax())
    return AxisErrors(axis, len(sums), bars, worst, float(sums[worst]) / whole if whole else 0.0)


def draw_histogram(reference: Array, target: Array) -> Histogram | None:
    """Count the finite values of both sides; None if all are one value, or none is finite."""
    low, high = finite_range(reference, target)
    if not (math.isfinite(high - low) and high > low):
        return None
    counts = [
        np.histogram(values[np.isfinite(values)], _BINS, (low, high))[0] for values in (reference, target)
    ]
    top = max(int(c.max()) for c in counts) or 1
    # By the root of the count: tails are what differs, and a count of one is to be seen.
    lines = [
        " ".join(f"{at + 0.5:g},{20 - 19 * math.sqrt(c / top):.1f}" for at, c in enumerate(of_side))
        for of_side in counts
    ]
    return Histogram(lines[0], lines[1], low, high)


def quantile_pairs(reference: Array, target: Array) -> tuple[Array, Array] | None:
    """Quantiles of the finite values of both, the same shares of each: the least, the largest, 47 between.

    Returns:
        None if a side has no finite value.
    """
    sides = [values[np.isfinite(values)] for values in (reference, target)]
    if not all(side.size for side in sides):
        return None
    shares = np.linspace(0, 1, _QUANTILES)
    ours, theirs = (np.quantile(side, shares, method="inverted_cdf") for side in sides)
    return ours, theirs


def _quantiles(reference: Array, target: Array) -> Quantiles | None:
    low, high = finite_range(reference, target)
    pairs = quantile_pairs(reference, target)
    if pairs is None or not (math.isfinite(high - low) and high > low):
        return None
    right, up = (CELLS * (side - low) / (high - low) for side in pairs)
    points = " ".join(f"{x:.1f},{CELLS - y:.1f}" for x, y in zip(right, up, strict=True))
    return Quantiles(points, low, high)


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
