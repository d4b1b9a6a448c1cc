"""Small models of real architectures with random weights, in float32 and as their low-precision twins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tensorcap
from tensorcap.adapters.huggingface.model import load_model

TEXT: Final = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2}
ARCHITECTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {**TEXT, **HEADS},
    "qwen3": {**TEXT, **HEADS},
    "gemma2": {**TEXT, **HEADS, "query_pre_attn_scalar": 16, "sliding_window": 64},
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_head": 4},
    "qwen3_moe": {
        **TEXT,
        **HEADS,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
SCALES: Final = (0.02, 0.06, 0.15)
_QUERY_STD: Final = 0.15  # of weights to queries and keys: the attention is neither uniform nor one-hot
_WIDTH: Final = 256  # the width for which the scales are meant; a narrower model gets larger weights


def make(architecture: str, *, std: float, layers: int = 32, dtype: str = "float32", seed: int = 0) -> Any:
    """A causal language model; equal arguments but for the dtype make twins with the same weights.

    The low-precision twin is made as `from_pretrained(dtype=...)` makes it. Weights of norms are drawn
    too, around what they start from, so that a mistake in how they are used shows.

    Args:
        architecture: One of `ARCHITECTURES`.
        std: Standard deviation of the weights of a model of usual width, to which it is converted.
        layers: Count of blocks.
        dtype: Precision of the weights and of the computation.
        seed: Of the weights.
    """
    log: Any = transformers.logging  # its functions are not annotated
    log.set_verbosity_error()
    log.disable_progress_bar()
    config_class: Any = CONFIG_MAPPING[architecture]
    std *= (_WIDTH / 64) ** 0.5
    config = config_class(**ARCHITECTURES[architecture], num_hidden_layers=layers, initializer_range=std)
    model = load_model(architecture, config, {"random_weights": seed})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter *= _QUERY_STD / std
            elif "c_attn.weight" in name:  # queries, keys, values
                parameter[:, : 2 * parameter.shape[0]] *= _QUERY_STD / std
            elif parameter.ndim == 1:
                spread = 0.2 if "norm" in name or ".ln_" in name else std
                parameter += spread * torch.randn(parameter.shape, generator=generator)
    if dtype == "float32":
        return model
    weights = dict(model.state_dict())
    twin = type(model).from_pretrained(None, config=config, state_dict=weights, dtype=getattr(torch, dtype))
    return twin.eval()


def tokens(count: int = 96, seed: int = 0) -> torch.Tensor:
    """Token ids of one sequence."""
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(seed))


def archive_of(model: Any, path: Path, *, count: int = 96, **options: Any) -> Path:
    """Capture one forward of a model over `tokens`."""
    with torch.no_grad(), tensorcap.capture(model, path, **options):
        model(input_ids=tokens(count), use_cache=False)
    return path
