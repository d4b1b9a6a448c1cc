"""Read HDF5: our archives by their private note, without an HDF5 library; all others through h5py.

An archive that another tool rewrote (h5repack) or edited is still ours: its index is valid, and the library
finds each tensor. Any other HDF5 file gives its numeric datasets by name.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    UnfinishedArchiveError,
)
from tensorcap_formats.hdf5.flat_file import HEAD_SIZE, INDEX_NAME, NO_OFFSET, RUN_NAME, Note
from tensorcap_formats.hdf5.foreign import (
    DatasetReader,
    child,
    library_errors,
    open_foreign_hdf5,
    require_inside,
    require_plain_names,
)
from tensorcap_formats.hdf5.header import SIGNATURE
from tensorcap_formats.index import Index, decode_index, decode_json, index_of
from tensorcap_formats.indexed_archive import FlatArchive, IndexedArchive
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    import h5py

_USER_BLOCKS: Final = (0, 512, 1024, 2048, 4096, 8192, 16384)  # where HDF5 looks for its signature first


def is_hdf5(file: InputFile) -> bool:
    """Whether the HDF5 signature is at one of the offsets that the format allows."""
    return any(
        file.size >= at + len(SIGNATURE) and file.read(at, len(SIGNATURE)) == SIGNATURE for at in _USER_BLOCKS
    )


def open_hdf5(path: Path) -> Archive:
    """Open an archive of ours, or any HDF5 file that has numeric datasets.

    Raises:
        NotAnArchiveError: There is no such file, or nothing in it is a tensor.
        CorruptArchiveError: It is cut short or contradicts itself.
        NewerVersionError: A newer major version wrote it.
        UnfinishedArchiveError: Another program has it open for writing.
    """
    with ExitStack() as resources:
        file = resources.enter_context(closing(InputFile(path)))
        note = Note.unpack(file.read(0, min(HEAD_SIZE, file.size)))
        archive = _open_by_note(file, note, resources) if note else None
        return _open_by_library(file, resources, is_ours=note is not None) if archive is None else archive


def open_hdf5_part(
    path: Path, part: tuple[int, int], *, container: str, skipped: Mapping[str, str]
) -> Archive:
    """Open an HDF5 file of others that lies whole within another file.

    Args:
        path: The file around it.
        part: Offset and size of the HDF5 file in it, in bytes.
        container: Name of the format of the file around it.
        skipped: What else is in that and is not read, with reasons.

    Raises:
        NotAnArchiveError: The part is no HDF5 file, or nothing in it is a tensor.
        CorruptArchiveError: It is cut short or contradicts itself.
    """
    with ExitStack() as resources:
        file = resources.enter_context(closing(InputFile(path, part=part)))
        if not is_hdf5(file):
            raise NotAnArchiveError(f"{path}: its weights are no HDF5 file: they have no HDF5 signature")
        import h5py

        with library_errors(str(path)):
            root = resources.enter_context(h5py.File(_Stream(file), "r"))
            return open_foreign_hdf5(file, root, resources, container=container, skipped=skipped)


class _Stream(io.RawIOBase):
    """A file of ours as the HDF5 library takes it."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}.get(whence, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        out = np.frombuffer(buffer, np.uint8)
        count = min(out.size, max(self._file.size - self._position, 0))
        self._file.read_into(self._position, out[:count])
        self._position += count
        return count


def _open_by_note(file: InputFile, note: Note, resources: ExitStack) -> Archive | None:
    """Open an archive as its note says; None if it is not as it was written."""
    path, description = file.path, note.read_description(file)
    if description is None:
        return None
    content = decode_json(description.index, f"{path}: index")
    run, places, size = description.run, description.offsets, len(description.index)
    del description  # its bytes, before there are objects of all records
    index = replace(index_of(content, str(path), size=size), run=decode_json(run, f"{path}: run"))
    if note.offsets_count != len(index.records):
        raise CorruptArchiveError(
            f"{path}: table has {note.offsets_count} offsets, expected one for each of "
            f"{len(index.records)} records (ARC-42)"
        )
    offsets = struct.unpack(f"<{note.offsets_count}Q", places)
    for record, offset in zip(index.records, offsets, strict=True):
        nbytes = record.nbytes if record.stored else 0
        if nbytes and not HEAD_SIZE <= offset <= note.tail_at - nbytes:
            where = "nowhere" if offset == NO_OFFSET else f"at byte {offset}"
            raise CorruptArchiveError(
                f"{path}: {record.key.text}: {nbytes} bytes lie {where}, expected between "
                f"{HEAD_SIZE} and {note.tail_at} (ARC-42)"
            )
    return FlatArchive(file, "hdf5", index, offsets, resources, trusts_digests=True)


class _LibraryArchive(IndexedArchive):
    """An archive that another tool touched: h5py finds each tensor when it is read."""

    def __init__(self, file: InputFile, root: h5py.Group, index: Index, resources: ExitStack) -> None:
        super().__init__(file.path, "hdf5", index, resources)
        self._file = file
        self._root = root
        self._readers: dict[int, DatasetReader] = {}

    def _read_bytes(self, record: Record, start: int, out: Array) -> None:
        reader = self._readers.get(record.row)
        if reader is None:
            with library_errors(f"{self.path}: {record.key.text}"):
                reader = self._readers[record.row] = self._find(record)
        reader.read(start, out)

    def _find(self, record: Record) -> DatasetReader:
        source = f"{self.path}: {record.key.text}"
        node: Any = self._root
        for name in record.key.path.split("/"):
            node = child(node, name, source)
        if getattr(node, "shape", None) != record.shape:
            raise CorruptArchiveError(
                f"{source}: shape of the dataset is {getattr(node, 'shape', None)}, "
                f"expected {record.shape} (ARC-20)"
            )
        reader = DatasetReader(node, self._file, source, storage=record.dtype.storage)
        reader.require_written()
        return reader


def _open_by_library(file: InputFile, resources: ExitStack, *, is_ours: bool) -> Archive:
    path = file.path
    if not is_hdf5(file):
        raise NotAnArchiveError(f"{path}: is no HDF5 file: it has no HDF5 signature")
    import h5py

    with library_errors(str(path)):
        try:
            root = resources.enter_context(h5py.File(path, "r", locking="best-effort"))
        except BlockingIOError:
            raise UnfinishedArchiveError(
                f"{path}: another program holds the HDF5 lock: it has the file open for writing",
                hint="Close it there first.",
            ) from None
        require_plain_names(root, str(path))
        index_text = _text(root, INDEX_NAME, path)
        if not is_ours and not (index_text or b"").startswith(b'{"tensorcap"'):
            return open_foreign_hdf5(file, root, resources)
        run_text = _text(root, RUN_NAME, path)
        if index_text is None or run_text is None:
            missing = INDEX_NAME if index_text is None else RUN_NAME
            raise CorruptArchiveError(
                f"{path}: has no text {missing!r}, expected that of an archive (ARC-20)"
            )
        return _LibraryArchive(file, root, decode_index(index_text, run_text, str(path)), resources)


def _text(root: h5py.Group, name: str, path: Path) -> bytes | None:
    """The text of a scalar string dataset; None if there is none."""
    import h5py

    if not isinstance(root.get(name, getlink=True), h5py.HardLink):
        return None
    node = root[name]
    if not isinstance(node, h5py.Dataset) or node.shape != () or node.dtype.kind != "S":
        return None
    require_inside(node, f"{path}: {name}")
    if node.dtype.itemsize > path.stat().st_size:
        raise CorruptArchiveError(
            f"{path}: {name} declares {node.dtype.itemsize} bytes, more than the file has"
        )
    return bytes(node[()])
