"""Find the files below a folder, none of them outside of it, and what else is there.

`OpenFolder` is for files that are opened by path when they are needed: it notices if another folder took the
place of the one that was opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from tensorcap_formats.errors import CorruptArchiveError, ReadError, UnsafeFileError, abbreviate
from tensorcap_formats.input_file import InputFile


def list_folder(folder: Path) -> list[str]:
    """The names of what is in a folder, in no order.

    Raises:
        ReadError: The system refuses to open it.
    """
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ReadError(f"{folder}: cannot be opened: {error.strerror}") from None


def walk(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, which leaves out without a word what this user may not enter.

    Raises:
        ReadError: The system refuses to open a folder.
    """

    def refuse(error: OSError) -> None:
        raise ReadError(f"{error.filename}: cannot be opened: {error.strerror}") from None

    return os.walk(folder, onerror=refuse)


def refuse_link_out(path: Path, folder: Path, *, hint: str | None = None) -> None:
    """Refuse a path in a folder that is a link out of it, or lies below one.

    Raises:
        UnsafeFileError: It is, or does.
    """
    if not _is_below(path, os.path.realpath(folder)):
        raise UnsafeFileError(f"{path}: is a link to a file outside of {folder}", hint=hint)


def read_side_file(path: Path, folder: Path, limit: int) -> bytes:
    """All bytes of a file of a folder that says what the others are.

    Args:
        path: Of the file.
        folder: That was opened.
        limit: Bytes that it may have.

    Raises:
        UnsafeFileError: It is a link out of the folder.
        CorruptArchiveError: It has more bytes.
        NotAnArchiveError: It is no regular file.
        ReadError: The system cannot read it.
    """
    refuse_link_out(path, folder, hint="Put a copy in its place.")
    with closing(InputFile(path)) as file:
        return file.read_all(limit)


def _is_below(path: Path, folder: str) -> bool:
    """Whether a path leads to something in a folder, which is given without links."""
    try:
        return os.path.realpath(path).startswith(os.path.join(folder, ""))
    except (OSError, ValueError):
        raise UnsafeFileError(f"{abbreviate(str(path))}: is no path") from None  # a lone surrogate


def files_below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Name and path of each file with one of the suffixes.

    The name is the path in the folder, without the suffix. Folders that are links are not entered.

    Raises:
        UnsafeFileError: A file is a link that leads out of the folder.
        ReadError: The system refuses to open a folder.
    """
    for directory, folders, files in walk(folder):
        folders.sort()
        for file in sorted(files):
            path = Path(directory, file)
            if path.suffix.lower() not in suffixes:
                continue
            refuse_link_out(path, folder, hint="Put a copy in its place.")
            yield path.relative_to(folder).with_suffix("").as_posix(), path


def others_below(folder: Path, read: Iterable[Path], reason: str) -> dict[str, str]:
    """What is in the folder beside the files that were read: paths in it, and why each was not.

    A folder without any file that was read is one entry, ends in `/`, and is not looked into.
    """
    files = {os.path.relpath(path, folder) for path in read}
    entered = {os.path.dirname(name) for name in files}
    entered |= {str(parent) for name in entered for parent in Path(name).parents}
    others = {}
    for directory, folders, names in walk(folder):
        below = os.path.relpath(directory, folder)
        for name in sorted(folders + names):
            path = name if below == "." else f"{below}/{name}"
            if name in folders and path not in entered:
                others[f"{path}/"] = f"a folder with nothing that is read: {reason}"
            elif name not in folders and path not in files:
                others[path] = reason
        folders[:] = sorted(name for name in folders if os.path.normpath(f"{below}/{name}") in entered)
    return others


class OpenFolder:
    """An open folder; notices if another folder is at its path now.

    Attributes:
        path: As it was given.
    """

    def __init__(self, path: Path) -> None:
        """Open the folder.

        Raises:
            ReadError: The system refuses to open it.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(f"{path}: cannot be opened: {error.strerror}") from None
        self._identity = os.fstat(self._fd)
        self._home = os.path.realpath(path)

    def inside(self, path: Path) -> Path:
        """The path, if it leads to something in the folder.

        Raises:
            UnsafeFileError: It is a link that leads out, or no path.
        """
        if not _is_below(path, self._home):
            raise UnsafeFileError(f"{path}: is a link to a file outside of {self._home}")
        return path

    def require_unreplaced(self) -> None:
        """Refuse what was opened by path before this call, if another folder is at the path now.

        Raises:
            CorruptArchiveError: It is another, or none.
        """
        try:
            is_same = os.path.samestat(os.stat(self.path), self._identity)
        except OSError:
            is_same = False
        if not is_same:
            raise CorruptArchiveError(
                f"{self.path}: was replaced or removed since it was opened", hint="Open it anew."
            )

    def close(self) -> None:
        """Close the folder; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
