"""HDF5 archives as we wrote them, as other tools leave them, and HDF5 files from elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import tensorcap_formats
from tensorcap_formats.archive import Archive
from tensorcap_formats.check import check_archive
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import CorruptArchiveError, UnfinishedArchiveError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tensorcap_formats.__file__).parents[1])}
RANDOM = np.random.default_rng(11)
TENSORS: dict[str, tuple[str, np.ndarray[Any, Any]]] = {
    "0/a/output": ("float32", RANDOM.standard_normal((40, 50)).astype("<f4")),
    "0/b/input.x": ("float32", np.array([[1.5, -2.0], [np.nan, np.inf]], "<f4")),
    "0/b/output": ("bfloat16", RANDOM.integers(0, 65536, (3, 700), np.uint16)),
    "0/c/output": ("float8_e4m3fn", np.arange(256, dtype="u1")),
    "0/scalar/output": ("int64", np.array(2**53 + 1, "<i8")),
    "0/empty/output": ("float64", np.empty((3, 0, 2), "<f8")),
    "0/complex/output": ("complex64", np.array([1 + 2j, -3j], "<c8")),
    "1/b@2/output": ("bool", np.array([True, False, True])),
    "rank1/0/a/output": ("int8", np.arange(-128, 128, dtype="i1")),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.h5"
    writer = Writer(path, run={"seed": 1})
    for text, (name, bits) in TENSORS.items():
        writer.add(Key.parse(text), bits, dtype(name), bits.shape)
    bits = TENSORS["0/b/input.x"][1]
    writer.add(Key("b", "input.same"), bits, dtype("float32"), bits.shape)
    writer.add_value("0/b/input.mask", None)
    return writer.close()


def test_description_is_the_same_in_blocks_of_any_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcap_formats.hdf5.flat_file._BLOCK_BYTES", 7)  # parts begin and end within them
    monkeypatch.setitem(sys.modules, "h5py", None)  # which a file is opened by that is not as it was written
    with open_archive(path) as archive:
        assert_holds_all_but(archive)


def assert_holds_all_but(archive: Archive, *lost: str) -> None:
    assert not archive.is_foreign
    assert (archive.run, archive.values, len(archive)) == ({"seed": 1}, {"0/b/input.mask": None}, 10)
    for text, (name, bits) in TENSORS.items():
        if text not in lost:
            record = archive.get(text)
            assert (record.dtype.name, record.shape) == (name, bits.shape)
            assert archive.read(record).tobytes() == bits.tobytes()
            assert b"".join(block.tobytes() for block in archive.blocks(record, 64)) == bits.tobytes()


def tool(*command: str | Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: a part of the HDF5 tools")
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.spec("ARC-1")
def test_an_archive_as_it_was_written_is_read_without_the_hdf5_library(path: Path) -> None:
    with open_archive(path) as archive:
        assert_holds_all_but(archive)
    code = "import sys; from tensorcap_formats.open import open_archive as o; a = o(sys.argv[1]); "
    code += "print(a.read(a.get('0/b/input.x')).tolist(), 'h5py' in sys.modules)"
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True)
    assert done.stdout == "[[1.5, -2.0], [nan, inf]] False\n"


@pytest.mark.spec("ARC-20", "ARC-25")
def test_a_person_can_browse_it(path: Path) -> None:
    names: list[str] = []
    with h5py.File(path) as file:
        file.visit(names.append)
        assert file["index"].dtype == h5py.string_dtype("utf-8", file["index"].dtype.itemsize)
        assert bytes(file["run"][()]) == b'{"seed":1}'
        assert file["steps/1/b@2/output"][...].tolist() == [True, False, True]
    assert [name for name in names if name.startswith(("index", "run", "ranks"))] == [
        "index",
        "ranks",
        "ranks/1",
        "ranks/1/steps",
        "ranks/1/steps/0",
        "ranks/1/steps/0/a",
        "ranks/1/steps/0/a/output",
        "run",
    ]


@pytest.mark.spec("ARC-45")
@pytest.mark.parametrize(
    "options", [(), ("-f", "GZIP=4", "-m", "1024"), ("-f", "SHUF", "-f", "GZIP=1", "-m", "16")], ids=str
)
def test_an_archive_after_h5repack_is_still_ours(options: tuple[str, ...], path: Path) -> None:
    output = path.with_name("repacked.h5")
    tool("h5repack", *options, path, output)
    with open_archive(output) as archive:
        assert_holds_all_but(archive)
        assert archive.read(archive.get("b/input.same")).tolist()[0] == [1.5, -2.0]


def test_a_tensor_that_h5copy_takes_out_is_read_as_a_file_from_elsewhere(path: Path) -> None:
    output = path.with_name("one.h5")
    tool("h5copy", "-i", path, "-o", output, "-s", "/steps/0/b/output", "-d", "/copied")
    with open_archive(output) as archive:
        (record,) = archive.records
        assert (archive.is_foreign, archive.is_ordered) == (True, False)
        assert (record.key.text, record.dtype.name, record.shape) == ("copied", "bfloat16", (3, 700))
        assert archive.read(record).tobytes() == TENSORS["0/b/output"][1].tobytes()


@pytest.mark.spec("ARC-45")
def test_an_archive_with_an_attribute_that_somebody_added_is_still_ours(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["steps/0/b/output"].attrs["remark"] = "look here"
        file.attrs["owner"] = "me"
    with open_archive(path) as archive:
        assert_holds_all_but(archive)


@pytest.mark.spec("ARC-45")
def test_an_archive_with_datasets_that_somebody_added_is_still_ours(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["steps/0/b/difference"] = np.ones((100, 100))
        file.create_dataset("mine", data=np.arange(1000), chunks=(10,), compression="gzip")
    with open_archive(path) as archive:
        assert_holds_all_but(archive)


@pytest.mark.spec("ARC-20")
@pytest.mark.parametrize("change", ["renamed", "deleted", "group-deleted"])
def test_a_tensor_that_somebody_took_away_is_one_error_of_its_own(change: str, path: Path) -> None:
    with h5py.File(path, "r+") as file:
        if change == "renamed":
            file.move("steps/0/a/output", "steps/0/a/result")
        else:
            del file["steps/0/a/output" if change == "deleted" else "steps/0/a"]
    with open_archive(path) as archive:
        missing = "'a'" if change == "group-deleted" else "'output'"
        with pytest.raises(CorruptArchiveError, match=rf"0/a/output: the file has no {missing} .*\(ARC-20\)"):
            archive.read(archive.get("0/a/output"))
        assert_holds_all_but(archive, "0/a/output")


@pytest.mark.spec("ARC-20")
def test_a_tensor_of_another_shape_or_element_size_is_one_error(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        for name, data in (("0/a", np.ones((50, 40), "<f4")), ("0/c", np.ones(256, "<i2"))):
            del file[f"steps/{name}/output"]
            file[f"steps/{name}/output"] = data
    with open_archive(path) as archive:
        with pytest.raises(CorruptArchiveError, match=r"is \(50, 40\), expected \(40, 50\) \(ARC-20\)"):
            archive.read(archive.get("0/a/output"))
        with pytest.raises(CorruptArchiveError, match=r"elements have 2 bytes, expected 1 \(ARC-22\)"):
            archive.read(archive.get("0/c/output"))
        assert_holds_all_but(archive, "0/a/output", "0/c/output")


def test_a_tensor_that_somebody_exchanged_is_seen_when_it_is_read(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["steps/0/a/output"]
        file["steps/0/a/output"] = np.ones((40, 50), "<f4")
    with open_archive(path) as archive:
        record = archive.get("0/a/output")
        with pytest.raises(
            CorruptArchiveError, match=r"0/a/output: is damaged: digest of its bytes is .*, expected"
        ):
            archive.read(record)
        with pytest.raises(CorruptArchiveError, match="digest of its bytes"):
            list(archive.blocks(record, 64))
        assert_holds_all_but(archive, "0/a/output")


@pytest.mark.spec("ARC-44", "ARC-46")
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_values_overwritten_in_place_are_never_read_as_those_that_were_written(
    libver: str, path: Path
) -> None:
    with open_archive(path) as archive:
        assert archive.trusts_digests
    assert path.read_bytes().endswith(b"TCAP-END")
    with h5py.File(path, "r+", libver=libver) as file:
        file["steps/0/a/output"][3, 4] = 99.0
    with open_archive(path) as archive:
        assert not archive.trusts_digests
        assert_holds_all_but(archive, "0/a/output")
        with pytest.raises(CorruptArchiveError, match="0/a/output: is damaged: digest of its bytes is"):
            archive.read(archive.get("0/a/output"))
        (problem,) = check_archive(archive).problems
        assert "0/a/output" in str(problem)


@pytest.mark.spec("ARC-46")
def test_reading_by_another_program_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    with h5py.File(path) as file:
        file["steps/0/a/output"][...]
    assert path.read_bytes() == before
    with open_archive(path) as archive:
        assert archive.trusts_digests


def rewrite_text(path: Path, name: str, old: bytes, new: bytes) -> None:
    with h5py.File(path, "r+") as file:
        text = bytes(file[name][()])
        assert old in text
        file[name][()] = text.replace(old, new, 1)


@pytest.mark.spec("ARC-37")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((b'"bool"', b'"int8"'), (b"[40,50]", b"[50,40]"), (b'"root":"', b'"rOOt":"'), (b"0/a/o", b"0/d/o")),
        *((b'"order":[0,1', b'"order":[1,0'), (b'"stored":[1', b'"stored":[0'), (b'"nan":[0', b'"nan":[1')),
        *(
            (b'"complete":true', b'"complete":null'),
            (b'"seal":"', b'"sEal":"'),
        ),
    ],
    ids=str,
)
def test_an_edited_index_is_refused(old: bytes, new: bytes, path: Path) -> None:
    rewrite_text(path, "index", old, new)
    with pytest.raises(CorruptArchiveError, match=r"index or run was altered: .*\(ARC-37\)"):
        open_archive(path)


@pytest.mark.spec("ARC-37")
def test_edited_run_metadata_are_refused(path: Path) -> None:
    rewrite_text(path, "run", b'"', b"'")
    with pytest.raises(CorruptArchiveError, match=r"index or run was altered: .*\(ARC-37\)"):
        open_archive(path)


@pytest.mark.spec("ARC-20")
@pytest.mark.parametrize("name", ["index", "run"])
def test_an_archive_without_its_index_or_run_is_refused(name: str, path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file[name]
    with pytest.raises(CorruptArchiveError, match=rf"has no text '{name}', expected that of an archive"):
        open_archive(path)


def test_an_archive_that_another_program_holds_open_for_writing_says_so(tmp_path: Path) -> None:
    path = tmp_path / "theirs.h5"
    code = "import h5py, sys; f = h5py.File(sys.argv[1], 'w'); f['x'] = 1.0; f.flush(); "
    code += "print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path)]
    # MAX, if a test of the same process has used it, changes the environment behind os.environ
    with subprocess.Popen(
        command, text=True, env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            with pytest.raises(UnfinishedArchiveError, match="another program holds the HDF5 lock"):
                open_archive(path)
        finally:
            child.kill()


# ---- files from elsewhere


def write_foreign(path: Path, **options: Any) -> None:
    with h5py.File(path, "w", **options) as file:
        file["layers/10/w"] = np.arange(6, dtype="<f4").reshape(2, 3)
        file["layers/2/w"] = np.arange(6, dtype=">i4").reshape(2, 3)
        file.create_dataset("packed", data=np.arange(5000, dtype="<f8"), chunks=(64,), compression="gzip")
        file["compact"] = np.array([1, 2], "u1")
        file["flag"] = np.array([True, False])
        file["half"] = np.array([1.5], ">f2")
        file["complex"] = np.array([1 + 2j])
        file["empty"] = np.empty((0, 3), "<i8")
        file["scalar"] = 2.5
        file["odd name (copy)"] = np.array([7], "<i2")
        file["text"] = "no tensor"
        file["struct"] = np.zeros(2, [("a", "i4"), ("b", "f8")])
        file["nothing"] = h5py.Empty("f4")
        file["soft"] = h5py.SoftLink("/scalar")
        file["outside"] = h5py.ExternalLink("/etc/passwd", "/x")
        file["type"] = np.dtype("f4")


FOREIGN = {
    "compact": ("uint8", [1, 2]),
    "complex": ("complex128", [1 + 2j]),
    "empty": ("int64", []),
    "flag": ("bool", [True, False]),
    "half": ("float16", [1.5]),
    "layers/2/w": ("int32", [[0, 1, 2], [3, 4, 5]]),
    "layers/10/w": ("float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
    "odd%20name%20%28copy%29": ("int16", [7]),
    "packed": ("float64", [float(i) for i in range(5000)]),
    "scalar": ("float64", 2.5),
}


@pytest.mark.parametrize("options", [{}, {"userblock_size": 1024}, {"libver": "latest"}], ids=str)
def test_numeric_datasets_of_any_hdf5_file_are_read_in_natural_order(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "theirs.h5"
    write_foreign(path, **options)
    with open_archive(path) as archive:
        assert (archive.is_foreign, archive.is_ordered, archive.container) == (True, False, "hdf5")
        assert {r.key.text: (r.dtype.name, archive.load(r).tolist()) for r in archive.records} == FOREIGN
        assert [r.key.text for r in archive.records] == list(FOREIGN)
        packed = archive.get("packed")
        assert np.concatenate([b.copy() for b in archive.blocks(packed, 1000)]).tolist() == list(range(5000))
        assert archive.statistics(archive.get("layers/2/w")).mean == 2.5


def test_what_is_no_tensor_is_named_and_no_link_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "theirs.h5"
    write_foreign(path)
    with open_archive(path) as archive:
        skipped = archive.skipped
    assert sorted(skipped) == ["nothing", "outside", "soft", "struct", "text", "type"]
    assert skipped["soft"] == "not followed: SoftLink"
    assert skipped["outside"] == "not followed: ExternalLink"


def test_a_float_of_another_layout_is_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "theirs.h5"
    odd = h5py.h5t.IEEE_F32LE.copy()
    odd.set_ebias(100)
    swapped = h5py.h5t.IEEE_F32BE.copy()  # bfloat16 with its bytes swapped
    swapped.set_fields(15, 7, 8, 0, 7)
    swapped.set_size(2)
    swapped.set_ebias(127)
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((2,))
        for name, kind in ((b"odd", odd), (b"swapped", swapped), (b"bits", h5py.h5t.STD_B8LE)):
            h5py.h5d.create(file.id, name, kind, space)
        file["good"] = np.ones(1)
    with open_archive(path) as archive:
        assert [r.key.text for r in archive.records] == ["good"]
