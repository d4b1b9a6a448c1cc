"""Do another function of the same family in the place of an operation: an activation, a reduction, a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional

Function = Callable[[torch.Tensor], torch.Tensor]
Options = Iterator[tuple[str, Callable[[], Any]]]

_FUNCTIONS: Final[Mapping[str, Function]] = {  # activations; those of the first names are the usual ones
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "exp": torch.exp,
    "gelu quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu squared": lambda x: torch.relu(x).square(),
    "leaky relu": functional.leaky_relu,
    "leaky relu of slope 0.1": lambda x: functional.leaky_relu(x, 0.1),
    "leaky relu of slope 0.2": lambda x: functional.leaky_relu(x, 0.2),
    "elu": functional.elu,
    "elu plus one": lambda x: functional.elu(x) + 1,
    "selu": functional.selu,
    "mish": functional.mish,
    "relu6": functional.relu6,
    "hard sigmoid": functional.hardsigmoid,
    "hard swish": functional.hardswish,
    "hard tanh": functional.hardtanh,
    "softsign": functional.softsign,
    "log sigmoid": functional.logsigmoid,
    "logarithm of one more": torch.log1p,
    "softmax": lambda x: torch.softmax(x, -1),
}
_TORCH_NAMES: Final[Mapping[str, str]] = {  # of torch's functions that are called otherwise
    "hardsigmoid": "hard sigmoid",
    "hardswish": "hard swish",
    "hardtanh": "hard tanh",
    "leaky_relu": "leaky relu",
    "logsigmoid": "log sigmoid",
    "relu_": "relu",
    "silu_": "silu",
}
ACTIVATIONS: Final = frozenset(  # operations of torch
    {*(name for name in _FUNCTIONS if " " not in name), *_TORCH_NAMES} - {"softmax"}
)
_FAMILIES: Final[tuple[Mapping[str, Function], ...]] = (
    {"sin": torch.sin, "cos": torch.cos, "tan": torch.tan},
    {
        "sqrt": torch.sqrt,
        "rsqrt": torch.rsqrt,
        "square": torch.square,
        "reciprocal": torch.reciprocal,
        "abs": torch.abs,
    },
    {"exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1},
    {"log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p},
    {"floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc},
)
_OPERATORS: Final[Mapping[str, Callable[[Any, Any], torch.Tensor]]] = {
    "the sum": torch.add,
    "the difference": torch.sub,
    "the product": torch.mul,
    "the quotient": torch.div,
    "the larger one": torch.maximum,
    "the smaller one": torch.minimum,
}
_OPERATOR_NAMES: Final[Mapping[str, str]] = {
    "add": "the sum",
    "sub": "the difference",
    "mul": "the product",
    "div": "the quotient",
    "truediv": "the quotient",
    "maximum": "the larger one",
    "minimum": "the smaller one",
}
_REDUCTIONS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "largest": torch.amax,
    "smallest": torch.amin,
    "standard deviation": torch.std,
    "variance": torch.var,
}
_REDUCTION_NAMES: Final = {
    "mean": "mean",
    "sum": "sum",
    "amax": "largest",
    "amin": "smallest",
    "std": "standard deviation",
    "var": "variance",
}
_RUNNING: Final = ("cumsum", "cumprod")


def function_options(name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> Options:
    """List other functions that an operation can do, in words, each made only when it is called.

    1. An activation is another one.
    2. A function of each element is another one of its family: of angles, powers, logarithms, rounding.
    3. An operator of two tensors of one shape is another one, or takes its operands the other way round.
    4. A reduction is another one over the same axes; a variance is one of the whole or of a sample.
    5. A sum up to each place is one from there on, or leaves the place itself out.

    Args:
        name: Of the operation, as torch calls it.
        args: What it was given.
        kwargs: Likewise.
        result: What it returned.
    """
    if not args or not isinstance(args[0], torch.Tensor) or not isinstance(result, torch.Tensor):
        return
    x, base = args[0], name.strip("_")
    if base in ACTIVATIONS or (base == "softmax" and result.is_floating_point()):
        own = _TORCH_NAMES.get(base, base)
        for other, function in _FUNCTIONS.items():
            if other != own or (base == "gelu" and kwargs.get("approximate") == "tanh"):
                yield other, lambda f=function: f(x).to(result.dtype)  # type: ignore[misc]
        for axis in range(x.ndim - 1):
            yield f"softmax along axis {axis}", lambda axis=axis: torch.softmax(x, axis).to(result.dtype)  # type: ignore[misc]
    if base == "sigmoid":
        yield "one less its operand's sigmoid", lambda: 1 - torch.sigmoid(x)
    for family in _FAMILIES:
        if base in family and base not in ACTIVATIONS:
            for other, function in family.items():
                if other != base:
                    yield f"{other} of its operand", lambda f=function: f(x)  # type: ignore[misc]
    yield from _operator_options(base, args, result)
    if base in _REDUCTION_NAMES and result.is_floating_point():
        yield from _reduction_options(base, args, kwargs)
    if base in _RUNNING and result.is_floating_point():
        yield from _running_options(args, kwargs, result)


def _operator_options(name: str, args: Any, result: torch.Tensor) -> Options:
    own = _OPERATOR_NAMES.get(name)
    if own is None or len(args) < 2 or not result.is_floating_point():
        return
    one, two = args[:2]
    if isinstance(two, torch.Tensor):
        for other, function in _OPERATORS.items():
            if other != own and {other, own} != {"the sum", "the difference"}:
                yield f"{other} of its operands", lambda f=function: f(one, two)  # type: ignore[misc]
    for at, operand in enumerate((one, two)):
        for axis in range(operand.ndim - 1) if isinstance(operand, torch.Tensor) else ():
            for by in (1, -1) if operand.shape[axis] > 2 else ():
                pair = (operand.roll(by, axis), two) if at == 0 else (one, operand.roll(by, axis))
                where = f"rolled by {by} along axis {axis}"
                yield f"operand {at + 1} {where}", lambda pair=pair: _OPERATORS[own](*pair)  # type: ignore[misc]
    if own in ("the difference", "the quotient"):
        yield f"{own} the other way round", lambda: _OPERATORS[own](torch.as_tensor(two), one)


def _reduction_options(name: str, args: Any, kwargs: Mapping[str, Any]) -> Options:
    own = _REDUCTION_NAMES[name]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    axes = tuple(range(args[0].ndim)) if dim is None else dim
    options: dict[str, Any] = {"dim": axes, "keepdim": bool(kwargs.get("keepdim", False))}
    for other, function in _REDUCTIONS.items():
        if other != own:
            words = other if {other, own} == {"mean", "sum"} else f"the {other} of its operand"
            yield words, lambda f=function: f(args[0], **options)  # type: ignore[misc]
    if own in ("variance", "standard deviation"):
        for correction, whose in ((0, "the whole"), (1, "a sample")):
            reduced = partial(_REDUCTIONS[own], args[0], correction=correction, **options)
            yield f"the {own} of {whose}", reduced


def _running_options(args: Any, kwargs: Mapping[str, Any], result: torch.Tensor) -> Options:
    axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    x = args[0]
    yield "sums from the end", lambda: torch.cumsum(x.flip(axis), axis).flip(axis)
    yield "sums without the place itself", lambda: result - x
