"""Pieces that several ports are made of, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Weights = Mapping[str, Tensor]
WIDTH, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 32, 4, 2, 8, 48, 64
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 3,
}
GROUPS: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 3], [11, 12, 13, 14, 15, 16, 4]])


def drawn(model: str, config: str, seed: int, **fields: Any) -> nn.Module:
    """A model of transformers; all its weights are drawn, so that no two tensors are equal by chance."""
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.2 * noise)
    return made.eval()


def linear(*weights: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """One projection of the rows of all weights."""
    weight = torch.cat(weights)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.load_state_dict({"weight": weight, **({} if bias is None else {"bias": bias})})
    return made


def dense(w: Weights, *names: str) -> nn.Linear:
    """One projection of several, their biases too."""
    biases = [w[f"{name}.bias"] for name in names if f"{name}.bias" in w]
    return linear(*(w[f"{name}.weight"] for name in names), bias=torch.cat(biases) if biases else None)


def embedding(weight: Tensor) -> nn.Embedding:
    made = nn.Embedding(*weight.shape)
    made.load_state_dict({"weight": weight})
    return made


def layer_norm(w: Weights, name: str, eps: float = 1e-5) -> nn.LayerNorm:
    made = nn.LayerNorm(w[f"{name}.weight"].shape[0], eps=eps)
    made.load_state_dict({"weight": w[f"{name}.weight"], "bias": w[f"{name}.bias"]})
    return made


class RMSNorm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


def parted(x: Tensor, axis: int, *sizes: int) -> Tensor:
    """An axis made into several."""
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def heads(x: Tensor, count: int) -> Tensor:
    """(b, s, h d) as (b, h, s, d)."""
    return parted(x, -1, count, -1).transpose(1, 2)


def causal(length: int, window: int | None = None) -> Tensor:
    back = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (back < 0) | (back >= (window or length))
    return torch.zeros(length, length).masked_fill(hidden, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attention of (b, h, s, d), with as many or fewer heads of keys, as (b, s, h d)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def rotate(x: Tensor, theta: float, *, is_interleaved: bool = False) -> Tensor:
    """Rotary embedding of (b, h, s, d) in positions 0 to s - 1."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angle = torch.arange(length)[:, None] * theta ** -(torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    one, other = (x[..., ::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
    turned = one * cos - other * sin, other * cos + one * sin
    return torch.stack(turned, -1).flatten(-2) if is_interleaved else torch.cat(turned, -1)
