"""Mistakes in the ports of encoders, and of an encoder with a decoder."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tests.zoo.entry import PortedMistake
from tests.zoo.planting import with_tensors, with_values
from tests.zoo.third.encoders import AlbertPort, MarianPort
from tests.zoo.third.parts import having

_SHARED: Final = "albert.encoder.albert_layer_groups.0.albert_layers.0"


def residual_of_the_layer(self: Any, x: Tensor, before: Tensor) -> Any:
    return self.norm_f(self.down(self.act(self.up(x))) + before)


def positions_from_two(self: Any, ids: Tensor, segments: Tensor) -> Any:
    x = self.words(ids) + self.segments(segments) + self.places.weight[2 : ids.shape[1] + 2]
    return self.norm(x)


def one_segment(self: Any, ids: Tensor, segments: Tensor) -> Any:
    x = self.words(ids) + self.segments.weight[0] + self.places.weight[: ids.shape[1]]
    return self.norm(x)


def sines_in_turn(self: Any, length: int) -> Any:
    """Sine and cosine side by side, as in the paper; the checkpoints have all sines first."""
    return torch.stack(self.sines[:length].chunk(2, -1), -1).flatten(-2)


def keys_for_values(self: Any, states: Tensor) -> Any:
    return self.kv(states).chunk(2, -1)[::-1]


def norm_first(self: Any, x: Tensor, states: Tensor, seen: Tensor) -> Any:
    return x + self.cross(self.norm_c(x), states, seen)


def states_of_the_first_layer(self: Any, ids: Tensor, seen: Tensor) -> Any:
    x: Tensor = self.source(ids)
    return self.read[0](x, seen)


MISTAKES: Final = (
    PortedMistake(
        "albert_one_call_less",
        "albert",
        "albert.encoder",
        "missing_module",
        with_values("@root", calls=2),
        also=(_SHARED, "albert.encoder.albert_layer_groups.0"),
        also_kinds=("order", "wiring"),
        port=AlbertPort,
        in_words="the shared layer is called twice, not three times",
        words=("call", "times", "missing", "skipped", "fewer"),
    ),
    PortedMistake(
        "albert_residual_of_the_layer",
        "albert",
        _SHARED,
        "residual",
        having("layer", feed=residual_of_the_layer),
        also_kinds=("wiring",),
        port=AlbertPort,
        in_words="the input of the layer is added after the feed-forward, not that of the feed-forward",
        words=("residual", "term"),
    ),
    PortedMistake(
        "albert_positions_from_two",
        "albert",
        "albert.embeddings.position_embeddings",
        "position",
        having("@root", embed=positions_from_two),
        also=("albert.embeddings",),
        also_kinds=("shift",),
        port=AlbertPort,
        in_words="positions begin at 2, as another family's do",
        words=("position", "shift", "row"),
    ),
    PortedMistake(
        "albert_one_segment",
        "albert",
        "albert.embeddings.token_type_embeddings",
        "wiring",
        having("@root", embed=one_segment),
        also=("albert.embeddings",),
        also_kinds=("other_weights", "offset"),
        port=AlbertPort,
        in_words="the ids of segments are not used",
        words=("segment", "token_type", "ids", "argument", "row"),
    ),
    PortedMistake(
        "marian_words_of_the_decoder_not_scaled",
        "marian",
        "model.decoder",
        "factor",
        with_tensors("aim.words", weight=lambda table: table / 8),
        also=("model.decoder.embed_tokens",),
        port=MarianPort,
        in_words="words of the decoder are not multiplied by the root of the width",
        words=("factor", "scale", "times"),
    ),
    PortedMistake(
        "marian_sines_in_turn",
        "marian",
        "model.encoder.embed_positions",
        "permutation",
        having("source", places=sines_in_turn),
        also_kinds=("position", "frequencies"),
        port=MarianPort,
        in_words="sines and cosines of the positions side by side",
        words=("order", "permut", "interleav", "position", "sine"),
    ),
    PortedMistake(
        "marian_keys_for_values",
        "marian",
        "model.decoder.layers.1.encoder_attn",
        "wiring",
        having("write.1.cross", divided=keys_for_values),
        also=(
            "model.decoder.layers.1.encoder_attn.k_proj",
            "model.decoder.layers.1.encoder_attn.v_proj",
        ),
        also_kinds=("other_weights", "permutation"),
        port=MarianPort,
        in_words="keys and values of the attention to the encoder are exchanged",
        words=("swap", "exchang", "k_proj", "v_proj", "keys", "values", "other weights"),
    ),
    PortedMistake(
        "marian_norm_first",
        "marian",
        "model.decoder.layers.0",
        "order",
        having("write.0", crossed=norm_first),
        also=("model.decoder.layers.0.encoder_attn_layer_norm",),
        also_kinds=("wiring", "residual"),
        port=MarianPort,
        in_words="the norm around the attention to the encoder comes first, not last",
        words=("before", "after", "order", "pre-norm", "post-norm", "norm"),
    ),
    PortedMistake(
        "marian_encoder_stops_early",
        "marian",
        "model.encoder",
        "missing_module",
        having("@root", states=states_of_the_first_layer),
        also=("model.encoder.layers.1",),
        also_kinds=("wiring",),
        port=MarianPort,
        in_words="the last layer of the encoder is left out",
        words=("skipped", "missing", "left out", "not called", "hands on"),
    ),
)
