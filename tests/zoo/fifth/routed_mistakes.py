"""Mistakes in the ports of decoders with experts; their words were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.fifth.decoder_mistakes import attention
from tests.zoo.fifth.routed import MaxPort, ScoutPort
from tests.zoo.planting import with_tensors, with_values
from tests.zoo.third.parts import causal, having


def gate_of_what_is_mixed(self: Any, x: Tensor, mixed: Tensor) -> Tensor:
    normed = self.norm(mixed)
    out: Tensor = self.gate(normed).sigmoid() * normed
    return out


def slopes_of_the_next_layer(layer: int) -> Any:
    """Decays as of a layer that is counted from one."""

    def plant(model: Any) -> None:
        mix = model.blocks[layer].mix
        now, later = (1 - at / (2 + 1e-5) + 1e-5 for at in (layer, min(layer + 1, 2)))
        ratio = later / now
        with torch.no_grad():
            for name in ("query_decay", "key_decay", "diagonal_decay"):
                setattr(mix, name, getattr(mix, name) ** ratio)
            mix.slope_rate = mix.slope_rate * ratio

    return plant


def keys_faded_from_the_first(self: Any, k: Tensor) -> Tensor:
    """A short block is faded like the beginning of a whole one."""
    faded: Tensor = k * self.key_decay[:, : k.shape[2]]
    return faded


def values_as_they_are(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    q, k, v = torch.unflatten(self.qkv(x), -1, (self.count, -1)).transpose(1, 2).chunk(3, -1)
    return functional.silu(q), functional.silu(k), v


def of_the_next(weight: Tensor) -> Tensor:
    return weight.roll(-1, 0)


def rounded_state(_: Any, state: Tensor) -> Tensor:
    return state.bfloat16().to(state.dtype)


def seen_without_oneself(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A token's own key and value are left out within a block."""
    size = q.shape[2]
    scores = (q @ k.transpose(-1, -2)) * self.diagonal_decay[0, :, :size, :size]
    out: Tensor = scores.tril(-1) @ v
    return out


MINIMAX: Final = (
    PortedMistake(
        "minimax_gate_of_what_is_mixed",
        "minimax",
        "model.layers.0.self_attn",
        "wiring",
        having("blocks.0.mix", gated=gate_of_what_is_mixed),
        also=("model.layers.0.self_attn.output_gate",),
        also_kinds=("residual",),
        port=MaxPort,
        in_words="the gate of layer 0's linear attention is made from the normed result, not from its input",
        words=("gate", "input", "reads", "given"),
    ),
    PortedMistake(
        "minimax_layers_counted_from_one",
        "minimax",
        "model.layers.0.self_attn",
        "factor",
        slopes_of_the_next_layer(0),
        also_kinds=("state", "frequencies", "other_weights", "offset"),
        port=MaxPort,
        in_words="the decay of linear attention is that of the next layer",
        words=("decay", "slope", "fade", "state"),
    ),
    PortedMistake(
        "minimax_values_not_activated",
        "minimax",
        "model.layers.2.self_attn",
        "activation",
        having("blocks.2.mix", parts=values_as_they_are),
        port=MaxPort,
        in_words="the activation is left out for the values of layer 2's linear attention",
        words=("activation", "silu"),
    ),
    PortedMistake(
        "minimax_factors_exchanged",
        "minimax",
        "model.layers.1",
        "factor",
        with_values("blocks.1", feed_kept=0.5, feed_added=2.0),
        also_kinds=("residual",),
        port=MaxPort,
        in_words="the factor of the residual and that of what is added are exchanged in layer 1",
        words=("factor", "residual", "scale", "alpha", "times"),
    ),
    PortedMistake(
        "minimax_downs_of_the_next_expert",
        "minimax",
        "model.layers.1.mlp.experts",
        "expert_order",
        with_tensors("blocks.1.experts", down=of_the_next),
        also=("model.layers.1.mlp",),
        also_kinds=("order", "permutation", "shift", "other_weights"),
        port=MaxPort,
        in_words="each expert of layer 1 has the last matrix of the next one",
        words=("expert", "order", "shift", "permut"),
    ),
    PortedMistake(
        "minimax_oneself_not_seen",
        "minimax",
        "model.layers.2.self_attn",
        "mask",
        having("blocks.2.mix", within=seen_without_oneself),
        also_kinds=("state", "offset"),
        port=MaxPort,
        in_words="tokens do not see themselves in layer 2's linear attention",
        words=("mask", "itself", "diagonal", "own token"),
    ),
    PortedMistake(
        "minimax_stream_short_block_faded_wrongly",
        "minimax_stream",
        "model.layers.1.self_attn",
        "state",
        having("blocks.1.mix", faded_keys=keys_faded_from_the_first),
        also_kinds=("cache",),
        port=MaxPort,
        in_words="a short last block is added to the state of layer 1 as if it were the start of a whole one",
        words=("state", "cache", "decay"),
    ),
    PortedMistake(
        "minimax_stream_state_rounded",
        "minimax_stream",
        "model.layers.1.self_attn",
        "precision",
        having(*(f"blocks.{at}.mix" for at in (1, 2)), kept_state=rounded_state),
        also=attention(1, 2),
        also_kinds=("state", "cache"),
        port=MaxPort,
        in_words="the state is kept in bfloat16 between calls",
        words=("bfloat16", "precision", "rounded", "state"),
    ),
)


def growth_from_zero(self: Any, length: int) -> Tensor:
    places = torch.arange(length).float()
    out: Tensor = torch.log1p(torch.floor(places / self.floor)) * self.grows + 1
    return out


def last_few(self: Any, length: int) -> Tensor:
    places = torch.arange(length)
    keep = causal(length, length)
    return keep & (places[:, None] - places < self.chunk) if self.rotates else keep


def by_softmax(self: Any, scores: Tensor) -> Tensor:
    best = scores.topk(self.count, -1)
    weights = scores.float().softmax(-1).gather(-1, best.indices)
    return torch.zeros_like(scores).scatter(-1, best.indices, weights.to(scores))


def every_other(_: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2]


def shared_of_the_weighted(self: Any, x: Tensor) -> Tensor:
    weights = self.squashed(self.score(x))
    out: Tensor = self.shared(x * weights.sum(-1, keepdim=True)) + self.routed(x, weights)
    return out


def lengths_of_sums(self: Any, x: Tensor) -> Tensor:
    """The sum of squares, not their mean: a true L2 norm, as the module's name says."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


LLAMA4: Final = (
    PortedMistake(
        "llama4_growth_from_zero",
        "llama4",
        "model.layers.3.self_attn",
        "offset",
        having("blocks.3.mix", growth=growth_from_zero),
        also_kinds=("position", "shift", "factor"),
        port=ScoutPort,
        in_words="the temperature of queries counts tokens from zero, not from one",
        words=("position", "offset", "temperature", "scale", "factor of each token", "query"),
    ),
    PortedMistake(
        "llama4_window_for_chunk",
        "llama4",
        "model.layers.0.self_attn",
        "mask",
        having(*(f"blocks.{at}.mix" for at in range(3)), seen=last_few),
        also=attention(0, 1, 2),
        also_kinds=("window",),
        port=ScoutPort,
        in_words="tokens see the last few, not those of their chunk",
        words=("mask", "chunk", "window"),
    ),
    PortedMistake(
        "llama4_softmax_for_sigmoid",
        "llama4",
        "model.layers.1.feed_forward.router",
        "activation",
        having("blocks.1.feed", squashed=by_softmax),
        also=("model.layers.1.feed_forward",),
        also_kinds=("router_order", "factor"),
        port=ScoutPort,
        in_words="the router of layer 1 weighs by softmax over experts, not by sigmoid",
        words=("softmax", "sigmoid", "router"),
    ),
    PortedMistake(
        "llama4_gates_every_other_column",
        "llama4",
        "model.layers.1.feed_forward.experts",
        "order",
        having("blocks.1.feed", halves=every_other),
        also=("model.layers.1.feed_forward",),
        also_kinds=("permutation", "axis", "expert_order"),
        port=ScoutPort,
        in_words="gates and inputs of experts are read as every other column, not as halves",
        words=("interleav", "order", "every other", "halves", "alternat"),
    ),
    PortedMistake(
        "llama4_shared_expert_weighted",
        "llama4",
        "model.layers.3.feed_forward",
        "wiring",
        having("blocks.3.feed", forward=shared_of_the_weighted),
        also=("model.layers.3.feed_forward.shared_expert",),
        also_kinds=("factor",),
        port=ScoutPort,
        in_words="the shared expert of layer 3 is given what the router weighted",
        words=("shared", "router", "given", "input", "weight"),
    ),
    PortedMistake(
        "llama4_sum_for_mean_of_squares",
        "llama4",
        "model.layers.2.self_attn.qk_norm",
        "statistics",
        having("blocks.2.mix", unit=lengths_of_sums),
        also=attention(2),
        also_kinds=("factor",),
        port=ScoutPort,
        in_words="queries and keys of layer 2 have length one, not the root of the head size",
        words=("sum", "mean", "factor", "scale", "length"),
    ),
)

MISTAKES: Final = (*MINIMAX, *LLAMA4)
