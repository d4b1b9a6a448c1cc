"""Put a finished flat file in its place, as the container that was asked for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from tensorcap_formats.errors import NotAnArchiveError, ReadError, UsageError, WriteError

SUFFIXES: Final = {".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr", ".safetensors": "safetensors"}


def container_of(path: Path, container: str | None) -> str:
    """The container to write: the one asked for, or by the path's suffix.

    Raises:
        UsageError: The container is unknown, or the suffix names none.
    """
    if container is not None and container not in SUFFIXES.values():
        raise UsageError(
            f"container {container!r} is unknown",
            hint=f"Known are: {', '.join(sorted(set(SUFFIXES.values())))}.",
        )
    found = container or SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise UsageError(
            f"{path}: suffix {path.suffix!r} names no container, expected {', '.join(SUFFIXES)}",
            hint="Choose another suffix.",
        )
    return found


def refuse_to_replace_others(path: Path) -> None:
    """Refuse an output path at which something lies that is no archive of ours.

    Raises:
        WriteError: There is a checkpoint, a dump of another tool, a text, or a folder with other things.
    """
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            raise WriteError(f"{path}: there is no folder {str(path.parent)!r}", hint="Create it first.")
        return
    from tensorcap_formats.opening import open_present

    try:
        with open_present(path) as there:
            is_ours = not there.is_foreign
    except NotAnArchiveError:
        is_ours = False
    except ReadError as error:
        raise WriteError(
            f"{path}: what is there cannot be read and is not overwritten: {error}",
            hint="Move it away first, or write to another path.",
        ) from error
    if not is_ours:
        raise WriteError(
            f"{path}: something that is no archive of tensorcap is there and is not overwritten",
            hint="Move it away first, or write to another path.",
        )


def publish(finished: Path, path: Path, container: str, *, fsync: bool = False) -> None:
    """Turn the finished flat file into the archive at `path`; what was there stays until that is done."""
    if container == "hdf5":
        replace(finished, path)
    else:
        from tensorcap_formats.hdf5 import open_hdf5

        building = path.with_name(path.name + ".building")
        remove(building)
        with open_hdf5(finished) as source:
            if container == "zarr":
                from tensorcap_formats.zarr_v3 import write_zarr

                write_zarr(source, building)
            else:
                from tensorcap_formats.safetensors_file import write_safetensors

                write_safetensors(source, building)
        replace(building, path)
        finished.unlink()
    if fsync:
        _sync_folder(path.parent)


def replace(new: Path, path: Path) -> None:
    """Rename `new` to `path`; a folder there, which no rename replaces, is moved aside and removed after."""
    aside = path.with_name(path.name + ".replaced")
    if path.is_dir() or new.is_dir():
        remove(aside)
        if os.path.lexists(path):
            path.rename(aside)
    new.replace(path)
    remove(aside)


def remove(path: Path) -> None:
    """Remove a file or a folder of ours, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
