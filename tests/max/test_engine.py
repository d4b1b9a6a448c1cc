"""Names of both generations of MAX lead to the same; a compiler that fails is told in a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max import driver
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, Weight
from max.nn.layer import Module

from tensorcap import MaxModel, Workload
from tensorcap.adapters.max import engine, tensors
from tensorcap.adapters.max.description import describe
from tensorcap.adapters.max.modules import devices_of, tree
from tensorcap.session import capture_workload
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import CaptureError
from tests.max.nets import TYPES, X, chain


class LoadsAtOnce:
    """A session before compiling and loading were told apart."""

    def load(self, graph: Any, *, weights_registry: Any) -> Any:
        return graph, weights_registry


@pytest.mark.spec("MAX-25")
def test_a_session_that_only_loads_is_given_the_graph_with_the_weights() -> None:
    with Graph("g", input_types=TYPES) as graph:
        graph.output(graph.inputs[0])
    session: Any = LoadsAtOnce()
    artifact = engine.compile_graph(session, graph)
    assert engine.init_model(session, artifact, {"w": X}) == (graph, {"w": X})


@pytest.mark.spec("MAX-25")
def test_the_reader_of_checkpoints_is_found_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(driver, "load_max_buffer")
    monkeypatch.setattr(driver, "load_max_tensor", lambda path: f"read {path}", raising=False)
    assert engine.load_buffer(Path("a.max")) == "read a.max"


@pytest.mark.spec("MAX-17")
@pytest.mark.parametrize(
    ("name", "stored"),
    [
        pytest.param("bfloat16", np.array([[0x3F80, 0x7FC1]], np.uint16), id="bfloat16"),
        pytest.param("float8_e4m3fn", np.array([0x38, 0x7F], np.uint8), id="float8"),
        pytest.param("bool", np.array([True, False]), id="bool"),
        pytest.param("bool", np.array(True), id="bool-of-no-axis"),
        pytest.param("bfloat16", np.array(0x3F80, np.uint16), id="bfloat16-of-no-axis"),
        pytest.param("int64", np.array(-1), id="int64-of-no-axis"),
        pytest.param("float16", np.zeros((0, 3), np.float16), id="empty"),
    ],
)
def test_bits_go_into_buffers_and_back(name: str, stored: Any) -> None:
    buffer = tensors.from_stored(stored, DTYPES[name])
    assert buffer.dtype == getattr(DType, name)
    assert tuple(buffer.shape) == stored.shape
    found, dtype = tensors.stored(buffer)
    assert dtype is DTYPES[name]
    assert found.shape == stored.shape
    assert found.tobytes() == stored.tobytes()


@pytest.mark.spec("MAX-17")
def test_arrays_of_torch_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    found, dtype = tensors.stored(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert (dtype.name, found.tolist()) == ("bfloat16", [0x3F80, 0x4000])
    assert isinstance(tensors.as_buffer(torch.ones(2)), Buffer)


@pytest.mark.spec("MAX-26")
def test_a_compiler_that_fails_is_reported_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to compile the model.\nPlease file an issue") from ValueError("no\nkernel")

    monkeypatch.setattr(engine.InferenceSession, "compile", fail)
    with pytest.raises(CaptureError, match="MAX failed to compile its graph: no kernel") as caught:
        capture_workload(Workload(chain(), (X,)), tmp_path / "a.h5")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.h5").exists()


@pytest.mark.spec("MAX-26")
def test_a_graph_that_max_refuses_is_reported_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *outputs: Any) -> None:
        print("a graph of a thousand lines")
        raise ValueError("Graph failed to verify. Please file an issue.\nbecause")

    monkeypatch.setattr(Graph, "output", fail)
    with pytest.raises(Exception, match="MAX takes no such graph: Graph failed to verify") as caught:
        capture_workload(Workload(chain(), (X,)), tmp_path / "a.h5")
    assert "\n" not in str(caught.value)


class Both(Module):
    def __init__(self) -> None:
        super().__init__()
        self.here = Weight("here", DType.float32, [4], DeviceRef.CPU())
        self.there = Weight("there", DType.bfloat16, [4, 4], DeviceRef.GPU(1))

    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.spec("MAX-14")
def test_devices_are_those_of_weights_and_inputs() -> None:
    module = Both()
    modules, _ = tree(module)
    assert [str(ref) for ref in devices_of(modules)] == ["cpu:0", "gpu:1"]
    told = describe(MaxModel(module))
    assert (told["device"], told["dtype"]) == ("gpu:1", "bfloat16")


@pytest.mark.slow  # importing MAX takes seconds
def test_processes_started_later_have_the_packages_of_this_one() -> None:
    code = "import os, subprocess, sys, tensorcap.adapters.max.engine\n" + (
        "child = 'import os, sys; print(sys.prefix, os.environ.get(\"PYTHONPATH\"))'\n"
        "print(sys.prefix, os.environ.get('PYTHONPATH'))\n"
        "sys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = done.stdout.splitlines()
    assert before == after
