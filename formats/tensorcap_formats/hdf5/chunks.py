"""Chunks of HDF5 datasets, which must decode to the bytes of their elements before the library reads them.

The library believes a chunk: if more comes of it, it makes room for all, 512 MiB of 4 kB; if less, it hands
out what lies in memory behind it as elements.
"""

from __future__ import annotations

import bz2
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensorcap_formats.decompression import (
    blosc_content_size,
    decompressed,
    require_whole_zstd,
    zstd_content_size,
)
from tensorcap_formats.errors import CorruptArchiveError, ReadError

if TYPE_CHECKING:
    import h5py

Options = Sequence[int]

_DEFLATE: Final = 1
_SHUFFLE: Final = 2
_FLETCHER32: Final = 3
_SCALE_OFFSET: Final = 6
_BITSHUFFLE: Final = 32008
_ZSTD: Final = 32015
_STREAMS: Final[Mapping[int, Callable[[], Any]]] = {_DEFLATE: zlib.decompressobj, 307: bz2.BZ2Decompressor}
_SCALE_OFFSET_HEADER_BYTES: Final = 21


class ChunkCheck:
    """Looks at each chunk of a dataset once, before it is read."""

    def __init__(self, dataset: h5py.Dataset, source: str) -> None:
        """Find the filters.

        Args:
            dataset: In chunks.
            source: Its name, for messages.
        """
        properties = dataset.id.get_create_plist()
        self._dataset = dataset
        self._source = source
        self._filters: list[tuple[int, Options]] = [
            (number, options)
            for number, _, options, _ in map(properties.get_filter, range(properties.get_nfilters()))
        ]
        self._size = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
        self._checked: set[tuple[int, ...]] = set()
        self._are_whole = False  # all of them, which have no filter

    def require_whole(self, begin: Sequence[int], count: Sequence[int]) -> None:
        """Check the chunks of a hyperrectangle.

        Raises:
            CorruptArchiveError: More or less comes of one than its elements have.
            ReadError: A filter is of a kind whose result has no known size.
        """
        if not self._filters:
            if not self._are_whole:
                self._dataset.id.chunk_iter(lambda stored: self._require(stored.chunk_offset, stored.size))
                self._are_whole = True
            return
        steps = zip(begin, count, self._dataset.chunks, strict=True)
        for offset in product(*(range(first - first % step, first + n, step) for first, n, step in steps)):
            if offset not in self._checked:
                self._check(offset)
                self._checked.add(offset)

    def _check(self, offset: tuple[int, ...]) -> None:
        mask, data = self._dataset.id.read_direct_chunk(offset)
        if len(data) > 2 * self._size + 4096:
            raise CorruptArchiveError(
                f"{self._source}: the chunk at {list(offset)} has {len(data)} bytes, "
                f"more than the {self._size} of its elements"
            )
        filters = [one for number, one in enumerate(self._filters) if not mask >> number & 1]
        try:
            size = decoded_size(data, filters, self._size)
        except (OSError, LookupError, RuntimeError, ValueError, zlib.error) as error:
            raise CorruptArchiveError(
                f"{self._source}: the chunk at {list(offset)} cannot be decoded: {error}"
            ) from None
        if size is None:
            numbers = ", ".join(str(number) for number, _ in filters)
            raise ReadError(
                f"{self._source}: of what HDF5 filters {numbers} make of its chunks the size is not known",
                hint="Write it again by gzip alone: h5repack -f GZIP=1 OLD NEW.",
            )
        self._require(offset, size)

    def _require(self, offset: tuple[int, ...], size: int) -> None:
        if size != self._size:
            more = "more" if size > self._size else size
            raise CorruptArchiveError(
                f"{self._source}: the chunk at {list(offset)} decodes to {more}, expected {self._size} bytes"
            )


def decoded_size(data: bytes, filters: Sequence[tuple[int, Options]], expected: int) -> int | None:
    """How many bytes come of a chunk; None if that cannot be known.

    1. The filters are undone from the last to the first, as far as what the one before needs is at hand.
    2. What Python decompresses stops behind the bytes that are expected; of the others the size is read.

    Args:
        data: As stored.
        filters: Number and options of each (H5Pget_filter2), in the order of writing.
        expected: Bytes of the chunk's elements.

    Raises:
        ValueError: The chunk is damaged, as is said by one of other errors of the decompressors too.
    """
    size = len(data)
    most = expected + _SCALE_OFFSET_HEADER_BYTES
    rest: bytes | None = data
    for index in reversed(range(len(filters))):
        number, options = filters[index]
        if number == _SHUFFLE:
            rest = _unshuffled(rest, options[0]) if index and rest is not None else rest
        elif rest is None:
            return None
        elif number == _FLETCHER32:
            rest = rest[:-4]
            size = len(rest)
        elif number in _STREAMS:
            rest = decompressed(_STREAMS[number](), rest, most)
            size = len(rest)
        elif number == _SCALE_OFFSET:
            size, rest = _scale_offset_size(rest, options), None
        elif number == _BITSHUFFLE and (len(options) < 5 or not options[4]):  # not compressed
            rest = rest if index == 0 else None
        elif number == _ZSTD:
            found, rest = _zstd(rest, most)
            if found is None:
                return None
            size = found
        elif number in _SIZES:
            size, rest = _SIZES[number](rest, options), None
        else:
            return None
    return size


def _unshuffled(data: bytes, itemsize: int) -> bytes:
    """Bytes of elements in their places; the rest is behind them (H5Zshuffle.c)."""
    count = len(data) // itemsize
    whole = np.frombuffer(data, np.uint8, count * itemsize)
    return whole.reshape(itemsize, count).T.tobytes() + data[count * itemsize :]


def _scale_offset_size(data: bytes, options: Options) -> int:
    """Of integers and decimal fractions in as many bits as they need (H5Zscaleoffset.c)."""
    count, itemsize = options[2], options[4]
    bits = int.from_bytes(data[:4], "little")
    needed = _SCALE_OFFSET_HEADER_BYTES + -(-count * bits // 8)
    if bits > 8 * itemsize or len(data) < needed:
        raise ValueError(f"it has {len(data)} bytes, expected {needed} for {count} elements of {bits} bits")
    return count * itemsize


def _lzf_size(data: bytes, options: Options) -> int:
    """LZF says nowhere what comes of it: literals and references are added up (lzf_d.c)."""
    at = size = 0
    while at < len(data):
        control = data[at]
        if control < 32:  # so many literals, and one
            at += control + 2
            size += control + 1
        elif control < 224:  # a reference of 3 to 8 bytes
            at += 2
            size += (control >> 5) + 2
        else:
            size += data[at + 1] + 9
            at += 3
    if at != len(data):
        raise ValueError("it is cut short")
    return size


def _szip_size(data: bytes, options: Options) -> int:
    return int.from_bytes(data[:4], "little")


def _zstd(data: bytes, most: int) -> tuple[int | None, bytes | None]:
    """The size of a zstd frame, and what comes of it, if numcodecs is there.

    The filter takes the number of an error for a size, so that what its memory holds would be read.
    """
    require_whole_zstd(data)
    size = zstd_content_size(data)
    if size is None or size > most:
        return size, None
    try:
        from numcodecs.zstd import decompress
    except ImportError:
        return size, None
    return size, decompress(data, np.empty(size, np.uint8)).tobytes()


def _lz4_size(data: bytes, options: Options) -> int:
    return _blocks_size(data, 1)


def _bitshuffle_size(data: bytes, options: Options) -> int:
    return _blocks_size(data, 8 * options[2])  # bits of eight elements are shuffled at a time


def _blocks_size(data: bytes, unit: int) -> int:
    """Of LZ4 and bitshuffle: their size, that of a block, and the blocks, of which each begins with its own.

    Raises:
        ValueError: They end behind the chunk, where the library would read on.
    """
    size, block = int.from_bytes(data[:8], "big"), int.from_bytes(data[8:12], "big")
    if not block:
        raise ValueError("its blocks have no bytes")
    whole = size - size % unit
    at = 12
    for _ in range(-(-whole // block)):
        at += 4 + int.from_bytes(data[at : at + 4], "big")
        if at + size - whole > len(data):  # what is no whole unit lies behind the blocks as it is
            raise ValueError("it is cut short")
    return size


def _blosc_size(data: bytes, options: Options) -> int:
    return blosc_content_size(data)


def _blosc2_size(data: bytes, options: Options) -> int:
    """Of a frame of one chunk (README_CFRAME_FORMAT.rst of c-blosc2).

    The frame says it three times: of all, of a chunk, and in the chunk, which a chunk of one value has not.
    Of an array of several axes that is what its blocks cover, and its shape is that which the filter has too.
    """
    header, own = int.from_bytes(data[11:15], "big"), int.from_bytes(data[16:24], "big")
    if data[2:10] != b"b2frame\0" or own != len(data):
        raise ValueError(f"it has {len(data)} bytes, expected a frame of Blosc2 of as many")
    sizes = [int.from_bytes(data[30:38], "big"), int.from_bytes(data[58:62], "big")]
    if int.from_bytes(data[39:47], "big"):
        sizes.append(blosc_content_size(data[header:]))
    axes, shape = options[7] if len(options) > 7 else 1, options[8:]
    size = options[2] * math.prod(shape)
    return size if 1 < axes == len(shape) and size <= max(sizes) <= size << axes else max(sizes)


_SIZES: Final[Mapping[int, Callable[[bytes, Options], int]]] = {
    4: _szip_size,
    32000: _lzf_size,
    32001: _blosc_size,
    32004: _lz4_size,
    32008: _bitshuffle_size,
    32026: _blosc2_size,
}
