"""Operations of a module done otherwise: layouts, functions, numbers, operands, order; targets by numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import Diagnose
from tests.diagnosis.test_mutations import Model, drawn, found_by
from tests.diagnosis.test_options import Case, Own, diagnosed_module, softmax


def unpatched(self: Any, input: Tensor) -> Tensor:
    """Patches of 2 by 2 places, of 4 channels each, put into an image of 4 by 4 patches."""
    x = input.view(2, 4, 4, 2, 2, 4)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(2, 4, 8, 8).cumsum(-1)


def shared(self: Any, input: Tensor, state: Tensor) -> Tensor:
    return input * state.repeat_interleave(4, dim=2)


def turned(self: Any, input: Tensor) -> Tensor:
    plain, rotated = torch.split(input, [12, 4], -1)
    return torch.cat((plain.tanh(), rotated.sin()), -1)


def gated(self: Any, input: Tensor) -> Tensor:
    x, gate = input.chunk(2, -1)
    return x.tanh() * torch.sigmoid(gate)


def later(self: Any, input: Tensor) -> Tensor:
    return input[:, 2:6].tanh() * input[:, :4].exp()


def probabilities(self: Any, input: Tensor) -> Tensor:
    return torch.sigmoid(input).square() + 0.25


def spread(self: Any, input: Tensor) -> Tensor:
    return (input * input.std(-1, keepdim=True)).tanh()


def angles(self: Any, input: Tensor) -> Tensor:
    return torch.sin(input) + input


def modulated(self: Any, input: Tensor) -> Tensor:
    normed = input / (input.square().mean(-1, keepdim=True) + 1.0).sqrt()
    return normed * torch.tanh(self.weight) + input.sin()


def powered(self: Any, input: Tensor) -> Tensor:
    return input.abs().pow(1.5).tanh()


def timed(self: Any, time: Tensor) -> Tensor:
    return torch.cos(time[:, None].float() * torch.linspace(0.01, 0.4, 8))


def with_waves(self: Any, input: Tensor) -> Tensor:
    return input.tanh() + (input + input).sin()


def scanned(self: Any, input: Tensor) -> Tensor:
    own = torch.tanh(input)
    from_state = input.cumsum(1) * 0.1
    return own + from_state


def rms(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1.0))


def quarter_scales(weight: Array) -> Array:
    """Four bits with a scale for each 16 weights of a row, given back with rows and groups exchanged."""
    groups = weight.reshape(16, 2, 16)
    scale = np.abs(groups).max(-1, keepdims=True) / 7
    other = np.swapaxes(scale, 0, 1).reshape(scale.shape)
    return np.asarray((np.round(groups / scale) * other).reshape(16, 32))


CASES = [
    Case(
        "layout-differs",
        "in view",
        lambda _: Own(unpatched),
        lambda v: (
            v["input"].reshape(2, 4, 4, 4, 2, 2).transpose(0, 3, 1, 4, 2, 5).reshape(2, 4, 8, 8).cumsum(-1)
        ),
        {"input": (2, 16, 16)},
    ),
    Case(
        "layout-differs",
        "the whole repeated in repeat_interleave",
        lambda _: Own(shared),
        lambda v: v["input"] * np.tile(v["state"], (1, 1, 4)),
        {"input": (4, 7, 16), "state": (4, 7, 4)},
    ),
    Case(
        "parts-order",
        "parts in the order 1, 0 in split",
        lambda _: Own(turned),
        lambda v: np.concatenate((np.tanh(v["input"][..., 4:]), np.sin(v["input"][..., :4])), -1),
    ),
    Case(
        "parts-order",
        "parts taken alternately in chunk",
        lambda _: Own(gated),
        lambda v: np.tanh(v["input"][..., ::2]) / (1 + np.exp(-v["input"][..., 1::2])),
    ),
    Case(
        "slice-shift",
        "the ones before along axis 1",
        lambda _: Own(later),
        lambda v: np.tanh(v["input"][:, 1:5]) * np.exp(v["input"][:, :4]),
    ),
    Case(
        "activation",
        "softmax in the place of sigmoid",
        lambda _: Own(probabilities),
        lambda v: softmax(v["input"]) ** 2 + 0.25,
    ),
    Case(
        "statistics-differ",
        "the standard deviation of the whole in std",
        lambda _: Own(spread),
        lambda v: np.tanh(v["input"] * v["input"].std(-1, keepdims=True)),
    ),
    Case(
        "function-differs",
        "cos of its operand in sin",
        lambda _: Own(angles),
        lambda v: np.cos(v["input"]) + v["input"],
    ),
    Case(
        "operations-order",
        "done behind",
        lambda _: Own(modulated, weight=(16,)),
        lambda v: np.tanh(rms(v["input"]) * v["weight"]) + np.sin(v["input"]),
    ),
    Case(
        "operand-exchanged",
        "as operand 2 of add",
        lambda _: Own(modulated, weight=(16,)),
        lambda v: rms(v["input"]) * np.tanh(v["weight"]) + rms(v["input"]),
    ),
    Case(
        "factor",
        "with 1.1 in the place of 1.5 for a number of pow",
        lambda _: Own(powered),
        lambda v: np.tanh(np.abs(v["input"]) ** 1.1),
    ),
    Case(
        "operand-shift",
        "rolled by 1 along axis 1 in add",
        lambda _: Own(with_waves),
        lambda v: np.tanh(v["input"]) + np.roll(np.sin(2 * v["input"]), 1, 1),
    ),
    Case(
        "state-missing",
        "without `from_state = input.cumsum(1) * 0.1`",
        lambda _: Own(scanned),
        lambda v: np.tanh(v["input"]),
    ),
    Case(
        "layout-differs",
        "its inputs reversed within blocks of 2 in linear",
        lambda _: nn.Linear(16, 12),
        lambda v: v["input"].reshape(4, 7, 8, 2)[..., ::-1].reshape(4, 7, 16) @ v["weight"].T + v["bias"],
    ),
    Case(
        "partial-sum",
        "no columns 16, 17, 18",
        lambda _: nn.Linear(32, 12),
        lambda v: v["input"][..., :16] @ v["weight"][:, :16].T + v["bias"],
        {"input": (4, 7, 32)},
    ),
    Case(
        "weight-offset",
        "a number added to each row",
        lambda _: nn.Linear(16, 12),
        lambda v: v["input"] @ (v["weight"] - v["weight"].min(1, keepdims=True)).T + v["bias"],
    ),
    Case(
        "quantisation-scales",
        "a scale of each 16 weights of a row, given back as if rows and groups were exchanged",
        lambda _: nn.Linear(32, 16, bias=False),
        lambda v: v["input"] @ quarter_scales(v["weight"]).T,
        {"input": (4, 7, 32)},
    ),
]


@pytest.mark.spec("DIA-350", "DIA-351", "DIA-352", "DIA-353", "DIA-354", "DIA-355", "DIA-360")
@pytest.mark.parametrize("case", CASES, ids=[f"{c.kind}-{c.words[:24]}" for c in CASES])
def test_an_operation_that_is_done_otherwise_is_named(tmp_path: Path, case: Case) -> None:
    found = diagnosed_module(case, tmp_path)
    assert found.explanations, found.tried
    first = found.explanations[0]
    assert first.kind == case.kind, first.text
    assert case.words in first.text


@pytest.mark.spec("DIA-350", "DIA-351", "DIA-352", "DIA-354", "DIA-355")
@pytest.mark.parametrize("at", [0, 3, 8, 15])
def test_noise_is_no_operation(tmp_path: Path, at: int) -> None:
    case = CASES[at]
    noise = np.random.default_rng(9)

    def blurred(values: dict[str, Array]) -> Array:
        made = case.made(values)
        return np.asarray(made + noise.standard_normal(made.shape) * np.abs(made).mean())

    assert not diagnosed_module(case._replace(made=blurred), tmp_path).explanations


@pytest.mark.spec("DIA-352")
def test_an_argument_in_another_unit_is_named(tmp_path: Path) -> None:
    model = drawn(Model(lambda _: Own(timed), "module"))  # type: ignore[arg-type]  # it makes a module of a config
    time = np.array([3, 250, 999, 17, 480, 5])
    made = np.cos(time[:, None] / 1000 * np.linspace(0.01, 0.4, 8))
    workload = Workload(model, {"time": torch.from_numpy(time)})
    changed = {"0/module/output": made, "0/@root/output": made}
    first = found_by(workload, changed, tmp_path, "module", "0/module/output").explanations[0]
    assert (first.kind, first.facts["factor"]) == ("input-factor", 1e-3)


class Scaled(nn.Module):
    """A module with settings; `strength` has a name that says nothing."""

    def __init__(self, _: Any, strength: float = 1.0) -> None:
        super().__init__()
        self.strength = strength
        self.heads = 4

    def forward(self, input: Tensor) -> Tensor:
        x = input.reshape(*input.shape[:-1], self.heads, -1)
        normed: Tensor = x * x.square().mean(-1, keepdim=True).rsqrt()
        return normed.flatten(-2).tanh() ** self.strength


@pytest.mark.spec("DIA-356")
def test_a_setting_that_both_archives_have_is_taken_from_the_target(tmp_path: Path) -> None:
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((4, 7, 16)).astype(np.float32))
    models: list[Any] = [Model(Scaled, "module"), Model(Scaled, "module")]
    models[1].module.heads = 8
    for name, model in zip(("ref.h5", "tgt.h5"), models, strict=True):
        capture_workload(Workload(model.eval(), {"input": x}), tmp_path / name)
    workload = Workload(models[0], {"input": x}, seed=0)
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=workload).suspects[0].diagnosis
    assert found is not None
    assert (found.kind, found.facts["target"]) == ("attention-heads", 8)
    assert "as the target has it" in found.text


class Masked(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = x @ x.mT
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, -1e4)
        return scores.softmax(-1) @ x


class Outer(nn.Module):
    """A module whose code hands on a mask, or does not."""

    def __init__(self, *, has_mask: bool) -> None:
        super().__init__()
        self.attention = Masked()
        self.has_mask = has_mask

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril() if self.has_mask else None
        return self.attention(x.tanh(), attention_mask=mask) + x  # type: ignore[no-any-return]


class Around(nn.Module):
    def __init__(self, *, has_mask: bool) -> None:
        super().__init__()
        self.block = Outer(has_mask=has_mask)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.block(x))


@pytest.mark.spec("LCL-220")
def test_who_hands_on_no_mask_is_suspected_and_not_who_is_given_none(tmp_path: Path) -> None:
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((2, 9, 16)).astype(np.float32))
    reference, target = (Workload(Around(has_mask=it).eval(), {"x": x}, seed=0) for it in (True, False))
    capture_workload(reference, tmp_path / "ref.h5")
    capture_workload(target, tmp_path / "tgt.h5")
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=reference)
    assert [suspect.module for suspect in found.suspects] == ["block"]
    assert found.suspects[0].cause == "attention-mask"


def added_before(self: Any, x: Tensor, time: Tensor) -> Tensor:
    return self.out(self.norm(x + time))  # type: ignore[no-any-return]


def added_behind(self: Any, x: Tensor, time: Tensor) -> Tensor:
    return self.out(self.norm(x) + time)  # type: ignore[no-any-return]


class Holder(nn.Module):
    """A block with a norm and a linear layer, and its code."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Own(code)
        self.block.norm, self.block.out = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return functional.relu(self.block(x=x, time=time))


@pytest.mark.spec("LCL-221")
def test_what_is_missing_at_one_place_and_done_at_a_later_one_is_in_another_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    inputs = {n: torch.from_numpy(rng.standard_normal((4, 7, 16)).astype(np.float32)) for n in ("x", "time")}
    reference, target = (
        Workload(Holder(code).eval(), inputs, seed=0) for code in (added_before, added_behind)
    )
    capture_workload(reference, tmp_path / "ref.h5")
    capture_workload(target, tmp_path / "tgt.h5")
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=reference)
    assert [(suspect.module, suspect.cause) for suspect in found.suspects] == [("block", "operations-order")]


@pytest.mark.spec("DIA-357")
def test_the_same_elements_in_any_order_are_told_by_their_strides(diagnosed: Diagnose) -> None:
    r = np.random.default_rng(2).standard_normal((6, 8, 10))
    t = r.reshape(6, 2, 4, 10).transpose(2, 0, 3, 1).reshape(6, 8, 10)
    first = diagnosed(r, t).explanations[0]
    assert first.kind == "element-order"
    assert first.facts["strides"] == [[4, 10], [6, 80], [10, 1], [2, 40]]
    shuffled = np.random.default_rng(3).permutation(r.reshape(-1)).reshape(r.shape)
    assert [e.kind for e in diagnosed(r, shuffled).explanations] == ["element-order"]


@pytest.mark.spec("DIA-357")
def test_other_draws_of_a_distribution_are_no_order(diagnosed: Diagnose) -> None:
    rng = np.random.default_rng(2)
    for precision in ("float32", "bfloat16"):
        sides = rng.standard_normal((2, 16, 24, 32))
        assert not diagnosed(*sides, precision=precision).explanations


@pytest.mark.spec("DIA-358")
def test_what_is_wrong_in_a_mask_is_a_mistake_of_the_mask(diagnosed: Diagnose) -> None:
    mask = np.arange(20) < np.array([[20], [13], [17]])
    shifted = np.arange(20) < np.array([[20], [12], [16]])
    ours, theirs = ({"0/m/input.attention_mask": side.astype(np.int64)} for side in (mask, shifted))
    found = diagnosed(ours, theirs, key="0/m/input.attention_mask")
    assert {e.kind for e in found.explanations if not e.is_location} <= {"attention-mask"}


@pytest.mark.spec("DIA-359")
def test_a_rotary_table_of_more_frequencies_is_named(diagnosed: Diagnose) -> None:
    def table(size: int) -> Array:
        angles = np.arange(24)[:, None] / 1e4 ** (np.arange(0, size, 2) / size)
        return np.cos(np.concatenate((angles, angles), -1))[None]

    first = diagnosed(table(8), table(16)).explanations[0]
    assert first.kind == "rotary-frequencies"
    assert "of 16 frequencies, those of the reference of 8" in first.text
