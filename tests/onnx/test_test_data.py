"""Test data sets of ONNX, a folder beside a model: inputs of a capture, and outputs to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

import tensorcap
from tensorcap.comparison import compare
from tensorcap_cli.main import main
from tensorcap_formats.errors import CorruptArchiveError, ReadError, UnsafeFileError
from tensorcap_formats.open import open_archive
from tests.onnx.graphs import X, mlp, mlp_values, save


def data_set(folder: Path, y: Any, name: str = "x") -> Path:
    path = folder / "test_data_set_0"
    path.mkdir()
    (path / "input_0.pb").write_bytes(numpy_helper.from_array(X, name).SerializeToString())
    (path / "output_0.pb").write_bytes(numpy_helper.from_array(y, "y").SerializeToString())
    return path


@pytest.mark.spec("ONX-50")
@pytest.mark.parametrize("name", ["x", ""], ids=["named", "without a name"])
def test_a_run_on_its_inputs_agrees_with_its_outputs(name: str, tmp_path: Path) -> None:
    model = save(mlp(), tmp_path / "net.onnx")
    folder = data_set(tmp_path, mlp_values()["y"].astype(np.float32), name)
    arguments = ["capture", "onnx", model, "--inputs", str(folder), "-o", str(tmp_path / "tgt.h5")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    comparison = compare(folder, tmp_path / "tgt.h5")
    assert comparison.exit_status == 0
    assert {p.key for p in comparison.pairs if p.is_compared and p.is_green} >= {"0/@root/output"}


@pytest.mark.spec("ONX-50")
def test_what_else_is_in_the_folder_is_listed_and_links_out_of_it_are_refused(tmp_path: Path) -> None:
    folder = data_set(tmp_path, X)
    (folder / "notes.txt").write_text("of a test")
    (folder / "older").mkdir()
    with open_archive(folder) as archive:
        assert archive.skipped == {
            "notes.txt": "no input_N.pb or output_N.pb",
            "older/": "a folder with nothing that is read: no input_N.pb or output_N.pb",
        }
    (folder / "input_0.pb").rename(tmp_path / "outside.pb")
    (folder / "input_0.pb").symlink_to(tmp_path / "outside.pb")
    with pytest.raises(UnsafeFileError, match=r"input_0\.pb: is a link to a file outside of"):
        open_archive(folder)


def test_another_output_is_found(tmp_path: Path) -> None:
    model = save(mlp(), tmp_path / "net.onnx")
    folder = data_set(tmp_path, mlp_values()["y"].astype(np.float32) + np.float32(0.1))
    arguments = ["capture", "onnx", model, "--inputs", str(folder), "-o", str(tmp_path / "tgt.h5")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert compare(folder, tmp_path / "tgt.h5").exit_status == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"\xff\xff\xff\xff", "is no ONNX tensor", id="no message"),
        pytest.param(b"", "is no ONNX tensor", id="empty"),
        pytest.param(numpy_helper.from_array(X, "x").SerializeToString()[:-4], "input_0.pb", id="cut short"),
        pytest.param(
            numpy_helper.from_array(np.array(["a"], object), "x").SerializeToString(),
            "is an array of text, expected numbers",
            id="text",
        ),
    ],
)
def test_what_is_no_tensor_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    folder = data_set(tmp_path, X)
    (folder / "input_0.pb").write_bytes(data)
    with pytest.raises(ReadError, match=words):
        tensorcap.open_archive(folder)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    folder = data_set(tmp_path, X)
    (folder / "input_1.pb").write_bytes(numpy_helper.from_array(X, "x").SerializeToString())
    with pytest.raises(CorruptArchiveError, match="two tensors are named"):
        tensorcap.open_archive(folder)


@pytest.mark.spec("ONX-10")
def test_inputs_that_are_given_by_their_place_are_said(tmp_path: Path) -> None:
    model = save(mlp(), tmp_path / "net.onnx")
    np.savez(tmp_path / "in.npz", x=X)
    first = ["capture", "onnx", model, "--inputs", str(tmp_path / "in.npz"), "-o", str(tmp_path / "a.h5")]
    assert CliRunner().invoke(main, first).exit_code == 0
    made = mlp()
    made.graph.input[0].name = made.graph.node[0].input[0] = "onnx::MatMul_0"
    other = save(made, tmp_path / "other.onnx")
    arguments = ["capture", "onnx", other, "--like", str(tmp_path / "a.h5"), "-o", str(tmp_path / "b.h5")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0
    assert "inputs: onnx::MatMul_0 is x of the archive, by its place" in done.stderr
    assert "by its place" not in CliRunner().invoke(main, [*arguments[:2], model, *arguments[3:]]).stderr
