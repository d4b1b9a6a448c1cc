"""The journal: its lines as bytes, its lock, and what it confirms."""

from __future__ import annotations

import fcntl
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import CorruptArchiveError, NewerVersionError, WriteError
from tensorcap_formats.keys import Key
from tensorcap_formats.output_path import is_locked, journal_path
from tensorcap_formats.writing import Writer
from tensorcap_formats.writing.journal import Journal, read_journal

HEAD = b'{"tensorcap_journal":1,"container":"hdf5","algorithm":"xxh3_128","run":{"seed":1}}'
RECORD = (
    b'{"key":"0/fc/output","dtype":"float32","shape":[2],"order":0,"stored":true,'
    b'"digest":"d11372a3f8d4096998cd4bf727a9d2ae","offset":2048,'
    b'"statistics":[-2.0,1.0,-0.5,2.23606797749979,0,0,0,0]}'
)
VALUE = b'{"value_of":"0/fc/input.mask","value":null}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.h5"


def line(body: bytes) -> bytes:
    return b"%s\t%08x\n" % (body, zlib.crc32(body))


@pytest.mark.spec("ARC-50", "ARC-51")
def test_a_writer_leaves_exactly_these_bytes(path: Path) -> None:
    writer = Writer(path, run={"seed": 1})
    writer.add(Key("fc", "output"), np.array([1, -2], "<f4"), dtype("float32"), (2,))
    writer.add_value("0/fc/input.mask", None)
    writer.abandon()
    assert journal_path(path).read_bytes() == line(HEAD) + line(RECORD) + line(VALUE)
    assert line(VALUE).endswith(b"\ta3282484\n")
    assert path.with_name("run.h5.partial").read_bytes() == bytes(2048) + bytes.fromhex("0000803f000000c0")


@pytest.mark.spec("ARC-51")
def test_a_journal_confirms_what_its_lines_say(path: Path) -> None:
    journal_path(path).write_bytes(line(HEAD) + line(RECORD) + line(VALUE))
    content = read_journal(path)
    assert (content.container, content.algorithm, content.run) == ("hdf5", "xxh3_128", {"seed": 1})
    assert (content.values, content.torn) == ({"0/fc/input.mask": None}, 0)
    (placed,) = content.placed
    record = placed.record
    assert (record.key.text, record.dtype.name, record.shape) == ("0/fc/output", "float32", (2,))
    assert (record.order, record.stored, record.row, placed.offset) == (0, True, 0, 2048)
    assert record.digest == "d11372a3f8d4096998cd4bf727a9d2ae"
    assert record.statistics is not None
    assert (record.statistics.minimum, record.statistics.l2) == (-2.0, 2.23606797749979)


@pytest.mark.spec("ARC-51")
def test_a_line_cut_at_any_byte_confirms_nothing(path: Path) -> None:
    whole = line(HEAD) + line(RECORD)
    for end in range(len(line(HEAD)) + 1, len(whole)):
        journal_path(path).write_bytes(whole[:end])
        content = read_journal(path)
        assert (len(content.placed), content.torn) == (0, 1), end


@pytest.mark.spec("ARC-51")
def test_a_line_with_any_byte_altered_confirms_nothing(path: Path) -> None:
    record = line(RECORD)
    for at in range(len(record)):
        altered = bytearray(record)
        altered[at] ^= 0x10
        journal_path(path).write_bytes(line(HEAD) + altered + line(VALUE))
        content = read_journal(path)
        # an altered line feed joins the line with the next one, so that both are lost
        expected = {} if at == len(record) - 1 else {"0/fc/input.mask": None}
        assert (content.placed, content.values) == ([], expected), at
        assert content.torn >= 1


@pytest.mark.spec("ARC-50")
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\n", id="blank"),
        pytest.param(line(HEAD)[:-1], id="torn"),
        pytest.param(line(VALUE), id="another-line"),
        pytest.param(line(b"{}"), id="object"),
        pytest.param(line(b'{"tensorcap_journal":"1"}'), id="version-a-text"),
        pytest.param(line(b'{"tensorcap_journal":1}'), id="no-more"),
        pytest.param(line(HEAD.replace(b'{"seed":1}', b"[1]")), id="run-a-list"),
    ],
)
def test_a_journal_without_a_first_line_is_refused(content: bytes, path: Path) -> None:
    journal_path(path).write_bytes(content)
    with pytest.raises(CorruptArchiveError, match=r"\(ARC-50\)$"):
        read_journal(path)


def test_a_newer_journal_is_refused(path: Path) -> None:
    journal_path(path).write_bytes(line(HEAD.replace(b':1,"con', b':2,"con')))
    with pytest.raises(NewerVersionError, match="journal version is 2, expected 1"):
        read_journal(path)


@pytest.mark.spec("ARC-54")
def test_whoever_holds_the_journal_locks_it(path: Path) -> None:
    assert is_locked(path) is None
    journal = Journal(path)
    assert is_locked(path) is True
    with pytest.raises(WriteError, match="another process is writing it"):
        Journal(path)
    journal.close(remove=False)
    assert is_locked(path) is False
    Journal(path).close(remove=True)
    assert is_locked(path) is None


def test_a_journal_that_its_owner_removes_in_the_meantime_is_made_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Journal(path)
    real = fcntl.flock
    calls: list[int] = []

    def lock(fd: int, operation: int) -> None:
        if not calls:  # between the second one's open and its lock, the first one ends
            calls.append(fd)
            first.close(remove=True)
        real(fd, operation)

    monkeypatch.setattr("fcntl.flock", lock)
    second = Journal(path)
    assert calls
    assert second.is_empty
    assert is_locked(path) is True
    second.close(remove=True)


def test_a_file_system_without_locks_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(*_: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", lock)
    with pytest.raises(WriteError, match=r"run\.h5\.journal: cannot be locked: No locks available"):
        Journal(path)


def test_a_reader_that_looks_at_the_journal_does_not_keep_a_writer_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal_path(path).touch()
    fd = os.open(journal_path(path), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    # The reader is done while the writer pauses for the first time.
    monkeypatch.setattr("tensorcap_formats.writing.journal.time.sleep", lambda seconds: os.close(fd))
    Journal(path).close(remove=True)
