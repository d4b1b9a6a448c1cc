"""The journal beside an unfinished archive: one line for each record or value that is safely in the file.

A line is JSON, a tab, and the CRC-32 of the JSON in hexadecimal (specs/archive.md, section 6). It is
appended with one write after the bytes of the tensor, so an intact line proves that they are there.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from tensorcap_formats.digests import KNOWN_ALGORITHMS
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NewerVersionError,
    UsageError,
    WriteError,
    abbreviate,
)
from tensorcap_formats.index import encode_json, finite_number, parse_shape
from tensorcap_formats.keys import Key
from tensorcap_formats.output_path import OPEN_TO_READ, journal_path
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics

JOURNAL_VERSION: Final = 1
_BEGINNING: Final = b'{"tensorcap_journal":'
_OPEN_JOURNAL: Final = (  # a pipe at the path does not block, and nothing is written through a link
    os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
)
_LOCK_TRIES: Final = 10
_LOCK_PAUSE_SECONDS: Final = 0.005
_HELD: Final[WeakSet[Journal]] = WeakSet()  # a forked process would keep their locks when this one is dead


@dataclass(frozen=True, slots=True)
class Placed:
    """A record and the offset of its bytes in the flat file; None if it has no bytes there."""

    record: Record
    offset: int | None


@dataclass(frozen=True, slots=True)
class JournalContent:
    """The content of a journal.

    Attributes:
        container: The container that the archive was to become.
        algorithm: Digest algorithm.
        run: Run metadata as known at the start.
        placed: Records in the order in which they were written.
        values: Values that are no tensors, by key text.
        torn: Count of lines that were cut short or altered, which confirm nothing.
    """

    container: str
    algorithm: str
    run: dict[str, Any]
    placed: list[Placed]
    values: dict[str, Any]
    torn: int


class Journal:
    """The journal of one archive, held open and locked: its holder may write the archive."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal of the archive at `path`, and lock it.

        Raises:
            WriteError: Another process holds it, it cannot be created, or what is there is no regular file.
        """
        self.path = journal_path(path)
        while True:
            try:
                self._fd = os.open(self.path, _OPEN_JOURNAL, 0o666)
            except OSError as error:
                raise WriteError(f"{self.path}: cannot be written: {error.strerror}") from error
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.close(self._fd)
                raise WriteError(
                    f"{self.path}: is no regular file, expected a journal or nothing", hint="Move it away."
                )
            try:
                self._lock()
            except BlockingIOError:
                os.close(self._fd)
                raise WriteError(
                    f"{path}: another process is writing it", hint="Wait for it, or write to another path."
                ) from None
            except OSError as error:  # a file system without locks
                os.close(self._fd)
                raise WriteError(f"{self.path}: cannot be locked: {error.strerror}") from error
            if self._is_still_there():
                _HELD.add(self)
                return
            os.close(self._fd)  # its owner finished and removed it between our open and our lock

    def _lock(self) -> None:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # perhaps by `is_locked`, for microseconds
                time.sleep(_LOCK_PAUSE_SECONDS)
            else:
                return
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _is_still_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    @property
    def is_held(self) -> bool:
        """Whether this process may write; one that was forked off the holder may not."""
        return self._fd >= 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written to it."""
        return os.fstat(self._fd).st_size == 0

    @property
    def confirms_nothing(self) -> bool:
        """Whether its writer was killed before it confirmed anything: there is no second line."""
        with open(self.path, "rb", opener=_open_to_read) as file:
            first, second = file.readline(), file.readline()
        is_ours = first.startswith(_BEGINNING) or _BEGINNING.startswith(first)
        return is_ours and not second.endswith(b"\n")

    def clear(self, partial: Path) -> None:
        """Remove what a writer left that confirmed nothing, which then can be started anew.

        Args:
            partial: Its file, which goes first: without a journal it would be somebody else's.
        """
        if partial.is_file() and not partial.is_symlink():
            partial.unlink()
        os.ftruncate(self._fd, 0)

    def start(self, container: str, algorithm: str, run: Mapping[str, Any]) -> None:
        """Write the first line."""
        self._append(
            {
                "tensorcap_journal": JOURNAL_VERSION,
                "container": container,
                "algorithm": algorithm,
                "run": run,
            }
        )

    def confirm(self, placed: Placed) -> None:
        """Write that a record is in the file, with its statistics."""
        record, s = placed.record, placed.record.statistics
        statistics = None if s is None else [getattr(s, name) for name in s.__dataclass_fields__]
        self._append(
            {
                "key": record.key.text,
                "dtype": record.dtype.name,
                "shape": record.shape,
                "order": record.order,
                "stored": record.stored,
                "digest": record.digest,
                "offset": placed.offset,
                "statistics": statistics,
            }
        )

    def confirm_value(self, key_text: str, value: object) -> None:
        """Write a value that is no tensor."""
        self._append({"value_of": key_text, "value": value})

    def sync(self) -> None:
        """Make the lines durable."""
        os.fsync(self._fd)

    def _append(self, line: Mapping[str, Any]) -> None:
        body = encode_json(line)
        data = memoryview(b"%s\t%08x\n" % (body, zlib.crc32(body)))
        while data:  # once, save on a full disk, where the second write says what is wrong
            data = data[os.write(self._fd, data) :]

    def close(self, *, remove: bool) -> None:
        """Unlock the journal, and remove it when the archive is complete or was never begun."""
        if not self.is_held:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Let go of the file; in a forked process, the lock stays with the one that took it."""
        if self.is_held:
            os.close(self._fd)
            self._fd = -1


def read_journal(path: Path) -> JournalContent:
    """Read the journal of the archive at `path`; lines with a wrong checksum count as torn.

    Raises:
        CorruptArchiveError: The first line cannot be read, or an intact line is no record.
        NewerVersionError: A newer version of the journal.
    """
    source = journal_path(path)
    head: dict[str, Any] | None = None
    content = JournalContent("", "", {}, [], {}, 0)
    texts: set[str] = set()
    torn = 0
    with open(source, "rb", opener=_open_to_read) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CorruptArchiveError(f"{source}: is no regular file (ARC-55)")
        for number, row in enumerate(file):
            line = _parse(row)
            if number == 0:
                head = _check_head(line, source)
            elif line is None:
                torn += 1
            elif "value_of" in line:
                content.values[str(line["value_of"])] = line.get("value")
            else:
                placed = _placed(line, len(content.placed), f"{source}: line {number + 1}")
                if placed.record.key.text in texts:
                    raise CorruptArchiveError(
                        f"{source}: key {placed.record.key.text!r} stands twice (ARC-32)"
                    )
                texts.add(placed.record.key.text)
                content.placed.append(placed)
    if head is None:
        raise CorruptArchiveError(f"{source}: is empty: nothing was captured before the writer died (ARC-50)")
    return JournalContent(
        head["container"], head["algorithm"], head["run"], content.placed, content.values, torn
    )


def _release_in_child() -> None:
    for journal in list(_HELD):
        journal.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def _open_to_read(path: str, _: int) -> int:
    return os.open(path, OPEN_TO_READ)


def _parse(row: bytes) -> dict[str, Any] | None:
    body, tab, crc = row.rpartition(b"\t")
    if not tab or crc != b"%08x\n" % zlib.crc32(body):
        return None
    try:
        line = json.loads(body, parse_constant=finite_number, parse_float=finite_number)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _check_head(line: dict[str, Any] | None, source: Path) -> dict[str, Any]:
    version = line.get("tensorcap_journal") if line else None
    if line is None or type(version) is not int:
        raise CorruptArchiveError(f"{source}: the first line is not that of a journal (ARC-50)")
    if version > JOURNAL_VERSION:
        raise NewerVersionError(
            f"{source}: journal version is {version}, expected {JOURNAL_VERSION} (ARC-50)",
            hint="Recover it with the version of tensorcap that wrote it.",
        )
    fields = [line.get(name) for name in ("container", "algorithm", "run")]
    if not all(map(isinstance, fields, (str, str, dict))):
        raise CorruptArchiveError(f"{source}: the first line lacks container, algorithm or run (ARC-50)")
    if line["algorithm"] not in KNOWN_ALGORITHMS:
        raise CorruptArchiveError(
            f"{source}: digest algorithm is {abbreviate(repr(line['algorithm']))}, "
            f"known are {', '.join(KNOWN_ALGORITHMS)} (ARC-50)"
        )
    return line


def _placed(line: dict[str, Any], row: int, source: str) -> Placed:
    try:
        logical = DTYPES[line["dtype"]]
        shape = parse_shape(line["shape"], logical.itemsize, source)
        numbers, offset = line["statistics"], line["offset"]
        key, order, digest, stored = (line[name] for name in ("key", "order", "digest", "stored"))
        types = ((key, str), (order, int), (digest, str), (stored, bool), (offset, int | None))
        if not all(isinstance(value, kind) for value, kind in types):
            raise TypeError("a value of a wrong type")
        if numbers is not None and not all(isinstance(n, int | float | None) for n in numbers):
            raise TypeError("statistics of a wrong type")
        statistics = None if numbers is None else Statistics(*numbers)
        record = Record(Key.parse(key), logical, shape, order, digest, statistics, stored, row)
        return Placed(record, offset)
    except (KeyError, TypeError, UsageError) as error:
        raise CorruptArchiveError(f"{source}: is no record: {error!r} (ARC-51)") from None
