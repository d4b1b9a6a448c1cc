"""What ONNX Runtime cannot run is one line that says where and why, and nothing is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from tensorcap.adapters import adapter_named
from tensorcap_cli.main import main
from tensorcap_formats.errors import MissingPackageError
from tests.onnx.graphs import X, mlp, model, save


def outcome(*arguments: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(main, ["capture", "onnx", *arguments])
    return done.exit_code, [line for line in done.stderr.splitlines() if line.startswith(("Error", "Hint"))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(mlp(), tmp_path / "net.onnx")
    np.savez(tmp_path / "in.npz", x=X)
    return tmp_path


@pytest.mark.spec("ONX-10")
def test_inputs_of_a_file_and_of_an_archive(folder: Path) -> None:
    assert outcome("net.onnx", "--inputs", "in.npz", "-o", "a.h5") == (0, [])
    assert outcome("net.onnx", "--like", "a.h5", "-o", "b.h5") == (0, [])
    assert outcome("--like", "a.h5", "--optimization", "none", "-o", "c.h5") == (0, [])


def test_the_modules_of_a_file_are_listed_without_inputs(folder: Path) -> None:
    done = CliRunner().invoke(main, ["tree", "net.onnx"])
    assert done.exit_code == 0
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines() if "up" in line]


@pytest.mark.spec("ONX-30")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            ["net.onnx", "--inputs", "random"],
            "net.onnx: input x: random of float32[any, 4], which has an axis of any length, expected a file",
            id="dynamic shape",
        ),
        pytest.param(
            ["net.onnx"],
            "net.onnx: no inputs for x, expected --inputs FILE, zeros, ones or random",
            id="none",
        ),
        pytest.param(
            ["net.onnx", "--inputs", "wide.npz"],
            "net.onnx: input x: found float32[2, 5], expected float32[any, 4]",
            id="shape",
        ),
        pytest.param(["absent.onnx", "--inputs", "ones"], "absent.onnx", id="absent"),
        pytest.param(
            ["net.txt", "--inputs", "ones"], "net.txt: expected NAME.onnx or FILE.py:FUNCTION", id="suffix"
        ),
        pytest.param(
            ["net.onnx", "--inputs", "in.npz", "--level", "op"], "No such option '--level'", id="level"
        ),
    ],
)
def test_what_is_no_run_of_a_model_is_refused(arguments: list[str], line: str, folder: Path) -> None:
    np.savez(folder / "wide.npz", x=np.ones((2, 5), np.float32))
    status, lines = outcome(*arguments, "-o", "o.h5")
    assert status in (2, 3)
    assert not lines or line in lines[0]
    assert not (folder / "o.h5").exists()


@pytest.mark.spec("ONX-31")
def test_a_runtime_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorcap.adapters.onnx.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        MissingPackageError, match="capturing an onnx model needs the package 'onnxruntime'"
    ) as error:
        adapter_named("onnx")
    assert error.value.hint == "Install it with: pip install 'tensorcap[onnx]'"


def nodes(op: str, domain: str = "") -> list[Any]:
    return [helper.make_node(op, ["x"], ["y"], name="only", domain=domain)]


@pytest.mark.spec("ONX-31")
@pytest.mark.parametrize(
    ("made", "texts"),
    [
        pytest.param(
            model(nodes("Frobnicate"), [("x", TensorProto.FLOAT, [1])], ["y"], {}), ["Frobnicate"], id="op"
        ),
        pytest.param(
            model(nodes("Abs"), [("x", TensorProto.FLOAT, [1])], ["y"], {}, opset=99), ["pset 99"], id="opset"
        ),
        pytest.param(
            model(nodes("Abs", "my.own"), [("x", TensorProto.FLOAT, [1])], ["y"], {}), ["my.own"], id="domain"
        ),
    ],
)
def test_what_the_runtime_does_not_know_is_one_line(made: Any, texts: list[str], folder: Path) -> None:
    save(made, folder / "odd.onnx")
    status, lines = outcome("odd.onnx", "--inputs", "ones", "-o", "o.h5")
    assert status == 2
    assert lines[0].startswith("Error: odd.onnx: onnxruntime ")
    assert " cannot load it: " in lines[0]
    assert all(text in lines[0] for text in texts)
    assert not (folder / "o.h5").exists()


@pytest.mark.spec("ONX-31")
def test_a_provider_that_is_absent_is_named(folder: Path) -> None:
    status, lines = outcome("net.onnx", "--inputs", "in.npz", "--provider", "AbsentProvider", "-o", "o.h5")
    assert status == 2
    assert lines[0].startswith("Error: net.onnx: provider AbsentProvider: not in this onnxruntime ")
    assert "CPUExecutionProvider" in lines[0]


@pytest.mark.spec("ONX-31")
def test_a_file_of_weights_that_is_absent_is_named(folder: Path) -> None:
    onnx.save(mlp(), folder / "far.onnx", save_as_external_data=True, location="far.data", size_threshold=0)
    (folder / "far.data").unlink()
    status, lines = outcome("far.onnx", "--inputs", "in.npz", "-o", "o.h5")
    assert status == 3
    assert len(lines) == 1
    assert "far.data" in lines[0]


@pytest.mark.spec("ONX-31")
@pytest.mark.parametrize("content", [b"", b"\x08\x08\x12\x07pytorch", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_model_is_refused(content: bytes, folder: Path) -> None:
    (folder / "odd.onnx").write_bytes(content)
    status, lines = outcome("odd.onnx", "--inputs", "ones", "-o", "o.h5")
    assert status in (2, 3)
    assert len(lines) in (1, 2)
    assert "odd.onnx" in lines[0]
