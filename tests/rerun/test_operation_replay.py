"""Operations of a compiled target replayed: a torch model, and targets with values by numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.adapters import adapter_for
from tensorcap.alignment.operation_pairs import pair_operations
from tensorcap.comparison import POLICY
from tensorcap.rerun import OperationReplay, OperationReplays, OperationValues
from tensorcap.session import capture_workload
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.keys import Key
from tensorcap_formats.run_info import ExportedNode
from tensorcap_formats.writing import Writer

ERF = np.vectorize(math.erf)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A norm, a product, a GELU, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=1e-3)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[4, 8] to [4, 4]."""
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def make_net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net().eval()


def by_erf(x: Array) -> Array:
    result: Array = x * 0.5 * (1 + ERF(x / math.sqrt(2)))
    return result


def by_tanh(x: Array) -> Array:
    result: Array = x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def values_of(net: Net, gelu: Callable[[Array], Array] = by_erf, eps: float = 1e-3) -> dict[str, Array]:
    """What each node holds, in float64 rounded to float32; the norm is fused away."""
    x = X.double().numpy()
    normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    weights = {name: weight.detach().double().numpy() for name, weight in net.named_parameters()}
    up = normed @ weights["up.weight"].T + weights["up.bias"]
    active = gelu(up)
    down = active @ weights["down.weight"].T + weights["down.bias"]
    named = {"up:linear": up, ":gelu": active, "down:linear_1": down}
    return {name: value.astype(np.float32) for name, value in named.items()}


def write_target(path: Path, values: Mapping[str, Array], run: Mapping[str, Any]) -> None:
    """Write a run with values by `MODULE:NODE`, or by slot of the model."""
    writer = Writer(path, run=dict(run))
    for name, value in values.items():
        module, _, node = name.partition(":")
        key = f"0/{module or '@root'}:{node}/output" if node else f"0/@root/{name}"
        writer.add(Key.parse(key), bits_of(value), dtype_of(value), value.shape)
    writer.close(run=dict(run))


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[[Mapping[str, Array]], OperationReplay]:
    """Replay the net on values of a target by `MODULE:NODE`."""

    def replay(values: Mapping[str, Array]) -> OperationReplay:
        workload = tensorcap.Workload(make_net(), {"x": X})
        capture_workload(workload, tmp_path / "ref.h5", level="export")
        rows = [
            {"node": name.partition(":")[2], "op": "compiled", "op_id": at} for at, name in enumerate(values)
        ]
        run: dict[str, Any] = {"dtype": "float32", "operation_map": rows}
        named = {"input.x": X.numpy(), **values, "output": values["down:linear_1"]}
        write_target(tmp_path / "tgt.h5", named, run)
        with (
            tensorcap.open_archive(tmp_path / "ref.h5") as reference,
            tensorcap.open_archive(tmp_path / "tgt.h5") as target,
        ):
            graph = adapter_for(workload.model).operation_graph(workload, "")
            operation_values = OperationValues(reference, target)
            return OperationReplays(graph, operation_values, POLICY.precision("float32")).replay()

    return replay


Replayed = Callable[[Mapping[str, Array]], OperationReplay]


@pytest.mark.spec("RPL-150", "CAP-270")
def test_a_right_target_with_a_fused_norm_accuses_nobody(replayed: Replayed) -> None:
    result = replayed(values_of(make_net()))
    assert [own.status for own in result.own_errors] == ["within-rounding"] * 3
    assert result.between["0/up:linear/output"] == ("layer_norm",)
    assert result.counts == (4, 3)


@pytest.mark.spec("RPL-150")
@pytest.mark.parametrize(
    ("values", "key"),
    [
        pytest.param(values_of(make_net(), gelu=by_tanh), "0/@root:gelu/output", id="gelu"),
        pytest.param(values_of(make_net(), eps=1e-2), "0/up:linear/output", id="eps of the fused norm"),
    ],
)
def test_a_mistake_accuses_the_first_operation_that_shows_it_alone(
    values: Mapping[str, Array], key: str, replayed: Replayed
) -> None:
    assert [own.key for own in replayed(values).bad] == [key]


@pytest.mark.spec("RPL-152")
def test_a_value_that_the_target_did_not_compute_with_accuses_nobody(replayed: Replayed) -> None:
    values = values_of(make_net())
    result = replayed({**values, "up:linear": values[":gelu"]})
    assert result.bad == []
    assert result.elsewhere == {"0/up:linear/output": "holds the value of gelu"}


@pytest.mark.spec("RPL-152")
def test_an_activation_that_is_skipped_is_no_other_value(replayed: Replayed) -> None:
    skipped = values_of(make_net(), gelu=lambda x: x)
    assert [own.key for own in replayed(skipped).bad] == ["0/@root:gelu/output"]


@pytest.mark.spec("RPL-153")
def test_other_shapes_of_the_same_elements_count_and_transposed_ones_do_not(replayed: Replayed) -> None:
    values = values_of(make_net())
    flat = {**values, ":gelu": values[":gelu"].reshape(1, 4, 16)}
    assert len(replayed(flat).own_errors) == 3
    turned = {**values, ":gelu": np.ascontiguousarray(values[":gelu"].T)}
    assert [own.key for own in replayed(turned).own_errors] == [
        "0/up:linear/output",
        "0/down:linear_1/output",
    ]


@pytest.mark.spec("ALN-200")
def test_nodes_whose_numbers_shifted_are_paired_by_what_they_compute() -> None:
    def node(name: str, op: str, inputs: Mapping[str, str], weights: Mapping[str, str]) -> ExportedNode:
        return ExportedNode(name, op, "up", inputs, weights)

    reference = [
        node("permute", "aten.permute.default", {}, {"self": "up.weight"}),
        node("mm", "aten.mm.default", {"self": "x", "mat2": "permute"}, {}),
        node("mul", "aten.mul.Tensor", {"self": "mm"}, {}),
        node("mul_1", "aten.mul.Tensor", {"self": "mul"}, {"other": "up.scale"}),
    ]
    target = [
        node("mul", "aten.mul.Tensor", {}, {"self": "up.packed", "other": "up.steps"}),
        node("permute", "aten.permute.default", {"self": "mul"}, {}),
        node("mm", "aten.mm.default", {"self": "x", "mat2": "permute"}, {}),
        node("mul_1", "aten.mul.Tensor", {"self": "mm"}, {}),
        node("mul_2", "aten.mul.Tensor", {"self": "mul_1"}, {"other": "up.scale"}),
    ]
    assert pair_operations(reference, target) == {
        "permute": "permute",
        "mm": "mm",
        "mul": "mul_1",
        "mul_1": "mul_2",
    }


@pytest.mark.spec("ALN-200", "SYN-1")
def test_a_comparison_and_a_replay_pair_nodes_alike(tmp_path: Path) -> None:
    """The target numbers its products the other way round: order and module pair one of them only."""
    values = values_of(make_net())
    named = {
        "up:linear_1": values["up:linear"],
        ":gelu": values[":gelu"],
        "down:linear": values["down:linear_1"],
    }
    nodes = [
        ExportedNode("layer_norm", "aten.layer_norm.default", "norm", {"input": "x"}),
        ExportedNode(
            "linear_1",
            "aten.linear.default",
            "up",
            {"input": "layer_norm"},
            {"weight": "up.weight", "bias": "up.bias"},
        ),
        ExportedNode("gelu", "aten.gelu.default", "", {"self": "linear_1"}),
        ExportedNode(
            "linear",
            "aten.linear.default",
            "down",
            {"input": "gelu"},
            {"weight": "down.weight", "bias": "down.bias"},
        ),
    ]
    capture_workload(tensorcap.Workload(make_net(), {"x": X}), tmp_path / "ref.h5", level="export")
    rows = [
        {"node": node, "module": module, "op": "compiled", "op_id": at}
        for at, (module, _, node) in enumerate(name.partition(":") for name in named)
    ]
    run: dict[str, Any] = {
        "dtype": "float32",
        "operation_map": rows,
        "exported_nodes": list(map(asdict, nodes)),
    }
    write_target(tmp_path / "tgt.h5", {"input.x": X.numpy(), **named, "output": named["down:linear"]}, run)
    comparison = tensorcap.compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    statuses = {pair.key: pair.status for pair in comparison.pairs}
    keys = ("0/up:linear/output", "0/@root:gelu/output", "0/down:linear_1/output")
    assert [statuses.get(key) for key in keys] == ["within-rounding"] * 3
    with (
        tensorcap.open_archive(tmp_path / "ref.h5") as reference,
        tensorcap.open_archive(tmp_path / "tgt.h5") as target,
    ):
        operation_values = OperationValues(reference, target)
    assert {name: operation_values.names[name] for name in ("linear", "linear_1")} == {
        "linear": "linear_1",
        "linear_1": "linear",
    }
    assert {name for name, _ in operation_values.records} == {"linear", "gelu", "linear_1"}
