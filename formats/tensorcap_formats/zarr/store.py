"""zarr v3 stores: archives of ours in that container; stores from elsewhere are in `foreign_zarr`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.archive import BLOCK_BYTES, Archive
from tensorcap_formats.digests import RunningDigests
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError
from tensorcap_formats.folder import OpenFolder
from tensorcap_formats.index import (
    FORMAT_VERSION,
    Index,
    check_version,
    decode_sealed,
    from_json,
    to_json,
)
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.writing.content import (
    checked_blocks,
    content_of,
    described,
    holders,
    index_and_run,
    writing,
)
from tensorcap_formats.zarr.arrays import METADATA_NAME, ZarrArray, read_metadata, write_array
from tensorcap_formats.zarr.foreign import open_foreign_zarr

INDEX_NAME: Final = "index"
RUN_NAME: Final = "run"
_MAX_NAME_BYTES: Final = 255  # of a file, on every file system in use


def write_zarr(
    source: Archive, path: Path, *, records: Sequence[Record] | None = None, compress: bool = False
) -> None:
    """Write an archive as a zarr v3 store at a path where nothing is yet.

    The metadata of the root is written last, so that nothing opens a store that was not finished.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new folder.
        records: Which, in the order of the new archive; all of the source by default.
        compress: Compress the chunks by zstd.

    Raises:
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The disk is full, or two keys differ in case only on a file system that does not care.
        MissingPackageError: Compression was asked for, and numcodecs is not installed.
    """
    originals = source.records if records is None else records
    chosen, algorithm = described(source, originals)
    index, run = index_and_run(source, chosen, algorithm)
    group = to_json({"zarr_format": 3, "node_type": "group", "attributes": {}})
    groups = {""}
    with writing(path):
        path.mkdir()
        for record in holders(chosen).values():
            *parents, name = array_path(record.key).split("/")
            for depth in range(1, len(parents) + 1):
                parent = "/".join(parents[:depth])
                if parent not in groups:
                    groups.add(parent)
                    (path / parent).mkdir()
                    (path / parent / METADATA_NAME).write_bytes(group)
            write_array(
                path.joinpath(*parents, name),
                checked_blocks(source, originals[record.row]),
                record.shape,
                record.dtype.storage,
                record.dtype.name,
                compress=compress,
            )
        for name, text in ((INDEX_NAME, index), (RUN_NAME, run)):
            data = np.frombuffer(text, np.uint8)
            write_array(path / name, [data], data.shape, "|u1", "uint8", compress=compress)
        root = {"zarr_format": 3, "node_type": "group", "attributes": {"tensorcap": FORMAT_VERSION}}
        (path / METADATA_NAME).write_bytes(to_json(root))


def open_zarr(path: Path) -> Archive:
    """Open a folder that is a zarr store: an archive of ours, or any group or array of version 2 or 3.

    Raises:
        NotAnArchiveError: The folder is no zarr store.
        CorruptArchiveError: The store contradicts itself, or lacks an array that its index names.
        NewerVersionError: A newer tensorcap wrote it.
    """
    if (path / METADATA_NAME).exists():
        root = read_metadata(path / METADATA_NAME)
        attributes = root.get("attributes")
        if isinstance(attributes, dict) and "tensorcap" in attributes:
            return ZarrArchive(path, attributes)
    elif not any((path / name).exists() for name in (".zgroup", ".zarray")):
        raise NotAnArchiveError(f"{path}: has no {METADATA_NAME}, expected a zarr store")
    return open_foreign_zarr(path)


class ZarrArchive(Archive):
    """An archive of ours in a zarr store (ARC-61).

    Any program may alter one chunk of it and nothing else, so a tensor that is read from its beginning to
    its end is held against its digest on the way; and a folder that is put in the place of the one that was
    opened is not read under the old one's index.
    """

    def __init__(self, path: Path, attributes: dict[str, Any]) -> None:
        """Read index and run, and see whether each array that the index names is there."""
        source = str(path)
        check_version(attributes, source)
        self._decoded = threading.local()
        self._folder = OpenFolder(path)
        try:
            run = self._bytes(RUN_NAME)
            index = decode_sealed(self._bytes(INDEX_NAME), run, source)
            self._describe(path, index, from_json(run, f"{source}: run"))
        except BaseException:
            self._folder.close()
            raise

    def _describe(self, path: Path, index: Index, run: dict[str, Any]) -> None:
        super().__init__(
            path,
            "zarr",
            index.records,
            is_ordered=index.is_ordered,
            is_complete=index.is_complete,
            run=run,
            values=index.values,
            algorithm=index.algorithm,
            root=index.root,
        )
        self._holders = holders(index.records)
        for record in self._holders.values():
            if not (path / array_path(record.key) / METADATA_NAME).exists():
                raise CorruptArchiveError(f"{path}: array {array_path(record.key)!r} is missing (ARC-61)")
        self._arrays: dict[int, ZarrArray] = {}  # by row of the holder
        self._digests = RunningDigests(path, index.algorithm)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._array(self._holders[content_of(record)]).read(start, out)
        self._digests.add(record, start, out)

    def _array(self, holder: Record) -> ZarrArray:
        array = self._arrays.get(holder.row)
        if array is None:
            name = array_path(holder.key)
            array = ZarrArray(self._folder, name, holder.dtype.storage, decoded=self._decoded)
            if array.shape != holder.shape:
                raise CorruptArchiveError(
                    f"{self.path}: array {name!r} has shape {array.shape}, expected {holder.shape} (ARC-61)"
                )
            self._arrays[holder.row] = array
        return array

    def _bytes(self, name: str) -> bytes:
        array = ZarrArray(self._folder, name, "|u1", decoded=self._decoded)
        if len(array.shape) != 1:
            raise CorruptArchiveError(
                f"{self._folder.path}: array {name!r} has {len(array.shape)} axes, expected 1 (ARC-61)"
            )
        return b"".join(_pieces(array))

    def close(self) -> None:
        """Let go of the folder and of decoded chunks; files are open only while they are read."""
        self._folder.close()
        self._arrays.clear()
        self._decoded = threading.local()


def array_path(key: Key) -> str:
    """Where an array lies in the store: `Key.path`, with names that a file system or zarr refuses changed."""
    return "/".join(map(_component, key.path.split("/")))


def _component(name: str) -> str:
    if name == METADATA_NAME or name.startswith("__"):  # taken by zarr
        name = f"%{ord(name[0]):02X}{name[1:]}"
    encoded = name.encode()
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    return f"{encoded[:200].decode(errors='ignore')}~{digest}"


def _pieces(array: ZarrArray) -> Iterator[bytes]:
    """The array piece by piece: nothing is allocated for bytes that it only claims to have."""
    for start in range(0, array.size, BLOCK_BYTES):
        out = np.empty(min(BLOCK_BYTES, array.size - start), np.uint8)
        array.read(start, out)
        yield out.tobytes()
