"""Mistakes in mixtures of experts: Mixtral, Qwen3-MoE, GPT-OSS."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import Mistake
from tests.zoo.planting import activated, computing, with_config, with_tensors, with_values

GATE: Final = "model.layers.1.mlp.gate"
ROUTER: Final = "model.layers.1.mlp.router"
EXPERTS: Final = "model.layers.1.mlp.experts"


def chosen_and_not_normalised(self: Any, hidden_states: Tensor) -> Any:
    logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores, indices = torch.topk(torch.softmax(logits.float(), -1), self.top_k, -1)
    return logits, scores, indices


def low_router(self: Any, hidden_states: Tensor) -> Any:
    logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores, indices = torch.topk(torch.softmax(logits, -1), self.top_k, -1)
    return logits, scores / scores.sum(-1, keepdim=True), indices


def softmax_over_all(self: Any, hidden_states: Tensor) -> Any:
    logits = functional.linear(hidden_states, self.weight, self.bias)
    scores, indices = torch.topk(torch.softmax(logits, -1), self.top_k, -1)
    return logits, scores, indices


def one_expert_each(self: Any, hidden_states: Tensor) -> Any:
    """The first chosen expert alone, the weight of the second lost."""
    logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores, indices = torch.topk(torch.softmax(logits.float(), -1), self.top_k, -1)
    scores = scores / scores.sum(-1, keepdim=True)
    scores[:, 1:] = 0
    return logits, scores.to(logits.dtype), indices


def halves_exchanged(x: Tensor) -> Tensor:
    return x.roll(x.shape[1] // 2, 1)


def gate_in_blocks(x: Tensor) -> Tensor:
    """Gate and up side by side, read as one block after the other."""
    return torch.cat((x[..., : x.shape[-1] // 2, None], x[..., x.shape[-1] // 2 :, None]), -1).flatten(-2)


def without_one_plus(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2].clamp(max=1.0), gate_up[..., 1::2].clamp(-1.0, 1.0)
        return up * gate * torch.sigmoid(1.702 * gate)

    experts._apply_gate = gated


EXPERT_MISTAKES: Final = (
    Mistake(
        "mixtral_not_normalised",
        "mixtral",
        GATE,
        "router_order",
        computing(GATE, chosen_and_not_normalised),
        also_kinds=("factor",),
    ),
    Mistake(
        "mixtral_expert_order",
        "mixtral",
        EXPERTS,
        "expert_order",
        with_tensors(EXPERTS, gate_up_proj=lambda w: w.roll(1, 0), down_proj=lambda w: w.roll(1, 0)),
    ),
    Mistake(
        "mixtral_gate_and_up",
        "mixtral",
        EXPERTS,
        "permutation",
        with_tensors(EXPERTS, gate_up_proj=halves_exchanged),
        also_kinds=("activation",),
    ),
    Mistake("mixtral_one_expert", "mixtral", GATE, "router_order", computing(GATE, one_expert_each)),
    Mistake(
        "qwen3_moe_not_normalised",
        "qwen3_moe",
        GATE,
        "router_order",
        with_values(GATE, norm_topk_prob=False),
        also_kinds=("factor",),
    ),
    Mistake("qwen3_moe_router_precision", "qwen3_moe", GATE, "precision", computing(GATE, low_router)),
    Mistake(
        "qwen3_moe_activation",
        "qwen3_moe",
        f"{EXPERTS}.act_fn",
        "activation",
        activated(f"{EXPERTS}.act_fn", functional.gelu),
    ),
    Mistake(
        "gpt_oss_sinks",
        "gpt_oss",
        "model.layers.1.self_attn",
        "missing_module",
        with_tensors("model.layers.1.self_attn", sinks=lambda s: torch.full_like(s, -1e9)),
        also_kinds=("factor", "bias"),
    ),
    Mistake("gpt_oss_limit", "gpt_oss", EXPERTS, "clip", with_values(EXPERTS, limit=1e9)),
    Mistake("gpt_oss_alpha", "gpt_oss", EXPERTS, "activation", with_values(EXPERTS, alpha=1.0)),
    Mistake(
        "gpt_oss_up_offset",
        "gpt_oss",
        EXPERTS,
        "offset",
        without_one_plus,
        also_kinds=("activation",),
    ),
    Mistake(
        "gpt_oss_gate_in_blocks",
        "gpt_oss",
        EXPERTS,
        "permutation",
        with_tensors(EXPERTS, gate_up_proj=gate_in_blocks, gate_up_proj_bias=gate_in_blocks),
    ),
    Mistake(
        "gpt_oss_table_factor",
        "gpt_oss",
        "model.rotary_emb",
        "factor",
        with_values("model.rotary_emb", attention_scaling=1.0),
        also_kinds=("rope",),
    ),
    Mistake(
        "gpt_oss_window_ignored",
        "gpt_oss",
        "model",
        "window",
        with_config("model", layer_types=["full_attention"] * 3),
        also_kinds=("mask",),
    ),
    Mistake(
        "gpt_oss_softmax_over_all",
        "gpt_oss",
        ROUTER,
        "router_order",
        computing(ROUTER, softmax_over_all),
        also_kinds=("factor",),
    ),
)
