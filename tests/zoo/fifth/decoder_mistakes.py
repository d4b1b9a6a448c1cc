"""Mistakes in the ports of dense decoders; their words were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.fifth.decoders import ExaonePort, NemotronPort
from tests.zoo.planting import with_tensors, with_values
from tests.zoo.third.parts import having, turn

LAYERS: Final = range(3)
SLIDING: Final = (0, 1, 3)


def attention(*layers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{at}.self_attn" for at in layers)


def square_of_all(_: Any, x: Tensor) -> Tensor:
    return x.square()


def bias_within_gain(self: Any, x: Tensor) -> Tensor:
    out: Tensor = (functional.layer_norm(x, x.shape[-1:], eps=self.eps) + self.shift) * self.gain
    return out


def rates_of_the_whole_head(self: Any, length: int) -> Tensor:
    """The exponents run over the channels of a head, not over those that are rotated."""
    count = self.frequencies.shape[0]
    rates = 10000.0 ** (-torch.arange(count).float() * 2 / (4 * count))
    out: Tensor = torch.arange(length).float()[:, None] * rates
    return out


def second_shard_is_the_first(table: Tensor) -> Tensor:
    half = table.shape[0] // 2
    return torch.cat((table[:half], table[:half]))


def without_bias_of_values(bias: Tensor) -> Tensor:
    bias[-32:] = 0
    return bias


def bias_after_activation(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.act(functional.linear(x, self.grow.weight)) + self.grow.bias
    return out


def mask_of_scores_added(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is not to be seen has score zero in the place of minus infinity."""
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2)) * self.size**-0.5
    out: Tensor = (scores * keep).softmax(-1) @ v
    return out


NEMOTRON: Final = (
    PortedMistake(
        "nemotron_squares_of_negatives",
        "nemotron",
        "model.layers.0.mlp.act_fn",
        "activation",
        having(*(f"blocks.{at}.feed" for at in LAYERS), act=square_of_all),
        also=tuple(f"model.layers.{at}.mlp{end}" for at in LAYERS for end in (".act_fn", "")),
        port=NemotronPort,
        in_words="all is squared, not what ReLU leaves",
        words=("activation", "relu", "negative", "square"),
    ),
    PortedMistake(
        "nemotron_last_bias_within_gain",
        "nemotron",
        "model.norm",
        "order",
        having("norm", forward=bias_within_gain),
        also_kinds=("bias", "norm_one_plus", "statistics"),
        port=NemotronPort,
        in_words="the last norm adds its bias before it multiplies by its gain",
        words=("bias", "shift", "offset", "added"),
    ),
    PortedMistake(
        "nemotron_rates_of_the_whole_head",
        "nemotron",
        "model.rotary_emb",
        "frequencies",
        having("@root", angles=rates_of_the_whole_head),
        also=attention(*LAYERS),
        also_kinds=("rope",),
        port=NemotronPort,
        in_words="rotary frequencies are spread over a head's channels, not over the rotated half",
        words=("frequenc", "rotary", "theta", "base"),
    ),
    PortedMistake(
        "nemotron_first_shard_of_words_twice",
        "nemotron",
        "model.embed_tokens",
        "other_weights",
        with_tensors("words", weight=second_shard_is_the_first),
        also_kinds=("order", "permutation"),
        port=NemotronPort,
        in_words="the second shard of the words' table is the first once more",
        words=("weights", "rows", "embedding", "values of"),
    ),
    PortedMistake(
        "nemotron_values_without_bias",
        "nemotron",
        "model.layers.1.self_attn.v_proj",
        "bias",
        with_tensors("blocks.1.mix.qkv", bias=without_bias_of_values),
        also=attention(1),
        also_kinds=("other_weights",),
        port=NemotronPort,
        in_words="the bias of the values was not loaded into the fused projection of layer 1",
        words=("bias",),
    ),
    PortedMistake(
        "nemotron_bias_after_square",
        "nemotron",
        "model.layers.2.mlp",
        "order",
        having("blocks.2.feed", grown=bias_after_activation),
        also=("model.layers.2.mlp.up_proj", "model.layers.2.mlp.act_fn"),
        also_kinds=("bias", "activation"),
        port=NemotronPort,
        in_words="the bias of the first linear is added after the activation in layer 2",
        words=("bias", "activation", "added"),
    ),
    PortedMistake(
        "nemotron_mask_multiplied",
        "nemotron",
        "model.layers.1.self_attn",
        "mask",
        having("blocks.1.mix", mixed=mask_of_scores_added),
        port=NemotronPort,
        in_words="later tokens' scores are multiplied by zero, so that they still have weight, in layer 1",
        words=("mask", "causal", "later", "future"),
    ),
)


def all_heads_together(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics of all heads' channels, not of each head's."""
    q, k = (
        torch.unflatten(self.query(x), -1, (self.queries, -1)),
        torch.unflatten(self.key(x), -1, (self.groups, -1)),
    )

    def apart(y: Tensor, norm: Any) -> Tensor:
        size = y.float().square().mean((-1, -2), keepdim=True)
        out: Tensor = ((y.float() * torch.rsqrt(size + norm.eps)).to(y.dtype) * norm.gain).transpose(1, 2)
        return out

    return apart(q, self.query_norm), apart(k, self.key_norm)


def normed_sum(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.post_feed(x + self.feed(x))
    return out


def oldest_of_the_window(self: Any, state: Any) -> Any:
    k, v, places = state
    if self.window is None:
        return state
    return k[:, :, : self.window - 1], v[:, :, : self.window - 1], places[: self.window - 1]


def places_of_the_window(self: Any, q: Tensor, k: Tensor, places: Tensor, frequencies: Tensor) -> Any:
    """A step is rotated by its place in the window, of which only the last is new."""
    if len(places) == 1:
        places = places.clamp(max=self.window - 1)
    angles = places.float()[:, None] * frequencies.float()
    return turn(q, angles), turn(k, angles)


def second_half_first(weight: Tensor) -> Tensor:
    """Of two shards of a linear that are split over its inputs, the second one first."""
    return weight.roll(weight.shape[1] // 2, 1)


def values_forgotten(self: Any, past: Any, k: Tensor, v: Tensor, places: Tensor) -> Any:
    """A step adds its key, and puts its value in the place of the last one."""
    if past is not None:
        v = torch.cat((past[1][:, :, :-1], v, v), 2)
        k, places = torch.cat((past[0], k), 2), torch.cat((past[2], places))
    return k, v, places


EXAONE: Final = (
    PortedMistake(
        "exaone4_global_layer_rotated",
        "exaone4",
        "model.layers.2.self_attn",
        "rope",
        with_values("blocks.2.mix", rotates=True),
        also_kinds=("position",),
        port=ExaonePort,
        in_words="queries and keys of the global layer are rotated, which only local ones are",
        words=("rotary", "rotat", "position"),
    ),
    PortedMistake(
        "exaone4_statistics_of_all_heads",
        "exaone4",
        "model.layers.0.self_attn.q_norm",
        "statistics",
        having(*(f"blocks.{at}.mix" for at in range(4)), normed=all_heads_together),
        also=tuple(
            f"model.layers.{at}.self_attn{end}" for at in range(4) for end in (".q_norm", ".k_norm", "")
        ),
        also_kinds=("axis", "groups", "heads"),
        port=ExaonePort,
        in_words="queries and keys are normed over all heads at once, not each head by itself",
        words=("each head", "all heads", "statistic", "axis", "group", "mean square"),
    ),
    PortedMistake(
        "exaone4_sum_normed",
        "exaone4",
        "model.layers.3",
        "order",
        having("blocks.3", fed=normed_sum),
        also=("model.layers.3.post_feedforward_layernorm",),
        also_kinds=("residual", "wiring"),
        port=ExaonePort,
        in_words="the last layer norms the sum with the residual, not what is added to it",
        words=("residual", "norm of", "after the", "sum"),
    ),
    PortedMistake(
        "exaone4_shards_of_down_exchanged",
        "exaone4",
        "model.layers.1.mlp.down_proj",
        "permutation",
        with_tensors("blocks.1.feed.down", weight=second_half_first),
        also=("model.layers.1.mlp",),
        also_kinds=("order", "shift", "other_weights"),
        port=ExaonePort,
        in_words="the two shards of the last linear of layer 1's feed-forward are exchanged",
        words=("order", "permut", "halves", "rolled", "exchanged", "columns"),
    ),
    PortedMistake(
        "exaone4_stream_keeps_the_oldest",
        "exaone4_stream",
        "model.layers.0.self_attn",
        "cache",
        having(*(f"blocks.{at}.mix" for at in SLIDING), kept_of=oldest_of_the_window),
        also=attention(*SLIDING),
        also_kinds=("window", "state"),
        port=ExaonePort,
        in_words="a full window keeps the oldest tokens and drops the newest",
        words=("cache", "window", "state", "past", "kept"),
    ),
    PortedMistake(
        "exaone4_stream_places_in_the_window",
        "exaone4_stream",
        "model.layers.0.self_attn",
        "position",
        having(*(f"blocks.{at}.mix" for at in SLIDING), turned=places_of_the_window),
        also=(*attention(*SLIDING), "model.rotary_emb"),
        also_kinds=("rope", "offset", "cache"),
        port=ExaonePort,
        in_words="steps are rotated by their place in the window, not in the text",
        words=("position", "rotary", "rotat", "offset"),
    ),
    PortedMistake(
        "exaone4_stream_value_overwritten",
        "exaone4_stream",
        "model.layers.2.self_attn",
        "cache",
        having("blocks.2.mix", remembered=values_forgotten),
        also_kinds=("state",),
        port=ExaonePort,
        in_words="a step of layer 2 writes its value over that of the token before, too",
        words=("cache", "state", "past", "value"),
    ),
)

MISTAKES: Final = (*NEMOTRON, *EXAONE)
