"""zarr stores from elsewhere, versions 2 and 3, through the zarr library.

The arrays are found by the metadata documents alone; the library opens an array when it is first read.
A chunk without a file is read as the fill value, as the format says, and `Archive.remark` counts them; an
array that has lost all its chunks is no tensor of fill values but cannot be read.
"""

from __future__ import annotations

import math
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
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
from tensorcap_formats.flat_arrays import BAND_BYTES, Bands, read_flat
from tensorcap_formats.folder import OpenFolder, refuse_link_out, walk
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import parse_shape
from tensorcap_formats.input_file import check_expansion, check_total
from tensorcap_formats.zarr.header import METADATA_NAME, read_metadata

_MAX_DEPTH: Final = 64
_MAX_MISSING: Final = 1 << 14  # chunks without a file, of all arrays: to look for one takes a millisecond
_MISSING_BY_FILE: Final = 4  # or so many for each that has one
_NUMPY_TYPE: Final = re.compile(r"[<>|](?:b1|i[1248]|u[1248]|f[248]|c8|c16)")


def open_foreign_zarr(path: Path) -> Archive:
    """Open all arrays of numbers below a folder.

    Raises:
        UnsafeFileError: A link leads out of the folder, or an array is stored by pickle.
        CorruptArchiveError: A metadata document is invalid.
        MissingPackageError: zarr is not installed.
    """
    try:
        import zarr  # noqa: F401  # to fail now, not at the first read
    except ImportError:
        raise missing_package(f"reading {path}", "zarr", extra="zarr") from None
    with ExitStack() as resources:
        store = resources.enter_context(closing(OpenFolder(path)))
        tensors, skipped = _tensors(path, store)
        return ForeignArchive(path, "zarr", tensors, resources=resources, skipped=skipped)


def _tensors(path: Path, store: OpenFolder) -> tuple[list[ForeignTensor], dict[str, str]]:
    """The arrays of numbers, and why the others are skipped."""
    bands, missing = Bands(), _MissingChunks()
    tensors, skipped = [], {}
    for folder, metadata in _arrays(path):
        name = folder.relative_to(path).as_posix() if folder != path else path.stem
        types = _dtype(metadata)
        if types is None:
            skipped[name] = (
                f"an array of {abbreviate(repr(metadata.get('data_type', metadata.get('dtype'))))}"
            )
            continue
        array = _ForeignArray(folder, metadata, *types, bands, store, missing)
        tensors.append(ForeignTensor(name, array.dtype, array.shape, array.read, array.remark))
    return tensors, skipped


def _arrays(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and metadata of each array; also looks for links out of the store."""
    for folder, folders, files in walk(root):
        if folder.count(os.sep) - str(root).count(os.sep) > _MAX_DEPTH:
            raise CorruptArchiveError(f"{root}: has groups more than {_MAX_DEPTH} deep")
        for name in (*folders, *files):
            refuse_link_out(Path(folder, name), root)
        for name in (METADATA_NAME, ".zarray"):
            if name in files:
                metadata = read_metadata(Path(folder, name))
                if _uses_pickle(metadata):
                    raise UnsafeFileError(
                        f"{folder}: its chunks are pickles, and reading a pickle may run code",
                        hint="Convert it to numbers with the program that wrote it.",
                    )
                if metadata.get("node_type", "array") == "array":
                    yield Path(folder), metadata


class _MissingChunks:
    """Counts the chunks without a file of the arrays of a store, as they are opened."""

    def __init__(self) -> None:
        self._missing = self._present = 0
        self._lock = threading.Lock()

    def add(self, chunks: int, files: int, where: Path) -> None:
        """Count those of an array of so many chunks and files, before anything looks for each.

        Raises:
            UnsafeFileError: They are too many.
        """
        with self._lock:
            self._missing += max(chunks - files, 0)
            self._present += min(chunks, files)
            limit = max(_MAX_MISSING, _MISSING_BY_FILE * self._present)
            if self._missing > limit:
                raise UnsafeFileError(
                    f"{where}: {self._missing} chunks or more have no file, in it and before it, "
                    f"expected at most {limit}",
                    hint="Write it with larger chunks, or with write_empty_chunks=True.",
                )


class _ForeignArray:
    """One array: its metadata, and its elements through the library."""

    def __init__(
        self,
        folder: Path,
        metadata: dict[str, Any],
        dtype: DType,
        storage: str,
        bands: Bands,
        store: OpenFolder,
        missing: _MissingChunks,
    ) -> None:
        self.dtype = dtype
        self._folder = folder
        self._bands = bands
        self._store = store
        self._missing = missing
        self._lock = threading.Lock()
        self._opened: Any = None
        self.shape = parse_shape(metadata.get("shape"), dtype.itemsize, str(folder))
        self._metadata = metadata
        self._stored_as = np.dtype(dtype.storage)
        if not dtype.is_native:  # the library does not know bfloat16 and float8: it reads their bits
            if metadata.get("fill_value") not in (0, None):
                raise ReadError(f"{folder}: fill value of {dtype.name} is not zero, which is not supported")
            self._metadata = {**metadata, _type_field(metadata): storage, "fill_value": 0}

    def read(self, start: int, out: Array) -> None:
        """Fill `out` with the elements from number `start` on."""
        with self._library_errors():
            array = self._array()
            rows = self._band_rows(array)
            if rows:
                load = partial(self._rows, array)
                self._bands.read(self, self.shape, rows, load, start, out)
            else:
                read_flat(array, self.shape, start, out)
            self._store.require_unreplaced()

    def remark(self) -> str:
        """Say how many chunks have no file, if any, or why the array cannot be read."""
        try:
            with self._library_errors():
                missing, total = self._missing_chunks(self._array())
        except ReadError as error:
            return str(error)
        return f"{missing} of {total} chunks are missing; the fill value was read" if missing else ""

    def _missing_chunks(self, array: Any) -> tuple[int, int]:
        """How many chunks have no file, and how many there are."""
        stored, total = array.shards or array.chunks, self._chunks(array)
        return total - array.nchunks_initialized * math.prod(array.chunks) // math.prod(stored), total

    def _chunks(self, array: Any) -> int:
        """How many chunks have a file of their own if none is missing."""
        stored = array.shards or array.chunks
        return math.prod(-(-n // s) for n, s in zip(self.shape, stored, strict=True))

    def _array(self) -> Any:
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    @contextmanager
    def _library_errors(self) -> Iterator[None]:
        """Turn what the library and its codecs raise, which is of any class, into `CorruptArchiveError`."""
        try:
            yield
        except TensorcapError:
            raise
        except Exception as error:
            raise CorruptArchiveError(
                f"{self._folder}: cannot be decoded: {abbreviate(str(error)) or type(error).__name__}"
            ) from error

    def _open(self) -> Any:
        import zarr
        from zarr.storage import LocalStore, StorePath

        from tensorcap_formats.zarr.codecs import with_bounded_codecs

        stored, files = self._stored()
        metadata = with_bounded_codecs(self._metadata, self._stored_as.itemsize, stored, str(self._folder))
        place = StorePath(LocalStore(self._folder, read_only=True))
        array = zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=place))
        self._missing.add(self._chunks(array), files, self._folder)
        missing, total = self._missing_chunks(array)
        if total and missing == total:
            raise CorruptArchiveError(
                f"{self._folder}: all of its {total} chunks are missing",
                hint="If all of it was fill value, write it with write_empty_chunks=True.",
            )
        chunk = math.prod(array.shards or array.chunks) * self.dtype.itemsize
        check_expansion(stored, chunk, str(self._folder))
        check_total(stored, math.prod(self.shape) * self.dtype.itemsize, str(self._folder))
        return array

    def _stored(self) -> tuple[int, int]:
        """Count the bytes of all files, and the files, which the library opens by name.

        Raises:
            CorruptArchiveError: There is a pipe or a device, at which it would wait, or a link to none.
            ReadError: The system refuses to open a folder, or to say what is in it.
        """
        stored = files = 0
        for folder, _, names in walk(self._folder):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.stat(path)
                except FileNotFoundError:
                    status = os.lstat(path)
                if not stat.S_ISREG(status.st_mode):
                    raise CorruptArchiveError(f"{path}: is no regular file, expected a chunk or metadata")
                stored += status.st_size
                files += 1
        return stored, files

    def _band_rows(self, array: Any) -> int:
        """How many rows of the first axis to keep decoded; 0 if one chunk's are too many."""
        if not self.shape:
            return 0
        rows: int = min((array.shards or array.chunks)[0], self.shape[0])
        return rows if rows * math.prod(self.shape[1:]) * self.dtype.itemsize <= BAND_BYTES else 0

    def _rows(self, array: Any, first: int, end: int) -> Array:
        return np.asarray(array[first:end]).reshape(-1).astype(self._stored_as, copy=False)


def _type_field(metadata: dict[str, Any]) -> str:
    return "data_type" if metadata.get("zarr_format") == 3 else "dtype"


def _dtype(metadata: dict[str, Any]) -> tuple[DType, str] | None:
    """Logical dtype, and the type of its stored elements as the metadata write types; None if no numbers."""
    written = metadata.get(_type_field(metadata))
    if not isinstance(written, str):
        return None
    if written in DTYPES:  # version 3, and version 2 as tensorstore writes what numpy has not
        storage = np.dtype(DTYPES[written].storage)
        return DTYPES[written], storage.name if metadata.get("zarr_format") == 3 else storage.str
    if not _NUMPY_TYPE.fullmatch(written) or np.dtype(written).name not in DTYPES:
        return None
    return DTYPES[np.dtype(written).name], written


def _uses_pickle(value: object) -> bool:
    """Whether a codec anywhere in the metadata is numcodecs' pickle, which runs code when it decodes."""
    if isinstance(value, dict):
        named = (value.get("id"), value.get("name"))
        if any(isinstance(name, str) and name.rpartition(".")[2] == "pickle" for name in named):
            return True
        return any(map(_uses_pickle, value.values()))
    return isinstance(value, list) and any(map(_uses_pickle, value))
