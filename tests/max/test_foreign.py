"""A program that knows nothing of tensorcap is captured as it is: real MAX, on elementwise graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.driver import CPU, Buffer
from max.engine import InferenceSession, Model
from max.graph import Graph
from max.graph import Module as GraphModule
from max.nn.layer import Layer, Module

import tensorcap
from tensorcap import open_archive
from tensorcap.recording import Substitution
from tensorcap.session import ScriptRun
from tensorcap.workload import Script
from tensorcap_formats.errors import CaptureError
from tests.max.nets import AFTER, TYPES, Chain, Scale, X, chain, in_subgraph, somebody_elses, with_wrong_first

pytestmark = pytest.mark.slow


def seams() -> list[Any]:
    """All that a capture replaces."""
    places = (
        (Graph, "output"),
        (Model, "execute"),
        (Model, "replay"),
        (InferenceSession, "init_all"),
        (InferenceSession, "compile_async"),
    )
    return (
        [vars(owner)[name] for owner, name in places]
        + [vars(cls).get("__call__") for cls in (Scale, Chain, Layer, Module)]
        + [vars(Layer)["__init_subclass__"]]
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("max") / "ref.h5"
    module = chain()
    with tensorcap.capture(module, path):
        somebody_elses(module)
    return path


@pytest.mark.spec("MAX-40")
def test_the_caller_gets_its_single_output_and_nothing_of_ours_stays(tmp_path: Path) -> None:
    module, before = chain(), seams()
    with tensorcap.capture(module, tmp_path / "a.h5") as cap:
        outputs = somebody_elses(module, runs=2)
    assert seams() == before
    assert [len(found) for found in outputs] == [1, 1]
    np.testing.assert_array_equal(outputs[0][0].to_numpy(), AFTER[2])
    assert cap.summary is not None
    assert (cap.summary.steps, cap.summary.tensors) == (2, 16)
    with open_archive(tmp_path / "a.h5") as archive:
        for step in (0, 1):
            for i, value in enumerate(AFTER):
                found = archive.read(archive.get(f"{step}/layers.{i}/output"))
                np.testing.assert_array_equal(found, value)
        assert archive.run["graphs"] == {"theirs": {"outputs": 1, "taps": 3}}
        assert "no run without them was made" in archive.run["notes"][0]


@pytest.mark.spec("MAX-40")
def test_graphs_that_do_not_call_the_model_are_let_alone(tmp_path: Path) -> None:
    module = chain()
    with tensorcap.capture(module, tmp_path / "a.h5") as cap:
        somebody_elses(module)
        with Graph("other", input_types=TYPES) as graph:
            graph.output(graph.inputs[0].tensor + 1.0)
        other = InferenceSession(devices=[CPU()]).load(graph)
        assert len(other.execute(Buffer.from_numpy(X))) == 1
    assert cap.summary is not None
    assert cap.summary.steps == 1


@pytest.mark.spec("MAX-41")
def test_archived_tensors_go_in_as_weights(reference: Path, tmp_path: Path) -> None:
    module = chain(with_wrong_first())
    with open_archive(reference) as archive:
        plan = Substitution(archive, inputs=["layers.1"])
        with tensorcap.capture(module, tmp_path / "a.h5", substitution=plan):
            outputs = somebody_elses(module)
    np.testing.assert_array_equal(outputs[0][0].to_numpy(), AFTER[2])
    with open_archive(tmp_path / "a.h5") as archive:
        np.testing.assert_array_equal(archive.read(archive.get("0/layers.1/input.x")), 3 * X + 1)
        np.testing.assert_array_equal(archive.read(archive.get("0/layers.1/output")), AFTER[1])
        assert [s["status"] for s in archive.run["injected"]["slots"]] == ["injected"]


@pytest.mark.spec("MAX-41")
def test_a_second_run_under_injection_is_refused(reference: Path, tmp_path: Path) -> None:
    module = chain()
    with open_archive(reference) as archive:
        plan = Substitution(archive, inputs=["layers.1"])
        with (
            pytest.raises(CaptureError, match="is run a second time"),
            tensorcap.capture(module, tmp_path / "a.h5", substitution=plan),
        ):
            somebody_elses(module, runs=2)


@pytest.mark.spec("MAX-24", "MAX-40")
def test_subgraphs_of_somebody_elses_are_seen_too(tmp_path: Path) -> None:
    module = in_subgraph()
    with tensorcap.capture(module, tmp_path / "a.h5", inner=True):
        outputs = somebody_elses(module)
    assert len(outputs[0]) == 1
    with open_archive(tmp_path / "a.h5") as archive:
        found = {r.key.text: archive.read(r) for r in archive.records}
    after = X
    for i in range(3):
        np.testing.assert_array_equal(found[f"0/layers.{i}/input.x"], after)
        after = ((after * (i + 1) + 1) * (i + 2) + 1) * (X + 1)
    np.testing.assert_array_equal(found["0/layers.2/output"], after)
    np.testing.assert_array_equal(found["0/layers.2.first/output"], found["0/layers.2/input.x"] * 3 + 1)


@pytest.mark.spec("MAX-42")
def test_what_a_device_graph_replays_is_refused(tmp_path: Path) -> None:
    module = chain()

    def program() -> None:
        graph = Graph("theirs", module, input_types=TYPES)
        model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=module.state_dict())
        model.replay(1, Buffer.from_numpy(X))

    with (
        pytest.raises(CaptureError, match="what a device graph replays is not seen"),
        tensorcap.capture(module, tmp_path / "a.h5"),
    ):
        program()


@pytest.mark.spec("MAX-42")
def test_graphs_of_one_name_are_told_apart_by_what_was_compiled(tmp_path: Path) -> None:
    first, second = chain(), chain(with_wrong_first())

    class Both(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def __call__(self, x: Any) -> Any:
            return self.second(self.first(x))

    with tensorcap.capture(Both(), tmp_path / "a.h5"):
        graphs = [Graph("same", m, input_types=TYPES) for m in (first, second)]
        session = InferenceSession(devices=[CPU()])
        for graph, module in zip(graphs, (first, second), strict=True):
            model = session.load(graph, weights_registry=module.state_dict())
            assert len(model.execute(Buffer.from_numpy(X))) == 1
    with open_archive(tmp_path / "a.h5") as archive:
        found = {site: archive.read(archive.get(f"0/{site}.layers.0/output")) for site in ("first", "second")}
    np.testing.assert_array_equal(found["first"], 2 * X + 1)
    np.testing.assert_array_equal(found["second"], 3 * X + 1)


@pytest.mark.spec("MAX-42")
def test_graphs_that_are_compiled_together_are_told_apart(tmp_path: Path) -> None:
    class Coder(Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = chain(), Scale()

        def __call__(self, x: Any) -> Any:
            return self.decoder(self.encoder(x))

    module = Coder()
    module.decoder.load_state_dict({"weight": np.full(4, 5, np.float32)}, weight_alignment=1)
    weights = {**module.encoder.state_dict(), **module.decoder.state_dict()}
    with tensorcap.capture(module, tmp_path / "a.h5"):
        together = GraphModule()
        for name, part in (("encodes", module.encoder), ("decodes", module.decoder)):
            Graph(name, part, input_types=TYPES, module=together)
        session = InferenceSession(devices=[CPU()])
        models = session.load_all(together, weights_registry=weights)
        outputs = {name: model.execute(Buffer.from_numpy(X)) for name, model in models.items()}
    assert {name: len(found) for name, found in outputs.items()} == {"encodes": 1, "decodes": 1}
    with open_archive(tmp_path / "a.h5") as archive:
        found = {r.key.text: archive.read(r) for r in archive.records}
        assert archive.run["graphs"]["encodes"] == {"outputs": 1, "taps": 3}
    np.testing.assert_array_equal(found["0/encoder.layers.2/output"], AFTER[2])
    np.testing.assert_array_equal(found["0/decoder/output"], 5 * X + 1)


SCRIPT = """
import numpy as np
from max.driver import CPU, Buffer
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.dtype import DType
from max.nn import LayerList
from max.nn.layer import Module

class Scale(Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight("weight", DType.float32, [4], DeviceRef.CPU())
    def __call__(self, x):
        return x * self.weight + 1.0

class Chain(Module):
    def __init__(self):
        super().__init__()
        self.layers = LayerList([Scale() for _ in range(3)])
    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

module = Chain()
weights = {f"layers.{i}.weight": np.full(4, i + 2.0, np.float32) for i in range(3)}
module.load_state_dict(weights, weight_alignment=1)
types = [TensorType(DType.float32, [2, 4], DeviceRef.CPU())]
graph = Graph("theirs", module, input_types=types)
model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=module.state_dict())
outputs = model.execute(Buffer.from_numpy(np.arange(8, dtype=np.float32).reshape(2, 4)))
assert len(outputs) == 1
"""


@pytest.mark.spec("MAX-43")
def test_a_model_that_only_a_script_has_is_found_where_its_graph_is_made(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT, encoding="utf-8")
    before = seams()
    script = Script.parse([str(tmp_path / "program.py")])
    done = ScriptRun(script, tmp_path / "a.h5", framework="max").run()
    assert done.trouble is None
    assert done.error is None
    assert [(root.name, root.calls, root.is_taken) for root in done.roots] == [("Chain", 1, True)]
    assert seams() == before
    with open_archive(tmp_path / "a.h5") as archive:
        np.testing.assert_array_equal(archive.read(archive.get("0/layers.2/output")), AFTER[2])
        assert archive.run["script"]["file"].endswith("program.py")


@pytest.mark.spec("CAP-96", "MAX-43")
def test_a_model_that_only_a_function_has_is_found_in_a_block(tmp_path: Path) -> None:
    before = seams()
    with tensorcap.capture_called(tmp_path / "a.h5", framework="max") as called:
        outputs = somebody_elses(chain())
    assert (seams(), len(outputs[0])) == (before, 1)
    assert called.capture is not None
    assert called.capture.summary is not None
    assert called.capture.summary.captured == ("@root", "layers.0", "layers.1", "layers.2")
    with (
        pytest.raises(CaptureError, match="no model 'Other' was called in the block, but Chain"),
        tensorcap.capture_called(tmp_path / "b.h5", framework="max", root="Other"),
    ):
        somebody_elses(chain())


@pytest.mark.spec("MAX-43")
def test_the_command_waits_for_the_script_to_import_max(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT + "print('theirs:', len(outputs))", encoding="utf-8")
    command = [sys.executable, "-m", "tensorcap_cli", "capture", "script", "--framework", "max"]
    command += ["-o", str(tmp_path / "a.h5"), "--", str(tmp_path / "program.py")]
    # MAX sets variables past os.environ that would hide what is installed from another Python
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    assert "theirs: 1" in done.stdout
    assert "8 tensors" in done.stderr
    assert "modules: 4 captured, 0 never called" in done.stderr


@pytest.mark.spec("MAX-43")
def test_a_script_that_makes_no_such_graph_says_so(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import max.nn\n", encoding="utf-8")
    done = ScriptRun(Script.parse([str(tmp_path / "program.py")]), tmp_path / "a.h5", framework="max").run()
    assert "called no max model" in str(done.trouble)
