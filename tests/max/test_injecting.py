"""Archived tensors go into a compiled graph by its switches: real MAX, on elementwise graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.dtype import DType
from max.graph import TensorType

from tensorcap import MaxModel, Workload, compare, open_archive
from tensorcap.adapters.max import engine, graph_builder
from tensorcap.adapters.max.injector import planned
from tensorcap.adapters.max.trace_events import EnterModule, Event, Leave, LostValue
from tensorcap.localization import bisect_live
from tensorcap.port_verification import verify
from tensorcap.recording import HELD, Substitution
from tensorcap.rerun import inject
from tensorcap.session import capture_workload
from tensorcap_formats.errors import UsageError
from tests.max.nets import AFTER, ON_CPU, WEIGHTS, LastRows, X, chain, in_subgraph, with_wrong_first

pytestmark = pytest.mark.slow

ROOM = ("input", "output")


@pytest.fixture(scope="module")
def model() -> MaxModel:
    return MaxModel(chain(), input_types=[TensorType(DType.float32, ["rows", 4], ON_CPU)])


@pytest.fixture(scope="module")
def reference(model: MaxModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("max") / "ref.h5"
    capture_workload(Workload(model, (X,)), path, injectable=ROOM)
    return path


def values(path: Path) -> dict[str, Any]:
    with open_archive(path) as archive:
        return {r.key.text: archive.read(r) for r in archive.records}


@pytest.mark.spec("MAX-30")
def test_a_wrong_weight_floods_a_free_run_and_is_alone_in_an_injected_one(
    model: MaxModel, reference: Path, tmp_path: Path
) -> None:
    wrong = model.with_weights(with_wrong_first())
    capture_workload(Workload(wrong, (X,)), tmp_path / "free.h5")
    done = inject(reference, Workload(wrong, (X,)), tmp_path / "injected.h5")
    assert done.substitution is not None
    assert {slot.status for slot in done.substitution.slots} == {"injected"}
    free, injected = (
        {p.key for p in compare(reference, tmp_path / name).pairs if p.status == "diverged"}
        for name in ("free.h5", "injected.h5")
    )
    assert free >= {f"0/layers.{i}/output" for i in range(3)}
    # what layers.1 would have been given is kept as it was before it was replaced
    assert injected == {"0/layers.0/output", "0/layers.1/input.x"}
    assert len(model.compiled.graphs) == 2  # one with taps and switches, and the control


@pytest.mark.spec("MAX-31")
def test_any_choice_of_places_needs_no_other_graph(
    model: MaxModel, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_builder, "compile_graph", lambda *_: pytest.fail("a graph was compiled"))
    wrong = Workload(model.with_weights(with_wrong_first()), (X,))
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"inputs": ["layers.1"]}, {"layers.0": 3 * X + 1, "layers.1": AFTER[1], "layers.2": AFTER[2]}),
        ({"inputs": ["layers.2"]}, {"layers.1": 9 * X + 4, "layers.2": AFTER[2]}),
        ({"outputs": ["layers.0"]}, {"layers.0": 3 * X + 1, "layers.1": AFTER[1], "layers.2": AFTER[2]}),
        ({"outputs": ["layers.1"]}, {"layers.1": 9 * X + 4, "layers.2": AFTER[2]}),
    )
    for globs, expected in cases:
        inject(reference, wrong, tmp_path / "a.h5", **globs)
        found = values(tmp_path / "a.h5")
        for name, value in expected.items():
            np.testing.assert_array_equal(found[f"0/{name}/output"], value, err_msg=f"{globs} {name}")


@pytest.mark.spec("MAX-31")
def test_a_bisection_names_the_wrong_module_without_another_graph(
    model: MaxModel, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_builder, "compile_graph", lambda *_: pytest.fail("a graph was compiled"))
    found = bisect_live(reference, Workload(model.with_weights(with_wrong_first()), (X,)))
    assert (found.module, found.blame) == ("layers.0", "module")


@pytest.mark.spec("MAX-31")
def test_verify_makes_two_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    compiled = engine.compile_graph

    def counting(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return compiled(*arguments)

    monkeypatch.setattr(graph_builder, "compile_graph", counting)
    right = MaxModel(chain())
    capture_workload(Workload(right, (X,)), tmp_path / "ref.h5")
    count = 0
    wrong = MaxModel(chain(with_wrong_first()))
    found = verify(tmp_path / "ref.h5", Workload(wrong, (X,)), tmp_path / "report")
    assert [suspect.module for suspect in found.suspects] == ["layers.0"]
    assert found.injected is not None
    assert count == 2


@pytest.mark.spec("MAX-32")
def test_a_tensor_that_does_not_fit_is_named_with_both_shapes(
    model: MaxModel, reference: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError,
        match=r"0/layers\.0/input\.x: does not fit: \[2, 4\] in the archive, \[3, 4\] in the model",
    ):
        inject(reference, Workload(model, (np.zeros((3, 4), np.float32),)), tmp_path / "a.h5")
    assert not (tmp_path / "a.h5").exists()


@pytest.mark.spec("MAX-32")
def test_the_models_own_input_is_replaced_and_its_own_result_is_left(
    model: MaxModel, reference: Path, tmp_path: Path
) -> None:
    workload = Workload(model, (X + np.float32(1),))
    inject(reference, workload, tmp_path / "a.h5", inputs=["0/@root/input.x"])
    found = values(tmp_path / "a.h5")
    np.testing.assert_array_equal(found["0/@root/input.x"], X + 1)  # the natural one
    np.testing.assert_array_equal(found["0/layers.0/input.x"], X)
    done = inject(reference, workload, tmp_path / "b.h5", outputs=["0/@root/output"])
    assert done.substitution is not None
    assert [(slot.status, slot.reason) for slot in done.substitution.slots] == [
        ("left", "the model itself returns it, and nothing of the run comes after that")
    ]


@pytest.mark.spec("INJ-7", "MAX-30")
def test_a_run_with_its_own_tensors_computes_the_same_bits(
    model: MaxModel, reference: Path, tmp_path: Path
) -> None:
    done = inject(reference, Workload(model, (X,)), tmp_path / "a.h5", inputs="*", outputs="layers.*")
    assert done.substitution is not None
    before, after = values(reference), values(tmp_path / "a.h5")
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)


@pytest.mark.spec("MAX-33")
def test_several_runs_of_a_workload_are_injected_step_by_step(model: MaxModel, tmp_path: Path) -> None:
    def twice(found: MaxModel, x: Any) -> None:
        found(x)
        found(x + np.float32(1))

    capture_workload(Workload(model, (X,), twice), tmp_path / "ref.h5", injectable=ROOM)
    wrong = Workload(model.with_weights(with_wrong_first()), (X,), twice)
    inject(tmp_path / "ref.h5", wrong, tmp_path / "a.h5", inputs=["layers.1"], steps="1")
    found = values(tmp_path / "a.h5")
    np.testing.assert_array_equal(found["0/layers.1/output"], 9 * X + 4)
    np.testing.assert_array_equal(found["1/layers.1/output"], 6 * (X + 1) + 4)
    assert WEIGHTS["layers.0.weight"][0] == 2


@pytest.mark.spec("MAX-114")
def test_a_tensor_of_a_computed_size_is_replaced_too(tmp_path: Path) -> None:
    module = LastRows()
    module.load_state_dict(WEIGHTS, weight_alignment=1)
    types = [TensorType(DType.float32, ["rows", 4], ON_CPU)]
    right = MaxModel(module, input_types=types, control=False)
    capture_workload(Workload(right, (X,)), tmp_path / "ref.h5", injectable=ROOM)
    wrong = right.with_weights(with_wrong_first())
    done = inject(tmp_path / "ref.h5", Workload(wrong, (X,)), tmp_path / "a.h5")
    assert done.substitution is not None
    assert {slot.status for slot in done.substitution.slots} == {"injected"}
    found = values(tmp_path / "a.h5")
    np.testing.assert_array_equal(found["0/layers.1/input.x"], (3 * X + 1)[1:])  # the natural one
    np.testing.assert_array_equal(found["0/layers.2/output"], AFTER[2][1:])
    more = np.concatenate([X, X])  # of the same graph, in another size
    capture_workload(Workload(right, (more,)), tmp_path / "more.h5", injectable=ROOM)
    inject(tmp_path / "more.h5", Workload(wrong, (more,)), tmp_path / "b.h5")
    expected = (24 * more + 17)[1:]
    np.testing.assert_array_equal(values(tmp_path / "b.h5")["0/layers.2/output"], expected)
    assert len(right.compiled.graphs) == 1


@pytest.mark.spec("INJ-22", "MAX-114")
def test_a_buffer_that_a_graph_writes_to_is_what_an_object_holds(reference: Path) -> None:
    """A cache, of which neither run has a record: its call takes place, and nothing is missed."""
    lost = LostValue("input.cache", "a buffer that the graph writes to", is_held=True)
    events: list[Event] = [EnterModule("layers.0"), lost, Leave()]
    with open_archive(reference) as archive:
        substitution = Substitution(archive, inputs=["layers.0"])
        substitution.bind({"layers.0": ()})
        assert list(planned(events, substitution, 0)) == []
    became = {slot.slot: (slot.status, slot.reason, slot.absent) for slot in substitution.slots}
    assert became["input.cache"] == ("left", HELD, [])


@pytest.mark.spec("MAX-23")
def test_a_module_that_a_subgraph_stands_for_is_injected_as_others_are(tmp_path: Path) -> None:
    right = MaxModel(in_subgraph())
    capture_workload(Workload(right, (X,)), tmp_path / "ref.h5", injectable=ROOM)
    weights = dict(right.module.state_dict())
    weights["layers.1.second.weight"] = weights["layers.1.second.weight"] * np.float32(2)
    wrong = Workload(right.with_weights(weights), (X,))
    done = inject(tmp_path / "ref.h5", wrong, tmp_path / "a.h5")
    reference, found = values(tmp_path / "ref.h5"), values(tmp_path / "a.h5")
    unlike = [key for key in reference if reference[key].tobytes() != found[key].tobytes()]
    assert unlike == ["0/layers.1/output", "0/layers.2/input.x"]  # the natural one, before it was replaced
    assert done.substitution is not None
    became = {slot.site: (slot.status, slot.reason) for slot in done.substitution.slots}
    assert became["layers.1"] == ("injected", "")
    assert became["layers.1.first"][0] == "left"
    assert "within a subgraph" in became["layers.1.first"][1]
    assert bisect_live(tmp_path / "ref.h5", wrong).module == "layers.1"
    assert len(right.compiled.graphs) == 2
