"""The tiny models of the fifth zoo: twelve architectures that the other zoos leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import XLNetConfig, XLNetForTokenClassification

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
from tests.zoo.fifth.mmdit import CHANNELS, POOLED, TEXT_WIDTH, MMDiT

_IDS: Final = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: Final = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": MATRIX_STD,
    "tie_word_embeddings": False,
}
END: Final = 255  # the token that ends a prompt


def _normal(parameter: Tensor, std: float, generator: torch.Generator) -> Tensor:
    return std * torch.randn(parameter.shape, generator=generator)


def _keeping(parameter: Tensor, generator: torch.Generator, gain: float = 1.2) -> None:
    """Weights that keep the size of what goes through."""
    parameter.copy_(_normal(parameter, gain / parameter[0].numel() ** 0.5, generator))


def _redraw_routed(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith(("router.weight", "mlp.gate.weight")):
        parameter.copy_(_normal(parameter, 0.3, generator))
    elif "experts." in name and parameter.ndim == 3:
        parameter.copy_(_normal(parameter, 0.1, generator))
    elif name.endswith(("qkv_proj.weight", "output_gate.weight")):
        parameter.copy_(_normal(parameter, 0.12, generator))
    elif name.endswith(("slope_rate", "_decay")):
        return
    else:
        redraw(name, parameter, generator)


def _redraw_modern(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("Wqkv.weight"):
        parameter.copy_(_normal(parameter, 0.15, generator))
    elif name.endswith("tok_embeddings.weight"):
        parameter.copy_(_normal(parameter, 0.06, generator))
    else:
        redraw(name, parameter, generator)


def _redraw_remembering(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith(("rel_attn.q", "rel_attn.k", "rel_attn.r")):
        parameter.copy_(_normal(parameter, 0.12, generator))
    elif name.endswith(("rel_attn.v", "rel_attn.o")):
        parameter.copy_(_normal(parameter, 0.1, generator))
    elif name.endswith(("r_r_bias", "r_s_bias", "r_w_bias", "seg_embed")):
        parameter.copy_(_normal(parameter, 0.4, generator))
    elif name.endswith(("word_embedding.weight", "mask_emb")):
        parameter.copy_(_normal(parameter, 0.5, generator))
    else:
        redraw(name, parameter, generator)


def _redraw_pegasus(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith(("embed_tokens.weight", "shared.weight", "lm_head.weight")):
        parameter.copy_(_normal(parameter, 0.1, generator))
    elif name.endswith("embed_global.weight"):
        parameter.copy_(_normal(parameter, 0.7, generator))
    else:
        redraw(name, parameter, generator)


def _redraw_picture(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("running_var"):
        parameter.copy_(0.1 * _normal(parameter, 0.5, generator).exp())
    elif name.endswith("running_mean"):
        parameter.copy_(_normal(parameter, 0.2, generator))
    elif "normalization.weight" in name:
        parameter.copy_(0.4 + _normal(parameter, 0.1, generator))
    elif name.endswith(("sampling_offsets.weight", "attention_weights.weight")):
        parameter.copy_(_normal(parameter, 0.12, generator))
    elif name.endswith("level_embed"):
        parameter.copy_(_normal(parameter, 0.5, generator))
    elif name.endswith("query_position_embeddings.weight"):
        parameter.copy_(_normal(parameter, 0.7, generator))
    elif "bbox_embed" in name and name.endswith("weight"):
        _keeping(parameter, generator, 0.9)
    elif parameter.ndim == 4:
        _keeping(parameter, generator)
    elif name.endswith(("key.weight", "query.weight")):
        _keeping(parameter, generator, 1.5)
    elif parameter.ndim == 2:
        _keeping(parameter, generator, 0.9)
    elif name.endswith("sampling_offsets.bias"):
        parameter += _normal(parameter, 0.3, generator)
    else:
        redraw(name, parameter, generator)


def _redraw_segments(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith(("position_embedding.weight", "token_embedding.weight", "class_embedding")):
        parameter.copy_(_normal(parameter, 0.5, generator))
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        _keeping(parameter, generator, 1.5)
    elif parameter.ndim in (2, 4):
        _keeping(parameter, generator, 1.0)
    else:
        redraw(name, parameter, generator)


def _redraw_speech(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("running_var"):
        parameter.copy_(0.3 * _normal(parameter, 0.4, generator).exp())
    elif name.endswith("running_mean"):
        parameter.copy_(_normal(parameter, 0.2, generator))
    elif name.endswith(("bias_u", "bias_v")):
        parameter.copy_(_normal(parameter, 0.5, generator))
    elif name.endswith(("q_proj.weight", "k_proj.weight", "relative_k_proj.weight")):
        _keeping(parameter, generator, 1.2)
    elif name.endswith("subsampling.linear.weight"):
        _keeping(parameter, generator, 0.3)  # what it gives is scaled by 8
    elif parameter.ndim >= 2:
        _keeping(parameter, generator, 1.0)
    else:
        redraw(name, parameter, generator)


def _redraw_diffusion(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if "mod.linear" in name:
        parameter.copy_(_normal(parameter, 0.12 if parameter.ndim == 2 else 0.4, generator))
    elif name.endswith("norm.weight"):
        parameter += _normal(parameter, 0.2, generator)
    elif parameter.ndim >= 2:
        _keeping(parameter, generator, 1.0)
    else:
        parameter.copy_(_normal(parameter, 0.1, generator))


def _masked_inputs() -> dict[str, Any]:
    """Two rows, the second with so little padding that all of it has a word near by."""
    ids, mask = tokens(28, rows=2), torch.ones(2, 28, dtype=torch.long)
    ids[1, -4:], mask[1, -4:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _segmented_inputs() -> dict[str, Any]:
    """Two rows of two segments, the second shorter."""
    ids, mask = padded(20)
    segments = torch.zeros_like(ids)
    segments[0, 7:], segments[1, 11:] = 1, 1
    return {"input_ids": ids, "attention_mask": mask.float(), "token_type_ids": segments}


def in_two_parts(model: Any, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> None:
    """Feed the first eight tokens, and the others with what the model remembers of them."""
    memory = None
    for part in (slice(8), slice(8, None)):
        memory = model(
            input_ids=input_ids[:, part],
            attention_mask=attention_mask[:, part],
            token_type_ids=token_type_ids[:, part],
            mems=memory,
            use_mems=True,
        ).mems


def _summary_inputs() -> dict[str, Any]:
    ids, mask = padded(28)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": tokens(12, rows=2, seed=1),
        "use_cache": False,
    }


def _detection_inputs() -> dict[str, Any]:
    pixels, mask = noise(2, 3, 64, 96), torch.ones(2, 64, 96, dtype=torch.long)
    mask[1, 48:], mask[1, :, 80:] = 0, 0
    return {"pixel_values": pixels * mask[:, None], "pixel_mask": mask}


def _prompted_inputs() -> dict[str, Any]:
    ids, mask = tokens(9, rows=2), torch.ones(2, 9, dtype=torch.long)
    ids[ids == END] -= 1
    ids[0, 7], ids[1, 5] = END, END
    ids[0, 8:], ids[1, 6:] = 0, 0
    mask[0, 8:], mask[1, 6:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": noise(2, 3, 32, 32)}


def _speech_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, 43:] = 0
    return {"input_features": noise(2, 60, 16), "attention_mask": mask}


def _latent_inputs() -> dict[str, Any]:
    return {
        "latents": noise(2, CHANNELS, 8, 12),
        "time": torch.tensor([0.25, 0.8125]),
        "text": noise(2, 7, TEXT_WIDTH, seed=1),
        "pooled": noise(2, POOLED, seed=2),
    }


class TinyXLNet(XLNetForTokenClassification):  # type: ignore[no-untyped-call]  # the library's
    """XLNet of three layers; `from_pretrained` would leave the parameters of attention in float32."""

    def __init__(self) -> None:
        options: dict[str, Any] = {
            **_IDS,
            "d_model": 64,
            "n_layer": 3,
            "n_head": 4,
            "d_inner": 128,
            "mem_len": 6,
            "num_labels": 9,
            "initializer_range": MATRIX_STD,
        }
        super().__init__(XLNetConfig(**options))


_EXAONE: Final = {
    **_DECODER,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "sliding_window_pattern": "LLGL",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
_MINIMAX: Final = {
    **_DECODER,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "block_size": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.75,
    "linear_attn_alpha_factor": 1.25,
    "linear_attn_beta_factor": 0.5,
    "mlp_alpha_factor": 2.0,
    "mlp_beta_factor": 0.5,
}

FIFTH_ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "nemotron": Architecture(
        "NemotronForCausalLM",
        "NemotronConfig",
        {
            **_DECODER,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        inputs=lambda: text_inputs(36),
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", "Exaone4Config", _EXAONE, inputs=lambda: text_inputs(30)),
    "exaone4_stream": Architecture(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        _EXAONE,
        inputs=lambda: {"input_ids": tokens(18)},
        run=decode,
    ),
    "minimax": Architecture(
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        _MINIMAX,
        inputs=lambda: text_inputs(28),
        redraw=_redraw_routed,
    ),
    "minimax_stream": Architecture(
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**_MINIMAX, "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
        inputs=lambda: {"input_ids": tokens(16)},
        run=decode,
        redraw=_redraw_routed,
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_DECODER,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "attention_chunk_size": 12,
            "floor_scale": 5,
            "attn_scale": 0.4,
            "use_qk_norm": True,
        },
        inputs=lambda: text_inputs(32),
        redraw=_redraw_routed,
    ),
    "modernbert": Architecture(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **_IDS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "initializer_range": MATRIX_STD,
            "global_attn_every_n_layers": 3,
            "local_attention": 8,
        },
        inputs=_masked_inputs,
        redraw=_redraw_modern,
    ),
    "xlnet": Architecture(TinyXLNet, inputs=_segmented_inputs, run=in_two_parts, redraw=_redraw_remembering),
    "pegasus_x": Architecture(
        "PegasusXForConditionalGeneration",
        "PegasusXConfig",
        {
            **_IDS,
            "d_model": 64,
            "encoder_layers": 3,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 64,
            "block_size": 8,
            "num_global_tokens": 4,
            "init_std": MATRIX_STD,
            "decoder_start_token_id": 0,
        },
        inputs=_summary_inputs,
        redraw=_redraw_pegasus,
    ),
    "mobilevit": Architecture(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {
            "num_labels": 10,
            "image_size": 64,
            "hidden_sizes": [24, 32, 40],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 48],
            "num_attention_heads": 4,
            "mlp_ratio": 2.0,
            "expand_ratio": 2.0,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 48, 64)},
        redraw=_redraw_picture,
    ),
    "deformable_detr": Architecture(
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        {
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16, 24, 32],
                "depths": [1, 1, 1, 1],
                "layer_type": "basic",
                "out_features": ["stage2", "stage3", "stage4"],
            },
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "encoder_n_points": 2,
            "decoder_n_points": 3,
            "num_queries": 7,
            "num_labels": 6,
            "with_box_refine": True,
        },
        inputs=_detection_inputs,
        redraw=_redraw_picture,
    ),
    "clipseg": Architecture(
        "CLIPSegForImageSegmentation",
        "CLIPSegConfig",
        {
            "text_config": {
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 16,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": END,
            },
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "image_size": 24,
                "patch_size": 8,
            },
            "projection_dim": 24,
            "extract_layers": [0, 1, 3],
            "reduce_dim": 16,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 40,
            "conditional_layer": 1,
            "use_complex_transposed_convolution": True,
        },
        inputs=_prompted_inputs,
        redraw=_redraw_segments,
    ),
    "parakeet": Architecture(
        "ParakeetForCTC",
        "ParakeetCTCConfig",
        {
            "vocab_size": 40,
            "pad_token_id": 39,
            "encoder_config": {
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 96,
                "conv_kernel_size": 5,
                "subsampling_factor": 4,
                "subsampling_conv_channels": 12,
                "num_mel_bins": 16,
                "max_position_embeddings": 64,
            },
        },
        inputs=_speech_inputs,
        redraw=_redraw_speech,
    ),
    "mmdit": Architecture(MMDiT, inputs=_latent_inputs, redraw=_redraw_diffusion),
}
