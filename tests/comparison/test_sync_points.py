"""Sync points of a gated layer and of masked scores: graphs spelt out, values by float64 numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Bands, Comparison, SyncPoint, SyncPoints, compare, sync_points
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError

MakeArchive = Callable[..., Any]
F32 = {"dtype": "float32", "compute_dtype": "float32"}
PATHS = ("", "mlp", "mlp.gate", "mlp.act", "mlp.up", "mlp.down")
MODULES = [{"path": path, "class": "my.Module"} for path in PATHS]


def fact(op: str, order: int, module: str, inputs: Sequence[str], outputs: Any) -> dict[str, Any]:
    """What a run says of a node; an output is a key text, or a view of one with shape and strides."""
    return {
        "op": op,
        "order": order,
        "module": module,
        "module_call": 0,
        "class": "Module",
        "file": "/src/gated.py",
        "line": 10 + order,
        "function": "forward",
        "inputs": [{"name": str(i), "record": text} for i, text in enumerate(inputs)],
        "arguments": {},
        "outputs": [outputs if isinstance(outputs, dict) else {"slot": "output", "record": outputs}],
    }


def view(of: str, shape: Sequence[int]) -> dict[str, Any]:
    """A view of a whole tensor in the order of its elements."""
    strides = [int(np.prod(shape[i + 1 :], dtype=int)) for i in range(len(shape))]
    return {
        "slot": "output",
        "view_of": of,
        "shape": list(shape),
        "strides": strides,
        "offset": 0,
        "dtype": "float32",
    }


def row(node: str, module: str, number: int, op: str = "core.op") -> dict[str, Any]:
    return {
        "node": node,
        "module": module,
        "output": 0,
        "op": op,
        "op_id": number,
        "op_ids": [number],
        "op_output": 0,
        "file": "/src/gated.py",
        "line": 100 + number,
    }


ROWS = [
    row("mm", "mlp.gate", 4, "core.matmul"),
    row("silu", "mlp.act", 2, "core.silu"),
    row("mm_1", "mlp.up", 3, "core.matmul"),
    row("mul", "mlp", 5, "core.mul"),
    row("mm_2", "mlp.down", 6, "core.matmul"),
]
KEYS = {
    "mm": "0/mlp.gate:mm/output",
    "silu": "0/mlp.act:silu/output",
    "mm_1": "0/mlp.up:mm_1/output",
    "mul": "0/mlp:mul/output",
    "mm_2": "0/mlp.down:mm_2/output",
}


def gated(
    seed: int = 0,
    activate: Callable[[Array], Array] = lambda g: g / (1 + np.exp(-g)),
    error: float = 0.0,
) -> dict[str, Array]:
    """down(act(gate(x)) * up(x)) in float64: x, and the value of each node; `error` is added to the last."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, 16))
    gate, up, down = (
        rng.standard_normal(shape) / np.sqrt(shape[0]) for shape in ((16, 32), (16, 32), (32, 16))
    )
    values = {"x": x, "mm": x @ gate, "mm_1": x @ up}
    values["silu"] = activate(values["mm"])
    values["mul"] = values["silu"] * values["mm_1"]
    values["mm_2"] = values["mul"] @ down + error
    return values


def reference_of(make: MakeArchive, values: Mapping[str, Array], *, graph: bool = True) -> Any:
    """A run of the exported graph: mm and mm_1 are seen in another shape before they are used."""
    view_of = {"view": "mm", "view_1": "mm_1"}
    texts = {**KEYS, "view": "0/mlp.gate:view/output", "view_1": "0/mlp.up:view_1/output"}
    x = "0/@root/input.x"
    order = [
        ("mm", "mlp.gate", "aten.mm.default", [x]),
        ("view", "mlp.gate", "aten.view.default", [KEYS["mm"]]),
        ("silu", "mlp.act", "aten.silu.default", [texts["view"]]),
        ("mm_1", "mlp.up", "aten.mm.default", [x]),
        ("view_1", "mlp.up", "aten.view.default", [KEYS["mm_1"]]),
        ("mul", "mlp", "aten.mul.Tensor", [texts["silu"], texts["view_1"]]),
        ("mm_2", "mlp.down", "aten.mm.default", [texts["mul"]]),
    ]
    facts = {}
    for number, (name, module, op, inputs) in enumerate(order, 1):
        output = view(KEYS[view_of[name]], (1, 8, 32)) if name in view_of else texts[name]
        facts[f"{texts[name].rpartition('/')[0]}/op"] = fact(op, number, module, inputs, output)
    tensors = {x: values["x"], **{KEYS[name]: values[name] for name in ("mm", "silu", "mm_1", "mul", "mm_2")}}
    run = {**F32, "modules": MODULES, "scope": {"level": "export"}}
    tensors["0/@root/output"] = values["mm_2"]
    return make(as_float32(tensors), values=facts if graph else {}, run=run, name="ref.h5")


def target_of(make: MakeArchive, values: Mapping[str, Array], **changes: Array | None) -> Any:
    """A run of the program; changes are what operations hold in place of their nodes' values."""
    held: dict[str, Array | None] = {**values, **changes}
    x = "0/@root/input.x"
    kept = {name: array for name in KEYS if (array := held[name]) is not None}
    tensors = {x: values["x"], **{KEYS[name]: array for name, array in kept.items()}}
    tensors["0/@root/output"] = values["mm_2"]
    points = [
        {
            "site": KEYS[name].split("/")[1],
            "status": "not-capturable",
            "slots": ["output"],
            "reason": "fused away",
        }
        for name, value in changes.items()
        if value is None
    ]
    run = {**F32, "modules": MODULES, "operation_map": ROWS, "points": points}
    return make(as_float32(tensors), run=run, name="tgt.h5")


def as_float32(tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {text: np.asarray(array, np.float32) for text, array in tensors.items()}


def by_node(points: SyncPoints) -> dict[str, SyncPoint]:
    return {point.node or point.target_node: point for point in points.points}


def statuses(comparison: Comparison) -> dict[str, str]:
    return {pair.key: pair.status for pair in comparison.pairs}


@pytest.mark.spec("SYN-20", "SYN-22")
def test_every_mapped_operation_is_a_point_with_both_names(make_archive: MakeArchive) -> None:
    values = gated()
    points = sync_points(reference_of(make_archive, values), target_of(make_archive, values))
    assert [(point.name, point.module, point.source, point.status) for point in points.points] == [
        ("core.matmul #4 = mm", "mlp.gate", "/src/gated.py:104", "pass"),
        ("core.silu #2 = silu", "mlp.act", "/src/gated.py:102", "pass"),
        ("core.matmul #3 = mm_1", "mlp.up", "/src/gated.py:103", "pass"),
        ("core.mul #5 = mul", "mlp", "/src/gated.py:105", "pass"),
        ("core.matmul #6 = mm_2", "mlp.down", "/src/gated.py:106", "pass"),
    ]
    assert (points.mapped, points.compared, points.exit_status) == (5, 5, 0)
    assert points.summary == "5 of 5 mapped compared: 5 pass"


@pytest.mark.spec("SYN-10", "SYN-11")
def test_a_gate_that_holds_the_fused_product_is_no_divergence(make_archive: MakeArchive) -> None:
    values = gated()
    reference = reference_of(make_archive, values)
    target = target_of(make_archive, values, mm=values["mul"].reshape(1, 8, 32) * (1 + 1e-7))
    comparison = compare(reference, target)
    pair = next(pair for pair in comparison.pairs if pair.key == KEYS["mm"])
    assert (pair.status, pair.reason) == ("explained", "the target holds the value of mul")
    assert comparison.exit_status == 0
    assert comparison.divergence is None
    point = by_node(sync_points(reference, target))["mm"]
    assert (point.status, point.reason) == ("holds another value", "the target holds the value of mul")


@pytest.mark.spec("SYN-10", "SYN-11")
def test_a_gate_that_holds_a_wrong_product_accuses_what_makes_it_wrong(make_archive: MakeArchive) -> None:
    """ReLU for SiLU, and the gate's operation has the target's own product."""
    wrong = gated(activate=lambda g: np.maximum(g, 0))
    points = sync_points(reference_of(make_archive, gated()), target_of(make_archive, wrong, mm=wrong["mul"]))
    assert {name: point.status for name, point in by_node(points).items()} == {
        "mm": "holds another value",
        "silu": "fail",
        "mm_1": "pass",
        "mul": "fail",
        "mm_2": "fail",
    }
    assert [point.node for point in points.failure_sources] == ["silu"]
    assert points.exit_status == 1


@pytest.mark.spec("SYN-11")
def test_an_operation_that_is_skipped_or_exchanged_is_no_other_value(make_archive: MakeArchive) -> None:
    """Each side of the gate is given the other's weight: mm holds mm_1, and what is computed is wrong."""
    values = gated()
    wrong = {**values, "mm": values["mm_1"], "mm_1": values["mm"]}
    wrong["silu"] = wrong["mm"] / (1 + np.exp(-wrong["mm"]))
    wrong["mul"] = wrong["silu"] * wrong["mm_1"]
    points = sync_points(reference_of(make_archive, values), target_of(make_archive, wrong))
    assert {name: by_node(points)[name].status for name in ("mm", "mm_1", "silu")} == {
        "mm": "fail",
        "mm_1": "fail",
        "silu": "fail",
    }
    assert [point.node for point in points.failure_sources] == ["mm", "mm_1"]


@pytest.mark.spec("SYN-3")
def test_a_fused_view_is_compared_in_the_shape_that_the_graph_gives_it(make_archive: MakeArchive) -> None:
    values = gated()
    reference = reference_of(make_archive, values)
    right = target_of(make_archive, values, mm=values["mm"].reshape(1, 8, 32))
    pair = next(pair for pair in compare(reference, right).pairs if pair.key == KEYS["mm"])
    assert pair.status == "identical"
    assert pair.origin is not None
    assert (pair.origin.steps, pair.origin.reason) == (("squeeze 0",), "axes of length 1")
    wrong = target_of(make_archive, values, mm=values["mm"].T.reshape(1, 8, 32))
    assert statuses(compare(reference, wrong))[KEYS["mm"]] == "diverged"


@pytest.mark.spec("SYN-3", "SYN-20")
def test_a_shape_that_no_view_of_the_graph_has_is_ambiguous(make_archive: MakeArchive) -> None:
    values = gated()
    values["mul"] = np.full((8, 32), 2.0)  # equal under any permutation
    reference = reference_of(make_archive, values)
    points = sync_points(reference, target_of(make_archive, values, mul=np.full((32, 8), 2.0)))
    point = by_node(points)["mul"]
    assert (point.status, point.metrics) == ("shape ambiguous", {})
    assert point.reason.startswith("[8, 32] in the reference, [32, 8] in the target")
    assert points.exit_status == 1


@pytest.mark.spec("SYN-13", "SYN-20")
def test_what_is_fused_away_is_explained_by_what_is_computed_from_it(make_archive: MakeArchive) -> None:
    values = gated()
    reference = reference_of(make_archive, values)
    comparison = compare(reference, target_of(make_archive, values, silu=None))
    pair = next(pair for pair in comparison.pairs if pair.key == KEYS["silu"])
    reason = "the target's program has no value of it, and what is computed from it agrees: mul"
    assert (pair.status, pair.reason, comparison.exit_status) == ("explained", reason, 0)
    points = sync_points(reference, target_of(make_archive, values, silu=None))
    assert (by_node(points)["silu"].status, by_node(points)["silu"].reason) == (
        "no target value",
        "fused away",
    )
    assert points.summary == "4 of 5 mapped compared: 4 pass, 1 no target value"
    wrong = gated(activate=lambda g: np.maximum(g, 0))
    wrong_comparison = compare(reference, target_of(make_archive, wrong, silu=None))
    assert statuses(wrong_comparison)[KEYS["silu"]] == "not-capturable"


@pytest.mark.spec("SYN-21")
def test_a_failure_source_is_found_through_nodes_without_values(make_archive: MakeArchive) -> None:
    wrong = gated(activate=lambda g: np.maximum(g, 0))
    points = sync_points(reference_of(make_archive, gated()), target_of(make_archive, wrong, silu=None))
    assert [point.node for point in points.failure_sources] == ["mul"]
    assert [(share.module, share.failed, share.compared) for share in points.modules] == [
        ("mlp", 1, 1),
        ("mlp.down", 1, 1),
        ("mlp.gate", 0, 1),
        ("mlp.up", 0, 1),
    ]


@pytest.mark.spec("SYN-21")
def test_without_a_graph_no_source_is_named(make_archive: MakeArchive) -> None:
    wrong = gated(activate=lambda g: np.maximum(g, 0))
    target = target_of(make_archive, wrong)
    reference = target_of(make_archive, gated())
    points = sync_points(reference, target)
    assert not points.has_graph
    assert points.failure_sources == []
    assert points.counts == {"pass": 2, "fail": 3}


@pytest.mark.spec("SYN-31", "SYN-20")
def test_a_point_may_be_green_and_fail(make_archive: MakeArchive) -> None:
    """An activation that is off by 1e-4 of its size: 80 dB in float32, which the policy allows nobody."""
    wrong = gated(activate=lambda g: g / (1 + np.exp(-g)) + 2e-4 * np.sin(9 * g))
    points = sync_points(reference_of(make_archive, gated()), target_of(make_archive, wrong))
    point = by_node(points)["silu"]
    assert (point.band, point.status, point.is_failure_source) == ("green", "fail", True)
    assert points.bands == Bands(60.0, 40.0, "32-bit floats")
    given = sync_points(
        reference_of(make_archive, gated()), target_of(make_archive, wrong), bands=Bands.parse("100/90")
    )
    assert by_node(given)["silu"].band == "red"


@pytest.mark.spec("SYN-12")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(-3.4028234663852886e38, -65504.0, id="least float32 and least float16"),
        pytest.param(-np.inf, -3.4028234663852886e38, id="minus infinity and least float32"),
        pytest.param(-np.inf, -1e4, id="minus infinity and -10000"),
        pytest.param(-np.inf, -np.inf, id="both minus infinity"),
    ],
)
def test_mask_constants_at_the_same_places_are_not_compared_as_numbers(
    ours: float, theirs: float, make_archive: MakeArchive
) -> None:
    values = gated()
    blocked = np.tril(np.ones((8, 32), bool))
    masked = [{**values, "mul": np.where(blocked, low, values["mul"])} for low in (ours, theirs)]
    comparison = compare(reference_of(make_archive, masked[0]), target_of(make_archive, masked[1]))
    assert statuses(comparison)[KEYS["mul"]] in ("identical", "match")
    other = {**masked[1], "mul": np.where(np.roll(blocked, 1, 0), theirs, values["mul"])}
    wrong = compare(reference_of(make_archive, masked[0]), target_of(make_archive, other))
    assert statuses(wrong)[KEYS["mul"]] in ("nonfinite", "diverged")
    fewer = {**masked[1], "mul": np.where(blocked & (np.arange(8) != 3)[:, None], theirs, values["mul"])}
    partly = compare(reference_of(make_archive, masked[0]), target_of(make_archive, fewer))
    assert statuses(partly)[KEYS["mul"]] in ("nonfinite", "diverged")
    leaky = {**values, "mul": np.where(blocked, -10.0, values["mul"])}
    assert statuses(compare(reference_of(make_archive, masked[0]), target_of(make_archive, leaky)))[
        KEYS["mul"]
    ] in ("nonfinite", "diverged")


@pytest.mark.spec("SYN-12")
def test_an_error_beside_masked_elements_is_seen(make_archive: MakeArchive) -> None:
    values = gated()
    blocked = np.tril(np.ones((8, 32), bool))
    reference = {**values, "mul": np.where(blocked, -np.inf, values["mul"])}
    target = {**values, "mul": np.where(blocked, -65504.0, 1.1 * values["mul"])}
    comparison = compare(reference_of(make_archive, reference), target_of(make_archive, target))
    assert statuses(comparison)[KEYS["mul"]] == "nonfinite"


@pytest.mark.spec("SYN-4")
def test_results_of_other_names_pair_in_their_order(make_archive: MakeArchive) -> None:
    values = gated()
    near = {**values, "mm_2": values["mm_2"] * (1 + 3e-7)}
    reference, target = reference_of(make_archive, values), target_of(make_archive, near)
    tensors = {
        record.key.text.replace("@root/output", "@root/output.logits"): target.load(record)
        for record in target.records
    }
    renamed = make_archive(tensors, run=dict(target.run), name="tgt.h5")
    comparison = compare(reference, renamed)
    assert statuses(comparison)["0/@root/output"] == "within-rounding"
    assert comparison.exit_status == 0


@pytest.mark.spec("SYN-1", "SYN-3")
def test_nodes_whose_numbers_shifted_stand_under_the_references_names(make_archive: MakeArchive) -> None:
    """The target has a matrix product more in front of the others: mm_1 is the reference's mm."""
    values = gated()
    rows = [
        row("mm", "mlp", 1),
        row("mm_1", "mlp.gate", 4),
        row("silu", "mlp.act", 2),
        row("mm_2", "mlp.up", 3),
        row("mul", "mlp", 5),
        row("mm_3", "mlp.down", 6),
    ]
    tensors = {
        "0/@root/input.x": values["x"],
        "0/mlp:mm/output": values["x"],
        "0/mlp.gate:mm_1/output": values["mm"],
        "0/mlp.act:silu/output": values["silu"],
        "0/mlp.up:mm_2/output": values["mm_1"],
        "0/mlp:mul/output": values["mul"],
        "0/mlp.down:mm_3/output": values["mm_2"],
        "0/@root/output": values["mm_2"],
    }
    target = make_archive(
        as_float32(tensors), run={**F32, "modules": MODULES, "operation_map": rows}, name="tgt.h5"
    )
    points = sync_points(reference_of(make_archive, values), target)
    assert [(point.name, point.status) for point in points.points] == [
        ("core.op #1 = mm", "no reference value"),
        ("core.op #4 = mm (mm_1 in the target)", "pass"),
        ("core.op #2 = silu", "pass"),
        ("core.op #3 = mm_1 (mm_2 in the target)", "pass"),
        ("core.op #5 = mul", "pass"),
        ("core.op #6 = mm_2 (mm_3 in the target)", "pass"),
    ]
    assert points.exit_status == 0


@pytest.mark.spec("SYN-42")
def test_runs_without_an_operation_map_are_refused(make_archive: MakeArchive) -> None:
    reference = reference_of(make_archive, gated())
    with pytest.raises(UsageError, match=r"ref\.h5: its run does not say which operation holds the value"):
        sync_points(reference, reference)


@pytest.mark.spec("SYN-20")
def test_nodes_that_nothing_is_mapped_to_are_listed(make_archive: MakeArchive) -> None:
    values = gated()
    target = target_of(make_archive, values)
    kept = {r.key.text: target.load(r) for r in target.records if r.key.text != KEYS["silu"]}
    rows = [entry for entry in ROWS if entry["node"] != "silu"]
    less = make_archive(kept, run={**target.run, "operation_map": rows}, name="tgt.h5")
    points = sync_points(reference_of(make_archive, values), less)
    assert (points.points[-1].name, points.points[-1].status) == ("(no operation) = silu", "not mapped")
    assert points.summary == "4 of 4 mapped compared: 4 pass, 1 not mapped"
    assert points.exit_status == 0


@pytest.mark.spec("SYN-33")
def test_the_least_similar_come_first_for_the_size_of_their_values(make_archive: MakeArchive) -> None:
    values = gated()
    near, far = values["mul"] * (1 + 1e-6), values["silu"] * (1 + 1e-5)
    big = {**values, "mul": 1e6 * near, "silu": far}
    reference = {**values, "mul": 1e6 * values["mul"]}
    for metric in ("psnr", "mean-abs", "mean-squared", "max-abs", "mean-relative"):
        points = sync_points(
            reference_of(make_archive, reference), target_of(make_archive, big), metric=metric
        )
        assert [point.node for point in points.ordered("similarity")][:2] == ["silu", "mul"]
        assert [point.node for point in points.ordered("operation")][:2] == ["mm", "silu"]
