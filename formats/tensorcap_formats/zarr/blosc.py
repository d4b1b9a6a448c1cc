"""Chunks that Blosc compressed, which numcodecs decodes without a look at where they end.

A chunk says its own size, and that of what comes of it. If the one is more than there is, numcodecs reads
what lies in memory behind it, which may well decode: a chunk that was cut short gives another's values. As
much as the other says is made room for, whatever the shape of the array.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numcodecs.blosc
import numpy as np
from zarr.abc.codec import BytesBytesCodec

Check = Callable[[int], None]

_HEADER = struct.Struct("<4x3I")  # bytes that come of it, those of a block, and those of the chunk itself


def with_checked_blosc(metadata: Any, check: Check) -> Any:
    """The metadata of an array with a codec that checks sizes in the place of Blosc's, in shards too.

    Args:
        metadata: As the array's file has it.
        check: Refuses to decode a chunk to so many bytes, if that is not credible.
    """
    if isinstance(metadata, list):
        return [with_checked_blosc(item, check) for item in metadata]
    if not isinstance(metadata, dict):
        return metadata
    if metadata.get("id") == "blosc":  # version 2
        return _CheckedBlosc(check)
    if metadata.get("name") in ("blosc", "numcodecs.blosc"):  # version 3
        return _CheckedBloscCodec(check)
    return {name: with_checked_blosc(item, check) for name, item in metadata.items()}


class _CheckedBlosc(numcodecs.blosc.Blosc):  # type: ignore[misc]  # numcodecs has no types
    """Blosc of a chunk of version 2; what it decodes says with what it was compressed."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        self._check = check

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a chunk.

        Raises:
            ValueError: It is cut short.
            UnsafeFileError: It says that more comes of it than is credible.
        """
        chunk = np.frombuffer(buf, np.uint8)
        if chunk.size < _HEADER.size:
            raise ValueError(f"a chunk has {chunk.size} bytes, expected a header of {_HEADER.size} at least")
        decoded, _, size = _HEADER.unpack_from(chunk.data)
        if not _HEADER.size <= size <= chunk.size:
            raise ValueError(f"a chunk has {chunk.size} bytes, expected the {size} that it says")
        self._check(decoded)
        return super().decode(chunk, out)


@dataclass(frozen=True)
class _CheckedBloscCodec(BytesBytesCodec):
    """The same of version 3."""

    check: Check
    is_fixed_size = False

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        decoded = await asyncio.to_thread(_CheckedBlosc(self.check).decode, chunk_data.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(decoded)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Blosc's is not known before."""
        raise NotImplementedError
