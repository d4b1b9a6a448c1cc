"""The modules of a max.nn model: names, devices, arguments, and their state before a graph was made."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tensorcap.adapters.max.engine import DeviceRef, Module
from tensorcap.adapters.max.graph_plan import source_of
from tensorcap.adapters.max.parameters import GRAPH_VALUE, own_weights
from tensorcap.adapters.protocol import first_names
from tensorcap.workload import class_name
from tensorcap_formats.errors import UsageError


def tree(model: Module) -> tuple[dict[str, Module], dict[str, str]]:
    """All modules by their first name, and the further names of modules that have several.

    Names are those that torch would give: those of weights without the weight (`named_modules`). A module
    whose name MAX leaves out of them (an unfused stack of projections) has its attribute in its own name,
    not in those of what it holds.
    """
    return first_names(_names(model, "", "", ()))


def _names(module: Module, name: str, prefix: str, above: tuple[Module, ...]) -> Iterator[tuple[str, Module]]:
    yield name, module
    above = (*above, module)
    for child_name, child in module.sublayers.items():
        if any(child is parent for parent in above):
            continue
        own = f"{prefix}{child_name}"
        is_left_out = getattr(child, "_omit_module_attr_name", False)
        yield from _names(child, own, prefix if is_left_out else f"{own}.", above)


def devices_of(modules: Mapping[str, Module], types: Iterable[Any] = ()) -> list[DeviceRef]:
    """The devices that weights and inputs lie on; the CPU always, and first."""
    used = [weight.device for module in modules.values() for weight in own_weights(module).values()]
    return list(dict.fromkeys([DeviceRef.CPU(), *used, *(each.device for each in types)]))


def argument_names(cls: Any) -> tuple[str, ...]:
    """Names of the positional parameters of a layer's call; none if they cannot be found out."""
    try:
        parameters = list(inspect.signature(cls.__call__).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional)


@contextmanager
def restore_modules(modules: Mapping[str, Module]) -> Iterator[None]:
    """Put the attributes of modules and weights back when the block ends, in which a graph is made of them.

    A weight keeps its value in the first graph that it was traced into, and so do tables such as those of
    rotary embeddings; a second graph of the same module would refer to the first.
    """
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules.values():
        for owner in (module, *module.layer_weights.values()):
            saved.append((vars(owner), dict(vars(owner))))
    for attributes, _ in saved:
        attributes.pop(GRAPH_VALUE, None)  # of a graph that the program made before
    try:
        yield
    finally:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)


def module_of(model: Any) -> Module:
    """The module of a model.

    Raises:
        UsageError: It is no max.nn module.
    """
    module = source_of(model).module
    if not isinstance(module, Module):
        raise UsageError(f"a {class_name(module)} is no max.nn.Module, expected one")
    return module
