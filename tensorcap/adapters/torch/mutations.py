"""Operations of torch code, one of which does something else: is left out, done twice, or of another kind.

An operation is known by where it is written, so that in a loop, or for each expert, all of it changes.

A torch module with something changed within a block: its tensors, its settings, its `forward`.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tensorcap.adapters.edits import (
    MASKS,
    Absent,
    Added,
    CallMutation,
    Edit,
    Filled,
    Masked,
    Operation,
    Ordered,
    Rounded,
    Shifted,
)
from tensorcap.adapters.torch.low_precision import Steps
from tensorcap.adapters.torch.masks import attention_with, other_mask
from tensorcap.adapters.torch.tensors import dtype_named

_OWN: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_ATTENTION: Final = "scaled_dot_product_attention"
_SUMS: Final = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_PRODUCTS: Final = frozenset({"mul", "__mul__", "__rmul__", "mul_", "__imul__"})
_DIFFERENCES: Final = frozenset({"sub", "__sub__", "sub_", "__isub__"})
_PARTS: Final = frozenset({"chunk", "split", "unbind", "tensor_split"})
_JOINED: Final = frozenset({"cat", "stack", "concat"})
_MOST_PARTS: Final = 4
_MEANS: Final[Mapping[str, Callable[..., Any]]] = {"mean": torch.mean, "sum": torch.sum}
_FUNCTIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "exp": torch.exp,
}
_ACTIVATIONS: Final = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "exp"})


class Altering(TorchFunctionMode):
    """Runs code with some operations altered, and lists all of them.

    Attributes:
        operations: Those that can be altered, by where they are written.
    """

    def __init__(self, altered: Mapping[str, str], steps: Steps | None = None) -> None:
        """Alter some operations.

        Args:
            altered: Ways by where the operation is written.
            steps: What does every operation, if it is not done as it is written.
        """
        super().__init__()
        self._steps = steps
        self.operations: dict[str, Operation] = {}
        self._altered = altered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", "")).rpartition(".")[2]
        frame = _caller(sys._getframe(1))
        if frame is None or name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        known = f"{name} at {place} ({frame.f_lasti})"
        way = self._altered.get(known)
        if way is not None:
            return _altered(name, way, func, args, kwargs)
        if self._steps is not None:
            return self._steps(name, func, args, kwargs)
        result = func(*args, **kwargs)
        if known not in self.operations:
            ways = tuple(_ways(name, args, result))
            if ways:
                is_number = any(isinstance(arg, (int, float)) for arg in args[:2])
                self.operations[known] = Operation(name.strip("_"), place, ways, is_number)
        return result


def _caller(frame: FrameType | None) -> FrameType | None:
    """Who wrote the operation: the nearest frame that is not torch's; None if that is ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_OWN[0]):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(_OWN[1]) else frame


def _ways(name: str, args: Any, result: Any) -> list[str]:
    """What an operation could do otherwise."""
    if name in _PARTS or name in _JOINED:
        parts = (args[0] if args else ()) if name in _JOINED else result
        pairs = itertools.combinations(range(min(len(parts), _MOST_PARTS)), 2)
        return [f"{one} and {other}" for one, other in pairs if parts[one].shape == parts[other].shape]
    if not isinstance(result, torch.Tensor) or not result.is_floating_point() or not args:
        return []
    if name == _ATTENTION:
        return list(MASKS)
    if name in _MEANS:
        return [other for other in _MEANS if other != name]
    ways = [
        way
        for way, arg in zip(("first", "second"), args[:2], strict=False)
        if isinstance(arg, torch.Tensor) and arg.shape == result.shape and arg.dtype == result.dtype
    ]
    if name in _SUMS:
        ways += ["twice", "opposite"]
    elif name in _PRODUCTS and len(ways) == 2:
        ways.append("sum")
    elif name in _DIFFERENCES:
        ways.append("opposite")
    elif name in _ACTIVATIONS:
        ways += [other for other in _FUNCTIONS if other != name]
    return ways


def _altered(name: str, way: str, func: Any, args: Any, kwargs: Any) -> Any:
    if name == _ATTENTION:
        return attention_with(way, func, args, kwargs)
    if way in ("first", "second"):
        return args[way == "second"]
    if name in _PARTS or name in _JOINED:
        parts = list(args[0] if name in _JOINED else func(*args, **kwargs))
        one, other = map(int, way.split(" and "))
        parts[one], parts[other] = parts[other], parts[one]
        return func(parts, *args[1:], **kwargs) if name in _JOINED else tuple(parts)
    if name in _PRODUCTS:
        return args[0] + args[1]
    if way == "twice":
        return args[0] + args[1] + args[1]
    if way == "opposite":
        return args[0] - args[1] if name in _SUMS else args[0] + args[1]
    if name in _MEANS:
        return _MEANS[way](*args, **kwargs)
    return _FUNCTIONS[way](args[0])


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
def changed(module: nn.Module, tensors: Mapping[str, Held], change: CallMutation) -> Iterator[None]:
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
