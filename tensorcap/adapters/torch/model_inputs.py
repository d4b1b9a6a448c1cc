"""The inputs of a torch workload: replaced by archived ones, perturbed for a baseline, recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.torch.tensor_leaves import KINDS, untraced
from tensorcap.adapters.torch.tensors import from_stored, stored
from tensorcap.recording import Call, Recorder, walk
from tensorcap.workload import StoredInput, Workload
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import escape

Change = Callable[[torch.Tensor], torch.Tensor]


def with_archived_inputs(
    workload: Workload, inputs: Mapping[str, StoredInput]
) -> Mapping[str, Any] | tuple[Any, ...]:
    """Put archived inputs in the place of the workload's own, by argument and field, or by position.

    Raises:
        UsageError: An archived input is none of the workload's.
    """
    own = workload.inputs
    if isinstance(own, Mapping):
        values = dict(own)
    else:
        names = [str(i) for i in range(len(own))]
        if workload.run is None:
            parameters = [*inspect.signature(workload.model.forward).parameters]
            names = [*parameters[: len(own)], *(f"args.{i}" for i in range(len(own) - len(parameters)))]
        values = dict(zip(names, own, strict=True))
    left = {name: from_stored(*value) for name, value in inputs.items()}
    values = {name: _replace(value, name, left) for name, value in values.items()}
    for name, tensor in left.items():
        if "." in name or not isinstance(own, Mapping):
            raise UsageError(f"input {name!r} of the archive is none of the workload's: {', '.join(values)}")
        values[name] = tensor
    return values if isinstance(own, Mapping) else tuple(values.values())


def _replace(value: Any, name: str, left: dict[str, torch.Tensor]) -> Any:
    """Replace the tensors of a value by those that `left` has, by the names of `structure.walk`."""
    if isinstance(value, torch.Tensor):
        return left.pop(name, value)
    if type(value) is dict:
        return {key: _replace(item, f"{name}.{key}", left) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return type(value)(*(_replace(item, f"{name}.{field}", left) for field, item in fields))
    if type(value) in (list, tuple):
        return type(value)(_replace(item, f"{name}.{i}", left) for i, item in enumerate(value))
    return left.pop(name, value)


def map_tensors(value: Any, change: Change) -> Any:
    """Change every tensor in containers; objects of other classes stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def perturb(workload: Workload, dtype: torch.dtype) -> Workload:
    """Multiply each floating input by 1 plus or minus the machine epsilon of a dtype, at random.

    If there is no floating input, as with token ids, the output of the token embedding is multiplied.

    Args:
        workload: The model and its inputs.
        dtype: The dtype of the machine epsilon, 2**-7 for bfloat16.

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

    inputs = map_tensors(
        dict(workload.inputs) if isinstance(workload.inputs, Mapping) else workload.inputs, change
    )
    if is_changed:
        return replace(workload, inputs=inputs)
    embedding = _token_embedding(workload.model)
    embedding.register_forward_hook(lambda module, args, output: change(output))
    return workload


def _token_embedding(model: nn.Module) -> nn.Module:
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    if isinstance(embedding, nn.Module):
        return embedding
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module
    raise UsageError(f"{type(model).__qualname__}: has no floating input and no embedding to perturb")


def record_inputs(inputs: Any, recorder: Recorder) -> None:
    """Record the tensors that a run is given as `given.NAME` of the root, before its first call."""
    call = Call(recorder.points[""], 0, 0)
    with torch.no_grad(), untraced():
        for leaf in walk(inputs, KINDS):
            if leaf.is_tensor:
                values = stored(leaf.value)
                slot = f"given.{escape(leaf.name)}"
                recorder.tensor(call, slot, values.bits, values.dtype, values.shape, required=True)
