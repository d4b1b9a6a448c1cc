"""Small models of transformers with random weights."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers

LLAMA: Final = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def random_model(name: str, **config: Any) -> Any:
    """Make a model by the name of its class, in eval mode; equal arguments make equal weights."""
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, name)
    return model_class(model_class.config_class(**config)).eval()


def llama(**config: Any) -> Any:
    """Make a Llama with a language head, of two layers unless the config says otherwise."""
    return random_model("LlamaForCausalLM", **{**LLAMA, **config})
