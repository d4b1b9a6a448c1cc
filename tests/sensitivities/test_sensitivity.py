"""Layers that rounding hits hard come first, and few have to stay for a goal."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorcap.adapters.torch.grafts import TorchGrafts
from tensorcap.sensitivities import metric_of, parse_goal, precision_list, sensitivity
from tensorcap.workload import Workload
from tensorcap_formats.errors import UsageError
from tests.rerun.quantised_layers import Bytes

X = torch.randn(40, 32, generator=torch.Generator().manual_seed(7))


def small(seed: int = 0) -> Any:
    """Six layers, each with outliers of another size, so that rounding costs each another share."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3)]
        net = nn.Sequential(*blocks)
        with torch.no_grad():
            for module in net.modules():
                if isinstance(module, nn.Linear):
                    module.weight[:, 3] *= float(torch.rand(()) * 60 + 1)
        return net.eval()


def rounded(net: Any) -> Any:
    port = copy.deepcopy(net)
    for block in port:
        for place in (0, 2):
            block[place] = Bytes(block[place])
    return port


def workloads(seed: int = 0) -> tuple[Workload, Workload]:
    net = small(seed)
    return Workload(net, (X,)), Workload(rounded(net), (X,))


def kl(reference: Any, target: Any) -> float:
    """The mean KL divergence of rows, by log_softmax of torch."""
    p, q = (torch.log_softmax(side.double(), -1) for side in (reference, target))
    return float((p.exp() * (p - q)).sum(-1).mean())


def loss_of(net: Any, port: Any, kept: tuple[str, ...]) -> float:
    """The loss of a copy of the port with layers of the reference."""
    mixed = copy.deepcopy(port)
    for path in kept:
        parent, _, name = path.rpartition(".")
        mixed.get_submodule(parent)._modules[name] = net.get_submodule(path)
    with torch.no_grad():
        return kl(net(X), mixed(X))


@pytest.mark.spec("SEN-2", "SEN-3")
def test_each_layer_is_exchanged_alone_both_ways() -> None:
    net = small()
    port = rounded(net)
    result = sensitivity(Workload(net, (X,)), Workload(port, (X,)))
    names = [f"{block}.{place}" for block in range(3) for place in (0, 2)]
    opened = {group.name for group in result.groups}
    assert opened <= set(names)
    for group in result.groups:
        assert np.isclose(group.kept, loss_of(net, port, (group.name,)), rtol=1e-6)
        alone = loss_of(net, port, tuple(name for name in names if name != group.name))
        assert group.alone is not None
        assert np.isclose(group.alone, alone, rtol=1e-6)
        assert group.bytes_saved == 4 * 32 * 32 - (32 * 32 + 4 * 32)
    assert np.isclose(result.total, loss_of(net, port, ()), rtol=1e-6)
    assert result.floor == 0
    assert [g.alone for g in result.groups] == sorted((g.alone for g in result.groups), reverse=True)  # type: ignore[type-var] # all are numbers


@pytest.mark.spec("SEN-6")
@pytest.mark.parametrize(
    ("share", "seed"),
    [
        *itertools.product((0.5, 0.1, 0.02), range(4)),
        pytest.param(0.02, 4, id="errors-of-two-make-up-for-each-other"),
        pytest.param(0.5, 39, id="others-gain-more-if-they-are-kept"),
    ],
)
def test_a_goal_is_reached_with_at_most_one_layer_more_than_the_fewest(share: float, seed: int) -> None:
    net = small(seed)
    port = rounded(net)
    goal = share * loss_of(net, port, ())
    result = sensitivity(Workload(net, (X,)), Workload(port, (X,)), goal=f"kl={goal!r}")
    names = [f"{block}.{place}" for block in range(3) for place in (0, 2)]
    fewest = next(
        count
        for count in range(7)
        if any(loss_of(net, port, kept) <= goal for kept in itertools.combinations(names, count))
    )
    assert result.is_reached
    assert loss_of(net, port, result.keep) <= goal
    assert len(result.keep) <= fewest + 1
    assert result.bytes_kept == len(result.keep) * (4 * 32 * 32 - (32 * 32 + 4 * 32))
    assert result.runs <= 2 + 1 + 2 * 3 + 2 * 6 + 2 * 6


@pytest.mark.spec("SEN-9")
def test_a_search_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    whole = sensitivity(*workloads(), goal="kl=1e-5", state=tmp_path / "state")
    lines = (tmp_path / "state").read_text().splitlines(keepends=True)
    (tmp_path / "state").write_text("".join(lines[:6]) + lines[6][:10])
    again = sensitivity(*workloads(), goal="kl=1e-5", state=tmp_path / "state")
    assert (again.runs, again.known_runs) == (whole.runs - 5, 5)
    assert again.keep == whole.keep
    assert (tmp_path / "state").read_text().splitlines()[1:] == [line.rstrip("\n") for line in lines[1:]]
    with pytest.raises(UsageError, match="is of another search"):
        sensitivity(*workloads(1), state=tmp_path / "state")
    (tmp_path / "state").write_text("no state\n")
    with pytest.raises(UsageError, match="is no state of a sensitivity"):
        sensitivity(*workloads(), state=tmp_path / "state")


@pytest.mark.spec("SEN-4")
def test_a_function_of_the_user_is_a_metric(tmp_path: Path) -> None:
    file = tmp_path / "metric.py"
    file.write_text("def worst(reference, target):\n    return abs(reference - target).max()\n")
    result = sensitivity(*workloads(), metric=f"{file}:worst", by="block")
    net = small()
    with torch.no_grad():
        assert np.isclose(result.total, float((net(X) - rounded(net)(X)).abs().max()), rtol=1e-6)


@pytest.mark.spec("SEN-4")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("    return reference.nothing\n", "line 2 raised AttributeError", id="raises"),
        pytest.param("    return float('nan')\n", "returned NaN", id="NaN"),
        pytest.param("    return 'many'\n", "raised ValueError: could not convert", id="text"),
    ],
)
def test_a_metric_that_fails_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "metric.py"
    file.write_text("def mine(reference, target):\n" + text)
    with pytest.raises(UsageError, match=message):
        sensitivity(*workloads(), metric=f"{file}:mine")
    with pytest.raises(UsageError, match="has no function 'other'"):
        metric_of(f"{file}:other")


@pytest.mark.spec("SEN-4", "SEN-6")
@pytest.mark.parametrize("text", ["kl", "kl=much", "=1", "top1=1.5", "kl=-1", "kl=nan"])
def test_a_goal_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected kl=VALUE"):
        parse_goal(text)


@pytest.mark.spec("SEN-4", "SEN-6")
def test_usage_errors_say_what_was_expected() -> None:
    with pytest.raises(UsageError, match=r"is of kl, expected one of the metric 'top1'"):
        sensitivity(*workloads(), metric="top1", goal="kl=1")
    with pytest.raises(UsageError, match=r"expected kl, top1 or FILE\.py:FUNCTION"):
        sensitivity(*workloads(), metric="psnr")
    with pytest.raises(UsageError, match="has no layer that is not the reference's"):
        sensitivity(Workload(small(), (X,)), Workload(small(), (X,)))
    one, other = workloads()
    with pytest.raises(UsageError, match=r"output is \[20, 32\], expected \[40, 32\]"):
        sensitivity(one, Workload(other.model, (X[:20],)))
    with pytest.raises(UsageError, match="the target's has other values than the reference's"):
        sensitivity(one, Workload(other.model, (X.flip(0),)))


class Filled(nn.Module):
    """A model that leaves out what is missing of its input, with a buffer that has a value missing."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("spare", torch.tensor([torch.nan, 1.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x.nan_to_num())


@pytest.mark.spec("SEN-8")
def test_nan_of_inputs_and_of_tensors_of_a_layer_is_equal_to_nan() -> None:
    one, other = workloads()
    x = X.clone()
    x[0, 0] = torch.nan
    ours, theirs = (Workload(Filled(side.model), (x.clone(),)) for side in (one, other))
    grafts = TorchGrafts(ours, theirs)
    assert set(grafts.layers) == {f"net.{block}.{place}" for block in range(3) for place in (0, 2)}
    with pytest.raises(UsageError, match="the target's has other values than the reference's"):
        TorchGrafts(ours, Workload(theirs.model, (X,)))


class Strict(Bytes):
    """A layer that hands on what no other one takes."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"hidden": super().forward(x)}


class Taking(Bytes):
    """A layer that takes that alone."""

    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x["hidden"])


@pytest.mark.spec("SEN-8")
def test_layers_that_cannot_be_exchanged_are_left_out_and_named() -> None:
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).eval()
    port = nn.Sequential(Bytes(net[0]), Strict(net[1]), Taking(net[2]), Bytes(net[3]))  # type: ignore[arg-type] # of a list
    result = sensitivity(Workload(net, (X,)), Workload(port, (X,)))
    assert set(result.left_out) == {"1", "2"}
    assert "the target does not run with the reference's" in result.left_out["1"]
    assert {group.name for group in result.groups} == {"0", "3"}
    for layer in (0, 3):
        port[layer] = net[layer]
    with pytest.raises(UsageError, match="cannot be grafted: no layer can be exchanged, 2 left out"):
        sensitivity(Workload(net, (X,)), Workload(port, (X,)))


@pytest.mark.spec("SEN-8")
def test_the_only_layer_of_a_block_is_left_out_by_its_own_name() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(4))).eval()
    kinds = (Bytes, Strict, Taking, Bytes)
    port = nn.Sequential(*(nn.Sequential(kind(block[0])) for kind, block in zip(kinds, net, strict=True)))  # type: ignore[index] # of a list
    result = sensitivity(Workload(net, (X,)), Workload(port, (X,)))
    assert set(result.left_out) == {"1.0", "2.0"}
    assert {group.layers for group in result.groups} == {("0.0",), ("3.0",)}


@pytest.mark.spec("SEN-1")
def test_models_are_as_before_after_a_search_and_an_error() -> None:
    one, other = workloads()
    before = [list(w.model.named_modules()) for w in (one, other)]
    sensitivity(one, other)
    assert [list(w.model.named_modules()) for w in (one, other)] == before


@pytest.mark.spec("SEN-1")
def test_a_target_of_another_precision_is_given_layers_of_the_reference() -> None:
    net = small()
    port = copy.deepcopy(net).to(torch.bfloat16)
    result = sensitivity(Workload(net, (X,)), Workload(port, (X.to(torch.bfloat16),)), by="block")
    assert [group.name for group in result.groups] == sorted(
        (g.name for g in result.groups),
        key=lambda name: -next(g.cost for g in result.groups if g.name == name),
    )
    assert 0 < result.floor < result.total
    assert {group.bytes_saved for group in result.groups} == {2 * 2 * (32 * 32 + 32)}


@pytest.mark.spec("SEN-7")
def test_layers_are_written_as_quantisers_take_them() -> None:
    layers = ["model.layers.0.mlp.down_proj", "lm_head"]
    assert precision_list(layers, "torchao") == (
        'FqnToConfig({"model.layers.0.mlp.down_proj": None, "lm_head": None, "_default": CONFIG})'
    )
    nodes = json.loads(precision_list(layers, "onnxruntime").partition("=")[2])
    assert nodes[0] == "/model/layers.0/mlp/down_proj/MatMul"
    assert "/lm_head/Gemm" in nodes
    text = precision_list(layers, "tensorrt")
    assert "--layer-precisions /model/layers.0/mlp/down_proj/MatMul:float32 " in text


@pytest.mark.spec("SEN-10")
def test_a_goal_that_all_layers_do_not_reach_ends_with_one() -> None:
    net = small()
    port = rounded(net)
    port.append(nn.Tanh())  # which no layer of the reference undoes
    result = sensitivity(Workload(net, (X,)), Workload(port, (X,)), goal="kl=1e-6")
    assert (result.is_reached, result.exit_status, len(result.keep)) == (False, 1, 6)
    assert result.to_json()["keep"] == list(result.keep)
