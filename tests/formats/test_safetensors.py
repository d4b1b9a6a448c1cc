"""safetensors files of other programs, and the bytes of ours."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    ReadError,
    UnsafeFileError,
    WriteError,
)
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.safetensors import open_safetensors, open_safetensors_folder, write_safetensors
from tensorcap_formats.writing import Writer


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16"),
        *("bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    ],
)
def test_what_the_library_writes_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    kind = getattr(torch, name)
    raw = torch.arange(6 * kind.itemsize, dtype=torch.uint8) % (2 if name == "bool" else 200)
    save_file({"x": raw.view(kind).reshape(2, 3)}, tmp_path / "x.safetensors")
    with open_safetensors(tmp_path / "x.safetensors") as archive:
        (record,) = archive.records
        assert (record.dtype.name, record.shape) == (name, (2, 3))
        assert archive.read(record).tobytes() == raw.numpy().tobytes()
        assert (archive.is_foreign, archive.is_ordered) == (True, False)


def test_names_are_in_natural_order_and_escaped(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(1) for name in ("layers.10.w", "layers.2.w", "a b", "../evil")}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with open_archive(tmp_path / "x.safetensors") as archive:
        assert [r.key.text for r in archive.records] == [
            "%2E%2E/evil",
            "a%20b",
            "layers.2.w",
            "layers.10.w",
        ]


@pytest.mark.spec("ARC-60", "ARC-62", "ARC-68")
def test_the_bytes_of_an_archive_are_as_specified(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "x.safetensors", run={"steps": 1})
    writer.add(Key("a", "output"), np.array([1], np.uint8), dtype("uint8"), (1,))
    writer.add(Key("b", "output"), np.array([0x3F80, 0x4000], "<u2"), dtype("bfloat16"), (2,))
    writer.add(Key("c", "output"), np.array([1 + 2j]), dtype("complex128"), (1,))
    writer.add(Key("d", "output"), np.array([0x21], np.uint8), dtype("float4_e2m1fn_x2"), ())
    writer.add(Key("e", "output"), np.array([1], np.uint8), dtype("uint8"), (1,))
    writer.close()
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert length % 8 == 0
    assert set(metadata) == {"tensorcap", "index", "run"}
    assert metadata["run"] == '{"steps":1}'
    assert header == {
        "0/c/output": {"dtype": "U8", "shape": [1, 16], "data_offsets": [0, 16]},
        "0/b/output": {"dtype": "BF16", "shape": [2], "data_offsets": [16, 20]},
        "0/a/output": {"dtype": "U8", "shape": [1], "data_offsets": [20, 21]},
        "0/d/output": {"dtype": "F4", "shape": [2], "data_offsets": [21, 22]},
    }
    assert data[8 + length :] == bytes.fromhex("000000000000f03f0000000000000040 803f0040 01 21")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def index(folder: Path, **weight_map: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def sizes(archive: Archive) -> dict[str, int]:
    return {r.key.text: archive.load(r).size for r in archive.records}


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("with_index", [False, True])
def test_shards_are_one_archive(sharded: Path, with_index: bool) -> None:
    if with_index:
        index(sharded, a=FIRST, b=FIRST, c=SECOND)
    with open_archive(sharded) as archive:
        assert sizes(archive) == {"a": 1, "b": 2, "c": 3}


def test_a_tensor_that_the_index_promises_must_be_there(sharded: Path) -> None:
    index(sharded, a=FIRST, b=SECOND, c=SECOND)
    with pytest.raises(CorruptArchiveError, match=f"'b' is not in {SECOND}"):
        open_safetensors_folder(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file({"a": torch.zeros(1)}, sharded / "other.safetensors")
    with pytest.raises(CorruptArchiveError, match="two tensors are named 'a'"):
        open_safetensors_folder(sharded)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/../../x", "..", "a\\..\\b", "x\0y", ""]
)
def test_a_shard_name_leads_nowhere_else(sharded: Path, name: str) -> None:
    index(sharded, a=name)
    with pytest.raises(UnsafeFileError, match="expected a plain file name"):
        open_safetensors_folder(sharded)


def test_a_shard_that_is_a_link_out_is_refused(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / FIRST).symlink_to(sharded / FIRST)
    with pytest.raises(UnsafeFileError, match="expected a file of the folder"):
        open_safetensors_folder(folder)


def test_links_of_the_hugging_face_cache_are_followed(sharded: Path) -> None:
    snapshot = sharded / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (sharded / "blobs").mkdir()
    (sharded / FIRST).rename(sharded / "blobs" / "ff00")
    (snapshot / FIRST).symlink_to("../../blobs/ff00")
    with open_archive(snapshot) as archive:
        assert sizes(archive) == {"a": 1, "b": 2}


def test_a_folder_of_archives_is_no_checkpoint(tmp_path: Path) -> None:
    Writer(tmp_path / "x.safetensors").close()
    with pytest.raises(NotAnArchiveError, match="is an archive of its own"):
        open_archive(tmp_path)


def test_packed_floats_of_six_bits_are_listed_and_not_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.safetensors",
        {"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}},
        bytes(3),
    )
    with open_safetensors(path) as archive:
        assert archive.records[0].dtype.name == "float6_e2m3fn"
        with pytest.raises(ReadError, match="no document says how F6_E2M3 is packed"):
            archive.read(archive.records[0])


@pytest.mark.spec("ARC-80")
def test_a_header_above_the_limit_of_the_format_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcap_formats.safetensors.writer.MAX_HEADER_BYTES", 400)
    writer = Writer(tmp_path / "x.h5")
    writer.add(Key("m", "output"), np.ones(1, np.uint8), dtype("uint8"), (1,))
    writer.close()
    with (
        open_archive(tmp_path / "x.h5") as source,
        pytest.raises(WriteError, match="expected at most 400"),
    ):
        write_safetensors(source, tmp_path / "y.safetensors", source.records)
    assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.spec("ARC-69")
def test_digests_are_not_trusted_once_another_library_rewrote_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    writer = Writer(path)
    writer.add(Key("m", "output"), np.ones(4, "<f4"), dtype("float32"), (4,))
    writer.close()
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert path.read_bytes()[: 8 + length].endswith(b" " * 8)
    with open_archive(path) as archive:
        assert archive.trusts_digests
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({"0/m/output": torch.full((4,), 2.0)}, path, metadata)
    with open_archive(path) as archive:
        assert not archive.is_foreign
        assert not archive.trusts_digests


def test_what_lies_beside_the_parts_of_a_checkpoint_is_skipped_and_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"v": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "original/deep").mkdir(parents=True)
    (tmp_path / "original/deep/consolidated.00.pth").write_bytes(b"x")
    with open_archive(tmp_path) as archive:
        assert [r.key.text for r in archive.records] == ["v", "w"]
        assert archive.skipped == {
            "config.json": "no .safetensors file",
            "original/": "a folder with nothing that is read: no .safetensors file",
        }
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_archive(tmp_path) as archive:
        assert [r.key.text for r in archive.records] == ["w"]
        assert archive.skipped["other.safetensors"] == "not named in model.safetensors.index.json"
        assert len(archive.skipped) == 3
