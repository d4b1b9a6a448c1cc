"""The modules of a max.nn model by name, their weights, and how they were before a graph was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from tensorcap.adapters.max.engine import DeviceRef, Module

_VALUE: Final = "_mlir_value"  # of a weight: its value in a graph


def tree(model: Module) -> tuple[dict[str, Module], dict[str, str]]:
    """All modules by their first name, and the further names of modules that have several.

    Names are those that torch would give: those of weights without the weight (`named_modules`). A module
    whose name MAX leaves out of them (an unfused stack of projections) has its attribute in its own name,
    not in those of what it holds.
    """
    modules: dict[str, Module] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, module in _names(model, "", "", ()):
        if id(module) in first:
            if name != first[id(module)]:
                aliases[name] = first[id(module)]
        else:
            first[id(module)] = name
            modules[name] = module
    return modules, aliases


def _names(module: Module, name: str, prefix: str, above: tuple[Module, ...]) -> Iterator[tuple[str, Module]]:
    yield name, module
    above = (*above, module)
    for child_name, child in module.sublayers.items():
        if any(child is parent for parent in above):
            continue
        own = f"{prefix}{child_name}"
        is_left_out = getattr(child, "_omit_module_attr_name", False)
        yield from _names(child, own, prefix if is_left_out else f"{own}.", above)


def own_weights(module: Module) -> dict[str, Any]:
    """A module's own weights by their attributes."""
    shared = getattr(module, "_shared_weights", {})
    return {name: weight for name, weight in module.layer_weights.items() if name not in shared}


def devices_of(modules: Mapping[str, Module], types: Iterable[Any] = ()) -> list[DeviceRef]:
    """The devices that weights and inputs lie on, and the CPU, which comes first."""
    used = [weight.device for module in modules.values() for weight in own_weights(module).values()]
    return list(dict.fromkeys([DeviceRef.CPU(), *used, *(each.device for each in types)]))


def is_in_graph(weight: Any) -> bool:
    """Whether the graph that is being made of a module has used a weight."""
    return _VALUE in vars(weight)


@contextmanager
def as_before(modules: Mapping[str, Module]) -> Iterator[None]:
    """Undo what making a graph does to modules: values of it that they and their weights keep.

    A weight keeps its value in the first graph that it was traced into, and so do tables such as those of
    rotary embeddings; a second graph of the same module would refer to the first.
    """
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules.values():
        for thing in (module, *module.layer_weights.values()):
            held.append((vars(thing), dict(vars(thing))))
    for attributes, _ in held:
        attributes.pop(_VALUE, None)  # of a graph that somebody made before
    try:
        yield
    finally:
        for attributes, before in held:
            attributes.clear()
            attributes.update(before)
