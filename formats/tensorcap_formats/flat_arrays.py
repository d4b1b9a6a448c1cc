"""Flat ranges of arrays: read as few hyperrectangles, and written as chunks that are flat ranges.

Rows of an array that cannot be read in small pieces, kept for the reads that follow.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

import numpy as np

from tensorcap_formats.dtypes import Array

Selection = tuple[int | slice, ...]


class Sliceable(Protocol):
    """What can be read by basic slicing: a dataset of h5py, an array of zarr."""

    def __getitem__(self, selection: Any, /) -> Any: ...


def read_flat(dataset: Sliceable, shape: tuple[int, ...], start: int, out: Array) -> None:
    """Fill one-dimensional `out` with the elements from number `start` on, in C order.

    Nothing beyond the range is asked of `dataset`, so that memory is bounded by `out` and by what the
    library behind it needs for one chunk.

    Args:
        dataset: Of the same dtype as `out`.
        shape: The dataset's shape.
        start: Number of the first element, at most the number of elements less `out.size`.
        out: One-dimensional.
    """
    done = 0
    for selection, count in rectangles(shape, start, out.size):
        out[done : done + count] = np.asarray(dataset[selection]).reshape(-1)
        done += count


def rectangles(shape: tuple[int, ...], start: int, count: int) -> Iterator[tuple[Selection, int]]:
    """Cut a flat range into selections that are C-contiguous, in order, with the size of each.

    Example:
        >>> for selection, size in rectangles((3, 4), 2, 8):
        ...     print(selection, size)
        (0, slice(2, 4, None)) 2
        (slice(1, 2, None), slice(0, 4, None)) 4
        (2, slice(0, 2, None)) 2
    """
    if count <= 0:
        return
    if not shape:
        yield (), 1
        return
    row = math.prod(shape[1:])
    first, offset = divmod(start, row)
    if offset:  # the rest of a row that begins before the range
        inside = min(count, row - offset)
        for selection, size in rectangles(shape[1:], offset, inside):
            yield (first, *selection), size
        first, count = first + 1, count - inside
    whole, rest = divmod(count, row)
    if whole:
        yield (slice(first, first + whole), *(slice(0, n) for n in shape[1:])), whole * row
    for selection, size in rectangles(shape[1:], 0, rest):
        yield (first + whole, *selection), size


class Slabs:
    """How an array is cut: along one axis, below leading axes of chunk size 1, into flat ranges (ARC-65)."""

    def __init__(self, shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
        self.shape = shape
        self.chunk = chunk
        axis = next((i for i, n in enumerate(chunk) if n != 1), max(len(chunk) - 1, 0))
        self._lead = shape[:axis]
        self._behind = len(shape) - axis - 1
        self._count = shape[axis] if shape else 1  # along the axis
        self._step = chunk[axis] if chunk else 1
        self._row = math.prod(shape[axis + 1 :])
        self.are_flat = chunk[axis + 1 :] == tuple(max(n, 1) for n in shape[axis + 1 :])
        self.elements = math.prod(chunk)  # of a whole chunk
        self.chunks = math.prod(self._lead) * -(-self._count // self._step) if math.prod(shape) else 0

    @classmethod
    def cut(cls, shape: tuple[int, ...], itemsize: int, limit: int) -> Slabs:
        """Cut an array so that no chunk is above `limit` bytes and those along the axis are about equal."""
        chunk = [max(n, 1) for n in shape]
        row = itemsize * math.prod(chunk)
        for axis, count in enumerate(chunk):
            if row <= limit:
                break
            row //= count
            fitting = max(limit // row, 1)
            chunk[axis] = -(-count // -(-count // fitting))
            if fitting > 1:
                break
        return cls(shape, tuple(chunk))

    def range(self, number: int) -> tuple[int, int]:
        """First flat element of a chunk, and how many it has; the last along the axis may have fewer."""
        lead, step = divmod(number, -(-self._count // self._step))
        first = step * self._step
        inside = min(self._step, self._count - first)
        return (lead * self._count + first) * self._row, inside * self._row

    def number(self, element: int) -> int:
        """The chunk that holds a flat element."""
        lead, rest = divmod(element, self._count * self._row)
        return lead * -(-self._count // self._step) + rest // (self._step * self._row)

    def key(self, number: int) -> str:
        """The chunk's path below the array, in the default encoding of zarr v3."""
        if not self.shape:
            return "c"
        lead, step = divmod(number, -(-self._count // self._step))
        at = [int(i) for i in np.unravel_index(lead, self._lead)] if self._lead else []
        return "/".join(map(str, ["c", *at, step, *[0] * self._behind]))

    def position(self, number: int) -> tuple[int, ...]:
        """Coordinates of the first element of a chunk."""
        return tuple(int(i) for i in np.unravel_index(self.range(number)[0], self.shape))

    def fill(self, blocks: Iterable[Array], kind: np.dtype[Any]) -> Iterator[Array]:
        """Whole chunks, in order, in one reused buffer, from one-dimensional blocks of any sizes."""
        if not self.chunks:
            return
        buffer = np.zeros(self.elements, kind)
        number = filled = 0
        for block in blocks:
            done = 0
            while done < block.size:
                count = self.range(number)[1]
                part = block[done : done + count - filled]
                buffer[filled : filled + part.size] = part
                filled += part.size
                done += part.size
                if filled == count:
                    buffer[filled:] = 0
                    yield buffer
                    number, filled = number + 1, 0


BAND_BYTES: Final = 64 * 1024 * 1024


class Bands:
    """Keeps for each thread the band of rows that it read last, of one of several arrays.

    A chunk that must be decoded, or columns that lie far apart, serve many reads of `Archive.blocks`.
    """

    def __init__(self) -> None:
        self._kept = threading.local()

    def read(
        self,
        owner: object,
        shape: tuple[int, ...],
        rows: int,
        load: Callable[[int, int], Array],
        start: int,
        out: Array,
    ) -> None:
        """Fill one-dimensional `out` with the elements from number `start` on, in C order.

        Args:
            owner: Identifies the array.
            shape: The array's shape, of one axis at least.
            rows: Of the first axis, in one band.
            load: Gives the rows from one number up to another, one-dimensional.
            start: Number of the first element.
            out: One-dimensional.
        """
        size = rows * math.prod(shape[1:])
        done = 0
        while done < out.size:
            number, within = divmod(start + done, size)
            if getattr(self._kept, "key", None) != (owner, number):
                self.clear()  # so that there are never two
                self._kept.band = load(number * rows, min((number + 1) * rows, shape[0]))
                self._kept.key = (owner, number)
            part = out[done : done + self._kept.band.size - within]
            part[:] = self._kept.band[within : within + part.size]
            done += part.size

    def clear(self) -> None:
        """Forget this thread's band."""
        self._kept.key = self._kept.band = None
