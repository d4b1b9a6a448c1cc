"""Journals that prove themselves and lie: one error each, and nothing is written where it should not be."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    ReadError,
    UnfinishedArchiveError,
    UsageError,
)
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import journal_path, partial_path
from tensorcap_formats.writing import Writer, recover
from tensorcap_formats.writing.journal import read_journal

HEAD: dict[str, Any] = {"tensorcap_journal": 1, "container": "hdf5", "algorithm": "xxh3_128", "run": {}}
RECORD: dict[str, Any] = {
    "key": "0/fc/output",
    "dtype": "float32",
    "shape": [2],
    "order": 0,
    "stored": True,
    "digest": "d11372a3f8d4096998cd4bf727a9d2ae",
    "offset": 2048,
    "statistics": [-2.0, 1.0, -0.5, 2.23606797749979, 0, 0, 0, 0],
}
BYTES = bytes(2048) + bytes.fromhex("0000803f000000c0")


def line(content: Any) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return b"%s\t%08x\n" % (body, zlib.crc32(body))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    partial_path(tmp_path / "run.h5").write_bytes(BYTES)
    return tmp_path / "run.h5"


def test_the_record_that_the_others_are_made_of_is_good(path: Path) -> None:
    journal_path(path).write_bytes(line(HEAD) + line(RECORD))
    assert recover(path).records == 1
    with open_archive(path) as archive:
        assert archive.read(archive.records[0]).tolist() == [1.0, -2.0]


@pytest.mark.spec("ARC-51")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "../../evil"),
        ("key", "0/a b/output"),
        ("key", "a\0b"),
        ("key", "x" * 65536),
        ("key", ""),
        ("key", 5),
        ("key", ["0/a/b"]),
        ("dtype", "float17"),
        ("dtype", None),
        ("dtype", ["float32"]),
        ("shape", [-1]),
        ("shape", [2**62, 2**62]),
        ("shape", [2**62, 0]),
        ("shape", [1] * 33),
        ("shape", "2"),
        ("shape", [2.0]),
        ("shape", None),
        ("order", "0"),
        ("order", 0.5),
        ("order", None),
        ("stored", 1),
        ("stored", None),
        ("digest", 5),
        ("offset", "2048"),
        ("offset", 2048.0),
        ("statistics", [1, 2]),
        ("statistics", 7),
        ("statistics", ["a"] * 8),
        ("statistics", "abcdefgh"),
    ],
)
def test_a_line_that_makes_no_sense_is_one_error(field: str, value: Any, path: Path) -> None:
    content = line(HEAD) + line({**RECORD, field: value})
    journal_path(path).write_bytes(content)
    with pytest.raises(CorruptArchiveError, match=r"journal: line 2: .*\(ARC-(34|51)\)$") as caught:
        recover(path)
    assert len(str(caught.value)) < 600
    assert sorted(os.listdir(path.parent)) == ["run.h5.journal", "run.h5.partial"]
    assert journal_path(path).read_bytes() == content
    assert partial_path(path).read_bytes() == BYTES


@pytest.mark.parametrize("field", sorted(RECORD))
def test_a_line_that_lacks_a_field_is_one_error(field: str, path: Path) -> None:
    journal_path(path).write_bytes(line(HEAD) + line({k: v for k, v in RECORD.items() if k != field}))
    with pytest.raises(CorruptArchiveError, match=r"line 2: is no record: KeyError\('" + field):
        recover(path)


@pytest.mark.spec("ARC-32")
def test_a_key_that_stands_twice_is_one_error(path: Path) -> None:
    journal_path(path).write_bytes(line(HEAD) + 2 * line(RECORD))
    with pytest.raises(CorruptArchiveError, match=r"key '0/fc/output' stands twice \(ARC-32\)"):
        recover(path)


@pytest.mark.parametrize(
    "body",
    [
        *(b"[1]", b"5", b"null", b'"text"', b"{", b"\xff\xfe", b"", b"[" * 100_000),
        *(b'{"value_of":"a","value":NaN}', b'{"value_of":"a","value":1e999}'),
    ],
    ids=lambda body: repr(body[:30]),
)  # fmt: skip
def test_a_line_that_is_no_object_confirms_nothing(body: bytes, path: Path) -> None:
    journal_path(path).write_bytes(line(HEAD) + line(body) + line(RECORD))
    content = read_journal(path)
    assert (len(content.placed), content.values, content.torn) == (1, {}, 1)


@pytest.mark.spec("ARC-53")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", 0),
        ("offset", 2040),
        ("offset", 2052),
        ("offset", -8),
        ("offset", 2**63),
        ("offset", 10**30),
        ("offset", None),
        ("shape", [3]),
        ("shape", [2**40]),
        ("digest", "0" * 32),
        ("digest", ""),
    ],
)
def test_a_record_whose_bytes_are_not_there_is_lost_and_the_others_are_saved(
    field: str, value: Any, path: Path
) -> None:
    bad = {**RECORD, "key": "0/bad/output", "order": 1, field: value}
    journal_path(path).write_bytes(line(HEAD) + line(bad) + line(RECORD))
    found = recover(path)
    assert (found.records, found.lost) == (1, 1)
    with open_archive(path) as archive:
        assert [r.key.text for r in archive.records] == ["0/fc/output"]
        assert archive.read(archive.records[0]).tolist() == [1.0, -2.0]


def test_a_journal_does_not_choose_where_the_archive_goes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.h5"
    path.parent.mkdir()
    partial_path(path).write_bytes(BYTES)
    head = {**HEAD, "container": "../../evil.h5"}
    journal_path(path).write_bytes(line(head) + line(RECORD))
    with pytest.raises(UsageError, match="is unknown"):
        recover(path)
    assert os.listdir(tmp_path) == ["deep"]


def test_an_unknown_digest_algorithm_is_one_error_and_loses_nothing(path: Path) -> None:
    journal_path(path).write_bytes(line({**HEAD, "algorithm": "md5"}) + line(RECORD))
    with pytest.raises(CorruptArchiveError, match="digest algorithm is 'md5'"):
        recover(path)
    assert partial_path(path).read_bytes() == BYTES


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_temporary_that_is_no_file_is_one_error(kind: str, path: Path) -> None:
    partial = partial_path(path)
    partial.unlink()
    if kind == "folder":
        partial.mkdir()
    elif kind == "pipe":
        os.mkfifo(partial)
    else:
        partial.symlink_to(path.parent / "nowhere")
    journal_path(path).write_bytes(line(HEAD) + line(RECORD))
    with pytest.raises((NotAnArchiveError, UnfinishedArchiveError)):
        recover(path)


def test_a_pipe_in_place_of_a_journal_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    os.mkfifo(journal_path(path))
    with pytest.raises(ReadError):
        open_archive(path)


def test_a_temporary_of_zeros_with_no_journal_names_recover(tmp_path: Path) -> None:
    partial = partial_path(tmp_path / "run.h5")
    partial.write_bytes(BYTES)
    with pytest.raises(UnfinishedArchiveError, match="begins with zeros") as caught:
        open_archive(partial)
    assert "tcap recover" in str(caught.value.hint)


def test_a_journal_whose_temporary_and_archive_are_of_another_run_recovers_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    writer = Writer(path)
    writer.add(Key("other", "output"), np.ones(1, "<f4"), dtype("float32"), (1,))
    writer.close()
    journal_path(path).write_bytes(line(HEAD) + line(RECORD))
    with pytest.raises(UnfinishedArchiveError, match=r"run\.h5\.partial is gone, nothing to recover"):
        recover(path)
