"""Mixtures of experts: DeepSeek V3, Granite MoE."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.other_ways import every_expert, linear
from tests.zoo.planting import computing, module_at, override, removed, with_config, with_values

ATTENTION: Final = "model.layers.1.self_attn"
GATE: Final = "model.layers.1.mlp.gate"
ROUTER: Final = "model.layers.1.block_sparse_moe.router"
EXPERTS: Final = "model.layers.1.block_sparse_moe.experts"


def routed(self: Any, hidden_states: Tensor, is_bias_kept: bool) -> Any:
    """The router by its formula: two of four groups, three experts of theirs, weights that sum to 2.5."""
    logits = functional.linear(hidden_states.flatten(0, -2).float(), self.weight.float())
    scores = logits.sigmoid()
    choice = scores + self.e_score_correction_bias
    groups = choice.unflatten(-1, (self.num_group, -1))
    best = groups.topk(2, -1)[0].sum(-1).topk(self.topk_group, -1)[1]
    is_open = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0).bool()
    choice = torch.where(is_open[..., None], groups, -torch.inf).flatten(1)
    indices = choice.topk(self.top_k, -1)[1]
    weights = (choice if is_bias_kept else scores).gather(1, indices)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * self.routed_scaling_factor, indices


def biased_weights(self: Any, hidden_states: Tensor) -> Any:
    """The bias that balances the choice is left in the weights."""
    return routed(self, hidden_states, True)


def dropped_beyond_capacity(model: Any) -> None:
    """Each expert takes so many tokens, the first ones, and drops the others."""
    experts = module_at(model, EXPERTS)
    inner = type(experts).forward

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        capacity = top_k_index.numel() // self.num_experts
        taken = functional.one_hot(top_k_index.flatten(), self.num_experts).cumsum(0)
        place = taken.gather(1, top_k_index.flatten()[:, None]).view(top_k_index.shape)
        return inner(self, hidden_states, top_k_index, top_k_weights * (place <= capacity))

    override(experts, forward)


MISTAKES: Final = (
    Mistake(
        "deepseek_v3_scale_without_mscale",
        "deepseek_v3",
        ATTENTION,
        "factor",
        with_values(ATTENTION, scaling=24**-0.5),
    ),
    Mistake(
        "deepseek_v3_biased_weights",
        "deepseek_v3",
        GATE,
        "router_order",
        computing(GATE, biased_weights),
        also_kinds=("bias",),
    ),
    Mistake(
        "deepseek_v3_rope_in_halves",
        "deepseek_v3",
        ATTENTION,
        "rope",
        with_config(ATTENTION, rope_interleave=False),
    ),
    Mistake(
        "deepseek_v3_latent_norm",
        "deepseek_v3",
        f"{ATTENTION}.kv_a_layernorm",
        "missing_module",
        removed(f"{ATTENTION}.kv_a_layernorm"),
    ),
    Mistake(
        "granitemoe_one_expert_more",
        "granitemoe",
        ROUTER,
        "router_order",
        with_values(ROUTER, top_k=4),
        also_kinds=("factor",),
    ),
    Mistake(
        "granitemoe_residual_multiplier",
        "granitemoe",
        "model.layers.1",
        "factor",
        with_values("model.layers.1", residual_multiplier=1.0),
        also_kinds=("residual",),
    ),
    Mistake(
        "granitemoe_logits_multiplied",
        "granitemoe",
        "@root",
        "factor",
        with_config("@root", logits_scaling=0.25),
    ),
    Mistake(
        "granitemoe_capacity",
        "granitemoe",
        EXPERTS,
        "capacity",
        dropped_beyond_capacity,
        also_kinds=("missing_module",),
    ),
)


def keys_absorbed(model: Any) -> Any:
    """Latent attention as it is decoded: queries against latents, and values made of attended latents."""

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any
    ) -> Any:
        nope, rope, value = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, rope], -1)
        latent = self.kv_a_layernorm(latent)

        def turned(x: Tensor) -> Tensor:
            cos, sin = (table[:, None, :, : rope // 2] for table in position_embeddings)
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)

        k_maps, v_maps = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split([nope, value], 1)
        absorbed = torch.einsum("bhld,hdr->bhlr", q[..., :nope], k_maps)
        scores = absorbed @ latent[:, None].mT + turned(q[..., nope:]) @ turned(k_rope[:, None]).mT
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = (scores * self.scaling).masked_fill(~causal, -torch.inf)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        out = torch.einsum("bhlr,hdr->bhld", weights @ latent[:, None], v_maps)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    for layer in model.model.layers:
        override(layer.self_attn, forward)
    return model


def all_experts(model: Any) -> Any:
    for layer in model.model.layers:
        override(layer.block_sparse_moe.experts, every_expert)
    return model


class LinearRouter(nn.Module):
    """A router whose weight is that of a linear map within it, as it was in older versions."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.layer, self.top_k = linear(router.weight), router.top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.layer(hidden_states).float()
        best, indices = logits.topk(self.top_k, -1)
        return logits, best.softmax(-1).type_as(hidden_states), indices


def routers_with_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.block_sparse_moe.router = LinearRouter(layer.block_sparse_moe.router).eval()
    return model


CORRECT: Final = (
    Correct("deepseek_v3_keys_absorbed", "deepseek_v3", keys_absorbed),
    Correct("deepseek_v3_as_it_is", "deepseek_v3", lambda model: model),
    Correct("granitemoe_routers_with_layers", "granitemoe", routers_with_layers),
    Correct("granitemoe_every_expert", "granitemoe", all_experts),
)
