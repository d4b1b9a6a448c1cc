"""Parts of a tensor: parsing, reading only what is needed, printing, writing as .npy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.runs import array_summary, parse_window, read_window, summary, write_npy
from tensorcap_formats.dtypes import Array, dtype
from tensorcap_formats.errors import UsageError, WriteError

MakeArchive = Callable[..., Any]
CUBE = np.arange(2 * 50 * 40, dtype=np.float32).reshape(2, 50, 40)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("[1, 3:20:7, -1]", CUBE[1, 3:20:7, -1], id="stepped"),
        pytest.param("...", CUBE, id="all"),
        pytest.param("", CUBE, id="nothing"),
        pytest.param("0", CUBE[0], id="leading"),
        pytest.param("[:, 4, 5:9]", CUBE[:, 4, 5:9], id="middle"),
        pytest.param("..., ::13", CUBE[..., ::13], id="stepped-last"),
        pytest.param("-1, ..., :2", CUBE[-1, ..., :2], id="dots-in-the-middle"),
        pytest.param("..., 1:1", CUBE[..., 1:1], id="empty"),
        pytest.param("0,0,0", CUBE[0, 0, 0], id="scalar"),
        pytest.param(":, 45:99", CUBE[:, 45:99], id="beyond-the-end"),
    ],
)
def test_a_part_is_what_numpy_says(make_archive: MakeArchive, text: str, expected: Array) -> None:
    archive = make_archive({"a": CUBE})
    found = read_window(archive, archive.records[0], parse_window(text, CUBE.shape))
    assert found.shape == expected.shape
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("2", "index 2: is outside axis 0, which has 2 elements", id="outside"),
        pytest.param("0,0,0,0", "has 4 entries, the shape is [2, 50, 40]", id="too-many"),
        pytest.param("...,...", "has 0 entries", id="two-dots"),
        pytest.param("x", "index 'x': is no integer and no slice such as 5:8", id="letters"),
        pytest.param("__import__('os')", "is no integer and no slice", id="code"),
        pytest.param("::0", "has step 0, expected at least 1", id="step-zero"),
        pytest.param("::-1", "has step -1", id="backwards"),
        pytest.param("9" * 5000, "is no integer", id="absurd"),
    ],
)
def test_another_index_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_window(text, CUBE.shape)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 300


def test_little_is_read_for_a_small_part_of_a_large_tensor(make_archive: MakeArchive) -> None:
    class Vast(type(make_archive({}))):  # type: ignore[misc] # MemoryArchive of the conftest
        """Elements are their own numbers, and there are far too many to hold."""

        total = 0

        def _read_flat(self, record: Any, start: int, out: Array) -> None:
            self.total += out.nbytes
            out[:] = np.arange(start, start + out.size, dtype=np.int64)

    archive = Vast({"a": np.zeros(1, np.int64)})
    record = archive.records[0]
    object.__setattr__(record, "shape", (1 << 10, 1 << 15, 1 << 15))
    found = read_window(archive, record, parse_window("3, -1, 7:9", record.shape))
    assert found.tolist() == [3 * 2**30 + (2**15 - 1) * 2**15 + 7, 3 * 2**30 + (2**15 - 1) * 2**15 + 8]
    assert archive.total == 16
    text = summary(archive, record)
    assert text.splitlines()[0].split() == ["[[[", "0,", "1,", "2,", "...,", "32765,", "32766,", "32767],"]
    assert text.endswith(f"{2**40 - 2}, {2**40 - 1}]]]")
    assert archive.total < 2000


def test_values_are_printed_as_nested_brackets(make_archive: MakeArchive) -> None:
    assert array_summary(np.array([[1.0, 2.5], [np.nan, -np.inf]])) == "[[   1,  2.5],\n [ nan, -inf]]"
    assert array_summary(np.array(3.25)) == "3.25"
    assert array_summary(np.array([True, False])) == "[ True, False]"
    assert array_summary(np.zeros((0, 4))) == "[] (shape [0, 4])"
    assert array_summary(np.arange(1000)) == "[  0,   1,   2, ..., 997, 998, 999]"
    archive = make_archive({"a": (np.array([[0x21, 0x43]], np.uint8), dtype("float4_e2m1fn_x2"))})
    assert summary(archive, archive.records[0]) == "[[0.5,   1, 1.5,   2]]"
    archive = make_archive({"a": (np.full(300, 0x22, np.uint8), dtype("float4_e2m1fn_x2"))})
    assert summary(archive, archive.records[0]) == "[1, 1, 1, 1, 1, 1, ..., 1, 1, 1, 1, 1, 1]"


def test_text_is_bounded_for_any_rank(make_archive: MakeArchive) -> None:
    archive = make_archive({"a": np.zeros((2,) * 14, np.uint8)})
    assert len(summary(archive, archive.records[0])) < 3000


def test_npy_holds_the_values(make_archive: MakeArchive, tmp_path: Path) -> None:
    bfloat16 = (np.array([[0x3F80, 0x4049]], np.uint16), dtype("bfloat16"))
    archive = make_archive({"a": CUBE, "b": bfloat16, "c": np.array(2.5), "d": np.zeros((0, 3), bool)})
    written = [write_npy(archive, record, tmp_path / "x.npy", replace=True) for record in archive.records]
    assert [str(kind) for kind in written] == ["float32", "float32", "float64", "bool"]
    for record, expected in zip(
        archive.records,
        (CUBE, np.array([[1.0, 3.140625]], np.float32), np.array(2.5), np.zeros((0, 3), bool)),
        strict=True,
    ):
        write_npy(archive, record, tmp_path / "x.npy", replace=True)
        found = np.load(tmp_path / "x.npy", allow_pickle=False)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (found == expected).all()
    write_npy(archive, archive.records[0], tmp_path / "y.npy", window=parse_window("0,1", CUBE.shape))
    assert (np.load(tmp_path / "y.npy") == CUBE[0, 1]).all()


def test_a_file_that_is_there_is_kept(make_archive: MakeArchive, tmp_path: Path) -> None:
    archive = make_archive({"a": np.ones(2), "b": np.ones(2)}, unreadable="b")
    path = tmp_path / "x.npy"
    path.write_bytes(b"mine")
    with pytest.raises(WriteError, match="is there already"):
        write_npy(archive, archive.records[0], path)
    with pytest.raises(OSError, match="ends early"):
        write_npy(archive, archive.records[1], path, replace=True)
    assert path.read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]
    with pytest.raises(WriteError, match="cannot be written"):
        write_npy(archive, archive.records[0], tmp_path / "no" / "x.npy")
