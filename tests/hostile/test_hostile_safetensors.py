"""safetensors headers that lie."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import CorruptArchiveError, NewerVersionError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.safetensors import open_safetensors
from tensorcap_formats.writing import Writer


def lie(text: bytes, *, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(code: object = "F32", shape: object = (1,), offsets: object = (0, 4), **more: object) -> bytes:
    return json.dumps({"x": {"dtype": code, "shape": shape, "data_offsets": offsets}, **more}).encode()


TWO = json.dumps(
    {
        "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "y": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    }
).encode()
CASES = {
    "empty": (b"", "has 0 bytes, expected at least 8"),
    "seven-bytes": (b"\2\0\0\0\0\0\0", "has 7 bytes, expected at least 8"),
    "length-0": (lie(b""), "header length is 0"),
    "length-u64-max": (lie(b"{}", length=2**64 - 1), "header length is 18446744073709551615"),
    "length-one-over-the-limit": (lie(b"{}", length=100_000_001), "header length is 100000001"),
    "length-beyond-the-file": (lie(b"{}", length=99_999_999), "header of 99999999 bytes ends after"),
    "not-json": (lie(b"hello"), "header is not JSON"),
    "not-utf8": (lie(b'{"\xff":1}'), "header is not JSON"),
    "deep-json": (lie(b"[" * 100_000), "header is not JSON"),
    "huge-number": (lie(b'{"x":' + b"9" * 10_000 + b"}"), "header is not JSON"),
    "a-list": (lie(b"[]"), "is a JSON list, expected an object"),
    "name-twice": (lie(b'{"x":{},"x":{}}'), "header has 'x' twice"),
    "field-twice": (lie(b'{"x":{"dtype":"U8","dtype":"U8"}}'), "header has 'dtype' twice"),
    "metadata-no-strings": (lie(b'{"__metadata__":{"a":1}}'), "__metadata__ is no object of strings"),
    "entry-no-object": (lie(b'{"x":[1]}'), r"'x': is \[1\], expected an object"),
    "unknown-dtype": (lie(entry("F33")), "dtype is 'F33', expected one of"),
    "dtype-no-text": (lie(entry(["F32"])), r"dtype is \['F32'\]"),
    "negative-size": (lie(entry(shape=[-1, -1])), r"shape is \[-1, -1\]"),
    "size-true": (lie(entry(shape=[True])), r"shape is \[True\]"),
    "size-a-float": (lie(entry(shape=[1.0])), r"shape is \[1.0\]"),
    "size-above-int64": (lie(entry(shape=[2**63, 0], offsets=[0, 0])), "shape is"),
    "sizes-that-overflow-64-bits-to-4": (lie(entry(shape=[2**62, 2**2 + 1]), data=bytes(4)), "has 4 bytes"),
    "a-thousand-axes": (lie(entry(shape=[1] * 1000), data=bytes(4)), "expected up to 33 sizes"),
    "empty-but-absurd": (lie(entry(shape=[0, 2**62, 2**62], offsets=[0, 0])), "shape is"),
    "one-offset": (lie(entry(offsets=[0])), r"data_offsets is \[0\]"),
    "offsets-backwards": (lie(entry(offsets=[4, 0]), data=bytes(4)), "has -4 bytes"),
    "outside-the-file": (lie(entry(offsets=[0, 4]), data=bytes(3)), "expected"),
    "gap": (lie(entry(offsets=[4, 8]), data=bytes(8)), "tensors leave no gap"),
    "overlap": (lie(TWO, data=bytes(6)), "tensors leave no gap and do not overlap"),
    "bytes-behind": (lie(entry(), data=bytes(5)), "expected"),
    "wrong-size": (lie(entry(shape=[2]), data=bytes(4)), "has 4 bytes, expected those of F32"),
    "odd-fp4": (lie(entry("F4", [2, 1], [0, 1]), data=bytes(1)), "has an odd last axis"),
    "name-of-64-KiB": (
        lie(json.dumps({"n" * 65536: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()),
        r"is 65536 bytes long, expected 1 to 4096 \(NAM-6\)",
    ),
    "name-empty": (lie(b'{"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "is 0 bytes long"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lie_is_one_line_and_allocates_nothing(tmp_path: Path, case: str) -> None:
    data, reason = CASES[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptArchiveError, match=reason) as caught:
            open_safetensors(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    "name", ["../../evil", "/abs/evil", "a\\..\\b", "ok/../../evil2", "nul\0", "new\nline", "\ud800"]
)
def test_names_that_lead_out_are_encoded(tmp_path: Path, name: str) -> None:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    (tmp_path / "x.safetensors").write_bytes(lie(json.dumps(header).encode(), data=bytes(4)))
    with open_safetensors(tmp_path / "x.safetensors") as archive:
        key = archive.records[0].key
        assert not set(key.path) & set("\\\0\n")
        assert not {".", ".."} & set(key.path.split("/"))
        assert not key.path.startswith("/")


def archive_with(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """An archive whose header and index were changed."""
    writer = Writer(path)
    writer.add(Key("m", "output"), np.ones(4, np.uint8), dtype("uint8"), (4,))
    writer.close()
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    index = json.loads(header["__metadata__"]["index"])
    change(header, index)
    if "index" in header["__metadata__"]:
        del index["seal"]
        body = json.dumps(index)[:-1]
        seal = hashlib.blake2b((body + header["__metadata__"].get("run", "")).encode(), digest_size=16)
        header["__metadata__"]["index"] = f'{body},"seal":"{seal.hexdigest()}"}}'
    path.write_bytes(lie(json.dumps(header).encode(), data=data[8 + length :]))


CHANGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], type[Exception], str]] = {
    "newer-major": (
        lambda h, i: h["__metadata__"].update(tensorcap="2.0"),
        NewerVersionError,
        "archive format is 2.0",
    ),
    "no-index": (lambda h, i: h["__metadata__"].pop("index"), CorruptArchiveError, "index: is not JSON"),
    "no-run": (lambda h, i: h["__metadata__"].pop("run"), CorruptArchiveError, "run: is not JSON"),
    "tensor-missing": (
        lambda h, i: h.update({"0/n/output": h.pop("0/m/output")}),
        CorruptArchiveError,
        "'0/m/output' is missing",
    ),
    "other-shape": (
        lambda h, i: h["0/m/output"].update(shape=[2, 2]),
        CorruptArchiveError,
        r"is U8 of shape \[2, 2\], expected U8 of shape \[4\]",
    ),
    "one-more": (
        lambda h, i: h.update({"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
        CorruptArchiveError,
        "names 2 tensors, expected 1",
    ),
    "absurd-shape-in-the-index": (
        lambda h, i: i.update(shape=[[2**40, 2**40]]),
        CorruptArchiveError,
        "ARC-34",
    ),
}


@pytest.mark.spec("ARC-62")
@pytest.mark.parametrize("case", CHANGES)
def test_an_index_that_contradicts_the_header_is_refused(tmp_path: Path, case: str) -> None:
    change, error, reason = CHANGES[case]
    archive_with(tmp_path / "x.safetensors", change)
    with pytest.raises(error, match=reason):
        open_archive(tmp_path / "x.safetensors")


@pytest.mark.parametrize("cut", [1, 4, 100])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    archive_with(path, lambda h, i: None)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptArchiveError):
        open_archive(path)


def test_a_file_that_shrinks_while_it_is_open_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    archive_with(path, lambda h, i: None)
    with open_archive(path) as archive:
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(CorruptArchiveError, match="ends at byte"):
            archive.read(archive.records[0])
