"""`tcap show`: the run, a tensor, a slice, a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tensorcap_formats.dtypes import DTYPES
from tests.support.archives import write_archive
from tests.support.floats import bfloat16

RUN = {
    "framework": {"name": "torch", "version": "2.13"},
    "model": {"class": "Llama", "config": {"hidden_size": 64}},
    "dtype": "float32",
    "command": ["tcap", "capture", "torch", "x"],
    "duration_seconds": 1.25,
    "points": [
        {"site": "model", "status": "captured", "calls": 1},
        {"site": "fused", "status": "not-capturable", "calls": 0, "reason": "scripted"},
    ],
}
VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture
def archive(write: Callable[..., Path]) -> None:
    tensors = {"0/model/output": VALUES, "0/model/input.x": VALUES[0], "1/model/output": -VALUES}
    write("a.h5", tensors, run=RUN, values={"0/model/input.causal": True})


@pytest.mark.usefixtures("archive")
def test_without_a_key_the_run_is_described(tcap: Callable[..., Any]) -> None:
    lines = tcap("show", "a.h5").stdout.splitlines()
    assert lines == [
        "a.h5: hdf5, 3 tensors, 240 B, 2 steps, Llama float32, complete",
        "  framework     name=torch version=2.13",
        "  model         class=Llama config",
        "  dtype         float32",
        "  command       tcap capture torch x",
        "  duration      1.25 s",
        "  points        1 captured, 1 not-capturable",
        "                fused: not capturable: scripted",
        "  values        1 arguments and results that are no tensors",
    ]


def test_what_was_injected_into_the_run_is_told(tcap: Callable[..., Any], write: Callable[..., Path]) -> None:
    slots = [{"site": site, "slot": "input.x", "status": "injected"} for site in ("a", "b")]
    slots.append({"site": "b", "slot": "output", "status": "left", "reason": "held"})
    write("own.h5", {"0/a/output": VALUES}, run={"injected": {"source": "ref.h5", "slots": slots}})
    expected = "2 inputs of 2 modules were replaced by those of ref.h5, after they were recorded"
    assert f"  injected      {expected}" in tcap("show", "own.h5").stdout.splitlines()


@pytest.mark.usefixtures("archive")
def test_json_of_the_run_is_all_of_it(tcap_json: Callable[..., Any]) -> None:
    assert tcap_json("show", "a.h5") == {
        "path": "a.h5",
        "records": 3,
        "container": "hdf5",
        "is_foreign": False,
        "is_complete": True,
        "is_ordered": True,
        "skipped": {},
        "run": RUN,
        "values": {"0/model/input.causal": True},
    }


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize(
    "arguments", [["a.h5", "1/model/output"], ["a.h5::1/model/output"], ["a.h5", "1/model"]]
)
def test_a_tensor_is_shown_with_statistics_and_values(tcap: Callable[..., Any], arguments: list[str]) -> None:
    lines = tcap("show", *arguments).stdout.splitlines()
    assert lines[:3] == [
        "1/model/output",
        "  float32 [2, 3, 4], 96 B, number 2 in execution order",
        "  minimum -23, maximum -0, mean -11.5, l2 65.75713, nan 0, posinf 0, neginf 0, zeros 1",
    ]
    assert lines[3].startswith("  digest ")
    assert lines[4] == "[[[ -0,  -1,  -2,  -3],"
    assert lines[-1] == "  [-20, -21, -22, -23]]]"


@pytest.mark.usefixtures("archive")
def test_a_name_that_fits_several_tensors_is_refused(tcap: Callable[..., Any]) -> None:
    found = tcap("show", "a.h5", "model", status=2).stderr
    assert "Error: a.h5: 'model' fits 3 tensors, expected one\n" in found
    assert "Hint: Name one of: 0/model/output, 0/model/input.x, 1/model/output" in found


def test_values_have_as_many_digits_as_are_asked_for(tcap: Callable[..., Any], write: Any) -> None:
    write("a.h5", {"0/net/output": np.array([1 / 3, 2.0])})
    assert tcap("show", "a.h5", "0/net/output").stdout.splitlines()[-1] == "[0.333333,        2]"
    shown = tcap("show", "a.h5", "0/net/output", "--precision", "9", "--slice", "[:1]").stdout
    assert shown.splitlines()[-1] == "[0.333333333]"
    assert "not in the range" in tcap("show", "a.h5", "0/net/output", "--precision", "0", status=2).stderr


@pytest.mark.usefixtures("archive")
def test_a_slice_is_shown(tcap: Callable[..., Any], tcap_json: Callable[..., Any]) -> None:
    arguments = ("show", "a.h5", "0/model/output", "--slice", "[1, :, 2:]")
    assert tcap(*arguments).stdout.endswith("[1, :, 2:]:\n[[14, 15],\n [18, 19],\n [22, 23]]\n")
    found = tcap_json(*arguments)
    assert (found["slice"], found["values"]) == ("[1, :, 2:]", [[14, 15], [18, 19], [22, 23]])
    assert (found["shape"], found["statistics"]["maximum"]) == ([2, 3, 4], 23.0)
    assert "is outside axis 0" in tcap("show", "a.h5", "0/model/output", "--slice", "2", status=2).stderr
    assert "need a KEY" in tcap("show", "a.h5", "--slice", "2", status=2).stderr


def test_nonfinite_values_of_a_slice_are_strings_in_json(
    tcap_json: Callable[..., Any], write: Callable[..., Path]
) -> None:
    write("a.h5", {"0/a/output": np.array([np.nan, np.inf, 1.0])})
    assert tcap_json("show", "a.h5", "a", "--slice", ":")["values"] == ["nan", "inf", 1.0]


@pytest.mark.usefixtures("archive")
def test_npy_is_written_once(tcap: Callable[..., Any], folder: Path) -> None:
    found = tcap("show", "a.h5", "0/model/output", "--npy", "x.npy")
    assert (found.stdout, found.stderr) == ("", "x.npy: 0/model/output as float32\n")
    assert (np.load(folder / "x.npy") == VALUES).all()
    again = tcap("show", "a.h5", "1/model/output", "--npy", "x.npy", status=1)
    assert again.stderr == "Error: x.npy: is there already\nHint: Replace it with --force.\n"
    tcap("show", "a.h5", "1/model/output", "--npy", "x.npy", "--force", "--slice", "0")
    assert (np.load(folder / "x.npy") == -VALUES[0]).all()


def test_bfloat16_is_widened_in_npy_and_says_so(tcap: Callable[..., Any], folder: Path) -> None:
    write_archive(folder / "a.h5", {"a": bfloat16([3.140625])})
    found = tcap("show", "a.h5", "a", "--npy", "x.npy")
    assert found.stderr == "x.npy: 0/a/output as float32, widened from bfloat16\n"
    assert np.load(folder / "x.npy").tolist() == [3.140625]


def test_a_record_without_values_shows_its_statistics(
    tcap: Callable[..., Any], write: Callable[..., Path]
) -> None:
    write("a.h5", {"0/a/output": VALUES}, stats_only=True)
    assert tcap("show", "a.h5", "a").stdout.endswith("  only its statistics were kept\n")
    found = tcap("show", "a.h5", "a", "--slice", "0", status=2).stderr
    assert "only its statistics were kept" in found


def test_foreign_tensors_have_their_statistics_computed(tcap: Callable[..., Any], folder: Path) -> None:
    np.save(folder / "a.npy", VALUES)
    output = tcap("show", "a.npy", "a").stdout
    assert "execution order unknown" in output
    assert "minimum 0, maximum 23, mean 11.5" in output


@pytest.mark.usefixtures("archive")
def test_npy_never_replaces_an_archive(
    tcap: Callable[..., Any], write: Callable[..., Path], folder: Path
) -> None:
    write("b.h5", {"0/a/output": VALUES})
    write("c.zarr", {"0/a/output": VALUES})
    (folder / "link.npy").symlink_to("a.h5")
    before = {name: (folder / name).read_bytes() for name in ("a.h5", "b.h5")}
    for name in ("a.h5", "link.npy"):
        found = tcap("show", "a.h5", "0/model/output", "--npy", name, "--force", status=2)
        assert "is the source or overlaps with it" in found.stderr
    found = tcap("show", "a.h5", "0/model/output", "--npy", "b.h5", "--force", status=1)
    assert "an archive is there and is not overwritten" in found.stderr
    found = tcap("show", "c.zarr", "a", "--npy", "c.zarr/x.npy", status=2)
    assert "overlaps" in found.stderr
    assert {name: (folder / name).read_bytes() for name in before} == before


@pytest.mark.usefixtures("archive")
def test_npy_touches_nothing_beside_it_and_follows_a_link(tcap: Callable[..., Any], folder: Path) -> None:
    (folder / "x.npy.partial").write_bytes(b"precious")
    (folder / "x.npy").symlink_to("real.npy")
    tcap("show", "a.h5", "0/model/output", "--npy", "x.npy", "--force")
    assert (folder / "x.npy").is_symlink()
    assert (np.load(folder / "real.npy") == VALUES).all()
    assert (folder / "x.npy.partial").read_bytes() == b"precious"
    assert len(list(folder.iterdir())) == 4


def test_a_remark_is_shown_with_the_tensor(tcap: Callable[..., Any], folder: Path) -> None:
    array = zarr.create_array(folder / "x.zarr", shape=(4,), chunks=(2,), dtype="f4")
    array[:2] = 1
    assert "  1 of 2 chunks are missing; the fill value was read\n" in tcap("show", "x.zarr", "x").stdout


def test_two_values_in_a_byte_are_told_beside_the_one_shape(
    write: Callable[..., Path], tcap: Callable[..., Any]
) -> None:
    codes = np.array([[0x21, 0x43]], np.uint8)  # e2m1: 1 is 0.5, 2 is 1, 3 is 1.5, 4 is 2; low half first
    write("a.h5", {"0/w/output": (codes, DTYPES["float4_e2m1fn_x2"])})
    lines = tcap("show", "a.h5", "0/w/output").stdout.splitlines()
    assert lines[1].startswith("  float4_e2m1fn_x2 [1, 2], 2 B")
    assert lines[2] == "  2 values in an element: [1, 4] values"
    assert lines[-1].split() == ["[[0.5,", "1,", "1.5,", "2]]"]
