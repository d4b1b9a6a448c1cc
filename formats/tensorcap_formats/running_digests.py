"""Digests of tensors while they are read, for archives in which other programs may have altered the bytes."""

from __future__ import annotations

from pathlib import Path

from tensorcap_formats.digests import ALGORITHMS, Hasher
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.records import Record


class RunningDigests:
    """Holds each tensor that is read from its beginning to its end against its digest.

    Parts that are read out of order are not checked; nor is anything if the algorithm is not installed.
    """

    def __init__(self, path: Path, algorithm: str) -> None:
        self._path = path
        self._make = ALGORITHMS.get(algorithm)
        self._begun: dict[int, tuple[int, Hasher]] = {}  # by row: elements so far

    def add(self, record: Record, start: int, part: Array) -> None:
        """Take in what was read, if it goes on where the last read of the record ended.

        Raises:
            CorruptArchiveError: This was the end, and the digest is not the record's.
        """
        if self._make is None:
            return
        # taken out while in use: of two threads that read one record, one goes unchecked
        done, hasher = self._begun.pop(record.row, (0, None))
        if start == 0:
            done, hasher = 0, self._make()
        if hasher is None or done != start:
            return
        hasher.update(part.view("u1").data)
        if start + part.size < record.size:
            self._begun[record.row] = start + part.size, hasher
        elif hasher.hexdigest() != record.digest:
            raise CorruptArchiveError(
                f"{self._path}: {record.key.text}: digest of its bytes is {hasher.hexdigest()}, "
                f"expected {record.digest}"
            )
