"""The description of a torch model in an archive: its modules, parameters, configuration and settings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from tensorcap.adapters.torch.modules import tree
from tensorcap.adapters.torch.tensors import dtype_name
from tensorcap.workload import class_name, file_of, jsonable, redact
from tensorcap_formats.keys import module_site


def describe(model: nn.Module) -> dict[str, Any]:
    """The run's metadata that torch knows (`specs/archive.md`)."""
    modules, aliases = tree(model)
    inner = getattr(model, "_orig_mod", model)
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
        "modules": [_describe_module(name, module) for name, module in modules.items()],
        "aliases": {module_site(alias): module_site(name) for alias, name in aliases.items()},
    }


def main_dtype(model: nn.Module) -> str | None:
    """The floating dtype of most of the model's parameters."""
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            sizes[dtype_name(parameter.dtype)] += _size(parameter)
    return sizes.most_common(1)[0][0] if sizes else None


def _describe_module(name: str, module: nn.Module) -> dict[str, Any]:
    entry = {
        "path": name,
        "class": class_name(type(module)),
        "parameters": {n: _describe_tensor(p) for n, p in module._parameters.items() if p is not None},
        "training": module.training,
    }
    buffers = {n: _describe_tensor(b) for n, b in module._buffers.items() if b is not None}
    if buffers:
        entry["buffers"] = buffers
    return entry


def _describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    shape = None if nn.parameter.is_lazy(tensor) else list(tensor.shape)
    return {"shape": shape, "dtype": dtype_name(tensor.dtype)}


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
