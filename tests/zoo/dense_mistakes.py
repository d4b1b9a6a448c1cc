"""Mistakes in decoders without experts: Llama, Qwen3, GPT-2."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import Mistake
from tests.zoo.planting import (
    activated,
    attending,
    computing,
    fed,
    interleaved,
    rebound,
    removed,
    returning,
    rotate_pairs,
    sequential_sum,
    with_tensors,
    with_values,
)

ATTENTION: Final = "model.layers.1.self_attn"


def frequencies(theta: float, head: int = 16) -> Tensor:
    return 1 / theta ** (torch.arange(0, head, 2) / head)


def norm_with_low_variance(self: Any, x: Tensor) -> Tensor:
    variance = sequential_sum(x * x)[..., None] / x.shape[-1]
    out: Tensor = self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))
    return out


def norm_with_rounded_squares(self: Any, x: Tensor) -> Tensor:
    variance = (x * x).float().mean(-1, keepdim=True)
    normed = x.float() * torch.rsqrt(variance + self.variance_epsilon)
    out: Tensor = self.weight * normed.to(x.dtype)
    return out


def summed_in_low_precision(self: Any, x: Tensor) -> Tensor:
    parts = [part @ weight.T for part, weight in zip(x.chunk(16, -1), self.weight.chunk(16, -1), strict=True)]
    out: Tensor = sequential_sum(torch.stack(parts, -1))
    return out if self.bias is None else out + self.bias


def tiled_heads(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """Heads of queries take turns with those of keys, where neighbours have to share one."""
    turns = [0, 2, 1, 3]
    out, weights = attend(module, q[:, turns], k, v, mask, **options)
    return out[:, :, turns], weights


def sees_the_next(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, **options: Any) -> Any:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)[None, None]
    return attend(module, q, k, v, mask, **options)


def low_softmax(
    attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, *, scaling: float, **options: Any
) -> Any:
    """Softmax step by step in the dtype of the queries."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = (q @ k.mT * scaling).masked_fill(~causal, -torch.inf)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = powers / sequential_sum(powers)[..., None]
    return (weights @ v).transpose(1, 2).contiguous(), None


def low_tables(self: Any, x: Tensor, position_ids: Tensor) -> Any:
    """Positions and frequencies multiplied in the dtype of the activations."""
    angles = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def block_without_residual(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """Without the sum around the attention."""
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
    out: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
    return out


def gate_and_up_exchanged(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
    return out


def positions_from_one(_: Any, given: dict[str, Any]) -> None:
    given["position_ids"] = torch.arange(1, given["input_ids"].shape[1] + 1)[None]


def last_position_again(_: Any, given: dict[str, Any]) -> None:
    """A token that is decoded has the position of the last one in the cache."""
    cache = given.get("cache") or given.get("past_key_values")
    past = 0 if cache is None else cache.get_seq_length()
    if past:
        given["position_ids"] = torch.arange(past - 1, past - 1 + given["input_ids"].shape[1])[None]


def dropping(model: Any) -> None:
    dropout = model.transformer.h[1].mlp.dropout
    dropout.p = 0.1
    dropout.train()


def heads_before_parts(x: Tensor) -> Tensor:
    """Queries, keys and values head by head, where they lie in blocks."""
    return x.reshape(*x.shape[:-1], 4, 3, 16).transpose(-3, -2).flatten(-3)


LLAMA: Final = (
    Mistake(
        "llama_rope_theta",
        "llama",
        "model.rotary_emb",
        "rope",
        with_tensors("model.rotary_emb", inv_freq=lambda before: before * frequencies(50) / frequencies(10)),
    ),
    Mistake(
        "llama_rope_scaling",
        "llama",
        "model.rotary_emb",
        "rope",
        with_tensors("model.rotary_emb", inv_freq=lambda before: frequencies(10_000)),
    ),
    Mistake(
        "llama_rope_layout", "llama", ATTENTION, "rope", rebound(ATTENTION, apply_rotary_pos_emb=rotate_pairs)
    ),
    Mistake(
        "llama_rope_keys_layout",
        "llama",
        f"{ATTENTION}.k_proj",
        "permutation",
        with_tensors(
            f"{ATTENTION}.k_proj",
            weight=lambda w: w[interleaved(2, 16)],
            bias=lambda b: b[interleaved(2, 16)],
        ),
        also_kinds=("rope",),
    ),
    Mistake("llama_attention_scale", "llama", ATTENTION, "factor", with_values(ATTENTION, scaling=1.0)),
    Mistake(
        "llama_attention_scale_of_width",
        "llama",
        ATTENTION,
        "factor",
        with_values(ATTENTION, scaling=64**-0.5),
    ),
    Mistake("llama_kv_repeat", "llama", ATTENTION, "permutation", attending(ATTENTION, tiled_heads)),
    Mistake("llama_mask_off_by_one", "llama", ATTENTION, "mask", attending(ATTENTION, sees_the_next)),
    Mistake(
        "llama_residual_twice",
        "llama",
        "model.layers.1",
        "residual",
        returning("model.layers.1", lambda out, hidden_states, *_: out + hidden_states),
    ),
    Mistake(
        "llama_norm_eps",
        "llama",
        "model.layers.0.input_layernorm",
        "norm_eps",
        with_values("model.layers.0.input_layernorm", variance_epsilon=1e-5),
    ),
    Mistake(
        "llama_norm_variance",
        "llama",
        "model.layers.1.post_attention_layernorm",
        "precision",
        computing("model.layers.1.post_attention_layernorm", norm_with_low_variance),
    ),
    Mistake(
        "llama_norm_squares",
        "llama",
        "model.layers.1.input_layernorm",
        "precision",
        computing("model.layers.1.input_layernorm", norm_with_rounded_squares),
    ),
    Mistake(
        "llama_head_tied",
        "llama",
        "lm_head",
        "tied_head",
        lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    ),
    Mistake(
        "llama_head_shifted",
        "llama",
        "lm_head",
        "shift",
        returning("lm_head", lambda out, *_: out.roll(1, 1)),
    ),
    Mistake("llama_cache_position", "llama_decode", "model", "position", fed("model", last_position_again)),
)

QWEN3: Final = (
    Mistake(
        "qwen3_key_norm",
        "qwen3",
        f"{ATTENTION}.k_norm",
        "missing_module",
        removed(f"{ATTENTION}.k_norm"),
    ),
    Mistake(
        "qwen3_value_bias",
        "qwen3",
        f"{ATTENTION}.v_proj",
        "bias",
        with_tensors(f"{ATTENTION}.v_proj", bias=torch.zeros_like),
        also_kinds=("offset",),
    ),
    Mistake(
        "qwen3_output_transposed",
        "qwen3",
        f"{ATTENTION}.o_proj",
        "transposition",
        with_tensors(f"{ATTENTION}.o_proj", weight=lambda w: w.T),
    ),
    Mistake(
        "qwen3_output_accumulation",
        "qwen3",
        f"{ATTENTION}.o_proj",
        "precision",
        computing(f"{ATTENTION}.o_proj", summed_in_low_precision),
    ),
    Mistake("qwen3_softmax_precision", "qwen3", ATTENTION, "precision", attending(ATTENTION, low_softmax)),
    Mistake(
        "qwen3_rope_precision",
        "qwen3",
        "model.rotary_emb",
        "precision",
        computing("model.rotary_emb", low_tables),
        also_kinds=("rope",),
    ),
    Mistake(
        "qwen3_no_activation",
        "qwen3",
        "model.layers.1.mlp.act_fn",
        "activation",
        removed("model.layers.1.mlp.act_fn"),
        also_kinds=("missing_module",),
    ),
    Mistake(
        "qwen3_gate_and_up",
        "qwen3",
        "model.layers.1.mlp",
        "permutation",
        computing("model.layers.1.mlp", gate_and_up_exchanged),
        also_kinds=("activation",),
    ),
    Mistake(
        "qwen3_residual_missing",
        "qwen3",
        "model.layers.1",
        "residual",
        computing("model.layers.1", block_without_residual),
    ),
)

GPT2: Final = (
    Mistake(
        "gpt2_gelu_erf",
        "gpt2",
        "transformer.h.1.mlp.act",
        "activation",
        activated("transformer.h.1.mlp.act", functional.gelu),
    ),
    Mistake(
        "gpt2_positions_from_one", "gpt2", "transformer", "position", fed("transformer", positions_from_one)
    ),
    Mistake(
        "gpt2_qkv_order",
        "gpt2",
        "transformer.h.1.attn.c_attn",
        "permutation",
        with_tensors("transformer.h.1.attn.c_attn", weight=heads_before_parts, bias=heads_before_parts),
    ),
    Mistake("gpt2_dropout", "gpt2", "transformer.h.1.mlp.dropout", "dropout", dropping),
    Mistake(
        "gpt2_norm_eps",
        "gpt2",
        "transformer.h.0.ln_1",
        "norm_eps",
        with_values("transformer.h.0.ln_1", eps=1e-12),
    ),
    Mistake(
        "gpt2_conv1d_transposed",
        "gpt2",
        "transformer.h.1.attn.c_proj",
        "transposition",
        with_tensors("transformer.h.1.attn.c_proj", weight=lambda w: w.T),
    ),
    Mistake(
        "gpt2_output_bias",
        "gpt2",
        "transformer.h.2.mlp.c_proj",
        "bias",
        with_tensors("transformer.h.2.mlp.c_proj", bias=torch.zeros_like),
        also_kinds=("offset",),
    ),
)

DENSE_MISTAKES: Final = (*LLAMA, *QWEN3, *GPT2)
