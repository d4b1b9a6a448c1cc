"""Tiny models of real architectures with random weights that a checkpoint could have, and their inputs.

Weights are drawn so that mistakes show: attention is neither uniform nor one-hot, norms scale each channel
by something else, biases are not zero, and windows, softcaps and the scaling of rotary tables are reached by
the inputs. All weights are rounded to bfloat16, as most checkpoints are, so that the float32 reference and
its low-precision twin have the same ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
import transformers

from tensorcap.workload import Workload

VOCABULARY: Final = 256
_MATRIX_STD: Final = 0.06
_QUERY_STD: Final = 0.15  # of the weights that make queries and keys
_EMBEDDING_STD: Final = 0.02
_NORM_SPREAD: Final = 0.2
_BIAS_STD: Final = 0.1
_QUERIES: Final = ("q_proj.weight", "k_proj.weight", ".query.weight", ".key.weight")
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "wpe.weight", "embeddings.weight")
_OWN_SCHEME: Final = ("A_log", "mixer.D", "dt_proj", "conv1d.weight", "cls_token", "relative_attention_bias")

TEXT: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": _MATRIX_STD,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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


def _tokens(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, count), generator=generator)


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.bfloat16().float()


def _text_inputs(count: int = 96) -> dict[str, Any]:
    return {"input_ids": _tokens(count), "use_cache": False}


def _padded(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of two rows, the second shorter."""
    ids, mask = _tokens(count, rows=2), torch.ones(2, count, dtype=torch.long)
    ids[1, -7:] = 0
    mask[1, -7:] = 0
    return ids, mask


def _bert_inputs() -> dict[str, Any]:
    ids, mask = _padded(24)
    segments = torch.zeros_like(ids)
    segments[:, 11:] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def _t5_inputs() -> dict[str, Any]:
    ids, mask = _padded(40)
    decoder = _tokens(12, rows=2, seed=1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder, "use_cache": False}


def _whisper_inputs() -> dict[str, Any]:
    return {
        "input_features": _noise(1, 8, 80),
        "decoder_input_ids": _tokens(12),
        "use_cache": False,
    }


def decode(model: Any, input_ids: torch.Tensor) -> None:
    """Feed all but three tokens at once, and those one by one, with a cache."""
    start = input_ids.shape[1] - 3
    out = model(input_ids=input_ids[:, :start], use_cache=True)
    name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
    for at in range(start, input_ids.shape[1]):
        given = {name: getattr(out, name), "use_cache": True}
        out = model(input_ids=input_ids[:, at : at + 1], **given)


@dataclass(frozen=True)
class Architecture:
    """A tiny model and what it is run on.

    Attributes:
        model: Name of the model's class in transformers.
        config: Name of the configuration's class.
        options: What the configuration is given.
        inputs: Makes the arguments, anew each time.
        attention: The implementation of attention, the library's choice if None.
        run: As in `Workload`.
    """

    model: str
    config: str
    options: Mapping[str, Any]
    inputs: Callable[[], dict[str, Any]] = _text_inputs
    attention: str | None = None
    run: Callable[..., Any] | None = None

    def workload(self, model: Any) -> Workload:
        """The model on the inputs, floating ones in the model's dtype."""
        dtype = next(model.parameters()).dtype
        inputs = {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in self.inputs().items()
        }
        return Workload(model, inputs, self.run)


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
        inputs=lambda: {"input_ids": _tokens(24)},
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
            "initializer_range": _MATRIX_STD,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TEXT, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        inputs=lambda: _text_inputs(48),
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
        inputs=lambda: _text_inputs(48),
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
        inputs=lambda: _text_inputs(64),
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
            "init_std": _MATRIX_STD,
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
            "initializer_range": _MATRIX_STD,
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
            "initializer_range": _MATRIX_STD,
            "num_labels": 10,
        },
        inputs=lambda: {"pixel_values": _noise(2, 3, 24, 24)},
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "state_size": 8,
            "num_hidden_layers": 3,
            "initializer_range": _MATRIX_STD,
            "residual_in_fp32": True,
            "use_mambapy": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        inputs=lambda: _text_inputs(24),
    ),
}


def make(name: str, dtype: str = "float32") -> Any:
    """A model of its own with the weights that every model of this architecture has.

    That in low precision is made as `from_pretrained(dtype=…)` makes it: what is not saved, such as rotary
    tables, and what the class keeps in float32 stays so.

    Args:
        name: A key of `ARCHITECTURES`.
        dtype: Precision of the weights and of the computation.
    """
    drawn = _drawn(name)
    if dtype == "float32":
        return copy.deepcopy(drawn)
    model = type(drawn).from_pretrained(
        None,
        config=copy.deepcopy(drawn.config),
        state_dict=dict(drawn.state_dict()),
        dtype=getattr(torch, dtype),
    )
    return model.eval()


@lru_cache
def _drawn(name: str) -> Any:
    log: Any = transformers.logging  # its functions are not annotated
    log.set_verbosity_error()
    log.disable_progress_bar()
    chosen = ARCHITECTURES[name]
    options = dict(copy.deepcopy(chosen.options))
    if chosen.attention is not None:
        options["attn_implementation"] = chosen.attention
    config = getattr(transformers, chosen.config)(**options)
    torch.manual_seed(0)
    model = getattr(transformers, chosen.model)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _redraw(parameter_name, parameter, generator)
            parameter.copy_(parameter.bfloat16())
    return model


def _redraw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    def noise(std: float) -> torch.Tensor:
        return std * torch.randn(parameter.shape, generator=generator)

    if any(own in name for own in _OWN_SCHEME):
        return
    if parameter.ndim == 1 and name.endswith("weight"):  # of a norm
        parameter += noise(_NORM_SPREAD)
    elif name.endswith(("bias", "sinks")):
        parameter += noise(_BIAS_STD)
    elif name.endswith(_QUERIES):
        parameter.copy_(noise(_QUERY_STD))
    elif name.endswith(_EMBEDDINGS):
        parameter.copy_(noise(_EMBEDDING_STD))
    elif name.endswith("c_attn.weight"):  # queries, keys, values
        parameter[:, : 2 * parameter.shape[0]] *= _QUERY_STD / _MATRIX_STD
