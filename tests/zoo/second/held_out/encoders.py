"""Speech and text with an encoder: wav2vec 2.0, BART."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from tests.zoo.entry import Correct, Mistake
from tests.zoo.other_ways import written_norm
from tests.zoo.planting import attending, computing, module_at, override, removed, with_tensors

CONVOLUTION: Final = "wav2vec2.encoder.pos_conv_embed.conv"
LAYER: Final = "wav2vec2.encoder.layers.1"
ENCODER: Final = "model.encoder.layers.1"
UP: Final = "model.decoder.layers.0.fc1"


def frames_by_ratio(model: Any) -> None:
    """Frames counted as samples over the product of strides, which forgets the ends of kernels."""

    def mask(frames: int, attention_mask: Tensor, add_adapter: Any = None) -> Tensor:
        lengths = (attention_mask.sum(-1) // 12).clamp(max=frames)
        return torch.arange(frames) < lengths[:, None]

    model.wav2vec2._get_feature_vector_attention_mask = mask


def groups_of_every_fourth(self: Any, input: Any) -> Tensor:
    """Each group of the convolution given every fourth channel, where it has channels side by side."""
    order = torch.arange(input.shape[1]).view(-1, self.groups).T.reshape(-1)
    return functional.conv1d(
        input[:, order], self.weight, self.bias, padding=self.padding[0], groups=self.groups
    )


def norms_first(self: Any, hidden_states: Tensor, attention_mask: Any = None, **options: Any) -> Any:
    """As the large models do, whose layers are called stable."""
    attended, _ = self.attention(self.layer_norm(hidden_states), attention_mask=attention_mask, **options)
    hidden_states = hidden_states + attended
    return hidden_states + self.feed_forward(self.final_layer_norm(hidden_states))


def padding_left_in(self: Any, hidden_states: Any, attention_mask: Any = None, **options: Any) -> Any:
    """Frames of the padding masked in the attention, and not zero before the convolution of positions."""
    mask = attention_mask[:, None, None].expand(-1, 1, hidden_states.shape[1], -1)
    hidden_states = self.layer_norm(hidden_states + self.pos_conv_embed(hidden_states))
    for layer in self.layers:
        hidden_states = layer(hidden_states, attention_mask=mask, **options)
    return BaseModelOutput(last_hidden_state=hidden_states)


def keys_bias(model: Any) -> None:
    attention = module_at(model, f"{ENCODER}.self_attn")
    with_tensors(f"{ENCODER}.self_attn.v_proj", bias=lambda _: attention.k_proj.bias)(model)


def scaled_twice(attend: Any, module: Any, q: Tensor, *given: Any, **options: Any) -> Any:
    """Queries that are scaled already, and scores that are scaled again."""
    return attend(module, q * module.scaling, *given, **options)


def halves_exchanged(x: Tensor) -> Tensor:
    """Shards of a weight put together in the wrong order."""
    return x.roll(len(x) // 2, 0)


MISTAKES: Final = (
    Mistake("wav2vec2_frames_by_ratio", "wav2vec2", "wav2vec2", "mask", frames_by_ratio),
    Mistake(
        "wav2vec2_groups_of_every_fourth",
        "wav2vec2",
        CONVOLUTION,
        "permutation",
        computing(CONVOLUTION, groups_of_every_fourth),
        also_kinds=("groups",),
    ),
    Mistake(
        "wav2vec2_norms_first",
        "wav2vec2",
        LAYER,
        "order",
        computing(LAYER, norms_first),
        also_kinds=("residual", "wiring"),
    ),
    Mistake(
        "wav2vec2_padding_left_in",
        "wav2vec2",
        "wav2vec2.encoder",
        "mask",
        computing("wav2vec2.encoder", padding_left_in),
        also_kinds=("padding",),
    ),
    Mistake(
        "bart_keys_bias",
        "bart",
        f"{ENCODER}.self_attn.v_proj",
        "bias",
        keys_bias,
        also_kinds=("offset", "other_weights"),
    ),
    Mistake(
        "bart_scaled_twice",
        "bart",
        f"{ENCODER}.self_attn",
        "factor",
        attending(f"{ENCODER}.self_attn", scaled_twice),
    ),
    Mistake(
        "bart_first_norm",
        "bart",
        "model.decoder.layernorm_embedding",
        "missing_module",
        removed("model.decoder.layernorm_embedding"),
    ),
    Mistake(
        "bart_shards_exchanged",
        "bart",
        UP,
        "permutation",
        with_tensors(UP, weight=halves_exchanged, bias=halves_exchanged),
        also_kinds=("shift",),
    ),
)


def frames_by_matrix(self: Any, input: Tensor) -> Tensor:
    """A convolution as a product with the samples under its kernel."""
    frames = input.unfold(2, self.kernel_size[0], self.stride[0])
    return torch.einsum("bctk,ock->bot", frames, self.weight)


def features_by_matrix(model: Any) -> Any:
    for layer in model.wav2vec2.feature_extractor.conv_layers:
        override(layer.conv, frames_by_matrix)
    return model


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def written_norms(model: Any) -> Any:
    for module in model.modules():
        if type(module).__name__ == "LayerNorm":
            override(module, written_norm)
    return model


CORRECT: Final = (
    Correct("wav2vec2_features_by_matrix", "wav2vec2", features_by_matrix),
    Correct("wav2vec2_as_it_is", "wav2vec2", lambda model: model),
    Correct("bart_eager", "bart", eager),
    Correct("bart_written_norms", "bart", written_norms),
)
