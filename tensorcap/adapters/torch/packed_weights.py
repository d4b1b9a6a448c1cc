"""Weights that a quantised module of torch keeps packed for its engine, and not as parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

_DYNAMIC: Final = "torch.ao.nn.quantized.dynamic."  # beginning of the modules whose inputs are floats
_REDUCED_RANGE: Final = 4  # version of a module from which on it leaves out a bit of its inputs


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
        is_reduced = getattr(module, "version", 0) is None or getattr(module, "version", 0) >= _REDUCED_RANGE
        settings["input_bits"] = 7 if is_reduced else 8
    return settings
