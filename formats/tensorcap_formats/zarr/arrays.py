"""One array of a zarr v3 store of ours: chunks that are flat ranges, each a file of its own.

Reading does not go through the zarr library, which takes a lost chunk for one of zeros; here it is an error.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    abbreviate,
    missing_package,
)
from tensorcap_formats.flat_arrays import Slabs
from tensorcap_formats.folder import OpenFolder
from tensorcap_formats.index import check_shape, from_json, to_json
from tensorcap_formats.input_file import InputFile

METADATA_NAME: Final = "zarr.json"
MAX_METADATA_BYTES: Final = 16 * 1024 * 1024
MAX_CHUNK_BYTES: Final = 16 * 1024 * 1024
_COMPRESSED_CHUNK_BYTES: Final = 4 * 1024 * 1024  # a reader keeps one, decoded, for each thread
_LEVEL: Final = 3

_BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_SINGLE_BYTES: Final = {"name": "bytes"}
_ZSTD: Final = {"name": "zstd", "configuration": {"level": _LEVEL, "checksum": False}}
_KEYS: Final = {"name": "default", "configuration": {"separator": "/"}}


def write_array(
    folder: Path, blocks: Iterable[Array], shape: tuple[int, ...], storage: str, dtype: str, *, compress: bool
) -> None:
    """Write one array.

    Args:
        folder: Of the array; must not exist, its parent must.
        blocks: Its elements in C order, one-dimensional.
        shape: Its shape.
        storage: numpy type code of its elements.
        dtype: Logical dtype, kept as an attribute for other readers where zarr has none like it.
        compress: Use zstd.
    """
    kind = np.dtype(storage)
    slabs = Slabs.cut(shape, kind.itemsize, _COMPRESSED_CHUNK_BYTES if compress else MAX_CHUNK_BYTES)
    encode = _zstd("writing a compressed .zarr archive").encode if compress else None
    folder.mkdir()
    for number, chunk in enumerate(slabs.fill(blocks, kind)):
        path = folder / slabs.key(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(chunk.view("u1")) if encode else chunk.view("u1").data)
    (folder / METADATA_NAME).write_bytes(to_json(_metadata(slabs, kind, dtype, compress=compress)))


def _metadata(slabs: Slabs, kind: np.dtype[Any], dtype: str, *, compress: bool) -> dict[str, Any]:
    fill: dict[str, Any] = {"b": False, "f": 0.0, "c": [0.0, 0.0]}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": slabs.shape,
        "data_type": kind.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": slabs.chunk}},
        "chunk_key_encoding": _KEYS,
        "fill_value": fill.get(kind.kind, 0),
        "codecs": [_BYTES if kind.itemsize > 1 else _SINGLE_BYTES, *([_ZSTD] if compress else [])],
        "attributes": {} if kind.name == dtype else {"dtype": dtype},
        "storage_transformers": [],
    }


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
        self._slabs, self._is_compressed = _layout(metadata, self._kind, str(self._folder))
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
            size = _zstd_content_size(stored)  # the library leaves what a smaller one does not fill as it was
            if size != chunk.nbytes:
                raise CorruptArchiveError(
                    f"{file.path}: zstd frame holds {size} bytes, expected {chunk.nbytes} (ARC-61)"
                )
            try:
                _zstd(f"reading {self._folder}").decode(stored, chunk.view("u1"))
            except (RuntimeError, ValueError) as error:
                raise CorruptArchiveError(f"{file.path}: is no zstd frame: {error}") from None
        self._cache.key, self._cache.chunk = (self, number), chunk
        return chunk

    def _open(self, number: int) -> InputFile:
        path = self._root.inside(self._folder / self._slabs.key(number))
        with ExitStack() as opened:
            file = opened.enter_context(closing(_open(path, "a chunk of the array is missing")))
            self._root.require_unreplaced()
            opened.pop_all()
        return file


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a metadata document of a zarr store.

    Raises:
        CorruptArchiveError: It is missing, absurdly long, or no JSON object.
    """
    with closing(_open(path, "metadata of the array is missing")) as file:
        if file.size > MAX_METADATA_BYTES:
            raise CorruptArchiveError(f"{path}: has {file.size} bytes, expected at most {MAX_METADATA_BYTES}")
        return from_json(file.read(0, file.size), str(path))


def _open(path: Path, what: str) -> InputFile:
    try:
        return InputFile(path)
    except NotAnArchiveError:
        raise CorruptArchiveError(f"{path}: {what}") from None


def _layout(metadata: dict[str, Any], kind: np.dtype[Any], source: str) -> tuple[Slabs, bool]:
    """Shape, chunks and compression, if they are as `write_array` writes them."""
    shape = metadata.get("shape")
    check_shape(shape, kind.itemsize, source)
    grid = metadata.get("chunk_grid")
    configuration = grid.get("configuration") if isinstance(grid, dict) else None
    chunk = configuration.get("chunk_shape") if isinstance(configuration, dict) else None
    good_chunk = (
        isinstance(chunk, list)
        and len(chunk) == len(shape)  # type: ignore[arg-type]  # check_shape took it
        and all(type(n) is int and n > 0 for n in chunk)
        and math.prod(chunk) * kind.itemsize <= MAX_CHUNK_BYTES
    )
    slabs = Slabs(tuple(shape), tuple(chunk)) if good_chunk else None  # type: ignore[arg-type]
    if slabs is None or not slabs.are_flat:
        raise CorruptArchiveError(
            f"{source}: chunk grid is {abbreviate(repr(grid))}, expected slabs of at most "
            f"{MAX_CHUNK_BYTES} bytes (ARC-61)"
        )
    codecs = metadata.get("codecs")
    compressed = isinstance(codecs, list) and len(codecs) == 2 and _name(codecs[1]) == "zstd"
    plain = codecs[:1] if compressed and isinstance(codecs, list) else codecs
    expected = [_BYTES] if kind.itemsize > 1 else [_SINGLE_BYTES]
    if metadata.get("data_type") != kind.name or (plain != expected and plain != [_BYTES]):
        raise CorruptArchiveError(
            f"{source}: holds {abbreviate(repr(metadata.get('data_type')))} by codecs "
            f"{abbreviate(repr(codecs))}, expected {kind.name} as bytes or zstd (ARC-61)"
        )
    if metadata.get("chunk_key_encoding") != _KEYS or metadata.get("storage_transformers", []) != []:
        raise CorruptArchiveError(f"{source}: chunk names are not in the default encoding (ARC-61)")
    return slabs, compressed


def _name(codec: object) -> object:
    return codec.get("name") if isinstance(codec, dict) else None


def _zstd(purpose: str) -> Any:
    try:
        from numcodecs.zstd import Zstd  # type: ignore[import-untyped]  # has no types
    except ImportError:
        raise missing_package(purpose, "numcodecs", extra="zarr") from None
    return Zstd(level=_LEVEL)


def _zstd_content_size(frame: bytes) -> int | None:
    """How many bytes a zstd frame says that it holds (RFC 8878, 3.1.1.1); None where it does not say."""
    if not frame.startswith(b"\x28\xb5\x2f\xfd") or len(frame) < 9:
        return None
    descriptor = frame[4]
    is_single = descriptor >> 5 & 1
    width = (is_single, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(frame[at : at + width], "little") + (256 if width == 2 else 0)
    return size if width else None
