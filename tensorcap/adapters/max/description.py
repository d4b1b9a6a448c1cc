"""The description of a MAX model in an archive: its modules, weights, configuration and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from tensorcap.adapters.max.engine import VERSION, DeviceRef, Module
from tensorcap.adapters.max.model import MaxModel
from tensorcap.adapters.max.modules import devices_of, tree
from tensorcap.adapters.max.parameters import load_weights, own_weights
from tensorcap.adapters.max.tensors import stored
from tensorcap.adapters.protocol import NotCapturableError, most_common_dtype
from tensorcap.recording import attribute_settings, summarize_weight
from tensorcap.workload import class_name, file_of, jsonable, redact
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import module_site


def describe(model: MaxModel, *, digests: bool = False) -> dict[str, Any]:
    """The run's metadata that MAX knows (`specs/archive.md`).

    Args:
        model: The model.
        digests: Whether weights are read, for their digests and statistics.
    """
    module = model.module
    modules, aliases = tree(module)
    summaries = _summarize_weights(model) if digests else {}
    dtype = main_dtype(modules)
    devices = [DeviceRef.from_device(device) for device in model.devices] or devices_of(modules)
    return {
        "framework": {"name": "max", "version": VERSION},
        "model": {
            "class": class_name(module),
            "file": redact(file_of(type(module)) or ""),
            "config": _config(module),
            **({"left_out_weights": list(model.left_out_weights)} if model.left_out_weights else {}),
        },
        "dtype": dtype,
        "compute_dtype": dtype,
        "device": ", ".join(str(ref) for ref in devices if not ref.is_cpu()) or "cpu",
        "modules": [_describe_module(name, each, summaries) for name, each in modules.items()],
        "aliases": {module_site(alias): module_site(name) for alias, name in aliases.items()},
    }


def main_dtype(modules: Mapping[str, Module]) -> str | None:
    """The floating dtype of most of the model's weights."""
    weights = (weight for module in modules.values() for weight in own_weights(module).values())
    return most_common_dtype((w.dtype.name, _elements(w)) for w in weights if w.dtype.is_float())


def _elements(weight: Any) -> int:
    count = 1
    for dim in _shape(weight):
        count *= dim if isinstance(dim, int) else 1
    return count


def _shape(weight: Any) -> list[int | str]:
    return [int(str(dim)) if str(dim).isdigit() else str(dim) for dim in weight.shape]


def _summarize_weights(model: MaxModel) -> dict[int, dict[str, Any]]:
    """Digest and statistics of the weights that the model is run with, by the `id` of each `Weight`."""
    try:
        values = load_weights(model)
    except UsageError:  # not loaded yet, or by a program of the user
        return {}
    summaries = {}
    for name, weight in model.module.raw_state_dict().items():
        try:
            summaries[id(weight)] = summarize_weight(*stored(values[name]))
        except (KeyError, NotCapturableError):
            continue
    return summaries


def _describe_module(name: str, module: Module, summaries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    entry = {
        "path": name,
        "class": class_name(type(module)),
        "parameters": {
            n: {"shape": _shape(w), "dtype": w.dtype.name, **summaries.get(id(w), {})}
            for n, w in own_weights(module).items()
        },
        "training": False,
    }
    settings = attribute_settings(vars(module))
    return {**entry, "settings": settings} if settings else entry


def _config(module: Module) -> Any:
    config = getattr(module, "config", None)
    if is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in fields(config)}
    return jsonable(config) if isinstance(config, Mapping) else None
