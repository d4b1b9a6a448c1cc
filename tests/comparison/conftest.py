"""Archives in memory, so that the tests of the comparison rest on no container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tensorcap_formats.archive import Archive
from tensorcap_formats.digests import digest
from tensorcap_formats.dtypes import Array, DType, bits_of, dtype_of
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import StatisticsBuilder

MakeArchive = Callable[..., Archive]


class MemoryArchive(Archive):
    """Tensors of a mapping; counts how often it was read."""

    def __init__(
        self,
        tensors: Mapping[str, Array | tuple[Array, DType]],
        *,
        name: str = "memory",
        digests: bool = True,
        stored: bool = True,
        unreadable: str = "",
        **options: Any,
    ) -> None:
        self.reads = 0
        self.unreadable = unreadable
        self.bits: list[Array] = []
        records = []
        for row, (text, tensor) in enumerate(tensors.items()):
            bits, logical = tensor if isinstance(tensor, tuple) else (bits_of(tensor), dtype_of(tensor))
            self.bits.append(bits.reshape(-1))
            builder = StatisticsBuilder(logical)
            builder.add(self.bits[-1])
            records.append(
                Record(
                    Key.parse(text),
                    logical,
                    bits.shape,
                    row,
                    digest(self.bits[-1].tobytes()) if digests else "",
                    builder.result(),
                    stored,
                    row,
                )
            )
        options.setdefault("algorithm", "xxh3_128" if digests else None)
        options.setdefault("trusts_digests", digests)
        super().__init__(Path(name), "memory", records, **options)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self.reads += 1
        if record.key.text == self.unreadable:
            raise CorruptArchiveError(f"{self.path}: {record.key.text}: ends early")
        out[:] = self.bits[record.row][start : start + out.size]

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def make_archive() -> MakeArchive:
    return MemoryArchive
