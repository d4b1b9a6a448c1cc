"""zarr stores of other programs, and the layout of ours."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import TransposeCodec

from tensorcap_formats.check import Problem, check_archive
from tensorcap_formats.conversion import convert
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.flat_arrays import Slabs
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer
from tensorcap_formats.zarr import foreign
from tensorcap_formats.zarr import writer as zarr_writer
from tensorcap_formats.zarr.header import array_path


@settings(max_examples=200)
@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.sampled_from([1, 4]), st.integers(4, 200))
def test_slabs_cover_each_element_once_in_flat_ranges(
    shape: tuple[int, ...], itemsize: int, limit: int
) -> None:
    slabs = Slabs.cut(shape, itemsize, limit)
    assert slabs.are_flat
    assert slabs.elements * itemsize <= max(limit, itemsize)
    ranges = [slabs.range(number) for number in range(slabs.chunks)]
    assert [first for first, _ in ranges] == [sum(n for _, n in ranges[:i]) for i in range(len(ranges))]
    assert sum(n for _, n in ranges) == math.prod(shape)
    flat = np.arange(math.prod(shape)).reshape(shape)
    for number, (first, count) in enumerate(ranges):
        assert {slabs.number(element) for element in range(first, first + count)} == {number}
        where = tuple(slice(at, at + n) for at, n in zip(slabs.position(number), slabs.chunk, strict=True))
        assert flat[where].reshape(-1).tolist() == list(range(first, first + count))
        coordinates = [at // n for at, n in zip(slabs.position(number), slabs.chunk, strict=True)]
        assert slabs.key(number) == "/".join(map(str, ["c", *coordinates]))


@pytest.mark.spec("ARC-65")
@pytest.mark.parametrize(("compress", "chunks"), [(None, 6), ("zstd", 9)])
def test_an_array_of_many_chunks_is_read_by_us_and_by_the_zarr_library(
    tmp_path: Path, compress: str | None, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_writer, "MAX_CHUNK_BYTES", 100)
    monkeypatch.setattr(zarr_writer, "_COMPRESSED_CHUNK_BYTES", 60)
    array = np.arange(3 * 5 * 7, dtype="<i4").reshape(3, 5, 7)
    writer = Writer(tmp_path / "x.h5")
    writer.add(Key("m", "output"), array, dtype("int32"), array.shape)
    writer.close()
    with open_archive(tmp_path / "x.h5") as archive:
        convert(archive, tmp_path / "x.zarr", compress=compress)
    with open_archive(tmp_path / "x.zarr") as archive:
        blocks = [b.tolist() for b in archive.blocks(archive.records[0], 4 * 11)]
        assert [x for block in blocks for x in block] == list(range(105))
    stored: Any = zarr.open_array(tmp_path / "x.zarr", path="steps/0/m/output", mode="r")
    assert stored.nchunks_initialized == stored.nchunks == chunks
    assert stored[...].tolist() == array.tolist()


@pytest.mark.spec("ARC-61", "ARC-66")
def test_chunks_of_zeros_are_written_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "x.zarr")
    writer.add(Key("m", "output"), np.zeros(3, "<f4"), dtype("float32"), (3,))
    writer.close()
    assert (tmp_path / "x.zarr/steps/0/m/output/c/0").read_bytes() == bytes(12)
    assert json.loads((tmp_path / "x.zarr/steps/0/m/output/zarr.json").read_text()) == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
        "storage_transformers": [],
    }


@pytest.mark.spec("ARC-63")
@pytest.mark.parametrize(
    ("name", "data_type", "attributes"),
    [
        ("bool", "bool", {}),
        ("uint64", "uint64", {}),
        ("complex64", "complex64", {}),
        ("bfloat16", "uint16", {"dtype": "bfloat16"}),
        ("float8_e4m3fn", "uint8", {"dtype": "float8_e4m3fn"}),
        ("complex32", "uint32", {"dtype": "complex32"}),
        ("int3", "int8", {"dtype": "int3"}),
    ],
)
def test_dtypes_that_zarr_lacks_are_integers_with_their_name_in_an_attribute(
    tmp_path: Path, name: str, data_type: str, attributes: dict[str, str]
) -> None:
    writer = Writer(tmp_path / "x.zarr")
    writer.add(Key("m", "output"), np.zeros(3, dtype(name).storage), dtype(name), (3,))
    writer.close()
    metadata = json.loads((tmp_path / "x.zarr/steps/0/m/output/zarr.json").read_text())
    assert (metadata["data_type"], metadata["attributes"]) == (data_type, attributes)


@pytest.mark.spec("ARC-64")
@pytest.mark.parametrize(
    ("site", "path"),
    [
        ("model.layers.2", "steps/0/model.layers.2/output"),
        ("zarr.json", "steps/0/%7Aarr.json/output"),
        ("__init", "steps/0/%5F_init/output"),
    ],
)
def test_names_that_zarr_or_a_file_system_refuses_are_changed(site: str, path: str) -> None:
    assert array_path(Key(site, "output")) == path


@pytest.mark.spec("ARC-64")
def test_long_names_end_in_a_hash_of_the_whole() -> None:
    name = array_path(Key("x" * 300, "output"))
    digest = hashlib.blake2b(b"x" * 300, digest_size=16).hexdigest()
    assert name == f"steps/0/{'x' * 200}~{digest}/output"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", ["|b1", "|i1", "<u2", ">i4", "<i8", "<f2", ">f4", "<f8", "<c8", "<c16"])
def test_arrays_of_the_zarr_library_come_back(tmp_path: Path, version: Any, kind: str) -> None:
    values = np.arange(1, 36).reshape(5, 7)
    array = (values % 3 > 0 if kind == "|b1" else values).astype(kind)
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    group.create_array("g/x", data=array, chunks=(2, 3))
    with open_archive(tmp_path / "x.zarr") as archive:
        (record,) = archive.records
        assert (record.key.text, record.dtype.name, record.shape) == ("g/x", np.dtype(kind).name, (5, 7))
        assert archive.read(record).tolist() == array.tolist()
        blocks = [b.tolist() for b in archive.blocks(record, 11 * record.dtype.itemsize)]
        assert [x for block in blocks for x in block] == array.reshape(-1).tolist()
        assert (archive.is_foreign, archive.is_ordered, archive.container) == (True, False, "zarr")
        assert check_archive(archive).problems == []


def test_shards_transposed_chunks_scalars_and_empty_arrays_are_read(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    values = np.arange(1.0, 101).reshape(10, 10)
    group.create_array("shards", data=values, chunks=(2, 5), shards=(4, 10))
    group.create_array("transposed", data=values, chunks=(3, 3), filters=[TransposeCodec(order=(1, 0))])
    group.create_array("scalar", data=np.array(3.5))
    group.create_array("empty", shape=(0, 4), dtype="f4")
    with open_archive(tmp_path / "x.zarr") as archive:
        assert {r.key.text: archive.load(r).tolist() for r in archive.records} == {
            "shards": values.tolist(),
            "transposed": values.tolist(),
            "scalar": 3.5,
            "empty": [],
        }
        assert check_archive(archive).problems == []


def test_rows_that_are_larger_than_a_band_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "BAND_BYTES", 16)
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("x", data=np.arange(40.0).reshape(4, 10), chunks=(2, 5))
    with open_archive(tmp_path / "x.zarr") as archive:
        assert archive.load(archive.records[0]).reshape(-1).tolist() == list(range(40))


def test_an_array_alone_is_named_as_its_folder(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "layer.zarr", data=np.arange(3))
    with open_archive(tmp_path / "layer.zarr") as archive:
        assert [r.key.text for r in archive.records] == ["layer"]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_dtypes_that_the_zarr_library_lacks_are_read_by_their_bits(tmp_path: Path, name: str) -> None:
    bits = np.array([1, 2, 0x80, 0xFF], dtype(name).storage)
    zarr.create_array(tmp_path / "x.zarr", data=bits, chunks=(3,))
    path = tmp_path / "x.zarr" / "zarr.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "data_type": name, "fill_value": 0.0}))
    with open_archive(tmp_path / "x.zarr") as archive:
        assert archive.records[0].dtype.name == name
        assert archive.read(archive.records[0]).tolist() == [1, 2, 0x80, 0xFF]


def test_chunks_that_are_missing_read_as_the_fill_value_and_a_remark_says_so(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    array = group.create_array("x", shape=(10,), chunks=(2,), dtype="f4", fill_value=7)
    array[:4] = 1
    sharded = group.create_array("y", shape=(10, 10), chunks=(2, 5), shards=(4, 10), dtype="f4")
    sharded[:4] = 1
    with open_archive(tmp_path / "x.zarr") as archive:
        assert archive.load(archive.get("x")).tolist() == [1.0] * 4 + [7.0] * 6
        remarks = {
            "x": "3 of 5 chunks are missing; the fill value was read",
            "y": "2 of 3 chunks are missing; the fill value was read",
        }
        assert {r.key.text: archive.remark(r) for r in archive.records} == remarks
        assert check_archive(archive).problems == [
            Problem(key, what, is_warning=True) for key, what in remarks.items()
        ]


def test_an_array_that_lost_all_its_chunks_cannot_be_read(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("x", shape=(1000, 1000), chunks=(500, 1000), dtype="f4")
    group.create_array("scalar", shape=(), dtype="f4")
    group.create_array("empty", shape=(0, 4), dtype="f4")
    group.create_array("y", data=np.ones(3))
    with open_archive(tmp_path / "x.zarr") as archive:
        for name, count in (("x", 2), ("scalar", 1)):
            record = archive.get(name)
            reason = f"{tmp_path}/x.zarr/{name}: all of its {count} chunks are missing"
            with pytest.raises(CorruptArchiveError) as caught:
                archive.load(record)
            assert str(caught.value) == archive.remark(record) == reason
            assert "write_empty_chunks=True" in str(caught.value.hint)
        assert archive.load(archive.get("empty")).size == 0
        assert [p.is_warning for p in check_archive(archive).problems] == [False, False]
        assert archive.remark(archive.get("y")) == archive.remark(archive.get("empty")) == ""


@pytest.mark.spec("ARC-67")
def test_an_altered_chunk_of_ours_is_not_read_as_what_was_written(tmp_path: Path) -> None:
    path = write_one(tmp_path / "x.zarr", 1.0)
    array: Any = zarr.open_array(path, path="steps/0/m/output", mode="r+")
    array[5] = 9.0
    with open_archive(path) as archive:
        assert not archive.trusts_digests
        with pytest.raises(CorruptArchiveError, match="0/m/output: is damaged: digest of its bytes is"):
            archive.read(archive.records[0])


def test_a_store_that_is_replaced_while_it_is_open_is_not_read_as_the_old_one(tmp_path: Path) -> None:
    path = write_one(tmp_path / "x.zarr", 1.0)
    with open_archive(path) as archive:
        record = archive.records[0]
        assert archive.read_range(record, 0, 3).tolist() == [1.0] * 3
        write_one(path, 2.0)
        for _ in range(2):
            with pytest.raises(CorruptArchiveError, match="was replaced or removed since it was opened"):
                archive.read_range(record, 0, 3)
    with open_archive(path) as archive:
        assert archive.read_range(archive.records[0], 0, 3).tolist() == [2.0] * 3


def write_one(path: Path, value: float) -> Path:
    writer = Writer(path)
    writer.add(Key("m", "output"), np.full(100, value, "<f4"), dtype("float32"), (100,))
    return writer.close()


def test_arrays_of_text_are_named_as_skipped(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    group.create_array("labels", data=np.array(["a", "bb"]))
    group.create_array("x", data=np.ones(2))
    with open_archive(tmp_path / "x.zarr") as archive:
        assert [r.key.text for r in archive.records] == ["x"]
        assert check_archive(archive).problems == [
            Problem("labels", "is not read: an array of '<U2'", is_warning=True)
        ]


def test_a_store_from_elsewhere_that_is_replaced_is_not_read_under_the_old_names(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x.zarr", data=np.ones(3))
    zarr.create_array(tmp_path / "y.zarr", data=np.full(3, 2.0))
    with open_archive(tmp_path / "x.zarr") as archive:
        (tmp_path / "x.zarr").rename(tmp_path / "z.zarr")
        (tmp_path / "y.zarr").rename(tmp_path / "x.zarr")
        with pytest.raises(CorruptArchiveError, match="was replaced or removed since it was opened"):
            archive.read(archive.records[0])
