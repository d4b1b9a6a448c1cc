"""The backward pass of a workload, for runs whose gradients are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.torch.tap import argument_names
from tensorcap.workload.sources import class_name
from tensorcap.workload.workload import Workload
from tensorcap_formats.errors import UsageError


def with_labels(workload: Workload) -> Workload:
    """Have a language model that is given tokens compute its own loss on them, unless it is given labels."""
    model, inputs = workload.model, workload.inputs
    if workload.run is not None or not isinstance(inputs, Mapping) or "labels" in inputs:
        return workload
    config, can_generate = getattr(model, "config", None), getattr(model, "can_generate", None)
    is_decoder = not getattr(config, "is_encoder_decoder", True) and callable(can_generate) and can_generate()
    if not is_decoder or "input_ids" not in inputs or "labels" not in argument_names(model, {}):
        return workload
    return replace(workload, inputs={**inputs, "labels": inputs["input_ids"].clone()})


@contextmanager
def own_gradients(model: nn.Module) -> Iterator[None]:
    """Have parameters start without gradients, and leave them those that they had."""
    before = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


def backward(model: nn.Module, result: object) -> None:
    """Run a backward pass from the loss that a run gave, unless the run has seen to it.

    Raises:
        UsageError: It gave none.
    """
    if any(parameter.grad is not None for parameter in model.parameters()):
        return
    loss = _loss_of(result)
    if loss is None:
        raise UsageError(
            f"{class_name(model)}: the run gave no loss, and gradients are those of a loss",
            hint="Return one (a tensor of one element) from the model or from `run` of the Workload, or give "
            "a Hugging Face model `labels` among its inputs.",
        )
    loss.backward()  # type: ignore[no-untyped-call] # torch has not annotated it


def _loss_of(result: Any) -> torch.Tensor | None:
    if not isinstance(result, torch.Tensor):
        result = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    is_loss = isinstance(result, torch.Tensor) and result.numel() == 1 and result.requires_grad
    return result if is_loss else None
