"""One array of a zarr v3 store of ours: chunks that are flat ranges, each a file of its own.

Reading does not go through the zarr library, which takes a lost chunk for one of zeros; here it is an error.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    UnsafeFileError,
    abbreviate,
    missing_package,
)
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


class Slabs:
    """How an array is cut: along one axis, below leading axes of chunk size 1, into flat ranges (ARC-52)."""

    def __init__(self, shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
        self.shape = shape
        self.chunk = chunk
        axis = next((i for i, n in enumerate(chunk) if n != 1), max(len(chunk) - 1, 0))
        self._lead = shape[:axis]
        self._behind = len(shape) - axis - 1
        self._count = shape[axis] if shape else 1  # along the axis
        self._step = chunk[axis] if chunk else 1
        self._row = math.prod(shape[axis + 1 :])
        self.are_flat = chunk[axis + 1 :] == tuple(max(n, 1) for n in shape[axis + 1 :])
        self.elements = math.prod(chunk)  # of a whole chunk
        self.chunks = math.prod(self._lead) * -(-self._count // self._step) if math.prod(shape) else 0

    @classmethod
    def cut(cls, shape: tuple[int, ...], itemsize: int, limit: int) -> Slabs:
        """Cut an array so that no chunk is above `limit` bytes and those along the axis are about equal."""
        chunk = [max(n, 1) for n in shape]
        row = itemsize * math.prod(chunk)
        for axis, count in enumerate(chunk):
            if row <= limit:
                break
            row //= count
            fitting = max(limit // row, 1)
            chunk[axis] = -(-count // -(-count // fitting))
            if fitting > 1:
                break
        return cls(shape, tuple(chunk))

    def range(self, number: int) -> tuple[int, int]:
        """First flat element of a chunk, and how many it has; a last chunk is filled up behind them."""
        lead, step = divmod(number, -(-self._count // self._step))
        first = step * self._step
        inside = min(self._step, self._count - first)
        return (lead * self._count + first) * self._row, inside * self._row

    def number(self, element: int) -> int:
        """The chunk that holds a flat element."""
        lead, rest = divmod(element, self._count * self._row)
        return lead * -(-self._count // self._step) + rest // (self._step * self._row)

    def key(self, number: int) -> str:
        """The chunk's path below the array, in the default encoding of zarr v3."""
        if not self.shape:
            return "c"
        lead, step = divmod(number, -(-self._count // self._step))
        at = [int(i) for i in np.unravel_index(lead, self._lead)] if self._lead else []
        return "/".join(map(str, ["c", *at, step, *[0] * self._behind]))


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
    for number, chunk in enumerate(_chunks(slabs, blocks, kind)):
        path = folder / slabs.key(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(chunk.view("u1")) if encode else chunk.view("u1").data)
    (folder / METADATA_NAME).write_bytes(to_json(_metadata(slabs, kind, dtype, compress=compress)))


def _chunks(slabs: Slabs, blocks: Iterable[Array], kind: np.dtype[Any]) -> Iterator[Array]:
    """Whole chunks, in order, in one reused buffer, from blocks of any sizes."""
    if not slabs.chunks:
        return
    buffer = np.zeros(slabs.elements, kind)
    number = filled = 0
    for block in blocks:
        done = 0
        while done < block.size:
            count = slabs.range(number)[1]
            part = block[done : done + count - filled]
            buffer[filled : filled + part.size] = part
            filled += part.size
            done += part.size
            if filled == count:
                buffer[filled:] = 0
                yield buffer
                number, filled = number + 1, 0


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

    def __init__(self, root: Path, name: str, storage: str, *, decoded: threading.local) -> None:
        """Read the array's metadata.

        Args:
            root: Folder of the store.
            name: Path of the array in it.
            storage: numpy type code that its elements should have.
            decoded: Holds for each thread the chunk that was decoded last; shared by a store's arrays.

        Raises:
            CorruptArchiveError: There is no such array, or it is not as we write it (ARC-52).
            UnsafeFileError: A link leads out of the store.
        """
        self._folder = root / name
        self._root = os.path.realpath(root)
        self._kind = np.dtype(storage)
        metadata = read_metadata(self._inside(METADATA_NAME))
        self._slabs, self._is_compressed = _layout(metadata, self._kind, str(self._folder))
        self.shape = self._slabs.shape
        self.size = math.prod(self.shape)
        self._cache = decoded

    def read(self, start: int, out: Array) -> None:
        """Fill `out` with the elements from number `start` on.

        Raises:
            CorruptArchiveError: A chunk is missing, or has not the size that it should have.
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
                    f"{file.path}: compressed chunk has {file.size} bytes, expected about {chunk.nbytes} or less"
                )
            stored = file.read(0, file.size)
            try:
                decoded = _zstd(f"reading {self._folder}").decode(stored, chunk.view("u1"))
            except (RuntimeError, ValueError) as error:
                raise CorruptArchiveError(f"{file.path}: is no chunk of {chunk.nbytes} bytes: {error}") from None
            if len(decoded) != chunk.nbytes:
                raise CorruptArchiveError(
                    f"{file.path}: chunk has {len(decoded)} bytes, expected {chunk.nbytes}"
                )
        self._cache.key, self._cache.chunk = (self, number), chunk
        return chunk

    def _open(self, number: int) -> InputFile:
        return _open(self._inside(self._slabs.key(number)), "a chunk of the array is missing")

    def _inside(self, name: str) -> Path:
        path = self._folder / name
        if not os.path.realpath(path).startswith(self._root + os.sep):
            raise UnsafeFileError(f"{path}: is a link to a file outside of {self._root}")
        return path


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
    chunk = grid["configuration"].get("chunk_shape") if _has_configuration(grid) else None
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
            f"{MAX_CHUNK_BYTES} bytes (ARC-52)"
        )
    codecs = metadata.get("codecs")
    compressed = isinstance(codecs, list) and len(codecs) == 2 and _name(codecs[1]) == "zstd"
    plain = codecs[:1] if compressed and isinstance(codecs, list) else codecs
    expected = [_BYTES] if kind.itemsize > 1 else [_SINGLE_BYTES]
    if metadata.get("data_type") != kind.name or (plain != expected and plain != [_BYTES]):
        raise CorruptArchiveError(
            f"{source}: holds {abbreviate(repr(metadata.get('data_type')))} by codecs "
            f"{abbreviate(repr(codecs))}, expected {kind.name} as bytes or zstd (ARC-52)"
        )
    if metadata.get("chunk_key_encoding") != _KEYS or metadata.get("storage_transformers", []) != []:
        raise CorruptArchiveError(f"{source}: chunk names are not in the default encoding (ARC-52)")
    return slabs, compressed


def _has_configuration(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("configuration"), dict)


def _name(codec: object) -> object:
    return codec.get("name") if isinstance(codec, dict) else None


def _zstd(purpose: str) -> Any:
    try:
        from numcodecs.zstd import Zstd
    except ImportError:
        raise missing_package(purpose, "numcodecs", extra="zarr") from None
    return Zstd(level=_LEVEL)
