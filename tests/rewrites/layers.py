"""Layers that porters write again and again, with weights of somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

Weights = dict[str, Tensor]


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def linear_of(weights: Weights, *names: str) -> nn.Linear:
    """One linear layer, of several one after the other."""
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    return linear(
        torch.cat([weights[f"{name}.weight"] for name in names]), torch.cat(biases) if biases else None
    )


def layer_norm_of(weights: Weights, name: str, eps: float) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(weights[f"{name}.weight"]), eps=eps)
    norm.weight = nn.Parameter(weights[f"{name}.weight"].clone())
    norm.bias = nn.Parameter(weights[f"{name}.bias"].clone())
    return norm


def embedding_of(weights: Weights, name: str) -> nn.Embedding:
    return table(weights[f"{name}.weight"])


def table(weight: Tensor) -> nn.Embedding:
    embedding = nn.Embedding(*weight.shape)
    embedding.weight = nn.Parameter(weight.detach().clone())
    return embedding


class RootMeanSquare(nn.Module):
    """RMSNorm as a porter writes it."""

    def __init__(self, gain: Tensor, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(gain.detach().clone()), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.gain.float(), self.eps).to(x.dtype)


class Int8Linear(nn.Module):
    """Weights in int8 with a scale a row, made floating again before they are used."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(x, weight.to(x.dtype) * self.scale, self.bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads * size] as [batch, heads, tokens, size]."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def causal_mask(length: int) -> Tensor:
    """True where a token may look."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Softmax attention by hand; q, k, v are [batch, heads, tokens, size], mask is True where it may look."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("bhqk,bhkd->bhqd", scores.float().softmax(-1).to(v.dtype), v)


def rotary_tables(length: int, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [tokens, size / 2]."""
    angles = torch.outer(torch.arange(length).float(), base ** (-torch.arange(0, size, 2).float() / size))
    return angles.cos(), angles.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def interleaved_rows(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection whose heads are rotated in halves, in the order for interleaved rotation."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def replace(model: nn.Module, kind: type | tuple[type, ...], make: Callable[[Any], nn.Module]) -> None:
    """Put another module in the place of each module of a class."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                setattr(parent, name, make(child))


class Wrapper(nn.Module):
    """What a serving framework puts around a model: its own argument, and bare logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits
