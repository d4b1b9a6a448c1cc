"""Folders of a reference run for Core AI, opened as archives."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap import compare
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import bits_of, dtype_of
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, UnsafeFileError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

MAPPINGS = {
    "sources": {"torch": {"3": {"dialect": "torch", "id": 3, "identifiers": ["mul"]}}},
    "outputs": [
        {
            "source_level": "torch",
            "source_op_id": 3,
            "source_output": 0,
            "target_level": "coreai",
            "target_op_id": 9,
            "target_output": 0,
        }
    ],
}


def _float32(values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def entry(name: str, op: str, target: str, number: int, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "node_name": name,
        "node_op": op,
        "node_target": target,
        "data_file": f"data/{name}_{number:04}.npy",
        "shape": list(array.shape),
        "torch_dtype": f"torch.{array.dtype.name}",
        "numel": int(array.size),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What Apple's writer makes of `y = x * weight; return y + 1, argmax(y)`, with its order of members."""
    path = tmp_path / "net.aimodelintermediates"
    (path / "data").mkdir(parents=True)
    nodes = [
        ("intermediates", "block_0_scale_weight", "get_attr", "block.0.scale.weight", _float32([2, 3])),
        ("inputs", "x", "placeholder", "x", _float32([[1, -4], [0, 5]])),
        ("intermediates", "mul", "call_function", "aten.mul.Tensor", _float32([[2, -12], [0, 15]])),
        ("outputs", "argmax", "call_function", "aten.argmax.default", np.array(3)),
        ("outputs", "add_10", "call_function", "aten.add.Tensor", _float32([[3, -11], [1, 16]])),
    ]
    metadata: dict[str, Any] = {"inputs": {}, "outputs": {}, "intermediates": {}}
    for number, (kind, name, op, target, array) in enumerate(nodes):
        np.save(path / f"data/{name}_{number:04}.npy", array)
        metadata[kind][name] = entry(name, op, target, number, np.asarray(array))
    metadata["mappings"] = MAPPINGS
    write(path, metadata)
    return path


def read(path: Path) -> dict[str, Any]:
    return json.loads((path / "metadata.json").read_text())  # type: ignore[no-any-return]


def write(path: Path, metadata: object) -> None:
    (path / "metadata.json").write_text(json.dumps(metadata))


def values(archive: Archive) -> dict[str, Any]:
    return {record.key.text: archive.read(record).tolist() for record in archive.records}


@pytest.mark.spec("AIM-2", "AIM-6", "AIM-10", "AIM-11")
def test_nodes_are_records_in_the_order_in_which_they_were_written(folder: Path) -> None:
    with open_archive(folder) as archive:
        assert list(values(archive).items()) == [
            ("0/block.0.scale/param.weight", [2.0, 3.0]),
            ("0/@root/input.x", [[1.0, -4.0], [0.0, 5.0]]),
            ("0/@root:mul/output", [[2.0, -12.0], [0.0, 15.0]]),
            ("0/@root:argmax/output", 3),
            ("0/@root:add_10/output", [[3.0, -11.0], [1.0, 16.0]]),
        ]
        assert [record.dtype.name for record in archive.records] == [
            *["float32"] * 3,
            "int64",
            "float32",
        ]
        assert archive.container == "intermediates-folder"
        assert (archive.is_ordered, archive.is_complete, archive.skipped) == (True, True, {})
        assert archive.info.mappings == MAPPINGS


@pytest.mark.spec("AIM-11")
@pytest.mark.parametrize("new", ["data/mul.npy", "data/mul_0001.npy"], ids=["no-number", "twice-one"])
def test_the_order_is_unknown_if_a_file_has_no_number_of_its_own(folder: Path, new: str) -> None:
    metadata = read(folder)
    os.rename(folder / "data/mul_0002.npy", folder / new)
    metadata["intermediates"]["mul"]["data_file"] = new
    write(folder, metadata)
    with open_archive(folder) as archive:
        assert not archive.is_ordered
        assert values(archive)["0/@root:mul/output"] == [[2.0, -12.0], [0.0, 15.0]]


@pytest.mark.spec("AIM-11")
def test_what_else_is_in_the_folder_is_reported(folder: Path) -> None:
    np.save(folder / "data/left_0009.npy", np.zeros(1))
    with open_archive(folder) as archive:
        assert archive.skipped == {"data/left_0009.npy": "metadata.json does not name it"}
        assert len(archive.records) == 5


@pytest.mark.spec("AIM-5")
def test_bfloat16_that_was_widened_is_bfloat16(folder: Path) -> None:
    metadata = read(folder)
    metadata["intermediates"]["mul"]["torch_dtype"] = "torch.bfloat16"
    write(folder, metadata)
    with open_archive(folder) as archive:
        record = archive.get("0/@root:mul/output")
        assert record.dtype.name == "bfloat16"
        assert archive.read(record).view("<u2").tolist() == [[0x4000, 0xC140], [0, 0x4170]]
    np.save(folder / "data/mul_0002.npy", _float32([[2, -12], [0, 1.00001]]))
    with open_archive(folder) as archive, pytest.raises(CorruptArchiveError, match="are no bfloat16"):
        archive.read(archive.get("0/@root:mul/output"))


@pytest.mark.spec("AIM-1")
def test_a_folder_of_another_name_is_refused(folder: Path) -> None:
    other = folder.rename(folder.parent / "net")
    with pytest.raises(
        NotAnArchiveError, match=r"net: .* expected a name in \.aimodelintermediates"
    ) as caught:
        open_archive(other)
    assert caught.value.hint == "Rename it to net.aimodelintermediates."


def _move(new: str) -> Callable[[Path, dict[str, Any]], None]:
    def change(path: Path, metadata: dict[str, Any]) -> None:
        np.save(path.parent / "outside.npy", _float32([[2, -12], [0, 15]]))
        metadata["intermediates"]["mul"]["data_file"] = new.format(parent=path.parent)

    return change


def _link(path: Path, metadata: dict[str, Any]) -> None:
    (path / "data/mul_0002.npy").rename(path.parent / "outside.npy")
    (path / "data/mul_0002.npy").symlink_to(path.parent / "outside.npy")


@pytest.mark.spec("AIM-3")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_move("../outside.npy"), id="above"),
        pytest.param(_move("{parent}/outside.npy"), id="absolute"),
        pytest.param(_link, id="link"),
    ],
)
def test_nothing_outside_is_read(folder: Path, change: Callable[[Path, dict[str, Any]], None]) -> None:
    metadata = read(folder)
    change(folder, metadata)
    write(folder, metadata)
    with pytest.raises(UnsafeFileError, match="outside"):
        open_archive(folder)


def _set(member: str, value: Any) -> Callable[[Path, dict[str, Any]], None]:
    return lambda _, metadata: metadata["intermediates"]["mul"].update({member: value})


def _remove(member: str) -> Callable[[Path, dict[str, Any]], None]:
    return lambda _, metadata: metadata["intermediates"]["mul"].pop(member)


@pytest.mark.spec("AIM-2", "AIM-4")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda _, m: m.pop("outputs"), "has no JSON object 'outputs'", id="no-outputs"),
        pytest.param(lambda _, m: m.update(inputs=[]), "has no JSON object 'inputs'", id="list-of-inputs"),
        pytest.param(lambda _, m: m["inputs"].update(x=3), "inputs: 'x': is no JSON object", id="no-entry"),
        pytest.param(lambda _, m: m.update(mappings=[]), "'mappings' is no JSON object", id="mappings"),
        pytest.param(_remove("data_file"), "'mul': data_file is None, expected a text", id="no-file-named"),
        pytest.param(_remove("node_op"), "'mul': node_op is None, expected a text", id="no-op"),
        pytest.param(
            _set("shape", "2x2"), "'mul': shape is '2x2', expected a list of sizes", id="text-shape"
        ),
        pytest.param(_set("torch_dtype", "torch.f33"), "'torch.f33' is unknown", id="unknown-dtype"),
        pytest.param(_set("data_file", "data/\0"), "no path", id="nul"),
        pytest.param(_set("data_file", "data/no.npy"), "data/no.npy: there is no such file", id="no-file"),
        pytest.param(_set("data_file", "data"), "data: is no regular file", id="a-folder"),
        pytest.param(_set("shape", [4]), r"is of shape \[2, 2\], expected \[4\]", id="other-shape"),
        pytest.param(
            _set("torch_dtype", "torch.float64"), "of dtype float32, expected float64", id="other-dtype"
        ),
        pytest.param(
            lambda path, _: (path / "data/mul_0002.npy").write_bytes(b"PK"), "begins with b'PK'", id="no-npy"
        ),
        pytest.param(
            lambda path, _: np.save(path / "data/mul_0002.npy", np.array(["a"])),
            "expected numbers",
            id="texts",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(
    folder: Path, change: Callable[[Path, dict[str, Any]], None], message: str
) -> None:
    metadata = read(folder)
    change(folder, metadata)
    write(folder, metadata)
    with pytest.raises(CorruptArchiveError, match=message) as caught:
        open_archive(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.spec("AIM-2")
@pytest.mark.parametrize("text", ["{", "[]", "\xff"], ids=["cut-off", "list", "no-utf-8"])
def test_metadata_that_are_no_json_object_are_refused(folder: Path, text: str) -> None:
    (folder / "metadata.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptArchiveError, match=r"metadata\.json: is "):
        open_archive(folder)


@pytest.mark.spec("AIM-2")
def test_a_folder_without_metadata_is_refused(folder: Path) -> None:
    (folder / "metadata.json").unlink()
    with pytest.raises(ReadError, match=r"metadata\.json: there is no such file"):
        open_archive(folder)


def capture(path: Path, *, mul: float = -12.0, extra: str = "", without: str = "") -> Path:
    """An archive of a captured graph of the same program, with modules."""
    records = {
        "0/@root/input.x": _float32([[1, -4], [0, 5]]),
        "0/block.0.scale:mul/output": _float32([[2, mul], [0, 15]]),
        "0/block.0:argmax/output": np.array(3),
        "0/block.0:add_10/output": _float32([[3, -11], [1, 16]]),
        "0/@root/output": _float32([[3, -11], [1, 16]]),
    }
    if extra:
        records[extra] = _float32([7])
    run = {"framework": {"name": "torch"}, "scope": {"level": "export"}, "dtype": "float32"}
    writer = Writer(path, run=run)
    for text, array in records.items():
        if text != without:
            whole = np.asarray(array)
            writer.add(Key.parse(text), bits_of(whole), dtype_of(whole), whole.shape)
    writer.close()
    return path


def statuses(reference: Path, target: Path) -> dict[str, str]:
    return {pair.key: pair.status for pair in compare(reference, target).pairs}


@pytest.mark.spec("AIM-20")
def test_nodes_are_paired_with_those_of_a_capture_of_the_graph(folder: Path, tmp_path: Path) -> None:
    archive = capture(tmp_path / "tgt.h5")
    for reference, target in ((folder, archive), (archive, folder)):
        pairs = statuses(reference, target)
        nodes = ("block.0.scale:mul", "block.0:argmax", "block.0:add_10")
        assert {pairs[f"0/{node}/output"] for node in nodes} == {"identical"}
        assert pairs["0/@root/input.x"] == "identical"


@pytest.mark.spec("AIM-20")
def test_a_wrong_value_of_a_paired_node_is_seen(folder: Path, tmp_path: Path) -> None:
    archive = capture(tmp_path / "tgt.h5", mul=-11.0)
    assert statuses(folder, archive)["0/block.0.scale:mul/output"] == "diverged"


@pytest.mark.spec("AIM-20")
@pytest.mark.parametrize(
    "change",
    [{"without": "0/block.0:add_10/output"}, {"extra": "0/other:mul/output"}],
    ids=["one-is-not-there", "one-is-there-twice"],
)
def test_nodes_of_another_graph_stay_where_they_are(
    folder: Path, tmp_path: Path, change: dict[str, str]
) -> None:
    pairs = statuses(folder, capture(tmp_path / "tgt.h5", mul=-11.0, **change))
    assert pairs["0/@root:mul/output"] == "missing-in-target"
