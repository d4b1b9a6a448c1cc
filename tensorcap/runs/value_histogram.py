"""How many elements of a tensor have which value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record

MOST_ELEMENTS: Final = 1 << 22  # of a tensor that is read whole for its histogram
_BINS: Final = 32


@dataclass(frozen=True, slots=True)
class ValueHistogram:
    """Counts of the finite values of a tensor in bins of one width.

    Attributes:
        low: The least finite value, where the first bin begins.
        high: The largest one, where the last bin ends.
        counts: Count of elements in each bin.
    """

    low: float
    high: float
    counts: tuple[int, ...]

    @classmethod
    def of(cls, archive: Archive, record: Record) -> ValueHistogram | None:
        """Read a tensor and count its values.

        Returns:
            None of more than 4,194,304 elements, of values that were not kept, and as `of_values`.

        Raises:
            ReadError: The bytes cannot be read.
        """
        if not record.stored or record.size > MOST_ELEMENTS:
            return None
        return cls.of_values(archive.load(record))

    @classmethod
    def of_values(cls, values: Array) -> ValueHistogram | None:
        """Count the values of an array.

        Returns:
            None of complex ones and bools, and without two finite values that differ by a finite number.

        Example:
            >>> ValueHistogram.of_values(np.arange(4.0)).counts[::10]
            (1, 1, 0, 0)
        """
        if values.dtype.kind not in "fiu":
            return None
        finite = values[np.isfinite(values)].astype(np.float64)
        if not finite.size:
            return None
        low, high = float(finite.min()), float(finite.max())
        with np.errstate(over="ignore"):
            width = np.float64(high) - np.float64(low)
        if not (np.isfinite(width) and width > 0):
            return None
        counts, _ = np.histogram(finite, _BINS, (low, high))
        return cls(low, high, tuple(map(int, counts)))
