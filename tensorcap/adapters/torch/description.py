"""The description of a torch model in an archive: its modules, parameters, configuration and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.protocol import most_common_dtype
from tensorcap.adapters.torch.module_settings import module_settings
from tensorcap.adapters.torch.modules import tree, unwrapped
from tensorcap.adapters.torch.packed_weights import packed_settings, packed_tensors, quantised_weights
from tensorcap.adapters.torch.tensor_leaves import untraced
from tensorcap.adapters.torch.tensors import PLAIN_CLASSES, dtype_name
from tensorcap.adapters.torch.weight_digests import WeightDigests
from tensorcap.workload import class_name, file_of, jsonable, redact
from tensorcap_formats.keys import module_site


def describe(model: nn.Module, *, digests: bool = False) -> dict[str, Any]:
    """The run's metadata that torch knows (`specs/archive.md`).

    Args:
        model: The model.
        digests: Whether parameters and buffers are read, for their digests and statistics.
    """
    modules, aliases = tree(model)
    weights = WeightDigests() if digests else None
    inner = unwrapped(model)
    dtype = main_dtype(model)
    return {
        "framework": {"name": "torch", "version": torch.__version__, "settings": _settings()},
        "model": {
            "class": class_name(inner),
            "file": redact(file_of(type(inner)) or ""),
            "config": _config(inner),
            "attn_implementation": _attention(inner),
        },
        "dtype": dtype,
        "compute_dtype": dtype,
        "device": _device(model),
        "seed": torch.initial_seed(),
        "modules": describe_modules(modules, weights),
        "aliases": {module_site(alias): module_site(name) for alias, name in aliases.items()},
    }


def main_dtype(model: nn.Module) -> str | None:
    """The floating dtype of most of the model's parameters."""
    return most_common_dtype(
        (dtype_name(parameter.dtype), _size(parameter))
        for parameter in model.parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    )


def describe_modules(modules: Mapping[str, nn.Module], weights: WeightDigests | None = None) -> list[Any]:
    """An entry for each module: class, parameters and buffers, settings.

    Args:
        modules: The modules by path.
        weights: Reads parameters and buffers for their digests; None if they are not read.
    """
    with torch.no_grad(), untraced():
        return [_describe_module(name, module, weights) for name, module in modules.items()]


def _describe_module(name: str, module: nn.Module, weights: WeightDigests | None) -> dict[str, Any]:
    def tensors(named: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        return {n: _describe_tensor(t, weights) for n, t in named.items() if t is not None}

    module = unwrapped(module)
    packed = packed_tensors(module)
    entry = {
        "path": name,
        "class": class_name(type(module)),
        "parameters": tensors({**module._parameters, **packed}),
        "training": module.training,
    }
    settings = {**module_settings(module), **packed_settings(module, packed)}
    if quantised := quantised_weights(module):
        settings["dequantised"] = list(quantised)  # parameters that are recorded in floats too
        settings["numbers"] = {name: weight.number for name, weight in quantised.items()}
    further = {"buffers": tensors(module._buffers), "settings": settings}
    return {**entry, **{name: value for name, value in further.items() if value}}


def _describe_tensor(tensor: torch.Tensor, weights: WeightDigests | None) -> dict[str, Any]:
    shape = None if nn.parameter.is_lazy(tensor) else list(tensor.shape)
    entry = {"shape": shape, "dtype": dtype_name(tensor.dtype)}
    if type(tensor) not in PLAIN_CLASSES and not nn.parameter.is_lazy(tensor):
        entry["class"] = class_name(type(tensor))
    return entry if weights is None else {**entry, **weights.describe(tensor)}


def _size(tensor: torch.Tensor) -> int:
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel()


def _device(model: nn.Module) -> str:
    devices = dict.fromkeys(str(p.device) for p in model.parameters())
    names = [f"cuda ({torch.cuda.get_device_name(d)})" if d.startswith("cuda") else d for d in devices]
    return ", ".join(dict.fromkeys(names)) or "cpu"


def _config(model: nn.Module) -> Any:
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    try:
        return jsonable(to_dict()) if callable(to_dict) else None
    except Exception:  # of a foreign configuration, which is only noted
        return None


def _attention(model: nn.Module) -> str | None:
    """How a transformers model computes attention, which its configuration does not save."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) else None


def _settings() -> dict[str, Any]:
    """The settings of torch that change the results of operators."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cuda": torch.version.cuda,
        "grad": torch.is_grad_enabled(),
    }
