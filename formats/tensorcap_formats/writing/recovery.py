"""Save what an unfinished archive holds, in place: nothing is copied, and it may be killed and run again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorcap_formats.digests import ALGORITHMS
from tensorcap_formats.errors import MissingPackageError, ReadError, UnfinishedArchiveError, WriteError
from tensorcap_formats.hdf5 import HEAD_SIZE, Placed, finish, is_finished, open_hdf5
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.open import open_present
from tensorcap_formats.output_path import journal_path, partial_path, resolved
from tensorcap_formats.writing.journal import Journal, JournalContent, read_journal
from tensorcap_formats.writing.publishing import container_of, publish, refuse_to_replace_others

_BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Recovered:
    """What came of a recovery.

    Attributes:
        path: The archive that was made.
        records: Count of records that are whole.
        lost: Count of records that the journal names and whose bytes are not what it says.
        torn: Count of journal lines that were cut short.
        was_complete: Whether only the last rename was missing: the run had ended as it should.
    """

    path: Path
    records: int
    lost: int
    torn: int
    was_complete: bool


def recover(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Recovered:
    """Finish the archive whose writer was killed or ran out of disk.

    Args:
        path: Where the archive was to be; `PATH.partial` and `PATH.journal` are beside it.
        output: Where to put it instead; needed when an archive is at `path`, which is never replaced by
            an incomplete one.
        progress: Told how many bytes were checked, each time some were.

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
        raise UnfinishedArchiveError(f"{path}: there is no {journal_path(path).name}, nothing to recover")
    journal = Journal(path)
    try:
        result = _recover_locked(path, target, progress)
    except BaseException:
        journal.close(remove=False)
        raise
    journal.close(remove=True)
    return result


def _recover_locked(path: Path, target: Path, progress: Callable[[int], None] | None) -> Recovered:
    partial = partial_path(path)
    content = read_journal(path)
    if not partial.exists():
        return _already_there(path, content)
    if not content.placed:
        raise UnfinishedArchiveError(
            f"{path}: the journal confirms no tensor, nothing to recover",
            hint=f"Delete {journal_path(path).name} and {partial.name}.",
        )
    container = container_of(target, None if output_differs(path, target) else content.container)
    file = InputFile(partial)
    try:
        finished = is_finished(file)  # by its writer, or by a recovery that was killed itself
        records, was_complete = _counted(partial) if finished else (0, False)
        if not was_complete and os.path.lexists(resolved(target)):
            raise WriteError(
                f"{target}: an archive is there, which an incomplete one does not replace",
                hint="Give another path with -o.",
            )
        refuse_to_replace_others(target)
        whole = [] if finished else _whole(file, content, progress)
    finally:
        file.close()
    try:
        if not finished:
            _finish(partial, content, whole)
            records = len(whole)
        publish(partial, target, container)
    except OSError as error:
        if isinstance(error, ReadError | WriteError):
            raise
        raise WriteError(
            f"{target}: {error.strerror or error}; nothing is lost", hint="Make room, then repeat."
        ) from error
    return Recovered(target, records, len(content.placed) - records, content.torn, was_complete=was_complete)


def _already_there(path: Path, content: JournalContent) -> Recovered:
    """What lies at `path`, if the writer was killed after the rename, before the journal was removed."""
    if os.path.lexists(path):
        with open_present(path) as archive:
            there = {(r.key.text, r.digest) for r in archive.records}
            if there and there <= {(p.record.key.text, p.record.digest) for p in content.placed}:
                lost = len(content.placed) - len(there)
                return Recovered(path, len(there), lost, content.torn, was_complete=archive.is_complete)
    raise UnfinishedArchiveError(
        f"{path}: {partial_path(path).name} is gone, nothing to recover",
        hint=f"Delete {journal_path(path).name}.",
    )


def _counted(finished: Path) -> tuple[int, bool]:
    """How many records a finished flat file has, and whether its run ended as it should."""
    with open_hdf5(finished) as archive:
        return len(archive), archive.is_complete


def output_differs(path: Path, target: Path) -> bool:
    """Whether the archive is to be put elsewhere, so that the suffix there names the container."""
    return resolved(path).absolute() != resolved(target).absolute()


def _whole(file: InputFile, content: JournalContent, progress: Callable[[int], None] | None) -> list[Placed]:
    """The records whose bytes are in the file and have the digest that the journal says."""
    if content.algorithm not in ALGORITHMS:
        raise MissingPackageError(
            f"checking {content.algorithm} digests needs the package 'xxhash', which is not installed",
            hint="Install it with: pip install xxhash",
        )
    found: dict[tuple[int, int], str] = {}
    whole = []
    for placed in content.placed:
        nbytes = placed.record.nbytes
        if placed.offset is not None:
            place = (placed.offset, nbytes)
            if not HEAD_SIZE <= placed.offset <= file.size - nbytes:
                continue
            if place not in found:
                found[place] = _digest(file, placed.offset, nbytes, content.algorithm)
                if progress:
                    progress(nbytes)
            if found[place] != placed.record.digest:
                continue
        elif placed.record.stored and nbytes:
            continue
        whole.append(placed)
    return whole


def _digest(file: InputFile, offset: int, nbytes: int, algorithm: str) -> str:
    hasher = ALGORITHMS[algorithm]()
    for start in range(0, nbytes, _BLOCK_BYTES):
        hasher.update(file.read(offset + start, min(_BLOCK_BYTES, nbytes - start)))
    return hasher.hexdigest()


def _finish(partial: Path, content: JournalContent, whole: list[Placed]) -> None:
    run = {
        **content.run,
        "error": {
            "type": "Killed",
            "message": f"the writer ended before the archive was complete, {len(whole)} tensors are left",
            "last_point": whole[-1].record.key.text if whole else None,
        },
    }
    end = max((p.offset + p.record.nbytes for p in whole if p.offset is not None), default=HEAD_SIZE)
    fd = os.open(partial, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.ftruncate(fd, end)  # frees what nobody confirmed: on a full disk, the room for the metadata
        finish(
            fd,
            sorted(whole, key=lambda p: p.record.order),
            end,
            values=content.values,
            run=run,
            algorithm=content.algorithm,
            is_complete=False,
            is_ordered=True,
            fsync=True,
        )
    finally:
        os.close(fd)
