"""The description of an ONNX model in an archive: versions, settings, and the modules of its source."""

from __future__ import annotations

import math
from typing import Any

from tensorcap.adapters.onnx.engine import ONNX_VERSION, VERSION
from tensorcap.adapters.onnx.model import OnnxModel
from tensorcap.adapters.onnx.parameters import describe_parameters, module_settings
from tensorcap.adapters.onnx.tap import LoadedModel
from tensorcap.adapters.protocol import most_common_dtype
from tensorcap.workload import redact


def describe(model: OnnxModel, *, digests: bool = False) -> dict[str, Any]:
    """The run's metadata that ONNX Runtime and the file know (`specs/onnx.md`).

    Args:
        model: The model.
        digests: Whether initialisers are read, for their digests and statistics.
    """
    loaded = LoadedModel.of(model)
    proto = loaded.graph.proto
    dtype = main_dtype(loaded)
    return {
        "framework": {
            "name": "onnx",
            "version": VERSION,
            "settings": {
                "onnx": ONNX_VERSION,
                "providers": list(model.providers),
                "optimization": model.optimization,
                "opsets": loaded.graph.opsets,
                "ir_version": int(proto.ir_version),
                "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
                "inputs": dict(model.inputs) or "of the workload",
            },
        },
        "model": {"class": loaded.scopes.classes[""], "file": redact(str(model.source))},
        "dtype": dtype,
        "compute_dtype": dtype,
        "device": "cpu" if set(model.providers) == {"CPUExecutionProvider"} else ", ".join(model.providers),
        "modules": [
            {
                "path": path,
                "class": name,
                "parameters": describe_parameters(loaded, path, digests=digests),
                "training": False,
                **_settings(loaded, path),
            }
            for path, name in loaded.scopes.classes.items()
        ],
    }


def _settings(loaded: LoadedModel, path: str) -> dict[str, Any]:
    settings = module_settings(loaded, path)
    return {"settings": settings} if settings else {}


def main_dtype(loaded: LoadedModel) -> str | None:
    """The floating dtype of most elements of the initialisers."""
    tensors = loaded.graph.weights.values()
    return most_common_dtype((t.dtype.name, math.prod(t.shape)) for t in tensors if t.dtype.is_inexact)
