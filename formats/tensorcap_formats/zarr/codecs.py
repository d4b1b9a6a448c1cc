"""Codecs of chunks that decode to the size of their elements, and to no more.

numcodecs decodes a chunk to as much as comes of it, or as it says: 16 kB of zstd to 512 MiB, whatever the
shape of the array. What each codec should give is known from the metadata: the elements of a chunk, in the
type that the filters before it leave. So the sizes are computed in the order in which a chunk is encoded, and
what decompresses is replaced by what stops there. A codec whose result has no known size is refused.
"""

from __future__ import annotations

import asyncio
import bz2
import lzma
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numcodecs
import numpy as np
from numcodecs.abc import Codec
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import ShardingCodec

from tensorcap_formats.decompression import ZSTD_MAGIC, blosc_content_size, decompressed, zstd_content_size
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError, ReadError, abbreviate
from tensorcap_formats.input_file import check_expansion

_INDEX_ENTRY_BYTES: Final = 16  # of each chunk in the index of a shard
_LZMA_BYTES: Final = 256 * 1024 * 1024  # of memory to decode a chunk, which says how much it needs
_CHECKSUMS: Final = ("crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3")
_SAME_SIZE: Final = ("bytes", "transpose", "shuffle", "bitround")
# Where the types of numbers before and behind a filter are in its configuration, if they are there.
_FILTERS: Final = {
    "delta": ("dtype", "astype"),
    "fixedscaleoffset": ("dtype", "astype"),
    "quantize": ("dtype", "astype"),
    "astype": ("decode_dtype", "encode_dtype"),
}
_REWRITE: Final = "Write it again by zstd alone, or without compression."


def with_bounded_codecs(metadata: dict[str, Any], itemsize: int, stored: int, where: str) -> Any:
    """The metadata of an array with bounded codecs in the place of those that decompress, in shards too.

    Args:
        metadata: As the array's file has it.
        itemsize: Bytes of an element of the array.
        stored: Bytes of all files of the array.
        where: The array, for messages.

    Raises:
        ReadError: A codec's result has no known size.
        CorruptArchiveError: The codecs contradict each other, or a shard is smaller than its index.
        UnsafeFileError: Too much comes of what is stored.
    """
    sizes = _Sizes(itemsize, stored, where)
    if metadata.get("zarr_format") == 3:
        shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        return {**metadata, "codecs": sizes.bounded(metadata["codecs"], shape)}
    filters, compressor = metadata.get("filters") or [], metadata.get("compressor")
    codecs = sizes.bounded([*filters, *([compressor] if compressor else [])], metadata["chunks"])
    return {
        **metadata,
        "filters": codecs[: len(filters)] or None,
        "compressor": codecs[-1] if compressor else None,
    }


@dataclass(frozen=True)
class _Sizes:
    """The sizes that the codecs of one array should decode to."""

    itemsize: int
    stored: int
    where: str

    def bounded(self, codecs: list[Any], shape: list[int]) -> list[Any]:
        """The codecs of chunks of a shape, in the order of encoding.

        1. The size begins with that of the elements.
        2. A filter changes the bytes of an element, a checksum adds four to all of them.
        3. What compresses is bounded by the size so far; behind it no size is known.
        """
        elements, itemsize = math.prod(shape), self.itemsize
        size: int | None = elements * itemsize
        bounded: list[Any] = []
        for codec in codecs:
            name, options = _name_and_options(codec)
            if name == "sharding_indexed":
                codec, size = self._shard(options, shape), None
            elif name in _DECODERS:
                if size is None:
                    raise ReadError(f"{self.where}: its chunks are compressed twice", hint=_REWRITE)
                decoder = _Bounded(name, options, size, f"{self.where}: a chunk")
                codec, size = _BoundedCodec(decoder) if "name" in codec else decoder, None
            elif name in _CHECKSUMS:
                size = size and size + 4
            elif name == "packbits" and itemsize == 1 and not bounded:  # not of bits of bits
                size = elements = -(-elements // 8) + 1
            elif name in _FILTERS:
                itemsize = self._filtered(name, options, itemsize)
                size = elements * itemsize
            elif name not in _SAME_SIZE:
                named = abbreviate(repr(name))
                raise ReadError(
                    f"{self.where}: its chunks are by codec {named}, of whose result the size is not known",
                    hint=_REWRITE,
                )
            check_expansion(self.stored, size or 0, f"{self.where}: a chunk")
            bounded.append(codec)
        return bounded

    def _filtered(self, name: str, options: Mapping[str, Any], itemsize: int) -> int:
        """Bytes of an element behind a filter of elements of so many bytes."""
        before, behind = (options.get(field) for field in _FILTERS[name])
        types = [np.dtype(kind) for kind in (before, behind) if kind is not None]
        expected = types[0].itemsize if before is not None else itemsize
        if itemsize != expected or any(kind.kind not in "biufc" for kind in types):
            raise CorruptArchiveError(
                f"{self.where}: filter {name!r} is of elements of type {abbreviate(repr(before))} and gives "
                f"{abbreviate(repr(behind))}, expected numbers of {itemsize} bytes"
            )
        return types[-1].itemsize if types else expected

    def _shard(self, options: Mapping[str, Any], shape: list[int]) -> _BoundedShard:
        """The codec of shards of a shape."""
        inner = options["chunk_shape"]
        index = math.prod(shape) // math.prod(inner) * _INDEX_ENTRY_BYTES
        if index > self.stored:  # the library makes an object of each chunk before it looks at the index
            raise CorruptArchiveError(
                f"{self.where}: the index of a shard has {index} bytes, but all of its files {self.stored}"
            )
        codecs = self.bounded(options["codecs"], inner)
        return _BoundedShard(**{**options, "codecs": codecs}, stored=self.stored, where=self.where)


def _name_and_options(codec: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and configuration of a codec of version 2 or 3."""
    if "name" in codec:
        return codec["name"].removeprefix("numcodecs."), codec.get("configuration") or {}
    return codec["id"], codec


class _Bounded(Codec):  # type: ignore[misc]  # numcodecs has no types
    """A codec that decompresses a chunk to so many bytes; of version 2.

    Args:
        name: Of the codec, in numcodecs.
        options: Its configuration.
        size: Bytes of a chunk.
        where: The chunk, for messages.
    """

    codec_id = "bounded"  # zarr wants one of the class

    def __init__(self, name: str, options: Mapping[str, Any], size: int, where: str) -> None:
        self._decode = _DECODERS[name]
        self._options = options
        self._size = size
        self._where = where

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a chunk; `out` is not used.

        Raises:
            CorruptArchiveError: Another size comes of it.
        """
        chunk = np.frombuffer(buf, np.uint8)
        try:
            decoded = self._decode(chunk, self._size, self._options)
        except (OSError, EOFError, RuntimeError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise CorruptArchiveError(f"{self._where}: cannot be decoded: {error}") from None
        if len(decoded) != self._size:
            more = "more" if len(decoded) > self._size else len(decoded)
            raise CorruptArchiveError(f"{self._where}: decodes to {more}, expected {self._size} bytes")
        return decoded

    def encode(self, buf: Any) -> Any:
        """Nothing is written."""
        raise NotImplementedError


@dataclass(frozen=True)
class _BoundedCodec(BytesBytesCodec):
    """The same of version 3."""

    decoder: _Bounded
    is_fixed_size = False

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        decoded = await asyncio.to_thread(self.decoder.decode, chunk_data.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(decoded)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """What is compressed has no size that is known before."""
        raise NotImplementedError


@dataclass(frozen=True)
class _BoundedShard(ShardingCodec):
    """A shard whose chunks do not share their bytes: the library copies those of each."""

    stored: int = 0
    where: str = ""

    def __init__(self, *, stored: int, where: str, **options: Any) -> None:
        super().__init__(**options)
        object.__setattr__(self, "stored", stored)
        object.__setattr__(self, "where", where)

    async def _decode_shard_index(self, index_bytes: Any, chunks_per_shard: tuple[int, ...]) -> Any:
        index = await super()._decode_shard_index(index_bytes, chunks_per_shard)
        entries = index.offsets_and_lengths.reshape(-1, 2)
        lengths = entries[(entries != np.iinfo(np.uint64).max).all(1), 1]
        total = sum(map(int, lengths))  # of any size
        if total > self.stored:
            raise CorruptArchiveError(
                f"{self.where}: the chunks of a shard have {total} bytes, but all of its files {self.stored}"
            )
        return index


def _zlib(chunk: Array, size: int, options: Mapping[str, Any]) -> bytes:
    return decompressed(zlib.decompressobj(), chunk, size)


def _gzip(chunk: Array, size: int, options: Mapping[str, Any]) -> bytes:
    return decompressed(zlib.decompressobj(16 + zlib.MAX_WBITS), chunk, size)


def _bz2(chunk: Array, size: int, options: Mapping[str, Any]) -> bytes:
    return decompressed(bz2.BZ2Decompressor(), chunk, size)


def _lzma(chunk: Array, size: int, options: Mapping[str, Any]) -> bytes:
    form, filters = options.get("format", lzma.FORMAT_XZ), options.get("filters")
    if form != lzma.FORMAT_RAW:
        return decompressed(lzma.LZMADecompressor(form, memlimit=_LZMA_BYTES), chunk, size)
    if any(each.get("dict_size", 0) > _LZMA_BYTES for each in filters or ()):
        raise ValueError(f"it needs more than {_LZMA_BYTES} bytes of memory")
    return decompressed(lzma.LZMADecompressor(form, filters=filters), chunk, size)


def _zstd(chunk: Array, size: int, options: Mapping[str, Any]) -> Array:
    head = chunk[:32].tobytes()
    declared = zstd_content_size(head)
    is_other = declared not in (None, size)  # of less the library leaves the rest as it is
    if not head.startswith(ZSTD_MAGIC) or is_other:
        raise ValueError(f"its zstd frame says that {declared} bytes come of it, expected {size}")
    return _into(numcodecs.Zstd(), chunk, size)


def _lz4(chunk: Array, size: int, options: Mapping[str, Any]) -> Array:
    declared = int.from_bytes(chunk[:4].tobytes(), "little")
    if declared != size:
        raise ValueError(f"it says that {declared} bytes come of it, expected {size}")
    return _into(numcodecs.LZ4(), chunk, size)


def _blosc(chunk: Array, size: int, options: Mapping[str, Any]) -> Array:
    """Blosc; what it decodes says with what it was compressed."""
    declared = blosc_content_size(chunk.data)
    if declared != size:
        raise ValueError(f"it says that {declared} bytes come of it, expected {size}")
    return _into(numcodecs.Blosc(), chunk, size)


def _into(codec: Codec, chunk: Array, size: int) -> Array:
    """Decode into memory of the size, which the library does not leave."""
    decoded = np.empty(size, np.uint8)
    codec.decode(chunk, decoded)
    return decoded


_DECODERS: Final[Mapping[str, Callable[[Array, int, Mapping[str, Any]], Any]]] = {
    "blosc": _blosc,
    "bz2": _bz2,
    "gzip": _gzip,
    "lz4": _lz4,
    "lzma": _lzma,
    "zlib": _zlib,
    "zstd": _zstd,
}
