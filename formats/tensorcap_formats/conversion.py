"""Write any archive, or any file that opens as one, as an archive in another container."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import holders, write_errors
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError, WriteError
from tensorcap_formats.open import Source, opened
from tensorcap_formats.output_path import (
    build_beside,
    is_locked,
    put_in_place,
    recovery_command,
    refuse_overlap,
    resolved,
)
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView
from tensorcap_formats.writing import (
    CONTAINER_SUFFIXES,
    container_of,
    refuse_to_replace_others,
    write_container,
)

_COMPRESSIONS: Final = {
    "hdf5": ("zstd", "blosc2"),
    "zarr": ("zstd",),
    "safetensors": (),
    "npz": ("deflate",),
}


def convert(
    source: Source,
    path: str | os.PathLike[str],
    *,
    container: str | None = None,
    compress: str | None = None,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    progress: Progress | None = None,
) -> Path:
    """Write records of an archive as a new archive; what was at the path stays until that is complete.

    Order numbers, values, run, completeness, and statistics without bytes are kept; bytes are checked against
    their digests. Tensors of a file from elsewhere keep their bare names, and the execution order
    stays unknown. An `.npz` file has room for names and tensors only (see `foreign.write_npz`).

    Args:
        source: The archive, open or by its path, or a file from elsewhere.
        path: Of the new one.
        container: `hdf5`, `zarr`, `safetensors` or `npz`; by the path's suffix if None.
        compress: `zstd` or `blosc2` for hdf5, `zstd` for zarr, `deflate` for npz; None for plain bytes.
        only: Globs that keys must match one of; all if empty.
        exclude: Globs that keys must match none of.
        progress: Receives the bytes read so far, and how many there will be.

    Returns:
        The path of the new archive.

    Raises:
        UsageError: Container or compression is unknown, nothing is selected, or the path is the source's.
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: Something that is no archive of ours is at the path, another process writes it, or the
            disk is full.
    """
    path = Path(path)
    container = container_of(path, container, {**CONTAINER_SUFFIXES, ".npz": "npz"})
    if compress is not None and compress not in _COMPRESSIONS[container]:
        known = ", ".join(_COMPRESSIONS[container]) or "none"
        raise UsageError(f"{path}: {container} is not compressed by {compress!r}, expected one of: {known}")
    with opened(source) as archive:
        records = archive.select(only, exclude=exclude)
        if archive.records and not records:
            raise UsageError(f"{archive.path}: none of {len(archive.records)} records is selected")
        refuse_overlap(archive.path, path)
        if is_locked(path) is not None:
            raise WriteError(
                f"{path}: a capture to this path is under way or did not end",
                hint=f"Wait for it, or save what it left with {recovery_command(path)}.",
            )
        refuse_to_replace_others(path)
        progress = progress or Silent()
        progress.stage("converting")
        total = _bytes_to_read(records, container)
        watched = _WatchedArchive(archive, progress, total)
        target = resolved(path)
        with build_beside(target) as building, write_errors(path):
            write_container(watched, building, container, records, compress=compress)
            progress.advance(total, total)  # equal tensors were read only once
            put_in_place(building, target)
        return path


def _bytes_to_read(records: Sequence[Record], container: str) -> int:
    if container == "npz":
        return sum(r.nbytes for r in records)
    unknown = [r for r in records if not r.digest]  # read once more, for their digests
    known = holders(r for r in records if r.digest).values()
    return sum(r.nbytes for r in known) + 2 * sum(r.nbytes for r in unknown)


class _WatchedArchive(ArchiveView):
    """A source that reports how much of it was read."""

    def __init__(self, source: Archive, progress: Progress, total: int) -> None:
        super().__init__(source, source.records, {r.key.text: (r,) for r in source.records}, root=source.root)
        self._progress = progress
        self._done = 0
        self._total = total

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        super()._read_flat(record, start, out)
        self._done = min(self._done + out.nbytes, self._total)
        self._progress.advance(self._done, self._total)
