"""Weights of experts of real models, from other scores or at another place, written out in torch."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tests.support.transformers_models import random_model

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DEEPSEEK = {
    **SIZES,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MIXTRAL = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def make(name: str, config: dict[str, Any]) -> Any:
    model = random_model(name, **config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim > 1 or path.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


def first_suspect(
    folder: Path, name: str, config: dict[str, Any], site: str, forward: Callable[..., Any]
) -> tuple[str, str, str] | None:
    """Module, kind and text; None if nobody is accused."""
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "use_cache": False}
    target = make(name, config)
    module = target.get_submodule(site)
    module.forward = types.MethodType(forward, module)
    ours = Workload(make(name, config), inputs)
    capture_workload(ours, folder / "reference.h5")
    capture_workload(Workload(target, inputs), folder / "target.h5")
    found = localize(folder / "reference.h5", folder / "target.h5", reference_model=ours)
    if not found.suspects:
        return None
    diagnosis = found.suspects[0].diagnosis
    assert diagnosis is not None
    return found.suspects[0].module, diagnosis.kind, diagnosis.text


def gate(is_biased: bool) -> Callable[[Any, Tensor], Any]:
    """The router of DeepSeek V3: experts of the better group by biased scores, the best by these."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        logits = functional.linear(hidden_states.flatten(0, -2).float(), self.weight.float())
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        groups = biased.unflatten(-1, (2, 4))
        best = groups.topk(2, -1)[0].sum(-1).argmax(-1)
        is_open = functional.one_hot(best, 2).bool()[..., None].expand_as(groups).flatten(-2)
        chosen = biased.masked_fill(~is_open, -torch.inf).topk(2, -1)[1]
        weights = (biased if is_biased else scores).gather(1, chosen)
        return logits, 2.5 * weights / weights.sum(-1, keepdim=True), chosen

    return forward


def experts(weighs_inputs: bool) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for token, choice in torch.cartesian_prod(*map(torch.arange, top_k_index.shape)).tolist():
            expert, weight = top_k_index[token, choice], top_k_weights[token, choice]
            x = hidden_states[token] * weight if weighs_inputs else hidden_states[token]
            gate, up = functional.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            result[token] += y if weighs_inputs else y * weight
        return result

    return forward


@pytest.mark.slow
@pytest.mark.spec("DIA-123")
def test_weights_from_scores_with_the_bias_of_the_choice_are_said(tmp_path: Path) -> None:
    site = "model.layers.1.mlp.gate"
    found = first_suspect(tmp_path, "DeepseekV3ForCausalLM", DEEPSEEK, site, gate(is_biased=True))
    assert found is not None
    assert found[:2] == (site, "router-bias")
    assert "output.0 plus e_score_correction_bias, renormalised" in found[2]


@pytest.mark.slow
@pytest.mark.spec("DIA-126")
def test_weights_that_multiply_inputs_of_experts_are_said(tmp_path: Path) -> None:
    site = "model.layers.1.mlp.experts"
    found = first_suspect(tmp_path, "MixtralForCausalLM", MIXTRAL, site, experts(weighs_inputs=True))
    assert found is not None
    assert found[:2] == (site, "router-inputs")


@pytest.mark.slow
@pytest.mark.spec("DIA-123", "DIA-126")
@pytest.mark.parametrize(
    ("name", "config", "site", "forward"),
    [
        ("DeepseekV3ForCausalLM", DEEPSEEK, "model.layers.1.mlp.gate", gate(is_biased=False)),
        ("MixtralForCausalLM", MIXTRAL, "model.layers.1.mlp.experts", experts(weighs_inputs=False)),
    ],
    ids=["gate", "experts"],
)
def test_the_same_written_out_is_no_suspect(
    tmp_path: Path, name: str, config: dict[str, Any], site: str, forward: Callable[..., Any]
) -> None:
    assert first_suspect(tmp_path, name, config, site, forward) is None
