"""Small models with random weights, and their inputs: `python -m tests.upgrades.models FOLDER NAME…`.

Run by the older version of transformers, it saves each model as a checkpoint and its inputs as an .npz
file beside it; both versions load these. It needs torch and transformers alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import Tensor

from tests.rewrites.catalogue import randomise, tokens

VOCABULARY: Final = 101
_DECODER: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ENCODER: Final = {
    key: _DECODER[key]
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}


@dataclass(frozen=True)
class Upgraded:
    """A model that both versions load from one checkpoint.

    Attributes:
        kind: The class of transformers that makes and saves it.
        config: Settings of its configuration; members of a nested one as a mapping.
        inputs: Makes the arguments of its forward.
    """

    kind: str
    config: Mapping[str, Any]
    inputs: Callable[[], Mapping[str, Tensor]]


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padded_ids() -> dict[str, Tensor]:
    """Two sequences of token ids `(2, 12)`, the second with padding at its end."""
    ids = tokens(2, 12, VOCABULARY)
    mask = torch.ones_like(ids)
    ids[1, 9:], mask[1, 9:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def plain_ids() -> dict[str, Tensor]:
    return {"input_ids": tokens(2, 12, VOCABULARY)}


def source_and_target_ids() -> dict[str, Tensor]:
    return {**padded_ids(), "decoder_input_ids": tokens(2, 7, VOCABULARY, seed=2)}


UPGRADED: Final[Mapping[str, Upgraded]] = {
    "gpt2": Upgraded(
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 32,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        padded_ids,
    ),
    "gemma3": Upgraded(
        "Gemma3ForCausalLM",
        {
            **_DECODER,
            "num_hidden_layers": 4,
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        plain_ids,
    ),
    "qwen3-moe": Upgraded(
        "Qwen3MoeForCausalLM",
        {
            **_DECODER,
            "head_dim": 12,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        plain_ids,
    ),
    "bert": Upgraded(
        "BertModel", {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 32}, padded_ids
    ),
    "t5": Upgraded(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 48,
            "d_kv": 12,
            "d_ff": 96,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "decoder_start_token_id": 0,
        },
        source_and_target_ids,
    ),
    "vit": Upgraded(
        "ViTForImageClassification",
        {**_ENCODER, "image_size": 24, "patch_size": 8, "num_labels": 5},
        lambda: {"pixel_values": normal(2, 3, 24, 24)},
    ),
    "llama": Upgraded("LlamaForCausalLM", _DECODER, padded_ids),
    "mistral": Upgraded("MistralForCausalLM", {**_DECODER, "sliding_window": 5}, plain_ids),
    "whisper": Upgraded(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 16,
            "d_model": 48,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_source_positions": 20,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        lambda: {"input_features": normal(2, 16, 40), "decoder_input_ids": tokens(2, 7, VOCABULARY)},
    ),
    "clip": Upgraded(
        "CLIPModel",
        {
            "projection_dim": 24,
            "text_config": {
                **_ENCODER,
                "num_hidden_layers": 2,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 32,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "vision_config": {**_ENCODER, "num_hidden_layers": 2, "image_size": 24, "patch_size": 8},
        },
        lambda: {**padded_ids(), "pixel_values": normal(2, 3, 24, 24)},
    ),
    "phi3": Upgraded("Phi3ForCausalLM", _DECODER, plain_ids),
    "deepseek-v3": Upgraded(
        "DeepseekV3ForCausalLM",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
        plain_ids,
    ),
    "wav2vec2": Upgraded(
        "Wav2Vec2ForCTC",
        {
            **_ENCODER,
            "num_hidden_layers": 2,
            "vocab_size": 32,
            "conv_dim": [16, 16, 16],
            "conv_kernel": [10, 3, 3],
            "conv_stride": [5, 2, 2],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "num_feat_extract_layers": 3,
        },
        lambda: {"input_values": normal(2, 800)},
    ),
}


def save(name: str, folder: Path) -> None:
    """Write a checkpoint and `inputs.npz` to a folder."""
    entry = UPGRADED[name]
    kind: Any = getattr(transformers, entry.kind)
    model = kind(kind.config_class(**entry.config)).eval()
    randomise(model)
    model.save_pretrained(folder)
    arrays: dict[str, Any] = {argument: value.numpy() for argument, value in entry.inputs().items()}
    np.savez(folder / "inputs.npz", **arrays)


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        save(argument, Path(sys.argv[1]) / argument)
