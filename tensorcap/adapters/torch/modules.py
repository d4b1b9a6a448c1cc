"""The modules of a torch model: their names, the arguments of their calls, their precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.protocol import first_names


def tree(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """All modules by their first name, and the further names of modules that have several.

    What torch.compile makes of a module stands in the place of that, whose children are its own.
    """
    return first_names(_names(model, "", ()))


def _names(module: nn.Module, name: str, above: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    above = (*above, module)
    for child_name, child in unwrapped(module)._modules.items():
        # a module within itself would have names without end
        if child is not None and not any(child is parent for parent in above):
            yield from _names(child, f"{name}.{child_name}" if name else child_name, above)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile made this one of, or the module itself."""
    while type(module).__module__ == "torch._dynamo.eval_frame" and "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]  # type: ignore[assignment]  # never None
    return module


def argument_names(module: nn.Module, known: dict[Any, list[str]]) -> list[str]:
    """Names of the positional parameters of `forward`; none if it is not written in Python.

    Args:
        module: The module.
        known: The names by function, filled by this function: a model has few classes and many modules.
    """
    forward = unwrapped(module).forward
    function = getattr(forward, "__func__", forward)
    names = known.get(function)
    if names is None:
        try:
            parameters = inspect.signature(forward).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = known[function] = [p.name for p in parameters if p.kind in positional]
    return names


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers, as loading a checkpoint in `dtype` would; other buffers stay.

    `model.to(dtype)` would round the tables of rotary embeddings too; in a loaded model they are not rounded.
    """
    is_kept = _kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and not is_kept(path, name):
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            is_saved = name not in module._non_persistent_buffers_set
            if buffer is not None and is_saved and buffer.is_floating_point() and not is_kept(path, name):
                module._buffers[name] = buffer.to(dtype)


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> Callable[[str, str], bool]:
    """Which parameters a Hugging Face model loads in float32 whatever dtype it is asked for."""
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return lambda path, name: not names.isdisjoint((*path.split("."), name))


def has_no_forward(module: nn.Module) -> bool:
    """Whether a module only holds others, and is never called itself."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)
