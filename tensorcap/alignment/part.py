"""Some records of an archive, as an archive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record


class Part(Archive):
    """An archive that lacks some of another one's records.

    Args:
        whole: The other one; it stays the caller's to close.
        records: Those that are kept, in the order of their execution.
    """

    def __init__(self, whole: Archive, records: Iterable[Record]) -> None:
        super().__init__(
            whole.path,
            whole.container,
            [replace(record, row=row) for row, record in enumerate(records)],
            is_foreign=whole.is_foreign,
            is_ordered=whole.is_ordered,
            is_complete=whole.is_complete,
            run=whole.run,
            values=whole.values,
            algorithm=whole.algorithm,
            root=whole.root,
            trusts_digests=whole.trusts_digests,
        )
        self.is_direct = whole.is_direct
        self._whole = whole

    def remark(self, record: Record) -> str:
        """What is to be known of the tensor in the whole."""
        return self._whole.remark(self._whole.get(record.key))

    def close(self) -> None:
        """Nothing is held; the whole stays open."""

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._whole.read_into(self._whole.get(record.key), start, out)
