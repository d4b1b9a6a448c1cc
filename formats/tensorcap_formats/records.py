"""The record: what an archive says of one tensor."""

from __future__ import annotations

import math

from tensorcap_formats.dtypes import DType
from tensorcap_formats.keys import Key
from tensorcap_formats.light_dataclass import light_dataclass
from tensorcap_formats.notebook import card
from tensorcap_formats.statistics import Statistics


@light_dataclass(frozen=True, slots=True)
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

    def __repr__(self) -> str:
        stored = "" if self.stored else ", statistics only"
        return f"<Record {self.key.text}: {self.dtype.name} {list(self.shape)}{stored}>"

    def _repr_html_(self) -> str:
        s = self.statistics
        known = (
            {} if s is None else {"least": s.minimum, "mean": s.mean, "largest": s.maximum, "zeros": s.zeros}
        )
        facts = {name: f"{value:.5g}" for name, value in known.items() if value is not None}
        bad = 0 if s is None else s.nan + s.posinf + s.neginf
        facts |= {"not finite": str(bad)} if bad else {}
        title = f"{self.key.text}: {self.dtype.name} {list(self.shape)}"
        return card(title, facts, lines=() if self.stored else ("Only its statistics were kept.",))

    @property
    def size(self) -> int:
        """Number of stored elements, no unit."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor, in bytes."""
        return self.size * self.dtype.itemsize
