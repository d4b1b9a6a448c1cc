"""Near ties of routers that sort tokens by expert (JetMoE), and of thresholds of scores (PhiMoE)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import JetMoeConfig, JetMoeForCausalLM, PhimoeConfig, PhimoeForCausalLM

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

EXPERTS = 8


def jetmoe(seed: int) -> Any:
    torch.manual_seed(seed)
    make: Any = JetMoeConfig
    config = make(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_key_value_heads=2,
        kv_channels=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    model: Any = JetMoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1)
    return model.eval()


def phimoe(seed: int) -> Any:
    torch.manual_seed(seed)
    make: Any = PhimoeConfig
    config = make(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    model: Any = PhimoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1)
    return model.eval()


def narrow(model: Any) -> Any:
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name in frequencies:
            buffer.data = frequencies[name]
    return model


def captured(
    folder: Path, seed: int, target: Any, make: Any = jetmoe
) -> tuple[Path, Path, Workload, Workload]:
    ids = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(seed))
    ours, theirs = (Workload(model, {"input_ids": ids, "use_cache": False}) for model in (make(seed), target))
    capture_workload(ours, folder / "ref.h5")
    capture_workload(theirs, folder / "tgt.h5")
    return folder / "ref.h5", folder / "tgt.h5", ours, theirs


@pytest.mark.sampled
@pytest.mark.spec("POL-212")
@pytest.mark.parametrize("by", ["archives", "replay", "injection"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_right_port_accuses_nobody(tmp_path: Path, seed: int, by: str) -> None:
    reference, target, ours, theirs = captured(tmp_path, seed, narrow(jetmoe(seed)))
    pairs = {pair.key: pair for pair in compare(reference, target).pairs}
    chosen = pairs["0/model.layers.0.mlp.router/output.0"]
    assert chosen.reference is not None
    assert chosen.reference.shape == (2 * 80,)  # two of eight experts for each of 80 tokens
    assert any(pair.status == "excluded" for pair in pairs.values())
    found = localize(
        reference,
        target,
        reference_model=ours if by == "replay" else None,
        target_model=theirs if by == "injection" else None,
    )
    assert [suspect.module for suspect in found.suspects] == []


@pytest.mark.slow
@pytest.mark.spec("POL-212")
@pytest.mark.parametrize("by", ["archives", "replay"])
def test_experts_in_another_order_are_wrong_though_tokens_moved(tmp_path: Path, by: str) -> None:
    port = narrow(jetmoe(1))
    weight = port.model.layers[1].mlp.output_linear.weight
    weight.data = weight.data.roll(1, 0)
    reference, target, ours, _ = captured(tmp_path, 1, port)
    found = localize(reference, target, reference_model=ours if by == "replay" else None)
    assert found.exit_status == 1
    assert all(suspect.module.startswith("model.layers.1.mlp") for suspect in found.suspects)
    assert bool(found.suspects) == (by == "replay")  # archives alone do not know who got which tokens


@pytest.mark.spec("POL-212")
def test_other_choices_than_by_near_ties_differ(tmp_path: Path) -> None:
    port = jetmoe(1)
    layer = port.model.layers[0].mlp.router.layer
    layer.weight.data = layer.weight.data.flip(0)
    reference, target, *_ = captured(tmp_path, 1, port)
    found = compare(reference, target)
    assert found.exit_status == 1
    assert found.divergence is not None
    assert found.divergence.module.startswith("model.layers.0.mlp.router")


@pytest.mark.slow
@pytest.mark.spec("POL-213")
@pytest.mark.parametrize("by", ["archives", "injection"])
def test_tokens_at_a_threshold_of_scores_accuse_nobody(tmp_path: Path, by: str) -> None:
    reference, target, _, theirs = captured(tmp_path, 0, narrow(phimoe(0)), phimoe)
    found = localize(reference, target, target_model=theirs if by == "injection" else None)
    assert [suspect.module for suspect in found.suspects] == []


@pytest.mark.spec("POL-213")
def test_weights_that_jump_for_many_tokens_accuse_the_router(tmp_path: Path) -> None:
    port = phimoe(0)
    port.model.layers[1].mlp.router.router_jitter_noise = 0.3  # thresholds 30 times as far away
    reference, target, _, theirs = captured(tmp_path, 0, narrow(port), phimoe)
    found = localize(reference, target, target_model=theirs)
    assert [suspect.module for suspect in found.suspects] == ["model.layers.1.mlp.router"]
