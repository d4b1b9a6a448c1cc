"""Linear layers that keep their weights packed, as GPTQ, AWQ, gpt-oss, DeepSeek and compressed-tensors do.

A maker takes the layer of the reference and what it was given, `[tokens, in]`, and returns the packed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

Maker = Callable[[nn.Linear, Tensor], nn.Module]
IN_ORDER: Final = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # where outputs of 32 bits lie, from the lowest
FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack(numbers: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """Eight numbers of four bits along the last axis as one of int32, `[..., n]` to `[..., n / 8]`."""
    parts = numbers.long().reshape(*numbers.shape[:-1], -1, 8)[..., list(order)]
    return (parts << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def unpack(packed: Tensor, order: Sequence[int] = IN_ORDER) -> Tensor:
    """What `pack` packed, int64."""
    parts = (packed.long()[..., None] >> torch.arange(0, 32, 4)) & 15
    return parts[..., torch.tensor(order).argsort()].flatten(-2)


def grid(rows: Tensor, *, symmetric: bool = False, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scale and zero point of four bits for each last axis of `[..., group]`."""
    low, high = rows.amin(-1, keepdim=True) * clip, rows.amax(-1, keepdim=True) * clip
    if symmetric:
        high = torch.maximum(high.abs(), low.abs())
        return high / 7, torch.full_like(high, 8)
    scale = ((high.clamp(min=0) - low.clamp(max=0)) / 15).clamp(min=1e-8)
    return scale, (-low.clamp(max=0) / scale).round()


def nearest(rows: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (rows / scale + zero).round().clamp(0, 15)


class Packed(nn.Module):
    """A linear layer of buffers."""

    def __init__(self, linear: nn.Linear, **buffers: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.bias = linear.bias

    def dequantised(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantised(), self.bias)


class GPTQLinear(Packed):
    """`qweight` int32 `[in / 8, out]`, `qzeros` `[groups, out / 8]` stored less one, `scales`, `g_idx`."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor
    order: Sequence[int] = IN_ORDER
    zeros_less = 1

    def groups(self) -> Tensor:
        return self.g_idx.long()

    def dequantised(self) -> Tensor:
        numbers = unpack(self.qweight.T, self.order).T
        zeros = unpack(self.qzeros, self.order) + self.zeros_less
        return (self.scales[self.groups()] * (numbers - zeros[self.groups()])).T


def gptq(
    linear: nn.Linear,
    x: Tensor,
    *,
    kind: Callable[..., nn.Module] = GPTQLinear,
    group: int = 32,
    feedback: bool = True,
    act_order: bool = False,
    symmetric: bool = False,
    clip: float = 1.0,
) -> nn.Module:
    """The error of a column is made up for in those that follow (Frantar et al. 2022), with feedback."""
    weight, size = linear.weight.detach().double(), linear.in_features
    covariance = x.double().T @ x.double()
    order = covariance.diagonal().argsort(descending=True) if act_order else torch.arange(size)
    weight, covariance = weight[:, order].clone(), covariance[order][:, order]
    covariance += 0.01 * covariance.diagonal().mean() * torch.eye(size)
    inverse = torch.linalg.cholesky(torch.linalg.inv(covariance), upper=True)
    numbers, scales, zeros = torch.zeros_like(weight), [], []
    for at in range(size):
        if at % group == 0:
            scale, zero = grid(weight[:, at : at + group], symmetric=symmetric, clip=clip)
            scales.append(scale.float())
            zeros.append(zero)
        numbers[:, at] = nearest(weight[:, at : at + 1], scale, zero)[:, 0]
        error = weight[:, at] - scale[:, 0] * (numbers[:, at] - zero[:, 0])
        if feedback:
            weight[:, at + 1 :] -= torch.outer(error / inverse[at, at], inverse[at, at + 1 :])
    back = order.argsort()
    stored = torch.cat(zeros, 1) - 1
    return kind(
        linear,
        qweight=pack(numbers[:, back]).T.contiguous(),
        qzeros=pack(stored.T),
        scales=torch.cat(scales, 1).T.contiguous(),
        g_idx=(back // group).to(torch.int32),
    )


class AWQLinear(Packed):
    """`qweight` int32 `[in, out / 8]` in AWQ's order, `qzeros` `[groups, out / 8]`, `scales`."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    order: Sequence[int] = AWQ_ORDER

    def dequantised(self) -> Tensor:
        group = self.in_features // len(self.scales)
        numbers, zeros = unpack(self.qweight, self.order), unpack(self.qzeros, self.order)
        return (self.scales.repeat_interleave(group, 0) * (numbers - zeros.repeat_interleave(group, 0))).T


def searched_grid(rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each group the range, down to half, that leaves least of its product, as AWQ searches it."""
    given = x.reshape(len(x), *rows.shape[1:])
    squares = torch.einsum("tgi,tgj->gij", given, given)
    grids = [grid(rows, clip=1 - part / 20) for part in range(11)]
    errors = [(nearest(rows, scale, zero) - zero) * scale - rows for scale, zero in grids]
    left = torch.stack([torch.einsum("ogi,gij,ogj->og", error, squares, error) for error in errors])
    best = left.argmin(0)[None, ..., None]
    scale, zero = (torch.stack(parts).gather(0, best)[0] for parts in zip(*grids, strict=True))
    return scale, zero


def awq(
    linear: nn.Linear,
    x: Tensor,
    *,
    kind: Callable[..., nn.Module] = AWQLinear,
    group: int = 32,
    is_searched: bool = False,
) -> nn.Module:
    """Groups of inputs; AWQ's search may cut their ranges."""
    rows = linear.weight.detach().reshape(linear.out_features, -1, group)
    scale, zero = searched_grid(rows, x) if is_searched else grid(rows)
    numbers = nearest(rows, scale, zero).flatten(1)
    return kind(
        linear,
        qweight=pack(numbers.T, AWQ_ORDER),
        qzeros=pack(zero[..., 0].T, AWQ_ORDER),
        scales=scale[..., 0].T.contiguous(),
    )


class MXFP4Linear(Packed):
    """`weight_blocks` uint8 `[out, groups, 16]`, the first value in the low bits, and `weight_scales`."""

    weight_blocks: Tensor
    weight_scales: Tensor
    table: Sequence[float] = FP4
    bias_of_scales = 127
    low_first = True

    def dequantised(self) -> Tensor:
        table = torch.tensor([*self.table, *(-value for value in self.table)])
        halves = [table[(self.weight_blocks & 15).long()], table[(self.weight_blocks >> 4).long()]]
        values = torch.stack(halves if self.low_first else halves[::-1], -1).flatten(-2)
        return (values * torch.exp2(self.weight_scales.float() - self.bias_of_scales)[..., None]).flatten(1)


def mxfp4(linear: nn.Linear, x: Tensor, *, kind: Callable[..., nn.Module] = MXFP4Linear) -> nn.Module:
    """Blocks of 32 with a power of two each (OCP MX)."""
    rows = linear.weight.detach().reshape(linear.out_features, -1, 32)
    exponents = rows.abs().amax(-1).log2().floor() - 2
    scaled = rows / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(FP4)).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return kind(linear, weight_blocks=blocks, weight_scales=(exponents + 127).to(torch.uint8))


class Float8Linear(Packed):
    """`weight` float8_e4m3fn, times `weight_scale_inv` of blocks of 32 by 32 (DeepSeek)."""

    weight: Tensor
    weight_scale_inv: Tensor

    def values(self) -> Tensor:
        return self.weight.float()

    def factors(self) -> Tensor:
        return self.weight_scale_inv

    def dequantised(self) -> Tensor:
        return self.values() * self.factors().repeat_interleave(32, 0).repeat_interleave(32, 1)


def float8(linear: nn.Linear, x: Tensor, *, kind: Callable[..., nn.Module] = Float8Linear) -> nn.Module:
    """Blocks of 32 by 32."""
    blocks = linear.weight.detach().reshape(linear.out_features // 32, 32, -1, 32)
    scale = blocks.abs().amax((1, 3)) / 448
    values = linear.weight.detach() / scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return kind(linear, weight=values.to(torch.float8_e4m3fn), weight_scale_inv=scale)


class Int8Linear(Packed):
    """`weight` int8, `weight_scale` and `weight_zero_point` `[out, 1]` (compressed-tensors)."""

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor

    def dequantised(self) -> Tensor:
        return (self.weight.float() - self.weight_zero_point.float()) * self.weight_scale


def int8(
    linear: nn.Linear,
    x: Tensor,
    *,
    kind: Callable[..., nn.Module] = Int8Linear,
    weight: Tensor | None = None,
    tensor: bool = False,
    symmetric: bool = True,
    top: int = 127,
    **more: Any,
) -> nn.Module:
    """A scale for each row, or one for the tensor."""
    values = (linear.weight if weight is None else weight).detach()
    rows = values.reshape(1, -1) if tensor else values
    if symmetric:
        scale, zero = rows.abs().amax(1, keepdim=True) / top, torch.zeros(len(rows), 1)
    else:
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = (high - low) / 255
        zero = -128 - (low / scale).round()
    numbers = (values / scale + zero).round().to(torch.int32).to(torch.int8)
    return kind(linear, weight=numbers, weight_scale=scale, weight_zero_point=zero.to(torch.int8), **more)


class Int8DynamicLinear(Int8Linear):
    """Inputs are rounded with a scale for each token."""

    levels = 127

    def step(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True) / self.levels

    def forward(self, x: Tensor) -> Tensor:
        step = self.step(x)
        return super().forward((x / step).round().clamp(-self.levels, self.levels) * step)


class SmoothLinear(Int8DynamicLinear):
    """Inputs are divided by `smoothing` `[in]`, by which the weight was multiplied (SmoothQuant)."""

    smoothing: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.smoothing)


class RotatedLinear(Int8Linear):
    """Inputs are rotated, as the weight was (QuaRot)."""

    rotation: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.rotation)


class OutlierLinear(Int8Linear):
    """Some inputs keep their weights in floats (LLM.int8)."""

    outliers: Tensor
    outlier_weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[..., self.outliers] @ self.outlier_weight.T


class CorrectedLinear(AWQLinear):
    """What four bits lose is added by two thin matrices (LQER)."""

    lora_a: Tensor
    lora_b: Tensor
    sign = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.sign * (x @ self.lora_a.T) @ self.lora_b.T


def smooth(linear: nn.Linear, x: Tensor, **more: Any) -> nn.Module:
    smoothing = (x.abs().amax(0).clamp(min=1e-3) / linear.weight.abs().amax(0)).sqrt().detach()
    kind = more.pop("kind", SmoothLinear)
    return int8(linear, x, weight=linear.weight * smoothing, smoothing=smoothing, kind=kind)


def rotated(linear: nn.Linear, x: Tensor, *, kind: Callable[..., nn.Module] = RotatedLinear) -> nn.Module:
    draws = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(linear.in_features, linear.in_features, generator=draws))[0]
    return int8(linear, x, weight=linear.weight @ rotation, rotation=rotation, kind=kind)


def with_outliers(
    linear: nn.Linear, x: Tensor, *, kind: Callable[..., nn.Module] = OutlierLinear
) -> nn.Module:
    outliers = x.abs().amax(0).topk(4).indices
    rest = linear.weight.detach().clone()
    rest[:, outliers] = 0
    kept = linear.weight.detach()[:, outliers].clone()
    return int8(linear, x, weight=rest, outliers=outliers, outlier_weight=kept, kind=kind)


def corrected(linear: nn.Linear, x: Tensor, *, kind: Callable[..., Any] = CorrectedLinear) -> nn.Module:
    plain: Any = awq(linear, x)
    u, s, v = torch.linalg.svd(linear.weight.detach() - plain.dequantised())
    thin = {"lora_a": v[:48], "lora_b": u[:, :48] * s[:48]}
    return awq(linear, x, kind=lambda given, **buffers: kind(given, **buffers, **thin))
