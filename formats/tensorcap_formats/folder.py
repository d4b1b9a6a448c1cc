"""Files below a folder, none of them elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
