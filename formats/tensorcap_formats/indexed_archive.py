"""Archives of ours: whatever the container, an index says what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.index import Index
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record


class IndexedArchive(Archive):
    """Base class of the readers of our containers."""

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

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._file.read_into(self._offsets[record.row] + start * record.dtype.itemsize, out)
