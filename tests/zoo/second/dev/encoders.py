"""Speech and text with an encoder: wav2vec 2.0, BART."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.other_ways import Wrapped, linear
from tests.zoo.planting import attending, computing, override, with_tensors

POSITIONS: Final = "wav2vec2.encoder.pos_conv_embed"
FIRST: Final = "wav2vec2.feature_extractor.conv_layers.0.layer_norm"
DECODER: Final = "model.decoder.layers.1"


def norm_per_kernel(self: Any, input: Tensor) -> Tensor:
    """The parts of the weight normed along the taps, where each tap is normed by itself."""
    size, direction = self.parametrizations.weight.original0, self.parametrizations.weight.original1
    weight = size * direction / direction.norm(dim=2, keepdim=True)
    return functional.conv1d(input, weight, self.bias, padding=self.padding[0], groups=self.groups)


def first_frame_dropped(self: Any, hidden_states: Tensor) -> Tensor:
    return hidden_states[:, :, 1:]


def one_group(self: Any, input: Tensor) -> Tensor:
    return functional.group_norm(input, 1, self.weight, self.bias, self.eps)


def norm_after_activation(self: Any, hidden_states: Tensor) -> Any:
    return self.layer_norm(self.activation(self.conv(hidden_states)))


def positions_without_offset(
    self: Any, input_ids: Tensor, cache_length: int = 0, position_ids: Any = None
) -> Tensor:
    at = torch.arange(cache_length, cache_length + input_ids.shape[1])
    return functional.embedding(at.expand(input_ids.shape[:2]), self.weight)


def sees_the_future(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, **options: Any) -> Any:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)[None, None]
    return attend(module, q, k, v, mask, **options)


MISTAKES: Final = (
    Mistake(
        "wav2vec2_weight_norm_axis",
        "wav2vec2",
        f"{POSITIONS}.conv",
        "axis",
        computing(f"{POSITIONS}.conv", norm_per_kernel),
        also_kinds=("factor",),
    ),
    Mistake(
        "wav2vec2_first_frame_dropped",
        "wav2vec2",
        f"{POSITIONS}.padding",
        "shift",
        computing(f"{POSITIONS}.padding", first_frame_dropped),
        also_kinds=("padding",),
    ),
    Mistake(
        "wav2vec2_one_group", "wav2vec2", FIRST, "groups", computing(FIRST, one_group), also_kinds=("axis",)
    ),
    Mistake(
        "wav2vec2_norm_after_activation",
        "wav2vec2",
        "wav2vec2.feature_extractor.conv_layers.0",
        "order",
        computing("wav2vec2.feature_extractor.conv_layers.0", norm_after_activation),
    ),
    Mistake(
        "bart_positions_without_offset",
        "bart",
        "model.decoder.embed_positions",
        "position",
        computing("model.decoder.embed_positions", positions_without_offset),
        also_kinds=("shift",),
    ),
    Mistake(
        "bart_logits_bias",
        "bart",
        "@root",
        "bias",
        with_tensors("@root", final_logits_bias=torch.zeros_like),
        also_kinds=("offset",),
    ),
    Mistake(
        "bart_sees_the_future",
        "bart",
        f"{DECODER}.self_attn",
        "mask",
        attending(f"{DECODER}.self_attn", sees_the_future),
    ),
)


class FoldedConvolution(nn.Module):
    """A convolution whose weight is what its parts make."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(convolution.weight.detach().clone())
        self.bias = nn.Parameter(convolution.bias.detach().clone())
        self.padding, self.groups = convolution.padding, convolution.groups

    def forward(self, input: Tensor) -> Tensor:
        return functional.conv1d(input, self.weight, self.bias, padding=self.padding, groups=self.groups)


def weight_norm_folded(model: Any) -> Any:
    embedding = model.wav2vec2.encoder.pos_conv_embed
    embedding.conv = FoldedConvolution(embedding.conv).eval()
    return model


def fused_cross_keys_values(model: Any) -> Any:
    """Keys and values of the encoder's states in one projection."""

    def forward(
        self: Any, hidden_states: Tensor, key_value_states: Tensor, attention_mask: Tensor, **_: Any
    ) -> Any:
        q, kv = self.q_proj(hidden_states), self.kv_proj(key_value_states)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, *kv.chunk(2, -1)))
        out = functional.scaled_dot_product_attention(q, k, v, attention_mask, scale=self.scaling)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    for layer in model.model.decoder.layers:
        cross = layer.encoder_attn
        weight = torch.cat((cross.k_proj.weight, cross.v_proj.weight))
        cross.kv_proj = linear(weight, torch.cat((cross.k_proj.bias, cross.v_proj.bias)))
        del cross.k_proj, cross.v_proj
        override(cross, forward)
    return model


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


CORRECT: Final = (
    Correct("wav2vec2_weight_norm_folded", "wav2vec2", weight_norm_folded),
    Correct("wav2vec2_eager", "wav2vec2", eager),
    Correct("bart_fused_cross_keys_values", "bart", fused_cross_keys_values),
    Correct("bart_wrapped", "bart", Wrapped),
    Correct("bart_as_it_is", "bart", lambda model: model),
)
