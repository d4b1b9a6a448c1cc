"""Read archives of ours in zarr v3 stores.

Reading does not go through the zarr library, which reads a missing chunk as zeros; here it is an error.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from tensorcap_formats.archive import BLOCK_BYTES, Archive
from tensorcap_formats.content import content_of, holders
from tensorcap_formats.decompression import zstd_content_size
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError
from tensorcap_formats.folder import OpenFolder
from tensorcap_formats.index import check_version, decode_index
from tensorcap_formats.indexed_archive import IndexedArchive
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record
from tensorcap_formats.zarr.foreign import open_foreign_zarr
from tensorcap_formats.zarr.header import (
    INDEX_NAME,
    METADATA_NAME,
    RUN_NAME,
    array_path,
    open_part,
    parse_array_metadata,
    read_metadata,
    zstd_codec,
)


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
            with ExitStack() as resources:
                folder = resources.enter_context(closing(OpenFolder(path)))
                return ZarrArchive(folder, attributes, resources)
    elif not any((path / name).exists() for name in (".zgroup", ".zarray")):
        raise NotAnArchiveError(f"{path}: has no {METADATA_NAME}, expected a zarr store")
    return open_foreign_zarr(path)


class ZarrArchive(IndexedArchive):
    """An archive of ours in a zarr store (ARC-61).

    Another folder that takes the place of the one that was opened is not read.
    """

    def __init__(self, folder: OpenFolder, attributes: dict[str, Any], resources: ExitStack) -> None:
        """Read index and run, and check that each array that the index names is there."""
        path = folder.path
        check_version(attributes, str(path))
        self._decoded = threading.local()
        self._folder = folder
        run = self._bytes(RUN_NAME)
        index = decode_index(self._bytes(INDEX_NAME), run, str(path))
        self._holders = holders(index.records)
        for record in self._holders.values():
            if not (path / array_path(record.key) / METADATA_NAME).exists():
                raise CorruptArchiveError(f"{path}: array {array_path(record.key)!r} is missing (ARC-61)")
        self._arrays: dict[int, ZarrArray] = {}  # by row of the holder
        super().__init__(path, "zarr", index, resources)

    def _place(self, record: Record) -> Hashable:
        return self._holders[content_of(record)].row

    def _read_bytes(self, record: Record, start: int, out: Array) -> None:
        self._array(self._holders[content_of(record)]).read(start, out)

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
        """Close the folder and drop decoded chunks; files are open only while they are read."""
        super().close()
        self._arrays.clear()
        self._decoded = threading.local()


class ZarrArray:
    """An array of a store of ours, open for reading.

    Attributes:
        shape: Its shape.
        size: Number of its elements.
    """

    def __init__(self, root: OpenFolder, name: str, storage: str, *, decoded: threading.local) -> None:
        """Read the array's metadata.

        Args:
            root: Folder of the store.
            name: Path of the array in it.
            storage: numpy type code that its elements should have.
            decoded: Holds for each thread the chunk that was decoded last; shared by a store's arrays.

        Raises:
            CorruptArchiveError: There is no such array, or it is not as we write it (ARC-61).
            UnsafeFileError: A link leads out of the store.
        """
        self._folder = root.path / name
        self._root = root
        self._kind = np.dtype(storage)
        metadata = read_metadata(root.inside(self._folder / METADATA_NAME))
        root.require_unreplaced()
        self._slabs, self._is_compressed = parse_array_metadata(metadata, self._kind, str(self._folder))
        self.shape = self._slabs.shape
        self.size = math.prod(self.shape)
        self._cache = decoded

    def read(self, start: int, out: Array) -> None:
        """Fill `out` with the elements from number `start` on.

        Raises:
            CorruptArchiveError: A chunk is missing, or has not the size that it should have; or the store was
                replaced.
        """
        done = 0
        while done < out.size:
            number = self._slabs.number(start + done)
            first, count = self._slabs.range(number)
            within = start + done - first
            part = out[done : done + count - within]
            if self._is_compressed:
                part[:] = self._decoded(number)[within : within + part.size]
            else:
                self._read_plain(number, within, part)
            done += part.size

    def _read_plain(self, number: int, within: int, out: Array) -> None:
        with closing(self._open(number)) as file:
            expected = self._slabs.elements * self._kind.itemsize
            if file.size != expected:
                raise CorruptArchiveError(f"{file.path}: chunk has {file.size} bytes, expected {expected}")
            file.read_into(within * self._kind.itemsize, out)

    def _decoded(self, number: int) -> Array:
        if getattr(self._cache, "key", None) == (self, number):
            kept: Array = self._cache.chunk
            return kept
        chunk = np.empty(self._slabs.elements, self._kind)
        with closing(self._open(number)) as file:
            if file.size > 2 * chunk.nbytes + 4096:
                raise CorruptArchiveError(
                    f"{file.path}: chunk has {file.size} bytes, more than the {chunk.nbytes} that it holds"
                )
            stored = file.read(0, file.size)
            size = zstd_content_size(stored)  # the library does not fill the rest of a smaller one
            if size != chunk.nbytes:
                raise CorruptArchiveError(
                    f"{file.path}: zstd frame holds {size} bytes, expected {chunk.nbytes} (ARC-65)"
                )
            try:
                zstd_codec(f"reading {self._folder}").decode(stored, chunk.view("u1"))
            except (RuntimeError, ValueError) as error:
                raise CorruptArchiveError(f"{file.path}: is no zstd frame: {error}") from None
        self._cache.key, self._cache.chunk = (self, number), chunk
        return chunk

    def _open(self, number: int) -> InputFile:
        path = self._root.inside(self._folder / self._slabs.key(number))
        with ExitStack() as opened:
            file = opened.enter_context(closing(open_part(path, "a chunk of the array is missing")))
            self._root.require_unreplaced()
            opened.pop_all()
        return file


def _pieces(array: ZarrArray) -> Iterator[bytes]:
    """The array piece by piece, so that nothing is allocated for bytes that are not there."""
    for start in range(0, array.size, BLOCK_BYTES):
        out = np.empty(min(BLOCK_BYTES, array.size - start), np.uint8)
        array.read(start, out)
        yield out.tobytes()
