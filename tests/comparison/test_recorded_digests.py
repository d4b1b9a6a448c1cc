"""Identical is only what was read: an index that says so proves nothing of bytes on a disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from tensorcap.comparison import Comparison, compare, compare_records
from tensorcap.localization import bisect_archives, localize
from tensorcap.metrics import measurement
from tensorcap.testing import assert_matches
from tensorcap_cli.main import main
from tensorcap_formats.conversion import convert
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import ReadError
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.keys import Key
from tensorcap_formats.writing import Writer

SUFFIXES = [".h5", ".zarr", ".safetensors"]
COUNT = 6
ELEMENTS = 20_000


def write(path: Path, *, wrong_from: int = COUNT, equal: bool = False) -> Path:
    """Write six results of 20,000 floats each: 1.5, 2.5, … throughout, or 1.5 in all if they are equal."""
    writer = Writer(path)
    for i in range(COUNT):
        values = np.full(ELEMENTS, 1.5 + (0 if equal else i), "<f4")
        values[7] += 1.0 if i >= wrong_from else 0.0
        writer.add(Key(f"m{i}", "output"), values, dtype("float32"), (ELEMENTS,))
    writer.close()
    return path


def flip(path: Path, value: float, element: int = 500) -> None:
    """Flip the lowest bit of one element of the tensor that holds a value 20,000 times."""
    files = [path] if path.is_file() else [p for p in path.rglob("c/*") if p.is_file()]
    pattern = np.full(ELEMENTS, value, "<f4").tobytes()
    for file in files:
        data = bytearray(file.read_bytes())
        if (at := data.find(pattern)) >= 0:
            data[at + 4 * element] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("no such tensor")


def statuses(comparison: Comparison) -> list[str]:
    return [pair.status for pair in comparison.pairs]


@pytest.mark.spec("CMP-2", "CMP-70", "ARC-38")
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("element", [0, 500, 19_999])
def test_a_flipped_bit_is_a_damaged_archive(tmp_path: Path, suffix: str, side: int, element: int) -> None:
    paths = [write(tmp_path / f"{name}{suffix}") for name in ("reference", "target")]
    assert compare(*paths).exit_status == 0
    flip(paths[side], 3.5, element)
    comparison = compare(*paths)
    assert statuses(comparison) == [*["identical"] * 2, "unreadable", *["identical"] * 3]
    assert comparison.pairs[2].reason.startswith(
        f"{paths[side]}: 0/m2/output: is damaged: digest of its bytes"
    )
    assert comparison.exit_status == 3
    with pytest.raises(AssertionError, match="0/m2/output: is damaged"):
        assert_matches(paths[0], paths[1])


@pytest.mark.spec("CMP-71")
@pytest.mark.parametrize("suffix", [".h5", ".safetensors"])
def test_whoever_trusts_digests_is_told_so(tmp_path: Path, suffix: str) -> None:
    paths = [write(tmp_path / f"{name}{suffix}") for name in ("reference", "target")]
    flip(paths[1], 3.5)
    comparison = compare(*paths, trust_digests=True)
    assert (statuses(comparison), comparison.exit_status) == (["identical"] * COUNT, 0)
    assert comparison.warnings == ("6 tensors are identical by recorded digest: their bytes were not read.",)
    assert {pair.reason for pair in comparison.pairs} == {"by recorded digest"}
    one = compare_records(paths[0], "0/m2/output", paths[1], "0/m2/output", trust_digests=True)
    assert (statuses(one), one.pairs[0].reason) == (["identical"], "by recorded digest")
    assert compare_records(paths[0], "0/m2/output", paths[1], "0/m2/output").exit_status == 3
    run = CliRunner().invoke(main, ["compare", *map(str, paths), "--trust-digests"])
    assert (run.exit_code, "6 tensors are identical by recorded digest" in run.output) == (0, True)
    run = CliRunner().invoke(main, ["compare", *map(str, paths)])
    assert (run.exit_code, "is damaged" in run.output) == (3, True)


@pytest.mark.spec("CMP-71")
def test_what_another_tool_edited_is_read_even_if_digests_are_trusted(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.zarr") for name in ("reference", "target")]
    flip(paths[1], 3.5)
    assert compare(*paths, trust_digests=True).exit_status == 3


@pytest.mark.spec("CMP-70")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_damaged_tensor_is_unreadable_also_where_the_other_side_differs(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, target = write(tmp_path / f"r{suffix}"), write(tmp_path / f"t{suffix}", wrong_from=2)
    flip(reference, 3.5)
    expected = [*["identical"] * 2, "unreadable", *["diverged"] * 3]
    assert statuses(compare(reference, target, atol=0.1)) == expected
    monkeypatch.setattr(measurement, "_PART_BYTES", 1 << 15)  # a tensor is measured in three parts
    monkeypatch.setattr(measurement, "_SMALL_BYTES", 0)
    assert statuses(compare(reference, target, atol=0.1)) == expected


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the bytes of tensors that are read from files."""
    sizes: list[int] = []
    read_into = InputFile.read_into

    def counted(self: InputFile, offset: int, out: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        if out.dtype == "<f4":
            sizes.append(out.nbytes)
        read_into(self, offset, out)

    monkeypatch.setattr(InputFile, "read_into", counted)
    return lambda: sum(sizes)


@pytest.mark.spec("CMP-2")
def test_all_bytes_of_both_sides_are_read(tmp_path: Path, bytes_read: Callable[[], int]) -> None:
    reference, target = write(tmp_path / "r.h5"), write(tmp_path / "t.h5")
    assert compare(reference, target).exit_status == 0
    assert bytes_read() == 2 * COUNT * ELEMENTS * 4


@pytest.mark.spec("CMP-70")
def test_bytes_that_several_records_share_are_read_once(
    tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    reference, target = write(tmp_path / "r.h5", equal=True), write(tmp_path / "t.h5", equal=True)
    assert statuses(compare(reference, target)) == ["identical"] * COUNT
    assert bytes_read() == 2 * ELEMENTS * 4


@pytest.mark.spec("CMP-70")
def test_a_file_that_is_compared_with_itself_is_read_once(
    tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    path = write(tmp_path / "r.h5")
    link = tmp_path / "link.h5"
    link.symlink_to(path)
    assert statuses(compare(path, link)) == ["identical"] * COUNT
    assert bytes_read() == COUNT * ELEMENTS * 4


@pytest.mark.spec("CMP-72")
def test_statistics_that_are_all_there_is_are_identical_by_recorded_digest(tmp_path: Path) -> None:
    paths = []
    for name, stats_only in (("r", False), ("t", True)):
        writer = Writer(tmp_path / f"{name}.h5", stats_only=stats_only)
        writer.add(Key("m", "output"), np.full(ELEMENTS, 1.5, "<f4"), dtype("float32"), (ELEMENTS,))
        paths.append(writer.close())
    comparison = compare(*paths)
    assert [(pair.status, pair.reason) for pair in comparison.pairs] == [("identical", "by recorded digest")]
    flip(paths[0], 1.5)
    assert compare(*paths).exit_status == 3


@pytest.mark.spec("BIS-1")
def test_bisection_reads_what_digests_do_not_settle(tmp_path: Path) -> None:
    reference, target = write(tmp_path / "r.h5"), write(tmp_path / "t.h5", wrong_from=4)
    flip(target, 1.5)
    bisection = bisect_archives(reference, target, atol=0.1)
    assert (bisection.first and bisection.first.key, bisection.read[0]) == ("0/m4/output", "0/m5/output")
    flip(reference, 5.5)
    with pytest.raises(ReadError, match="0/m4/output: is damaged"):
        bisect_archives(reference, target, atol=0.1)
    same = CliRunner().invoke(main, ["bisect", str(reference), str(reference)])
    assert (same.exit_code, "(by recorded digest)" in same.output) == (0, True)


@pytest.mark.spec("LCL-7")
def test_localization_reads_all_bytes_of_both_sides(tmp_path: Path, bytes_read: Callable[[], int]) -> None:
    reference, target = write(tmp_path / "r.h5"), tmp_path / "t.h5"
    shutil.copy(reference, target)
    localization = localize(reference, target)
    assert (localization.exit_status, bytes_read()) == (0, 2 * COUNT * ELEMENTS * 4)
    assert not any("digest" in note for note in localization.notes)


@pytest.mark.spec("CMP-17")
@pytest.mark.parametrize("kind", ["h5", "zarr", "npz", "own zarr"])
def test_a_lost_chunk_has_one_word_in_every_container(tmp_path: Path, kind: str) -> None:
    values = np.arange(400.0, dtype="<f4").reshape(40, 10) + 1
    reference, target = tmp_path / "reference.npz", tmp_path / f"target.{kind.split()[-1]}"
    np.savez(reference, m=values)
    if kind == "h5":
        with h5py.File(target, "w") as file:
            file.create_dataset("m", values.shape, values.dtype, chunks=(10, 10))[:30] = values[:30]
    elif kind == "zarr":
        zarr.create_array(target, name="m", data=values, chunks=(10, 10))
        (target / "m/c/3/0").unlink()
    elif kind == "npz":
        np.savez(target, m=values)
        data = target.read_bytes()
        target.write_bytes(data.replace(values[30:].tobytes(), bytes(400)))
    else:
        convert(reference, target)
        next(path for path in target.rglob("m/c/**/*") if path.is_file()).unlink()
    comparison = compare(reference, target)
    assert (statuses(comparison), comparison.exit_status) == (["unreadable"], 3)
    assert comparison.pairs[0].difference is None
