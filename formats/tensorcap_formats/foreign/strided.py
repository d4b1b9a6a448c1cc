"""Tensors that are strided views: of a storage, or of a file in Fortran order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tensorcap_formats.dtypes import Array
from tensorcap_formats.flat_arrays import BAND_BYTES, Bands, rectangles

_SPAN_BYTES: Final = 16 * 1024 * 1024  # of the storage, at most, in one read
_SMALL_SPAN_BYTES: Final = 64 * 1024  # read whole, however few of its elements are needed
_MAX_READ_RATIO: Final = 4  # elements read for one that is needed, in larger spans

ReadStorage = Callable[[int, Array], None]


class StridedTensor:
    """Reads a view in C order; memory is bounded by two bands and a span, whatever the strides."""

    def __init__(
        self,
        read: ReadStorage,
        storage: str,
        *,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        bands: Bands,
    ) -> None:
        """Describe a view, whose bounds the caller has checked (see `last_element`).

        Args:
            read: Fills an array with the elements of the storage from a number on.
            storage: numpy type code of an element.
            offset: Element of the storage that is the view's first.
            shape: Of the view.
            strides: In elements, not negative.
            bands: Keeps rows that were read.
        """
        self._read = read
        self._storage = np.dtype(storage)
        self._offset = offset
        self._shape = shape
        self._strides = strides
        self._bands = bands
        natural = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        self._is_contiguous = all(n == 1 or s == c for n, s, c in zip(shape, strides, natural, strict=True))

    def read(self, start: int, out: Array) -> None:
        """Fill one-dimensional `out` with the view's elements from number `start` on."""
        if self._is_contiguous:
            self._read(self._offset + start, out)
            return
        row_bytes = math.prod(self._shape[1:]) * self._storage.itemsize
        rows = min(BAND_BYTES // row_bytes, self._shape[0])
        if rows:
            self._bands.read(self, self._shape, rows, self._rows, start, out)
        else:
            self._gather_range(start, out)

    def _rows(self, first: int, end: int) -> Array:
        row = math.prod(self._shape[1:])
        out = np.empty((end - first) * row, self._storage)
        self._gather_range(first * row, out)
        return out

    def _gather_range(self, start: int, out: Array) -> None:
        done = 0
        for selection, count in rectangles(self._shape, start, out.size):
            offset, sizes, strides = self._offset, [], []
            for part, stride in zip(selection, self._strides, strict=False):
                first = part if isinstance(part, int) else part.start
                offset += first * stride
                if not isinstance(part, int):
                    sizes.append(part.stop - part.start)
                    strides.append(stride)
            self._gather(offset, sizes, strides, out[done : done + count].reshape(sizes))
            done += count

    def _gather(self, offset: int, sizes: Sequence[int], strides: Sequence[int], out: Array) -> None:
        """Read a span of the storage and pick from it; halve the axis of longest strides until it fits."""
        span = last_element(0, sizes, strides) + 1
        span_bytes = span * self._storage.itemsize
        is_dense = span <= _MAX_READ_RATIO * math.prod(sizes)
        if span_bytes <= _SMALL_SPAN_BYTES or (is_dense and span_bytes <= _SPAN_BYTES):
            buffer = np.empty(span, self._storage)
            self._read(offset, buffer)
            steps = [s * self._storage.itemsize for s in strides]
            out[...] = as_strided(buffer, sizes, steps, writeable=False)
            return
        axis = max((i for i, n in enumerate(sizes) if n > 1), key=lambda i: strides[i])
        half = sizes[axis] // 2
        for first, size in ((0, half), (half, sizes[axis] - half)):
            parts = [*sizes[:axis], size, *sizes[axis + 1 :]]
            where = (slice(None),) * axis + (slice(first, first + size),)
            self._gather(offset + first * strides[axis], parts, strides, out[where])


def last_element(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The last element of the storage that a view, which is not empty, reaches."""
    return offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
