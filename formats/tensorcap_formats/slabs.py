"""Flat ranges of chunked arrays, read as few hyperrectangles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

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
