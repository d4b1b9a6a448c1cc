"""The 128-bit digest of a tensor's bytes: xxh3_128, or blake2b if xxhash is not installed.

`RunningDigests` checks the tensors of an archive while they are read.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.records import Record


class Hasher(Protocol):
    """A hash in progress, by either algorithm."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The hash of all bytes so far, in hexadecimal."""
        ...


def _algorithms() -> dict[str, Callable[..., Hasher]]:
    blake2b = partial(hashlib.blake2b, digest_size=16)
    try:
        import xxhash
    except ImportError:  # a vendor's frozen environment: slower, and read everywhere
        return {"blake2b_128": blake2b}
    return {"xxh3_128": xxhash.xxh3_128, "blake2b_128": blake2b}


ALGORITHMS: Final = _algorithms()
KNOWN_ALGORITHMS: Final = ("xxh3_128", "blake2b_128")
DEFAULT_ALGORITHM: Final = next(iter(ALGORITHMS))


def digest(data: Any, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """The digest of a buffer, as 32 hexadecimal digits."""
    hasher = ALGORITHMS[algorithm]()
    hasher.update(data)
    return hasher.hexdigest()


class RunningDigests:
    """Checks the digest of each tensor that one thread reads from its beginning to its end.

    Parts that are read out of order are not checked; nor is anything if the algorithm is not installed.

    Attributes:
        can_check: Whether the algorithm is installed.
    """

    def __init__(self, path: Path, algorithm: str) -> None:
        self._path = path
        self._make = ALGORITHMS.get(algorithm)
        self.can_check = self._make is not None
        self._hashers: dict[tuple[int, int], tuple[int, Hasher]] = {}  # by thread and row: elements so far

    def add(self, record: Record, start: int, part: Array) -> None:
        """Add elements that were read, if they follow those of the record's last read.

        Raises:
            CorruptArchiveError: This was the end, and the digest is not the record's.
        """
        if self._make is None:
            return
        at = threading.get_ident(), record.row
        done, hasher = self._hashers.pop(at, (0, None))
        if start == 0:
            done, hasher = 0, self._make()
        if hasher is None or done != start:
            return
        hasher.update(part.view("u1").data)
        if start + part.size < record.size:
            self._hashers[at] = start + part.size, hasher
        else:
            self._compare(record, hasher.hexdigest())

    def check_whole(self, records: Sequence[Record], places: Sequence[int], data: Array) -> None:
        """Check tensors that were read as a whole, whose bytes begin at some places of `data`.

        Raises:
            CorruptArchiveError: The digest of one is not the record's.
        """
        if self._make is None:
            return
        view = data.data
        for record, place in zip(records, places, strict=True):
            self._compare(record, self._make(view[place : place + record.nbytes]).hexdigest())

    def _compare(self, record: Record, digest_of_bytes: str) -> None:
        if digest_of_bytes != record.digest:
            raise CorruptArchiveError(
                f"{self._path}: {record.key.text}: is damaged: digest of its bytes is {digest_of_bytes}, "
                f"expected {record.digest}"
            )
