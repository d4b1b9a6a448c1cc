"""Perturb what a model is run on: a baseline where only one precision can run (POL-54)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tensorcap.workload.workload import Workload
from tensorcap_formats.errors import UsageError

Change = Callable[[torch.Tensor], torch.Tensor]


def perturb(workload: Workload, dtype: torch.dtype, mapped: Callable[[Any, Change], Any]) -> Workload:
    """Multiply each floating input by 1 plus or minus the machine epsilon of a dtype, at random.

    Where there is no floating input, as with token ids, the output of the token embedding is multiplied.

    Args:
        workload: The model and its inputs.
        dtype: Whose machine epsilon, 2**-7 for bfloat16.
        mapped: Applies a function to every tensor of a value.

    Raises:
        UsageError: There is nothing to perturb.
    """
    epsilon = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(0)
    is_changed = False

    def change(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal is_changed
        if not tensor.is_floating_point():
            return tensor
        is_changed = True
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        return (tensor.double() * (1 + epsilon * signs.to(tensor.device))).to(tensor.dtype)

    inputs = mapped(
        dict(workload.inputs) if isinstance(workload.inputs, Mapping) else workload.inputs, change
    )
    if is_changed:
        return replace(workload, inputs=inputs)
    embedding = _token_embedding(workload.model)
    embedding.register_forward_hook(lambda module, args, output: change(output))
    return workload


def _token_embedding(model: nn.Module) -> nn.Module:
    find = getattr(model, "get_input_embeddings", None)
    found = find() if callable(find) else None
    if isinstance(found, nn.Module):
        return found
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module
    raise UsageError(f"{type(model).__qualname__}: has no floating input and no embedding to perturb")
