"""The inner model of an application of NxD Inference on a CPU; nothing of Neuron is imported."""

from __future__ import annotations

from typing import Any

from torch import nn

from tensorcap.workload import class_name
from tensorcap_formats.errors import UsageError


def is_application(model: object) -> bool:
    """Whether an object is an application of NxDI: it has wrappers of models, and a way onto a CPU."""
    return callable(getattr(model, "to_cpu", None)) and isinstance(getattr(model, "models", None), list)


def inner_model(application: Any) -> nn.Module:
    """The module that all wrappers of an application call on a CPU, which is made if there is none yet.

    Raises:
        UsageError: They call none, or several.
    """
    inner = _inner(application)
    if not inner:
        application.to_cpu()
        inner = _inner(application)
    if len(inner) != 1:
        found = "none" if not inner else f"{len(inner)}: {', '.join(class_name(type(m)) for m in inner)}"
        raise UsageError(
            f"{class_name(application)}: its wrappers call one module on a CPU, found {found}",
            hint="Return a tensorcap.Workload of the inner module itself.",
        )
    return inner[0]


def _inner(application: Any) -> list[nn.Module]:
    models = [getattr(wrapper, "model", None) for wrapper in application.models]
    return list({id(model): model for model in models if isinstance(model, nn.Module)}.values())
