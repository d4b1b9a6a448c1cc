"""A small Llama with a few mistakes to plant, and its workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tensorcap.workload import Workload

NORM = "model.layers.1.post_attention_layernorm"
Plant = Callable[[Any], None]


def llama(activation: str = "silu") -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        hidden_act=activation,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
        else:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


def workload(model: Any) -> Workload:
    ids = torch.randint(0, 100, (2, 48), generator=torch.Generator().manual_seed(1))
    return Workload(model, {"input_ids": ids})


def narrow(model: Any) -> Any:
    tables = model.model.rotary_emb
    frequencies = tables.inv_freq.clone()
    model.to(torch.bfloat16)
    tables.inv_freq = frequencies
    return model


class Norm(nn.Module):
    def __init__(self, own: Any, variance: Callable[[Tensor], Tensor], *, rounds: bool = True) -> None:
        super().__init__()
        self.weight, self.variance, self.rounds = own.weight, variance, rounds

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float() * torch.rsqrt(self.variance(hidden_states).float() + 1e-6)
        once: Tensor = (self.weight.float() * wide).to(hidden_states.dtype)
        twice: Tensor = self.weight * wide.to(hidden_states.dtype)
        return twice if self.rounds else once


def low_sum(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[..., :1])
    for at in range(x.shape[-1]):
        total = total + x[..., at : at + 1] * x[..., at : at + 1]
    mean: Tensor = total / x.shape[-1]
    return mean


def normed(variance: Callable[[Tensor], Tensor], *, rounds: bool = True) -> Plant:
    def plant(model: Any) -> None:
        layer = model.model.layers[1]
        layer.post_attention_layernorm = Norm(layer.post_attention_layernorm, variance, rounds=rounds)

    return plant


def without_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.Identity()


def other_theta(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.7


def gelu_tanh(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU(approximate="tanh")


def half_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2
