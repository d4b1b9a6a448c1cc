"""A max.nn model is captured as a torch module is: real MAX, on elementwise graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xxhash
from max.driver import Buffer
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.nn.layer import Module, add_layer_hook, layer

import tensorcap
from tensorcap import MaxModel, Workload, open_archive
from tensorcap.adapters.max import engine, graph_builder
from tensorcap.session import capture_workload
from tensorcap_formats.errors import UsageError
from tensorcap_formats.statistics import Statistics
from tests.max.nets import (
    AFTER,
    EVERYTHING,
    IDS,
    ON_CPU,
    WEIGHTS,
    Chain,
    Everything,
    Scale,
    X,
    chain,
    everything,
    in_subgraph,
)

pytestmark = pytest.mark.slow


class Captured:
    """What one capture of `Everything` left, and what it did to the model."""

    def __init__(self, path: Path) -> None:
        self.module = everything()
        self.calls: list[str] = []
        add_layer_hook(lambda found, *_: self.calls.append(type(found).__name__))
        self.hooks = list(layer._LAYER_HOOKS)
        self.methods = {cls: cls.__dict__.get("__call__") for cls in (Everything, Scale, Graph)}
        self.attributes = {name: dict(vars(m)) for name, m in self.module.named_modules()}
        try:
            workload = Workload(self.module, {"x": X, "ids": IDS, "scale": 2.0})
            self.capture = capture_workload(workload, path, params=True)
            self.hooks_after = list(layer._LAYER_HOOKS)
        finally:
            layer._LAYER_HOOKS.clear()
        self.archive = open_archive(path)
        self.values = {r.key.text: self.archive.read(r) for r in self.archive.records}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return Captured(tmp_path_factory.mktemp("max") / "all.h5")


@pytest.mark.spec("MAX-10")
def test_every_slot_of_every_call_is_recorded_in_the_order_in_which_it_happens(captured: Captured) -> None:
    keys = [r.key.text for r in sorted(captured.archive.records, key=lambda r: r.order or 0)]
    assert [key for key in keys if "/param." not in key] == [
        "0/@root/input.x",
        "0/@root/input.ids",
        "0/twice/input.x",
        "0/twice/output",
        "0/twice@1/input.x",
        "0/twice@1/output",
        "0/loud/input.x",
        "0/loud/input.shift",
        "0/loud/output",
        "0/split/input.pair.a",
        "0/split/input.pair.b",
        "0/split/output.high",
        "0/split/output.low",
        "0/probe:between/value.low",
        "0/stack/input.x",
        "0/part/input.x",
        "0/part/output",
        "0/stack/output",
        "0/fused/input.x",
        "0/fused/output",
        "0/@root/output.sum",
        "0/@root/output.fused",
    ]


@pytest.mark.spec("MAX-10")
def test_values_are_those_of_the_moment(captured: Captured) -> None:
    twice = 2 * (2 * X + 1) + 1
    loud = 3 * twice + 1 + twice
    expected = {
        "0/twice/output": 2 * X + 1,
        "0/twice@1/input.x": 2 * X + 1,
        "0/loud/input.shift": twice,
        "0/loud/output": loud,
        "0/split/output.high": loud + IDS,
        "0/probe:between/value.low": loud - IDS,
        "0/part/output": loud + IDS + 1,
        "0/@root/output.sum": 2 * (loud + IDS + 1),
        "0/@root/output.fused": 5 * (loud - IDS),
    }
    for key, value in expected.items():
        np.testing.assert_array_equal(captured.values[key], value, err_msg=key)


@pytest.mark.spec("MAX-10")
def test_leaves_that_are_no_tensors_are_kept_too(captured: Captured) -> None:
    values = captured.archive.values
    assert values["0/@root/input.scale"] == 2.0
    assert values["0/loud/input.by"] == 0.5
    assert values["0/probe:between/module"] == "@root"


@pytest.mark.spec("MAX-11")
def test_names_are_those_of_weights_without_what_max_leaves_out(captured: Captured) -> None:
    paths = [module["path"] for module in captured.archive.run["modules"]]
    assert paths == ["", "twice", "loud", "split", "stack", "part", "fused", "fused.gate"]
    assert captured.archive.run["aliases"] == {"again": "twice"}


@pytest.mark.spec("MAX-12")
def test_one_value_is_given_out_once_and_an_input_not_at_all(captured: Captured) -> None:
    # twice, twice@1, loud, pair.b, high, low, part = stack, fused, sum, and fused is an output already
    assert captured.archive.run["graph"]["taps"] == 9


@pytest.mark.spec("MAX-13")
def test_a_module_that_is_never_called_is_reported_with_its_weights(captured: Captured) -> None:
    summary = captured.capture.summary
    assert summary is not None
    assert summary.never_called == ("fused.gate",)
    point = next(p for p in captured.archive.run["points"] if p["site"] == "fused.gate")
    assert point["status"] == "never-called"
    assert point["reason"] == "code around it uses its weights and does not call it"
    np.testing.assert_array_equal(
        captured.values["0/fused.gate/param.weight"], EVERYTHING["fused.gate.weight"]
    )


def test_that_max_compiles_is_a_stage_of_the_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stages:
        def __init__(self) -> None:
            self.texts: list[str] = []
            self.count = 0

        def stage(self, text: str) -> None:
            self.texts.append(text)

        def advance(self, done: int, total: int | None) -> None:
            self.count = done

    progress = Stages()
    seen: list[str] = []
    compiled = engine.compile_graph

    def watched(*args: Any) -> Any:
        seen.append(progress.texts[-1])
        return compiled(*args)

    monkeypatch.setattr(graph_builder, "compile_graph", watched)
    capture_workload(Workload(chain(), {"x": X}), tmp_path / "a.h5", progress=progress)
    assert seen == ["MAX compiles the model", "MAX compiles the model without taps, as a control"]
    assert progress.texts[0] == progress.texts[-1]
    assert progress.texts[0].startswith("capturing ")
    assert progress.count == 8


class Forgetful(Module):
    """Has a layer that nothing is computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.forgotten = Scale(), Scale()

    def __call__(self, x: Any) -> Any:
        return self.first(x)


@pytest.mark.spec("MAX-13")
def test_a_module_that_somebody_forgot_to_call_is_told_apart_from_a_fused_one(tmp_path: Path) -> None:
    module = Forgetful()
    weights = {f"{name}.weight": np.full(4, 2, np.float32) for name in ("first", "forgotten")}
    module.load_state_dict(weights, weight_alignment=1)
    capture_workload(Workload(MaxModel(module, control=False), {"x": X}), tmp_path / "a.h5")
    with open_archive(tmp_path / "a.h5") as archive:
        reasons = {point["site"]: point.get("reason") for point in archive.run["points"]}
    assert reasons["forgotten"] == "none of its weights is in the graph"


@pytest.mark.spec("MAX-14")
def test_the_run_says_what_it_was_of(captured: Captured) -> None:
    run = captured.archive.run
    assert run["framework"] == {"name": "max", "version": "26.7.0"}
    assert run["model"]["class"] == "tests.max.nets.Everything"
    assert run["model"]["file"].endswith("nets.py")
    assert "class Loud(Scale):" in run["sources"]["tests.max.nets.Loud"]["text"]
    assert run["modules"][1]["parameters"] == {"weight": {"shape": [4], "dtype": "float32"}}
    assert (run["dtype"], run["device"]) == ("float32", "cpu")
    assert "0/@root/input.ids" in run["inputs"]


@pytest.mark.spec("CAP-67")
@pytest.mark.parametrize("has_digests", [True, False])
def test_weights_have_digests_without_being_records(tmp_path: Path, *, has_digests: bool) -> None:
    path, params = tmp_path / "a.h5", None if has_digests else False
    capture_workload(Workload(MaxModel(chain(), control=False), {"x": X}), path, params=params)
    with open_archive(path) as archive:
        weight = archive.info.modules["layers.1"].parameters["weight"]
        assert not [r for r in archive.records if r.key.slot.startswith("param")]
    raw = WEIGHTS["layers.1.weight"].tobytes()  # four times 3.0
    assert weight.digest == (f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw)}" if has_digests else "")
    statistics = Statistics(3.0, 3.0, 3.0, 6.0, nan=0, posinf=0, neginf=0, zeros=0)
    assert weight.statistics == (statistics if has_digests else None)


@pytest.mark.spec("ARC-73")
def test_attributes_of_a_module_are_its_settings(tmp_path: Path) -> None:
    module = chain()
    for scale in module.layers:
        scale.eps = 1e-6
        scale._private = 3
    capture_workload(Workload(MaxModel(module, control=False), {"x": X}), tmp_path / "a.h5")
    with open_archive(tmp_path / "a.h5") as archive:
        assert archive.info.modules["layers.1"].settings == {"eps": 1e-6}


@pytest.mark.spec("MAX-15")
def test_the_model_and_everybodys_hooks_are_as_before(captured: Captured) -> None:
    assert captured.hooks_after == captured.hooks
    assert captured.calls  # somebody's own hook went on being called
    assert {c: c.__dict__.get("__call__") for c in captured.methods} == captured.methods
    assert {n: dict(vars(m)) for n, m in captured.module.named_modules()} == captured.attributes


@pytest.mark.spec("MAX-16")
def test_a_run_without_taps_says_what_taps_change(captured: Captured) -> None:
    control = captured.archive.run["control"]
    assert [entry["slot"] for entry in control] == ["output.sum", "output.fused"]
    assert all(entry["identical"] for entry in control)
    assert captured.archive.run["notes"] == ["a run without taps gave the same bits"]


@pytest.mark.spec("MAX-17")
def test_bfloat16_and_symbolic_shapes_are_kept_exactly(tmp_path: Path) -> None:
    module = Chain(DType.bfloat16)
    bits = {name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in WEIGHTS.items()}

    def as_bfloat16(array: Any) -> Any:
        return Buffer.from_numpy(array).view(DType.bfloat16)

    module.load_state_dict({n: as_bfloat16(v) for n, v in bits.items()}, weight_alignment=1)
    model = MaxModel(module, input_types=[TensorType(DType.bfloat16, ["rows", 4], ON_CPU)])
    x = as_bfloat16((X.view(np.uint32) >> 16).astype(np.uint16))
    capture_workload(Workload(model, (x,)), tmp_path / "a.h5")
    archive = open_archive(tmp_path / "a.h5")
    record = archive.get("0/layers.1/output")
    assert (record.dtype.name, record.shape) == ("bfloat16", (2, 4))
    # small whole numbers are exact in bfloat16
    expected = (AFTER[1].view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(archive.read(record), expected)
    assert archive.run["symbolic_shapes"]["layers.1/output"] == ["rows", "4"]
    assert archive.run["dtype"] == "bfloat16"


@pytest.mark.spec("MAX-18")
def test_graphs_are_made_once_and_a_module_can_be_captured_again(tmp_path: Path) -> None:
    module = chain()
    for name in ("a.h5", "b.h5"):
        capture_workload(Workload(module, (X,)), tmp_path / name)
    graphs = MaxModel.of(module).compiled.graphs
    assert [(graph.taps, graph.instrumentation is None) for graph in graphs] == [(3, False), (0, True)]
    with Graph("again", module, input_types=[TensorType(DType.float32, [2, 4], ON_CPU)]) as graph:
        pass
    assert graph.name == "again"
    first, second = (open_archive(tmp_path / name) for name in ("a.h5", "b.h5"))
    assert first.root == second.root


@pytest.mark.spec("MAX-12")
def test_what_is_not_asked_for_is_not_given_out(tmp_path: Path) -> None:
    module = chain()
    workload = Workload(module, (X,))
    capture_workload(workload, tmp_path / "a.h5", only=["layers.0", "@root"], inputs=False)
    with open_archive(tmp_path / "a.h5") as archive:
        assert [r.key.text for r in archive.records] == [
            "0/@root/input.x",
            "0/layers.0/output",
            "0/@root/output",
        ]
        assert archive.run["graph"]["taps"] == 2
    # a graph that tells more does for less
    capture_workload(workload, tmp_path / "b.h5")
    capture_workload(workload, tmp_path / "c.h5", only=["layers.1"])
    assert len(MaxModel.of(module).compiled.graphs) == 3


@pytest.mark.spec("MAX-18")
def test_weights_that_were_loaded_anew_are_those_of_the_next_run(tmp_path: Path) -> None:
    module = chain()
    capture_workload(Workload(module, (X,)), tmp_path / "a.h5")
    module.load_state_dict({n: w + np.float32(1) for n, w in WEIGHTS.items()}, weight_alignment=1)
    capture_workload(Workload(module, (X,)), tmp_path / "b.h5")
    archive = open_archive(tmp_path / "b.h5")
    np.testing.assert_array_equal(archive.read(archive.get("0/layers.0/output")), 3 * X + 1)


class Keeper(Scale):
    """Keeps a value of its first graph where nobody looks."""

    kept: ClassVar[dict[str, Any]] = {}

    def __call__(self, x: Any) -> Any:
        if not self.kept:
            self.kept["one"] = ops.constant(np.float32(1), DType.float32, DeviceRef.CPU())
        return x + self.kept["one"]


@pytest.mark.spec("MAX-15")
def test_a_module_whose_first_graph_cannot_be_forgotten_is_refused_in_a_line(tmp_path: Path) -> None:
    module = Keeper()
    module.load_state_dict({"weight": np.ones(4, np.float32)}, weight_alignment=1)
    with pytest.raises(UsageError, match="holds values of a graph that was made of it before") as caught:
        capture_workload(Workload(module, (X,)), tmp_path / "a.h5")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.h5").exists()


@pytest.mark.spec("MAX-19")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"level": "op"}, "level op", id="ops"),
        pytest.param({"level": "export"}, "level export", id="export"),
        pytest.param({"grads": True}, "gradients", id="gradients"),
    ],
)
def test_what_compiled_graphs_have_not_is_refused_before_one_is_made(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    module = chain()
    with pytest.raises(UsageError, match=message):
        capture_workload(Workload(module, (X,)), tmp_path / "a.h5", **options)
    assert not MaxModel.of(module).compiled.graphs


@pytest.mark.spec("MAX-20")
def test_inputs_that_do_not_fit_their_types_are_named_with_both(tmp_path: Path) -> None:
    model = MaxModel(chain(), input_types=[TensorType(DType.float32, ["rows", 5], ON_CPU)])
    with pytest.raises(UsageError, match=r"input x: found float32\[2, 4\], expected float32\[rows, 5\]"):
        capture_workload(Workload(model, (X,)), tmp_path / "a.h5")


@pytest.mark.spec("MAX-20")
def test_weights_that_were_never_loaded_are_no_zeros(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'layers\.0\.weight' was not initialized"):
        capture_workload(Workload(Chain(), (X,)), tmp_path / "a.h5")


@pytest.mark.spec("MAX-23")
def test_each_call_of_a_subgraph_is_one_of_the_module_that_it_stands_for(tmp_path: Path) -> None:
    done = capture_workload(Workload(in_subgraph(), (X,)), tmp_path / "a.h5")
    assert done.summary is not None
    assert [name for name in done.summary.captured if name.count(".") == 1] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    assert "use_subgraphs=False" in done.summary.not_capturable["layers.1.first/output"]
    archive = open_archive(tmp_path / "a.h5")
    after = X
    for i in range(3):
        np.testing.assert_array_equal(archive.read(archive.get(f"0/layers.{i}/input.x")), after)
        np.testing.assert_array_equal(archive.read(archive.get(f"0/layers.{i}/input.by")), X + 1)
        after = ((after * (i + 1) + 1) * (i + 2) + 1) * (X + 1)
        np.testing.assert_array_equal(archive.read(archive.get(f"0/layers.{i}/output")), after)


@pytest.mark.spec("MAX-23")
def test_calls_of_a_subgraph_are_told_apart_whatever_is_asked_for(tmp_path: Path) -> None:
    module = in_subgraph()
    capture_workload(Workload(module, (X,)), tmp_path / "a.h5", only=["*.first"])
    with open_archive(tmp_path / "a.h5") as archive:
        assert [r.key.text for r in archive.records] == [
            "0/@root/input.x",
            "0/layers.0.first/input.x",
            "0/layers.1.first/input.x",
            "0/layers.2.first/input.x",
        ]


@pytest.mark.spec("MAX-24")
def test_what_a_subgraph_holds_back_is_printed_and_its_last_run_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = in_subgraph()
    done = capture_workload(Workload(module, (X,)), tmp_path / "a.h5", inner=True)
    assert done.summary is not None
    assert "only what the last run prints is left" in done.summary.not_capturable["layers.1.first/output"]
    archive = open_archive(tmp_path / "a.h5")
    found = {r.key.text: archive.read(r) for r in archive.records}
    before = found["0/layers.2/input.x"]
    np.testing.assert_array_equal(found["0/layers.2.first/output"], before * 3 + 1)
    np.testing.assert_array_equal(found["0/layers.2.second/output"], (before * 3 + 1) * 4 + 1)
    np.testing.assert_array_equal(found["0/probe:halfway@2/value"], (before * 3 + 1) * 4 + 1)
    assert archive.run["scope"]["inner"] is True
    assert "[" not in capfd.readouterr().out  # nothing on the screen
    # the graph that prints is another than the one that does not
    capture_workload(Workload(module, (X,)), tmp_path / "b.h5")
    graphs = MaxModel.of(module).compiled.graphs
    prints = [graph.instrumentation and graph.instrumentation.prints for graph in graphs]
    assert prints == [True, None, False]


class Branch(Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def __call__(self, x: Any) -> Any:
        is_first = x[0, 0] > 100.0
        return ops.cond(is_first, [x.type], lambda: x + 1.0, lambda: self.scale(x))[0].tensor


@pytest.mark.spec("MAX-21")
def test_what_happens_in_a_branch_is_told_or_printed(tmp_path: Path) -> None:
    module = Branch()
    module.load_state_dict({"scale.weight": np.full(4, 2, np.float32)}, weight_alignment=1)
    done = capture_workload(Workload(module, (X,)), tmp_path / "a.h5")
    assert done.summary is not None
    assert "within a branch or a loop" in done.summary.not_capturable["scale"]
    capture_workload(Workload(module, (X,)), tmp_path / "b.h5", inner=True)
    archive = open_archive(tmp_path / "b.h5")
    np.testing.assert_array_equal(archive.read(archive.get("0/scale/output")), 2 * X + 1)


class Counter(Module):
    """Adds to a buffer of the caller's, as a model does to its cache."""

    def __call__(self, x: Any, total: Any) -> Any:
        total[...] = total[...] + x
        return total[...] * 1.0


@pytest.mark.spec("MAX-16", "MAX-21")
def test_a_buffer_that_the_model_writes_to_is_written_to_once(tmp_path: Path) -> None:
    types = [TensorType(DType.float32, [2, 4], ON_CPU), BufferType(DType.float32, [2, 4], ON_CPU)]
    total = Buffer.from_numpy(np.zeros((2, 4), np.float32))
    model = MaxModel(Counter(), input_types=types)
    done = capture_workload(Workload(model, (X, total)), tmp_path / "a.h5")
    assert done.summary is not None
    assert "a buffer that the graph writes to" in done.summary.held["@root/input.total"]
    assert done.summary.exit_status == 0  # no graph gives one out: the capture is whole without it
    np.testing.assert_array_equal(total.to_numpy(), X)
    assert done.summary.notes == ("a run without taps gave the same bits",)
    with open_archive(tmp_path / "a.h5") as archive:
        np.testing.assert_array_equal(archive.read(archive.get("0/@root/output")), X)


@pytest.mark.spec("MAX-10")
def test_a_model_runs_as_it_is_outside_of_a_capture_and_while_one_is_paused(tmp_path: Path) -> None:
    model = MaxModel(chain())
    np.testing.assert_array_equal(model(X)[0].to_numpy(), AFTER[2])
    with tensorcap.capture(model, tmp_path / "a.h5") as cap:
        model(X)
        with cap.paused():
            np.testing.assert_array_equal(model(x=X)[0].to_numpy(), AFTER[2])
        model(X)
    assert cap.summary is not None
    assert (cap.summary.steps, cap.summary.tensors) == (2, 16)
