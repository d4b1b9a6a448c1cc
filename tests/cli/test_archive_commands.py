"""`tcap check`, `tcap recover` and `tcap convert`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

TENSORS = {f"0/layers.{i}/output": np.full((4, 4), float(i), np.float32) for i in range(3)}


@pytest.fixture
def archive(write: Callable[..., Path]) -> Path:
    return write("a.h5", TENSORS)


@pytest.mark.usefixtures("archive")
def test_a_whole_archive_has_no_problem(tcap: Callable[..., Any], tcap_json: Callable[..., Any]) -> None:
    assert tcap("check", "a.h5").stdout == "a.h5: 3 tensors, 192 B: no problem found\n"
    assert tcap_json("check", "a.h5") == {"path": "a.h5", "records": 3, "bytes": 192, "problems": []}


def test_a_flipped_bit_is_found(
    tcap: Callable[..., Any], tcap_json: Callable[..., Any], archive: Path
) -> None:
    data = bytearray(archive.read_bytes())
    at = data.index(np.full((4, 4), 2.0, np.float32).tobytes())
    data[at + 5] ^= 1
    archive.write_bytes(data)
    lines = tcap("check", "a.h5", status=3).stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("0/layers.2/output: ")
    assert lines[1] == "a.h5: 3 tensors, 192 B: 1 problem found"
    (problem,) = tcap_json("check", "a.h5", status=3)["problems"]
    assert (problem["key"], problem["is_warning"]) == ("0/layers.2/output", False)


def test_an_incomplete_run_is_a_warning(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    write("a.h5", TENSORS, complete=False)
    lines = tcap("check", "a.h5").stdout.splitlines()
    assert lines[0] == "warning: a.h5: the run that wrote it did not end as it should"
    assert lines[1] == "a.h5: 3 tensors, 192 B: 1 warning"


def test_a_truncated_archive_is_one_line(tcap: Callable[..., Any], archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:3000])
    assert tcap("check", "a.h5", status=3).output.count("\n") <= 2


def test_recover_saves_what_an_abandoned_capture_wrote(
    tcap: Callable[..., Any], tcap_json: Callable[..., Any], folder: Path
) -> None:
    for name in ("a.h5", "b.h5"):
        writer = Writer(folder / name)
        for i in range(2):
            writer.add(Key(f"layers.{i}", "output"), np.full(4, i, "<f4"), dtype("float32"), (4,))
        writer.abandon()
    assert "tcap recover a.h5" in tcap("ls", "a.h5", status=3).stderr
    assert tcap("recover", "a.h5").stdout == "a.h5: 2 tensors saved, 0 lost; incomplete\n"
    assert "INCOMPLETE" in tcap("ls", "a.h5").stdout
    assert tcap_json("recover", "b.h5", "-o", "c.h5") == {
        "path": "c.h5",
        "records": 2,
        "lost": 0,
        "torn": 0,
        "was_complete": False,
    }
    assert "nothing to recover" in tcap("recover", "c.h5", status=3).stderr


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["b.zarr"], id="zarr"),
        pytest.param(["b.safetensors"], id="safetensors"),
        pytest.param(["b.h5", "--compress"], id="zstd"),
        pytest.param(["b.h5", "--codec", "blosc2"], id="blosc2"),
    ],
)
def test_a_converted_archive_holds_the_same(tcap: Callable[..., Any], arguments: list[str]) -> None:
    assert tcap("convert", "a.h5", *arguments).stdout == f"{arguments[0]}: 3 tensors, 192 B\n"
    assert "3 of 3 reference tensors compared: 3 identical" in tcap("compare", "a.h5", arguments[0]).stdout
    assert tcap("check", arguments[0]).stdout.endswith("no problem found\n")


@pytest.mark.usefixtures("archive")
def test_npz_takes_a_selection(tcap: Callable[..., Any], tcap_json: Callable[..., Any], folder: Path) -> None:
    found = tcap_json("convert", "a.h5", "b.npz", "--only", "layers.[12]", "--exclude", "layers.2")
    assert found == {"path": "b.npz", "records": 1, "bytes": 64}
    with open_archive(folder / "b.npz") as opened:
        assert [record.key.text for record in opened.records] == ["0/layers.1/output"]
    assert "no tensor 'zz'" in tcap("convert", "a.h5", "c.npz", "--only", "zz", status=2).stderr
    assert not (folder / "c.npz").exists()
