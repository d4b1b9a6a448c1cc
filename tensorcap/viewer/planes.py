"""A part of a tensor of any rank as three maps, never larger than a screen needs and read in few reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.drawing import draw_picture, finite_range
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView

CELLS: Final = 256  # of a map along each side: what is larger is folded
_WHOLE: Final = 1 << 20  # elements of a plane that is read whole; of a larger one, rows are sampled
_READS: Final = 2048  # of one side at most
_RUN_BYTES: Final = 1 << 17  # a longer run is not read for a few elements of it
_LOADED: Final = 1 << 24  # elements of a tensor that can only be read whole


@dataclass(frozen=True, slots=True)
class PlaneView:
    """Which plane of a tensor, and which box of it.

    Attributes:
        shape: Of the tensor, with axes of length 1 in front if it has fewer than two.
        rows: The axis that runs down.
        columns: The axis that runs to the right, another one.
        at: An index for each axis; those of the drawn axes are not used.
        box: First and last + 1 of rows, then of columns.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    at: tuple[int, ...]
    box: tuple[int, int, int, int]

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        rows: int | None = None,
        columns: int | None = None,
        at: Sequence[int] = (),
        box: Sequence[int] | None = None,
    ) -> PlaneView:
        """Choose what is left out, and clamp the rest: no view reaches outside.

        Without axes the two last ones are drawn that have more than one index.

        Example:
            >>> PlaneView.of((2, 8, 1), at=(9,)).box, PlaneView.of((2, 8, 1)).rows
            ((0, 2, 0, 8), 0)
        """
        shape = (1,) * (2 - len(shape)) + tuple(shape)
        ndim = len(shape)
        wide = [axis for axis in range(ndim) if shape[axis] > 1]
        default = sorted((list(range(ndim)) + wide)[-2:]) if len(wide) >= 2 else [ndim - 2, ndim - 1]
        rows = default[0] if rows is None or not 0 <= rows < ndim else rows
        columns = default[1] if columns is None or not 0 <= columns < ndim else columns
        if rows == columns:
            columns = ndim - 1 if rows != ndim - 1 else ndim - 2
        index = tuple(min(max(i, 0), n - 1) for i, n in zip([*at, *[0] * ndim], shape, strict=False))
        r0, r1, c0, c1 = box if box is not None and len(box) == 4 else (0, shape[rows], 0, shape[columns])
        r0, c0 = min(max(r0, 0), shape[rows] - 1), min(max(c0, 0), shape[columns] - 1)
        r1, c1 = min(max(r1, r0 + 1), shape[rows]), min(max(c1, c0 + 1), shape[columns])
        return cls(shape, rows, columns, index, (r0, r1, c0, c1))

    def showing(self, index: Sequence[int]) -> PlaneView:
        """The same axes at the place of an element, with the box around it if it is outside of that."""
        padded = (0,) * (len(self.shape) - len(index)) + tuple(index)
        r0, r1, c0, c1 = self.box
        is_inside = r0 <= padded[self.rows] < r1 and c0 <= padded[self.columns] < c1
        return PlaneView.of(self.shape, self.rows, self.columns, padded, self.box if is_inside else None)


@dataclass(frozen=True, slots=True)
class Maps:
    """Maps of one view: reference, difference and target, or the one side that has values.

    Attributes:
        planes: Their values by name, float32 or float64, of one shape.
        cell: Rows and columns of the tensor in a cell.
        is_sampled: Whether a cell does not stand for all of its elements.
    """

    planes: Mapping[str, Array]
    cell: tuple[int, int]
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """A map as an image.

    Attributes:
        name: Reference, difference or target.
        url: A PNG as a data URL, a pixel a cell; magenta is what is not finite.
        low: The value of its first colour.
        high: That of its last one.
        worst: Row and column of its largest cell, for the difference alone.
    """

    name: str
    url: str
    low: float
    high: float
    worst: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a pair: where its values are."""

    name: str
    archive: Archive
    record: Record


class TensorReader:
    """Reads planes, and keeps the tensor that was loaded whole last: the next look is at the same one."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Record, Array]] = {}

    def plane(self, side: Side, view: PlaneView, steps: tuple[int, int]) -> Array:
        """The elements of a view at every so many rows and columns, rows first; real ones.

        Raises:
            UsageError: Its values were not kept, or it is too large to be read whole and must be.
            ReadError: They cannot be read.
        """
        r0, r1, c0, c1 = view.box
        window: list[range | int] = list(view.at)
        window[view.rows] = range(r0, r1, steps[0])
        window[view.columns] = range(c0, c1, steps[1])
        missing = len(view.shape) - len(side.record.shape)
        values = self.window(side, window[missing:])
        if missing:
            shape = [len(w) for w in window if isinstance(w, range)]
            values = values.reshape(shape)
        plane = values if view.rows < view.columns else values.T
        return _real(plane)

    def window(self, side: Side, window: Sequence[range | int]) -> Array:
        """The elements of a window; see `plane`."""
        archive, record = side.archive, side.record
        if not record.stored:
            raise UsageError(f"{side.name}: only its statistics were kept")
        if can_seek(side):
            return _read_drawn(archive, record, window)
        index = (slice(w.start, w.stop, w.step) if isinstance(w, range) else w for w in window)
        return self._loaded(side)[tuple(index)]

    def sample(self, side: Side, steps: Sequence[int]) -> Array:
        """The elements at every so many indices of each axis; see `plane`."""
        archive, record = side.archive, side.record
        ranges = [range(0, size, step) for size, step in zip(record.shape, steps, strict=True)]
        if not can_seek(side):
            return self._loaded(side)[tuple(slice(None, None, step) for step in steps)]
        return _read_lines(archive, record, ranges)

    def _loaded(self, side: Side) -> Array:
        kept = self._kept.get(side.name)
        if kept is None or kept[0] is not side.record:
            size = side.record.size
            if size > _LOADED:
                raise UsageError(
                    f"{side.name}: has {size:,} elements, which this archive gives only as a whole, "
                    f"expected at most {_LOADED:,}"
                )
            self._kept.pop(side.name, None)
            kept = self._kept[side.name] = side.record, side.archive.load(side.record)
        return kept[1]

    def forget(self) -> None:
        """Drop what is kept."""
        self._kept.clear()


def can_seek(side: Side) -> bool:
    """Whether parts of a tensor are read alone: if they cost no more than their bytes, or it is too large."""
    archive, record = side.archive, side.record
    if record.dtype.packed > 1:
        return False
    while isinstance(archive, ArchiveView) and not archive.is_direct:
        behind = archive.sources.get(record.key.text, ())
        if len(behind) != 1 or not record.digest or behind[0].digest != record.digest:
            return False  # it is computed, as a whole
        archive, record = archive.source, behind[0]
    return archive.is_direct or record.size > _LOADED


def _read_drawn(archive: Archive, record: Record, window: Sequence[range | int]) -> Array:
    """Read a window with at most two ranges: a run of bytes for each index of the outer one.

    Where the elements of a run are far apart, each is read alone.
    """
    strides = [math.prod(record.shape[axis + 1 :]) for axis in range(len(record.shape))]
    base = sum(w * s for w, s in zip(window, strides, strict=True) if isinstance(w, int))
    drawn = [(w, s) for w, s in zip(window, strides, strict=True) if isinstance(w, range)]
    (outer, outer_stride), (inner, stride) = [(range(1), 0)] * (2 - len(drawn)) + drawn
    starts = [base + i * outer_stride + inner[0] * stride for i in outer]
    step, span = max(1, inner.step * stride), (inner[-1] - inner[0]) * stride + 1
    out = np.empty((len(outer), len(inner)), record.dtype.storage)
    if step == 1 and outer_stride == span and outer.step == 1:
        out[:] = archive.read_range(record, starts[0], starts[0] + out.size).reshape(out.shape)
    elif step == 1 or span * record.dtype.itemsize <= _RUN_BYTES:
        for line, start in zip(out, starts, strict=True):
            line[:] = archive.read_range(record, start, start + span)[::step]
    else:
        for line, start in zip(out, starts, strict=True):
            for at in range(len(inner)):
                archive.read_into(record, start + at * step, line[at : at + 1])
    return decode(out.reshape([len(w) for w, _ in drawn]), record.dtype)


def _read_lines(archive: Archive, record: Record, ranges: Sequence[range]) -> Array:
    """Read a window line by line: a run of the last axis for each index of those before it."""
    if not ranges:
        return decode(archive.read_range(record, 0, 1).reshape(()), record.dtype)
    strides = [math.prod(record.shape[axis + 1 :]) for axis in range(len(ranges))]
    out = np.empty([len(r) for r in ranges], record.dtype.storage)
    lines = out.reshape(-1, len(ranges[-1]))
    for line, index in zip(lines, itertools.product(*ranges[:-1]), strict=True):
        window: list[range | int] = [*index, ranges[-1]]
        line[:] = _stored_line(archive, record, window, strides)
    return decode(out, record.dtype)


def _stored_line(
    archive: Archive, record: Record, window: Sequence[range | int], strides: Sequence[int]
) -> Array:
    """Elements of the last axis: one run, or each alone if they are far apart."""
    *index, along = window
    assert isinstance(along, range)
    start = sum(i * s for i, s in zip(index, strides, strict=False) if isinstance(i, int))
    span = along[-1] + 1
    if along.step == 1 or span * record.dtype.itemsize <= _RUN_BYTES:
        return archive.read_range(record, start, start + span)[:: along.step]
    out = np.empty(len(along), record.dtype.storage)
    for at, i in enumerate(along):
        archive.read_into(record, start + i, out[at : at + 1])
    return out


def _steps(view: PlaneView, itemsize: int) -> tuple[int, int]:
    """How many rows and columns apart elements are read: 1 and 1, unless that takes too much.

    A run of the tensor that has many drawn elements costs one read; where no axis that is drawn is short in
    memory, each element is a read of its own.
    """
    r0, r1, c0, c1 = view.box
    sizes = {view.rows: r1 - r0, view.columns: c1 - c0}
    inner, outer = max(sizes), min(sizes)
    stride = math.prod(view.shape[inner + 1 :])
    steps = dict.fromkeys(sizes, 1)
    if sizes[inner] * sizes[outer] > _WHOLE:
        steps[outer] = -(-sizes[outer] // CELLS)
        if sizes[inner] * CELLS > _WHOLE:
            steps[inner] = -(-sizes[inner] * CELLS // _WHOLE) if stride == 1 else -(-sizes[inner] // CELLS)
    if sizes[inner] * stride * itemsize > _RUN_BYTES and stride > 1:  # each element is a read of its own
        while -(-sizes[inner] // steps[inner]) * -(-sizes[outer] // steps[outer]) > _READS:
            larger = max(sizes, key=lambda axis: sizes[axis] / steps[axis])
            steps[larger] += max(1, steps[larger] // 4)
    return steps[view.rows], steps[view.columns]


def read_maps(
    reader: TensorReader, sides: Sequence[Side], view: PlaneView, worst: Sequence[int] | None = None
) -> Maps:
    """Read a view of one side or of both, folded to at most 256 cells along each side.

    A cell of reference and target is its first element; that of the difference is its largest, so that one
    bad element in millions stays visible.

    Args:
        reader: What reads.
        sides: Reference and target, or the one that has values.
        view: The view, which fits all sides.
        worst: Index of the largest error, as far as it is known: a sample shows it if it is in the view.

    Raises:
        UsageError: Values were not kept, or cannot be read in parts.
        ReadError: They cannot be read.
    """
    itemsize = max(side.record.dtype.itemsize for side in sides)
    steps = _steps(view, itemsize)
    read = [reader.plane(side, view, steps) for side in sides]
    tall, wide = (-(-size // CELLS) for size in read[0].shape)
    planes = {side.name: plane[::tall, ::wide] for side, plane in zip(sides, read, strict=True)}
    if len(sides) == 2:
        difference = _fold(difference_of(*read), tall, wide)
        planes = {"reference": planes["reference"], "difference": difference, "target": planes["target"]}
        if steps != (1, 1) and worst is not None:
            _show_worst(reader, sides, view, (steps[0] * tall, steps[1] * wide), planes, worst)
    return Maps(planes, (steps[0] * tall, steps[1] * wide), steps != (1, 1))


def _show_worst(
    reader: TensorReader,
    sides: Sequence[Side],
    view: PlaneView,
    cell: tuple[int, int],
    planes: dict[str, Array],
    worst: Sequence[int],
) -> None:
    """Put the largest error into its cell of a sampled difference, if the view has it."""
    index = (0,) * (len(view.shape) - len(worst)) + tuple(worst)
    others = [axis for axis in range(len(index)) if axis not in (view.rows, view.columns)]
    r0, r1, c0, c1 = view.box
    row, column = index[view.rows], index[view.columns]
    if any(index[axis] != view.at[axis] for axis in others) or not (r0 <= row < r1 and c0 <= column < c1):
        return
    one = PlaneView.of(view.shape, view.rows, view.columns, index, (row, row + 1, column, column + 1))
    error = difference_of(*(reader.plane(side, one, (1, 1)) for side in sides))
    planes["difference"] = planes["difference"].copy()
    planes["difference"][(row - r0) // cell[0], (column - c0) // cell[1]] = error[0, 0]


def difference_of(reference: Array, target: Array) -> Array:
    """The absolute difference: 0 where both are NaN or one infinity, infinite where one is not finite."""
    with np.errstate(all="ignore"):
        difference: Array = np.abs(target - reference)
    if not np.isfinite(difference).all():
        alike = (reference == target) | (np.isnan(reference) & np.isnan(target))
        with np.errstate(all="ignore"):  # of float32 values a finite difference may be beyond float32
            difference = np.abs(target.astype(np.float64) - reference.astype(np.float64))
        difference = np.where(alike, 0.0, np.where(np.isnan(difference), np.inf, difference))
    return difference


def _fold(values: Array, tall: int, wide: int) -> Array:
    """The largest value of each block."""
    if tall > 1:
        values = np.maximum.reduceat(values, range(0, values.shape[0], tall), axis=0)
    return np.maximum.reduceat(values, range(0, values.shape[1], wide), axis=1) if wide > 1 else values


def _real(values: Array) -> Array:
    """Values as float32 or, if that would round, float64; of complex ones the moduli."""
    if np.iscomplexobj(values):
        return np.abs(values.astype(np.complex128))
    exact = values.dtype.itemsize <= 2 or values.dtype == np.float32
    return values.astype(np.float32 if exact else np.float64, copy=False)


def pictures(maps: Maps, *, log: bool = False) -> tuple[Picture, ...]:
    """Draw maps: reference and target on one scale, the difference from 0.

    Args:
        maps: The maps.
        log: Whether the difference is drawn by its logarithm, over six decades below its largest value.
    """
    low, high = finite_range(*(plane for name, plane in maps.planes.items() if name != "difference"))
    drawn = []
    for name, plane in maps.planes.items():
        if name != "difference":
            drawn.append(Picture(name, draw_picture(plane, low, high, "values"), low, high))
            continue
        largest = finite_range(plane)[1]
        at = int(np.where(np.isfinite(plane), plane, np.inf).argmax())
        worst = divmod(at, plane.shape[1]) if largest > 0 or not np.isfinite(plane).all() else None
        if log and largest > 0:
            foot = largest * 1e-6
            shown, ends = (
                np.log(np.where(np.isfinite(plane), np.maximum(plane, foot), np.nan)),
                (foot, largest),
            )
            url = draw_picture(shown, math.log(foot), math.log(largest), "errors")
        else:
            ends = 0.0, largest
            url = draw_picture(plane, 0.0, largest, "errors")
        drawn.append(Picture(name, url, *ends, worst))
    return tuple(drawn)
