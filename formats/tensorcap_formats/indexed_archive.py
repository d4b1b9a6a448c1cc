"""Archives of ours: whatever the container, an index says what they hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tensorcap_formats.archive import Archive, room_for
from tensorcap_formats.digests import RunningDigests
from tensorcap_formats.dtypes import Array
from tensorcap_formats.index import Index
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record


class IndexedArchive(Archive):
    """Base class of the readers of our containers.

    A tensor that is read from its beginning to its end is checked against its digest.
    """

    def __init__(
        self, path: Path, container: str, index: Index, resources: ExitStack, *, trusts_digests: bool = False
    ) -> None:
        """Take over the resources, which `close` closes."""
        super().__init__(
            path,
            container,
            index.records,
            is_ordered=index.is_ordered,
            is_complete=index.is_complete,
            run=index.run,
            values=index.values,
            algorithm=index.algorithm,
            root=index.root,
            trusts_digests=trusts_digests,
        )
        self._resources = resources.pop_all()
        self._digests = RunningDigests(path, index.algorithm)
        self._verified: set[Hashable] = set()  # places of bytes
        self.checks_digests = self._digests.can_check

    @abstractmethod
    def _read_bytes(self, record: Record, start: int, out: Array) -> None:
        """Fill `out` as `_read_flat` does, unchecked."""

    def _place(self, record: Record) -> Hashable:
        """Where the bytes of a record are: records of one place share them."""
        return record.row

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._read_bytes(record, start, out)
        self._digests.add(record, start, out)

    def verify(self, record: Record) -> None:
        """As `Archive.verify`; bytes that several records share are read once."""
        content = self._place(record), record.nbytes, record.digest
        if content not in self._verified:
            super().verify(record)
            self._verified.add(content)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._resources.close()


class FlatArchive(IndexedArchive):
    """An archive in one file, in which the elements of each tensor lie one after the other.

    Args:
        file: The file.
        container: As in `Archive`.
        index: Its index.
        offsets: Where each record's bytes begin in the file; any number for a record without bytes.
        resources: What `close` closes.
        trusts_digests: As in `Archive`.
    """

    is_direct = True

    def __init__(
        self,
        file: InputFile,
        container: str,
        index: Index,
        offsets: Sequence[int],
        resources: ExitStack,
        *,
        trusts_digests: bool,
    ) -> None:
        super().__init__(file.path, container, index, resources, trusts_digests=trusts_digests)
        self._file = file
        self._offsets = offsets

    def _place(self, record: Record) -> Hashable:
        return self._offsets[record.row]

    def _read_bytes(self, record: Record, start: int, out: Array) -> None:
        self._file.read_into(self._offsets[record.row] + start * record.dtype.itemsize, out)

    def read_many(self, records: Sequence[Record], buffer: Array) -> list[int]:
        """As `Archive.read_many`: one read of tensors that lie in the file as in the buffer."""
        places, end = [], 0
        start = self._offsets[records[0].row]
        for record in records:
            if not record.stored or self._offsets[record.row] != start + end:
                return super().read_many(records, buffer)
            places.append(end)
            end += room_for(record)
        part = buffer[: places[-1] + records[-1].nbytes]
        self._file.read_into(start, part)
        self._digests.check_whole(records, places, part)
        return places
