"""Which weight of the reference a target holds in the place of another one: that of another layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from tensorcap.runs import is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import ReadError
from tensorcap_formats.records import Record

_LEAST: Final = 16  # elements: fewer are equal by chance
_NEAR: Final = 0.5  # what rounding to few bits leaves of a sample, relative: unlike weights are 1.4 apart
_BLOCKS: Final = 4  # of neighbouring elements, that a sample is of
_BLOCK: Final = 1024  # elements

_Place = tuple[int, tuple[int, ...]]  # rank and shape


class _Samples(NamedTuple):
    """Weights of one shape, and a few elements of each.

    Attributes:
        records: The weights.
        rows: Elements, a row for each weight.
        squares: Sums of squares of the rows.
    """

    records: list[Record]
    rows: Array
    squares: Array


class OtherWeights:
    """The weights of a reference, to be found by what a target holds.

    Attributes:
        reference: The trusted archive.
    """

    def __init__(self, reference: Archive) -> None:
        self.reference = reference
        self._by_shape: dict[_Place, list[Record]] = defaultdict(list)
        self._samples: dict[_Place, _Samples] = {}  # once asked for
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
            is_held: Whether the target holds a weight, rounded at most; asked of those that are near, the
                nearest first.

        Raises:
            OSError, ReadError: The target's cannot be read.
        """
        samples = self._read((own.key.rank, own.shape))
        if samples is None:
            return None
        few = _sample(target, theirs)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is near to nothing
            distances = samples.squares + few @ few - 2 * samples.rows @ few
            near = np.flatnonzero(distances <= _NEAR**2 * samples.squares)
        for at in near[np.argsort(distances[near], kind="stable")].tolist():
            record: Record = samples.records[at]
            try:
                if record.key != own.key and is_held(record):
                    return record
            except (OSError, ReadError):  # the comparison says so
                continue
        return None

    def _read(self, place: _Place) -> _Samples | None:
        """Samples of the weights of a shape that are not constant and can be read; None if there are none."""
        if place not in self._samples and place in self._by_shape:
            records, rows = [], []
            for record in self._by_shape.pop(place):
                try:
                    row = _sample(self.reference, record)
                except (OSError, ReadError):  # the comparison says so
                    continue
                if np.ptp(row):
                    records.append(record)
                    rows.append(row)
            if records:
                stacked = np.stack(rows)
                self._samples[place] = _Samples(records, stacked, np.einsum("ij,ij->i", stacked, stacked))
        return self._samples.get(place)


def _sample(archive: Archive, record: Record) -> Array:
    """A few elements of a tensor, as float32, in blocks spread evenly over it; all of a small one."""
    starts = [0]
    size = record.size
    if size > _BLOCKS * _BLOCK:
        starts, size = np.linspace(0, size - _BLOCK, _BLOCKS).astype(np.int64).tolist(), _BLOCK
    bits = [archive.read_range(record, start, start + size) for start in starts]
    with np.errstate(over="ignore"):
        return decode(np.concatenate(bits), record.dtype).astype(np.float32)
