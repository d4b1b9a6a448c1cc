"""How mistakes are planted: one module of one model is given another `forward`, other values or a substitute.

Nothing of the library is changed, and no other module of the model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tensorcap_formats.keys import ROOT_SITE

Forward = Callable[..., Any]
Plant = Callable[[Any], None]
Change = Callable[[Any], None]


def module_at(model: nn.Module, site: str) -> Any:
    """The module of a site."""
    return model if site == ROOT_SITE else model.get_submodule(site)


def override(module: nn.Module, forward: Forward) -> None:
    """Give a module another `forward`, which is told the module first; its class keeps its name."""
    own = type(module)
    made = functools.wraps(own.forward)(forward)
    names = {"forward": made, "__module__": own.__module__, "__qualname__": own.__qualname__}
    module.__class__ = type(own.__name__, (own,), names)


def computing(site: str, forward: Forward) -> Plant:
    """A module that computes something else: `forward(module, *arguments)`."""
    return lambda model: override(module_at(model, site), forward)


def returning(site: str, change: Callable[..., Any]) -> Plant:
    """A module that returns `change(result, *arguments)`."""

    def plant(model: Any) -> None:
        module = module_at(model, site)
        inner = type(module).forward
        override(module, lambda self, *args, **options: change(inner(self, *args, **options), *args))

    return plant


def fed(site: str, change: Callable[[Any, dict[str, Any]], None]) -> Plant:
    """A module that goes on with other keyword arguments than it is given: `change(module, arguments)`."""

    def plant(model: Any) -> None:
        module = module_at(model, site)
        inner = type(module).forward

        def forward(self: Any, *args: Any, **options: Any) -> Any:
            given = inspect.signature(inner).bind(self, *args, **options).arguments
            del given["self"]
            given |= given.pop("kwargs", {})
            change(self, given)
            return inner(self, **given)

        override(module, forward)

    return plant


def attending(site: str, change: Callable[..., Any]) -> Plant:
    """A module whose attention is `change(attend, module, query, key, value, mask, **options)`."""

    def plant(model: Any) -> None:
        module = module_at(model, site)
        rebind(module, ALL_ATTENTION_FUNCTIONS=_Interfaces(module, change))

    return plant


class _Interfaces:
    """Stands for the library's table of implementations of attention."""

    def __init__(self, module: nn.Module, change: Callable[..., Any]) -> None:
        inner = inspect.unwrap(type(module).forward)
        self._table = inner.__globals__["ALL_ATTENTION_FUNCTIONS"]
        self._change = change

    def get_interface(self, name: str, default: Forward) -> Forward:
        return functools.partial(self._change, self._table.get_interface(name, default))


def rebind(module: nn.Module, **names: Any) -> None:
    """Let global names mean something else in the `forward` of a module."""
    inner = inspect.unwrap(type(module).forward)
    forward = types.FunctionType(
        inner.__code__, {**inner.__globals__, **names}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    forward.__kwdefaults__ = inner.__kwdefaults__
    override(module, forward)


def rebound(site: str, **names: Any) -> Plant:
    """A module in which global names mean something else."""
    return lambda model: rebind(module_at(model, site), **names)


def with_values(site: str, **values: Any) -> Plant:
    """A module with other attributes."""

    def plant(model: Any) -> None:
        module = module_at(model, site)
        for name, value in values.items():
            setattr(module, name, value)

    return plant


def with_config(site: str, **values: Any) -> Plant:
    """A module that reads something else in its configuration, which is then its own."""

    def plant(model: Any) -> None:
        module = module_at(model, site)
        module.config = copy.deepcopy(module.config)
        for name, value in values.items():
            setattr(module.config, name, value)

    return plant


def with_tensors(site: str, **changes: Callable[[Tensor], Tensor]) -> Plant:
    """A module with other parameters or buffers, which it shares with no other module any more."""

    def plant(model: Any) -> None:
        module = module_at(model, site)
        for name, change in changes.items():
            before = getattr(module, name)
            with torch.no_grad():
                after = change(before.detach().clone()).to(before.dtype).clone()
            setattr(module, name, nn.Parameter(after) if isinstance(before, nn.Parameter) else after)

    return plant


def put(model: nn.Module, site: str, module: nn.Module) -> None:
    """Put a module in the place of another, in the same mode."""
    parent, _, name = site.rpartition(".")
    setattr(model.get_submodule(parent), name, module.eval())


def removed(site: str) -> Plant:
    """Nothing in the place of a module: what it is given is handed on."""
    return lambda model: put(model, site, nn.Identity())


class Activation(nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)


def activated(site: str, function: Callable[[Tensor], Tensor]) -> Plant:
    """Another activation."""
    return lambda model: put(model, site, Activation(function))


def quick_gelu(x: Tensor) -> Tensor:
    """The cheap approximation."""
    return x * torch.sigmoid(1.702 * x)


def sequential_sum(x: Tensor) -> Tensor:
    """The sum over the last axis, one after the other, rounded to the dtype each time."""
    total = x[..., 0]
    for at in range(1, x.shape[-1]):
        total = total + x[..., at]
    return total


def interleaved(count: int, size: int) -> Tensor:
    """Order of rows that takes so many heads from rotary halves to pairs side by side."""
    within = torch.arange(size).reshape(2, size // 2).T.reshape(-1)
    return (torch.arange(count)[:, None] * size + within).reshape(-1)


def rotate_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Rotary embedding of elements `2 i` and `2 i + 1`, with tables made for halves."""
    half = cos.shape[-1] // 2
    cos = cos[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)
    sin = sin[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)

    def turned(x: Tensor) -> Tensor:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + other * sin

    return turned(q), turned(k)
