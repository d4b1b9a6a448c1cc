"""Cases from public bug reports that containers, order and locks are about, through real commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from tensorcap.comparison import compare
from tensorcap_cli.main import main
from tensorcap_formats.dtypes import Array, dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer
from tests.support.archives import write_archive

ROOT = Path(__file__).parents[1]
CONTAINERS = ("a.h5", "a.zarr", "a.safetensors")


def tcap(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.stdout


def tcap_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which may not wait for a lock."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    return subprocess.run(
        [sys.executable, "-m", "tensorcap_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.parametrize("name", CONTAINERS)
def test_case_17_bfloat16_keeps_its_bits_its_name_and_its_values(tmp_path: Path, name: str) -> None:
    pattern = np.array([0x3F80, 0x8000, 0x7F80, 0x7FC0, 0x4049, 0x0001, 0x477F], np.uint16)
    half = np.array([1.0, 65504.0, 6e-8], np.float16)
    write_archive(tmp_path / name, {"bf": (pattern, dtype("bfloat16")), "fp": half})
    with open_archive(tmp_path / name) as archive:
        bf, fp = archive.get("bf"), archive.get("fp")
        assert (bf.dtype.name, fp.dtype.name) == ("bfloat16", "float16")
        assert archive.read(bf).tolist() == pattern.tolist()
        assert archive.read(fp).view(np.uint16).tolist() == [0x3C00, 0x7BFF, 0x0001]
    shown = json.loads(tcap("show", tmp_path / name, "bf", "--slice", ":", "--json"))
    assert shown["dtype"] == "bfloat16"
    assert shown["values"] == [1.0, -0.0, "inf", "nan", 3.140625, 2.0**-133, 65280.0]


@pytest.fixture(params=CONTAINERS)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Empty, 0-d and complex."""
    tensors = {
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
        "cplx": np.array([1 + 1j, 2 + 2j], np.complex64),
    }
    return write_archive(tmp_path / str(request.param), tensors)


def test_case_25_empty_scalar_and_complex_tensors(odd: Path) -> None:
    with open_archive(odd) as archive:
        scalar = archive.get("scalar")
        assert (scalar.shape, archive.load(scalar).shape, float(archive.load(scalar))) == ((), (), 2.5)
    target: dict[str, Array] = {
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.array([2.5], np.float32),
        "cplx": np.array([1 + 1j, 5 + 6j], np.complex64),
    }
    found = compare(odd, write_archive(odd.with_name("b.h5"), target), atol=4.0)
    empty, shape, cplx = found.pairs
    assert empty.status == "match"
    assert empty.difference is not None
    assert empty.difference.elements == 0
    assert shape.status == "shape-mismatch"  # () and (1,)
    assert cplx.status == "diverged"
    assert cplx.difference is not None
    assert cplx.difference.max_abs == 5.0


def test_case_25_an_empty_tensor_does_not_equal_a_row(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.h5", {"x": np.zeros((0, 4), np.float32)})
    write_archive(tmp_path / "b.h5", {"x": np.ones((1, 4), np.float32)})
    assert "1 shape-mismatch" in tcap(
        "compare", tmp_path / "a.h5", tmp_path / "b.h5", "--atol", "9", status=1
    )
    assert "1 identical" in tcap("compare", tmp_path / "a.h5", tmp_path / "a.h5")


def test_case_35_layer_2_comes_before_layer_10(tmp_path: Path) -> None:
    for name, error in (("ref.h5", 0.0), ("tgt.h5", 1e-2)):
        with h5py.File(tmp_path / name, "w") as file:
            for i in range(12):
                file[f"layers.{i}"] = np.full(4, 0.0 if i < 2 else error * i)
    with open_archive(tmp_path / "ref.h5") as archive:
        assert [r.key.text for r in archive.records] == [f"layers.{i}" for i in range(12)]
    output = tcap("compare", tmp_path / "ref.h5", tmp_path / "tgt.h5", "--atol", "1e-3", status=1)
    assert "FIRST DIVERGENCE  layers.2  (diverged)" in output
    assert "has no execution order: natural order of names is used instead" in output


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Path]:
    """An archive that a writer is at work on, over an earlier one if the test makes it."""
    path = tmp_path / "a.h5"
    writer = Writer(path)
    writer.add(Key("a", "output"), np.ones(4, np.float32), dtype("float32"), (4,))
    yield path
    writer.abandon(discard=True)


def test_case_52_reading_while_another_writes_is_one_line(writing: Path) -> None:
    commands: list[list[str | Path]] = [["ls"], ["show"], ["check"], ["compare", writing]]
    for command in commands:
        found = tcap_process(*command, writing)
        assert found.returncode == 3
        assert found.stderr.splitlines() == [
            f"Error: {writing}: another process is writing it",
            "Hint: Wait until the capture has ended.",
        ]


def test_case_52_the_archive_before_is_read_with_a_warning(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.h5", {"old": np.ones(1, np.float32)})
    writer = Writer(path)
    found = tcap_process("ls", path)
    writer.abandon(discard=True)
    assert found.returncode == 0
    assert "0/old/output" in found.stdout
    assert found.stderr == (
        f"Warning: {path}: another process is writing it anew; this is the archive before\n"
    )


def test_case_52_two_readers_at_once_see_the_same(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.h5", {"x": np.arange(4)})
    with open_archive(path) as archive:
        found = tcap_process("show", path, "x")
        assert archive.read(archive.records[0]).tolist() == [0, 1, 2, 3]
    assert found.stdout.endswith("[0, 1, 2, 3]\n")


def test_case_52_a_foreign_file_that_is_being_written_is_one_line(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(4)
        file.flush()
        found = tcap_process("ls", tmp_path / "a.h5")
    assert found.returncode == 3, found.stdout
    assert found.stderr.startswith(f"Error: {tmp_path / 'a.h5'}: ")
    assert len(found.stderr.splitlines()) <= 2


@pytest.mark.parametrize("name", CONTAINERS)
def test_case_53_metadata_of_200_kb_is_kept(tmp_path: Path, name: str) -> None:
    run = {"names": [f"model.layers.{i}.self_attn.q_proj" for i in range(5500)], "note": None}
    assert len(json.dumps(run)) > 200_000
    write_archive(tmp_path / name, {"x": np.ones(1, np.float32)}, run=run)
    assert json.loads(tcap("show", tmp_path / name, "--json"))["run"] == run


@pytest.mark.parametrize(
    ("name", "most_bytes"),
    [pytest.param("a.h5", 1000, id="hdf5"), pytest.param("a.safetensors", 600, id="safetensors")],
)
def test_case_55_thousands_of_small_tensors(tmp_path: Path, name: str, most_bytes: int) -> None:
    suffix = "self_attn.q_proj.lora_A.default.output.step_{:08d}.replica_0.some_long_suffix_here"
    sites = [f"model.layers.{i:05d}.{suffix.format(i)}" for i in range(6000)]
    write_archive(tmp_path / name, {site: np.full(4, i, np.float32) for i, site in enumerate(sites)})
    with open_archive(tmp_path / name) as archive:
        total = sum(float(archive.load(record)[0]) for record in archive.records)
        assert [record.key.site for record in archive.records] == sites
    assert total == 6000 * 5999 / 2
    assert len(tcap("ls", tmp_path / name).splitlines()) == 6002
    assert os.path.getsize(tmp_path / name) / 6000 < most_bytes  # name, index and HDF5 objects included
