"""Read HDF5: our archives by their private note, without an HDF5 library; all others through h5py.

An archive that another tool rewrote (h5repack) or edited is still ours, and its index still holds; only
then the library gives the place of each tensor. Any other HDF5 file gives its numeric datasets by name.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.digests import RunningDigests
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
)
from tensorcap_formats.hdf5.header import SIGNATURE
from tensorcap_formats.index import Index, decode_index, decode_json, decode_sealed
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    import h5py

_USER_BLOCKS: Final = (0, 512, 1024, 2048, 4096, 8192, 16384)  # where HDF5 looks for its signature first


def is_hdf5(file: InputFile) -> bool:
    """Whether the HDF5 signature stands where the format puts it."""
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
        file = InputFile(path)
        resources.callback(file.close)
        note = Note.unpack(file.read(0, min(HEAD_SIZE, file.size)))
        tail = note.read_tail(file) if note else None
        if note and tail is not None:
            archive: Archive = _open_by_note(path, file, note, tail, resources)
        else:
            archive = _open_by_library(path, file, resources, is_ours=note is not None)
        resources.pop_all()
    return archive


class _OurArchive(Archive):
    """Base of the two ways to read an archive of ours: by its note, or by the library."""

    def __init__(
        self,
        path: Path,
        index: Index,
        run: dict[str, Any],
        resources: ExitStack,
        *,
        trusts_digests: bool,
    ) -> None:
        super().__init__(
            path,
            "hdf5",
            index.records,
            is_ordered=index.is_ordered,
            is_complete=index.is_complete,
            run=run,
            values=index.values,
            algorithm=index.algorithm,
            root=index.root,
            trusts_digests=trusts_digests,
        )
        self._resources = resources

    def close(self) -> None:
        self._resources.close()


class _NotedArchive(_OurArchive):
    """An archive as we wrote it: the note's table says where each tensor lies."""

    is_direct = True
    _file: InputFile
    _offsets: tuple[int, ...]

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._file.read_into(self._offsets[record.row] + start * record.dtype.itemsize, out)


def _open_by_note(path: Path, file: InputFile, note: Note, tail: bytes, resources: ExitStack) -> Archive:
    def part(at: int, size: int) -> bytes:
        return tail[at - note.tail_at : at - note.tail_at + size]

    index = decode_index(part(note.index_at, note.index_size), str(path))
    run = decode_json(part(note.run_at, note.run_size), f"{path}: run")
    if note.offsets_count != len(index.records):
        raise CorruptArchiveError(
            f"{path}: table has {note.offsets_count} offsets, expected one for each of "
            f"{len(index.records)} records (ARC-42)"
        )
    offsets = struct.unpack(f"<{note.offsets_count}Q", part(note.offsets_at, 8 * note.offsets_count))
    for record, offset in zip(index.records, offsets, strict=True):
        if record.stored and record.nbytes and not HEAD_SIZE <= offset <= note.tail_at - record.nbytes:
            where = "nowhere" if offset == NO_OFFSET else f"at byte {offset}"
            raise CorruptArchiveError(
                f"{path}: {record.key.text}: {record.nbytes} bytes lie {where}, expected between "
                f"{HEAD_SIZE} and {note.tail_at} (ARC-42)"
            )
    archive = _NotedArchive(path, index, run, resources.pop_all(), trusts_digests=True)
    archive._file = file
    archive._offsets = offsets
    return archive


class _LibraryArchive(_OurArchive):
    """An archive that another tool touched: h5py finds each tensor when it is read.

    Nothing proves that the tool left every dataset as it was, so the digest of a tensor that is read from its
    beginning to its end is checked.
    """

    _file: InputFile
    _root: h5py.Group

    def __init__(self, path: Path, index: Index, run: dict[str, Any], resources: ExitStack) -> None:
        super().__init__(path, index, run, resources, trusts_digests=False)
        self._readers: dict[int, DatasetReader] = {}
        self._digests = RunningDigests(path, index.algorithm)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        reader = self._readers.get(record.row)
        if reader is None:
            with library_errors(f"{self.path}: {record.key.text}"):
                reader = self._readers[record.row] = self._find(record)
        reader.read(start, out)
        self._digests.add(record, start, out)

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


def _open_by_library(path: Path, file: InputFile, resources: ExitStack, *, is_ours: bool) -> Archive:
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
        index_text = _text(root, INDEX_NAME, path)
        if not is_ours and not (index_text or b"").startswith(b'{"tensorcap"'):
            return open_foreign_hdf5(path, file, root, resources)
        run_text = _text(root, RUN_NAME, path)
        if index_text is None or run_text is None:
            missing = INDEX_NAME if index_text is None else RUN_NAME
            raise CorruptArchiveError(
                f"{path}: has no text {missing!r}, expected that of an archive (ARC-20)"
            )
        index = decode_sealed(index_text, run_text, str(path))
        run = decode_json(run_text, f"{path}: run")
        archive = _LibraryArchive(path, index, run, resources.pop_all())
        archive._file, archive._root = file, root
        return archive


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
