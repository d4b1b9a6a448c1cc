"""Mistakes in models of text; the words that name each were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.fifth.parts import as_it_is
from tests.zoo.fifth.texts import ModernPort, XLPort
from tests.zoo.planting import put, with_tensors, with_values
from tests.zoo.third.parts import having

LAYERS: Final = range(3)


def attention(*layers: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{at}.attn" for at in layers)


def memory(*layers: int) -> tuple[str, ...]:
    return tuple(f"transformer.layer.{at}.rel_attn" for at in layers)


class Plain(nn.Module):
    """A layer norm without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], eps=1e-5)


def rates_exchanged(self: Any, block: Any) -> Any:
    return self.wide if block.is_local else self.near


def backwards_only(self: Any, length: int) -> Tensor:
    back = torch.arange(length)[:, None] - torch.arange(length)
    return (back >= 0) & (back <= (length if self.radius is None else self.radius))


def normed_before(self: Any, x: Tensor) -> Tensor:
    return functional.gelu(self.norm_dense(self.dense(x)))


def padding_seen(self: Any, real: Tensor) -> Tensor:
    out: Tensor = self.near(real.shape[1]).expand(real.shape[0], 1, -1, -1)
    return out


MODERN: Final = (
    PortedMistake(
        "modernbert_first_layer_normed",
        "modernbert",
        "model.layers.0.attn_norm",
        "statistics",
        lambda model: put(model, "blocks.0.pre_mix", Plain()),
        also=("model.layers.0",),
        also_kinds=("missing_module", "wiring", "norm_eps"),
        port=ModernPort,
        in_words="attention of the first layer is given a normed input, which this model leaves out",
        words=("norm", "identity", "layer norm"),
    ),
    PortedMistake(
        "modernbert_rates_exchanged",
        "modernbert",
        "model.rotary_emb",
        "frequencies",
        having("@root", rates=rates_exchanged),
        also=attention(*range(4)),
        also_kinds=("rope",),
        port=ModernPort,
        in_words="local layers have the rotary base of global ones, and these that of local ones",
        words=("theta", "base", "frequenc", "rotary"),
    ),
    PortedMistake(
        "modernbert_only_backwards",
        "modernbert",
        "model.layers.1.attn",
        "mask",
        having("blocks.1.mix", "blocks.2.mix", near=backwards_only),
        also=attention(1, 2),
        also_kinds=("window",),
        port=ModernPort,
        in_words="local layers see those before them only",
        words=("causal", "mask", "window", "one side"),
    ),
    PortedMistake(
        "modernbert_head_normed_before_gelu",
        "modernbert",
        "head",
        "order",
        having("@root", told=normed_before),
        also=("head.act", "head.norm"),
        also_kinds=("activation", "wiring"),
        port=ModernPort,
        in_words="the head norms before it applies GELU",
        words=("order", "before", "gelu", "activation"),
    ),
    PortedMistake(
        "modernbert_padding_seen_near_by",
        "modernbert",
        "model.layers.2.attn",
        "mask",
        having("blocks.2.mix", seen=padding_seen),
        also_kinds=("padding", "window"),
        port=ModernPort,
        in_words="padding is not hidden in layer 2",
        words=("padding", "mask"),
    ),
    PortedMistake(
        "modernbert_bias_of_scores_shifted",
        "modernbert",
        "decoder",
        "shift",
        with_tensors("scores", bias=lambda bias: bias.roll(1)),
        also_kinds=("bias", "permutation", "order", "other_weights"),
        port=ModernPort,
        in_words="the bias of the words' scores is off by one word",
        words=("bias", "shift", "roll", "order"),
    ),
)


def one_further(self: Any, queries: int, keys: int) -> Tensor:
    return queries - 1 - torch.arange(queries)[:, None] + torch.arange(keys)


def by_turns(_: Any, angles: Tensor) -> Tensor:
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


def sum_of_the_normed(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = self.norm(y) + x
    return out


def outputs_remembered(self: Any, x: Tensor, y: Tensor, past: Any) -> Tensor:
    every = y if past is None else torch.cat((past, y), 1)
    return every[:, -self.most :]


def biases_exchanged(model: Any) -> None:
    mix = model.blocks[1].mix
    mix.words, mix.distances = mix.distances, mix.words


def memory_of_segment_one(self: Any, q: Tensor, others: Tensor) -> Tensor:
    """What is remembered counts as of another segment."""
    both = torch.einsum("bnid,snd->bnis", q + self.segments[:, None], self.table)
    before = others.shape[2] - others.shape[1]
    others = others.clone()
    others[:, :, :before] = True
    return torch.where(others[:, None], both[..., 1:], both[..., :1])


XLNET: Final = (
    PortedMistake(
        "xlnet_distances_one_off",
        "xlnet",
        "transformer.layer.0.rel_attn",
        "offset",
        having(*(f"blocks.{at}.mix" for at in LAYERS), picked=one_further),
        also=memory(*LAYERS),
        also_kinds=("position", "shift"),
        port=XLPort,
        in_words="each distance is taken for the next one",
        words=("position", "distance", "offset", "shift", "relative"),
    ),
    PortedMistake(
        "xlnet_segment_rows_exchanged",
        "xlnet",
        "transformer.layer.1.rel_attn",
        "permutation",
        with_tensors("blocks.1.mix", table=lambda table: table.flip(0)),
        also_kinds=("order", "other_weights"),
        port=XLPort,
        in_words="the vectors of the same and of another segment are exchanged in layer 1",
        words=("segment", "seg_embed", "rows", "order", "permut", "flip", "revers"),
    ),
    PortedMistake(
        "xlnet_sines_and_cosines_by_turns",
        "xlnet",
        "transformer",
        "order",
        having("@root", waves=by_turns),
        also=memory(*LAYERS),
        also_kinds=("permutation", "position", "frequencies"),
        port=XLPort,
        in_words="sines and cosines of distances lie by turns, not one after the other",
        words=("sin", "interleav", "order", "position", "distance", "relative"),
    ),
    PortedMistake(
        "xlnet_feed_normed_before_sum",
        "xlnet",
        "transformer.layer.2.ff",
        "order",
        having("blocks.2.feed", added=sum_of_the_normed),
        also=("transformer.layer.2.ff.layer_norm",),
        also_kinds=("residual", "wiring"),
        port=XLPort,
        in_words="the last feed-forward adds its input after the norm",
        words=("residual", "norm", "sum"),
    ),
    PortedMistake(
        "xlnet_outputs_remembered",
        "xlnet",
        "transformer",
        "cache",
        having("@root", remembered=outputs_remembered),
        also=memory(*LAYERS),
        also_kinds=("state", "wiring"),
        port=XLPort,
        in_words="what layers give is remembered, not what they were given",
        words=("mems", "memory", "cache", "state", "past"),
    ),
    PortedMistake(
        "xlnet_biases_exchanged",
        "xlnet",
        "transformer.layer.1.rel_attn",
        "other_weights",
        biases_exchanged,
        also_kinds=("bias", "order"),
        port=XLPort,
        in_words="the biases for words and for distances are exchanged in layer 1",
        words=("bias", "r_w", "r_r", "exchanged"),
    ),
    PortedMistake(
        "xlnet_memory_of_another_segment",
        "xlnet",
        "transformer.layer.2.rel_attn",
        "mask",
        having("blocks.2.mix", of_segments=memory_of_segment_one),
        also_kinds=("cache", "offset", "state"),
        port=XLPort,
        in_words="layer 2 takes what is remembered for another segment",
        words=("segment", "memory", "mems", "past"),
    ),
)


def padding_not_hidden(cls: Any, hidden_states: Tensor, attention_mask: Tensor, block_size: int) -> Any:
    half = block_size // 2
    return functional.pad(hidden_states, (0, 0, half, half)), functional.pad(attention_mask, (half, half))


def globals_not_mixed(self: Any, *args: Any, **options: Any) -> Any:
    words, _ = type(self).__mro__[1].forward(self, *args, **options)  # type: ignore[attr-defined]
    given = args[1] if len(args) > 1 else options["global_hidden_states"]
    return words, given


def rates_of_whole_half(
    self: Any, inputs_embeds: Tensor, cache_length: int = 0, position_ids: Tensor | None = None
) -> Tensor:
    rows, length = inputs_embeds.shape[:2]
    half = self.embed_dim // 2
    rates = torch.exp(torch.arange(half).float() * -(torch.log(torch.tensor(self.max_scale)).float() / half))
    angles = torch.arange(cache_length, cache_length + length).float()[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1).to(inputs_embeds.dtype).expand(rows, -1, -1)


def keys_for_values(
    self: Any,
    global_k: Tensor,
    global_v: Tensor,
    local_q: Tensor,
    local_k: Tensor,
    local_v: Tensor,
    mask: Tensor,
    dim: Any,
) -> Any:
    inner = type(self).__mro__[1].compute_local_attention_representations  # type: ignore[attr-defined]
    return inner(self, global_k, global_k, local_q, local_k, local_v, mask, dim)


def norm_of_words(model: Any) -> None:
    layer = model.model.encoder.layers[2]
    layer.global_self_attn_layer_norm.load_state_dict(layer.self_attn_layer_norm.state_dict())


def one_head_less(model: Any) -> None:
    """Cross attention divides by the root of the width, not of the head size."""
    model.model.decoder.layers[1].encoder_attn.scaling = 64**-0.5


ENCODER: Final = "model.encoder.layers"
PEGASUS: Final = (
    PortedMistake(
        "pegasus_x_stagger_not_hidden",
        "pegasus_x",
        f"{ENCODER}.1",
        "mask",
        having(f"{ENCODER}.1", pad_local_tokens=classmethod(padding_not_hidden)),
        also=(f"{ENCODER}.1.self_attn",),
        also_kinds=("padding",),
        port=as_it_is,
        in_words="what is added to stagger the blocks is not hidden",
        words=("padding", "mask"),
    ),
    PortedMistake(
        "pegasus_x_globals_not_mixed",
        "pegasus_x",
        f"{ENCODER}.1",
        "state",
        having(f"{ENCODER}.1", forward=globals_not_mixed),
        also_kinds=("residual", "wiring", "missing_module"),
        port=as_it_is,
        in_words="layer 1 hands the global tokens on as they are",
        words=("global", "input", "unchanged", "as it is", "handed"),
    ),
    PortedMistake(
        "pegasus_x_rates_of_the_whole_half",
        "pegasus_x",
        "model.encoder.embed_positions",
        "frequencies",
        having("model.encoder.embed_positions", forward=rates_of_whole_half),
        also_kinds=("position",),
        port=as_it_is,
        in_words="the frequencies of the encoder's positions are divided by the count, not by one less",
        words=("frequenc", "position", "rate"),
    ),
    PortedMistake(
        "pegasus_x_decoder_words_not_scaled",
        "pegasus_x",
        "model.decoder.embed_tokens",
        "factor",
        with_values("model.decoder.embed_tokens", embed_scale=1.0),
        port=as_it_is,
        in_words="the decoder's words are not multiplied by the root of the width",
        words=("factor", "scale", "times"),
    ),
    PortedMistake(
        "pegasus_x_keys_for_values_of_globals",
        "pegasus_x",
        f"{ENCODER}.0.self_attn",
        "wiring",
        having(f"{ENCODER}.0.self_attn", compute_local_attention_representations=keys_for_values),
        port=as_it_is,
        in_words="words take the global tokens' keys for their values",
        words=("key", "value", "global"),
    ),
    PortedMistake(
        "pegasus_x_norm_of_words_for_globals",
        "pegasus_x",
        f"{ENCODER}.2.global_self_attn_layer_norm",
        "other_weights",
        norm_of_words,
        also_kinds=("bias",),
        port=as_it_is,
        in_words="global tokens of the last layer are normed with the weights that are for words",
        words=("weights", "values of"),
    ),
    PortedMistake(
        "pegasus_x_cross_scores_by_width",
        "pegasus_x",
        "model.decoder.layers.1.encoder_attn",
        "factor",
        one_head_less,
        port=as_it_is,
        in_words="scores of cross attention are divided by the root of the width, not of the head size",
        words=("factor", "scale", "scores", "divided", "temperature"),
    ),
)

MISTAKES: Final = (*MODERN, *XLNET, *PEGASUS)
