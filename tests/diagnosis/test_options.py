"""Operations of a module with one option changed, quantised weights; targets are made by numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorcap.diagnosis import Diagnosis
from tensorcap.workload import Workload
from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import Diagnose
from tests.diagnosis.test_mutations import Model, drawn, found_by
from tests.support.floats import to_bfloat16

EPS = 1e-5


def convolved(x: Array, weight: Array, bias: Array, before: int, after: int) -> Array:
    """A convolution of stride 2 and 3 by 3 taps, padded so much before and behind each axis."""
    x = np.pad(x, ((0, 0), (0, 0), (before, after), (before, after)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))[:, :, ::2, ::2]
    return np.asarray(np.einsum("bchwij,ocij->bohw", windows, weight) + bias[:, None, None])


def normed(x: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray((x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + EPS))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def softplus(x: Array) -> Array:
    return np.asarray(np.log1p(np.exp(x)))


def module_of(model: nn.Module) -> Any:
    """The module that is diagnosed."""
    return model.module


class Own(nn.Module):
    """A module whose code is a function of itself and its input."""

    def __init__(self, code: Callable[..., Tensor], **parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.code = code
        for name, shape in parameters.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))

    def forward(self, **inputs: Tensor) -> Tensor:
        out: Tensor = self.code(self, **inputs)
        return out


def rms(self: Any, input: Tensor) -> Tensor:
    out: Tensor = self.weight * (input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + EPS))
    return out


def grouped_rms(self: Any, input: Tensor) -> Tensor:
    x = input.reshape(*input.shape[:-1], 4, 4)
    out: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).flatten(-2)
    return out


def response(self: Any, input: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(input, dim=(1, 2), keepdim=True)
    out: Tensor = input * size / size.mean(dim=-1, keepdim=True)
    return out


def picked(self: Any, input: Tensor) -> Tensor:
    return input[torch.arange(4), torch.tensor([2, 5, 1, 3])]


def decayed(self: Any, input: Tensor) -> Tensor:
    out: Tensor = torch.exp(-8.0 * torch.sigmoid(input) * functional.softplus(self.rate))
    return out


def stepped(self: Any, input: Tensor) -> Tensor:
    out: Tensor = functional.softplus(input + self.bias) * input
    return out


def attended(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def attention_of(q: Array, k: Array, v: Array) -> Array:
    return softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v


def without_last_key(v: dict[str, Array]) -> Array:
    key = v["key"].copy()
    key[..., -1, :] = key[..., -2, :]
    return attention_of(v["query"], key, v["value"])


def eager(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return functional.softmax(scores, dim=-1, dtype=torch.float32) @ value


def with_a_low_softmax(v: dict[str, Array], low: Callable[[Array], Array]) -> Array:
    """Attention of float32 whose scores and probabilities alone are rounded."""
    scores = v["query"] @ np.swapaxes(v["key"], -1, -2) / np.sqrt(v["query"].shape[-1])
    return low(softmax(low(scores))) @ v["value"]


def bf16(x: Array) -> Array:
    return to_bfloat16(x).astype(np.float64)


def fp16(x: Array) -> Array:
    return np.asarray(x).astype(np.float16).astype(np.float64)


def resized(x: Array) -> Array:
    """Twice the size by lines between points, corners on corners."""
    for axis in (2, 3):
        size = x.shape[axis]
        at = np.arange(2 * size) * (size - 1) / (2 * size - 1)
        low = np.minimum(at.astype(int), size - 2)
        part = (at - low).reshape([-1 if a == axis else 1 for a in range(4)])
        x = np.take(x, low, axis) * (1 - part) + np.take(x, low + 1, axis) * part
    return x


def scales_of_the_row_before(weight: Array) -> Array:
    scale = np.abs(weight).max(1, keepdims=True) / 127
    return np.asarray(np.round(weight / scale) * np.roll(scale, 1, 0))


IMAGE, SEQUENCE = (2, 3, 8, 8), (4, 7, 16)
ATTENDED = dict.fromkeys(("query", "key", "value"), (2, 2, 9, 16))
CACHED = {"query": (2, 2, 1, 16), "key": (2, 2, 9, 16), "value": (2, 2, 9, 16)}


def norm_of_mean(_: Any, input: Tensor) -> Tensor:
    """A pooled image, normalised."""
    return functional.layer_norm(input.mean((-2, -1)), (16,), eps=EPS)


class Case(NamedTuple):
    """A module, the shapes of what it is given, and what a target makes of that by numpy."""

    kind: str
    words: str
    module: Callable[[Any], nn.Module]
    made: Callable[[dict[str, Array]], Array]
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({"input": SEQUENCE})


CASES: list[Case] = [
    Case(
        "padding-differs",
        "padding at the end in conv2d",
        lambda _: nn.Conv2d(3, 4, 3, 2, 1),
        lambda v: convolved(v["input"], v["weight"], v["bias"], 0, 1),
        {"input": IMAGE},
    ),
    Case(
        "taps-order",
        "all taps reversed in conv2d",
        lambda _: nn.Conv2d(3, 4, 3, 2, 1),
        lambda v: convolved(v["input"], v["weight"][:, :, ::-1, ::-1], v["bias"], 1, 1),
        {"input": IMAGE},
    ),
    Case(
        "batch-statistics",
        "statistics of the batch",
        lambda _: nn.BatchNorm2d(3, EPS),
        lambda v: normed(v["input"], (0, 2, 3)) * v["weight"][:, None, None] + v["bias"][:, None, None],
        {"input": IMAGE},
    ),
    Case(
        "groups-differ",
        "of its input.input of all channels, the reference of each channel",
        lambda _: nn.GroupNorm(3, 3, EPS),
        lambda v: normed(v["input"], (1, 2, 3)) * v["weight"][:, None, None] + v["bias"][:, None, None],
        {"input": IMAGE},
    ),
    Case(
        "groups-differ",
        "of 4 groups of channels that lie 4 apart, the reference of 4 groups of channels beside each other",
        lambda _: nn.GroupNorm(4, 8, EPS),
        lambda v: (
            normed(v["input"].reshape(2, 2, 4, 5, 6), (1, 3, 4)).reshape(2, 8, 5, 6)
            * v["weight"][:, None, None]
            + v["bias"][:, None, None]
        ),
        {"input": (2, 8, 5, 6)},
    ),
    Case(
        "statistics-differ",
        "the deviation of a sample",
        lambda _: nn.GroupNorm(4, 8, EPS),
        lambda v: (
            (normed(v["input"].reshape(2, 4, 60), (2,)) * np.sqrt(59 / 60)).reshape(2, 8, 5, 6)
            * v["weight"][:, None, None]
            + v["bias"][:, None, None]
        ),
        {"input": (2, 8, 5, 6)},
    ),
    Case(
        "groups-differ",
        "of each of 4 groups of channels that lie that many apart",
        lambda _: nn.LayerNorm(16, EPS),
        lambda v: normed(v["input"].reshape(4, 7, 4, 4), (2,)).reshape(4, 7, 16) * v["weight"] + v["bias"],
    ),
    Case(
        "axes-differ",
        "statistics of its input.input of axes 1 to 2 together",
        lambda _: nn.LayerNorm(16, EPS),
        lambda v: normed(v["input"], (1, 2)) * v["weight"] + v["bias"],
    ),
    Case(
        "groups-differ",
        "statistics of its input.input of each of 4 groups of channels",
        lambda _: Own(rms, weight=(16,)),
        lambda v: (
            v["weight"]
            * v["input"]
            / np.sqrt((v["input"].reshape(4, 7, 4, 4) ** 2).mean(-1).repeat(4, -1) + EPS)
        ),
    ),
    Case(
        "operations-order",
        "done behind layer_norm",
        lambda _: Own(norm_of_mean),
        lambda v: normed(v["input"].transpose(0, 2, 3, 1), (3,)).mean((1, 2)),
        {"input": (2, 16, 5, 6)},
    ),
    Case(
        "axes-differ",
        "axes 2, 3 in mean",
        lambda _: Own(grouped_rms, weight=(16,)),
        lambda v: v["weight"] * v["input"] / np.sqrt((v["input"] ** 2).mean(-1, keepdims=True) + EPS),
    ),
    Case(
        "axes-differ",
        "axis 3 in linalg_vector_norm and axes 1, 2 in mean",
        lambda _: Own(response),
        lambda v: (
            v["input"]
            * np.linalg.norm(v["input"], axis=3, keepdims=True)
            / np.linalg.norm(v["input"], axis=3, keepdims=True).mean((1, 2), keepdims=True)
        ),
        {"input": IMAGE},
    ),
    Case(
        "interpolation-differs",
        "aligned corners",
        lambda _: Own(lambda self, input: functional.interpolate(input, scale_factor=2, mode="bilinear")),
        lambda v: resized(v["input"]),
        {"input": IMAGE},
    ),
    Case("pooling-differs", "the last along axis 1", lambda _: Own(picked), lambda v: v["input"][:, -1]),
    Case(
        "pooling-differs",
        "the largest along axis 1",
        lambda _: Own(lambda self, input: input.mean(1)),
        lambda v: v["input"].max(1),
    ),
    Case(
        "factor",
        "-1 for -8 in mul",
        lambda _: Own(decayed, rate=(16,)),
        lambda v: np.exp(-softplus(v["rate"]) / (1 + np.exp(-v["input"]))),
    ),
    Case(
        "operations-order",
        "added to its result in softplus",
        lambda _: Own(stepped, bias=(16,)),
        lambda v: (softplus(v["input"]) + v["bias"]) * v["input"],
    ),
    Case(
        "cache-not-written",
        "the newest key that of the token before",
        lambda _: Own(attended),
        without_last_key,
        CACHED,
    ),
    Case(
        "operation-precision",
        "its softmax in bfloat16 in scaled_dot_product_attention",
        lambda _: Own(attended),
        lambda v: with_a_low_softmax(v, bf16),
        ATTENDED,
    ),
    Case(
        "operation-precision",
        "operands and result in bfloat16 in softmax",
        lambda _: Own(eager),
        lambda v: with_a_low_softmax(v, bf16),
        ATTENDED,
    ),
    Case(
        "operation-precision",
        "operands and result in float16 in softmax",
        lambda _: Own(eager),
        lambda v: with_a_low_softmax(v, fp16),
        ATTENDED,
    ),
    Case(
        "quantisation-scales",
        "weight in 8 bits and a scale of each row, that of the one before it",
        lambda _: nn.Linear(16, 12, bias=False),
        lambda v: v["input"] @ scales_of_the_row_before(v["weight"]).T,
    ),
    Case(
        "token-shift",
        "rolled by 2",
        lambda _: Own(lambda self, input: torch.roll(input.sin(), 1, 1) * input),
        lambda v: np.roll(np.sin(v["input"]), -1, 1) * v["input"],
    ),
]


def diagnosed_module(case: Case, folder: Path, seed: int = 5) -> Diagnosis:
    """Diagnose what numpy makes where the reference's module makes its own."""
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(shape) for name, shape in case.shapes.items()}
    model = drawn(Model(case.module, "module"))  # type: ignore[arg-type]  # it makes a module of a config
    inputs = {name: torch.from_numpy(value.astype(np.float32)) for name, value in values.items()}
    values |= {name: p.detach().double().numpy() for name, p in module_of(model).named_parameters()}
    for name, value in inputs.items():
        values[name] = value.double().numpy()
    made = case.made(values)
    changed = {"0/module/output": made, "0/@root/output": made}
    return found_by(Workload(model, inputs), changed, folder, "module", "0/module/output")


@pytest.mark.spec("DIA-230", "DIA-231", "DIA-260", "DIA-603", "DIA-604")
@pytest.mark.parametrize("case", CASES[:-1], ids=[f"{c.kind}-{c.words[:24]}" for c in CASES[:-1]])
def test_an_option_of_an_operation_that_is_another_one_is_named(tmp_path: Path, case: Case) -> None:
    found = diagnosed_module(case, tmp_path)
    assert found.explanations, found.tried
    first = found.explanations[0]
    assert first.kind == case.kind, first.text
    assert case.words in first.text


@pytest.mark.spec("DIA-230")
def test_a_roll_the_other_way_is_named(tmp_path: Path) -> None:
    found = diagnosed_module(CASES[-1], tmp_path)
    assert [e.kind for e in found.explanations] == ["axis-shift"]


@pytest.mark.spec("DIA-230", "DIA-231")
@pytest.mark.parametrize("at", range(len(CASES)))
def test_noise_is_no_option(tmp_path: Path, at: int) -> None:
    case = CASES[at]
    noise = np.random.default_rng(9)

    def blurred(values: dict[str, Array]) -> Array:
        made = case.made(values)
        return np.asarray(made + noise.standard_normal(made.shape) * np.abs(made).mean())

    assert not diagnosed_module(case._replace(made=blurred), tmp_path).explanations


def experts(self: Any, input: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    made = torch.einsum("th,ehw->tew", input, self.weight).tanh()
    chosen = torch.zeros(len(index), 6).scatter(1, index, weights)
    return torch.einsum("te,tew->tw", chosen, made)


@pytest.mark.spec("DIA-232")
def test_a_capacity_of_experts_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((24, 16)).astype(np.float32)
    index = np.argsort(rng.random((24, 6)), axis=1)[:, :2]
    weights = rng.random((24, 2)).astype(np.float32)
    model = drawn(Model(lambda _: Own(experts, weight=(6, 16, 16)), "module"))  # type: ignore[arg-type]
    weight = module_of(model).weight.detach().double().numpy()
    taken, made = np.zeros(6, int), np.zeros((24, 16))
    for token in range(24):
        for choice in range(2):
            expert = index[token, choice]
            taken[expert] += 1
            if taken[expert] <= 5:
                made[token] += weights[token, choice] * np.tanh(x[token].astype(float) @ weight[expert])
    inputs = {"input": x, "index": index, "weights": weights}
    workload = Workload(model, {name: torch.from_numpy(value) for name, value in inputs.items()})
    changed = {"0/module/output": made, "0/@root/output": made}
    found = found_by(workload, changed, tmp_path, "module", "0/module/output")
    first = found.explanations[0]
    assert (first.kind, first.facts["capacity"], first.facts["kept"]) == ("expert-capacity", 5, "first")


class Recurrent(nn.Module):
    """A recurrence that goes on from where the call before ended."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(16))
        self.state: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        state, out = torch.zeros(16) if self.state is None else self.state, []
        for x in input:
            state = torch.sigmoid(self.rate * 4.0) * state + x
            out.append(state)
        self.state = state
        return torch.stack(out)


@pytest.mark.spec("DIA-233")
def test_each_call_begins_with_the_state_that_the_first_one_began_with(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((24, 16)).astype(np.float32)
    model = drawn(Model(Recurrent, "module"))
    rate = module_of(model).rate.detach().double().numpy()
    state, made = np.zeros(16), np.zeros((24, 16))
    for at in range(24):
        state = state / (1 + np.exp(-rate)) + x[at]
        made[at] = state

    class Fresh(Model):
        def forward(self, **inputs: Tensor) -> Tensor:
            module_of(self).state = None
            return super().forward(**inputs)

    fresh = Fresh(Recurrent, "module")
    fresh.load_state_dict(model.state_dict())
    changed = {"0/module/output": made, "0/@root/output": made}
    workload = Workload(fresh.eval(), {"input": torch.from_numpy(x)})
    found = found_by(workload, changed, tmp_path, "module", "0/module/output")
    assert any(e.kind == "factor" and "1 for 4 in mul" in e.text for e in found.explanations)
    assert module_of(fresh).state is not None


class PositionTable(nn.Module):
    """A table of one sequence, of which the first two rows are no positions."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.offset = 2
        self.weight = nn.Parameter(torch.empty(12, 16))

    def forward(self, positions: Tensor) -> Tensor:
        return functional.embedding(positions + self.offset, self.weight)[None]


@pytest.mark.spec("DIA-234")
def test_what_a_change_makes_may_stand_for_all_sequences(tmp_path: Path) -> None:
    model = drawn(Model(PositionTable, "module"))
    weight = module_of(model).weight.detach().double().numpy()
    made = np.repeat(weight[None, :8], 3, 0)
    workload = Workload(model, {"positions": torch.arange(8)})
    changed = {"0/module/output": made, "0/@root/output": made}
    found = found_by(workload, changed, tmp_path, "module", "0/module/output")
    assert any(e.kind == "position-offset" and e.facts["target"] == 0 for e in found.explanations)


@pytest.mark.spec("DIA-235")
def test_a_call_that_is_given_what_comes_behind_it_is_named(diagnosed: Diagnose) -> None:
    rng = np.random.default_rng(2)
    first, second, third = rng.standard_normal((3, 12, 16))
    ours = {"0/b.conv/output": first, "0/b.norm/input.x": first, "0/b.norm/output": second}
    ours |= {"0/b.act/input.x": second, "0/b.act/output": third}
    theirs = {"0/b.conv/output": first, "0/b.act/input.x": first, "0/b.act/output": np.tanh(first)}
    theirs |= {"0/b.norm/input.x": np.tanh(first), "0/b.norm/output": second}
    found = diagnosed(ours, theirs, key="0/b.norm/input.x")
    assert (found.explanations[0].kind, found.explanations[0].facts["other"]) == ("calls-order", "b.act")


@pytest.mark.spec("DIA-235")
def test_two_results_that_are_exchanged_are_no_calls_in_another_order(diagnosed: Diagnose) -> None:
    x, gate, up = np.random.default_rng(2).standard_normal((3, 12, 16))
    ours = {"0/b.gate/output": gate, "0/b.act/input.x": gate, "0/b.act/output": np.tanh(gate)}
    ours |= {"0/b.up/input.x": x, "0/b.up/output": up}
    theirs = {"0/b.gate/output": gate, "0/b.up/input.x": x, "0/b.up/output": up}
    theirs |= {"0/b.act/input.x": up, "0/b.act/output": np.tanh(up)}
    found = diagnosed(ours, theirs, key="0/b.act/input.x")
    assert "calls-order" not in [e.kind for e in found.explanations]


@pytest.mark.spec("DIA-235")
def test_an_argument_in_the_place_of_another_is_a_term_exchanged(diagnosed: Diagnose) -> None:
    x, residual = np.random.default_rng(2).standard_normal((2, 12, 16))
    ours = {"0/b/input.x": x, "0/b/input.residual": residual, "0/b/output": x + residual}
    theirs = {"0/b/input.x": x, "0/b/input.residual": x, "0/b/output": x + x}
    found = diagnosed(ours, theirs, key="0/b/input.residual")
    kinds = [e.kind for e in found.explanations]
    assert kinds[0] == "term-exchanged"
    assert "identity" not in kinds


@pytest.mark.spec("DIA-236")
def test_a_window_that_is_moved_once_more_is_a_shift(diagnosed: Diagnose) -> None:
    r = np.random.default_rng(2).standard_normal((40, 8))
    first = diagnosed(r, r[:, [1, 2, 3, 4, 5, 6, 7, 7]]).explanations[0]
    assert (first.kind, first.facts["shift"]) == ("channel-shift", 1)


@pytest.mark.spec("DIA-236")
def test_a_grid_that_is_rolled_is_a_shift(diagnosed: Diagnose) -> None:
    r = np.random.default_rng(2).standard_normal((20, 6, 8))
    t = np.roll(r.reshape(4, 5, 6, 8), (1, 2), (0, 1)).reshape(r.shape)
    first = diagnosed(r, t).explanations[0]
    assert first.kind == "batch-shift"
    assert "4 rows and 5 columns rolled by 1 and 2" in first.text
