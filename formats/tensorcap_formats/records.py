"""The record: what an archive says of one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensorcap_formats.dtypes import DType
from tensorcap_formats.keys import Key
from tensorcap_formats.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor of an archive.

    Attributes:
        key: Where it was seen.
        dtype: Logical dtype.
        shape: As the framework gave it (a packed dtype counts bytes).
        order: Execution order number within the run; a file from elsewhere counts in natural name order.
        digest: 128-bit hash of the bytes, 32 hexadecimal digits; "" if none is known.
        statistics: None if none are known (a file from elsewhere).
        stored: Whether the archive holds the bytes, not only the statistics.
        row: Position in `Archive.records`.
    """

    key: Key
    dtype: DType
    shape: tuple[int, ...]
    order: int
    digest: str
    statistics: Statistics | None
    stored: bool
    row: int

    @property
    def size(self) -> int:
        """Number of stored elements, no unit."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor, in bytes."""
        return self.size * self.dtype.itemsize
