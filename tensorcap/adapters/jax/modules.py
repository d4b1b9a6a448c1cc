"""The modules of a JAX model, and names of their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from tensorcap.adapters.jax.model import JaxModel
from tensorcap.adapters.protocol import first_names


def tree(model: JaxModel) -> tuple[dict[str, Any], dict[str, str]]:
    """All modules of NNX by their first name, and the further names of modules that have several.

    Names are those that torch would give: attributes, and numbers or keys in lists and mappings. Of another
    model there is the model itself alone.
    """
    if model.kind != "nnx":
        return {"": model.function}, {}
    return first_names(_names(model.function, "", ()))


def _names(module: Any, name: str, above: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    from flax import nnx

    yield name, module
    above = (*above, module)
    for own, child in _children(module):
        if not isinstance(child, nnx.Module) or any(child is parent for parent in above):
            continue
        yield from _names(child, f"{name}.{own}" if name else own, above)


def _children(module: Any) -> list[tuple[str, Any]]:
    """What a module holds, by name, in the order in which it was given it."""
    from flax import nnx

    if isinstance(module, nnx.List):
        return [(str(i), item) for i, item in enumerate(module)]
    return [(name, value) for name, value in vars(module).items() if not name.startswith("_pytree__")]


def is_container(module: Any) -> bool:
    """Whether a module of NNX is a list or a mapping, which is not called."""
    from flax import nnx

    return type(module) in (nnx.List, nnx.Dict)


@functools.cache
def argument_names(function: Any) -> tuple[str, ...]:
    """Names of the positional parameters of a function; none if they cannot be found out."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional)


def model_argument_names(model: JaxModel) -> tuple[str, ...]:
    """Names of the positional arguments of a model."""
    if model.kind == "function":
        return argument_names(model.function)[model.variables is not None :]
    return argument_names(type(model.function).__call__)[1:]
