"""The description of a JAX model in an archive: versions, modules, variables and devices."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax import numpy as jnp

from tensorcap.adapters.jax.model import JaxModel
from tensorcap.adapters.jax.modules import tree
from tensorcap.adapters.jax.tensors import stored
from tensorcap.adapters.jax.variables import owned_variables, shapes_and_dtypes
from tensorcap.adapters.protocol import most_common_dtype
from tensorcap.recording import attribute_settings, summarize_weight
from tensorcap.workload import class_name, file_of, redact
from tensorcap_formats.keys import module_site, unescape


def describe(model: JaxModel, *, digests: bool = False) -> dict[str, Any]:
    """The run's metadata that JAX and Flax know (`specs/jax.md`).

    Args:
        model: The model.
        digests: Whether variables are read, for their digests and statistics.
    """
    modules, aliases = tree(model)
    dtype = main_dtype(model)
    flax = sys.modules.get("flax")
    return {
        "framework": {
            "name": "jax",
            "version": jax.__version__,
            "settings": {
                **({} if flax is None else {"flax": flax.__version__}),
                "jit": model.jit,
                "default_matmul_precision": jax.config.jax_default_matmul_precision,
                "enable_x64": jax.config.jax_enable_x64,
            },
        },
        "model": {"class": model_class(model), "file": redact(_file(model)), "kind": model.kind},
        "dtype": dtype,
        "compute_dtype": dtype,
        "device": _device(),
        "modules": describe_modules(
            model, {path: type(module) for path, module in modules.items()}, digests=digests
        ),
        "aliases": {module_site(alias): module_site(name) for alias, name in aliases.items()},
    }


def model_class(model: JaxModel) -> str:
    """The class of the model's module, or its function."""
    return class_name(model.function if model.kind == "function" else type(model.function))


def describe_modules(model: JaxModel, classes: Mapping[str, type], *, digests: bool) -> list[dict[str, Any]]:
    """An entry for each module: class, variables, settings.

    Args:
        model: The model.
        classes: The classes of the modules that are known, by path.
        digests: Whether variables are read.
    """
    modules = tree(model)[0]
    owned = owned_variables(model)
    return [
        _describe_module(model, path, classes.get(path), modules.get(path), owned.get(path, {}), digests)
        for path in dict.fromkeys((*modules, *owned, *classes))
    ]


def _describe_module(
    model: JaxModel,
    path: str,
    cls: type | None,
    module: Any,
    variables: Mapping[str, Any],
    digests: bool,
) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {"param": {}, "buffer": {}}
    for slot, (shape, dtype) in shapes_and_dtypes(variables).items():
        kind, _, name = slot.partition(".")
        entry: dict[str, Any] = {"shape": shape, "dtype": dtype}
        kinds[kind][unescape(name)] = entry
        if digests:
            entry |= summarize_weight(*stored(variables[slot]))
    name = model_class(model) if not path else "" if cls is None else class_name(cls)
    settings = {} if module is None or model.kind == "function" else attribute_settings(vars(module))
    is_training = settings.get("deterministic") is False or settings.get("use_running_average") is False
    entry = {"path": path, "class": name, "parameters": kinds["param"], "training": is_training}
    further = {"buffers": kinds["buffer"], "settings": settings}
    return {**entry, **{key: value for key, value in further.items() if value}}


def main_dtype(model: JaxModel) -> str | None:
    """The floating dtype of most of the model's variables."""
    return most_common_dtype(
        (dtype, math.prod(shape))
        for variables in owned_variables(model).values()
        for shape, dtype in shapes_and_dtypes(variables).values()
        if jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    )


def _file(model: JaxModel) -> str:
    return file_of(model.function if model.kind == "function" else type(model.function)) or ""


def _device() -> str:
    device = jax.devices()[0]
    return "cpu" if device.platform == "cpu" else f"{device.platform} ({device.device_kind})"
