"""Rows of an array that cannot be read in small pieces, kept for the reads that follow."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

from tensorcap_formats.dtypes import Array

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
            owner: What the array is told by.
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
