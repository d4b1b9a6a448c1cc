"""Files below a folder, none of them elsewhere, and what else is there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tensorcap_formats.errors import UnsafeFileError


def files_below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Name and path of each file with one of the suffixes.

    The name is the path in the folder, without the suffix. Folders that are links are not entered.

    Raises:
        UnsafeFileError: A file is a link that leads out of the folder.
    """
    home = os.path.realpath(folder) + os.sep
    for where, folders, files in os.walk(folder):
        folders.sort()
        for file in sorted(files):
            path = Path(where, file)
            if path.suffix.lower() not in suffixes:
                continue
            if path.is_symlink() and not os.path.realpath(path).startswith(home):
                raise UnsafeFileError(
                    f"{path}: is a link to a file outside of {folder}", hint="Put a copy in its place."
                )
            yield path.relative_to(folder).with_suffix("").as_posix(), path


def others_below(folder: Path, read: Iterable[Path], reason: str) -> dict[str, str]:
    """What is in the folder beside the files that were read: paths in it, and why each was not.

    A folder without any file that was read is one entry, ends in `/`, and is not looked into.
    """
    files = {os.path.relpath(path, folder) for path in read}
    entered = {os.path.dirname(name) for name in files}
    entered |= {str(parent) for name in entered for parent in Path(name).parents}
    others = {}
    for where, folders, names in os.walk(folder):
        below = os.path.relpath(where, folder)
        for name in sorted(folders + names):
            path = name if below == "." else f"{below}/{name}"
            if name in folders and path not in entered:
                others[f"{path}/"] = f"a folder with nothing that is read: {reason}"
            elif name not in folders and path not in files:
                others[path] = reason
        folders[:] = sorted(name for name in folders if os.path.normpath(f"{below}/{name}") in entered)
    return others
