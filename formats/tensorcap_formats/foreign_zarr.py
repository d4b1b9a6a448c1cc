"""zarr stores from elsewhere, versions 2 and 3, through the zarr library.

What is there is found from the metadata documents alone; the library opens an array when it is first read.
A chunk without a file is read as the fill value, as the format says, and `tcap check` tells how many there are.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, Array, DType
from tensorcap_formats.errors import (
    CorruptArchiveError,
    ReadError,
    TensorcapError,
    UnsafeFileError,
    abbreviate,
    missing_package,
)
from tensorcap_formats.expansion import check_expansion
from tensorcap_formats.foreign import ForeignArchive, ForeignTensor
from tensorcap_formats.index import check_shape
from tensorcap_formats.slabs import read_flat
from tensorcap_formats.zarr_array import METADATA_NAME, read_metadata

_BAND_BYTES: Final = 64 * 1024 * 1024  # kept decoded for each thread, since a chunk serves many small reads
_MAX_DEPTH: Final = 64
_LIMIT_CHUNKS: Final = 2**31


def open_foreign_zarr(path: Path) -> Archive:
    """Open all arrays of numbers below a folder.

    Raises:
        UnsafeFileError: A link leads out of the folder, or an array is stored by pickle.
        CorruptArchiveError: A metadata document makes no sense.
        MissingPackageError: zarr is not installed.
    """
    try:
        import zarr  # noqa: F401  # found missing now, not at the first read
    except ImportError:
        raise missing_package(f"reading {path}", "zarr", extra="zarr") from None
    cache = threading.local()
    tensors = []
    for folder, metadata in _arrays(path):
        name = folder.relative_to(path).as_posix() if folder != path else path.stem
        array = _ForeignArray(folder, metadata, cache)
        tensors.append(
            ForeignTensor(name, array.dtype, array.shape, array.read, partial(array.missing_chunks))
        )
    return ForeignArchive(path, "zarr", tensors, resources=ExitStack())


def _arrays(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and metadata of each array; also looks for links out of the store."""
    home = os.path.realpath(root) + os.sep
    for folder, folders, files in os.walk(root):
        if folder.count(os.sep) - str(root).count(os.sep) > _MAX_DEPTH:
            raise CorruptArchiveError(f"{root}: has groups more than {_MAX_DEPTH} deep")
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path) and not os.path.realpath(path).startswith(home):
                raise UnsafeFileError(f"{path}: is a link to a file outside of {root}")
        for name in (METADATA_NAME, ".zarray"):
            if name in files:
                metadata = read_metadata(Path(folder, name))
                if metadata.get("node_type", "array") == "array":
                    yield Path(folder), metadata


class _ForeignArray:
    """One array: what its metadata say, and its elements through the library."""

    def __init__(self, folder: Path, metadata: dict[str, Any], cache: threading.local) -> None:
        self._folder = folder
        self._metadata = metadata
        self._cache = cache
        self._lock = threading.Lock()
        self._opened: Any = None
        where = str(folder)
        if _uses_pickle(metadata):
            raise UnsafeFileError(
                f"{where}: its chunks are pickles, and reading a pickle may run code",
                hint="Convert it to numbers with the program that wrote it.",
            )
        version = metadata.get("zarr_format")
        written = metadata.get("data_type" if version == 3 else "dtype")
        self.dtype, self._in_library = _dtype(written, where)
        shape = metadata.get("shape")
        check_shape(shape, self.dtype.itemsize, where)
        self.shape: tuple[int, ...] = tuple(shape)  # type: ignore[arg-type]  # check_shape took it
        if self._in_library != written and metadata.get("fill_value") not in (0, 0.0, None):
            raise ReadError(f"{where}: {self.dtype.name} with a fill value that is not zero is not supported")

    def read(self, start: int, out: Array) -> None:
        """Fill `out` with the elements from number `start` on."""
        try:
            array = self._array()
            rows = self._band_rows(array)
            if not rows:
                read_flat(array, self.shape, start, out)
                return
            band_size = rows * math.prod(self.shape[1:])
            done = 0
            while done < out.size:
                number, within = divmod(start + done, band_size)
                band = self._band(array, number, rows)
                part = out[done : done + band.size - within]
                part[:] = band[within : within + part.size]
                done += part.size
        except TensorcapError:
            raise
        except Exception as error:  # codecs of many libraries: each has errors of its own
            raise CorruptArchiveError(
                f"{self._folder}: cannot be decoded: {abbreviate(str(error)) or type(error).__name__}"
            ) from error

    def missing_chunks(self) -> str | None:
        """Say how many chunks have no file, if any."""
        array = self._array()
        if array.nchunks > _LIMIT_CHUNKS:
            return f"claims to have {array.nchunks} chunks"
        missing = array.nchunks - array.nchunks_initialized
        if not missing:
            return None
        return f"{missing} of {array.nchunks} chunks have no file and read as {array.fill_value!r}"

    def _array(self) -> Any:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> Any:
        import zarr
        from zarr.storage import LocalStore, StorePath

        kind = "data_type" if self._metadata.get("zarr_format") == 3 else "dtype"
        metadata: Any = {**self._metadata, kind: self._in_library}
        if self._in_library != self._metadata.get(kind):
            metadata["fill_value"] = 0
        place = StorePath(LocalStore(self._folder, read_only=True))
        array = zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=place))
        chunk = math.prod(array.shards or array.chunks) * self.dtype.itemsize
        stored = sum(p.stat().st_size for p in self._folder.rglob("*") if p.is_file())
        check_expansion(stored, chunk, str(self._folder))
        return array

    def _band_rows(self, array: Any) -> int:
        """How many rows of the first axis to keep decoded; 0 where one chunk's are too many."""
        if not self.shape:
            return 0
        rows: int = min((array.shards or array.chunks)[0], self.shape[0])
        return rows if rows * math.prod(self.shape[1:]) * self.dtype.itemsize <= _BAND_BYTES else 0

    def _band(self, array: Any, number: int, rows: int) -> Array:
        if getattr(self._cache, "key", None) == (self, number):
            kept: Array = self._cache.band
            return kept
        band = np.asarray(array[number * rows : (number + 1) * rows]).reshape(-1)
        band = band.astype(self.dtype.storage, copy=False) if self.dtype.is_native else band.view(self.dtype.storage)
        self._cache.key, self._cache.band = (self, number), band
        return band


def _dtype(written: object, where: str) -> tuple[DType, object]:
    """Logical dtype, and the type by which the library reads it: it does not know bfloat16 and float8."""
    if isinstance(written, str):
        if written in DTYPES:  # version 3; and version 2 as tensorstore writes what numpy has not
            logical = DTYPES[written]
            if logical.is_native:
                return logical, written
            storage = np.dtype(logical.storage)
            return logical, storage.name
        try:
            kind = np.dtype(written) if len(written) <= 4 else None
        except TypeError:
            kind = None
        if kind is not None and kind.name in DTYPES and kind.kind in "biufc":
            return DTYPES[kind.name], written
    raise ReadError(
        f"{where}: holds {abbreviate(repr(written))}, expected numbers",
        hint="Leave the array out, or convert it to numbers.",
    )


def _uses_pickle(value: object) -> bool:
    """Whether a codec anywhere in the metadata is numcodecs' pickle, which runs code when it decodes."""
    if isinstance(value, dict):
        named = (value.get("id"), value.get("name"))
        if any(isinstance(name, str) and name.rpartition(".")[2] == "pickle" for name in named):
            return True
        return any(map(_uses_pickle, value.values()))
    return isinstance(value, list) and any(map(_uses_pickle, value))
