"""Finish the archive of a killed writer, in place: nothing is copied, and it may be killed and run again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.digests import ALGORITHMS
from tensorcap_formats.errors import (
    CorruptArchiveError,
    MissingPackageError,
    ReadError,
    UnfinishedArchiveError,
    WriteError,
)
from tensorcap_formats.hdf5 import HEAD_SIZE, finish_flat_file, is_finished_flat_file, open_hdf5
from tensorcap_formats.index import Index
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.json_values import json_object
from tensorcap_formats.open import open_present
from tensorcap_formats.output_path import clean_up, journal_path, partial_path, resolved
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.writing.journal import Journal, JournalContent, Placed, read_journal
from tensorcap_formats.writing.publishing import container_of, publish, refuse_to_replace_others

_BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of a recovery.

    Attributes:
        path: The archive that was made.
        records: Count of intact records.
        lost: Count of records of the journal whose bytes do not have their digest.
        torn: Count of journal lines that were cut short.
        was_complete: Whether only the last rename was missing: the run had ended as it should.
    """

    path: Path
    records: int
    lost: int
    torn: int
    was_complete: bool

    @property
    def exit_status(self) -> int:
        """The exit status of `tcap recover`: 1 if a record is lost, else 0."""
        return 1 if self.lost else 0

    def to_json(self) -> dict[str, Any]:
        """The recovery as a JSON object."""
        return json_object(self)


def recover(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Recovered:
    """Finish the archive whose writer was killed or ran out of disk.

    Args:
        path: Where the archive was to be; `PATH.partial` and `PATH.journal` are beside it.
        output: Where to put it instead; needed when an archive is at `path`, which is never replaced by
            an incomplete one.
        progress: Receives the bytes checked so far, and how many there are to check.

    Returns:
        How much was saved.

    Raises:
        UnfinishedArchiveError: Another process is still writing it, or there is nothing to recover.
        ReadError: The journal cannot be read.
        WriteError: The disk is still full, or the output cannot be written; nothing is lost.
    """
    path = Path(path)
    target = Path(output) if output is not None else path
    if not os.path.lexists(journal_path(path)):
        if clean_up(resolved(path)):
            with open_present(path) as archive:
                return Recovered(path, len(archive), 0, 0, was_complete=archive.is_complete)
        raise UnfinishedArchiveError(f"{path}: there is no {journal_path(path).name}, nothing to recover")
    journal = Journal(path)
    try:
        result = _recover_locked(path, target, progress or Silent())
    except BaseException:
        journal.close(remove=False)
        raise
    journal.close(remove=True)
    return result


def _recover_locked(path: Path, target: Path, progress: Progress) -> Recovered:
    partial = partial_path(path)
    content = read_journal(path)
    if not partial.exists():
        return _find_renamed(path, target, content)
    if not content.placed:
        raise UnfinishedArchiveError(
            f"{path}: the journal confirms no tensor, nothing to recover",
            hint=f"Delete {journal_path(path).name} and {partial.name}.",
        )
    is_in_place = resolved(path).absolute() == resolved(target).absolute()
    container = container_of(target, content.container if is_in_place else None)  # else by the suffix
    file = InputFile(partial)
    try:
        finished = is_finished_flat_file(file)  # by its writer, or by a recovery that was killed itself
        records, was_complete = 0, False
        if finished:
            with open_hdf5(partial) as archive:
                records, was_complete = len(archive), archive.is_complete
        if finished and _holds_the_same(target, partial):  # killed before it removed the partial one
            partial.unlink()
            return _find_renamed(path, target, content)
        if not was_complete and os.path.lexists(resolved(target)):
            raise WriteError(
                f"{target}: an archive is there, which an incomplete one does not replace",
                hint="Give another path with -o.",
            )
        refuse_to_replace_others(target)
        intact = [] if finished else _intact_records(file, content, progress)
    finally:
        file.close()
    try:
        if not finished:
            _finish(partial, content, intact)
            records = len(intact)
        publish(partial, target, container)
    except OSError as error:
        if isinstance(error, ReadError | WriteError):
            raise
        raise WriteError(
            f"{target}: {error.strerror or error}; nothing is lost", hint="Make room, then repeat."
        ) from error
    return Recovered(target, records, len(content.placed) - records, content.torn, was_complete=was_complete)


def _find_renamed(path: Path, target: Path, content: JournalContent) -> Recovered:
    """Find the archive if the writer, or a recovery, was killed before it removed the journal.

    Args:
        path: Where the writer was to put it.
        target: Where this recovery is to put it.
        content: Of the journal.
    """
    for place in (target, path):
        if not os.path.lexists(resolved(place)):
            continue
        with open_present(place) as archive:
            present = {(r.key.text, r.digest) for r in archive.records}
            if present and present <= {(p.record.key.text, p.record.digest) for p in content.placed}:
                lost = len(content.placed) - len(present)
                return Recovered(place, len(present), lost, content.torn, was_complete=archive.is_complete)
    raise UnfinishedArchiveError(
        f"{path}: {partial_path(path).name} is gone, nothing to recover",
        hint=f"Delete {journal_path(path).name}.",
    )


def _holds_the_same(path: Path, partial: Path) -> bool:
    """Whether the archive at `path` is the finished file, in whatever container."""
    if not os.path.lexists(resolved(path)):
        return False
    try:
        with open_present(path) as archive, open_hdf5(partial) as finished:
            records = [(record.key.text, record.digest) for record in archive.records]
            expected = [(record.key.text, record.digest) for record in finished.records]
            return records == expected and archive.run == finished.run
    except ReadError:
        return False


def _intact_records(file: InputFile, content: JournalContent, progress: Progress) -> list[Placed]:
    """Find the records whose bytes are in the file and have the digest that the journal says."""
    if content.algorithm not in ALGORITHMS:
        raise MissingPackageError(
            f"checking {content.algorithm} digests needs the package 'xxhash', which is not installed",
            hint="Install it with: pip install xxhash",
        )
    progress.stage("checking")
    places = [(p.offset, p.record.nbytes) for p in content.placed if p.offset is not None]
    inside = [(at, nbytes) for at, nbytes in places if HEAD_SIZE <= at <= file.size - nbytes]
    digests = dict.fromkeys(inside, "")
    done, total = 0, sum(nbytes for _, nbytes in digests)
    if total > file.size:  # each is hashed, and the writer lets none overlap
        raise CorruptArchiveError(
            f"{file.path}: has {file.size} bytes, and its journal places {total} bytes of tensors in it"
        )
    for at, nbytes in digests:
        digests[at, nbytes] = _digest(file, at, nbytes, content.algorithm)
        done += nbytes
        progress.advance(done, total)
    return [p for p in content.placed if _is_intact(p, digests)]


def _is_intact(placed: Placed, digests: Mapping[tuple[int, int], str]) -> bool:
    record = placed.record
    if placed.offset is None:
        return not (record.stored and record.nbytes)
    return digests.get((placed.offset, record.nbytes)) == record.digest


def _digest(file: InputFile, offset: int, nbytes: int, algorithm: str) -> str:
    hasher = ALGORITHMS[algorithm]()
    for start in range(0, nbytes, _BLOCK_BYTES):
        hasher.update(file.read(offset + start, min(_BLOCK_BYTES, nbytes - start)))
    return hasher.hexdigest()


def _finish(partial: Path, content: JournalContent, intact: list[Placed]) -> None:
    run = {
        **content.run,
        "error": {
            "type": "Killed",
            "message": f"the writer ended before the archive was complete, {len(intact)} tensors are left",
            "last_point": intact[-1].record.key.text if intact else None,
        },
    }
    end = max((p.offset + p.record.nbytes for p in intact if p.offset is not None), default=HEAD_SIZE)
    fd = os.open(partial, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.ftruncate(fd, end)  # on a full disk, what is not confirmed makes room for the metadata
        placed = sorted(intact, key=lambda p: p.record.order)
        records = [p.record for p in placed]
        index = Index(records, content.values, run, content.algorithm, is_complete=False)
        finish_flat_file(fd, index, [p.offset for p in placed], end, fsync=True)
    finally:
        os.close(fd)
