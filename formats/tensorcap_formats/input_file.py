"""A file that is read at given positions, by several threads if need be; a limit on what it unpacks to."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, UnsafeFileError

_ALWAYS_ALLOWED_BYTES: Final = 256 * 1024 * 1024  # so much is harmless, however far a file expands
_ALWAYS_ALLOWED_TOTAL: Final = 16 * 1024 * 1024 * 1024  # of all tensors of a file: a minute's reading
_MAX_RATIO: Final = 200
_UNCOMPRESSED: Final = "If it is what you mean to read, store it without compression first."


class InputFile:
    """A regular file, or a part of one, open for reading.

    Reads do not move a position, so threads may share it.

    Attributes:
        path: As it was given.
        size: In bytes, when it was opened.
    """

    def __init__(self, path: Path, *, part: tuple[int, int] | None = None) -> None:
        """Open the file.

        Args:
            path: Of the file.
            part: Offset and size in bytes of the part that counts as the file, which is within it.

        Raises:
            NotAnArchiveError: There is no regular file at `path` (a pipe or a device would block).
            ReadError: The system refuses to open it.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise NotAnArchiveError(f"{path}: there is no such file") from None
        except (OSError, ValueError) as error:
            raise ReadError(f"{path}: cannot be opened: {_reason(error)}") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise NotAnArchiveError(f"{path}: is no regular file")
        self._origin, self.size = part or (0, status.st_size)

    def read_into(self, offset: int, out: Array) -> None:
        """Fill a contiguous array with the bytes from `offset` on.

        Raises:
            CorruptArchiveError: The file ends before the array is full.
            ReadError: The system cannot read it.
        """
        data = out.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(data):
            try:
                count = os.preadv(self._fd, [data[done:]], self._origin + offset + done)
            except OSError as error:
                raise ReadError(f"{self.path}: cannot be read: {_reason(error)}") from None
            if not count:
                raise CorruptArchiveError(
                    f"{self.path}: ends at byte {offset + done}, expected at least {offset + len(data)}"
                )
            done += count

    def read(self, offset: int, count: int) -> bytes:
        """The `count` bytes from `offset` on; nothing is allocated for bytes that the file has not.

        Raises:
            CorruptArchiveError: The file ends before them.
            ReadError: The system cannot read it.
        """
        if not 0 <= offset <= offset + count <= self.size:
            raise CorruptArchiveError(
                f"{self.path}: has {self.size} bytes, expected at least {offset + count}"
            )
        out = np.empty(count, np.uint8)
        self.read_into(offset, out)
        return out.tobytes()

    def read_all(self, limit: int) -> bytes:
        """All bytes of a file of at most `limit` bytes.

        Raises:
            CorruptArchiveError: The file has more.
            ReadError: The system cannot read it.
        """
        if self.size > limit:
            raise CorruptArchiveError(f"{self.path}: has {self.size} bytes, expected at most {limit}")
        return self.read(0, self.size)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_stored(path: Path, file_size: int, itemsize: int, offset: int, start: int, out: Array) -> None:
    """Fill `out` with elements of a file that is open only meanwhile: a folder may hold thousands.

    Args:
        path: Of the file.
        file_size: The size of the whole file when it was opened first, in bytes.
        itemsize: Size of an element, in bytes.
        offset: Byte at which element 0 begins.
        start: The element to begin with.
        out: One-dimensional.

    Raises:
        CorruptArchiveError: The file is of another size by now.
        ReadError: It cannot be read.
    """
    with closing(InputFile(path)) as file:
        if file.size != file_size:
            raise CorruptArchiveError(f"{path}: has {file.size} bytes, {file_size} when it was opened")
        file.read_into(offset + start * itemsize, out)


def check_expansion(stored_bytes: int, declared_bytes: int, where: str, *, hint: str = _UNCOMPRESSED) -> None:
    """Refuse what expands to more than 256 MiB and more than 200 times its stored size.

    Raises:
        UnsafeFileError: It does.
    """
    if not is_credible(stored_bytes, declared_bytes):
        raise UnsafeFileError(
            f"{where}: {stored_bytes} stored bytes claim to expand to {declared_bytes}, "
            f"expected at most {_MAX_RATIO} times as many",
            hint=hint,
        )


def is_credible(stored_bytes: int, declared_bytes: int) -> bool:
    """Whether so much may come of what is stored: 256 MiB, or 200 times as many bytes."""
    return declared_bytes <= max(_ALWAYS_ALLOWED_BYTES, _MAX_RATIO * stored_bytes)


def check_total(stored_bytes: int, declared_bytes: int, where: str) -> None:
    """Refuse tensors that share bytes so often that to read all of them would take all day.

    Args:
        stored_bytes: Of what holds them.
        declared_bytes: Of all of them.
        where: For the message.

    Raises:
        UnsafeFileError: They have more than 16 GiB, and more than 200 times what is stored.
    """
    if declared_bytes > max(_ALWAYS_ALLOWED_TOTAL, _MAX_RATIO * stored_bytes):
        raise UnsafeFileError(
            f"{where}: {stored_bytes} stored bytes claim to be {declared_bytes} bytes of tensors, "
            f"expected at most {_MAX_RATIO} times as many",
            hint="If it is what you mean to read, store each tensor by itself first.",
        )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
