"""Decoders: BLOOM, GPT-NeoX, OLMo 2."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.planting import attending, computing, module_at, override, removed, with_tensors, with_values

BLOOM_ATTENTION: Final = "transformer.h.1.self_attention"
NEOX: Final = "gpt_neox.layers.1"
OLMO: Final = "model.layers.1"


def slopes_of_the_first_rank(model: Any) -> None:
    """Each of two devices has three heads, and both take the slopes of the first three."""
    inner = model.transformer.build_alibi_tensor

    def alibi(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        whole = inner(attention_mask, num_heads, dtype).view(len(attention_mask), num_heads, 1, -1)
        return torch.cat((whole[:, :3], whole[:, :3]), 1).flatten(0, 1)

    model.transformer.build_alibi_tensor = alibi


def zero_point_forgotten(weight: Tensor) -> Tensor:
    """Eight bits without a sign, given back without taking off what stands for zero."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    return ((weight - low) / (high - low) * 255).round() * (high - low) / 255


def nibbles_exchanged(weight: Tensor) -> Tensor:
    """Two weights of a byte taken out in the wrong order."""
    return weight.reshape(len(weight), -1, 2).flip(-1).reshape(weight.shape)


def one_norm(self: Any, hidden_states: Tensor, **options: Any) -> Any:
    """Both branches given the norm of the first, as in GPT-J."""
    normed = self.input_layernorm(hidden_states)
    options.pop("position_ids", None)
    attended, _ = self.attention(normed, **options)
    return self.mlp(normed) + attended + hidden_states


def half_of_the_sum(self: Any, input: Tensor) -> Tensor:
    """What one of two devices has, without that of the other."""
    half = input.shape[-1] // 2
    return functional.linear(input[..., :half], self.weight[:, :half])


def scales_of_other_groups(weight: Tensor) -> Tensor:
    """Four bits with a scale for each 32 weights of a row, read as if rows and groups were exchanged."""
    groups = weight.reshape(len(weight), -1, 32)
    scale = groups.abs().amax(-1) / 7
    rounded = (groups / scale[..., None]).round()
    return (rounded * scale.T.reshape(scale.shape)[..., None]).reshape(weight.shape)


def aligned_at_the_start(
    attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, **options: Any
) -> Any:
    """The second part of a prompt sees as many keys as if it were the first."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
    return attend(module, q, k, v, mask, **options)


def keys_cached_unturned(model: Any) -> None:
    """The prompt's keys put into the cache as they are before they are turned."""
    attention = module_at(model, f"{OLMO}.self_attn")
    inner = type(attention).forward

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
        result = inner(self, hidden_states, position_embeddings, **options)
        cache = options.get("cache")
        if cache is not None and hidden_states.shape[1] > 1:
            layer = cache.layers[self.layer_idx]
            cos, sin = (table[:, None] for table in position_embeddings)
            first, second = layer.keys.chunk(2, -1)
            turned_back = layer.keys * cos + torch.cat((second, -first), -1) * sin
            layer.keys = turned_back.to(layer.keys.dtype)
        return result

    override(attention, forward)


def rounded_before_the_weight(self: Any, hidden_states: Tensor) -> Any:
    x = hidden_states.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * x.to(hidden_states.dtype)


MISTAKES: Final = (
    Mistake(
        "bloom_places_scaled",
        "bloom",
        BLOOM_ATTENTION,
        "factor",
        with_values(BLOOM_ATTENTION, beta=8**-0.5),
        also_kinds=("position",),
    ),
    Mistake(
        "bloom_first_norm",
        "bloom",
        "transformer.word_embeddings_layernorm",
        "missing_module",
        removed("transformer.word_embeddings_layernorm"),
    ),
    Mistake(
        "bloom_slopes_of_the_first_rank",
        "bloom",
        "transformer",
        "position",
        slopes_of_the_first_rank,
        also_kinds=("permutation", "factor"),
    ),
    Mistake(
        "gpt_neox_zero_point",
        "gpt_neox",
        f"{NEOX}.mlp.dense_4h_to_h",
        "quantisation",
        with_tensors(f"{NEOX}.mlp.dense_4h_to_h", weight=zero_point_forgotten),
        also_kinds=("offset",),
    ),
    Mistake(
        "gpt_neox_nibbles_exchanged",
        "gpt_neox",
        f"{NEOX}.attention.dense",
        "permutation",
        with_tensors(f"{NEOX}.attention.dense", weight=nibbles_exchanged),
        also_kinds=("quantisation",),
    ),
    Mistake(
        "gpt_neox_bias_of_each_rank",
        "gpt_neox",
        "gpt_neox.layers.2.mlp.dense_4h_to_h",
        "bias",
        with_tensors("gpt_neox.layers.2.mlp.dense_4h_to_h", bias=lambda b: 2 * b),
        also_kinds=("offset",),
    ),
    Mistake("gpt_neox_one_norm", "gpt_neox", NEOX, "wiring", computing(NEOX, one_norm)),
    Mistake(
        "olmo2_half_of_the_sum",
        "olmo2",
        f"{OLMO}.self_attn.o_proj",
        "partial_sum",
        computing(f"{OLMO}.self_attn.o_proj", half_of_the_sum),
    ),
    Mistake(
        "olmo2_scales_of_other_groups",
        "olmo2",
        f"{OLMO}.mlp.up_proj",
        "quantisation",
        with_tensors(f"{OLMO}.mlp.up_proj", weight=scales_of_other_groups),
        also_kinds=("factor",),
    ),
    Mistake(
        "olmo2_rounded_before_the_weight",
        "olmo2",
        f"{OLMO}.post_feedforward_layernorm",
        "precision",
        computing(f"{OLMO}.post_feedforward_layernorm", rounded_before_the_weight),
    ),
    Mistake(
        "olmo2_keys_cached_unturned",
        "olmo2_decode",
        f"{OLMO}.self_attn",
        "cache",
        keys_cached_unturned,
        also_kinds=("rope", "state"),
    ),
    Mistake(
        "olmo2_aligned_at_the_start",
        "olmo2_chunked",
        f"{OLMO}.self_attn",
        "mask",
        attending(f"{OLMO}.self_attn", aligned_at_the_start),
    ),
)


def library_gelu(model: Any) -> Any:
    for block in model.transformer.h:
        override(block.mlp.gelu_impl, lambda self, x: functional.gelu(x, approximate="tanh"))
    return model


def stored_tables(model: Any) -> Any:
    """Rotary tables made once for all positions, and rows of them taken."""
    rotary = model.gpt_neox.rotary_emb
    angles = torch.arange(128, dtype=torch.float32)[:, None] * rotary.inv_freq
    angles = torch.cat((angles, angles), -1)
    rotary.register_buffer("cos_cached", angles.cos(), persistent=False)
    rotary.register_buffer("sin_cached", angles.sin(), persistent=False)

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return self.cos_cached[position_ids].to(x.dtype), self.sin_cached[position_ids].to(x.dtype)

    override(rotary, forward)
    return model


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def head_in_blocks(model: Any) -> Any:
    """The head's vocabulary in four parts."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return torch.cat([functional.linear(input, part) for part in self.weight.chunk(4)], -1)

    override(module_at(model, "lm_head"), forward)
    return model


CORRECT: Final = (
    Correct("bloom_library_gelu", "bloom", library_gelu),
    Correct("bloom_as_it_is", "bloom", lambda model: model),
    Correct("gpt_neox_stored_tables", "gpt_neox", stored_tables),
    Correct("olmo2_eager", "olmo2", eager),
    Correct("olmo2_head_in_blocks", "olmo2", head_in_blocks),
    Correct("olmo2_decode_eager", "olmo2_decode", eager),
    Correct("olmo2_chunked_as_it_is", "olmo2_chunked", lambda model: model),
)
