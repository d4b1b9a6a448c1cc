"""Check an archive: read all of it and compare that with its index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import holders
from tensorcap_formats.digests import ALGORITHMS
from tensorcap_formats.errors import ReadError
from tensorcap_formats.index import root_hash
from tensorcap_formats.json_values import json_value
from tensorcap_formats.open import Source, opened
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.records import Record


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of an archive, or a warning.

    Attributes:
        key: Text of the record's key; empty for one of the whole archive.
        what: The problem, in one line.
        is_warning: Whether the archive may be right all the same.
    """

    key: str
    what: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class ArchiveCheck:
    """The result of checking an archive.

    Attributes:
        records: Count of records.
        nbytes: Sum of their sizes, in bytes.
        problems: The problems and warnings; empty for an archive in order.
    """

    records: int
    nbytes: int
    problems: list[Problem]

    @property
    def exit_status(self) -> int:
        """The exit status of `tcap check`: 3 if there is a problem that is no warning, else 0."""
        return 0 if all(problem.is_warning for problem in self.problems) else 3

    def to_json(self) -> dict[str, Any]:
        """The check as a JSON object."""
        return {
            "records": self.records,
            "bytes": self.nbytes,
            "problems": json_value(self.problems),
        }


def check_archive(source: Source, *, progress: Progress | None = None) -> ArchiveCheck:
    """Check an archive: its index, that each tensor can be read, and that the bytes have their digest.

    Each distinct tensor is read once, in bounded memory. A file from elsewhere has no digests: of it, the
    check is that everything can be read.

    Args:
        source: The archive, open or by its path, or a file from elsewhere.
        progress: Receives the bytes read so far, and how many there will be.

    Returns:
        The counts and the problems.

    Raises:
        ReadError: It cannot be opened.
    """
    with opened(source) as archive:
        return _check(archive, progress or Silent())


def _check(archive: Archive, progress: Progress) -> ArchiveCheck:
    progress.stage("checking")
    problems = list(_check_whole(archive))
    stored = [r for r in archive.records if r.stored]
    to_read = stored if archive.is_foreign else list(holders(stored).values())
    rows = {r.row for r in to_read}
    done, total = 0, sum(r.nbytes for r in to_read)
    for record in archive.records:
        problems += [Problem(record.key.text, what) for what in _check_statistics(record)]
        if not record.stored:
            continue
        try:
            if record.row in rows:
                for block in archive.blocks(record):
                    done += block.nbytes
                    progress.advance(done, total)
            elif record.size:  # the bytes were checked under another name; this one must lead somewhere
                archive._read_flat(record, 0, np.empty(1, record.dtype.storage))
            if remark := archive.remark(record):
                problems.append(Problem(record.key.text, remark, is_warning=True))
        except ReadError as error:
            problems.append(Problem(record.key.text, str(error)))
    return ArchiveCheck(len(archive), sum(r.nbytes for r in archive.records), problems)


def _check_whole(archive: Archive) -> Iterator[Problem]:
    for name, what in archive.skipped.items():
        yield Problem(name, f"is not read: {what}", is_warning=name not in archive.problems)
    if archive.is_foreign:
        return
    if archive.root is not None and archive.root != root_hash(archive.records):
        yield Problem("", f"root hash of the index is {root_hash(archive.records)}, expected {archive.root}")
    if archive.algorithm not in ALGORITHMS:
        yield Problem("", f"digests are by {archive.algorithm}, which is not installed, and were not checked")
    if not archive.is_complete:
        yield Problem("", "the run that wrote it did not end as it should", is_warning=True)


def _check_statistics(record: Record) -> Iterator[str]:
    """Find statistics that contradict each other, whatever the bytes are."""
    s = record.statistics
    if s is None:
        return
    counts = (s.nan, s.posinf, s.neginf, s.zeros)
    values = record.size * record.dtype.packed
    if min(counts) < 0 or sum(counts) > values:
        yield f"statistics count {sum(counts)} special values of {values}"
    finite = values - s.nan - s.posinf - s.neginf
    if (s.minimum is None) != (s.maximum is None) or (s.minimum is None) != (finite == 0):
        yield f"statistics have minimum {s.minimum} and maximum {s.maximum} of {finite} finite values"
    elif s.minimum is not None and s.maximum is not None and s.minimum > s.maximum:
        yield f"statistics have minimum {s.minimum} above maximum {s.maximum}"
