"""Mutate a torch module within a block: its tensors, its settings, its `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import reduce
from types import CodeType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from tensorcap.adapters.edits import (
    Absent,
    Added,
    CallMutation,
    Cleared,
    Edit,
    Filled,
    Masked,
    Ordered,
    Quantised,
    Replaced,
    Rounded,
    Scaled,
    Shifted,
    Transposed,
)
from tensorcap.adapters.torch.masks import change_extent
from tensorcap.adapters.torch.tensors import dtype_named

_NOT_SETTINGS: Final = ("training", "layer_idx")


class TensorSlot(NamedTuple):
    """Where a parameter or a buffer is registered.

    Attributes:
        registry: The module's parameters, or its buffers, by name.
        name: Its name there.
    """

    registry: dict[str, Any]
    name: str


def find_settings(module: nn.Module) -> Mapping[str, Any]:
    """Find attributes, and entries of the configuration, whose names the code of the module's class has."""
    used = _find_names_used(type(module))
    values = {name: value for name, value in vars(module).items() if name in used}
    config = getattr(module, "config", None)
    if hasattr(config, "__dict__") and not isinstance(config, nn.Module):
        values |= {f"config.{name}": value for name, value in vars(config).items() if name in used}
    return {
        name: value
        for name, value in values.items()
        if not name.rpartition(".")[2].startswith("_") and name not in _NOT_SETTINGS and _is_setting(value)
    }


@contextmanager
def mutate_module(
    module: nn.Module, slots: Mapping[str, TensorSlot], mutation: CallMutation
) -> Iterator[None]:
    """Mutate tensors and settings of a module within a block.

    Args:
        module: The module.
        slots: Where the tensors of the mutation are registered.
        mutation: Its arguments, results and operations are left to the call.
    """
    with ExitStack() as stack:
        for name, edit in mutation.tensors.items():
            registry, own = slots[name]
            tensor, before = registry[own], registry[own].data
            stack.callback(setattr, tensor, "data", before)
            tensor.data = apply_edit(before, edit)
        for name, value in mutation.settings.items():
            *owners, entry = name.split(".")
            holder: Any = reduce(getattr, owners, module)
            stack.callback(setattr, holder, entry, getattr(holder, entry))
            setattr(holder, entry, value)
        yield


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace `forward` of a module within a block."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def apply_edit(tensor: torch.Tensor, edit: Edit) -> torch.Tensor | None:
    """Make the edited tensor; the tensor itself stays as it is."""
    if isinstance(edit, Absent):
        return None
    if isinstance(edit, Filled):
        least = torch.finfo(tensor.dtype).min if tensor.is_floating_point() else edit.value
        return torch.full_like(tensor, max(edit.value, least))
    if isinstance(edit, Cleared):
        cleared = tensor.clone()
        cleared.narrow(edit.axis, edit.start, edit.stop - edit.start).zero_()
        return cleared
    if isinstance(edit, Added):
        return tensor + edit.value
    if isinstance(edit, Scaled):
        return tensor * edit.factor
    if isinstance(edit, Ordered):
        return tensor.index_select(edit.axis, torch.from_numpy(edit.order).to(tensor.device))
    if isinstance(edit, Shifted):
        moved = tensor.roll(edit.by, edit.axis)
        moved.narrow(edit.axis, 0 if edit.by > 0 else edit.by, abs(edit.by)).zero_()
        return moved
    if isinstance(edit, Replaced):
        made = torch.from_numpy(edit.values).to(tensor)
        return made.reshape(tensor.shape) if made.numel() == tensor.numel() else made
    if isinstance(edit, Masked):
        return change_extent(tensor, edit.extent)
    if isinstance(edit, Quantised):
        return _quantise(tensor, edit)
    if isinstance(edit, Rounded):
        return tensor.to(dtype_named(edit.dtype)).to(tensor.dtype)
    if isinstance(edit, Transposed):
        return tensor.transpose(*edit.axes).contiguous()
    raise KeyError(f"{edit}: a tensor of another module is read from the model")


def _quantise(tensor: torch.Tensor, edit: Quantised) -> torch.Tensor:
    """Round a matrix to whole numbers of its scales, and give it back by the scales that it gets."""
    largest = 2 ** (edit.bits - 1) - 1
    slices = tensor.reshape(len(tensor), -1, edit.group) if edit.group else tensor
    size = slices.abs()
    axis = -1 if edit.group else None if edit.axis is None else 1 - edit.axis
    scale = size.max() if axis is None else size.amax(axis, keepdim=True)
    scale = scale.clamp(min=torch.finfo(tensor.dtype).tiny) / largest
    moved_axis = 1 if edit.group else edit.axis
    given_back = scale if moved_axis is None else scale.roll(edit.by, moved_axis)
    if edit.is_transposed:
        given_back = scale.transpose(0, 1).reshape(scale.shape)
    quantised: torch.Tensor = (slices / scale).round() * given_back
    return quantised.reshape(tensor.shape)


def _is_setting(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, str) for item in value) and len(set(value)) > 1
    return isinstance(value, (bool, int, float))


def _find_names_used(cls: type) -> set[str]:
    """Find the names in the code of a class and its base classes, except in `__init__`."""
    names: set[str] = set()

    def add(code: CodeType) -> None:
        names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                add(constant)

    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        for name, member in vars(base).items():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and name != "__init__":
                add(code)
    return names
