"""Mistakes in the ports of HiFi-GAN and Qwen2-VL; their words were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.fourth.signals import MixedPort, Vocoder
from tests.zoo.third.parts import having


def multiplied(self: Any, x: Tensor) -> Tensor:
    out: Tensor = (x - self.mean) * self.scale
    return out


def a_sample_early(self: Any, x: Tensor) -> Tensor:
    """Everything is computed, and cut to its length one sample too late."""
    every = functional.conv_transpose1d(x, self.weight, self.bias, self.stride)
    start, length = self.padding[0] + 1, x.shape[-1] * self.stride[0]
    return every[..., start : start + length]


def without_holes(port: Any) -> None:
    conv = port.stages[1].blocks[1].holed[1]
    conv.dilation, conv.padding = (1,), (2,)


HIFIGAN: Final = (
    PortedMistake(
        "hifigan_last_slope_as_the_others",
        "hifigan",
        "@root",
        "activation",
        having("@root", last_slope=0.1),
        also_kinds=("factor",),
        port=Vocoder,
        in_words="the last leaky ReLU has the slope of the others, 0.1, not the default of 0.01",
        words=("slope", "relu", "activation"),
    ),
    PortedMistake(
        "hifigan_multiplied_by_the_scale",
        "hifigan",
        "@root",
        "factor",
        having("@root", normed=multiplied),
        also_kinds=("statistics",),
        port=Vocoder,
        in_words="the spectrogram is multiplied by its scale, not divided",
        words=("scale", "scaling", "factor", "divided", "multipl"),
    ),
    PortedMistake(
        "hifigan_samples_early",
        "hifigan",
        "upsampler.1",
        "shift",
        having("stages.1.grow", forward=a_sample_early),
        also_kinds=("padding",),
        port=Vocoder,
        in_words="what the transposed convolution gives is cut one sample too far at its start",
        words=("shift", "pad", "rolled", "offset"),
    ),
    PortedMistake(
        "hifigan_without_holes",
        "hifigan",
        "resblocks.3.convs1.1",
        "window",
        without_holes,
        also=("resblocks.3",),
        also_kinds=("padding",),
        port=Vocoder,
        in_words="the taps of a convolution are next to one another, where they are to be three apart",
        words=("dilat", "holes", "window", "receptive"),
    ),
)


def axes_in_turn(_: Any) -> list[int]:
    return [0, 1, 2, 0, 1, 2, 1, 2]


def sees_other_images(_: Any, images: Tensor) -> Tensor:
    return torch.ones(len(images), len(images), dtype=torch.bool)


def quick(_: Any, x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def by_count(_: Any, height: int, width: int) -> int:
    return height * width


def rows_one_by_one(_: Any, height: int, width: int) -> Tensor:
    return torch.cartesian_prod(torch.arange(height), torch.arange(width))


_BLOCKS: Final = tuple(f"model.visual.blocks.{at}.attn" for at in range(2))
_TURNED: Final = "model.language_model.rotary_emb"

MIXED: Final = (
    PortedMistake(
        "qwen2_vl_axes_in_turn",
        "qwen2_vl",
        _TURNED,
        "rope",
        having("@root", axes=axes_in_turn),
        also=("model.language_model",),
        also_kinds=("permutation", "frequencies", "position"),
        port=MixedPort,
        in_words="time, row and column turn the channels by turns, where each turns a section of its own",
        words=("rope", "rotary", "section", "rotat", "permut", "interleav", "position"),
    ),
    PortedMistake(
        "qwen2_vl_images_see_one_another",
        "qwen2_vl",
        _BLOCKS[0],
        "mask",
        having("tower.blocks.0.look", "tower.blocks.1.look", keep=sees_other_images),
        also=(*_BLOCKS, "model.visual"),
        port=MixedPort,
        in_words="patches see those of other images",
        words=("mask", "image", "block-diagonal", "sequence"),
    ),
    PortedMistake(
        "qwen2_vl_quick_merger",
        "qwen2_vl",
        "model.visual.merger.mlp.1",
        "activation",
        having("tower.merge", act=quick),
        also=("model.visual.merger.mlp", "model.visual.merger"),
        port=MixedPort,
        in_words="the merger has the quick GELU of the blocks, not the exact one",
        words=("gelu", "activation"),
    ),
    PortedMistake(
        "qwen2_vl_places_by_count",
        "qwen2_vl",
        "model",
        "position",
        having("@root", after=by_count),
        also=(_TURNED, "model.language_model"),
        also_kinds=("offset",),
        port=MixedPort,
        in_words="after an image, places go on by the count of its tokens, not by its longer side",
        words=("position", "offset", "places"),
    ),
    PortedMistake(
        "qwen2_vl_patches_row_by_row",
        "qwen2_vl",
        "model.visual",
        "position",
        having("tower", places=rows_one_by_one),
        also=("model.visual.rotary_pos_emb",),
        also_kinds=("permutation", "rope"),
        port=MixedPort,
        in_words="places of patches go along the rows, where those that are merged come one after the other",
        words=("position", "permut", "order", "rotary", "rope"),
    ),
)

MISTAKES: Final = (*HIFIGAN, *MIXED)
