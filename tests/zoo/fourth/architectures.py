"""The tiny models of the fourth zoo: twelve architectures that the other zoos leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from tests.zoo.architecture import (
    MATRIX_STD,
    VOCABULARY,
    Architecture,
    decode,
    noise,
    padded,
    redraw,
    text_inputs,
    tokens,
)

_IDS: Final = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: Final = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": MATRIX_STD,
    "tie_word_embeddings": False,
}
IMAGE: Final = 250  # the token that stands for an image's
_LONGEST_WORD: Final = 240  # ids below it are words


def _normal(parameter: Tensor, std: float, generator: torch.Generator) -> Tensor:
    return std * torch.randn(parameter.shape, generator=generator)


def _convolution(parameter: Tensor, generator: torch.Generator) -> None:
    """Weights that keep the size of what goes through."""
    parameter.copy_(_normal(parameter, 1.2 / parameter[0].numel() ** 0.5, generator))


def _redraw_neo(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    redraw(name, parameter, generator)
    if name.endswith(("q_proj.weight", "k_proj.weight")):  # scores are not divided
        parameter *= 0.5


def _redraw_routed(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("mlp.gate.weight"):
        parameter.copy_(_normal(parameter, 0.2, generator))
    elif "experts." in name:
        parameter.copy_(_normal(parameter, 0.1, generator))
    elif name.endswith(("A_log", "dt_bias")):
        parameter.copy_(_normal(parameter, 0.7, generator) - 1.5)
    elif name.endswith("conv1d.weight"):
        parameter.copy_(_normal(parameter, 0.4, generator))
    else:
        redraw(name, parameter, generator)


def _redraw_disentangled(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith(("query_proj.weight", "key_proj.weight")):
        parameter.copy_(_normal(parameter, 0.15, generator))
    elif name.endswith("conv.weight"):
        _convolution(parameter, generator)
    else:
        redraw(name, parameter, generator)


def _redraw_image(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("running_var"):
        parameter.copy_(_normal(parameter, 0.5, generator).exp())
    elif name.endswith("running_mean"):
        parameter.copy_(_normal(parameter, 0.2, generator))
    elif "lambda_" in name:
        parameter.copy_(0.6 + _normal(parameter, 0.2, generator))
    elif name.endswith(("bias_table", "position_embeddings", "cls_token")):
        parameter.copy_(_normal(parameter, 0.5, generator))
    elif parameter.ndim == 4:
        _convolution(parameter, generator)
    elif parameter.ndim == 1 and name.endswith("weight"):
        parameter.copy_(1 + _normal(parameter, 0.2, generator))
    elif name == "head.head.4.bias":
        parameter.fill_(0.75)
    elif name.endswith(("lin1.weight", "classifier.weight")):
        parameter.copy_(_normal(parameter, 0.12, generator))
    else:
        redraw(name, parameter, generator)


def _redraw_vocoder(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name == "scale":
        parameter.copy_(0.6 + torch.rand(parameter.shape, generator=generator))
    elif name == "mean":
        parameter.copy_(_normal(parameter, 0.4, generator))
    elif name.endswith("weight"):
        _convolution(parameter, generator)
    else:
        redraw(name, parameter, generator)


def _redraw_towers(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("qkv.weight"):
        parameter.copy_(_normal(parameter, 0.2, generator))
    elif "visual" in name and parameter.ndim == 2:
        parameter.copy_(_normal(parameter, 0.12, generator))
    else:
        redraw(name, parameter, generator)


def _masked_inputs() -> dict[str, Any]:
    ids, mask = padded(28)
    return {"input_ids": ids, "attention_mask": mask}


def _translation_inputs() -> dict[str, Any]:
    ids, mask = padded(20)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": tokens(12, rows=2, seed=1),
        "use_cache": False,
    }


def _mixed_inputs() -> dict[str, Any]:
    """Words, an image of 4 by 8 patches, words, one of 4 by 4, and words."""
    ids = tokens(30)
    ids[ids >= _LONGEST_WORD] -= 20
    for start, count in ((5, 8), (18, 4)):
        ids[0, start : start + count] = IMAGE
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": noise(48, 96),
        "image_grid_thw": torch.tensor([[1, 4, 8], [1, 4, 4]]),
        "use_cache": False,
    }


_NEO: Final = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 6,
    "max_position_embeddings": 64,
    "initializer_range": MATRIX_STD,
}
_LFM: Final = {
    **_DECODER,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}

FOURTH_ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "gpt_neo": Architecture(
        "GPTNeoForCausalLM", "GPTNeoConfig", _NEO, inputs=lambda: text_inputs(28), redraw=_redraw_neo
    ),
    "gpt_neo_stream": Architecture(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        _NEO,
        inputs=lambda: {"input_ids": tokens(20)},
        run=decode,
        redraw=_redraw_neo,
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "Glm4Config",
        {
            **_DECODER,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        inputs=lambda: text_inputs(36),
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {
            **_DECODER,
            "intermediate_size": 48,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "clip_qkv": 1.0,
        },
        inputs=lambda: text_inputs(40),
        redraw=_redraw_routed,
    ),
    "qwen3_next": Architecture(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_DECODER,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0, 1],
        },
        inputs=lambda: text_inputs(36),
        redraw=_redraw_routed,
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", "Lfm2Config", _LFM, inputs=lambda: text_inputs(28)),
    "lfm2_stream": Architecture(
        "Lfm2ForCausalLM", "Lfm2Config", _LFM, inputs=lambda: {"input_ids": tokens(18)}, run=decode
    ),
    "deberta_v2": Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {
            **_IDS,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "initializer_range": MATRIX_STD,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": "p2c|c2p",
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "conv_kernel_size": 3,
            "conv_act": "gelu",
        },
        inputs=_masked_inputs,
        redraw=_redraw_disentangled,
    ),
    "m2m_100": Architecture(
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        {
            **_IDS,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
            "scale_embedding": True,
            "init_std": MATRIX_STD,
            "decoder_start_token_id": 2,
        },
        inputs=_translation_inputs,
    ),
    "efficientnet": Architecture(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        {
            "num_labels": 10,
            "image_size": 32,
            "width_coefficient": 0.5,
            "depth_coefficient": 1.0,
            "kernel_sizes": [3, 3, 5],
            "in_channels": [32, 16, 24],
            "out_channels": [16, 24, 40],
            "strides": [1, 2, 2],
            "depthwise_padding": [3],
            "num_block_repeats": [1, 2, 2],
            "expand_ratios": [1, 3, 3],
            "hidden_dim": 640,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 32, 32)},
        redraw=_redraw_image,
    ),
    "beit": Architecture(
        "BeitForImageClassification",
        "BeitConfig",
        {
            "num_labels": 10,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "use_absolute_position_embeddings": True,
            "use_relative_position_bias": True,
            "initializer_range": MATRIX_STD,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 32, 32)},
        redraw=_redraw_image,
    ),
    "dpt": Architecture(
        "DPTForDepthEstimation",
        "DPTConfig",
        {
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 48,
            "patch_size": 8,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 16, 24, 32],
            "fusion_hidden_size": 16,
            "initializer_range": MATRIX_STD,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 32, 32)},
        redraw=_redraw_image,
    ),
    "hifigan": Architecture(
        "SpeechT5HifiGan",
        "SpeechT5HifiGanConfig",
        {
            "model_in_dim": 20,
            "upsample_initial_channel": 32,
            "upsample_rates": [4, 2],
            "upsample_kernel_sizes": [8, 4],
            "resblock_kernel_sizes": [3, 5],
            "resblock_dilation_sizes": [[1, 3], [1, 3]],
        },
        inputs=lambda: {"spectrogram": noise(2, 14, 20)},
        redraw=_redraw_vocoder,
    ),
    "qwen2_vl": Architecture(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {
                **_DECODER,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 3, 3],
                },
            },
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "initializer_range": MATRIX_STD,
            },
            "image_token_id": IMAGE,
            "video_token_id": 251,
            "vision_start_token_id": 252,
            "vision_end_token_id": 253,
        },
        inputs=_mixed_inputs,
        redraw=_redraw_towers,
    ),
}
