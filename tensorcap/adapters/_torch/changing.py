"""A torch module with something changed within a block: its tensors, its settings, its `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters._torch.masks import other_mask
from tensorcap.adapters._torch.tensors import dtype_named
from tensorcap.variation import Absent, Added, Change, Edit, Filled, Masked, Ordered, Rounded, Shifted

Held = tuple[dict[str, Any], str]  # what holds a parameter or a buffer, and its name there

_NOT_SETTINGS: Final = ("training", "layer_idx")


def settings(module: nn.Module) -> Mapping[str, Any]:
    """Attributes, and entries of the configuration, whose names the code of the module's class has."""
    used = _names_used(type(module))
    found = {name: value for name, value in vars(module).items() if name in used}
    config = getattr(module, "config", None)
    if hasattr(config, "__dict__") and not isinstance(config, nn.Module):
        found |= {f"config.{name}": value for name, value in vars(config).items() if name in used}
    return {
        name: value
        for name, value in found.items()
        if not name.rpartition(".")[2].startswith("_") and name not in _NOT_SETTINGS and _is_setting(value)
    }


@contextmanager
def changed(module: nn.Module, tensors: Mapping[str, Held], change: Change) -> Iterator[None]:
    """Other tensors and settings, within a block.

    Args:
        module: The module.
        tensors: Where those of the change are held.
        change: What is changed; its arguments, results and operations are for others to change.
    """
    with ExitStack() as stack:
        for name, edit in change.tensors.items():
            holder, own = tensors[name]
            tensor, before = holder[own], holder[own].data
            stack.callback(setattr, tensor, "data", before)
            tensor.data = edited(before, edit)
        for name, value in change.settings.items():
            owner, _, entry = name.rpartition(".")
            holding = module.config if owner else module
            stack.callback(setattr, holding, entry, getattr(holding, entry))
            setattr(holding, entry, value)
        yield


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another `forward`, within a block."""
    held = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if held is None:
            del module.forward
        else:
            module.forward = held


def edited(tensor: torch.Tensor, edit: Edit) -> torch.Tensor | None:
    """What becomes of a tensor, which itself stays as it is."""
    if isinstance(edit, Absent):
        return None
    if isinstance(edit, Filled):
        least = torch.finfo(tensor.dtype).min if tensor.is_floating_point() else edit.value
        return torch.full_like(tensor, max(edit.value, least))
    if isinstance(edit, Added):
        return tensor + edit.value
    if isinstance(edit, Ordered):
        return tensor.index_select(edit.axis, torch.from_numpy(edit.order).to(tensor.device))
    if isinstance(edit, Shifted):
        moved = tensor.roll(edit.by, edit.axis)
        moved.narrow(edit.axis, 0 if edit.by > 0 else edit.by, abs(edit.by)).zero_()
        return moved
    if isinstance(edit, Masked):
        return other_mask(tensor, edit.way)
    if isinstance(edit, Rounded):
        return tensor.to(dtype_named(edit.dtype)).to(tensor.dtype)
    return tensor.transpose(*edit.axes).contiguous()


def _is_setting(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, str) for item in value) and len(set(value)) > 1
    return isinstance(value, (bool, int, float))


def _names_used(cls: type) -> set[str]:
    """Names in the code of a class and of what it inherits, save where it is made."""
    found: set[str] = set()

    def add(code: CodeType) -> None:
        found.update(code.co_names)
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
    return found
