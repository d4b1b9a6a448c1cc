"""Mistakes in the ports of decoders; the words that name each were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.planting import module_at, with_tensors, with_values
from tests.zoo.third.decoders import CoherePort, FalconPort, OptPort, PhiPort, StablePort
from tests.zoo.third.parts import (
    attend,
    causal,
    coarse_int4,
    having,
    turn_pairs,
)

_LAYERS: Final = range(3)


def frequencies_of_the_whole_head(self: Any, length: int) -> Any:
    """The exponents count all sixteen channels although eight are rotated."""
    size = self.qkv.in_features // self.heads
    count = self.frequencies.shape[0]
    frequencies = 10000.0 ** (-2 * torch.arange(count).float() / size)
    return torch.arange(length).float()[:, None] * frequencies


def one_after_the_other(self: Any, x: Tensor) -> Any:
    x = x + self.mixer(self.norm(x))
    return x + self.feed(self.norm(x))


def stored_a_slot_early(self: Any, memory: Tensor, x: Tensor, start: int) -> None:
    at = max(start - 1, 0)
    memory[:, :, at : at + x.shape[2]] = x


def queries_start_anew(self: Any, start: int, length: int) -> Any:
    angles: Tensor = self.angles(0, length)
    return angles


def stored_in_float16(self: Any, memory: Tensor, x: Tensor, start: int) -> None:
    """The buffers are narrower than the model."""
    memory[:, :, start : start + x.shape[2]] = x.half().to(x.dtype)


def slopes_from_nought(self: Any) -> Any:
    return 2.0 ** (-8.0 / self.heads * torch.arange(self.heads))


def slopes_without_scale(self: Any) -> Any:
    """As BLOOM has them, whose scores are scaled before the bias is added."""
    return 2.0 ** (-8.0 / self.heads * torch.arange(1, self.heads + 1)) / self.scale


def read_in_blocks(model: Any) -> None:
    """Queries first, then keys, then values, where the checkpoint has them group by group."""
    mixer = module_at(model, "blocks.2.mixer")
    size = mixer.key.out_features // mixer.groups
    names = ("query", "key", "value")
    with torch.no_grad():
        for kind in ("weight", "bias"):
            parts = [getattr(getattr(mixer, name), kind) for name in names]
            grouped = torch.cat([torch.unflatten(part, 0, (mixer.groups, -1, size)) for part in parts], 1)
            wrong = torch.split(grouped.flatten(0, 2), [part.shape[0] for part in parts])
            for part, value in zip(parts, [value.clone() for value in wrong], strict=True):
                part.copy_(value)


def norms_exchanged(self: Any, x: Tensor, mask: Tensor) -> Any:
    fed = self.down(functional.gelu(self.up(self.norm_a(x))))
    return x + self.mixer(self.norm_b(x), mask) + fed


def bias_left_unscaled(bias: Tensor) -> Any:
    """The scale was moved into the kernel, the bias of the queries is added after it."""
    rows, size = bias.shape[0] // 3, 16
    bias[:rows] *= size**0.5
    return bias


def not_centred(self: Any, x: Tensor) -> Any:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
    return (self.gain.float() * wide).to(x.dtype)


def angles_in_bfloat16(self: Any, x: Tensor) -> Any:
    at = torch.arange(x.shape[2]).bfloat16()[:, None]
    return turn_pairs(x, (at * self.frequencies.bfloat16()).float())


def first_key_unseen(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The first token, taken for padding, is seen by itself alone."""
    q = torch.unflatten(q, 1, (k.shape[1], -1))
    keep = causal(*2 * q.shape[3:4])
    keep[1:, 0] = False
    return attend(q, k[:, :, None], v[:, :, None], scale=self.scale, keep=keep).flatten(1, 2)


_SELF: Final = tuple(f"model.layers.{at}.self_attn" for at in _LAYERS)
_FALCON: Final = tuple(f"transformer.h.{at}.self_attention" for at in _LAYERS)

MISTAKES: Final = (
    PortedMistake(
        "phi_frequencies_of_the_whole_head",
        "phi",
        "model.rotary_emb",
        "frequencies",
        having(*(f"blocks.{at}.mixer" for at in _LAYERS), angles=frequencies_of_the_whole_head),
        also=_SELF,
        also_kinds=("rope",),
        port=PhiPort,
        in_words="rotary frequencies computed for the whole head, not for the rotated part",
        words=("frequenc", "rotary", "rotat", "angle", "theta"),
    ),
    PortedMistake(
        "phi_block_in_series",
        "phi",
        "model.layers.1",
        "wiring",
        having("blocks.1", forward=one_after_the_other),
        also=("model.layers.1.mlp",),
        also_kinds=("order", "residual"),
        port=PhiPort,
        in_words="the feed-forward reads the sum with attention instead of the same norm",
        words=("wired", "wiring", "parallel", "series", "sequential", "reads", "argument", "input of"),
    ),
    PortedMistake(
        "phi_int4_per_tensor",
        "phi",
        "model.layers.2.mlp.fc1",
        "quantisation",
        with_tensors("blocks.2.feed.up", weight=coarse_int4),
        port=PhiPort,
        in_words="a weight in int4 with one scale of the whole tensor",
        words=("quanti", "int4", "4 bit", "4-bit", "levels"),
    ),
    PortedMistake(
        "stablelm_key_gain_of_the_first_head",
        "stablelm",
        "model.layers.1.self_attn.k_layernorm.norms.1",
        "other_weights",
        with_tensors("h.1.mixer", k_gain=lambda gain: gain[:1].expand_as(gain)),
        also=("model.layers.1.self_attn.k_layernorm", "model.layers.1.self_attn"),
        also_kinds=("factor",),
        port=StablePort,
        in_words="all heads of the keys are normed with the weight of the first head",
        words=("other weights", "weights of", "weight of", "factor", "norms.0", "first head"),
    ),
    PortedMistake(
        "stablelm_stream_stored_a_slot_early",
        "stablelm_stream",
        "model.layers.1.self_attn",
        "cache",
        having("h.1.mixer", store=stored_a_slot_early),
        also_kinds=("position", "shift", "state"),
        port=StablePort,
        in_words="in later calls keys and values are written one slot too early",
        words=("cache", "slot", "written", "stored", "earlier calls", "past", "overwrit"),
    ),
    PortedMistake(
        "stablelm_stream_queries_start_anew",
        "stablelm_stream",
        "model.layers.0.self_attn",
        "position",
        having("h.0.mixer", query_angles=queries_start_anew),
        also_kinds=("rope",),
        port=StablePort,
        in_words="queries of later calls are rotated as if they were at position 0",
        words=("position", "rotary", "rotat"),
    ),
    PortedMistake(
        "stablelm_stream_half_precision_cache",
        "stablelm_stream",
        "model.layers.2.self_attn",
        "precision",
        having("h.2.mixer", store=stored_in_float16),
        also_kinds=("cache",),
        port=StablePort,
        in_words="keys and values are kept in float16",
        words=("float16", "half", "rounded", "precision", "cache"),
    ),
    PortedMistake(
        "falcon_slopes_from_nought",
        "falcon",
        "transformer.h.1.self_attention",
        "position",
        having("blocks.1.mixer", slopes=slopes_from_nought),
        also_kinds=("factor",),
        port=FalconPort,
        in_words="the slopes of the linear biases begin one power too high",
        words=("alibi", "slope", "linear bias", "attention bias", "bias of the scores", "position"),
    ),
    PortedMistake(
        "falcon_alibi_not_scaled",
        "falcon",
        "transformer",
        "factor",
        having(*(f"blocks.{at}.mixer" for at in _LAYERS), slopes=slopes_without_scale),
        also=_FALCON,
        also_kinds=("position",),
        port=FalconPort,
        in_words="linear biases are added after the scale of the scores",
        words=("alibi", "slope", "linear bias", "attention bias", "bias of the scores", "factor"),
    ),
    PortedMistake(
        "falcon_groups_read_in_blocks",
        "falcon",
        "transformer.h.2.self_attention.query_key_value",
        "permutation",
        read_in_blocks,
        also=("transformer.h.2.self_attention",),
        also_kinds=("heads", "groups"),
        port=FalconPort,
        in_words="a fused projection of groups read as all queries, all keys, all values",
        words=("order", "permut", "block", "interleav", "layout", "per group", "per head"),
    ),
    PortedMistake(
        "falcon_norms_exchanged",
        "falcon",
        "transformer.h.1",
        "wiring",
        having("blocks.1", forward=norms_exchanged),
        also=("transformer.h.1.ln_attn", "transformer.h.1.ln_mlp"),
        also_kinds=("other_weights",),
        port=FalconPort,
        in_words="attention reads the norm of the feed-forward, and the other way round",
        words=("exchang", "swap", "other weights", "weights of", "ln_mlp", "ln_attn", "wired"),
    ),
    PortedMistake(
        "opt_bias_of_queries_not_scaled",
        "opt",
        "model.decoder.layers.1.self_attn",
        "bias",
        with_tensors("blocks.1.mixer.qkv", bias=bias_left_unscaled),
        also=("model.decoder.layers.1.self_attn.q_proj",),
        also_kinds=("factor", "offset"),
        port=OptPort,
        in_words="the bias of the queries is added after they are scaled",
        words=("bias",),
    ),
    PortedMistake(
        "opt_vocabulary_padded_in_front",
        "opt",
        "lm_head",
        "shift",
        with_tensors("head", weight=lambda table: table.roll(64, 0)),
        also_kinds=("permutation", "other_weights"),
        port=OptPort,
        in_words="the rows that pad the vocabulary come before the tokens",
        words=("shift", "rolled", "rows", "order", "vocabulary", "padded"),
    ),
    PortedMistake(
        "cohere_divides_by_the_scale",
        "cohere",
        "@root",
        "factor",
        with_values("@root", logit_scale=4.0),
        also=("lm_head",),
        port=CoherePort,
        in_words="scores are divided by the scale instead of multiplied",
        words=("factor", "scale", "times", "multipl", "divid"),
    ),
    PortedMistake(
        "cohere_norm_not_centred",
        "cohere",
        "model.layers.1.input_layernorm",
        "statistics",
        having("stack.1.norm", forward=not_centred),
        also_kinds=("offset",),
        port=CoherePort,
        in_words="a norm of the root mean square instead of a layer norm",
        words=("mean", "centr", "centered", "rms", "root mean square"),
    ),
    PortedMistake(
        "cohere_angles_in_bfloat16",
        "cohere",
        "model.rotary_emb",
        "precision",
        having(*(f"stack.{at}.attn" for at in _LAYERS), rotate=angles_in_bfloat16),
        also=_SELF,
        also_kinds=("rope", "frequencies"),
        port=CoherePort,
        in_words="rotary angles are computed in bfloat16",
        words=("bfloat16", "precision", "rounded", "rotary", "rotat", "angle"),
    ),
    PortedMistake(
        "cohere_first_key_unseen",
        "cohere",
        "model.layers.1.self_attn",
        "mask",
        having("stack.1.attn", grouped=first_key_unseen),
        also_kinds=("window", "padding"),
        port=CoherePort,
        in_words="no later token sees the first one",
        words=("mask", "sees", "seen", "first key", "first token"),
    ),
)
