"""ONNX models, as the package onnx writes them: their initialisers, in the file or beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, UnsafeFileError
from tensorcap_formats.open import open_archive

WEIGHT = np.arange(600, dtype=np.float32).reshape(20, 30)


def model(*tensors: Any, nodes: tuple[Any, ...] = ()) -> Any:
    return helper.make_model(helper.make_graph([*nodes], "net", [], [], initializer=[*tensors]))


def tensors() -> list[Any]:
    return [
        numpy_helper.from_array(WEIGHT, "block.0.weight"),
        numpy_helper.from_array(np.array([1, 2.5], ml_dtypes.bfloat16), "/block/norm"),
        numpy_helper.from_array(np.array([1, -3, 7], ml_dtypes.int4), "packed"),
        numpy_helper.from_array(np.int64(5), "count"),
        helper.make_tensor("typed", TensorProto.FLOAT, [2], [1.5, -2.5]),
        helper.make_tensor("labels", TensorProto.STRING, [1], [b"cat"]),
    ]


@pytest.mark.spec("ARC-82")
@pytest.mark.parametrize("is_external", [False, True], ids=["inside", "beside"])
@pytest.mark.parametrize("name", ["net.onnx", "net"])
def test_initialisers_open_by_name(is_external: bool, name: str, tmp_path: Path) -> None:
    constant = helper.make_node(
        "Constant", [], ["/Constant_output_0"], value=numpy_helper.from_array(WEIGHT[0])
    )
    options: dict[str, Any] = (
        {"save_as_external_data": True, "location": "net.data", "size_threshold": 0} if is_external else {}
    )
    producer = model(*tensors(), nodes=(constant,))
    producer.producer_name = "pytorch"
    onnx.save(producer, tmp_path / name, format="protobuf", **options)
    with open_archive(tmp_path / name) as archive:
        assert [(r.key.text, r.dtype.name, r.shape) for r in archive.records] == [
            ("/Constant_output_0", "float32", (30,)),
            ("/block/norm", "bfloat16", (2,)),
            ("block.0.weight", "float32", (20, 30)),
            ("count", "int64", ()),
            ("packed", "int4", (3,)),
            ("typed", "float32", (2,)),
        ]
        values = {record.key.text: archive.load(record).tolist() for record in archive.records}
        weight = archive.get("block.0.weight")
        assert archive.read_range(weight, 29, 31).tolist() == [29.0, 30.0]
        assert (archive.container, archive.skipped) == ("onnx", {"labels": "an array of text"})
    assert values["block.0.weight"] == WEIGHT.tolist()
    assert values["/block/norm"] == [1.0, 2.5]
    assert values["/Constant_output_0"] == WEIGHT[0].tolist()
    assert values["count"] == 5
    assert values["packed"] == [1, -3, 7]
    assert values["typed"] == [1.5, -2.5]


def external(tmp_path: Path, **entries: str) -> Path:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    path = tmp_path / "net.onnx"
    path.write_bytes(model(tensor).SerializeToString())
    return path


OUTSIDE = {"above": "../secret", "absolute": "/etc/hostname", "nameless": "", "nul": "a\0b", "link": "link"}


@pytest.mark.parametrize("kind", list(OUTSIDE))
def test_values_in_files_outside_of_the_folder_are_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    (tmp_path / "in").mkdir()
    os.symlink("../secret", tmp_path / "in/link")
    with pytest.raises(UnsafeFileError, match=r"'w'|is a link"):
        open_archive(external(tmp_path / "in", location=OUTSIDE[kind]))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "has 12 bytes, expected 8"),
        ({"length": "4"}, "has 4 bytes, expected 8"),
        ({"offset": "8", "length": "8"}, "8 bytes at 8 of .* are not within its 12"),
        ({"offset": "-4", "length": "8"}, "are not within"),
        ({"offset": "x"}, "no number"),
        ({"location": "absent"}, "there is no such file"),
    ],
    ids=str,
)
def test_values_beside_the_model_must_be_there(entries: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(12))
    with pytest.raises(ReadError, match=message):
        open_archive(external(tmp_path, **{"location": "data", **entries}))


def test_a_file_beside_the_model_that_shrank_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(8))
    with open_archive(external(tmp_path, location="data")) as archive:
        (tmp_path / "data").write_bytes(bytes(4))
        with pytest.raises(CorruptArchiveError, match="has 4 bytes, 8 when it was opened"):
            archive.load(archive.records[0])


LIES = {
    "fewer-values": TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], raw_data=bytes(8)),
    "negative-size": TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[-1], raw_data=bytes(8)),
    "sizes-beyond-all": TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**62, 2**62]),
    "no-values": TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2**40]),
    "fewer-halves": TensorProto(name="w", data_type=TensorProto.INT4, dims=[9], raw_data=bytes(2)),
    "no-type": TensorProto(name="w", dims=[1], raw_data=bytes(4)),
    "unknown-type": TensorProto(name="w", data_type=99, dims=[1], raw_data=bytes(4)),
    "no-name": TensorProto(data_type=TensorProto.FLOAT, dims=[1], raw_data=bytes(4)),
}


@pytest.mark.parametrize("kind", list(LIES))
def test_a_tensor_that_lies_is_one_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(model(LIES[kind]).SerializeToString())
    with pytest.raises(ReadError) as caught:
        open_archive(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_model_and_one_without_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(CorruptArchiveError, match="is no valid ONNX model"):
        open_archive(path)
    path.write_bytes(model().SerializeToString())
    with pytest.raises(NotAnArchiveError, match="is an ONNX model without initialisers"):
        open_archive(path)


def test_a_damaged_model_is_an_error_or_opens(tmp_path: Path) -> None:
    whole, path = model(*tensors()).SerializeToString(), tmp_path / "net.onnx"
    draw = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(whole[: draw.integers(1, len(whole) + 1)])
        damaged[int(draw.integers(0, len(damaged)))] ^= int(draw.integers(1, 256))
        path.write_bytes(damaged)
        try:
            with open_archive(path) as archive:
                for record in archive.records:
                    archive.load(record)
        except ReadError:
            pass


def test_a_name_that_is_no_text_is_escaped_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model(numpy_helper.from_array(WEIGHT, "name")), path)
    path.write_bytes(path.read_bytes().replace(b"name", b"n\xffme"))
    try:
        with open_archive(path) as archive:
            assert [record.key.text for record in archive.records] == ["n%5Cxffme"]  # NAM-4
    except CorruptArchiveError as error:  # by versions of protobuf that check it
        assert "is no valid ONNX model" in str(error)  # noqa: PT017
