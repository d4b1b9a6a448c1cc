"""Files of numpy.save and numpy.savez, opened as archives."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError
from tensorcap_formats.foreign import open_npy, open_npy_folder, open_npz, strided
from tensorcap_formats.open import open_archive


def names(archive: Archive) -> list[str]:
    return [record.key.text for record in archive.records]


@pytest.mark.parametrize(
    "descr", ["|b1", "|i1", "|u1", "<i2", ">u4", "<i8", ">u8", "<f2", ">f4", "<f8", "<c8", ">c16"]
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_comes_back_with_its_dtype_and_bits(tmp_path: Path, descr: str, order: str) -> None:
    path = tmp_path / "x.npy"
    raw = np.arange(24, dtype="<u2").reshape(2, 3, 4)
    array = np.asarray((raw % 2 if descr == "|b1" else raw).astype(descr), order=order)  # type: ignore[call-overload]
    np.save(path, array)
    with open_npy(path) as archive:
        (record,) = archive.records
        assert (record.key.text, record.shape) == ("x", (2, 3, 4))
        assert record.dtype.name == np.dtype(descr).name
        read = archive.read(record)
        assert read.dtype.str == array.dtype.newbyteorder("<").str
        assert read.tolist() == array.tolist()
    assert archive.is_foreign
    assert not archive.is_ordered
    assert (record.digest, record.statistics) == ("", None)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)], ids=str)
def test_scalars_and_empty_arrays_open(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "x.npy", np.full(shape, 2.5))
    with open_archive(tmp_path / "x.npy") as archive:
        assert archive.read(archive.records[0]).tolist() == np.full(shape, 2.5).tolist()


def test_blocks_of_a_fortran_array_are_in_c_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "_SMALL_SPAN_BYTES", 16)
    monkeypatch.setattr(strided, "BAND_BYTES", 3 * 5 * 7 * 8)
    array = np.asfortranarray(np.arange(11 * 5 * 7, dtype=np.int64).reshape(11, 5, 7))
    np.save(tmp_path / "x.npy", array)
    with open_npy(tmp_path / "x.npy") as archive:
        blocks = [b.tolist() for b in archive.blocks(archive.records[0], block_bytes=8 * 13)]
    assert [x for block in blocks for x in block] == list(range(385))


def test_bfloat16_of_ml_dtypes_is_known_by_its_byte_order(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0x8000, 0x7F80, 0x7FC1], "<u2")
    np.savez(tmp_path / "x.npz", bf=bits.view(ml_dtypes.bfloat16), fp=np.array([65504], np.float16))
    with open_npz(tmp_path / "x.npz") as archive:
        bf, fp = archive.records
        assert (bf.dtype.name, fp.dtype.name) == ("bfloat16", "float16")
        assert archive.read(bf).tolist() == [0x3F80, 0x8000, 0x7F80, 0x7FC1]


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.zeros(3, "V2"), id="true-void"),
        pytest.param(np.zeros(3, ml_dtypes.float8_e4m3fn), id="float8"),
        pytest.param(np.zeros(3, ml_dtypes.int4), id="int4"),
    ],
)
def test_bytes_of_unknown_meaning_are_listed_and_refused_when_read(
    tmp_path: Path, array: np.ndarray[tuple[int, ...], np.dtype[np.void]]
) -> None:
    np.save(tmp_path / "x.npy", array)
    with (
        open_npy(tmp_path / "x.npy") as archive,
        pytest.raises(ReadError, match="does not tell what its bytes are") as caught,
    ):
        archive.read(archive.records[0])
    assert caught.value.hint == "Save the bits as an unsigned integer, or use safetensors."


def test_a_folder_is_in_natural_order_with_paths_as_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("layers.10", "layers.2", "deep/a b", "layers.1"):
        np.save(tmp_path / f"{name}.npy", np.array([len(name)]))
    np.save(tmp_path / "text.npy", np.array(["no tensor"]))
    with open_archive(tmp_path) as archive:
        assert names(archive) == ["deep/a%20b", "layers.1", "layers.2", "layers.10"]
        assert [r.order for r in archive.records] == [0, 1, 2, 3]
        assert archive.load(archive.get("layers.10")).tolist() == [9]
        assert archive.container == "npy-folder"
    with open_npy_folder(tmp_path) as archive:
        assert archive.skipped == {"text": "an array of '<U9'"}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_an_npz_is_read_in_blocks_in_any_order(tmp_path: Path, save: object) -> None:
    arrays = {f"a{i}": np.arange(1000 * i, dtype=np.int32).reshape(i, 1000) for i in range(4)}
    save(tmp_path / "x.npz", **arrays, t=np.asfortranarray(arrays["a3"]))  # type: ignore[operator]
    with open_archive(tmp_path / "x.npz") as archive:
        assert names(archive) == ["a0", "a1", "a2", "a3", "t"]
        out = np.empty(10, np.int32)
        for start in (2000, 100, 2990):
            archive._read_flat(archive.get("a3"), start, out)
            assert out.tolist() == list(range(start, start + 10))
        for name in ("t", "a3", "a0"):
            blocks = [b.tolist() for b in archive.blocks(archive.get(name), 400)]
            assert [x for block in blocks for x in block] == list(
                range({"t": 3000, "a3": 3000, "a0": 0}[name])
            )


def test_a_deflated_member_is_read_in_bounded_memory(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.arange(3_000_000, dtype="<f4") % 65_536)
    tracemalloc.start()
    try:
        with open_npz(tmp_path / "x.npz") as archive:
            total = sum(float(block.sum(dtype=np.float64)) for block in archive.blocks(archive.records[0]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    whole, rest = divmod(3_000_000, 65_536)
    assert total == whole * 65_536 * 65_535 / 2 + rest * (rest - 1) / 2
    assert peak < 4 * 2**20


def test_full_keys_are_recognised(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        data = io.BytesIO()
        np.save(data, np.array([7]))
        file.writestr("0/model.layers.2.mlp@1/output.npy", data.getvalue())
    with open_npz(tmp_path / "x.npz") as archive:
        key = archive.records[0].key
        assert (key.step, key.site, key.call, key.slot) == (0, "model.layers.2.mlp", 1, "output")


def test_a_file_of_text_is_no_archive(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array(["text"]))
    with pytest.raises(NotAnArchiveError, match="holds '<U4', expected numbers"):
        open_npy(tmp_path / "x.npy")


def test_other_files_in_a_folder_of_arrays_are_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "c/d").mkdir(parents=True)
    for name in ("x.npy", "a/b/y.npy"):
        np.save(tmp_path / name, np.ones(2))
    for name in ("w.pt", "a/notes.txt", "c/d/z.npz"):
        (tmp_path / name).write_bytes(b"x")
    with open_archive(tmp_path) as archive:
        assert [r.key.text for r in archive.records] == ["a/b/y", "x"]
        assert archive.skipped == {
            "w.pt": "no .npy file",
            "a/notes.txt": "no .npy file",
            "c/": "a folder with nothing that is read: no .npy file",
        }


@pytest.mark.parametrize("name", [".", "..", "a/..", "layer (copy)", "100%"])
def test_a_tensor_is_found_by_the_name_that_its_file_gives_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.npz"
    arrays: dict[str, Any] = {name: np.arange(3.0), "other": np.zeros(2)}
    np.savez(path, **arrays)
    with open_archive(path) as archive:
        assert archive.load(archive.get(name)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_array_whose_bytes_changed_is_damaged(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "x.npz"
    values = np.random.default_rng(0).standard_normal(1000)
    save(path, a=np.zeros(2000), b=values)
    with zipfile.ZipFile(path) as members:
        middle = members.getinfo("b.npy").header_offset + 4000
    data = bytearray(path.read_bytes())
    data[middle] ^= 1
    path.write_bytes(data)
    with open_archive(path) as archive:
        assert not archive.load(archive.get("a")).any()
        with pytest.raises(CorruptArchiveError, match=r"'b\.npy': is damaged: "):
            archive.load(archive.get("b"))
        with pytest.raises(CorruptArchiveError, match=r"'b\.npy': is damaged: "):
            list(archive.blocks(archive.get("b"), 1024))
