"""A folder whose files are opened by path as they are needed; somebody may put another in its place."""

from __future__ import annotations

import os
from pathlib import Path

from tensorcap_formats.errors import CorruptArchiveError, ReadError, UnsafeFileError


class OpenFolder:
    """A folder held open, so that its identity lasts and another one at its path is told from it.

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
        self._home = os.path.realpath(path) + os.sep

    def inside(self, path: Path) -> Path:
        """The path, if it leads to something in the folder.

        Raises:
            UnsafeFileError: It is a link that leads out.
        """
        if not os.path.realpath(path).startswith(self._home):
            raise UnsafeFileError(f"{path}: is a link to a file outside of {self._home[:-1]}")
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
        """Let go of the folder; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
