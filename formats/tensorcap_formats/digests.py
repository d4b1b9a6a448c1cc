"""The 128-bit digest of a tensor's bytes: xxh3_128, or blake2b where xxhash is not installed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final, Protocol


class Hasher(Protocol):
    """What both algorithms give: a hash in progress."""

    def update(self, data: Any, /) -> None:
        """Take more bytes in."""

    def hexdigest(self) -> str:
        """The hash of all bytes so far, in hexadecimal."""
        ...


def _blake2b() -> Hasher:
    return hashlib.blake2b(digest_size=16)


def _algorithms() -> dict[str, Callable[[], Hasher]]:
    try:
        import xxhash
    except ImportError:  # a vendor's frozen environment: slower, and read everywhere
        return {"blake2b_128": _blake2b}
    return {"xxh3_128": xxhash.xxh3_128, "blake2b_128": _blake2b}


ALGORITHMS: Final = _algorithms()
KNOWN_ALGORITHMS: Final = ("xxh3_128", "blake2b_128")
DEFAULT_ALGORITHM: Final = next(iter(ALGORITHMS))


def digest(data: Any, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """The digest of a buffer, as 32 hexadecimal digits."""
    hasher = ALGORITHMS[algorithm]()
    hasher.update(data)
    return hasher.hexdigest()
