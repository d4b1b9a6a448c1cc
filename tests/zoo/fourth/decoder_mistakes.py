"""Mistakes in the ports of decoders; the words that name each were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.fourth.decoders import GlmPort, NeoPort, OlmoPort
from tests.zoo.fourth.parts import Gated, together
from tests.zoo.planting import with_tensors, with_values
from tests.zoo.third.parts import having, turn

NEO_LAYERS: Final = range(4)
LAYERS: Final = range(3)


def neo_attention(*layers: int) -> tuple[str, ...]:
    """The sites of attention, outer and inner."""
    return tuple(f"transformer.h.{at}.attn{end}" for at in layers for end in (".attention", ""))


def attention(*layers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{at}.self_attn" for at in layers)


def erf_gelu(_: Any, x: Tensor) -> Tensor:
    return functional.gelu(x)


def from_zero(_: Any, cache: Any) -> int:
    return 0


def seen_by_rows(self: Any, queries: int, keys: int) -> Tensor:
    """A step with a cache sees whatever the cache holds."""
    back = torch.arange(queries)[:, None] - torch.arange(keys)
    if queries == keys:
        return (back >= 0) & (back < (self.window or keys))
    return torch.ones(queries, keys, dtype=torch.bool)


NEO: Final = (
    PortedMistake(
        "neo_scores_divided",
        "gpt_neo",
        "transformer.h.0.attn.attention",
        "factor",
        together(*(with_values(f"blocks.{at}.mix", scale=0.25) for at in NEO_LAYERS)),
        also=neo_attention(*NEO_LAYERS),
        port=NeoPort,
        in_words="scores of attention are divided by the root of the head size, which this model does not do",
        words=("scale", "scaling", "factor", "divided", "temperature"),
    ),
    PortedMistake(
        "neo_window_of_one_more",
        "gpt_neo",
        "transformer.h.1.attn.attention",
        "window",
        together(*(with_values(f"blocks.{at}.mix", window=7) for at in (1, 3))),
        also=neo_attention(1, 3),
        also_kinds=("mask",),
        port=NeoPort,
        in_words="local layers see one token more than their window",
        words=("window", "mask", "local"),
    ),
    PortedMistake(
        "neo_exact_gelu",
        "gpt_neo",
        "transformer.h.0.mlp.act",
        "activation",
        having(*(f"blocks.{at}.feed" for at in NEO_LAYERS), act=erf_gelu),
        also=tuple(f"transformer.h.{at}.mlp{end}" for at in NEO_LAYERS for end in (".act", "")),
        port=NeoPort,
        in_words="the exact GELU in the place of its approximation by tanh",
        words=("gelu", "activation"),
    ),
    PortedMistake(
        "neo_stream_places_from_zero",
        "gpt_neo_stream",
        "transformer",
        "position",
        having("@root", start=from_zero),
        also=("transformer.wpe",),
        also_kinds=("cache", "offset"),
        port=NeoPort,
        in_words="with a cache, places are counted from zero again in each call",
        words=("position", "offset", "places"),
    ),
    PortedMistake(
        "neo_stream_cache_sees_all",
        "gpt_neo_stream",
        "transformer.h.1.attn.attention",
        "window",
        having(*(f"blocks.{at}.mix" for at in (1, 3)), seen=seen_by_rows),
        also=neo_attention(1, 3),
        also_kinds=("mask", "cache"),
        port=NeoPort,
        in_words="local layers forget their window in steps with a cache",
        words=("window", "mask", "local"),
    ),
)


def rotated_halves(self: Any, x: Tensor) -> Tensor:
    return turn(x, self.angles(x.shape[2]))


def low_angles(self: Any, length: int) -> Tensor:
    """As after a cast of the whole model, tables included."""
    dtype = self.qkv.weight.dtype
    out: Tensor = torch.arange(length).to(dtype)[:, None] * self.frequencies.to(dtype)
    return out


def up_first(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = Gated.parts(self, x)
    return up, gate


def norms_exchanged(port: Any) -> None:
    block = port.blocks[1]
    block.n2, block.n4 = block.n4, block.n2


def kept_normed(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.n1(x)
    out: Tensor = y + self.n2(self.mix(y))
    return out


_WHOLE_HEAD: Final = 10000.0 ** -(torch.arange(0, 8, 2).float() / 16)

GLM: Final = (
    PortedMistake(
        "glm4_halves_rotated",
        "glm4",
        "model.layers.0.self_attn",
        "rope",
        having(*(f"blocks.{at}.mix" for at in LAYERS), rotate=rotated_halves),
        also=attention(*LAYERS),
        also_kinds=("permutation",),
        port=GlmPort,
        in_words="the first half is rotated with the second, where neighbours are to be rotated",
        words=("rope", "rotary", "rotat", "interleaved", "halves", "pairs"),
    ),
    PortedMistake(
        "glm4_frequencies_of_the_whole_head",
        "glm4",
        "model.rotary_emb",
        "frequencies",
        together(*(with_values(f"blocks.{at}.mix", frequencies=_WHOLE_HEAD) for at in LAYERS)),
        also=attention(*LAYERS),
        also_kinds=("rope", "position"),
        port=GlmPort,
        in_words="frequencies are computed with the size of the head, not with that of what is rotated",
        words=("rope", "rotary", "frequenc", "rotat", "theta"),
    ),
    PortedMistake(
        "glm4_angles_in_low_precision",
        "glm4",
        "model.rotary_emb",
        "precision",
        having(*(f"blocks.{at}.mix" for at in LAYERS), angles=low_angles),
        also=attention(*LAYERS),
        also_kinds=("frequencies", "rope"),
        port=GlmPort,
        in_words="frequencies and angles are rounded to the dtype of the model",
        words=("precision", "bfloat16", "round", "frequenc", "rotary", "rope"),
    ),
    PortedMistake(
        "glm4_up_before_gate",
        "glm4",
        "model.layers.1.mlp",
        "permutation",
        having("blocks.1.feed", parts=up_first),
        also=("model.layers.1.mlp.gate_up_proj",),
        also_kinds=("order", "wiring"),
        port=GlmPort,
        in_words="the halves of the projection are taken in the wrong order: the other one is activated",
        words=("gate", "order", "swap", "halves", "permut", "exchang"),
    ),
    PortedMistake(
        "glm4_norms_exchanged",
        "glm4",
        "model.layers.1.post_self_attn_layernorm",
        "other_weights",
        norms_exchanged,
        also=("model.layers.1.post_mlp_layernorm",),
        also_kinds=("wiring",),
        port=GlmPort,
        in_words="the norms after attention and after the feed-forward have each other's weights",
        words=("weight", "swap", "exchang", "parameter"),
    ),
    PortedMistake(
        "glm4_normed_states_added",
        "glm4",
        "model.layers.2",
        "residual",
        having("blocks.2", mixed=kept_normed),
        also_kinds=("wiring",),
        port=GlmPort,
        in_words="what attention gives is added to the normed states, not to the states",
        words=("residual", "added", "skip"),
    ),
)


def shares_of_one(self: Any, scores: Tensor) -> Tensor:
    weights = scores.softmax(-1, dtype=torch.float32)
    best = weights.topk(self.count, -1)
    shares = best.values / best.values.sum(-1, keepdim=True)
    return torch.zeros_like(weights).scatter(-1, best.indices, shares)


def normed_by_head(self: Any, x: Tensor) -> Tensor:
    wide = torch.unflatten(x.float(), -1, (-1, 16))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
    out: Tensor = wide.flatten(-2).to(x.dtype) * self.gain
    return out


def in_order_of_names(x: Tensor) -> Tensor:
    return x[sorted(range(len(x)), key=str)]


def unbounded(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.to_v(x)
    return out


def experts(*layers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{at}.mlp{end}" for at in layers for end in (".experts", ".gate", ""))


OLMOE: Final = (
    PortedMistake(
        "olmoe_shares_sum_to_one",
        "olmoe",
        "model.layers.0.mlp.gate",
        "router_order",
        having(*(f"blocks.{at}.router" for at in LAYERS), weigh=shares_of_one),
        also=tuple(f"model.layers.{at}.mlp{end}" for at in LAYERS for end in (".gate", "")),
        also_kinds=("factor",),
        port=OlmoPort,
        in_words="the weights of the chosen experts are divided by their sum",
        words=("normali", "router", "sum to", "softmax", "factor"),
    ),
    PortedMistake(
        "olmoe_norms_by_head",
        "olmoe",
        "model.layers.0.self_attn.q_norm",
        "statistics",
        having(*(f"blocks.{at}.mix.norm_{side}" for at in LAYERS for side in "qk"), forward=normed_by_head),
        also=tuple(
            f"model.layers.{at}.self_attn{end}" for at in LAYERS for end in (".q_norm", ".k_norm", "")
        ),
        also_kinds=("axis", "heads", "groups"),
        port=OlmoPort,
        in_words="queries and keys are normed head by head, not over all heads",
        words=("statistic", "norm", "head", "axis", "group"),
    ),
    PortedMistake(
        "olmoe_experts_in_order_of_names",
        "olmoe",
        "model.layers.1.mlp.experts",
        "expert_order",
        with_tensors("blocks.1.experts", gate_up=in_order_of_names, down=in_order_of_names),
        also=experts(1),
        also_kinds=("permutation",),
        port=OlmoPort,
        in_words="experts were stacked in the order of their names as text: 0, 1, 10, 11, 2",
        words=("expert", "order", "permut"),
    ),
    PortedMistake(
        "olmoe_values_without_bounds",
        "olmoe",
        "model.layers.0.self_attn",
        "clip",
        having(*(f"blocks.{at}.mix" for at in LAYERS), value=unbounded),
        also=attention(*LAYERS),
        port=OlmoPort,
        in_words="queries and keys are clamped, values are not",
        words=("clamp", "clip", "bound", "saturat", "limit"),
    ),
)

MISTAKES: Final = (*NEO, *GLM, *OLMOE)
