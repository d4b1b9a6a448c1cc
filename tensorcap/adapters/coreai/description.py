"""The description of a Core AI model in an archive: its settings, and the torch modules of its source."""

from __future__ import annotations

from typing import Any

import torch

from tensorcap.adapters.coreai.conversion import converted
from tensorcap.adapters.coreai.engine import VERSION
from tensorcap.adapters.coreai.model import CoreAIModel
from tensorcap.adapters.torch.description import describe_modules
from tensorcap.workload import class_name, file_of, redact


def modules_of(model: CoreAIModel) -> dict[str, str]:
    """The class of each module by its path, the model itself first; those of an asset are instances."""
    source = model.source
    if isinstance(source, torch.nn.Module):
        return {path: class_name(module) for path, module in source.named_modules()}
    if model.is_asset:
        return {"": "coreai.Asset", **converted(model, (), {}).operation_map.modules}
    paths = {"": class_name(source)}
    if isinstance(source, torch.export.ExportedProgram):
        for node in source.graph.nodes:
            for path, kind in (node.meta.get("nn_module_stack") or {}).values():
                paths[path] = kind if isinstance(kind, str) else class_name(kind)
    return paths


def _describe_modules(model: CoreAIModel, classes: dict[str, str]) -> list[dict[str, Any]]:
    """An entry for each module; of a torch module with its weights, by which quantised ones are known."""
    if not isinstance(model.source, torch.nn.Module):
        return [{"path": path, "class": kind, "training": False} for path, kind in classes.items()]
    entries = describe_modules(dict(model.source.named_modules()))
    for entry in entries:
        entry["training"] = False
        tensors = [*entry["parameters"].values(), *entry.get("buffers", {}).values()]
        for tensor in tensors if model.precision == "fp16" else ():
            if tensor["dtype"] in ("float32", "float64", "bfloat16"):
                tensor["dtype"] = "float16"
    return entries


def describe(model: CoreAIModel) -> dict[str, Any]:
    """The run's metadata that Core AI knows (`specs/coreai.md`)."""
    source = model.source
    modules = modules_of(model)
    if model.is_asset:
        operations = converted(model, (), {}).operation_map
        dtype = operations.dtype or None
        mode = "debug" if operations.outputs else "release"
    else:
        dtype = {"fp16": "float16", "fp32": "float32"}.get(model.precision or "", _dtype_of(source))
        mode = model.mode or "debug"
    return {
        "framework": {
            "name": "coreai",
            "version": VERSION,
            "settings": {
                "device_target": model.device_target or "host",
                "function": model.function,
                "compute_units": "cpu",
                "precision": {"float16": "fp16", "float32": "fp32"}.get(dtype or "", dtype),
                "mode": mode,
                "inputs": dict(model.inputs) or "of the workload",
            },
        },
        "model": {
            "class": modules[""],
            "file": redact(str(source) if model.is_asset else file_of(type(source)) or ""),
        },
        "dtype": dtype,
        "compute_dtype": dtype,
        "device": "cpu",
        "modules": _describe_modules(model, modules),
    }


def _dtype_of(source: Any) -> str | None:
    """The dtype of a module's or program's weights."""
    weights = getattr(source, "state_dict", {})  # of a module a method, of a program a dict
    weights = weights() if callable(weights) else weights
    return next(
        (str(w.dtype).removeprefix("torch.") for w in weights.values() if w.is_floating_point()), None
    )
