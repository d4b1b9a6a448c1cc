"""Mistakes in the ports of vision models."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.planting import module_at, put, removed, with_tensors
from tests.zoo.third.parts import having, heads, merged
from tests.zoo.third.vision import NextPort, SegPort, SiglipPort

_STAGES: Final = "convnext.encoder.stages"


def mirrored_border(self: Any, x: Tensor, edge: int) -> Any:
    return functional.pad(x.permute(0, 3, 1, 2), (edge,) * 4, mode="reflect").permute(0, 2, 3, 1)


def border_at_the_end(self: Any, x: Tensor, edge: int) -> Any:
    """All of the padding below and to the right but one row and column, as for an even kernel."""
    return functional.pad(x, (0, 0, edge - 1, edge + 1, edge - 1, edge + 1))


def largest(self: Any, x: Tensor) -> Any:
    return x.amax((1, 2))


def columns_first(weight: Tensor) -> Any:
    return torch.unflatten(weight, 1, (2, 2, -1)).transpose(1, 2).flatten(1)


def corners_aligned(self: Any, x: Tensor, size: Any) -> Any:
    y = functional.interpolate(x.permute(0, 3, 1, 2), size=size, mode="bilinear", align_corners=True)
    return y.permute(0, 2, 3, 1)


def in_their_order(self: Any, parts: list[Tensor]) -> Any:
    return torch.cat(parts, -1)


def divided_by_the_variance(model: Any) -> None:
    """A batch norm folded with its variance where its deviation belongs."""
    head = module_at(model, "decode")
    with torch.no_grad():
        head.mix.weight.div_(head.deviation[:, None])
        head.mix.bias.copy_(head.shift - (head.shift - head.mix.bias) / head.deviation)


def keys_of_the_mean(self: Any, x: Tensor) -> Any:
    """The smaller map is the mean of squares instead of a convolution."""
    size = self.reduce.kernel_size[0]
    y = functional.avg_pool2d(x.permute(0, 3, 1, 2), size)
    return self.reduce_norm(y.flatten(2).transpose(1, 2))


def without_residual(self: Any, x: Tensor) -> Any:
    return self.down(functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def patches_by_columns(self: Any, x: Tensor) -> Any:
    return x.transpose(1, 2).flatten(1, 2)


def sees_only_the_past(self: Any, x: Tensor) -> Any:
    q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
    return self.proj(merged(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))


def unit_over_the_batch(self: Any, x: Tensor) -> Any:
    return x / x.norm(dim=0, keepdim=True)


def tanh_gelu(model: Any) -> None:
    put(model, "body.1.blocks.1.act", nn.GELU(approximate="tanh"))


MISTAKES: Final = (
    PortedMistake(
        "convnext_mirrored_border",
        "convnext",
        f"{_STAGES}.0.layers.1.dwconv",
        "padding",
        having("body.0.blocks.1.spatial", bordered=mirrored_border),
        port=NextPort,
        in_words="a depthwise convolution is padded with what it mirrors, not with zeros",
        words=("padding", "padded", "border", "edge", "reflect"),
    ),
    PortedMistake(
        "convnext_border_at_the_end",
        "convnext",
        f"{_STAGES}.2.layers.0.dwconv",
        "padding",
        having("body.2.blocks.0.spatial", bordered=border_at_the_end),
        also_kinds=("shift",),
        port=NextPort,
        in_words="padding is not the same on both sides",
        words=("padding", "padded", "border", "shift", "one pixel", "side"),
    ),
    PortedMistake(
        "convnext_tanh_gelu",
        "convnext",
        f"{_STAGES}.1.layers.1.act",
        "activation",
        tanh_gelu,
        also=(f"{_STAGES}.1.layers.1",),
        port=NextPort,
        in_words="the approximation of GELU by tanh",
        words=("gelu", "activation", "tanh"),
    ),
    PortedMistake(
        "convnext_largest_of_the_map",
        "convnext",
        "convnext",
        "pooling",
        having("@root", pooled=largest),
        also=("@root",),
        port=NextPort,
        in_words="the largest value of the map instead of its mean",
        words=("pool", "maximum", "largest", "mean"),
    ),
    PortedMistake(
        "convnext_columns_first",
        "convnext",
        f"{_STAGES}.3.downsampling_layer.1",
        "transposition",
        with_tensors("body.3.merge.project", weight=columns_first),
        also_kinds=("permutation", "axis"),
        port=NextPort,
        in_words="a convolution's weight with height and width exchanged",
        words=("transpos", "axes", "order", "permut", "height", "width"),
    ),
    PortedMistake(
        "segformer_reduction_not_normed",
        "segformer",
        "segformer.stages.0.blocks.0.attention.sequence_reduction.layer_norm",
        "missing_module",
        removed("encode.0.blocks.0.mixer.reduce_norm"),
        also=("segformer.stages.0.blocks.0.attention.sequence_reduction",),
        port=SegPort,
        in_words="the norm after the reduction is left out",
        words=("skipped", "missing", "identity", "left out", "not applied", "hands on"),
    ),
    PortedMistake(
        "segformer_keys_of_the_mean",
        "segformer",
        "segformer.stages.1.blocks.0.attention.sequence_reduction.sequence_reduction",
        "pooling",
        having("encode.1.blocks.0.mixer", fewer=keys_of_the_mean),
        also=(
            "segformer.stages.1.blocks.0.attention.sequence_reduction",
            "segformer.stages.1.blocks.0.attention",
        ),
        also_kinds=("missing_module", "other_weights"),
        port=SegPort,
        in_words="keys and values are of a mean of squares instead of a convolution",
        words=("pool", "mean", "skipped", "not applied", "other weights", "convolution"),
    ),
    PortedMistake(
        "segformer_corners_aligned",
        "segformer",
        "decode_head",
        "interpolation",
        having("decode", larger=corners_aligned),
        port=SegPort,
        in_words="maps are enlarged with aligned corners",
        words=("corner", "interpol", "enlarg", "upsampl", "resiz"),
    ),
    PortedMistake(
        "segformer_levels_in_their_order",
        "segformer",
        "decode_head",
        "permutation",
        having("decode", joined=in_their_order),
        also=("decode_head.linear_fuse",),
        also_kinds=("order", "wiring"),
        port=SegPort,
        in_words="maps are joined from fine to coarse, not from coarse to fine",
        words=("order", "permut", "revers", "joined", "concat"),
    ),
    PortedMistake(
        "segformer_divided_by_the_variance",
        "segformer",
        "decode_head.batch_norm",
        "statistics",
        divided_by_the_variance,
        also=("decode_head.linear_fuse",),
        also_kinds=("factor",),
        port=SegPort,
        in_words="a folded batch norm divides by the variance",
        words=("statistic", "variance", "batch norm", "factor", "deviation"),
    ),
    PortedMistake(
        "segformer_kernel_turned",
        "segformer",
        "segformer.stages.1.blocks.1.mlp.dwconv.dwconv",
        "permutation",
        with_tensors("encode.1.blocks.1.feed.spatial", kernel=lambda kernel: kernel.flip(0, 1)),
        also=("segformer.stages.1.blocks.1.mlp.dwconv",),
        also_kinds=("transposition", "order", "axis"),
        port=SegPort,
        in_words="a convolution in the sense of mathematics: its kernel is turned",
        words=("flip", "mirror", "revers", "turned", "taps", "transpos", "order"),
    ),
    PortedMistake(
        "siglip_probe_without_residual",
        "siglip",
        "vision_model.head",
        "residual",
        having("image.pool", finish=without_residual),
        port=SiglipPort,
        in_words="nothing is added to the result of the feed-forward",
        words=("residual", "term", "added"),
    ),
    PortedMistake(
        "siglip_patches_by_columns",
        "siglip",
        "vision_model.embeddings",
        "permutation",
        having("image", flat=patches_by_columns),
        also=("vision_model.embeddings.patch_embedding",),
        also_kinds=("transposition", "axis", "position"),
        port=SiglipPort,
        in_words="patches are numbered column by column",
        words=("order", "transpos", "permut", "column", "axes"),
    ),
    PortedMistake(
        "siglip_text_sees_only_the_past",
        "siglip",
        "text_model.encoder.layers.0.self_attn",
        "mask",
        having("text.blocks.0", mix=sees_only_the_past),
        port=SiglipPort,
        in_words="texts have a causal mask, which only CLIP has",
        words=("mask", "causal", "future", "later"),
    ),
    PortedMistake(
        "siglip_unit_over_the_batch",
        "siglip",
        "@root",
        "axis",
        having("@root", unit=unit_over_the_batch),
        also_kinds=("factor",),
        port=SiglipPort,
        in_words="embeddings are normed over the batch, not over their channels",
        words=("axis", "batch", "normed over", "factor", "norm"),
    ),
)
