"""Members of a zip file, whose claims are checked before they are read: 100 kB do not hold 4 GiB."""

from __future__ import annotations

import struct
import threading
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

import numpy as np

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    TensorcapError,
    abbreviate,
)
from tensorcap_formats.input_file import InputFile, check_expansion

_ENCRYPTED: Final = 0x1
_LOCAL_HEADER_BYTES: Final = 30
_LARGEST_PREFIX_BYTES: Final = 1 << 16  # before a tensor in its member
_METHODS: Final = {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}
_ERRORS: Final = (  # that zipfile raises on damaged files
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    OSError,
    ValueError,
)


class ZipMembers:
    """An open zip file; members that are stored are read at their place, deflated ones as a stream.

    Args:
        path: The file.
        has_checksums: Whether the checksums of stored members are those of their bytes, and compared with
            them when a thread reads a member from its beginning to its end; torch may leave them out.

    Attributes:
        path: The file.
        file_size: Size of the file, in bytes.
        sizes: Size of each member by name, in bytes, once unpacked.
    """

    def __init__(self, path: Path, *, has_checksums: bool = False) -> None:
        """Read the directory.

        Raises:
            NotAnArchiveError: The file is no zip file.
            CorruptArchiveError: Two members have one name.
        """
        self.path = path
        self._stream = threading.local()  # the deflated member that was read last
        self._has_checksums = has_checksums
        self._checked = threading.local()  # the stored member that was read last, how far, and its checksum
        self._open_streams: set[IO[bytes]] = set()
        self._file = InputFile(path)
        self.file_size = self._file.size
        try:
            self._zip = zipfile.ZipFile(path)
        except _ERRORS as error:
            self._file.close()
            raise NotAnArchiveError(f"{path}: is no zip file: {error}") from None
        self._infos = {info.filename: info for info in self._zip.infolist()}
        if len(self._infos) != len(self._zip.infolist()):
            self.close()
            raise CorruptArchiveError(f"{path}: two members have one name, expected each once")
        self.sizes: Mapping[str, int] = {name: info.file_size for name, info in self._infos.items()}
        self._offsets: dict[str, int] = {}

    def check(self, name: str) -> None:
        """Refuse a member that cannot be read, or that claims to expand absurdly.

        Raises:
            NotAnArchiveError: It is encrypted, or compressed by an unusual method.
            CorruptArchiveError: It is not within the file.
            UnsafeFileError: It expands more than any tensor does.
        """
        info, where = self._infos[name], f"{self.path}: {abbreviate(name)!r}"
        if info.flag_bits & _ENCRYPTED:
            raise NotAnArchiveError(f"{where}: is encrypted", hint="Unpack it first.")
        if info.compress_type not in _METHODS:
            raise NotAnArchiveError(
                f"{where}: is compressed by method {info.compress_type}, expected stored or deflated"
            )
        if self.is_stored(name):
            self.offset(name)
        check_expansion(info.compress_size, info.file_size, where)

    def is_stored(self, name: str) -> bool:
        """Whether the member is not compressed."""
        return self._infos[name].compress_type == zipfile.ZIP_STORED

    def read(self, name: str, limit: int) -> bytes:
        """The first bytes of a member, `limit` at most; those of a stored one are not checked.

        Raises:
            ReadError: They cannot be read.
        """
        if self.is_stored(name):
            return self._file.read(self.offset(name), min(limit, self.sizes[name]))
        out = np.empty(min(limit, self.sizes[name]), np.uint8)
        self.read_into(name, 0, out)
        return out.tobytes()

    def read_into(self, name: str, start: int, out: Array) -> None:
        """Fill a contiguous array with a member's bytes from number `start` on.

        Raises:
            CorruptArchiveError: There are fewer, or their checksum is wrong.
        """
        if self.is_stored(name):
            self._file.read_into(self.offset(name) + start, out)
            if self._has_checksums:
                self._check_stored(name, start, out)
            return
        data = out.reshape(-1).view(np.uint8).data
        try:
            stream = self._at(name, start)
            done = 0
            while done < len(data):
                part = stream.read(min(len(data) - done, 1 << 20))
                if not part:
                    raise CorruptArchiveError(
                        f"{self.path}: {abbreviate(name)!r}: ends at byte {start + done}, "
                        f"expected {self.sizes[name]} in all"
                    )
                data[done : done + len(part)] = part
                done += len(part)
        except TensorcapError:
            raise
        except _ERRORS as error:
            self._end_stream()
            raise CorruptArchiveError(f"{self.path}: {abbreviate(name)!r}: is damaged: {error}") from None

    def _check_stored(self, name: str, start: int, out: Array) -> None:
        """Add bytes that were read to the checksum of a stored member; compare it at the end.

        Raises:
            CorruptArchiveError: This was the end, and the checksum is wrong.
        """
        known, done, checksum = getattr(self._checked, "state", ("", 0, 0))
        if (known, done) != (name, start):
            if start > _LARGEST_PREFIX_BYTES:
                return
            prefix = self._file.read(self.offset(name), start)  # the header was read before
            checksum = zlib.crc32(prefix)
        data = out.reshape(-1).view(np.uint8).data
        checksum, done = zlib.crc32(data, checksum), start + len(data)
        self._checked.state = name, done, checksum
        info = self._infos[name]
        if done == info.file_size and checksum != info.CRC:
            raise CorruptArchiveError(
                f"{self.path}: {abbreviate(name)!r}: is damaged: checksum of its bytes is {checksum:08x}, "
                f"expected {info.CRC:08x}"
            )

    def offset(self, name: str) -> int:
        """Where a stored member's bytes begin, by its local header.

        Raises:
            CorruptArchiveError: They are not within the file.
        """
        offset = self._offsets.get(name)
        if offset is None:
            info = self._infos[name]
            head = self._file.read(info.header_offset, _LOCAL_HEADER_BYTES)
            if head[:4] != b"PK\3\4":
                raise CorruptArchiveError(
                    f"{self.path}: {abbreviate(name)!r}: there is no member at byte {info.header_offset}"
                )
            lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            offset = info.header_offset + _LOCAL_HEADER_BYTES + lengths
            if offset + info.file_size > self._file.size or info.file_size != info.compress_size:
                raise CorruptArchiveError(
                    f"{self.path}: {abbreviate(name)!r}: {info.file_size} bytes at {offset} "
                    f"do not fit into the file's {self._file.size}"
                )
            self._offsets[name] = offset
        return offset

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        while self._open_streams:
            self._open_streams.pop().close()
        self._zip.close()
        self._file.close()

    def _at(self, name: str, start: int) -> IO[bytes]:
        """This thread's stream of the member, at byte `start`; going back means unpacking anew."""
        if getattr(self._stream, "name", None) != name:
            self._end_stream()
            self._stream.file = self._zip.open(self._infos[name])
            self._open_streams.add(self._stream.file)
            self._stream.name = name
        file: IO[bytes] = self._stream.file
        if file.tell() != start:
            file.seek(start)
        return file

    def _end_stream(self) -> None:
        if getattr(self._stream, "name", None) is not None:
            self._stream.name = None
            self._open_streams.discard(self._stream.file)
            self._stream.file.close()
