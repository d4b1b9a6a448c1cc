"""Mistakes in the ports of DeBERTa v2 and M2M-100; their words were written before any report was read."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from tests.zoo.entry import PortedMistake
from tests.zoo.fourth.texts import DebertaPort, Looker, M2MPort
from tests.zoo.planting import with_values
from tests.zoo.third.parts import having

LAYERS: Final = range(3)


def apart(*layers: int) -> tuple[str, ...]:
    """Sites of disentangled attention."""
    return tuple(f"deberta.encoder.layer.{at}.attention.self" for at in layers)


def usual_scale(_: Any, size: int) -> float:
    return 1 / math.sqrt(size)


def same_slots(self: Any, distances: Tensor) -> tuple[Tensor, Tensor]:
    """The distance from key to query is taken for that from query to key."""
    slots = (distances + self.span).clamp(0, 2 * self.span - 1)
    return slots, slots


def all_distances(_: Any, length: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)


def raw_table(self: Any) -> Tensor:
    out: Tensor = self.table
    return out


def from_the_layer(self: Any, _: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    out: Tensor = self.near(x, x, mask)
    return out


DEBERTA: Final = (
    PortedMistake(
        "deberta_usual_scale",
        "deberta_v2",
        apart(0)[0],
        "factor",
        having(*(f"blocks.{at}.mix" for at in LAYERS), scale=usual_scale),
        also=apart(*LAYERS),
        port=DebertaPort,
        in_words="scores are divided by the root of the head size, not of three times it",
        words=("scale", "scaling", "factor", "divided", "temperature"),
    ),
    PortedMistake(
        "deberta_distances_not_turned",
        "deberta_v2",
        apart(0)[0],
        "position",
        having(*(f"blocks.{at}.mix" for at in LAYERS), slots=same_slots),
        also=apart(*LAYERS),
        also_kinds=("transposition", "permutation"),
        port=DebertaPort,
        in_words="keys look up the distance to the query with the sign of the other direction",
        words=("position", "relative", "distance", "transpos", "sign"),
    ),
    PortedMistake(
        "deberta_distances_without_buckets",
        "deberta_v2",
        "deberta.encoder",
        "position",
        having("@root", distances=all_distances),
        also_kinds=("clip",),
        port=DebertaPort,
        in_words="far distances are cut off at the last bucket, where buckets are to grow",
        words=("position", "relative", "distance", "bucket"),
    ),
    PortedMistake(
        "deberta_table_not_normed",
        "deberta_v2",
        "deberta.encoder.LayerNorm",
        "missing_module",
        having("@root", far=raw_table),
        also=("deberta.encoder",),
        port=DebertaPort,
        in_words="the table of distances is used without its norm",
        words=("missing", "norm"),
    ),
    PortedMistake(
        "deberta_neighbours_of_the_layer",
        "deberta_v2",
        "deberta.encoder",
        "wiring",
        having("@root", joined=from_the_layer),
        also=("deberta.encoder.conv", "deberta.encoder.conv.conv"),
        port=DebertaPort,
        in_words="the convolution reads what the first layer gives, not what it is given",
        words=("wiring", "wired", "input", "reads", "connect"),
    ),
)


def from_zero(_: Any, ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand(ids.shape)


def sines_in_turn(self: Any, places: Tensor) -> Tensor:
    """As in the paper: a sine, a cosine, a sine."""
    half = self.size // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = places[..., None].float() * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


def sees_padding(self: Any, x: Tensor, states: Tensor, keep: Tensor) -> Tensor:
    return Looker.forward(self, x, states, torch.ones_like(keep))


SIDES: Final = ("model.encoder", "model.decoder")
PLACES: Final = tuple(f"{side}.embed_positions" for side in SIDES)

M2M: Final = (
    PortedMistake(
        "m2m_places_from_zero",
        "m2m_100",
        PLACES[0],
        "position",
        having("source", "aim", places=from_zero),
        also=(*PLACES, *SIDES),
        also_kinds=("offset", "shift"),
        port=M2MPort,
        in_words="places begin at zero, not after the number of the padding token",
        words=("position", "offset", "shift", "sinus"),
    ),
    PortedMistake(
        "m2m_sines_in_turn",
        "m2m_100",
        PLACES[0],
        "permutation",
        having("source", "aim", sines=sines_in_turn),
        also=(*PLACES, *SIDES),
        also_kinds=("position", "frequencies"),
        port=M2MPort,
        in_words="sines and cosines alternate, where the sines come first and then the cosines",
        words=("position", "permut", "interleav", "sinus", "order"),
    ),
    PortedMistake(
        "m2m_padding_is_read",
        "m2m_100",
        "model.decoder.layers.1.encoder_attn",
        "mask",
        having("write.1.cross", forward=sees_padding),
        port=M2MPort,
        in_words="attention to what was read does not leave out padding",
        words=("mask", "padding"),
    ),
    PortedMistake(
        "m2m_words_not_scaled",
        "m2m_100",
        "model.decoder.embed_tokens",
        "factor",
        with_values("aim", factor=1.0),
        also=("model.decoder",),
        port=M2MPort,
        in_words="words of the decoder are not multiplied by the root of the width",
        words=("scale", "scaling", "factor", "multipl"),
    ),
)

MISTAKES: Final = (*DEBERTA, *M2M)
