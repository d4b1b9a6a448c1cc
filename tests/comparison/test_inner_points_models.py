"""Ops, functions, probes and gradients of real models: correct runs are not accused, mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.alignment import sides
from tensorcap.comparison import Comparison, compare
from tensorcap_formats.open import open_archive
from tests.zoo.deep_mistakes import MISTAKES
from tests.zoo.deep_models import archive_of, make, tokens

LAYERS = 2
ARCHITECTURES = ("llama", "gpt2", "qwen3_moe")


def eager(architecture: str, dtype: str = "float32") -> Any:
    model = make(architecture, std=0.02, layers=LAYERS, dtype=dtype)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ops")


def reference(folder: Path, architecture: str) -> Path:
    path = folder / f"{architecture}.h5"
    return path if path.exists() else archive_of(eager(architecture), path, level="op")


def ops_of(comparison: Comparison) -> int:
    return sum(pair.is_compared and ":" in pair.key for pair in comparison.pairs)


@pytest.mark.spec("POL-26")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_low_precision_twin_is_within_rounding_op_by_op(folder: Path, architecture: str) -> None:
    twin = archive_of(eager(architecture, "bfloat16"), folder / "twin.h5", level="op")
    found = compare(reference(folder, architecture), twin)
    assert [(p.key, p.findings) for p in found.pairs if p.is_required and not p.is_green] == []
    assert found.exit_status == 0
    assert ops_of(found) > 50
    assert not [p.key for p in found.pairs if p.is_required and p.reference and not p.target]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", "float32"), ("gpt2", "bfloat16"), ("qwen3_moe", "float32"), ("qwen3_moe", "bfloat16")],
)
def test_a_wrong_scale_is_found_at_its_op_with_its_argument(
    folder: Path, architecture: str, dtype: str
) -> None:
    model = eager(architecture, dtype)
    site = MISTAKES["attention_scale_1.5"](model, 1)
    found = compare(reference(folder, architecture), archive_of(model, folder / "wrong.h5", level="op"))
    assert found.divergence is not None
    assert found.divergence.module == site
    assert found.divergence.pair.key.startswith(f"0/{site}:aten.mul.Tensor")
    place = found.divergence.pair.key.rpartition("/")[0]
    assert [(v.key, v.reference, v.target) for v in found.value_differences] == [
        (f"{place}/op.other", 0.25, 0.375)
    ]


def test_a_sum_that_is_missing_is_named_and_shifts_no_other(folder: Path) -> None:
    model = eager("llama", "bfloat16")
    block = model.model.layers[1]
    whole = block.forward

    def forward(hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """As the model's own, without the residual around the attention."""
        attended, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **options)
        out: torch.Tensor = attended + block.mlp(block.post_attention_layernorm(attended))
        return out

    block.forward = forward
    found = compare(reference(folder, "llama"), archive_of(model, folder / "wrong.h5", level="op"))
    block.forward = whole
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.pair.status) == ("model.layers.1", "suspect")
    by_key = {pair.key: pair for pair in found.pairs}
    assert by_key["0/model.layers.1:aten.add.Tensor/output"].status == "missing-in-target"
    last = by_key["0/model.layers.1:aten.add.Tensor@1/output"]
    assert last.target is not None
    assert last.target.key.text == "0/model.layers.1:aten.add.Tensor/output"


def test_another_attention_has_other_ops_and_the_rest_is_compared(folder: Path) -> None:
    fused = archive_of(make("llama", std=0.02, layers=LAYERS), folder / "fused.h5", level="op")
    found = compare(reference(folder, "llama"), fused)
    assert found.exit_status == 0
    absent = [p for p in found.pairs if p.reference and not p.target and p.status != "excluded"]
    assert {p.status for p in absent} == {"explained"}  # its scores, and all that is made of them alone
    lost = {p.key.partition(":aten.")[2].partition(".")[0] for p in found.pairs if not p.target}
    assert {"bmm", "_softmax"} <= lost
    assert {p.status for p in found.pairs if p.is_compared} <= {"identical", "match", "within-rounding"}
    without = compare(reference(folder, "llama"), fused, exclude=["*:*", "*attention_mask", "*/output.1"])
    assert without.exit_status == 0


@pytest.mark.spec("POL-29")
def test_gradients_and_parameters_of_a_twin_are_within_rounding(folder: Path) -> None:
    def run(dtype: str, plant: Callable[[Any], None] = lambda model: None) -> Path:
        model = eager("llama", dtype)
        plant(model)
        path = folder / f"grads-{dtype}.h5"
        with tensorcap.capture(model, path, grads=True, params=True):
            model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        return path

    whole = run("float32")
    found = compare(whole, run("bfloat16"))
    assert found.exit_status == 0
    kinds = {p.key.rpartition("/")[2].partition(".")[0] for p in found.pairs if p.is_compared}
    assert {"grad_output", "grad_param", "param", "buffer", "output"} <= kinds

    def plant(model: Any) -> None:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[5, 7] += 0.01

    wrong = compare(whole, run("bfloat16", plant))
    assert wrong.divergence is not None
    assert wrong.divergence.pair.key == "0/model.layers.1.mlp.up_proj/param.weight"


class One(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = tensorcap.probe("gate", x.sigmoid())
        return gate * x


class Other(nn.Module):
    """The same, from other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = One()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.inner(x)
        return gated


def test_a_probe_pairs_by_its_name_wherever_it_stands(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 256).reshape(4, 64)
    paths = []
    for model in (One(), Other()):
        paths.append(tmp_path / f"{type(model).__name__}.h5")
        with torch.no_grad(), tensorcap.capture(model, paths[-1]):
            model(x)
    found = compare(*paths)
    (pair,) = [pair for pair in found.pairs if pair.key.startswith("0/probe:")]
    assert (pair.key, pair.status) == ("0/probe:gate/value", "identical")
    assert found.value_differences == ()


class Feed(nn.Module):
    """Two linears with an activation of a class between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.act(self.up(x)).square())


class InlineFeed(nn.Module):
    """The same under other names, with the activation in its own code."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self.grow, self.shrink = feed.up, feed.down

    def forward(self, x: torch.Tensor) -> Any:
        return self.shrink(torch.relu(self.grow(x)).square())


@pytest.mark.spec("CMP-30")
def test_an_op_of_the_target_may_stand_for_a_module_of_the_reference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    feed = Feed()
    for name, model in (("ref", feed), ("tgt", InlineFeed(feed))):
        with torch.no_grad(), tensorcap.capture(model, tmp_path / f"{name}.h5", level="op"):
            model(torch.linspace(-1, 1, 128).reshape(4, 32))
    with open_archive(tmp_path / "ref.h5") as ours, open_archive(tmp_path / "tgt.h5") as theirs:
        found = compare(*sides(ours, theirs, None), mapping="none")
    targets = {pair.key: pair.target and pair.target.key.text for pair in found.pairs if pair.is_compared}
    assert targets["0/act/output"] is not None
    assert targets["0/@root:aten.pow.Tensor_Scalar/output"] is not None
    assert [pair.key for pair in found.pairs if pair.is_required and not pair.is_green] == []
