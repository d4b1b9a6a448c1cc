"""Layers of few bits as checkpoints have them, for tests: GPTQ, AWQ, bitsandbytes, bytes, float8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

Wrong = Callable[[Any], None]


def rounded(weight: Tensor, bits: int, group: int, *, has_zeros: bool = False) -> tuple[Any, Any, Any]:
    """Whole numbers of a weight, their scales and zero points by group; by plain numpy in float64."""
    w = weight.detach().double().numpy()
    parts = w.reshape(len(w), -1, group)
    if has_zeros:
        low, high = (np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0))
        scales = (high - low) / (2**bits - 1)
        zeros = np.rint(-low / scales)
        numbers = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, 2**bits - 1)
    else:
        scales = np.abs(parts).max(-1) / (2 ** (bits - 1) - 1)
        zeros = np.zeros_like(scales)
        numbers = np.rint(parts / scales[..., None])
    return numbers.reshape(w.shape), scales, zeros


class Gptq(nn.Module):
    """Eight inputs in an int32; zero points are stored less one (`added` 1) or as they are."""

    def __init__(
        self, layer: nn.Linear, group: int = 32, added: int = 1, inputs: Tensor | None = None
    ) -> None:
        super().__init__()
        numbers, scales, zeros = rounded(layer.weight, 4, group, has_zeros=True)
        if inputs is not None:
            numbers = with_feedback(layer.weight, inputs, scales, zeros)
        self.group, self.added = group, added
        self.register_buffer("qweight", pack(numbers.T.reshape(-1, 8, len(numbers)), axis=1))
        stored = (zeros.T - added).astype(np.int64) & 15
        self.register_buffer("qzeros", pack(stored.reshape(len(stored), -1, 8), axis=2))
        self.register_buffer("scales", torch.tensor(scales.T.astype(np.float32)))
        self.register_buffer("g_idx", torch.arange(layer.in_features) // group)
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def values(self) -> Tensor:
        """The weight, `[outputs, inputs]`."""
        buffers: Any = self
        numbers = unpack(buffers.qweight, axis=1)  # [inputs / 8, 8, outputs]
        numbers = numbers.reshape(-1, numbers.shape[-1])
        zeros = unpack(buffers.qzeros, axis=2).reshape(len(buffers.qzeros), -1) + self.added
        weight: Tensor = (numbers - zeros[buffers.g_idx]) * buffers.scales[buffers.g_idx]
        return weight.T

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.values().to(x.dtype), self.bias)


def with_feedback(weight: Tensor, inputs: Tensor, scales: Any, zeros: Any) -> Any:
    """Numbers as GPTQ chooses them: each column's error is made up for by those after it (Frantar, 2022)."""
    w = weight.detach().double().numpy().copy()
    x = inputs.reshape(-1, w.shape[1]).double().numpy()
    hessian = 2 * x.T @ x
    hessian += 0.01 * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    numbers = np.empty_like(w)
    group = w.shape[1] // scales.shape[1]
    for column in range(w.shape[1]):
        scale, zero = scales[:, column // group], zeros[:, column // group]
        numbers[:, column] = np.clip(np.rint(w[:, column] / scale) + zero, 0, 15)
        error = (w[:, column] - (numbers[:, column] - zero) * scale) / upper[column, column]
        w[:, column:] -= np.outer(error, upper[column, column:])
    return numbers


AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


class Awq(nn.Module):
    """Eight outputs in an int32, the lowest bits first those of output 0, then 2, 4, 6, 1, 3, 5, 7."""

    order = AWQ

    def __init__(self, layer: nn.Linear, group: int = 32) -> None:
        super().__init__()
        numbers, scales, zeros = rounded(layer.weight, 4, group, has_zeros=True)
        self.group = group
        self.register_buffer("qweight", pack(numbers.T.reshape(numbers.shape[1], -1, 8)[..., AWQ], axis=2))
        self.register_buffer("qzeros", pack(zeros.T.reshape(zeros.shape[1], -1, 8)[..., AWQ], axis=2))
        self.register_buffer("scales", torch.tensor(scales.T.astype(np.float32)))
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        buffers: Any = self
        places = np.argsort(self.order).tolist()
        numbers, zeros = (
            unpack(t, axis=2)[..., places].flatten(1) for t in (buffers.qweight, buffers.qzeros)
        )
        zeros, scales = (t.repeat_interleave(self.group, 0) for t in (zeros, buffers.scales))
        return F.linear(x, ((numbers - zeros) * scales).T.to(x.dtype), self.bias)


class Bytes(nn.Module):
    """A number in each byte, of int8, uint8 with zero points, or float8, with scales of groups."""

    def __init__(self, layer: nn.Linear, number: str = "int8", group: int = 0) -> None:
        super().__init__()
        self.group = group or layer.in_features
        weight = layer.weight.detach()
        if number.startswith("float8"):
            scales = weight.reshape(len(weight), -1, self.group).abs().amax(-1) / 448
            wide = scales.repeat_interleave(self.group, 1)
            self.register_buffer("weight", (weight / wide).to(getattr(torch, number)))
            self.register_buffer("weight_scale", scales)
        else:
            numbers, steps, zeros = rounded(weight, 8, self.group, has_zeros=number == "uint8")
            self.register_buffer("weight", torch.tensor(numbers).to(getattr(torch, number)))
            self.register_buffer("weight_scale", torch.tensor(steps).float())
            if number == "uint8":
                self.register_buffer("weight_zero_point", torch.tensor(zeros).float())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        buffers: Any = self
        weight = buffers.weight.float()
        if hasattr(self, "weight_zero_point"):
            weight = weight - buffers.weight_zero_point.repeat_interleave(self.group, 1)
        return F.linear(x, weight * buffers.weight_scale.repeat_interleave(self.group, 1), self.bias)


class Nibbles(nn.Module):
    """Two numbers in a byte, in one of the usual ways."""

    def __init__(self, layer: nn.Linear, group: int = 32, way: str = "low first, signed") -> None:
        super().__init__()
        self.group, self.way, self.in_features = group, way, layer.in_features
        numbers, scales, _ = rounded(layer.weight, 4, group)
        codes = torch.tensor(numbers).long() + (8 if "offset" in way else 0) & 15
        first, second = codes[:, 0::2], codes[:, 1::2]
        low, high = (first, second) if "low" in way else (second, first)
        self.register_buffer("weight", (low | high << 4).to(torch.uint8))
        self.register_buffer("weight_scale", torch.tensor(scales).float())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        buffers: Any = self
        low, high = buffers.weight & 15, buffers.weight >> 4
        pair = (low, high) if "low" in self.way else (high, low)
        codes = torch.stack(pair, -1).flatten(1).long()
        numbers = codes - 8 if "offset" in self.way else (codes + 8 & 15) - 8
        scales = buffers.weight_scale.repeat_interleave(self.group, 1)
        return F.linear(x, numbers.float() * scales, self.bias)


@dataclass
class State:
    """What bitsandbytes keeps beside four-bit weights."""

    absmax: Tensor
    code: Tensor
    blocksize: int
    shape: tuple[int, ...]
    quant_type: str = "nf4"
    nested: bool = False


NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
]


class Nf4(nn.Module):
    """Four-bit quantiles of the normal distribution, two in a byte, the high one first."""

    def __init__(self, layer: nn.Linear, block: int = 64) -> None:
        super().__init__()
        blocks = layer.weight.detach().reshape(-1, block)
        absmax = blocks.abs().amax(-1)
        codes = ((blocks / absmax[:, None])[..., None] - torch.tensor(NF4)).abs().argmin(-1).flatten()
        packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        self.weight = nn.Parameter(packed, requires_grad=False)
        held: Any = self.weight
        held.quant_state = State(absmax, torch.tensor(NF4), block, tuple(layer.weight.shape))
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        held: Any = self.weight
        codes = torch.stack([held[:, 0] >> 4, held[:, 0] & 15], -1).flatten().long()
        values = torch.tensor(NF4)[codes].reshape(-1, held.quant_state.blocksize)
        weight = (values * held.quant_state.absmax[:, None]).reshape(held.quant_state.shape)
        return F.linear(x, weight, self.bias)


def pack(numbers: Any, axis: int) -> Tensor:
    """Eight numbers of four bits along an axis in one int32, the first in the lowest bits."""
    words = np.moveaxis(numbers.astype(np.int64) & 15, axis, -1)
    joined = sum(words[..., place] << 4 * place for place in range(8))
    return torch.tensor(joined.astype(np.uint32).view(np.int32))


def unpack(words: Tensor, axis: int) -> Tensor:
    """The reverse of `pack`."""
    parts = [(words.long() & 0xFFFFFFFF) >> 4 * place & 15 for place in range(8)]
    return torch.stack(parts, axis).float()
