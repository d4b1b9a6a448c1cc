"""`tcap ls` on real archives and files from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tensorcap_formats.dtypes import Array
from tensorcap_formats.input_file import InputFile

TENSORS = {
    "0/layers.10.mlp/output": np.array([[1.0, -8.0], [0.0, 2.0]], np.float32),
    "0/layers.2.mlp/output": np.array([math.nan, math.inf, -math.inf, 3.0], np.float16),
    "1/layers.2.mlp/output": np.arange(10, dtype=np.int64),
    "1/layers.2.mlp/input.x": np.zeros((0, 4), np.float32),
    "1/layers.2.norm/output": np.array(2.5),
}


@pytest.fixture
def archive(write: Callable[..., Path]) -> None:
    write("a.h5", TENSORS, run={"model": {"class": "zoo.Llama"}, "dtype": "bfloat16"})


def keys(output: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines() if line[:2] in ("0/", "1/")]


@pytest.mark.usefixtures("archive")
def test_every_tensor_has_a_line_in_execution_order(tcap: Callable[..., Any]) -> None:
    lines = tcap("ls", "a.h5").stdout.splitlines()
    assert lines[0] == "a.h5: hdf5, 5 tensors, 112 B, 2 steps, Llama bfloat16, complete"
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "key dtype shape size min max mean l2 nan inf",
        "0/layers.10.mlp/output float32 2x2 16 B -8 2 -1.25 8.307 0 0",
        "0/layers.2.mlp/output float16 4 8 B 3 3 3 3 1 2",
        "1/layers.2.mlp/output int64 10 80 B 0 9 4.5 16.88 0 0",
        "1/layers.2.mlp/input.x float32 0x4 0 B - - - - 0 0",
        "1/layers.2.norm/output float64 () 8 B 2.5 2.5 2.5 2.5 0 0",
    ]


@pytest.mark.usefixtures("archive")
def test_globs_choose_by_site_or_by_whole_key(tcap: Callable[..., Any]) -> None:
    output = tcap("ls", "a.h5", "*.norm", "*/input*").stdout
    assert keys(output) == ["1/layers.2.mlp/input.x", "1/layers.2.norm/output"]
    assert "2 of them match, 8 B" in output


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize(
    ("order", "first"),
    [
        pytest.param("name", "0/layers.2.mlp/output", id="natural"),
        pytest.param("size", "1/layers.2.mlp/output", id="size"),
        pytest.param("max", "1/layers.2.mlp/output", id="max"),
        pytest.param("l2", "1/layers.2.mlp/output", id="l2"),
        pytest.param("nonfinite", "0/layers.2.mlp/output", id="nonfinite"),
    ],
)
def test_sorting(tcap: Callable[..., Any], order: str, first: str) -> None:
    found = keys(tcap("ls", "a.h5", "--sort", order).stdout)
    assert found[0] == first
    assert sorted(found) == sorted(TENSORS)


@pytest.mark.usefixtures("archive")
def test_json_has_everything_a_record_has(tcap_json: Callable[..., Any]) -> None:
    found = tcap_json("ls", "a.h5", "0/layers.2.mlp/output")
    (record,) = found.pop("records")
    assert found == {
        "path": "a.h5",
        "container": "hdf5",
        "is_foreign": False,
        "is_ordered": True,
        "is_complete": True,
        "skipped": {},
    }
    assert len(record.pop("digest")) == 32
    assert record == {
        "key": "0/layers.2.mlp/output",
        "dtype": "float16",
        "shape": [4],
        "bytes": 8,
        "order": 1,
        "stored": True,
        "remark": "",
        "statistics": {
            "minimum": 3.0,
            "maximum": 3.0,
            "mean": 3.0,
            "l2": 3.0,
            "nan": 1,
            "posinf": 1,
            "neginf": 1,
            "zeros": 0,
        },
    }


def test_an_incomplete_archive_says_why(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    error = {"type": "RuntimeError", "message": "out of\n  memory \x1b[2J", "last_point": None}
    write("a.h5", TENSORS, run={"error": error}, complete=False)
    line = tcap("ls", "a.h5").stdout.splitlines()[0]
    assert line.endswith("INCOMPLETE (RuntimeError: out of memory [2J)")


def test_statistics_only_archives_say_so(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    write("a.h5", TENSORS, stats_only=True)
    output = tcap("ls", "a.h5", "0/layers.10*").stdout
    assert "statistics only" in output.splitlines()[0]
    assert "-1.25" in output


def test_foreign_files_have_no_order_and_statistics_on_demand(tcap: Callable[..., Any], folder: Path) -> None:
    tensors: dict[str, Any] = {f"layers.{i}": np.full(2, float(i)) for i in range(12)}
    np.savez(folder / "a.npz", **tensors)
    lines = tcap("ls", "a.npz").stdout.splitlines()
    assert lines[0] == ("a.npz: npz, 12 tensors, 192 B, execution order unknown, in natural order of names")
    assert [line.split()[0] for line in lines[2:]] == [f"layers.{i}" for i in range(12)]
    assert lines[-1].split()[-6:] == ["-"] * 6
    lines = tcap("ls", "a.npz", "--stats").stdout.splitlines()
    assert lines[-1].split()[-6:] == ["11", "11", "11", "15.56", "0", "0"]


def test_ten_thousand_tensors_are_listed_with_a_few_reads(
    tcap: Callable[..., Any], write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, int]] = []

    def read(file: InputFile, offset: int, count: int) -> bytes:
        reads.append((offset, count))
        return plain_read(file, offset, count)

    def read_into(file: InputFile, offset: int, out: Array) -> None:
        reads.append((offset, out.nbytes))
        plain_read_into(file, offset, out)

    plain_read, plain_read_into = InputFile.read, InputFile.read_into
    one = np.ones(4, np.float32)
    write("a.h5", {f"0/model.layers.{i}.mlp/output": one for i in range(10_000)})
    monkeypatch.setattr(InputFile, "read", read)
    monkeypatch.setattr(InputFile, "read_into", read_into)
    assert len(tcap("ls", "a.h5").stdout.splitlines()) == 10_002
    assert 0 < len(reads) < 10  # the budget in seconds is in the benchmark


def test_what_is_no_tensor_and_what_is_not_all_there_is_said(
    tcap: Callable[..., Any], tcap_json: Callable[..., Any], folder: Path
) -> None:
    group = zarr.open_group(folder / "x.zarr", mode="w", zarr_format=2)
    group.create_array("labels", data=np.array(["a", "bb"]))
    group.create_array("gone", shape=(4,), chunks=(4,), dtype="f4")
    group.create_array("half", shape=(4,), chunks=(2,), dtype="f4")[:2] = 1
    lines = tcap("ls", "x.zarr").stdout.splitlines()
    assert lines[-3:] == [
        "gone: x.zarr/gone: all of its 1 chunks are missing",
        "half: 1 of 2 chunks are missing; the fill value was read",
        "1 thing in it was not read: labels",
    ]
    found = tcap_json("ls", "x.zarr")
    assert found["skipped"] == {"labels": "an array of '<U2'"}
    assert [bool(record["remark"]) for record in found["records"]] == [True, True]
    assert tcap("check", "x.zarr", status=3).stdout.splitlines()[-1].endswith("1 problem found, 2 warnings")
    lines = tcap("convert", "x.zarr", "y.h5", "--only", "half").stderr.splitlines()
    assert lines == [
        "warning: half: 1 of 2 chunks are missing; the fill value was read",
        "warning: 1 thing in it was not read: labels",
    ]
