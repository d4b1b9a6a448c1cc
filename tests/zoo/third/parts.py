"""What the ports of the third zoo share: attention, rotary angles, norms, as a porter writes them out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.planting import Plant, module_at


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear of these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def fused(*parts: Any) -> nn.Linear:
    """Several linears of one input as one, their outputs one after the other."""
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return linear(torch.cat([part.weight for part in parts]), bias)


def kept(value: Tensor) -> nn.Parameter:
    """A parameter of its own with these values."""
    return nn.Parameter(value.detach().clone())


def heads(x: Tensor, count: int) -> Tensor:
    """Rows of features (batch, length, count * size) as (batch, count, length, size)."""
    return torch.unflatten(x, -1, (count, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """The inverse of `heads`."""
    return x.transpose(1, 2).flatten(2)


def causal(queries: int, keys: int) -> Tensor:
    """Whether each query sees each key; the last query sees all."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, keep: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Attention written out, the softmax in float32."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first channels by angles (length, half), the first half with the second; pass the rest."""
    size = 2 * angles.shape[-1]
    one, other = x[..., :size].chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((one * cos - other * sin, other * cos + one * sin, x[..., size:]), -1)


def turn_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate channels `2 i` and `2 i + 1` by angles (length, half), in float32."""
    one, other = x.float()[..., ::2], x.float()[..., 1::2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack((one * cos - other * sin, other * cos + one * sin), -1).flatten(-2).to(x.dtype)


class CentredNorm(nn.Module):
    """A layer norm in float32, with a weight and no bias."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = kept(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.gain.float() * wide).to(x.dtype)


def plain_norm(x: Tensor, eps: float) -> Tensor:
    """A layer norm without weights."""
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


def having(*sites: str, **methods: Any) -> Plant:
    """A port whose modules at these sites have other methods or class attributes."""

    def plant(model: Any) -> None:
        for site in sites:
            module = module_at(model, site)
            own = type(module)
            names = {"__module__": own.__module__, "__qualname__": own.__qualname__, **methods}
            module.__class__ = type(own.__name__, (own,), names)

    return plant


def coarse_int4(weight: Tensor) -> Tensor:
    """Weights through int4 with one scale of the whole tensor, without a zero point."""
    scale = weight.float().abs().max() / 7
    return (weight.float() / scale).round().clamp(-8, 7) * scale
