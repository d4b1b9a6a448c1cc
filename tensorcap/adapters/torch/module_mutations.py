"""Mutate a torch module within a block: its tensors, its settings, its `forward`, operations of its code.

An operation is known by the place where it is written: in a loop, or for each expert, all of it changes.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tensorcap.adapters.edits import (
    MASK_EXTENTS,
    Absent,
    Added,
    CallMutation,
    Edit,
    Filled,
    Masked,
    Operation,
    Ordered,
    Quantised,
    Replaced,
    Rounded,
    Shifted,
)
from tensorcap.adapters.torch.low_precision import (
    RoundedOperations,
    find_low_precisions,
    is_low_precision,
    run_in_low_precision,
)
from tensorcap.adapters.torch.masks import attend_with_extent, change_extent
from tensorcap.adapters.torch.operation_options import find_options, find_own_axes, run_option
from tensorcap.adapters.torch.tensors import dtype_named

_TORCH_FOLDER: Final = str(Path(torch.__file__).parent)
_TORCH_MODULES: Final = str(Path(torch.__file__).parent / "nn" / "modules")
_OWN_FOLDER: Final = str(Path(__file__).parent)
_NOT_SETTINGS: Final = ("training", "layer_idx")
_ATTENTION: Final = "scaled_dot_product_attention"
_SUMS: Final = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_PRODUCTS: Final = frozenset({"mul", "__mul__", "__rmul__", "mul_", "__imul__"})
_DIFFERENCES: Final = frozenset({"sub", "__sub__", "sub_", "__isub__"})
_SPLITS: Final = frozenset({"chunk", "split", "unbind", "tensor_split"})
_JOINS: Final = frozenset({"cat", "stack", "concat"})
_MOST_PARTS: Final = 4  # of a split or a join; the number of pairs grows with its square
_REDUCTIONS: Final[Mapping[str, Callable[..., Any]]] = {"mean": torch.mean, "sum": torch.sum}
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
_TERM_BEHIND: Final = "its operand's last term added to its result"
_WORDS: Final = frozenset(  # of alternatives that no option is called by
    {"first", "second", "twice", "opposite", "sum", "mean", *MASK_EXTENTS, *_FUNCTIONS}
)
_ACTIVATIONS: Final = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "exp"})


class OperationMutator(TorchFunctionMode):
    """Runs code with mutated operations, and lists those that can be mutated.

    Attributes:
        operations: Those that can be mutated and are not, by key.
    """

    def __init__(self, mutated: Mapping[str, str], rounded: RoundedOperations | None = None) -> None:
        """Mutate some operations.

        Args:
            mutated: Alternatives by the key of the operation.
            rounded: Does every other operation instead of torch; None for torch.
        """
        super().__init__()
        self._rounded = rounded
        self.operations: dict[str, Operation] = {}
        self._mutated = mutated
        self._sums: dict[int, tuple[torch.Tensor, Any]] = {}  # by what they made: that, and their operands

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation.

        1. Operations of our own code run as they are.
        2. The key is name, file, line and instruction of the code that calls it.
        3. A mutated operation does its alternative; any other one is rounded, or runs as it is and is listed.
        4. Of torch's own modules nothing is rounded, and only options of operations change.
        """
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", "")).rpartition(".")[2]
        frame, is_direct = _find_caller(sys._getframe(1))
        if frame is None or name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        key = f"{name} at {place} ({frame.f_lasti})"
        alternative = self._mutated.get(key)
        if alternative == _TERM_BEHIND:
            first, second = self._sums[id(args[0])][1]
            return func(first, *args[1:], **kwargs) + second
        if alternative is not None:
            return _run_alternative(name, alternative, func, args, kwargs)
        if self._rounded is not None:
            return self._rounded(name, func, args, kwargs) if is_direct else func(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in _SUMS and isinstance(args[0], torch.Tensor) and args[0].shape == result.shape:
            self._sums[id(result)] = result, args[:2]
        if key not in self.operations:
            own = _find_alternatives(name, args, result) if is_direct else []
            if name in _ACTIVATIONS and id(args[0]) in self._sums:
                own.append(_TERM_BEHIND)
            low = find_low_precisions(name, result) if is_direct and isinstance(result, torch.Tensor) else []
            alternatives = (*own, *find_options(name, args, kwargs, result), *low)
            if alternatives:
                has_number = any(isinstance(arg, (int, float)) for arg in args[:2])
                axes = find_own_axes(name, args, kwargs)
                self.operations[key] = Operation(name.strip("_"), place, alternatives, has_number, axes)
        return result


def _find_caller(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Find the code whose operation it is, and whether it calls it by no module of torch's that is made anew.

    1. An operation that our code calls is nobody's.
    2. It is that of the nearest frame that is neither torch's nor ours.
    3. If the module that is called again is torch's, it is that of the module's code.
    """
    is_ours = frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDER)
    is_direct = True
    of_module: FrameType | None = None
    while frame is not None and not is_ours:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH_MODULES):
            is_base = file.endswith("module.py")
            of_module = frame if of_module is None and not is_base else of_module
        elif file.startswith(_OWN_FOLDER):
            is_direct = False
            if frame.f_code.co_name == "run":
                return of_module, False
        elif not file.startswith(_TORCH_FOLDER):
            return frame, is_direct
        frame = frame.f_back
    return None, False


def _find_alternatives(name: str, args: Any, result: Any) -> list[str]:
    """List what an operation can do instead, as `Operation.alternatives` names it.

    1. Parts of one shape that are split or joined can be exchanged.
    2. Attention can see another extent; a mean can be a sum.
    3. Any other operation can return an operand of its result's shape and dtype; sums, products, differences
       and activations have alternatives of their own kind.
    """
    if name in _SPLITS or name in _JOINS:
        parts = (args[0] if args else ()) if name in _JOINS else result
        pairs = itertools.combinations(range(min(len(parts), _MOST_PARTS)), 2)
        return [f"{one} and {other}" for one, other in pairs if parts[one].shape == parts[other].shape]
    if not isinstance(result, torch.Tensor) or not result.is_floating_point() or not args:
        return []
    if name == _ATTENTION:
        return list(MASK_EXTENTS)
    if name in _REDUCTIONS:
        return [other for other in _REDUCTIONS if other != name]
    alternatives = [
        operand
        for operand, arg in zip(("first", "second"), args[:2], strict=False)
        if isinstance(arg, torch.Tensor) and arg.shape == result.shape and arg.dtype == result.dtype
    ]
    if name in _SUMS:
        alternatives += ["twice", "opposite"]
    elif name in _PRODUCTS and len(alternatives) == 2:
        alternatives.append("sum")
    elif name in _DIFFERENCES:
        alternatives.append("opposite")
    elif name in _ACTIVATIONS:
        alternatives += [other for other in _FUNCTIONS if other != name]
    return alternatives


def _run_alternative(name: str, alternative: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Do what an operation can do instead."""
    if is_low_precision(alternative):
        return run_in_low_precision(name, alternative, func, args, kwargs)
    if alternative not in _WORDS and not (name in _SPLITS or name in _JOINS):
        return run_option(name, alternative, func, args, kwargs)
    if name == _ATTENTION:
        return attend_with_extent(alternative, func, args, kwargs)
    if alternative in ("first", "second"):
        return args[alternative == "second"]
    if name in _SPLITS or name in _JOINS:
        parts = list(args[0] if name in _JOINS else func(*args, **kwargs))
        one, other = map(int, alternative.split(" and "))
        parts[one], parts[other] = parts[other], parts[one]
        return func(parts, *args[1:], **kwargs) if name in _JOINS else tuple(parts)
    if name in _PRODUCTS:
        return args[0] + args[1]
    if alternative == "twice":
        return args[0] + args[1] + args[1]
    if alternative == "opposite":
        return args[0] - args[1] if name in _SUMS else args[0] + args[1]
    if name in _REDUCTIONS:
        return _REDUCTIONS[alternative](*args, **kwargs)
    return _FUNCTIONS[alternative](args[0])


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
            owner, _, entry = name.rpartition(".")
            holder = module.config if owner else module
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
    if isinstance(edit, Added):
        return tensor + edit.value
    if isinstance(edit, Ordered):
        return tensor.index_select(edit.axis, torch.from_numpy(edit.order).to(tensor.device))
    if isinstance(edit, Shifted):
        moved = tensor.roll(edit.by, edit.axis)
        moved.narrow(edit.axis, 0 if edit.by > 0 else edit.by, abs(edit.by)).zero_()
        return moved
    if isinstance(edit, Replaced):
        return torch.from_numpy(edit.values).to(tensor).reshape(tensor.shape)
    if isinstance(edit, Masked):
        return change_extent(tensor, edit.extent)
    if isinstance(edit, Quantised):
        largest = 2 ** (edit.bits - 1) - 1
        size = tensor.abs()
        scale = size.max() if edit.axis is None else size.amax(1 - edit.axis, keepdim=True)
        scale = scale.clamp(min=torch.finfo(tensor.dtype).tiny) / largest
        given_back = scale if edit.axis is None else scale.roll(edit.by, edit.axis)
        quantised: torch.Tensor = (tensor / scale).round() * given_back
        return quantised
    if isinstance(edit, Rounded):
        return tensor.to(dtype_named(edit.dtype)).to(tensor.dtype)
    return tensor.transpose(*edit.axes).contiguous()


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
