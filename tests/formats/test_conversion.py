"""Archives converted between containers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from safetensors import safe_open

from tensorcap_formats import conversion
from tensorcap_formats.archive import Archive
from tensorcap_formats.check import check_archive
from tensorcap_formats.conversion import convert
from tensorcap_formats.dtypes import DTYPES, dtype
from tensorcap_formats.errors import (
    CorruptArchiveError,
    TensorNotFoundError,
    UnfinishedArchiveError,
    UsageError,
    WriteError,
)
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import unique_beside
from tensorcap_formats.writing import Writer, recover
from tests.support.progress import RecordedProgress

TARGETS = [
    ("h5", None),
    ("h5", "zstd"),
    ("h5", "blosc2"),
    ("zarr", None),
    ("zarr", "zstd"),
    ("safetensors", None),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Every dtype, a link, a scalar, an empty tensor, a large compressible one."""
    writer = Writer(tmp_path / "source.h5", run={"steps": 2})
    for number, (name, logical) in enumerate(DTYPES.items()):
        raw = np.arange(6 * logical.itemsize, dtype=np.uint8)
        bits = (raw % 2 if name == "bool" else raw).view(logical.storage)
        writer.add(Key(f"m.{name}", "output"), bits, logical, (2, 3), order=2 * number)
    writer.add(Key("again", "input.x", step=1), bits, logical, (2, 3), order=900)
    writer.add(Key("scalar", "output"), np.array(2.5), dtype("float64"), (), order=901)
    writer.add(Key("empty", "output"), np.zeros((0, 4), "<u2"), dtype("bfloat16"), (0, 4), order=902)
    large = np.repeat(np.arange(3 * 7, dtype="<i4"), 10_000).reshape(3, 70_000)
    writer.add(Key("large", "output"), large, dtype("int32"), large.shape, order=903)
    writer.add_value("0/m/input.scale", 0.5)
    return writer.close(complete=False)


def content(archive: Archive) -> list[object]:
    return [
        (r.key.text, r.dtype.name, r.shape, r.order, r.digest, r.statistics, archive.read(r).tobytes())
        for r in archive.records
    ]


@pytest.mark.parametrize(("suffix", "compress"), TARGETS)
def test_everything_is_kept(source: Path, tmp_path: Path, suffix: str, compress: str | None) -> None:
    path = tmp_path / f"target.{suffix}"
    with open_archive(source) as before:
        assert convert(before, path, compress=compress) == path
        with open_archive(path) as after:
            assert content(after) == content(before)
            assert (after.run, after.values) == ({"steps": 2}, {"0/m/input.scale": 0.5})
            assert (after.is_complete, after.is_ordered, after.is_foreign) == (False, True, False)
            assert [p.what for p in check_archive(after).problems] == [
                "the run that wrote it did not end as it should"
            ]
            blocks = [b.copy() for b in after.blocks(after.get("large"), 40_001)]
            assert np.concatenate(blocks).tobytes() == before.read(before.get("large")).tobytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.h5", path.name]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(["h5", "zarr", "safetensors"], 2)))
def test_a_way_there_and_back_changes_nothing(source: Path, tmp_path: Path, first: str, second: str) -> None:
    with open_archive(source) as before:
        convert(before, tmp_path / f"a.{first}")
        with open_archive(tmp_path / f"a.{first}") as between:
            convert(between, tmp_path / f"b.{second}")
        with open_archive(tmp_path / f"b.{second}") as after:
            assert content(after) == content(before)


@pytest.mark.spec("ARC-24")
@pytest.mark.parametrize("compress", ["zstd", "blosc2"])
def test_compressed_hdf5_is_read_by_plain_h5py(source: Path, tmp_path: Path, compress: str) -> None:
    with open_archive(source) as archive:
        convert(archive, tmp_path / "x.h5", compress=compress)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["steps/0/large/output"][1, 20_000] == 9
        assert file["steps/0/large/output"].chunks is not None
        assert file["steps/0/m.float16/output"].dtype == np.float16
        assert file["steps/0/m.bfloat16/output"][0, 1] == np.array([0x03020000], "<u4").view("<f4")[0]
        last = list(DTYPES)[-1]
        assert file["steps/1/again/input.x"] == file[f"steps/0/m.{last}/output"]  # one object, two links
    assert (tmp_path / "x.h5").stat().st_size < source.stat().st_size / 2


@pytest.mark.parametrize("compress", ["zstd", "blosc2"])
def test_a_process_that_compresses_nothing_reads_compressed_hdf5(
    source: Path, tmp_path: Path, compress: str
) -> None:
    with open_archive(source) as archive:
        convert(archive, tmp_path / "x.h5", compress=compress)
    code = (
        "import sys; from tensorcap_formats.open import open_archive; a = open_archive(sys.argv[1]); "
        "print(a.load(a.get('large'))[1, 20_000])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.h5"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(conversion.__file__).parents[1])},
    )
    assert done.stdout == "9\n"


@pytest.mark.spec("ARC-60", "ARC-61")
@pytest.mark.parametrize("compress", [None, "zstd"])
def test_a_zarr_archive_is_read_by_the_zarr_library(
    source: Path, tmp_path: Path, compress: str | None
) -> None:
    with open_archive(source) as archive:
        convert(archive, tmp_path / "x.zarr", compress=compress)
    group = zarr.open_group(tmp_path / "x.zarr", mode="r")
    assert group.attrs["tensorcap"] == "1.0"
    assert json.loads(bytes(np.asarray(group["index"][:])))["tensorcap"] == "1.0"  # type: ignore[index]
    assert "again" not in group["steps"]  # type: ignore[operator]  # stored once, under its first key
    large = zarr.open_array(tmp_path / "x.zarr", path="steps/0/large/output", mode="r")
    assert np.asarray(large[...]).tolist() == np.repeat(np.arange(21), 10_000).reshape(3, 70_000).tolist()
    scalar = zarr.open_array(tmp_path / "x.zarr", path="steps/0/scalar/output", mode="r")
    assert (scalar.shape, float(np.asarray(scalar[...]))) == ((), 2.5)
    empty = zarr.open_array(tmp_path / "x.zarr", path="steps/0/empty/output", mode="r")
    assert (empty.shape, str(empty.dtype), empty.attrs["dtype"]) == ((0, 4), "uint16", "bfloat16")


def test_a_safetensors_archive_is_read_by_the_safetensors_library(source: Path, tmp_path: Path) -> None:
    with open_archive(source) as archive:
        convert(archive, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["tensorcap"] == "1.0"
        assert json.loads(file.metadata()["index"])["tensorcap"] == "1.0"
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    assert tensors["0/large/output"][1, 20_000] == 9
    assert tensors["0/m.bfloat16/output"].shape == (2, 3)
    assert tensors["0/m.float4_e2m1fn_x2/output"].shape == (2, 3)
    assert tensors["0/m.complex128/output"].shape == (2, 3, 16)
    assert "1/again/input.x" not in tensors


def test_npz_has_the_exact_bits_and_names_their_dtypes(source: Path, tmp_path: Path) -> None:
    with open_archive(source) as archive:
        convert(archive, tmp_path / "x.npz")
        with np.load(tmp_path / "x.npz") as file:
            assert file["0/m.bfloat16/output"].tolist() == [
                [0x0100, 0x0302, 0x0504],
                [0x0706, 0x0908, 0x0B0A],
            ]
            assert file["0/large/output"].shape == (3, 70_000)
        with open_archive(tmp_path / "x.npz") as after:
            assert {(r.key.text, r.dtype.name, r.shape) for r in after.records} == {
                (r.key.text, r.dtype.name, r.shape) for r in archive.records
            }
            for record in after.records:
                assert after.read(record).tobytes() == archive.read(archive.get(record.key)).tobytes()


def test_members_of_an_npz_stay_inside_when_unpacked(tmp_path: Path) -> None:
    names = ["../../evil", "/abs/evil", "a\\..\\b", "ok/../../evil2"]
    np.savez(tmp_path / "x.npz", **dict.fromkeys(names, np.ones(1)))  # type: ignore[arg-type]  # the stub takes it for allow_pickle
    with open_archive(tmp_path / "x.npz") as archive:
        convert(archive, tmp_path / "y.npz")
        before = [r.key.text for r in archive.records]
    with open_archive(tmp_path / "y.npz") as archive:
        assert [r.key.text for r in archive.records] == before
    with zipfile.ZipFile(tmp_path / "y.npz") as file:
        assert set(file.namelist()) == {
            "%2E%2E/%2E%2E/evil.npy",
            "%2Fabs/evil.npy",
            "a%5C..%5Cb.npy",
            "ok/%2E%2E/%2E%2E/evil2.npy",
            "__dtypes__.json",
        }


@pytest.mark.parametrize("suffix", ["h5", "zarr", "safetensors"])
def test_a_file_from_elsewhere_keeps_its_names_and_has_no_order(tmp_path: Path, suffix: str) -> None:
    arrays = {"layers.10": np.ones(3), "layers.2": np.ones(3), "a b/c": np.zeros((2, 2), np.float16)}
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]  # as above
    with open_archive(tmp_path / "x.npz") as before:
        convert(before, tmp_path / f"y.{suffix}")
    with open_archive(tmp_path / f"y.{suffix}") as after:
        assert [r.key.text for r in after.records] == ["a%20b/c", "layers.2", "layers.10"]
        assert (after.is_ordered, after.is_foreign) == (False, False)
        assert after.records[1].digest == after.records[2].digest
        assert after.records[0].statistics is not None
        assert after.records[0].statistics.zeros == 4
        assert after.load(after.records[2]).tolist() == [1.0, 1.0, 1.0]
        assert check_archive(after).problems == []


@pytest.mark.parametrize("suffix", ["h5", "zarr", "safetensors"])
def test_statistics_without_bytes_stay_so(tmp_path: Path, suffix: str) -> None:
    writer = Writer(tmp_path / "x.h5", stats_only=True)
    writer.add(Key("m", "output"), np.array([3.0, 4.0]), dtype("float64"), (2,))
    writer.close()
    with open_archive(tmp_path / "x.h5") as before:
        convert(before, tmp_path / f"y.{suffix}")
        with open_archive(tmp_path / f"y.{suffix}") as after:
            assert list(after.records) == list(before.records)
            assert not after.records[0].stored
        with pytest.raises(UsageError, match="only its statistics were kept"):
            convert(before, tmp_path / "y.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.h5", f"y.{suffix}"]


@pytest.mark.parametrize(("suffix", "compress"), TARGETS)
def test_equal_tensors_of_a_file_from_elsewhere_are_stored_once(
    tmp_path: Path, suffix: str, compress: str | None
) -> None:
    noise = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    for name in "abcde":
        np.save(tmp_path / f"{name}.npy", noise)
    with open_archive(tmp_path) as archive:
        convert(archive, tmp_path.parent / f"{tmp_path.name}.{suffix}", compress=compress)
    written = tmp_path.parent / f"{tmp_path.name}.{suffix}"
    files = [written] if written.is_file() else [p for p in written.rglob("*") if p.is_file()]
    assert 400_000 <= sum(p.stat().st_size for p in files) < 440_000


def test_records_are_selected_by_glob(source: Path, tmp_path: Path) -> None:
    with open_archive(source) as archive:
        convert(archive, tmp_path / "x.h5", only=["*int8*", "again"], exclude=["*uint8"])
        with open_archive(tmp_path / "x.h5") as after:
            assert [r.key.text for r in after.records] == ["0/m.int8/output", "1/again/input.x"]
            assert [r.row for r in after.records] == [0, 1]
        with pytest.raises(TensorNotFoundError, match="no tensor 'nothing'"):
            convert(archive, tmp_path / "y.h5", only=["nothing"])


def test_a_source_that_fails_its_checksum_is_not_passed_on(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "x.h5")
    writer.add(Key("m", "output"), np.arange(1000, dtype="<i4"), dtype("int32"), (1000,))
    writer.close()
    data = bytearray((tmp_path / "x.h5").read_bytes())
    data[2048 + 400] ^= 1
    (tmp_path / "x.h5").write_bytes(data)
    (tmp_path / "y.zarr").mkdir()
    for suffix in ("h5", "safetensors", "npz"):
        with (
            open_archive(tmp_path / "x.h5") as archive,
            pytest.raises(CorruptArchiveError, match="0/m/output"),
        ):
            convert(archive, tmp_path / f"y.{suffix}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.h5", "y.zarr"]


def test_what_is_not_ours_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "y.npz", a=np.ones(1))
    (tmp_path / "y.h5").write_text("precious")
    with open_archive(source) as archive:
        for name in ("y.npz", "y.h5"):
            before = (tmp_path / name).read_bytes()
            with pytest.raises(WriteError, match="is not overwritten"):
                convert(archive, tmp_path / name)
            assert (tmp_path / name).read_bytes() == before


def test_an_older_archive_is_replaced(source: Path, tmp_path: Path) -> None:
    with open_archive(source) as archive:
        for suffix in ("h5", "zarr"):
            convert(archive, tmp_path / f"y.{suffix}", only=["large"])
            convert(archive, tmp_path / f"y.{suffix}", only=["scalar"])
            with open_archive(tmp_path / f"y.{suffix}") as after:
                assert [r.key.text for r in after.records] == ["0/scalar/output"]


def test_the_source_itself_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link.h5").symlink_to(source)
    with open_archive(source) as archive:
        for name in ("source.h5", "link.h5"):
            with pytest.raises(UsageError, match="is the source or overlaps"):
                convert(archive, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "compress"), [("x.safetensors", "zstd"), ("x.zarr", "blosc2"), ("x.h5", "rar")]
)
def test_unknown_compression_is_refused(source: Path, tmp_path: Path, name: str, compress: str) -> None:
    with (
        open_archive(source) as archive,
        pytest.raises(UsageError, match=f"is not compressed by '{compress}'"),
    ):
        convert(archive, tmp_path / name, compress=compress)


def test_progress_ends_at_the_total(source: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(10), b=np.zeros(10))
    for path, total in ((source, None), (tmp_path / "x.npz", 2 * 160)):
        progress = RecordedProgress()
        with open_archive(path) as archive:
            convert(archive, tmp_path / "y.h5", progress=progress)
        done, expected = progress.advances[-1]
        assert progress.stages == ["converting"]
        assert done == expected
        assert total is None or expected == total


def test_what_a_killed_conversion_left_is_removed_and_nothing_else(source: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    ours, theirs = [], []
    for path in (tmp_path / "y.h5", tmp_path / "z.h5"):
        name = unique_beside(path, "building").name
        ours.append(path.with_name(name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")))
        theirs += [
            path.with_name(name),
            path.with_name(f"{path.name}.{ended.pid}.building"),
        ]
    for left in (*ours, *theirs):
        left.write_bytes(b"left")
    with open_archive(source) as archive:
        convert(archive, tmp_path / "y.h5", only=["scalar"])
    assert [left.exists() for left in ours] == [False, True]
    assert all(left.exists() for left in theirs)


@pytest.mark.spec("ARC-56")
def test_what_a_killed_process_moved_aside_comes_back_where_nothing_took_its_place(
    source: Path, tmp_path: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    path = tmp_path / "y.zarr"
    with open_archive(source) as archive:
        convert(archive, path, only=["scalar"])
    name = unique_beside(path, "replaced").name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    path.rename(path.with_name(name))
    with pytest.raises(UnfinishedArchiveError, match="moved aside") as caught:
        open_archive(path)
    assert caught.value.hint == f"Put it back with `tcap recover {path}`."
    assert recover(path).records == 1
    with open_archive(path) as archive:
        assert [r.key.site for r in archive.records] == ["scalar"]

    path.with_name(name).mkdir()  # now that something is at its place, it is only in the way
    with open_archive(source) as archive:
        convert(archive, path, only=["scalar"])
    assert sorted(os.listdir(tmp_path)) == ["source.h5", "y.zarr"]


def test_an_output_that_is_a_link_is_written_where_it_points(source: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest"
    link.symlink_to("runs/1.zarr")
    with open_archive(source) as archive:
        for _ in range(2):
            assert convert(archive, link, only=["scalar"]) == link
            assert os.listdir(tmp_path / "runs") == ["1.zarr"]
    with open_archive(link) as archive:
        assert (archive.container, len(archive)) == ("zarr", 1)


def test_an_unknown_suffix_is_refused_with_all_that_are_known(source: Path, tmp_path: Path) -> None:
    with open_archive(source) as archive:
        for name, container in (("x.txt", None), ("x.h5", "tar")):
            with pytest.raises(UsageError) as caught:
                convert(archive, tmp_path / name, container=container)
            assert "npz" in f"{caught.value} {caught.value.hint}"
