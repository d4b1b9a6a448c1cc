"""Steps done earlier or twice, other places, parts, spacings, tensors of other modules; targets by numpy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorcap.workload import Workload
from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import Diagnose
from tests.diagnosis.test_mutations import Model, drawn, found_by
from tests.diagnosis.test_options import Case, Own, diagnosed_module, softmax

EPS = 1e-5


def pooled(self: Any, input: Tensor) -> Tensor:
    return input[:, 1:].mean(1).tanh()


def flattened(self: Any, input: Tensor) -> Tensor:
    return input.tanh().mean(1)


def by_head(self: Any, input: Tensor) -> Tensor:
    q, k, v = torch.split(input, [3, 3, 6], -1)
    return torch.cat((q.tanh() * k.sin(), v.exp()), -1)


def by_part(self: Any, input: Tensor) -> Tensor:
    q, k, v = torch.split(input, [12, 12, 24], -1)
    return torch.cat((q.tanh() * k.sin(), v.exp()), -1)


def relative(self: Any, input: Tensor) -> Tensor:
    at = torch.arange(7)
    distance = at[:, None] - at
    out: Tensor = input + (self.table[distance.clamp(-2, 4) + 2] * at[:, None]).sum(1)
    return out


def causal(self: Any, input: Tensor) -> Tensor:
    at = torch.arange(7)
    seen = at[:, None] >= at
    return (input @ input.mT).masked_fill(~seen, -1e4).softmax(-1) @ input


def padded_places(self: Any, input: Tensor) -> Tensor:
    real = (torch.arange(7) < 5).int()
    out: Tensor = input + self.table[torch.cumsum(real, 0) * real]
    return out


def weighed(self: Any, input: Tensor) -> Tensor:
    out: Tensor = (input * self.weight).tanh()
    return out


def chosen(self: Any, input: Tensor) -> Tensor:
    values, _ = torch.topk(input.exp(), 4, dim=-1)
    return values / values.sum(-1, keepdim=True)


def chosen_by_method(self: Any, input: Tensor) -> Tensor:
    values, _ = input.exp().topk(4, dim=-1)
    return values / values.sum(-1, keepdim=True)


def gated_behind(self: Any, input: Tensor, gate: Tensor) -> Tensor:
    wide = input.sin()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    out: Tensor = normed * self.weight * functional.silu(gate)
    return out


def multiplied(self: Any, input: Tensor, state: Tensor) -> Tensor:
    return torch.matmul(input.tanh(), state)


def both(self: Any, input: Tensor, state: Tensor) -> Tensor:
    return input.tanh() * state.sin()


def projected(self: Any, input: Tensor) -> Tensor:
    out: Tensor = (input.tanh() @ self.weight).cumsum(-1)
    return out


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def rms(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS))


def parted(q: Array, k: Array, v: Array) -> Array:
    return np.concatenate((np.tanh(q) * np.sin(k), np.exp(v)), -1)


def correlated(x: Array, weight: Array, spacing: int) -> Array:
    """A correlation along the last axis of (batch, channel, place), of three taps so far apart."""
    padded = np.pad(x, ((0, 0), (0, 0), (spacing, spacing)))
    taps = [padded[..., at * spacing : at * spacing + x.shape[-1]] for at in range(3)]
    return np.asarray(sum(np.einsum("bcp,oc->bop", tap, weight[..., at]) for at, tap in enumerate(taps)))


def halves_alike(weight: Array) -> Array:
    return np.concatenate((weight[:6], weight[:6]))


def in_heads(x: Array) -> list[Array]:
    """Parts of 3, 3 and 6 channels of each of 4 heads, read as parts of all heads."""
    flat = x.reshape(*x.shape[:2], 48)
    parts = flat[..., :12], flat[..., 12:24], flat[..., 24:]
    return [part.reshape(*x.shape[:2], 4, -1) for part in parts]


def by_groups(x: Array) -> list[Array]:
    """The other way round."""
    grouped = x.reshape(*x.shape[:2], 4, 12)
    parts = grouped[..., :3], grouped[..., 3:6], grouped[..., 6:]
    return [part.reshape(*x.shape[:2], -1) for part in parts]


def distances(sign: int) -> Array:
    at = np.arange(7)
    return np.asarray(np.clip(sign * (at[:, None] - at), -2, 4) + 2)


def gated_before(v: dict[str, Array]) -> Array:
    return rms(np.sin(v["input"]) * v["gate"] * sigmoid(v["gate"])) * v["weight"]


def attended(x: Array, seen: Array) -> Array:
    scores = np.where(seen, x @ np.swapaxes(x, -1, -2), -1e4)
    return np.asarray(softmax(scores) @ x)


def smallest(x: Array) -> Array:
    values = np.sort(np.exp(x), -1)[..., :4]
    return np.asarray(values / values.sum(-1, keepdims=True))


CASES = [
    Case(
        "slice-extent",
        "one more at the beginning along axis 1",
        lambda _: Own(pooled),
        lambda v: np.tanh(v["input"].mean(1)),
    ),
    Case(
        "axes-differ",
        "axis 2 in mean",
        lambda _: Own(flattened),
        lambda v: np.tanh(v["input"]).mean(2),
        {"input": (4, 7, 7)},
    ),
    Case(
        "parts-order",
        "parts lying as wholes, and not in each of 4 groups",
        lambda _: Own(by_head),
        lambda v: parted(*in_heads(v["input"])),
        {"input": (2, 7, 4, 12)},
    ),
    Case(
        "parts-order",
        "parts lying in each of 4 groups",
        lambda _: Own(by_part),
        lambda v: parted(*by_groups(v["input"])),
        {"input": (2, 7, 48)},
    ),
    Case(
        "dilation-differs",
        "taps 1 apart",
        lambda _: nn.Conv1d(3, 4, 3, dilation=3, padding=3, bias=False),
        lambda v: correlated(v["input"], v["weight"], 1),
        {"input": (2, 3, 21)},
    ),
    Case(
        "positions-differ",
        "the opposite sign of its numbers in sub",
        lambda _: Own(relative, table=(7, 16)),
        lambda v: v["input"] + (v["table"][distances(-1)] * np.arange(7)[:, None]).sum(1),
    ),
    Case(
        "attention-mask",
        "> for >=",
        lambda _: Own(causal),
        lambda v: attended(v["input"], np.arange(7)[:, None] > np.arange(7)),
    ),
    Case(
        "position-offset",
        "its places counted from 0 on",
        lambda _: Own(padded_places, table=(9, 16)),
        lambda v: v["input"] + v["table"][:7],
    ),
    Case(
        "product-twice",
        "done twice in mul",
        lambda _: Own(weighed, weight=(16,)),
        lambda v: np.tanh(v["input"] * v["weight"] ** 2),
    ),
    Case(
        "router-differs",
        "the smallest ones chosen in topk",
        lambda _: Own(chosen),
        lambda v: smallest(v["input"]),
    ),
    Case(
        "router-differs",
        "the smallest ones chosen in topk",
        lambda _: Own(chosen_by_method),
        lambda v: smallest(v["input"]),
    ),
    Case(
        "operations-order",
        "done on the result of sin",
        lambda _: Own(gated_behind, weight=(16,)),
        gated_before,
        {"input": (4, 7, 16), "gate": (4, 7, 16)},
    ),
    Case(
        "layout-differs",
        "axes 1 and 2 of operand 2 exchanged",
        lambda _: Own(multiplied),
        lambda v: np.tanh(v["input"]) @ np.swapaxes(v["state"], 1, 2),
        {"input": (4, 8, 8), "state": (4, 8, 8)},
    ),
    Case(
        "operand-exchanged",
        "with its input and state exchanged",
        lambda _: Own(both),
        lambda v: np.tanh(v["state"]) * np.sin(v["input"]),
        {"input": (4, 7, 16), "state": (4, 7, 16)},
    ),
    Case(
        "other-weights",
        "with 0 to 5 in the place of 6 to 11 of axis 0 of weight",
        lambda _: nn.Linear(16, 12),
        lambda v: v["input"] @ halves_alike(v["weight"]).T + v["bias"],
    ),
    Case(
        "bias-dropped",
        "without 6 to 11 of axis 0 of bias",
        lambda _: nn.Linear(16, 12),
        lambda v: v["input"] @ v["weight"].T + v["bias"] * (np.arange(12) < 6),
    ),
    Case(
        "parameter-order",
        "with its 3 blocks in the order 2, 0, 1",
        lambda _: Own(projected, weight=(12, 16)),
        lambda v: np.cumsum(np.tanh(v["input"]) @ np.roll(v["weight"], 4, 0), -1),
        {"input": (4, 7, 12)},
    ),
]


@pytest.mark.spec("DIA-510", "DIA-511", "DIA-512", "DIA-513", "DIA-515")
@pytest.mark.parametrize("case", CASES, ids=[f"{c.kind}-{c.words[:24]}" for c in CASES])
def test_a_step_that_is_done_otherwise_is_named(tmp_path: Path, case: Case) -> None:
    found = diagnosed_module(case, tmp_path)
    assert found.explanations, found.tried
    first = found.explanations[0]
    assert first.kind == case.kind, first.text
    assert case.words in first.text


@pytest.mark.spec("DIA-510", "DIA-511", "DIA-512", "DIA-513", "DIA-515")
@pytest.mark.parametrize("at", [0, 4, 7, 10, 13])
def test_noise_is_no_step(tmp_path: Path, at: int) -> None:
    noise = np.random.default_rng(9)

    def blurred(values: dict[str, Array]) -> Array:
        made = CASES[at].made(values)
        return np.asarray(made + noise.standard_normal(made.shape) * np.abs(made).mean())

    assert not diagnosed_module(CASES[at]._replace(made=blurred), tmp_path).explanations


class Curve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.empty(16)), nn.Parameter(torch.empty(16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight + self.shift).tanh().cumsum(-1)


class TwoCurves(nn.Module):
    """A module, and another one of its class in the same model."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.other = Curve(), Curve()

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.module(input) + self.other(input).sin()
        return out


@pytest.mark.spec("DIA-514")
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_weights_of_another_module_of_the_class_are_named(tmp_path: Path, is_whole: bool) -> None:
    model: Any = drawn(TwoCurves())
    x = np.random.default_rng(1).standard_normal((4, 7, 16)).astype(np.float32)
    weight = model.other.weight.detach().double().numpy()
    shift = (model.other if is_whole else model.module).shift.detach().double().numpy()
    made = np.cumsum(np.tanh(x.astype(float) * weight + shift), -1)
    workload = Workload(model, {"input": torch.from_numpy(x)})
    found = found_by(workload, {"0/module/output": made}, tmp_path, "module", "0/module/output")
    first = found.explanations[0]
    assert first.kind == "other-weights"
    assert first.facts["of"] == ["other.weight", "other.shift"][: 2 if is_whole else 1]


def packed(self: Any, input: Tensor, starts: Tensor) -> Tensor:
    parts = [input[a:b] for a, b in pairwise(starts.tolist())]
    return torch.cat([(part @ part.mT).softmax(-1) @ part for part in parts])


@pytest.mark.spec("DIA-513")
def test_packed_sequences_that_see_one_another_are_named(tmp_path: Path) -> None:
    model = drawn(Model(lambda _: Own(packed), "module"))  # type: ignore[arg-type]  # it makes a module of a config
    x = np.random.default_rng(1).standard_normal((15, 8)).astype(np.float32)
    wide = x.astype(float)
    made = softmax(wide @ wide.T) @ wide
    inputs = {"input": torch.from_numpy(x), "starts": torch.tensor([0, 4, 9, 15])}
    changed = {"0/module/output": made, "0/@root/output": made}
    first = found_by(Workload(model, inputs), changed, tmp_path, "module", "0/module/output").explanations[0]
    assert first.kind == "attention-mask"
    assert "as of one sequence" in first.text


class Adding(nn.Module):
    """A module with a switch whose name says nothing."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.lively = True

    def forward(self, input: Tensor) -> Tensor:
        out = input.sin()
        return out + input if self.lively else out


@pytest.mark.spec("DIA-516")
def test_what_a_switch_leaves_out_says_more_than_its_name(tmp_path: Path) -> None:
    model = drawn(Model(Adding, "module"))
    x = np.random.default_rng(1).standard_normal((4, 7, 16)).astype(np.float32)
    made = np.sin(x.astype(float))
    changed = {"0/module/output": made, "0/@root/output": made}
    workload = Workload(model, {"input": torch.from_numpy(x)})
    kinds = [e.kind for e in found_by(workload, changed, tmp_path, "module", "0/module/output").explanations]
    assert kinds[0] == "term-missing"
    assert "setting-differs" not in kinds


@pytest.mark.spec("DIA-517")
def test_an_argument_that_is_another_record_is_exchanged(diagnosed: Diagnose) -> None:
    early, late = np.random.default_rng(2).standard_normal((2, 12, 16))
    ours = {"0/block.norm/output": early, "0/block.layer/output": late, "0/block.conv/input.x": early}
    theirs = {"0/block.conv/input.x": late}
    first = diagnosed(ours, theirs, key="0/block.conv/input.x").explanations[0]
    assert first.kind == "operand-exchanged"
    assert "0/block.layer/output" in first.text


@pytest.mark.spec("DIA-641")
def test_arguments_that_are_each_others_are_told_before_fitted_numbers(diagnosed: Diagnose) -> None:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((12, 16))
    norms = [x * generator.uniform(0.5, 2, 16) + generator.standard_normal(16) for _ in range(2)]
    taken = ["0/block.attn/input.x", "0/block.mlp/input.x"]
    made = {"0/block.one/output": norms[0], "0/block.two/output": norms[1]}
    ours, theirs = (
        {**made, **dict(zip(taken, norms, strict=True))},
        dict(zip(taken, norms[::-1], strict=True)),
    )
    first = diagnosed(ours, theirs, key=taken[0]).explanations[0]
    assert first.kind == "operand-exchanged"
    assert first.text.startswith("the target gives block.attn the value of 0/block.")
    assert first.hint.startswith("block.attn and block.mlp are exchanged")
