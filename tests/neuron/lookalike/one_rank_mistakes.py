"""Mistakes of the port that one rank shows in bfloat16, each in one module that its function names."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed_inference.models.llama import modeling_llama
from port import planted
from torch import Tensor, nn


def _missing_activation(model: Any) -> None:
    model.layers[1].mlp.act_fn = nn.Identity()


def _wrong_theta(model: Any) -> None:
    rotary = model.layers[0].self_attn.rotary_emb
    rotary.inv_freq = rotary.inv_freq**1.2


def _low_variance(model: Any) -> None:
    """The mean of squares is summed in bfloat16."""
    norm = model.layers[1].post_attention_layernorm

    def forward(x: Tensor) -> Tensor:
        squares = (x * x).to(torch.bfloat16)
        total = squares[..., 0]
        for at in range(1, x.shape[-1]):
            total = total + squares[..., at]
        return norm.weight * (x * torch.rsqrt(total[..., None] / x.shape[-1] + norm.variance_epsilon))

    norm.forward = forward


def _doubled_residual(model: Any) -> None:
    """What is added to the result of the layer's MLP is added twice."""
    layer = model.layers[0]
    residuals: list[Tensor] = []
    layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: residuals.append(args[0]))

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        output, *others = type(layer).forward(layer, *args, **kwargs)
        return (output + residuals.pop(), *others)

    layer.forward = forward


def _unscaled_scores(model: Any) -> None:
    """Scores of attention are twice as large, which no module within it shows."""
    attention = model.layers[1].self_attn

    def forward(*args: Any, **kwargs: Any) -> Any:
        right = modeling_llama.attended
        modeling_llama.attended = lambda q, *others: right(2 * q, *others)
        try:
            return type(attention).forward(attention, *args, **kwargs)
        finally:
            modeling_llama.attended = right

    attention.forward = forward


def _not_finite(model: Any) -> None:
    """Division by zero for one token."""
    norm = model.norm

    def forward(x: Tensor) -> Tensor:
        output = type(norm).forward(norm, x)
        output[0, 3] = output[0, 3] / 0.0
        return output

    norm.forward = forward


missing_activation = planted(_missing_activation)
wrong_theta = planted(_wrong_theta)
low_variance = planted(_low_variance)
doubled_residual = planted(_doubled_residual)
unscaled_scores = planted(_unscaled_scores)
not_finite = planted(_not_finite)
