"""A small Llama with random weights, and a port of it with one mistake. Used by the demo and the README."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tensorcap


def reference() -> tensorcap.Workload:
    """The model to be ported, and what it is fed."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.arange(2 * 16).reshape(2, 16), "use_cache": False}
    return tensorcap.Workload(model, inputs)


def port() -> tensorcap.Workload:
    """The same, but somebody took the wrong activation in layer 2."""
    workload = reference()
    workload.model.model.layers[2].mlp.act_fn = torch.nn.GELU(approximate="tanh")
    return workload
