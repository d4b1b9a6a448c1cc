"""An archive that is still being written, as far as its journal confirms it."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path

from tensorcap_formats.errors import UnfinishedArchiveError
from tensorcap_formats.hdf5 import HEAD_SIZE
from tensorcap_formats.index import Index
from tensorcap_formats.indexed_archive import FlatArchive
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.output_path import is_locked, journal_path, partial_path
from tensorcap_formats.writing.journal import read_journal


def is_growing(path: str | os.PathLike[str]) -> bool:
    """Whether there is no archive at a path, and a journal of one, whether its writer lives or not."""
    path = Path(path)
    return not os.path.lexists(path) and is_locked(path) is not None and partial_path(path).exists()


def open_growing(path: str | os.PathLike[str]) -> FlatArchive:
    """Open what a writer has confirmed so far, or what it left when it died; nothing is changed.

    Args:
        path: Where the archive is to be; `PATH.partial` and `PATH.journal` are beside it.

    Returns:
        An archive that is not complete; what is written later is not in it.

    Raises:
        UnfinishedArchiveError: Nothing is confirmed yet.
        ReadError: The journal cannot be read.
    """
    path = Path(path)
    with ExitStack() as resources:
        file = resources.enter_context(closing(InputFile(partial_path(path))))
        content = read_journal(path)
        placed = [
            p
            for p in content.placed
            if p.offset is None or HEAD_SIZE <= p.offset <= file.size - p.record.nbytes
        ]
        if not placed:
            raise UnfinishedArchiveError(
                f"{path}: {journal_path(path).name} confirms no tensor yet", hint="Wait for the first one."
            )
        records = [p.record for p in placed]
        index = Index(records, content.values, content.run, content.algorithm, is_complete=False)
        offsets = [p.offset or 0 for p in placed]
        archive = FlatArchive(file, "hdf5", index, offsets, resources, trusts_digests=False)
        archive.path = path
        return archive
