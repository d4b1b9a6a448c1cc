"""Metadata documents and names of the arrays in a zarr v3 store of ours (ARC-61 to ARC-66).

An array has chunks that are flat ranges of its elements, each in a file of its own.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, abbreviate, missing_package
from tensorcap_formats.flat_arrays import Slabs
from tensorcap_formats.folder import refuse_link_out
from tensorcap_formats.index import decode_json, parse_shape
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.keys import Key

if TYPE_CHECKING:
    import numpy as np

METADATA_NAME: Final = "zarr.json"
INDEX_NAME: Final = "index"
RUN_NAME: Final = "run"
MAX_METADATA_BYTES: Final = 16 * 1024 * 1024
MAX_CHUNK_BYTES: Final = 16 * 1024 * 1024
_LEVEL: Final = 3
_MAX_NAME_BYTES: Final = 255  # of a file, on every file system in use

_BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_SINGLE_BYTES: Final = {"name": "bytes"}
_ZSTD: Final = {"name": "zstd", "configuration": {"level": _LEVEL, "checksum": False}}
_KEYS: Final = {"name": "default", "configuration": {"separator": "/"}}


def array_metadata(slabs: Slabs, kind: np.dtype[Any], dtype: str, *, compress: bool) -> dict[str, Any]:
    """Build the metadata document of an array of ours.

    Args:
        slabs: Its shape and chunks.
        kind: numpy dtype of its stored elements.
        dtype: Logical dtype, kept as an attribute if zarr has none like it.
        compress: Whether the chunks are compressed by zstd.
    """
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


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a metadata document of a zarr store.

    Raises:
        CorruptArchiveError: It is missing, absurdly long, or no JSON object.
        UnsafeFileError: It is a link that leads out of its folder.
    """
    refuse_link_out(path, path.parent)
    with closing(open_part(path, "metadata of the array is missing")) as file:
        return decode_json(file.read_all(MAX_METADATA_BYTES), str(path))


def open_part(path: Path, what: str) -> InputFile:
    """Open a file that a store must have.

    Raises:
        CorruptArchiveError: It is missing; `what` says so.
    """
    try:
        return InputFile(path)
    except NotAnArchiveError:
        raise CorruptArchiveError(f"{path}: {what}") from None


def parse_array_metadata(metadata: dict[str, Any], kind: np.dtype[Any], source: str) -> tuple[Slabs, bool]:
    """Parse what `array_metadata` built.

    Args:
        metadata: The document.
        kind: numpy dtype that the stored elements should have.
        source: Of the array, for messages.

    Returns:
        Shape and chunks, and whether the chunks are compressed.

    Raises:
        CorruptArchiveError: The document is not as we write it (ARC-61).
    """
    shape = parse_shape(metadata.get("shape"), kind.itemsize, source)
    grid = metadata.get("chunk_grid")
    configuration = grid.get("configuration") if isinstance(grid, dict) else None
    chunk = configuration.get("chunk_shape") if isinstance(configuration, dict) else None
    good_chunk = (
        isinstance(chunk, list)
        and len(chunk) == len(shape)
        and all(type(n) is int and n > 0 for n in chunk)
        and math.prod(chunk) * kind.itemsize <= MAX_CHUNK_BYTES
    )
    slabs = Slabs(shape, tuple(chunk)) if good_chunk else None  # type: ignore[arg-type]  # it is a list
    if slabs is None or not slabs.are_flat:
        raise CorruptArchiveError(
            f"{source}: chunk grid is {abbreviate(repr(grid))}, expected slabs of at most "
            f"{MAX_CHUNK_BYTES} bytes (ARC-65)"
        )
    codecs = metadata.get("codecs")
    compressed = isinstance(codecs, list) and len(codecs) == 2 and _name(codecs[1]) == "zstd"
    plain = codecs[:1] if compressed and isinstance(codecs, list) else codecs
    expected = [_BYTES] if kind.itemsize > 1 else [_SINGLE_BYTES]
    if metadata.get("data_type") != kind.name or (plain != expected and plain != [_BYTES]):
        raise CorruptArchiveError(
            f"{source}: holds {abbreviate(repr(metadata.get('data_type')))} by codecs "
            f"{abbreviate(repr(codecs))}, expected {kind.name} as bytes or zstd (ARC-65)"
        )
    if metadata.get("chunk_key_encoding") != _KEYS or metadata.get("storage_transformers", []) != []:
        raise CorruptArchiveError(f"{source}: chunk names are not in the default encoding (ARC-65)")
    return slabs, compressed


def _name(codec: object) -> object:
    return codec.get("name") if isinstance(codec, dict) else None


def zstd_codec(purpose: str) -> Any:
    """The codec of compressed chunks.

    Raises:
        MissingPackageError: numcodecs is not installed; `purpose` says what needs it.
    """
    try:
        from numcodecs.zstd import Zstd
    except ImportError:
        raise missing_package(purpose, "numcodecs", extra="zarr") from None
    return Zstd(level=_LEVEL)


def array_path(key: Key) -> str:
    """Path of an array in the store: `Key.path`, with names changed that a file system or zarr refuses."""
    return "/".join(map(_component, key.path.split("/")))


def _component(name: str) -> str:
    if name == METADATA_NAME or name.startswith("__"):  # taken by zarr
        name = f"%{ord(name[0]):02X}{name[1:]}"
    encoded = name.encode()
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    return f"{encoded[:200].decode(errors='ignore')}~{digest}"
