"""Decoders: BLOOM, GPT-NeoX, OLMo 2."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.other_ways import fused_gate_up, linear
from tests.zoo.planting import attending, computing, module_at, override, rebound, with_tensors, with_values

BLOOM_ATTENTION: Final = "transformer.h.1.self_attention"
NEOX: Final = "gpt_neox.layers.1"
OLMO: Final = "model.layers.1"


def slopes_of_no_power_of_two(model: Any) -> None:
    """Slopes by the formula for powers of two, where six heads have those of four and some of eight."""

    def alibi(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        slopes = 2.0 ** (-8 * torch.arange(1, num_heads + 1) / num_heads)
        places = (attention_mask.cumsum(-1) - 1) * attention_mask
        return (slopes[None, :, None, None] * places[:, None, None]).flatten(0, 1).to(dtype)

    model.transformer.build_alibi_tensor = alibi


def parts_before_heads(model: Any) -> None:
    """Queries, keys and values read as three blocks, where they lie head by head."""

    def split(fused: Any) -> Any:
        parts = fused.unflatten(-1, (3, 6, 8)).permute(2, 0, 3, 1, 4)
        return parts.unbind()

    module_at(model, BLOOM_ATTENTION)._reshape = split


def scales_off_by_one(weight: Tensor) -> Tensor:
    """Eight bits per weight, and each row given back with the scale of the row before."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale.roll(1, 0)


def frequencies_of_the_whole_head(before: Tensor) -> Tensor:
    """Exponents divided by the size of the head, where by that of the part that is turned."""
    return 1 / 10000 ** (torch.arange(0, 2 * len(before), 2) / (4 * len(before)))


def norm_per_head(self: Any, hidden_states: Any) -> Any:
    x = hidden_states.float().unflatten(-1, (-1, 16))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return (self.weight * x.flatten(-2)).to(hidden_states.dtype)


def last_down(model: Any) -> None:
    """A loop over layers that ends one too early and leaves the weights of the layer before."""
    with_tensors(f"{OLMO}.mlp.down_proj", weight=lambda _: model.model.layers[0].mlp.down_proj.weight)(model)


def key_not_written(
    attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
) -> Any:
    """In a step of decoding, the slot of the new key still has that of the token before."""
    if q.shape[2] == 1:
        k = torch.cat((k[:, :, :-1], k[:, :, -2:-1]), 2)
    return attend(module, q, k, v, mask, **options)


MISTAKES: Final = (
    Mistake(
        "bloom_slopes", "bloom", "transformer", "position", slopes_of_no_power_of_two, also_kinds=("factor",)
    ),
    Mistake("bloom_parts_before_heads", "bloom", BLOOM_ATTENTION, "permutation", parts_before_heads),
    Mistake(
        "bloom_residual_after_norm",
        "bloom",
        "transformer.h.1",
        "residual",
        with_values("transformer.h.1", apply_residual_connection_post_layernorm=True),
        also_kinds=("wiring", "order"),
    ),
    Mistake(
        "gpt_neox_not_parallel",
        "gpt_neox",
        NEOX,
        "wiring",
        with_values(NEOX, use_parallel_residual=False),
        also_kinds=("residual", "order"),
    ),
    Mistake(
        "gpt_neox_frequencies",
        "gpt_neox",
        "gpt_neox.rotary_emb",
        "rope",
        with_tensors("gpt_neox.rotary_emb", inv_freq=frequencies_of_the_whole_head),
    ),
    Mistake(
        "gpt_neox_scales_off_by_one",
        "gpt_neox",
        f"{NEOX}.mlp.dense_h_to_4h",
        "quantisation",
        with_tensors(f"{NEOX}.mlp.dense_h_to_4h", weight=scales_off_by_one),
        also_kinds=("factor",),
    ),
    Mistake(
        "olmo2_norm_per_head",
        "olmo2",
        f"{OLMO}.self_attn.q_norm",
        "groups",
        computing(f"{OLMO}.self_attn.q_norm", norm_per_head),
        also_kinds=("axis", "statistics"),
    ),
    Mistake("olmo2_layer_before", "olmo2", f"{OLMO}.mlp.down_proj", "other_weights", last_down),
    Mistake(
        "olmo2_key_not_written",
        "olmo2_decode",
        f"{OLMO}.self_attn",
        "cache",
        attending(f"{OLMO}.self_attn", key_not_written),
        also_kinds=("shift", "position", "state"),
    ),
)


def distances_for_places(model: Any) -> Any:
    """Biases by the distance to the query, which differ from those by place by a constant in each row."""

    def forward(
        self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor, **_: Any
    ) -> Any:
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        place = alibi.view(len(q), self.num_heads, 1, -1)
        scores = q @ k.mT * self.inv_norm_factor + (place - place.mT)
        weights = torch.softmax(scores + attention_mask, -1, dtype=torch.float32).to(q.dtype)
        out = self.dense((weights @ v).transpose(1, 2).flatten(2))
        return residual + out, weights

    for block in model.transformer.h:
        override(block.self_attention, forward)
    return model


def split_projections(model: Any) -> Any:
    """Queries, keys and values in projections of their own."""

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Any:
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)

        def turned(x: Any) -> Tensor:
            cos, sin = (table[:, None] for table in position_embeddings)
            first, second, rest = x.split([2, 2, 4], -1)
            return torch.cat((x[..., :4] * cos + torch.cat((-second, first), -1) * sin, rest), -1)

        out = functional.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, scale=self.scaling
        )
        return self.dense(out.transpose(1, 2).flatten(2)), None

    for layer in model.gpt_neox.layers:
        attention = layer.attention
        weights = attention.query_key_value.weight.unflatten(0, (8, 3, 8)).transpose(0, 1).flatten(1, 2)
        biases = attention.query_key_value.bias.unflatten(0, (8, 3, 8)).transpose(0, 1).flatten(1, 2)
        for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
            setattr(attention, name, linear(weight, bias))
        del attention.query_key_value
        override(attention, forward)
    return model


def cast_tables(model: Any) -> Any:
    """Queries and keys turned in float32, as the tables are, by a rotation of complex numbers."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        half = cos.shape[-1] // 2
        turn = torch.complex(cos[..., :half].float(), sin[..., :half].float())[:, None]

        def turned(x: Tensor) -> Tensor:
            out = torch.complex(x[..., :half].float(), x[..., half:].float()) * turn
            return torch.cat((out.real, out.imag), -1).to(x.dtype)

        return turned(q), turned(k)

    for layer in range(3):
        rebound(f"model.layers.{layer}.self_attn", apply_rotary_pos_emb=rotate)(model)
    return model


CORRECT: Final = (
    Correct("bloom_distances_for_places", "bloom", distances_for_places),
    Correct("gpt_neox_split_projections", "gpt_neox", split_projections),
    Correct("gpt_neox_as_it_is", "gpt_neox", lambda model: model),
    Correct("olmo2_fused_gate_up", "olmo2", fused_gate_up),
    Correct("olmo2_complex_rotation", "olmo2", cast_tables),
    Correct("olmo2_decode_as_it_is", "olmo2_decode", lambda model: model),
)
