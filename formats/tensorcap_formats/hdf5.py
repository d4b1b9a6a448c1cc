"""Read HDF5: our archives by their private note, without an HDF5 library; all others through h5py.

An archive that another tool rewrote (h5repack) or edited is still ours, and its index still holds; only
then the library says where each tensor lies. Any other HDF5 file gives its numeric datasets by name.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, UnfinishedArchiveError
from tensorcap_formats.flat_file import HEAD_SIZE, INDEX_NAME, NO_OFFSET, RUN_NAME, Note
from tensorcap_formats.hdf5_dataset import DatasetReader, child, logical_dtype
from tensorcap_formats.hdf5_metadata import SIGNATURE
from tensorcap_formats.index import Index, decode_index, from_json
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
            archive = _open_by_library(path, file, resources)
        resources.pop_all()
    return archive


class _OurArchive(Archive):
    """What the two ways of reading an archive of ours share."""

    def __init__(self, path: Path, index: Index, run: dict[str, Any], resources: ExitStack) -> None:
        super().__init__(
            path,
            "hdf5",
            index.records,
            is_ordered=index.is_ordered,
            is_complete=index.is_complete,
            run=run,
            values=index.values,
            algorithm=index.algorithm,
        )
        self._resources = resources

    def close(self) -> None:
        self._resources.close()


class _NotedArchive(_OurArchive):
    """An archive as we wrote it: the note's table says where each tensor lies."""

    _file: InputFile
    _offsets: tuple[int, ...]

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._file.read_into(self._offsets[record.row] + start * record.dtype.itemsize, out)


def _open_by_note(path: Path, file: InputFile, note: Note, tail: bytes, resources: ExitStack) -> Archive:
    def part(at: int, size: int) -> bytes:
        return tail[at - note.tail_at : at - note.tail_at + size]

    index = decode_index(part(note.index_at, note.index_size), str(path))
    run = from_json(part(note.run_at, note.run_size), f"{path}: run")
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
    archive = _NotedArchive(path, index, run, resources.pop_all())
    archive._file = file
    archive._offsets = offsets
    return archive


class _LibraryArchive(_OurArchive):
    """An archive that another tool touched: h5py finds each tensor when it is read."""

    _file: InputFile
    _root: h5py.Group

    def __init__(self, path: Path, index: Index, run: dict[str, Any], resources: ExitStack) -> None:
        super().__init__(path, index, run, resources)
        self._readers: dict[int, DatasetReader] = {}

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        reader = self._readers.get(record.row)
        if reader is None:
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


def _open_by_library(path: Path, file: InputFile, resources: ExitStack) -> Archive:
    if not is_hdf5(file):
        raise NotAnArchiveError(f"{path}: is no HDF5 file: it has no HDF5 signature")
    try:
        import h5py

        root = resources.enter_context(h5py.File(path, "r", locking="best-effort"))
    except BlockingIOError:
        raise UnfinishedArchiveError(
            f"{path}: another program holds the HDF5 lock: it has the file open for writing",
            hint="Close it there first.",
        ) from None
    except (OSError, RuntimeError) as error:
        raise CorruptArchiveError(f"{path}: the HDF5 library cannot open it: {_one_line(error)}") from None
    try:
        texts = [_text(root, name, path) for name in (INDEX_NAME, RUN_NAME)]
        if texts[0] is not None and texts[0].startswith(b'{"tensorcap"') and texts[1] is not None:
            archive = _LibraryArchive(
                path,
                decode_index(texts[0], str(path)),
                from_json(texts[1], f"{path}: run"),
                resources.pop_all(),
            )
            archive._file, archive._root = file, root
            return archive
        return _open_foreign(path, file, root, resources)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        if isinstance(error, ReadError):
            raise
        raise CorruptArchiveError(f"{path}: the HDF5 library cannot read it: {_one_line(error)}") from None


def _text(root: h5py.Group, name: str, path: Path) -> bytes | None:
    """The text of a scalar string dataset; None where there is none."""
    import h5py

    if not isinstance(root.get(name, getlink=True), h5py.HardLink):
        return None
    node = root[name]
    if not isinstance(node, h5py.Dataset) or node.shape != () or node.dtype.kind != "S":
        return None
    if node.dtype.itemsize > path.stat().st_size:
        raise CorruptArchiveError(
            f"{path}: {name} declares {node.dtype.itemsize} bytes, more than the file has"
        )
    return bytes(node[()])


def _open_foreign(path: Path, file: InputFile, root: h5py.Group, resources: ExitStack) -> Archive:
    """All numeric datasets that hard links lead to; what else is there is named in `values`."""
    import h5py

    from tensorcap_formats.foreign import ForeignArchive, ForeignTensor

    tensors: list[ForeignTensor] = []
    others: dict[str, str] = {}
    groups: list[tuple[str, h5py.Group]] = [("", root)]
    seen = {h5py.h5o.get_info(root.id).addr}
    while groups:
        prefix, group = groups.pop()
        for name in group:
            full = prefix + name
            link = group.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                others[full] = f"not followed: {type(link).__name__}"
                continue
            node = group[name]
            if isinstance(node, h5py.Group):
                address = h5py.h5o.get_info(node.id).addr
                if address not in seen:  # a group may contain itself
                    seen.add(address)
                    groups.append((f"{full}/", node))
            elif isinstance(node, h5py.Dataset):
                found = logical_dtype(node)
                if found is None or node.shape is None:
                    others[full] = f"no tensor: {node.id.get_type().get_class()}"
                    continue
                reader = DatasetReader(
                    node, file, f"{path}: {full}", storage=found[0].storage, memory_type=found[1]
                )
                tensors.append(ForeignTensor(full, found[0], node.shape, reader.read_foreign))
    if not tensors:
        raise NotAnArchiveError(f"{path}: none of its {len(others)} HDF5 objects is a numeric dataset")
    return ForeignArchive(path, "hdf5", tensors, resources=resources.pop_all(), values=others)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
