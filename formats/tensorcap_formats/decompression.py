"""What comes of compressed bytes: its size, before or instead of more.

Libraries make room for whatever comes of a chunk, or for as much as it says; others read on where it ends.
"""

from __future__ import annotations

import struct
from typing import Any, Final

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_BLOSC: Final = struct.Struct("<4x3I")  # bytes that come of it, of a block, and of the chunk itself


def decompressed(decompressor: Any, data: Any, size: int) -> bytes:
    """At most `size` bytes, and one more if there is one.

    Args:
        decompressor: A new one of zlib, bz2 or lzma.
        data: A whole stream.
        size: As many as are wanted.

    Raises:
        ValueError: The stream is cut short.
    """
    decoded: bytes = decompressor.decompress(data, size + 1)
    if not decompressor.eof and len(decoded) <= size:
        raise ValueError("it is cut short")
    return decoded


def zstd_content_size(frame: bytes) -> int | None:
    """How many bytes a zstd frame says that it holds (RFC 8878, 3.1.1.1); None if it does not say."""
    if not frame.startswith(ZSTD_MAGIC) or len(frame) < 9:
        return None
    at, end = _zstd_size_field(frame)
    size = int.from_bytes(frame[at:end], "little") + (256 if end - at == 2 else 0)
    return size if end > at else None


def require_whole_zstd(frame: bytes) -> None:
    """Follow the blocks of a zstd frame to the last one (RFC 8878, 3.1.1.2).

    Raises:
        ValueError: It is no zstd frame, or cut short.
    """
    if not frame.startswith(ZSTD_MAGIC) or len(frame) < 9:
        raise ValueError("it is no zstd frame")
    at, is_last = _zstd_size_field(frame)[1], False
    while not is_last and at + 3 <= len(frame):
        head = int.from_bytes(frame[at : at + 3], "little")
        is_last, is_repeated = bool(head & 1), head >> 1 & 3 == 1
        at += 3 + (1 if is_repeated else head >> 3)
    if not is_last or at + (4 if frame[4] & 4 else 0) > len(frame):  # a checksum follows the blocks
        raise ValueError("it is cut short")


def _zstd_size_field(frame: bytes) -> tuple[int, int]:
    """From where to where the header of a zstd frame says its size; the blocks follow."""
    descriptor = frame[4]
    is_single = descriptor >> 5 & 1
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3]
    return at, at + (is_single, 2, 4, 8)[descriptor >> 6]


def blosc_content_size(chunk: Any) -> int:
    """How many bytes a chunk of Blosc says that it holds.

    Raises:
        ValueError: It is cut short: the library would read what lies in memory behind it.
    """
    if len(chunk) < _BLOSC.size:
        raise ValueError(f"it has {len(chunk)} bytes, expected a header of {_BLOSC.size} at least")
    decoded: int
    decoded, _, own = _BLOSC.unpack_from(chunk)
    if not _BLOSC.size <= own <= len(chunk):
        raise ValueError(f"it has {len(chunk)} bytes, expected the {own} that it says")
    return decoded
