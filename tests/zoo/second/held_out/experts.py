"""Mixtures of experts: DeepSeek V3, Granite MoE."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.other_ways import ColumnParallel, RowParallel, every_expert
from tests.zoo.planting import computing, override, put, with_values

ATTENTION: Final = "model.layers.1.self_attn"
GATE: Final = "model.layers.2.mlp.gate"
ROUTER: Final = "model.layers.1.block_sparse_moe.router"


def routed(self: Any, hidden_states: Tensor, *, is_softmax: bool, best: int) -> Any:
    """The router by its formula: of groups by the sum of their best experts, then of experts."""
    logits = functional.linear(hidden_states.flatten(0, -2).float(), self.weight.float())
    scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
    groups = (scores + self.e_score_correction_bias).view(len(scores), self.num_group, -1)
    open_groups = groups.topk(best, -1)[0].sum(-1).topk(self.topk_group, -1)[1]
    is_open = torch.zeros_like(groups[..., 0]).scatter(1, open_groups, 1.0).bool()
    indices = torch.where(is_open[..., None], groups, -torch.inf).flatten(1).topk(self.top_k, -1)[1]
    weights = scores.gather(1, indices)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * self.routed_scaling_factor, indices


def groups_by_their_best(self: Any, hidden_states: Tensor) -> Any:
    """Groups chosen by one expert, where by two."""
    return routed(self, hidden_states, is_softmax=False, best=1)


def softmax_for_sigmoid(self: Any, hidden_states: Tensor) -> Any:
    return routed(self, hidden_states, is_softmax=True, best=2)


def turned_part_first(model: Any) -> None:
    """Queries read with the part that is turned first, where it is last."""

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any
    ) -> Any:
        nope, rope, value = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q_rope, q_nope = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).split([rope, nope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([nope, value], -1)

        def turned(x: Tensor) -> Tensor:
            cos, sin = (table[:, None, :, : rope // 2] for table in position_embeddings)
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)

        q = torch.cat((q_nope, turned(q_rope)), -1)
        k = torch.cat((k_nope, turned(k_rope[:, None]).expand(-1, self.num_heads, -1, -1)), -1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    override(model.get_submodule(ATTENTION), forward)


def without_shared_experts(self: Any, hidden_states: Tensor) -> Any:
    _, weights, indices = self.gate(hidden_states)
    return self.experts(hidden_states.flatten(0, 1), indices, weights).view(hidden_states.shape)


def indices_sorted(self: Any, hidden_states: Tensor) -> Any:
    """Experts in the order of their numbers, and weights in the order of their sizes."""
    logits = functional.linear(hidden_states, self.weight).float()
    best, indices = logits.topk(self.top_k, -1)
    return logits, best.softmax(-1).type_as(hidden_states), indices.sort(-1)[0]


MISTAKES: Final = (
    Mistake(
        "deepseek_v3_groups_by_their_best",
        "deepseek_v3",
        GATE,
        "router_order",
        computing(GATE, groups_by_their_best),
        also_kinds=("groups",),
    ),
    Mistake(
        "deepseek_v3_softmax_for_sigmoid",
        "deepseek_v3",
        "model.layers.1.mlp.gate",
        "activation",
        computing("model.layers.1.mlp.gate", softmax_for_sigmoid),
        also_kinds=("router_order",),
    ),
    Mistake(
        "deepseek_v3_turned_part_first",
        "deepseek_v3",
        ATTENTION,
        "permutation",
        turned_part_first,
        also_kinds=("rope", "order"),
    ),
    Mistake(
        "deepseek_v3_without_shared_experts",
        "deepseek_v3",
        "model.layers.1.mlp",
        "residual",
        computing("model.layers.1.mlp", without_shared_experts),
        also_kinds=("missing_module",),
    ),
    Mistake(
        "granitemoe_scale",
        "granitemoe",
        ATTENTION,
        "factor",
        with_values(ATTENTION, scaling=0.25),
    ),
    Mistake(
        "granitemoe_indices_sorted",
        "granitemoe",
        ROUTER,
        "router_order",
        computing(ROUTER, indices_sorted),
        also_kinds=("permutation", "expert_order"),
    ),
    Mistake(
        "granitemoe_embedding_multiplier",
        "granitemoe",
        "model",
        "factor",
        with_values("model", embedding_multiplier=1.0),
    ),
)


def all_experts(model: Any) -> Any:
    for layer in model.model.layers[1:]:
        override(layer.mlp.experts, every_expert)
    return model


def attention_in_parts(model: Any) -> Any:
    """The projections of the attention divided among two devices."""
    for layer in range(3):
        at = f"model.layers.{layer}.self_attn"
        for name in ("q_proj", "k_proj", "v_proj"):
            put(model, f"{at}.{name}", ColumnParallel(model.get_submodule(f"{at}.{name}")))
        put(model, f"{at}.o_proj", RowParallel(model.get_submodule(f"{at}.o_proj")))
    return model


CORRECT: Final = (
    Correct("deepseek_v3_every_expert", "deepseek_v3", all_experts),
    Correct("granitemoe_attention_in_parts", "granitemoe", attention_in_parts),
    Correct("granitemoe_as_it_is", "granitemoe", lambda model: model),
)
