"""Mistakes in models of pictures; the words that name each were written before any report was read."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.clipseg.modeling_clipseg import CLIPSegDecoderOutput
from transformers.utils.output_capturing import capture_outputs

from tests.zoo.entry import PortedMistake
from tests.zoo.fifth.parts import as_it_is
from tests.zoo.fifth.pictures import MobilePort
from tests.zoo.planting import computing, fed, rebound, returning, with_tensors, with_values
from tests.zoo.third.parts import having

STAGES: Final = "mobilevit.encoder.layer"


def rows_for_columns(self: Any, x: Tensor, rows: int, columns: int) -> Tensor:
    """Pixels are put back with the rows and columns of a patch exchanged."""
    parts = torch.unflatten(torch.unflatten(x, 0, (-1, self.size, self.size)), 3, (rows, columns))
    return parts.permute(0, 5, 3, 2, 4, 1).flatten(4, 5).flatten(2, 3)


def by_corners(_: Any, x: Tensor, height: int, width: int) -> Tensor:
    if tuple(x.shape[2:]) == (height, width):
        return x
    return functional.interpolate(x, size=(height, width), mode="bilinear", align_corners=True)


def the_other_first(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = self.fuse(torch.cat((y, x), 1))
    return out


def pooled_before_activation(self: Any, x: Tensor) -> Tensor:
    wide = self.wide
    flat = functional.conv2d(x, wide.kernel, wide.shift)
    return functional.silu(flat.mean((2, 3)))


MOBILE: Final = (
    PortedMistake(
        "mobilevit_pixels_put_back_transposed",
        "mobilevit",
        f"{STAGES}.2",
        "permutation",
        having("late.0", together=rows_for_columns),
        also_kinds=("axis", "transposition", "order"),
        port=MobilePort,
        in_words="the pixels of patches are put back with rows and columns exchanged",
        words=("permut", "order", "transpos", "pixel", "patch", "rows"),
    ),
    PortedMistake(
        "mobilevit_resized_by_corners",
        "mobilevit",
        f"{STAGES}.3",
        "interpolation",
        having("late.1", resized=by_corners),
        port=MobilePort,
        in_words="maps that patches do not divide are resized with aligned corners",
        words=("interpol", "corner", "resiz", "bilinear"),
    ),
    PortedMistake(
        "mobilevit_maps_joined_the_other_way",
        "mobilevit",
        f"{STAGES}.4",
        "order",
        having("late.2", fused=the_other_first),
        also=(f"{STAGES}.4.fusion", f"{STAGES}.4.fusion.convolution"),
        also_kinds=("wiring", "permutation"),
        port=MobilePort,
        in_words="the local and the global map are joined in the other order",
        words=("order", "concat", "joined", "halves", "permut", "exchanged"),
    ),
    PortedMistake(
        "mobilevit_padded_at_the_end",
        "mobilevit",
        f"{STAGES}.1.layer.0.conv_3x3.convolution",
        "padding",
        with_values("early.1.cells.1", pads=[0, 1, 0, 1]),
        also=(f"{STAGES}.1.layer.0.conv_3x3", f"{STAGES}.1.layer.0"),
        also_kinds=("shift", "offset"),
        port=MobilePort,
        in_words="the strided convolution is padded at the end alone",
        words=("padding", "padded", "shift", "pixel"),
    ),
    PortedMistake(
        "mobilevit_kernel_transposed",
        "mobilevit",
        f"{STAGES}.0.layer.0.conv_3x3.convolution",
        "transposition",
        with_tensors("early.0.cells.1", kernel=lambda kernel: kernel.transpose(2, 3)),
        also=(f"{STAGES}.0.layer.0.conv_3x3", f"{STAGES}.0.layer.0"),
        also_kinds=("axis", "permutation", "other_weights"),
        port=MobilePort,
        in_words="rows and columns of a kernel are exchanged",
        words=("transpos", "kernel", "axis", "rows"),
    ),
    PortedMistake(
        "mobilevit_pooled_before_activation",
        "mobilevit",
        "mobilevit",
        "order",
        having("@root", pooled=pooled_before_activation),
        also=("mobilevit.conv_1x1_exp", "mobilevit.conv_1x1_exp.activation"),
        also_kinds=("activation", "pooling"),
        port=MobilePort,
        in_words="the last map is pooled before the activation",
        words=("pool", "mean", "activation", "order"),
    ),
    PortedMistake(
        "mobilevit_larger_epsilon",
        "mobilevit",
        f"{STAGES}.2.conv_kxk.normalization",
        "norm_eps",
        with_values(f"{STAGES}.2.conv_kxk.normalization", eps=1e-3),
        also_kinds=("statistics",),
        port=as_it_is,
        in_words="the epsilon of a batch norm is 1e-3, as other frameworks have it",
        words=("eps",),
    ),
)


def extents_exchanged(_: Any, given: dict[str, Any]) -> None:
    given["spatial_shapes"] = given["spatial_shapes"].flip(-1)


def places_by_corners(_: Any, given: dict[str, Any]) -> None:
    """Samples as if the outer pixels' centres were the edges."""
    sizes = torch.tensor([(width, height) for height, width in given["value_spatial_shapes_list"]])
    sizes = sizes.to(given["sampling_locations"].dtype)[:, None]
    given["sampling_locations"] = (given["sampling_locations"] * (sizes - 1) + 0.5) / sizes


def from_the_edges(self: Any, shape: Any, device: Any, dtype: Any, mask: Any = None) -> Tensor:
    """Positions count pixels from one, not from a half."""
    counts = mask.to(dtype)
    y, x = counts.cumsum(1), counts.cumsum(2)
    y, x = (y / (y[:, -1:] + 1e-6) * self.scale, x / (x[:, :, -1:] + 1e-6) * self.scale)
    rates = torch.arange(self.num_position_features).to(dtype)
    rates = self.temperature ** (2 * (rates // 2) / self.num_position_features)

    def waves(places: Tensor) -> Tensor:
        angles = places[..., None] / rates
        return torch.stack((angles[..., ::2].sin(), angles[..., 1::2].cos()), -1).flatten(3)

    return torch.cat((waves(y), waves(x)), 3).permute(0, 3, 1, 2)


def of_each_level(scores: Tensor, _: int) -> Tensor:
    return torch.unflatten(scores, -1, (4, -1)).softmax(-1).flatten(-2)


def padding_sampled(_: Any, given: dict[str, Any]) -> None:
    given["attention_mask"] = None


def without_positions(_: Any, given: dict[str, Any]) -> None:
    given["position_embeddings"] = None


DETR: Final = (
    PortedMistake(
        "detr_height_for_width",
        "deformable_detr",
        "model.encoder.layers.1.self_attn",
        "axis",
        fed("model.encoder.layers.1.self_attn", extents_exchanged),
        also_kinds=("order", "permutation", "factor"),
        port=as_it_is,
        in_words="offsets of samples are divided by height and width, not by width and height",
        words=("height", "width", "axis", "axes", "offset", "sampl"),
    ),
    PortedMistake(
        "detr_samples_by_corners",
        "deformable_detr",
        "model.encoder.layers.0.self_attn.attn",
        "interpolation",
        fed("model.encoder.layers.0.self_attn.attn", places_by_corners),
        also=("model.encoder.layers.0.self_attn",),
        also_kinds=("position", "offset"),
        port=as_it_is,
        in_words="maps are sampled with aligned corners",
        words=("interpol", "corner", "grid", "sampl"),
    ),
    PortedMistake(
        "detr_positions_from_the_edges",
        "deformable_detr",
        "model.position_embedding",
        "offset",
        computing("model.position_embedding", from_the_edges),
        also_kinds=("position", "shift"),
        port=as_it_is,
        in_words="positions are those of the edges of pixels, not of their centres",
        words=("position", "offset", "half", "shift"),
    ),
    PortedMistake(
        "detr_weights_of_each_level",
        "deformable_detr",
        "model.decoder.layers.0.encoder_attn",
        "axis",
        rebound("model.decoder.layers.0.encoder_attn", F=SimpleNamespace(softmax=of_each_level)),
        also_kinds=("statistics", "groups", "factor"),
        port=as_it_is,
        in_words="weights of samples sum to one on each level, not over all",
        words=("softmax", "axis", "level", "sum", "normal"),
    ),
    PortedMistake(
        "detr_levels_reversed",
        "deformable_detr",
        "model",
        "order",
        with_tensors("model", level_embed=lambda table: table.flip(0)),
        also_kinds=("permutation", "other_weights"),
        port=as_it_is,
        in_words="the vectors of the levels are in reverse order",
        words=("order", "revers", "flip", "permut", "level"),
    ),
    PortedMistake(
        "detr_padding_sampled",
        "deformable_detr",
        "model.decoder.layers.1.encoder_attn",
        "mask",
        fed("model.decoder.layers.1.encoder_attn", padding_sampled),
        also_kinds=("padding",),
        port=as_it_is,
        in_words="what lies in the padding of a picture is sampled, too",
        words=("padding", "mask"),
    ),
    PortedMistake(
        "detr_boxes_added_to_shares",
        "deformable_detr",
        "@root",
        "wiring",
        rebound("@root", inverse_sigmoid=lambda x: x),
        also_kinds=("activation", "residual"),
        port=as_it_is,
        in_words="changes of boxes are added to the boxes, not to their logits",
        words=("sigmoid", "box", "logit", "inverse"),
    ),
    PortedMistake(
        "detr_half_the_groups",
        "deformable_detr",
        "model.input_proj.3.1",
        "groups",
        with_values("model.input_proj.3.1", num_groups=16),
        also_kinds=("statistics",),
        port=as_it_is,
        in_words="the norm of the coarsest level has half as many groups",
        words=("group",),
    ),
    PortedMistake(
        "detr_queries_without_positions",
        "deformable_detr",
        "model.decoder.layers.1.self_attn",
        "position",
        fed("model.decoder.layers.1.self_attn", without_positions),
        also_kinds=("missing_module", "wiring"),
        port=as_it_is,
        in_words="positions are not added to queries and keys of the objects in the last layer",
        words=("position", "added", "query"),
    ),
)


def film_exchanged(model: Any) -> None:
    decoder = model.decoder
    decoder.film_mul, decoder.film_add = decoder.film_add, decoder.film_mul


def positions_bilinear(self: Any, embeddings: Tensor, height: int, width: int) -> Tensor:
    table = self.position_embedding.weight
    side = math.isqrt(table.shape[0] - 1)
    grid = table[1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    size = (height // self.patch_size, width // self.patch_size)
    grid = functional.interpolate(grid, size=size, mode="bilinear", align_corners=False)
    return torch.cat((table[None, :1], grid.flatten(2).transpose(1, 2)), 1)


def last_of_the_row(result: Any, *_: Any) -> Any:
    result.pooler_output = result.last_hidden_state[:, -1]
    return result


def fine_first(_: Any, given: dict[str, Any]) -> None:
    given["hidden_states"] = given["hidden_states"][::-1]


def normed_first(self: Any, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> Tensor:
    x = hidden_states + self.self_attn(hidden_states=self.layer_norm1(hidden_states), attention_mask=None)[0]
    out: Tensor = x + self.mlp(self.layer_norm2(x))
    return out


def class_token_kept(self: Any, hidden_states: Any, conditional_embeddings: Tensor, **_: Any) -> Any:
    """The last token is left out in the place of the first."""
    x = torch.zeros(())
    pairs = zip(hidden_states[::-1], self.layers, self.reduces, strict=True)
    for at, (given, layer, reduce) in enumerate(pairs):
        x = reduce(given) + x
        if at == self.conditional_layer:
            gain, shift = self.film_mul(conditional_embeddings), self.film_add(conditional_embeddings)
            x = gain[:, None] * x + shift[:, None]
        x = layer(x, attention_mask=None)
    side = math.isqrt(x.shape[1] - 1)
    grid = torch.unflatten(x[:, :-1].transpose(1, 2), 2, (side, side))
    return CLIPSegDecoderOutput(logits=self.transposed_convolution(grid).squeeze(1))


SEGMENTS: Final = (
    PortedMistake(
        "clipseg_gain_for_shift",
        "clipseg",
        "decoder",
        "order",
        film_exchanged,
        also=("decoder.film_mul", "decoder.film_add"),
        also_kinds=("other_weights", "wiring", "permutation"),
        port=as_it_is,
        in_words="the linear of the gain gives the shift, and that of the shift the gain",
        words=("exchanged", "film", "weights", "order", "swapped"),
    ),
    PortedMistake(
        "clipseg_positions_bilinear",
        "clipseg",
        "clip.vision_model.embeddings",
        "interpolation",
        having("clip.vision_model.embeddings", interpolate_pos_encoding=positions_bilinear),
        also_kinds=("position",),
        port=as_it_is,
        in_words="positions are resized by bilinear interpolation, not bicubic",
        words=("interpol", "bilinear", "bicubic", "position"),
    ),
    PortedMistake(
        "clipseg_pooled_at_the_last",
        "clipseg",
        "clip.text_model",
        "pooling",
        returning("clip.text_model", last_of_the_row),
        also_kinds=("offset", "padding"),
        port=as_it_is,
        in_words="the last token of a row, maybe padding, stands for the prompt, not the one that ends it",
        words=("pool", "token", "last"),
    ),
    PortedMistake(
        "clipseg_fine_maps_first",
        "clipseg",
        "decoder",
        "order",
        fed("decoder", fine_first),
        also=tuple(f"decoder.reduces.{at}" for at in range(3)),
        also_kinds=("wiring", "permutation"),
        port=as_it_is,
        in_words="the decoder takes what layers gave from the first to the last, not the other way",
        words=("order", "revers", "layer", "given"),
    ),
    PortedMistake(
        "clipseg_kernel_flipped",
        "clipseg",
        "decoder.transposed_convolution.2",
        "order",
        with_tensors("decoder.transposed_convolution.2", weight=lambda kernel: kernel.flip(2, 3)),
        also_kinds=("transposition", "permutation", "other_weights", "axis"),
        port=as_it_is,
        in_words="the kernel of a transposed convolution is flipped, as for a convolution of the gradient",
        words=("flip", "revers", "kernel", "order", "transpos"),
    ),
    PortedMistake(
        "clipseg_decoder_normed_first",
        "clipseg",
        "decoder.layers.1",
        "order",
        computing("decoder.layers.1", normed_first),
        also_kinds=("wiring", "residual"),
        port=as_it_is,
        in_words="a layer of the decoder norms what its parts are given, not the sums",
        words=("norm", "order", "before", "residual"),
    ),
    PortedMistake(
        "clipseg_class_token_kept",
        "clipseg",
        "decoder",
        "offset",
        computing("decoder", capture_outputs(class_token_kept)),  # type: ignore[no-untyped-call]  # the library's
        also_kinds=("shift",),
        port=as_it_is,
        in_words="the last token is dropped where the class token should be",
        words=("token", "shift", "offset", "first"),
    ),
)

MISTAKES: Final = (*MOBILE, *DETR, *SEGMENTS)
