"""Put a finished flat file in its place, as the container that was asked for."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import NotAnArchiveError, ReadError, UsageError, WriteError
from tensorcap_formats.hdf5 import open_hdf5, write_hdf5
from tensorcap_formats.open import open_present
from tensorcap_formats.output_path import build_beside, put_in_place, resolved
from tensorcap_formats.records import Record

CONTAINER_SUFFIXES: Final = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr", ".safetensors": "safetensors"}
_COPY_BYTES: Final = 1 << 20


def container_of(path: Path, container: str | None, suffixes: Mapping[str, str] = CONTAINER_SUFFIXES) -> str:
    """The container to write: the one asked for, or by the suffix of the path, or of what it links to.

    Raises:
        UsageError: The container is unknown, or the suffix names none.
    """
    if container is not None and container not in suffixes.values():
        raise UsageError(
            f"container {container!r} is unknown",
            hint=f"Known are: {', '.join(sorted(set(suffixes.values())))}.",
        )
    name = container or suffixes.get(path.suffix.lower()) or suffixes.get(resolved(path).suffix.lower())
    if name is None:
        raise UsageError(
            f"{path}: suffix {path.suffix!r} names no container, expected {', '.join(suffixes)}",
            hint="Choose another suffix.",
        )
    return name


def refuse_to_replace_others(path: Path) -> None:
    """Refuse an output path that is taken by something else than an archive of ours.

    Raises:
        WriteError: There is a checkpoint, a dump of another tool, a text, or a folder with other things.
    """
    path = resolved(path)
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            raise WriteError(f"{path}: there is no folder {str(path.parent)!r}", hint="Create it first.")
        return
    if not _is_ours(path):
        raise WriteError(
            f"{path}: something that is no archive of tensorcap is there and is not overwritten",
            hint="Move it away first, or write to another path.",
        )


def refuse_to_replace_archive(path: Path) -> None:
    """Refuse the path of an output that is no archive, if an archive of ours is there.

    Raises:
        WriteError: There is one, or what may be a damaged one.
    """
    path = resolved(path)
    if os.path.lexists(path) and _is_ours(path):
        raise WriteError(
            f"{path}: an archive is there and is not overwritten",
            hint="Delete it first, or write to another path.",
        )


def _is_ours(path: Path) -> bool:
    try:
        with open_present(path) as archive:
            return not archive.is_foreign
    except NotAnArchiveError:
        return False
    except ReadError as error:
        raise WriteError(
            f"{path}: what is there cannot be read and is not overwritten: {error}",
            hint="Move it away first, or write to another path.",
        ) from error


def write_container(
    source: Archive, path: Path, container: str, records: Sequence[Record], *, compress: str | None = None
) -> None:
    """Write records of an archive in any container, at a path where nothing is yet.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new file or folder.
        container: `hdf5`, `zarr`, `safetensors` or `npz`.
        records: In the order of the new archive.
        compress: As for `conversion.convert`.

    Raises:
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The disk is full, or the container has no room for the records.
        MissingPackageError: Compression was asked for, and its package is not installed.
    """
    if container == "hdf5":
        write_hdf5(source, path, records, compress=compress)
    elif container == "zarr":
        from tensorcap_formats.zarr import write_zarr

        write_zarr(source, path, records, compress=compress is not None)
    elif container == "safetensors":
        from tensorcap_formats.safetensors import write_safetensors

        write_safetensors(source, path, records)
    else:
        from tensorcap_formats.foreign import write_npz

        write_npz(source, path, records, compress=compress is not None)


def publish(finished: Path, path: Path, container: str, *, fsync: bool = False) -> None:
    """Turn the finished flat file into the archive at `path`; what was there stays until that is done.

    `path` may lie on another file system than `finished`; if it is a link, the file it links to is meant.
    """
    path = resolved(path)
    if container == "hdf5":
        _move(finished, path)
    else:
        with build_beside(path) as building, open_hdf5(finished) as source:
            write_container(source, building, container, source.records)
            put_in_place(building, path)
        finished.unlink()
    if fsync:
        _sync_folder(path.parent)


def _move(finished: Path, path: Path) -> None:
    """Rename a finished file; where that takes several steps, it stays in its place until the last one."""
    if not path.is_dir():
        try:
            finished.replace(path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            return
    with build_beside(path) as building:
        _link_or_copy(finished, building)
        put_in_place(building, path)
    finished.unlink()


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it to another file system, durably: the source is removed next."""
    with suppress(OSError):
        target.hardlink_to(source)
        return
    with source.open("rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, _COPY_BYTES)
        written.flush()
        os.fsync(written.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
