"""The description of a Core AI model in an archive: its settings, and the torch modules of its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tensorcap.adapters.coreai.engine import CORE_VERSION, VERSION
from tensorcap.adapters.coreai.model import CoreAIModel
from tensorcap.workload import class_name, file_of, redact


def modules_of(model: CoreAIModel) -> dict[str, str]:
    """The class of each module by its path, the model itself first; an asset has none but itself."""
    source = model.source
    if isinstance(source, torch.nn.Module):
        return {path: class_name(module) for path, module in source.named_modules()}
    paths = {"": "coreai.Asset" if isinstance(source, str | Path) else class_name(source)}
    if isinstance(source, torch.export.ExportedProgram):
        for node in source.graph.nodes:
            for path, kind in (node.meta.get("nn_module_stack") or {}).values():
                paths[path] = kind if isinstance(kind, str) else class_name(kind)
    return paths


def describe(model: CoreAIModel) -> dict[str, Any]:
    """The run's metadata that Core AI knows (`specs/coreai.md`)."""
    source = model.source
    modules = modules_of(model)
    is_asset = isinstance(source, str | Path)
    weights = getattr(source, "state_dict", {})  # of a module a method, of a program a dict
    weights = weights() if callable(weights) else weights
    own = next((str(w.dtype).removeprefix("torch.") for w in weights.values() if w.is_floating_point()), None)
    dtype = {"fp16": "float16", "fp32": "float32"}.get(model.precision or "", own)
    return {
        "framework": {
            "name": "coreai",
            "version": VERSION,
            "settings": {
                "device_target": "cpu",
                "function": model.function,
                "compute_units": "default (no choice on Linux)",
                "precision": model.precision or "of the source",
                "mode": "of the asset" if is_asset else model.mode,
            },
        },
        "packages": {"coreai-torch": VERSION, "coreai-core": CORE_VERSION, "torch": torch.__version__},
        "model": {
            "class": modules[""],
            "file": redact(str(source) if is_asset else file_of(type(source)) or ""),
        },
        "dtype": dtype,
        "compute_dtype": dtype,
        "device": "cpu",
        "modules": [{"path": path, "class": kind, "training": False} for path, kind in modules.items()],
    }
