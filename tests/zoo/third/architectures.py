"""The tiny models of the third zoo: models that the other zoos leave out, and a tagger of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

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
_FUSED_GAIN: Final = 2.5  # of a fused projection, so that attention is not uniform


class Tagger(nn.Module):
    """Tags each token of a text: a bidirectional LSTM, a GRU over it, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.encoder = nn.LSTM(32, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(48)
        self.smoother = nn.GRU(48, 40, batch_first=True)
        self.tags = nn.Linear(40, 9)

    def forward(self, input_ids: Tensor) -> Tensor:
        states, _ = self.encoder(self.embedding(input_ids))
        smooth, _ = self.smoother(self.norm(states))
        scores: Tensor = self.tags(smooth)
        return scores


def _redraw_recurrent(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if "weight_" in name:
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    elif "bias_" in name:
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    elif "embedding" not in name:
        redraw(name, parameter, generator)


def _redraw_fused(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    redraw(name, parameter, generator)
    if name.endswith(("query_key_value.weight", "Wqkv.weight")):
        parameter *= _FUSED_GAIN


def _redraw_mamba2(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("dt_bias"):
        parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator) - 1)
    elif name.endswith("A_log"):
        parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator) - 2)
    elif name.endswith(".D"):
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    elif name.endswith("conv1d.bias"):
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    else:
        redraw(name, parameter, generator)


def _redraw_rwkv(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if "time_mix" in name:
        parameter.copy_(torch.rand(parameter.shape, generator=generator))
    elif "time_" in name:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) - 0.5)
    elif parameter.ndim == 2 and not name.endswith("embeddings.weight"):
        parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    else:
        redraw(name, parameter, generator)


def _redraw_vision(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if "layer_scale" in name:
        parameter.copy_(0.5 + 0.3 * torch.randn(parameter.shape, generator=generator))
    elif name.endswith("pwconv1.weight"):
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    elif "dwconv" in name and name.endswith("weight"):
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    elif name.endswith("running_var"):
        parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    elif name.endswith("running_mean"):
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    else:
        redraw(name, parameter, generator)


def _redraw_towers(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name == "logit_scale":
        parameter.fill_(1.5)
    elif name == "logit_bias":
        parameter.fill_(-2.0)
    elif name.endswith("in_proj_weight"):
        parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    elif name.endswith("in_proj_bias"):
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    elif parameter.ndim == 2 and not name.endswith(("q_proj.weight", "k_proj.weight")):
        parameter.copy_(0.12 * torch.randn(parameter.shape, generator=generator))
    else:
        redraw(name, parameter, generator)


def _redraw_marian(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if "embed_positions" not in name:
        redraw(name, parameter, generator)


def _masked_inputs() -> dict[str, Any]:
    ids, mask = padded(28)
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def _albert_inputs() -> dict[str, Any]:
    ids, mask = padded(24)
    segments = torch.zeros_like(ids)
    segments[:, 9:] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def _marian_inputs() -> dict[str, Any]:
    ids, mask = padded(20)
    decoder = tokens(12, rows=2, seed=1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder, "use_cache": False}


_STABLELM: Final = {
    **_DECODER,
    "use_qkv_bias": True,
    "qk_layernorm": True,
    "use_parallel_residual": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_TOWER: Final = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

THIRD_ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "phi": Architecture(
        "PhiForCausalLM",
        "PhiConfig",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        inputs=lambda: text_inputs(32),
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM", "StableLmConfig", _STABLELM, inputs=lambda: text_inputs(32)
    ),
    "stablelm_stream": Architecture(
        "StableLmForCausalLM",
        "StableLmConfig",
        _STABLELM,
        inputs=lambda: {"input_ids": tokens(24)},
        run=decode,
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        "FalconConfig",
        {
            **_IDS,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "alibi": True,
            "bias": True,
            "initializer_range": MATRIX_STD,
            "tie_word_embeddings": True,
        },
        inputs=_masked_inputs,
        redraw=_redraw_fused,
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {
            **_IDS,
            "hidden_size": 64,
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "init_std": MATRIX_STD,
            "tie_word_embeddings": True,
        },
        inputs=_masked_inputs,
    ),
    "cohere": Architecture(
        "CohereForCausalLM",
        "CohereConfig",
        {**_DECODER, "tie_word_embeddings": True, "logit_scale": 0.25, "use_qk_norm": False},
        inputs=lambda: text_inputs(32),
    ),
    "dbrx": Architecture(
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            **_IDS,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 128,
            "initializer_range": MATRIX_STD,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2},
        },
        inputs=lambda: text_inputs(40),
        redraw=_redraw_fused,
    ),
    "mamba2_two_groups": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            **_IDS,
            "hidden_size": 64,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "num_hidden_layers": 3,
            "chunk_size": 16,
            "initializer_range": MATRIX_STD,
            "tie_word_embeddings": False,
        },
        inputs=lambda: text_inputs(40),
        redraw=_redraw_mamba2,
    ),
    "rwkv": Architecture(
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            **_IDS,
            "hidden_size": 48,
            "attention_hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "context_length": 64,
            "rescale_every": 0,
        },
        inputs=lambda: text_inputs(24),
        redraw=_redraw_rwkv,
    ),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {
            "num_labels": 10,
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [2, 2, 1, 1],
            "num_channels": 3,
            "patch_size": 2,
            "initializer_range": MATRIX_STD,
            "layer_scale_init_value": 0.5,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 32, 32)},
        redraw=_redraw_vision,
    ),
    "segformer": Architecture(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_labels": 7,
            "num_encoder_blocks": 3,
            "depths": [1, 2, 1],
            "sr_ratios": [4, 2, 1],
            "hidden_sizes": [16, 24, 32],
            "patch_sizes": [7, 3, 3],
            "strides": [2, 2, 2],
            "num_attention_heads": [1, 2, 4],
            "mlp_ratios": [2, 2, 2],
            "decoder_hidden_size": 24,
            "initializer_range": MATRIX_STD,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 32, 32)},
        redraw=_redraw_vision,
    ),
    "siglip": Architecture(
        "SiglipModel",
        "SiglipConfig",
        {
            "text_config": {**_TOWER, **_IDS, "max_position_embeddings": 16, "projection_size": 48},
            "vision_config": {**_TOWER, "image_size": 24, "patch_size": 6},
        },
        inputs=lambda: {"input_ids": tokens(16, rows=2), "pixel_values": noise(2, 3, 24, 24)},
        redraw=_redraw_towers,
    ),
    "albert": Architecture(
        "AlbertForMaskedLM",
        "AlbertConfig",
        {
            **_IDS,
            "embedding_size": 32,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "initializer_range": MATRIX_STD,
        },
        inputs=_albert_inputs,
    ),
    "marian": Architecture(
        "MarianMTModel",
        "MarianConfig",
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
            "activation_function": "swish",
            "init_std": MATRIX_STD,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": None,
        },
        inputs=_marian_inputs,
        redraw=_redraw_marian,
    ),
    "tagger": Architecture(
        Tagger, inputs=lambda: {"input_ids": tokens(16, rows=3)}, redraw=_redraw_recurrent
    ),
}
