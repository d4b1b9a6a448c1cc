"""Vision: ResNet, ConvNeXt V2, Swin, CLIP."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.planting import computing, override, put, removed, returning, with_tensors

STAGE: Final = "resnet.encoder.stages.1.layers.0"
BLOCK: Final = "convnextv2.encoder.stages.1.layers.0"
SHIFTED: Final = "swin.encoder.layers.0.blocks.1"


def norm_of_the_batch(self: Any, input: Tensor) -> Tensor:
    """As in training: by what this batch has, where the running statistics count."""
    return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


def padded_after(self: Any, input: Tensor) -> Tensor:
    """Padding as "SAME" has it elsewhere: a stride of two pads only at the end."""
    padded = functional.pad(input, (0, 1, 0, 1))
    return functional.conv2d(padded, self.weight, self.bias, self.stride)


def response_over_channels(self: Any, hidden_states: Tensor) -> Tensor:
    response = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True)
    response = response / (response.mean(dim=(1, 2), keepdim=True) + 1e-6)
    out: Tensor = self.weight * (hidden_states * response) + self.bias + hidden_states
    return out


def norm_over_the_image(self: Any, features: Tensor) -> Tensor:
    """Mean and variance of channels and places together."""
    normed = functional.layer_norm(features, features.shape[1:], eps=self.eps)
    out: Tensor = normed * self.weight[:, None, None] + self.bias[:, None, None]
    return out


def shifted_the_other_way(model: Any) -> None:
    block = model.get_submodule(SHIFTED)
    shift = block.cyclic_shift
    block.cyclic_shift = lambda hidden_states, reverse=False: shift(hidden_states, not reverse)


def merged_row_by_row(self: Any, input_feature: Any, input_dimensions: Any) -> Tensor:
    grid = input_feature.unflatten(1, input_dimensions)
    parts = [grid[:, row::2, column::2] for row in range(2) for column in range(2)]
    out: Tensor = self.reduction(self.norm(torch.cat(parts, -1).flatten(1, 2)))
    return out


def index_transposed(model: Any) -> None:
    bias = model.get_submodule(f"{SHIFTED}.attention.relative_position_bias")
    bias.relative_position_index = bias.relative_position_index.unflatten(0, (16, 16)).T.reshape(-1)


def corners_aligned(model: Any) -> None:
    embeddings = model.vision_model.embeddings

    def interpolate(hidden: Tensor, height: int, width: int) -> Tensor:
        table = embeddings.position_embedding.weight
        grid = table[1:].T.unflatten(1, (6, 6))[None]
        size = height // 4, width // 4
        grid = functional.interpolate(grid, size, mode="bicubic", align_corners=True)
        return torch.cat((table[None, :1], grid.flatten(2).transpose(1, 2)), 1)

    embeddings.interpolate_pos_encoding = interpolate


def pooled_at_the_end(out: Any, *_: Any) -> Any:
    """The last token, wherever the text ends."""
    out.pooler_output = out.last_hidden_state[:, -1]
    return out


MISTAKES: Final = (
    Mistake(
        "resnet_norm_of_the_batch",
        "resnet",
        f"{STAGE}.layer.0.normalization",
        "statistics",
        computing(f"{STAGE}.layer.0.normalization", norm_of_the_batch),
        also_kinds=("factor", "offset"),
    ),
    Mistake(
        "resnet_padded_after",
        "resnet",
        f"{STAGE}.layer.0.convolution",
        "padding",
        computing(f"{STAGE}.layer.0.convolution", padded_after),
        also_kinds=("shift",),
    ),
    Mistake(
        "resnet_kernel_rotated",
        "resnet",
        "resnet.encoder.stages.0.layers.1.layer.1.convolution",
        "permutation",
        with_tensors("resnet.encoder.stages.0.layers.1.layer.1.convolution", weight=lambda w: w.flip((2, 3))),
    ),
    Mistake(
        "convnextv2_response_axis",
        "convnextv2",
        f"{BLOCK}.grn",
        "axis",
        computing(f"{BLOCK}.grn", response_over_channels),
    ),
    Mistake(
        "convnextv2_norm_over_the_image",
        "convnextv2",
        "convnextv2.embeddings.layernorm",
        "axis",
        computing("convnextv2.embeddings.layernorm", norm_over_the_image),
        also_kinds=("statistics",),
    ),
    Mistake("swin_shift_direction", "swin", SHIFTED, "shift", shifted_the_other_way),
    Mistake(
        "swin_merging_order",
        "swin",
        "swin.encoder.layers.0.downsample",
        "permutation",
        computing("swin.encoder.layers.0.downsample", merged_row_by_row),
    ),
    Mistake(
        "swin_bias_transposed",
        "swin",
        f"{SHIFTED}.attention.relative_position_bias",
        "transposition",
        index_transposed,
        also_kinds=("position", "permutation"),
    ),
    Mistake(
        "clip_corners_aligned",
        "clip",
        "vision_model.embeddings",
        "interpolation",
        corners_aligned,
        also_kinds=("position",),
    ),
    Mistake(
        "clip_pooled_at_the_end",
        "clip",
        "text_model",
        "pooling",
        returning("text_model", pooled_at_the_end),
        also_kinds=("position",),
    ),
    Mistake(
        "clip_first_norm",
        "clip",
        "vision_model.pre_layrnorm",
        "missing_module",
        removed("vision_model.pre_layrnorm"),
    ),
)


def norms_folded(model: Any) -> Any:
    """Running statistics in the weights of the convolutions before."""
    for module in list(model.modules()):
        norm = getattr(module, "normalization", None)
        if norm is None:
            continue
        old = module.convolution
        new: Any = nn.Conv2d(
            old.in_channels,
            old.out_channels,
            old.kernel_size,
            old.stride,
            old.padding,
            dtype=old.weight.dtype,
        )
        scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
        with torch.no_grad():
            new.weight.copy_(old.weight.double() * scale[:, None, None, None])
            new.bias.copy_(norm.bias.double() - norm.running_mean.double() * scale)
        module.convolution, module.normalization = new, nn.Identity()
    return model.eval()


class Pointwise(nn.Module):
    """A linear map of the last axis as a convolution with a kernel of one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[:, :, None, None].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, input: Tensor) -> Tensor:
        out = functional.conv2d(input.permute(0, 3, 1, 2), self.weight, self.bias)
        return out.permute(0, 2, 3, 1)


def pointwise_convolutions(model: Any) -> Any:
    for path, module in list(model.named_modules()):
        if path.endswith(("pwconv1", "pwconv2")):
            put(model, path, Pointwise(module))
    return model


def biases_precomputed(model: Any) -> Any:
    """Relative biases looked up once."""
    for module in model.modules():
        if type(module).__name__ == "SwinRelativePositionBias":
            with torch.no_grad():
                looked_up = module()
            override(module, lambda self, looked_up=looked_up: looked_up)
    return model


def masks_stored(model: Any) -> Any:
    """Masks of shifted windows made once, for the size that the model is configured for."""
    for module in model.modules():
        if type(module).__name__ == "SwinLayer" and module.shift_size > 0:
            dtype = module.layernorm_before.weight.dtype
            mask = module.get_attn_mask(*module.input_resolution, dtype=dtype, device="cpu")
            module.register_buffer("attn_mask", mask, persistent=False)
            module.get_attn_mask = lambda *_, mask=mask, **__: mask
    return model


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


CORRECT: Final = (
    Correct(
        "resnet_norms_folded",
        "resnet",
        norms_folded,
        relaid=("convolution",),
    ),
    Correct("resnet_as_it_is", "resnet", lambda model: model),
    Correct("convnextv2_pointwise_convolutions", "convnextv2", pointwise_convolutions),
    Correct("convnextv2_as_it_is", "convnextv2", lambda model: model),
    Correct("swin_biases_precomputed", "swin", biases_precomputed),
    Correct("swin_masks_stored", "swin", masks_stored),
    Correct("clip_eager", "clip", eager),
    Correct("clip_as_it_is", "clip", lambda model: model),
)
