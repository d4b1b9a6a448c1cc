"""Vision: ResNet, ConvNeXt V2, Swin, CLIP."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention

from tests.zoo.entry import Correct, Mistake
from tests.zoo.other_ways import linear, patches_by_linear
from tests.zoo.planting import attending, computing, module_at, override, rebound, with_tensors

NORM: Final = "resnet.encoder.stages.1.layers.1.layer.0.normalization"
RESIDUAL: Final = "resnet.encoder.stages.0.layers.1"
BLOCK: Final = "convnextv2.encoder.stages.1.layers.1"
SHIFTED: Final = "swin.encoder.layers.0.blocks.1"
LATER: Final = "swin.encoder.layers.1.blocks.0.attention.relative_position_bias"
TEXT_ATTENTION: Final = "text_model.encoder.layers.1.self_attn"


def mean_with_the_wrong_sign(self: Any, input: Tensor) -> Tensor:
    """A norm folded into a scale and an offset, the mean added to the offset."""
    scale = self.weight * torch.rsqrt(self.running_var + self.eps)
    offset = self.bias + self.running_mean * scale
    out: Tensor = input * scale[:, None, None] + offset[:, None, None]
    return out


def pooled_by_maximum(self: Any, input: Tensor) -> Tensor:
    return functional.adaptive_max_pool2d(input, 1)


def activated_before_the_sum(self: Any, hidden_state: Tensor) -> Tensor:
    out: Tensor = self.activation(self.layer(hidden_state)) + self.shortcut(hidden_state)
    return out


def response_without_input(self: Any, hidden_states: Tensor) -> Tensor:
    response = torch.linalg.vector_norm(hidden_states, dim=(1, 2), keepdim=True)
    response = response / (response.mean(-1, keepdim=True) + 1e-6)
    out: Tensor = self.weight * (hidden_states * response) + self.bias
    return out


def norm_before_pooling(self: Any, pixel_values: Tensor, **_: Any) -> Any:
    last = self.encoder(self.embeddings(pixel_values)).last_hidden_state
    pooled = self.layernorm(last.permute(0, 2, 3, 1)).mean((1, 2))
    return BaseModelOutputWithPoolingAndNoAttention(last_hidden_state=last, pooler_output=pooled)


def edges_repeated(self: Any, input: Tensor) -> Tensor:
    padded = functional.pad(input, (3, 3, 3, 3), mode="replicate")
    return functional.conv2d(padded, self.weight, self.bias, groups=self.groups)


def without_mask(model: Any) -> None:
    module_at(model, SHIFTED).get_attn_mask = lambda *_, **__: None


def rows_for_columns(model: Any) -> None:
    """The table of biases read with the offsets of rows and of columns exchanged."""
    bias = module_at(model, LATER)
    rows, columns = bias.relative_position_index // 7, bias.relative_position_index % 7
    bias.relative_position_index = columns * 7 + rows


def windows_of_rows(input_feature: Tensor, window_size: int) -> Tensor:
    """Cut as the memory lies, so that a window is a strip of the image."""
    return input_feature.reshape(-1, window_size, window_size, input_feature.shape[-1])


def not_causal(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, **options: Any) -> Any:
    return attend(module, q, k, v, None, **{**options, "is_causal": False})


def length_over_the_batch(tensor: Tensor) -> Tensor:
    return tensor.square().sum(0, keepdim=True).sqrt()


def class_token_last(self: Any, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Any:
    """The table of positions read as if the class token came after the patches."""
    patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    embeddings = torch.cat((self.class_embedding.expand(len(patches), 1, -1), patches), 1)
    return embeddings + self.interpolate_pos_encoding(embeddings, *pixel_values.shape[2:]).roll(-1, 1)


MISTAKES: Final = (
    Mistake(
        "resnet_mean_with_the_wrong_sign",
        "resnet",
        NORM,
        "offset",
        computing(NORM, mean_with_the_wrong_sign),
        also_kinds=("bias", "statistics"),
    ),
    Mistake(
        "resnet_pooled_by_maximum",
        "resnet",
        "resnet.pooler",
        "pooling",
        computing("resnet.pooler", pooled_by_maximum),
    ),
    Mistake(
        "resnet_activated_before_the_sum",
        "resnet",
        RESIDUAL,
        "order",
        computing(RESIDUAL, activated_before_the_sum),
        also_kinds=("activation", "residual"),
    ),
    Mistake(
        "convnextv2_response_without_input",
        "convnextv2",
        f"{BLOCK}.grn",
        "residual",
        computing(f"{BLOCK}.grn", response_without_input),
    ),
    Mistake(
        "convnextv2_norm_before_pooling",
        "convnextv2",
        "convnextv2",
        "order",
        computing("convnextv2", norm_before_pooling),
        also_kinds=("pooling",),
    ),
    Mistake(
        "convnextv2_edges_repeated",
        "convnextv2",
        f"{BLOCK}.dwconv",
        "padding",
        computing(f"{BLOCK}.dwconv", edges_repeated),
    ),
    Mistake("swin_without_mask", "swin", SHIFTED, "mask", without_mask),
    Mistake(
        "swin_rows_for_columns",
        "swin",
        LATER,
        "position",
        rows_for_columns,
        also_kinds=("transposition", "permutation"),
    ),
    Mistake(
        "swin_windows_of_rows",
        "swin",
        SHIFTED,
        "permutation",
        rebound(SHIFTED, window_partition=windows_of_rows),
    ),
    Mistake(
        "clip_text_not_causal",
        "clip",
        TEXT_ATTENTION,
        "mask",
        attending(TEXT_ATTENTION, not_causal),
    ),
    Mistake(
        "clip_scale_not_exponentiated",
        "clip",
        "@root",
        "factor",
        with_tensors("@root", logit_scale=torch.log),
    ),
    Mistake(
        "clip_length_over_the_batch",
        "clip",
        "@root",
        "axis",
        rebound("@root", _get_vector_norm=length_over_the_batch),
        also_kinds=("factor",),
    ),
    Mistake(
        "clip_class_token_last",
        "clip",
        "vision_model.embeddings",
        "position",
        computing("vision_model.embeddings", class_token_last),
        also_kinds=("shift", "offset", "permutation"),
    ),
)


def channels_last(model: Any) -> Any:
    return model.to(memory_format=torch.channels_last)


def patches_by_matrix(model: Any) -> Any:
    """Convolutions that do not overlap as products with cut patches."""
    sites = ["convnextv2.embeddings.patch_embeddings"]
    sites += [f"convnextv2.encoder.stages.{stage}.downsampling_layer.1" for stage in (1, 2)]
    for site in sites:
        computing(site, patches_by_linear)(model)
    return model


def windows_by_index(model: Any) -> Any:
    """Windows gathered by a table of places."""

    def cut(grid: Tensor, size: int) -> Tensor:
        rows, columns = grid.shape[1:3]
        places = torch.arange(rows * columns).view(rows // size, size, columns // size, size)
        order = places.permute(0, 2, 1, 3).reshape(-1)
        return grid.flatten(1, 2)[:, order].reshape(-1, size, size, grid.shape[-1])

    def joined(windows: Tensor, size: int, rows: int, columns: int) -> Tensor:
        places = torch.arange(rows * columns).view(rows // size, columns // size, size, size)
        order = places.permute(0, 2, 1, 3).reshape(-1)
        return windows.reshape(-1, rows * columns, windows.shape[-1])[:, order].reshape(
            -1, rows, columns, windows.shape[-1]
        )

    for path, module in list(model.named_modules()):
        if type(module).__name__ == "SwinLayer":
            rebound(path, window_partition=cut, window_reverse=joined)(model)
    return model


def fused_projections(model: Any) -> Any:
    """Queries, keys and values of the images in one projection, scaled before."""

    def forward(self: Any, hidden_states: Tensor, **_: Any) -> Any:
        parts = self.in_proj(hidden_states).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        weights = torch.softmax(q @ k.mT * self.scale, -1, dtype=torch.float32).to(q.dtype)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights

    for layer in model.vision_model.encoder.layers:
        attention = layer.self_attn
        parts: list[nn.Linear] = [attention.q_proj, attention.k_proj, attention.v_proj]
        attention.in_proj = linear(
            torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        )
        del attention.q_proj, attention.k_proj, attention.v_proj
        override(attention, forward)
    return model


CORRECT: Final = (
    Correct("resnet_channels_last", "resnet", channels_last),
    Correct("convnextv2_patches_by_matrix", "convnextv2", patches_by_matrix),
    Correct("swin_windows_by_index", "swin", windows_by_index),
    Correct("swin_as_it_is", "swin", lambda model: model),
    Correct("clip_fused_projections", "clip", fused_projections),
)
