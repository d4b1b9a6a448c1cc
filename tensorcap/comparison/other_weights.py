"""Which weight of the reference a target holds in the place of another one: that of another layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final

import numpy as np

from tensorcap.comparison.robust_errors import sample
from tensorcap.runs import is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.records import Record

_LEAST: Final = 16  # elements: fewer are equal by chance
_NEAR: Final = 0.5  # what rounding to few bits leaves of a sample, relative: unlike weights are 1.4 apart


class OtherWeights:
    """The weights of a reference, to be found by what a target holds.

    Attributes:
        reference: The trusted archive.
    """

    def __init__(self, reference: Archive) -> None:
        self.reference = reference
        self._by_shape: dict[tuple[object, ...], list[Record]] = defaultdict(list)
        self._samples: dict[str, Array] = {}
        for record in reference.records:
            is_weight = is_parameter(record.key) and record.dtype.kind == "float"
            if is_weight and record.stored and record.size >= _LEAST:
                self._by_shape[record.key.rank, record.shape].append(record)

    def find(
        self, own: Record, target: Archive, theirs: Record, is_held: Callable[[Record], bool]
    ) -> Record | None:
        """Find the weight that a target holds, which is not its own; None if there is none.

        Args:
            own: The weight of the reference that should be there.
            target: The archive under test.
            theirs: What it holds in the place, stored, in the same shape.
            is_held: Whether the target holds a weight, rounded at most; asked of those that are near.

        Raises:
            OSError, ReadError: The target's cannot be read.
        """
        few = sample(target, theirs)
        for record in self._by_shape.get((own.key.rank, own.shape), ()):
            if record.key == own.key:
                continue
            try:
                ours = self._sample(record)
                is_near = np.linalg.norm(few - ours) <= _NEAR * np.linalg.norm(ours)
                if is_near and np.ptp(ours) and is_held(record):
                    return record
            except (OSError, ReadError):  # the comparison says so
                continue
        return None

    def _sample(self, record: Record) -> Array:
        key = record.key.text
        if key not in self._samples:
            self._samples[key] = sample(self.reference, record)
        return self._samples[key]
