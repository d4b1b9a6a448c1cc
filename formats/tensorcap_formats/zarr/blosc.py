"""Chunks that Blosc compressed, which numcodecs decodes without a look at where they end.

A chunk says its own size. If that is more than there is, numcodecs reads what lies in memory behind it, which
may well decode: a chunk that was cut short gives another's values.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import numcodecs.blosc
import numpy as np
from zarr.abc.codec import BytesBytesCodec

_HEADER_BYTES: Final = 16  # of which the last four are the size, header included


def with_checked_blosc(metadata: Any) -> Any:
    """The metadata of an array with a codec that checks sizes in the place of Blosc's, in shards too."""
    if isinstance(metadata, list):
        return [with_checked_blosc(item) for item in metadata]
    if not isinstance(metadata, dict):
        return metadata
    if metadata.get("id") == "blosc":  # version 2
        return _CheckedBlosc()
    if metadata.get("name") in ("blosc", "numcodecs.blosc"):  # version 3
        return _CheckedBloscCodec()
    return {name: with_checked_blosc(item) for name, item in metadata.items()}


class _CheckedBlosc(numcodecs.blosc.Blosc):  # type: ignore[misc]  # numcodecs has no types
    """Blosc of a chunk of version 2; what it decodes says with what it was compressed."""

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a chunk.

        Raises:
            ValueError: It is cut short.
        """
        chunk = np.frombuffer(buf, np.uint8)
        size = int.from_bytes(chunk[_HEADER_BYTES - 4 : _HEADER_BYTES].tobytes(), "little")
        if not _HEADER_BYTES <= size <= chunk.size:
            raise ValueError(f"a chunk has {chunk.size} bytes, expected the {size} that it says")
        return super().decode(chunk, out)


@dataclass(frozen=True)
class _CheckedBloscCodec(BytesBytesCodec):
    """The same of version 3."""

    is_fixed_size = False

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        decoded = await asyncio.to_thread(_CheckedBlosc().decode, chunk_data.as_numpy_array())
        return chunk_spec.prototype.buffer.from_bytes(decoded)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Blosc's is not known before."""
        raise NotImplementedError
