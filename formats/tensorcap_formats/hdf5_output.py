"""Write an archive as HDF5 from another archive."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import checked_blocks, described, writing
from tensorcap_formats.flat_file import HEAD_SIZE, aligned, finish, write_at
from tensorcap_formats.journal import Placed
from tensorcap_formats.records import Record


def write_hdf5(
    source: Archive, path: Path, *, records: Sequence[Record] | None = None, compress: str | None = None
) -> None:
    """Write an archive as an HDF5 file at a path where nothing is yet.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new file.
        records: Which, in the order of the new archive; all of the source by default.
        compress: `zstd` or `blosc2`; None for plain bytes.

    Raises:
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The disk is full.
        MissingPackageError: Compression was asked for, and hdf5plugin is not installed.
    """
    originals = source.records if records is None else records
    chosen, algorithm = described(source, originals)
    if compress is not None:
        from tensorcap_formats.hdf5_compressed import write_compressed

        write_compressed(source, path, originals, chosen, algorithm, compress)
        return
    offsets: dict[tuple[str, int], int] = {}
    placed = []
    end = HEAD_SIZE
    with writing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for original, record in zip(originals, chosen, strict=True):
                if not record.stored or not record.nbytes:
                    placed.append(Placed(record, None))
                    continue
                content = record.digest, record.nbytes
                if content not in offsets:
                    offsets[content] = at = end
                    for block in checked_blocks(source, original):
                        write_at(fd, at, block.view("u1"))
                        at += block.nbytes
                    end = aligned(at)
                placed.append(Placed(record, offsets[content]))
            finish(
                fd,
                placed,
                end,
                values=source.values,
                run=source.run,
                algorithm=algorithm,
                is_complete=source.is_complete,
                is_ordered=source.is_ordered,
                fsync=False,
            )
        finally:
            os.close(fd)
