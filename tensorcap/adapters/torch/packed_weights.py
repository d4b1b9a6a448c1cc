"""Weights that are kept in few bits: packed for an engine, or beside their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

_DYNAMIC: Final = "torch.ao.nn.quantized.dynamic."  # beginning of the modules whose inputs are floats
_REDUCED_RANGE: Final = 4  # version of a module from which on it leaves out a bit of its inputs
_BLOCKS: Final = "_blocks"
_MXFP4_LEVELS: Final = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
_MXFP4_BIAS: Final = 127


def packed_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return `weight` (quantised) and `bias` of a module that has them as methods; else nothing."""
    if not type(module).__module__.startswith("torch.ao.nn.") or "weight" in module._parameters:
        return {}
    methods = {name: getattr(module, name, None) for name in ("weight", "bias")}
    tensors = {name: method() for name, method in methods.items() if callable(method)}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def packed_settings(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return how a module with packed tensors rounds: `input_bits`, and `one_scale` of all its weights.

    Inputs are rounded to one grid a call, from their smallest to their largest value, if the module is a
    dynamic one: of 8 bits, or of 7 so that products do not overflow on processors without VNNI.
    """
    weight = tensors.get("weight")
    if weight is None or not weight.is_quantized:
        return {}
    settings: dict[str, Any] = {"one_scale": weight.qscheme() == torch.per_tensor_affine}
    if type(module).__module__.startswith(_DYNAMIC) and weight.dtype == torch.qint8:
        version = getattr(module, "version", 0)
        is_reduced = version is None or version >= _REDUCED_RANGE
        settings["input_bits"] = 7 if is_reduced else 8
    return settings


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight in few bits beside its scales, which its module makes floats of when it computes.

    Attributes:
        packed: int8 numbers; or, of MXFP4, uint8 blocks of two numbers each, [..., groups, bytes].
        scales: Floats by which blocks of the numbers are multiplied; or, of MXFP4, uint8 exponents of 2 with
            127 added, one for each group.
        is_mxfp4: Whether it is of OCP's Microscaling Formats.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    is_mxfp4: bool

    def values(self) -> torch.Tensor:
        """Return the weight in float32; of MXFP4 groups lie one behind the other along the last axis."""
        if not self.is_mxfp4:
            return self.packed.float() * _spread(self.scales.float(), tuple(self.packed.shape))
        levels = torch.tensor(_MXFP4_LEVELS, device=self.packed.device)
        halves = torch.stack([self.packed & 0x0F, self.packed >> 4], dim=-1)  # the low one comes first
        numbers = levels[halves.long()].flatten(-2)
        exponents = self.scales.to(torch.int32) - _MXFP4_BIAS
        return torch.ldexp(numbers, exponents[..., None]).flatten(-2)


def scaled_weights(module: nn.Module) -> dict[str, ScaledWeight]:
    """Return weights that a module holds in few bits beside scales, by their name as floats.

    1. `NAME_blocks` and `NAME_scales` of uint8 are MXFP4.
    2. `NAME` of int8 with floats `NAME_scale` or `NAME_scales`, or `scale` or `scales` if there is one such
       weight, that fit its shape: one, one for each row, or one for each block along the axes.
    """
    tensors = {n: t for n, t in {**module._parameters, **module._buffers}.items() if t is not None}
    weights: dict[str, ScaledWeight] = {}
    for name, packed in tensors.items():
        base = name.removesuffix(_BLOCKS)
        scales = tensors.get(f"{base}_scales")
        is_pair = base != name and scales is not None and packed.dtype == scales.dtype == torch.uint8
        if is_pair and scales is not None and scales.shape == packed.shape[:-1]:
            weights[base] = ScaledWeight(packed, scales, is_mxfp4=True)
    integers = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8 and tensor.ndim > 1]
    for name in integers:
        known = [f"{name}_scale", f"{name}_scales", *(("scale", "scales") if len(integers) == 1 else ())]
        scales = next((tensors[each] for each in known if each in tensors), None)
        if scales is not None and scales.is_floating_point() and _fits(scales, tensors[name]):
            weights[name] = ScaledWeight(tensors[name], scales, is_mxfp4=False)
    return weights


def _fits(scales: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether scales are one, one for each row, or one for each block along every axis."""
    if scales.numel() == 1 or tuple(scales.shape) == tuple(packed.shape[:1]):
        return True
    sizes = zip(scales.shape, packed.shape, strict=False)
    return scales.ndim == packed.ndim and all(size and whole % size == 0 for size, whole in sizes)


def _spread(scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Repeat scales over the blocks that they are of."""
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.ndim == 1:
        scales = scales.reshape(-1, *(1,) * (len(shape) - 1))
    for axis, (size, whole) in enumerate(zip(scales.shape, shape, strict=True)):
        if 1 < size < whole:
            scales = scales.repeat_interleave(whole // size, axis)
    return scales
