"""The tiny models of the second zoo: none of the first, and of more fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from tests.zoo.architecture import (
    MATRIX_STD,
    TEXT,
    VOCABULARY,
    Architecture,
    decode,
    noise,
    padded,
    text_inputs,
    tokens,
)
from tests.zoo.second.diffusion import DiT, UNet2DCondition

_QUERIES: Final = ("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "to_q.weight", "to_k.weight")
_HEADS: Final = "query_key_value.weight"  # queries, keys, values head by head
_OWN_SCHEME: Final = ("A_log", "recurrent_param", "gate_weight", "original0", "original1", "logit_scale")


def redraw(name: str, values: torch.Tensor, generator: torch.Generator) -> None:
    """Draw weights and statistics that a trained model could have."""

    def drawn(std: float) -> torch.Tensor:
        return std * torch.randn(values.shape, generator=generator)

    if any(own in name for own in _OWN_SCHEME):
        return
    if name.endswith("running_var"):
        values.copy_(0.5 + torch.rand(values.shape, generator=generator))
    elif name.endswith(("running_mean", "bias_table")):
        values.copy_(drawn(0.5))
    elif name.endswith("dt_bias"):  # steps from 0.05 to 0.7
        values.copy_(3 * torch.rand(values.shape, generator=generator) - 3)
    elif name.endswith(_QUERIES):
        values.copy_(drawn(0.15))
    elif name.endswith(_HEADS):
        values.copy_(drawn(0.15))
        values.view(-1, 3, 8, values.shape[-1])[:, 2] *= MATRIX_STD / 0.15
    elif name.endswith("gate.weight"):  # of a router
        values.copy_(drawn(0.2))
    elif name.endswith("mixer.in_proj.weight"):  # what writes and reads states
        values[256:288] *= 4
    elif "experts." in name:
        values.copy_(drawn(0.12))
    elif name.endswith("linear_out.weight"):  # of a recurrence, whose results are small
        values.copy_(drawn(0.6))
    elif name.endswith("bias"):
        values += drawn(0.1)
    elif values.ndim == 1 or values.shape[:3] == (1, 1, 1):  # of a norm, or one value per channel
        values += drawn(0.2)
    elif values.ndim == 4:
        values.copy_(drawn(1.4 / values[0].numel() ** 0.5))
    elif "adaLN" in name or "time_emb" in name or "embed" in name:
        values.copy_(drawn(0.1))


CAUSAL: Final = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
YARN_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
OLMO2: Final[Mapping[str, Any]] = {**CAUSAL, "num_key_value_heads": 2}
MAMBA2: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 2,
    "expand": 2,
    "chunk_size": 8,
    "num_hidden_layers": 3,
    "initializer_range": MATRIX_STD,
    "residual_in_fp32": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def left_padded_inputs() -> dict[str, Any]:
    """Two rows, the second with padding before it."""
    ids, mask = tokens(40, rows=2), torch.ones(2, 40, dtype=torch.long)
    ids[1, :6] = 0
    mask[1, :6] = 0
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def bart_inputs() -> dict[str, Any]:
    ids, mask = padded(30)
    decoder = tokens(14, rows=2, seed=1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder, "use_cache": False}


def clip_inputs() -> dict[str, Any]:
    ids = tokens(12, rows=2)
    ids[ids == 250] = 3
    ids[0, 11], ids[1, 7] = 250, 250  # ends of the texts
    pixels = noise(2, 3, 24, 32)
    return {"input_ids": ids, "pixel_values": pixels, "interpolate_pos_encoding": True}


def speech_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 280:] = 0
    return {"input_values": noise(2, 400) * mask, "attention_mask": mask}


def unet_inputs() -> dict[str, Any]:
    return {
        "sample": noise(2, 4, 16, 16),
        "timestep": torch.tensor([37, 801]),
        "encoder_hidden_states": noise(2, 7, 24, seed=1),
    }


def dit_inputs() -> dict[str, Any]:
    return {
        "latent": noise(2, 4, 8, 12),
        "timestep": torch.tensor([37, 801]),
        "label": torch.tensor([3, 8]),
    }


def in_two_chunks(model: Any, input_ids: torch.Tensor) -> None:
    """Feed the prompt in two parts with a cache, as servers do whose batches have little room."""
    out = model(input_ids=input_ids[:, :10], use_cache=True)
    model(input_ids=input_ids[:, 10:], cache=out.cache, use_cache=True)


def _model(name: str, options: Mapping[str, Any], **rest: Any) -> Architecture:
    return Architecture(
        name, name.partition("For")[0].removesuffix("Model") + "Config", options, redraw=redraw, **rest
    )


SECOND_ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "resnet": _model(
        "ResNetForImageClassification",
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64],
            "depths": [2, 2, 2],
            "layer_type": "basic",
            "num_labels": 10,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 64, 64)},
    ),
    "convnextv2": _model(
        "ConvNextV2ForImageClassification",
        {
            "hidden_sizes": [16, 32, 64],
            "depths": [2, 2, 2],
            "num_stages": 3,
            "num_labels": 10,
            "initializer_range": MATRIX_STD,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 64, 48)},
    ),
    "swin": _model(
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "initializer_range": MATRIX_STD,
            "num_labels": 10,
        },
        inputs=lambda: {"pixel_values": noise(1, 3, 32, 32)},
    ),
    "clip": _model(
        "CLIPModel",
        {
            "projection_dim": 48,
            "text_config": {
                "vocab_size": VOCABULARY,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 24,
                "projection_dim": 48,
                "eos_token_id": 250,
                "bos_token_id": 1,
                "pad_token_id": 0,
            },
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 24,
                "patch_size": 4,
                "projection_dim": 48,
            },
        },
        inputs=clip_inputs,
    ),
    "wav2vec2": _model(
        "Wav2Vec2ForCTC",
        {
            "vocab_size": 32,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "conv_dim": [32, 32, 32],
            "conv_kernel": [5, 3, 2],
            "conv_stride": [3, 2, 2],
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "initializer_range": MATRIX_STD,
        },
        inputs=speech_inputs,
    ),
    "bart": _model(
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
            "init_std": MATRIX_STD,
            "scale_embedding": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
        inputs=bart_inputs,
    ),
    "mamba2": _model("Mamba2ForCausalLM", MAMBA2, inputs=lambda: text_inputs(28)),
    "mamba2_decode": _model(
        "Mamba2ForCausalLM", MAMBA2, inputs=lambda: {"input_ids": tokens(18)}, run=decode
    ),
    "recurrent_gemma": _model(
        "RecurrentGemmaForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "lru_width": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "attention_window_size": 16,
            "logits_soft_cap": 2.0,
            "w_init_variance_scale": 1.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        inputs=lambda: text_inputs(40),
    ),
    "deepseek_v3": _model(
        "DeepseekV3ForCausalLM",
        {
            **TEXT,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_local_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "rope_parameters": YARN_ROPE,
            "rope_interleave": True,
        },
        inputs=lambda: text_inputs(48),
    ),
    "granitemoe": _model(
        "GraniteMoeForCausalLM",
        {
            **CAUSAL,
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.15,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
        inputs=lambda: text_inputs(48),
    ),
    "bloom": _model(
        "BloomForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "n_head": 6,  # no power of two
            "n_layer": 3,
            "initializer_range": MATRIX_STD,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        inputs=left_padded_inputs,
    ),
    "gpt_neox": _model(
        "GPTNeoXForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            "initializer_range": MATRIX_STD,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        inputs=lambda: text_inputs(48),
    ),
    "olmo2": _model("Olmo2ForCausalLM", OLMO2, inputs=lambda: text_inputs(48)),
    "olmo2_decode": _model("Olmo2ForCausalLM", OLMO2, inputs=lambda: {"input_ids": tokens(20)}, run=decode),
    "olmo2_chunked": _model(
        "Olmo2ForCausalLM", OLMO2, inputs=lambda: {"input_ids": tokens(24)}, run=in_two_chunks
    ),
    "unet": Architecture(UNet2DCondition, inputs=unet_inputs, redraw=redraw),
    "dit": Architecture(DiT, inputs=dit_inputs, redraw=redraw),
}
