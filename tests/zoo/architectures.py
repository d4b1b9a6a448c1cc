"""The tiny models of the first zoo, and how any of all zoos is made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
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
from tests.zoo.fifth.architectures import FIFTH_ARCHITECTURES
from tests.zoo.fourth.architectures import FOURTH_ARCHITECTURES
from tests.zoo.second.architectures import SECOND_ARCHITECTURES
from tests.zoo.third.architectures import THIRD_ARCHITECTURES

LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def _bert_inputs() -> dict[str, Any]:
    ids, mask = padded(24)
    segments = torch.zeros_like(ids)
    segments[:, 11:] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def _t5_inputs() -> dict[str, Any]:
    ids, mask = padded(40)
    decoder = tokens(12, rows=2, seed=1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder, "use_cache": False}


def _whisper_inputs() -> dict[str, Any]:
    return {
        "input_features": noise(1, 8, 80),
        "decoder_input_ids": tokens(12),
        "use_cache": False,
    }


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**TEXT, "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama_decode": Architecture(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**TEXT, "rope_parameters": LLAMA3_ROPE},
        inputs=lambda: {"input_ids": tokens(24)},
        run=decode,
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, "attention_bias": True}),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **TEXT,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 0.5,
        },
        attention="eager",
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **TEXT,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 128,
            "initializer_range": MATRIX_STD,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TEXT, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        inputs=lambda: text_inputs(48),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **TEXT,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
        inputs=lambda: text_inputs(48),
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **TEXT,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "swiglu_limit": 1.0,
            "rope_parameters": YARN_ROPE,
        },
        inputs=lambda: text_inputs(64),
        attention="eager",
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 16,
            "relative_attention_max_distance": 32,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": True,
            "scale_decoder_outputs": True,
            "decoder_start_token_id": 0,
        },
        inputs=_t5_inputs,
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_source_positions": 40,
            "max_target_positions": 24,
            "init_std": MATRIX_STD,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        inputs=_whisper_inputs,
    ),
    "bert": Architecture(
        "BertForMaskedLM",
        "BertConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "initializer_range": MATRIX_STD,
        },
        inputs=_bert_inputs,
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 24,
            "patch_size": 4,
            "initializer_range": MATRIX_STD,
            "num_labels": 10,
        },
        inputs=lambda: {"pixel_values": noise(2, 3, 24, 24)},
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "state_size": 8,
            "num_hidden_layers": 3,
            "initializer_range": MATRIX_STD,
            "residual_in_fp32": True,
            "use_mambapy": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        inputs=lambda: text_inputs(24),
    ),
}

# Of all zoos.
ALL_ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    **ARCHITECTURES,
    **SECOND_ARCHITECTURES,
    **THIRD_ARCHITECTURES,
    **FOURTH_ARCHITECTURES,
    **FIFTH_ARCHITECTURES,
}


def make(name: str, dtype: str = "float32") -> Any:
    """A model of its own with the weights that every model of this architecture has.

    Args:
        name: A key of `ALL_ARCHITECTURES`.
        dtype: Precision of the weights and of the computation.
    """
    drawn = _drawn(name)
    if dtype == "float32":
        return copy.deepcopy(drawn)
    return ALL_ARCHITECTURES[name].cast(drawn, getattr(torch, dtype))


@lru_cache
def _drawn(name: str) -> Any:
    return ALL_ARCHITECTURES[name].create()
