"""Folders of intermediates that lie, lead elsewhere or explode; and graphs that would have one written so."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.adapters import export_graph
from tensorcap_formats.dtypes import bits_of, dtype_of
from tensorcap_formats.errors import CorruptArchiveError, ReadError, UnsafeFileError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

ENTRY = {
    "node_name": "mul",
    "node_op": "call_function",
    "node_target": "aten.mul.Tensor",
    "data_file": "data/mul_0000.npy",
    "shape": [2],
    "torch_dtype": "torch.float32",
    "numel": 2,
}
Change = Callable[[Path, dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "net.aimodelintermediates"
    (path / "data").mkdir(parents=True)
    np.save(path / "data/mul_0000.npy", np.array([1, 2], "f4"))
    return path


def write(folder: Path, metadata: Any) -> None:
    (folder / "metadata.json").write_text(json.dumps(metadata))


def entry(**members: Any) -> Change:
    return lambda _, metadata: metadata["intermediates"]["mul"].update(members)


def _pipe(path: Path, _: dict[str, Any]) -> None:
    (path / "data/mul_0000.npy").unlink()
    os.mkfifo(path / "data/mul_0000.npy")


def _linked_data(path: Path, _: dict[str, Any]) -> None:
    (path / "data").rename(path.parent / "elsewhere")
    (path / "data").symlink_to(path.parent / "elsewhere")


def _twice(_: Path, metadata: dict[str, Any]) -> None:
    metadata["outputs"]["mul"] = {**metadata["intermediates"]["mul"], "node_target": "aten.add.Tensor"}


CASES: dict[str, tuple[Change, type[ReadError], str]] = {
    "key-bare": (entry(keys=["weight"]), CorruptArchiveError, r"keys are \['weight'\], expected a list"),
    "key-empty": (entry(keys=[""]), CorruptArchiveError, "expected a list of STEP/SITE/SLOT"),
    "key-number": (entry(keys=[7]), CorruptArchiveError, r"keys are \[7\]"),
    "keys-text": (entry(keys="0/a/output"), CorruptArchiveError, "expected a list"),
    "keys-null": (entry(keys=None), CorruptArchiveError, "expected a list"),
    "keys-long": (entry(keys=[f"0/{'a' * 70_000}/output"]), CorruptArchiveError, "expected a list"),
    "keys-twice": (entry(keys=["0/a/output"] * 2), CorruptArchiveError, "two tensors are named"),
    "shape-huge": (entry(shape=[2**62, 2**62]), CorruptArchiveError, r"is of shape \[2\]"),
    "shape-true": (entry(shape=[True, 2]), CorruptArchiveError, "expected a list of sizes"),
    "name-in-two-objects": (_twice, CorruptArchiveError, "two tensors are named '0/@root:mul/output'"),
    "data-linked-out": (_linked_data, UnsafeFileError, "outside of"),
    "surrogate": (entry(data_file="data/\ud800.npy"), UnsafeFileError, "is no path"),
    "nul": (entry(data_file="data/a\0b.npy"), CorruptArchiveError, "no path"),
    "proc": (entry(data_file="/proc/self/environ"), UnsafeFileError, "outside of"),
    "pipe": (_pipe, ReadError, "mul_0000.npy: is no regular file"),
}


@pytest.mark.parametrize(("change", "error", "message"), CASES.values(), ids=CASES)
def test_a_folder_that_lies_is_refused_in_one_line(
    folder: Path, change: Change, error: type[ReadError], message: str
) -> None:
    metadata: dict[str, Any] = {"inputs": {}, "outputs": {}, "intermediates": {"mul": dict(ENTRY)}}
    change(folder, metadata)
    write(folder, metadata)
    with pytest.raises(error, match=message) as caught:
        open_archive(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"inputs": ' * 50_000, '{"inputs": NaN}'], ids=["deep", "deep-objects", "nan"]
)
def test_metadata_that_explode_are_refused(folder: Path, text: str) -> None:
    (folder / "metadata.json").write_text(text)
    with pytest.raises(ReadError):
        open_archive(folder)


def test_metadata_of_a_terabyte_are_not_read(folder: Path) -> None:
    with (folder / "metadata.json").open("wb") as file:
        file.truncate(2**40)
    tracemalloc.start()
    with pytest.raises(ReadError):
        open_archive(folder)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.spec("AIM-41")
def test_an_output_that_is_an_input_too_is_one_record(folder: Path) -> None:
    x = {**ENTRY, "node_op": "placeholder", "node_target": "mul"}
    write(folder, {"inputs": {"mul": x}, "outputs": {"mul": x}, "intermediates": {}})
    with open_archive(folder) as archive:
        assert [record.key.text for record in archive.records] == ["0/@root/input.mul"]
        assert archive.is_ordered


@pytest.mark.spec("AIM-40")
def test_keys_of_an_entry_are_records_of_its_values(folder: Path) -> None:
    keys = ["0/block.0:mul/output", "0/@root/output.logits"]
    write(folder, {"inputs": {}, "outputs": {"mul": {**ENTRY, "keys": keys}}, "intermediates": {}})
    with open_archive(folder) as archive:
        assert {r.key.text: archive.read(r).tolist() for r in archive.records} == {
            "0/block.0:mul/output": [1, 2],
            "0/@root/output.logits": [1, 2],
        }


def captured(path: Path, facts: dict[str, Any], graph: Any, site: str = "@root:mul") -> Path:
    """An archive of one node, whose facts and metadata are given."""
    values = np.array([1, 2], "f4")
    writer = Writer(path, run={"scope": {"level": "export"}, "graph": graph})
    writer.add(Key("@root", "input.x"), bits_of(values), dtype_of(values), (2,))
    if facts:
        writer.add_value(
            f"0/{site}/op",
            {
                "op": "aten.mul.Tensor",
                "order": 1,
                "module": "@root",
                "module_call": 0,
                "class": "Net",
                "inputs": [],
                "arguments": {},
                "outputs": [facts],
            },
        )
    writer.close()
    return path


def view(**members: Any) -> dict[str, Any]:
    whole = {"view_of": "0/@root/input.x", "shape": [2], "strides": [1], "offset": 0, "dtype": "float32"}
    return {"slot": "output", **whole, **members}


@pytest.mark.spec("AIM-45")
@pytest.mark.parametrize(
    ("facts", "message"),
    [
        pytest.param(view(offset=9), "a view of it goes to byte 44", id="outside"),
        pytest.param(view(shape=[2**40, 2**20], strides=[0, 0]), "does not fit into memory", id="huge"),
        pytest.param(
            {"slot": "output", "record": "0/@root:other/output"}, "refers to that of another", id="other"
        ),
    ],
)
def test_a_graph_that_lies_leaves_no_folder(facts: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = captured(tmp_path / "net.h5", facts, {})
    with open_archive(path) as archive, pytest.raises(ReadError, match=message):
        export_graph(archive, tmp_path / "net.aimodelintermediates")
    assert [file.name for file in tmp_path.iterdir()] == ["net.h5"]


@pytest.mark.parametrize("name", ["%2Ftmp%2Fout", "a" * 300, "%00", "é", "data%2Fx"])
def test_no_name_of_a_node_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    path = captured(tmp_path / "net.h5", view(), {}, site=f"@root:{name}")
    with open_archive(path) as archive:
        dump = export_graph(archive, tmp_path / "net.aimodelintermediates")
    assert dump.values in (0, 1)
    names = [p.name for p in tmp_path.rglob("*") if p.is_file()]
    assert sorted(names)[-1:] == ["net.h5"]
    assert {p.parent.name for p in tmp_path.rglob("*.npy")} == {"data"}
    with open_archive(dump.folder) as written:
        assert len(written.records) == 1


@pytest.mark.spec("CAP-220")
@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(3, id="number"),
        pytest.param({"inputs": [], "weights": 1, "outputs": {}}, id="kinds"),
        pytest.param(
            {"inputs": {"x": 3}, "weights": {"w": {"parameter": 3}}, "outputs": [1, {}]}, id="entries"
        ),
        pytest.param(
            {"inputs": {"x": {"record": "0/no/output"}}, "outputs": [{"node": 1, "slots": 2}]}, id="no"
        ),
    ],
)
def test_a_damaged_description_of_the_graph_counts_as_absent(graph: Any, tmp_path: Path) -> None:
    path = captured(tmp_path / "net.h5", view(), graph)
    with open_archive(path) as archive:
        dump = export_graph(archive, tmp_path / "net.aimodelintermediates")
    assert dump.values == 1
