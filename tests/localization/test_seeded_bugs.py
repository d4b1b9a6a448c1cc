"""Five seeded mistakes in a plain Llama in bfloat16: what a free comparison shows, an injected one, a replay.

After a study of seeded port bugs, rebuilt: a free-running comparison with a twin hides mistakes of precision
and floods for large ones; with the reference's inputs injected into each module the ratio R points at the
module, and at those around it; replay names it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorcap.comparison import Comparison, compare
from tensorcap.rerun import inject, replay
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tests.localization.llama import Plant, low_sum, narrow, normed, without_activation
from tests.support.transformers_models import random_model

BLOCK = "model.layers.1"
NORM = f"{BLOCK}.post_attention_layernorm"
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
POINTS = [
    *(site for i in range(4) for site in (*(f"model.layers.{i}.{p}" for p in PARTS), f"model.layers.{i}")),
    "model.norm",
]


def llama() -> Any:
    model = random_model(
        "LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return model


def port(plant: Plant | None) -> Any:
    model = narrow(llama())
    if plant is not None:
        plant(model)
    return model


def workload(model: Any) -> Workload:
    ids = torch.randint(3, 256, (1, 96), generator=torch.Generator().manual_seed(1))
    return Workload(model, {"input_ids": ids, "use_cache": False})


class RoundedSquares(nn.Module):
    """A norm that leaves its whole computation in the dtype of what it is given."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.weight = own.weight

    def forward(self, hidden_states: Any) -> Any:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + 1e-6))


def squares_rounded(model: Any) -> None:
    layer = model.model.layers[1]
    layer.post_attention_layernorm = RoundedSquares(layer.post_attention_layernorm)


def rope_theta(model: Any) -> None:
    frequencies = 1 / 500.0 ** (torch.arange(0, 16, 2).float() / 16)
    model.model.rotary_emb.inv_freq = frequencies


@dataclass(frozen=True)
class Seeded:
    """A mistake, and who is seen by R above 1.2 where the reference's inputs are injected."""

    plant: Plant
    module: str
    is_hidden: bool  # from R of free runs, at the module and after it
    injected: frozenset[str]


SEEDED = {
    "norm-variance-in-bf16": Seeded(normed(low_sum), NORM, is_hidden=True, injected=frozenset({NORM})),
    "norm-squares-rounded": Seeded(squares_rounded, NORM, is_hidden=True, injected=frozenset()),
    "norm-rounded-once": Seeded(
        normed(lambda x: x.float().pow(2).mean(-1, keepdim=True), rounds=False),
        NORM,
        is_hidden=True,
        injected=frozenset(),
    ),
    "no-activation": Seeded(
        without_activation,
        f"{BLOCK}.mlp.act_fn",
        is_hidden=False,
        injected=frozenset({f"{BLOCK}.mlp", BLOCK}),
    ),
    "rope-theta": Seeded(
        rope_theta,
        "model.rotary_emb",
        is_hidden=False,
        injected=frozenset(f"model.layers.{i}{part}" for i in range(4) for part in ("", ".self_attn")),
    ),
}


def ratios(found: Comparison) -> dict[str, float]:
    by_site = {
        pair.reference.key.site: pair.baseline.r
        for pair in found.pairs
        if pair.reference is not None
        and pair.reference.key.slot in ("output", "output.0")
        and pair.baseline is not None
        and pair.baseline.r is not None
    }
    return {site: by_site[site] for site in POINTS}


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., Path]:
    def run(name: str, model: Any, reference: Path | None = None) -> Path:
        path = tmp_path / f"{name}.h5"
        if reference is None:
            capture_workload(workload(model), path)
        else:
            inputs = [f"0/{site}/input.{slot}" for site in POINTS for slot in ("hidden_states", "x")]
            known = [glob for glob in inputs if ("/input.x" in glob) == glob.split("/")[1].endswith("mlp")]
            inject(reference, workload(model), path, inputs=known)
        return path

    return run


@pytest.mark.sampled
@pytest.mark.spec("RPL-7")
@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_mistake_is_seen_where_the_table_says_and_caught_by_replay(
    runs: Callable[..., Path], name: str
) -> None:
    seeded = SEEDED[name]
    reference, twin = runs("reference", llama()), runs("twin", port(None))
    target = runs("target", port(seeded.plant))
    free = ratios(compare(reference, target, baseline=twin))
    after = [free[site] for site in POINTS[POINTS.index(NORM) :]]
    assert (max(after) < 1.2) == seeded.is_hidden
    if not seeded.is_hidden:
        assert max(after) > 10
        assert sum(value > 1.2 for value in free.values()) >= 13  # of 21 points: a flood

    own, own_twin = (
        runs(f"injected-{what}", model, reference)
        for what, model in (("target", port(seeded.plant)), ("twin", port(None)))
    )
    injected = ratios(compare(reference, own, baseline=own_twin))
    assert {site for site, value in injected.items() if value > 1.2} == seeded.injected
    rest = set(POINTS) - seeded.injected - {NORM, BLOCK}
    assert {round(injected[site], 6) for site in rest} == {1.0}

    for found in (
        replay(reference, target, reference_model=workload(llama())),
        replay(
            reference, target, target_model=workload(port(seeded.plant)), reference_model=workload(llama())
        ),
    ):
        caught = {one.module for one in found.bad} or {one.module for one in found.precise}
        assert caught == {seeded.module}
        assert bool(found.bad) == (name != "norm-rounded-once")


@pytest.mark.slow
def test_a_correct_port_shows_nothing_anywhere(runs: Callable[..., Path]) -> None:
    reference, twin, target = (
        runs("reference", llama()),
        runs("twin", port(None)),
        runs("target", port(None)),
    )
    assert set(ratios(compare(reference, target, baseline=twin)).values()) == {1.0}
    found = replay(reference, target, reference_model=workload(llama()))
    assert (found.bad, found.precise) == ([], [])
