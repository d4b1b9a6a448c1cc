"""Read all of an archive and hold it against what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import checked_blocks, holders
from tensorcap_formats.digests import ALGORITHMS
from tensorcap_formats.errors import ReadError
from tensorcap_formats.index import root_hash
from tensorcap_formats.records import Record


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with an archive, or that a reader should know.

    Attributes:
        key: Text of the record's key; empty where the whole archive is meant.
        what: One line.
        is_warning: Whether the archive may well be as it was meant.
    """

    key: str
    what: str
    is_warning: bool = False


def check_archive(archive: Archive, *, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Check an archive: the index, that each tensor can be read, and that its bytes have their digest.

    Each distinct tensor is read once, in bounded memory. Of a file from elsewhere, which has no digests, it
    is seen whether everything can be read.

    Args:
        archive: Open archive.
        progress: Told the bytes read so far, and all that will be.

    Returns:
        What was found; empty for an archive in order.
    """
    problems = list(_whole(archive))
    first = {id(r) for r in holders(archive.records).values()} if not archive.is_foreign else None
    chosen = [r for r in archive.records if r.stored and (first is None or id(r) in first)]
    done, total = 0, sum(r.nbytes for r in chosen)
    for record in archive.records:
        problems += [Problem(record.key.text, what) for what in _statistics(record)]
        if not record.stored:
            continue
        try:
            if first is None or id(record) in first:
                for block in checked_blocks(archive, record):
                    done += block.nbytes
                    if progress:
                        progress(done, total)
            elif record.size:  # the bytes were checked under another name; this one must lead somewhere
                archive._read_flat(record, 0, np.empty(1, record.dtype.storage))
            if remark := archive.remark(record):
                problems.append(Problem(record.key.text, remark, is_warning=True))
        except ReadError as error:
            problems.append(Problem(record.key.text, str(error)))
    return problems


def _whole(archive: Archive) -> Iterator[Problem]:
    for name, what in archive.skipped.items():
        yield Problem(name, f"is not read: {what}", is_warning=True)
    if archive.is_foreign:
        return
    if archive.root is not None and archive.root != root_hash(archive.records):
        yield Problem("", f"root hash of the index is {root_hash(archive.records)}, expected {archive.root}")
    if archive.algorithm not in ALGORITHMS:
        yield Problem("", f"digests are by {archive.algorithm}, which is not installed, and were not checked")
    if not archive.is_complete:
        yield Problem("", "the run that wrote it did not end as it should", is_warning=True)


def _statistics(record: Record) -> Iterator[str]:
    """What the statistics cannot be, whatever the bytes are."""
    found = record.statistics
    if found is None:
        return
    counts = (found.nan, found.posinf, found.neginf, found.zeros)
    values = record.size * record.dtype.packed
    if min(counts) < 0 or sum(counts) > values:
        yield f"statistics count {sum(counts)} special values of {values}"
    finite = values - found.nan - found.posinf - found.neginf
    if (found.minimum is None) != (found.maximum is None) or (found.minimum is None) != (finite == 0):
        yield f"statistics have minimum {found.minimum} and maximum {found.maximum} of {finite} finite values"
    elif found.minimum is not None and found.maximum is not None and found.minimum > found.maximum:
        yield f"statistics have minimum {found.minimum} above maximum {found.maximum}"
