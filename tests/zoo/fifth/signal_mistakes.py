"""Mistakes in models of speech and of diffusion; their words were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.fifth.mmdit import CHANNELS, PATCH
from tests.zoo.fifth.parts import as_it_is
from tests.zoo.fifth.signals import BirdPort, DiffusionPort
from tests.zoo.planting import computing, returning, with_values
from tests.zoo.third.parts import having

LAYERS: Final = range(3)


def gate_of_values(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.gate(x) * self.value(x).sigmoid()
    return out


def upwards(_: Any, length: int) -> Tensor:
    return torch.arange(1 - length, length)


def hidden_afterwards(self: Any, x: Tensor, real: Tensor) -> Tensor:
    x = self.along(x.transpose(1, 2)) * real[:, None]
    out: Tensor = self.norm(x).transpose(1, 2)
    return out


def channels_first(_: Any, x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def rounded_down(_: Any, lengths: Tensor) -> Tensor:
    return lengths // 2 - 1


def norm_by_own_statistics(self: Any, x: Tensor, real: Tensor) -> Tensor:
    """The norm uses what it is given, as in training, not what it has learnt."""
    x = self.along((x * real[..., None]).transpose(1, 2))
    return functional.batch_norm(
        x, None, None, self.norm.weight, self.norm.bias, training=True, eps=self.norm.eps
    ).transpose(1, 2)


def waves_rounded(self: Any, length: int) -> Tensor:
    """Angles in bfloat16, in which not every integer times a rate is told apart."""
    angles = self.distances(length).float()[:, None] * self.rates.float()
    angles = angles.bfloat16().float()
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[None]


PARAKEET: Final = (
    PortedMistake(
        "parakeet_second_feed_in_full",
        "parakeet",
        "encoder.layers.1",
        "factor",
        with_values("blocks.1.second", share=1.0),
        also=("encoder.layers.1.feed_forward2",),
        also_kinds=("residual",),
        port=BirdPort,
        in_words="all of the second feed-forward of layer 1 is added, not half",
        words=("factor", "half", "0.5", "twice", "times", "scale"),
    ),
    PortedMistake(
        "parakeet_values_for_gates",
        "parakeet",
        "encoder.layers.0.conv",
        "order",
        having("blocks.0.conv", gated=gate_of_values),
        also=("encoder.layers.0.conv.pointwise_conv1",),
        also_kinds=("permutation", "wiring", "activation"),
        port=BirdPort,
        in_words="of the two halves of a gated linear the first one is taken for the gate",
        words=("gate", "halves", "order", "glu", "exchanged"),
    ),
    PortedMistake(
        "parakeet_distances_upwards",
        "parakeet",
        "encoder.encode_positions",
        "order",
        having("@root", distances=upwards),
        also=tuple(f"encoder.layers.{at}.self_attn" for at in LAYERS),
        also_kinds=("position", "permutation"),
        port=BirdPort,
        in_words="distances run from the smallest to the largest",
        words=("order", "revers", "position", "sign", "distance"),
    ),
    PortedMistake(
        "parakeet_padding_hidden_afterwards",
        "parakeet",
        "encoder.layers.2.conv",
        "padding",
        having("blocks.2.conv", over_time=hidden_afterwards),
        also_kinds=("mask", "order"),
        port=BirdPort,
        in_words="padding is set to zero after the convolution over time, not before",
        words=("padding", "mask"),
    ),
    PortedMistake(
        "parakeet_pitch_before_channels",
        "parakeet",
        "encoder.subsampling",
        "transposition",
        having("less", flat=channels_first),
        also=("encoder.subsampling.linear",),
        also_kinds=("permutation", "order", "axis"),
        port=BirdPort,
        in_words="the linear after the convolutions has the weights of pitch and channel in the other order",
        words=("permut", "order", "transpos", "axis"),
    ),
    PortedMistake(
        "parakeet_lengths_too_short",
        "parakeet",
        "encoder.subsampling",
        "mask",
        having("less", shorter=rounded_down),
        also=("encoder",),
        also_kinds=("padding", "offset"),
        port=BirdPort,
        in_words="lengths are halved without the padding of the convolutions",
        words=("mask", "length", "padding", "zero"),
    ),
    PortedMistake(
        "parakeet_statistics_of_the_batch",
        "parakeet",
        "encoder.layers.1.conv.norm",
        "statistics",
        having("blocks.1.conv", over_time=norm_by_own_statistics),
        also=("encoder.layers.1.conv",),
        port=BirdPort,
        in_words="the batch norm of layer 1 norms by what it is given, as in training",
        words=("statistic", "training", "running", "mean"),
    ),
    PortedMistake(
        "parakeet_angles_rounded",
        "parakeet",
        "encoder.encode_positions",
        "precision",
        having("@root", waves=waves_rounded),
        also=tuple(f"encoder.layers.{at}.self_attn" for at in LAYERS),
        also_kinds=("position", "frequencies"),
        port=BirdPort,
        in_words="the angles of distances are rounded to bfloat16 before sine and cosine",
        words=("bfloat16", "precision", "round"),
    ),
)


def in_units(self: Any, time: Tensor) -> Tensor:
    """Times as they are, not in thousandths."""
    half = self.width // 2
    rates = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(half).float() / half)
    return time.float()[:, None] * rates


def scale_before_shift(parts: Any, *_: Any) -> Any:
    return (parts[1], parts[0], *parts[2:])


def places_of_words(self: Any, words: int, rows: int, columns: int) -> Tensor:
    """Words are counted on the first axis."""
    grid = torch.zeros(rows, columns, 3)
    grid[..., 1] += torch.arange(rows)[:, None]
    grid[..., 2] += torch.arange(columns)[None, :]
    text = torch.zeros(words, 3)
    text[:, 0] = torch.arange(words)
    return torch.cat((text, grid.reshape(-1, 3)), 0)


def patches_transposed(_: Any, x: Tensor, rows: int, columns: int) -> Tensor:
    x = x.reshape(x.shape[0], rows, columns, PATCH, PATCH, CHANNELS)
    x = torch.einsum("bhwpqc->bchqwp", x)
    return x.reshape(x.shape[0], CHANNELS, rows * PATCH, columns * PATCH)


def values_normed(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = type(self).__mro__[1].forward(self, x)  # type: ignore[attr-defined]
    return q, k, self.unit(v, 1.0)


def both_sums_gated(self: Any, x: Tensor, parts: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """The gate takes the residual, too."""
    inner = type(self).__mro__[1].forward(self, x, parts, cos, sin)  # type: ignore[attr-defined]
    out: Tensor = inner + (parts[2] - 1) * x
    return out


DIFFUSION: Final = (
    PortedMistake(
        "mmdit_time_in_units",
        "mmdit",
        "time_embed",
        "factor",
        having("time", angles=in_units),
        also_kinds=("frequencies", "position"),
        port=DiffusionPort,
        in_words="the time is not multiplied by a thousand",
        words=("factor", "thousand", "1000", "time", "frequenc"),
    ),
    PortedMistake(
        "mmdit_scale_before_shift",
        "mmdit",
        "double_blocks.1.image_mod",
        "order",
        returning("double_blocks.1.image_mod", scale_before_shift),
        also=("double_blocks.1.image_mod.linear",),
        also_kinds=("permutation", "wiring"),
        port=as_it_is,
        in_words="the first two parts of a modulation, shift and scale, are exchanged",
        words=("order", "shift", "exchanged", "swapped", "chunk"),
    ),
    PortedMistake(
        "mmdit_words_counted",
        "mmdit",
        "@root",
        "position",
        having("@root", ids=places_of_words),
        also=("places", *(f"double_blocks.{at}.attend" for at in range(2))),
        also_kinds=("rope", "offset"),
        port=as_it_is,
        in_words="words have positions of their own, not all the same",
        words=("position", "rotary", "ids", "offset"),
    ),
    PortedMistake(
        "mmdit_patches_transposed",
        "mmdit",
        "unpatch",
        "transposition",
        computing("unpatch", patches_transposed),
        also_kinds=("axis", "permutation", "order"),
        port=as_it_is,
        in_words="rows and columns of patches are exchanged in the picture",
        words=("transpos", "axis", "order", "permut", "rows"),
    ),
    PortedMistake(
        "mmdit_values_normed",
        "mmdit",
        "double_blocks.0.image_qkv",
        "statistics",
        having("pairs.0.picture", forward=values_normed),
        also=("double_blocks.0",),
        also_kinds=("missing_module", "wiring"),
        port=DiffusionPort,
        in_words="values of the picture are normed as queries and keys are",
        words=("value", "norm"),
    ),
    PortedMistake(
        "mmdit_residual_gated",
        "mmdit",
        "single_blocks.1",
        "residual",
        having("singles.1", forward=both_sums_gated),
        also_kinds=("wiring", "factor"),
        port=DiffusionPort,
        in_words="the gate of the last block multiplies the residual, too",
        words=("gate", "residual"),
    ),
)

MISTAKES: Final = (*PARAKEET, *DIFFUSION)
