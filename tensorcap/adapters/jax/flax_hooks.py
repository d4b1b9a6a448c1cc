"""Hooks on the calls of Flax modules, for a block."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from tensorcap.adapters.jax.call_tracer import CallTracer
from tensorcap.adapters.jax.model import JaxModel
from tensorcap.adapters.jax.modules import argument_names, is_container, tree
from tensorcap.workload import replace_attribute

_NUMBERS: Final = itertools.count(1)


@contextmanager
def hook_calls(model: JaxModel, tracer: CallTracer) -> Iterator[None]:
    """Report the calls of a model's modules until the block ends."""
    if model.kind == "nnx":
        with _nnx_calls(tree(model)[0], tracer):
            yield
    elif model.kind == "linen":
        with _linen_calls(model, tracer):
            yield
    else:
        yield


@contextmanager
def _nnx_calls(modules: Mapping[str, Any], tracer: CallTracer) -> Iterator[None]:
    """Wrap the calls of NNX modules.

    Transformations of JAX and NNX make copies of modules, which have the plain attributes of the originals.
    So each module has its path as one, until the block ends.
    """
    attribute = f"_tensorcap_path_{next(_NUMBERS)}"
    owners = {_owner(type(module)) for module in modules.values() if not is_container(module)}
    try:
        with ExitStack() as stack:
            for owner in filter(None, owners):
                stack.enter_context(
                    replace_attribute(
                        owner, "__call__", functools.partial(_wrapped, owner, attribute, tracer)
                    )
                )
            for path, module in modules.items():
                vars(module)[attribute] = path  # past the checks of NNX, which know of no such attribute
            yield
    finally:
        for module in modules.values():
            vars(module).pop(attribute, None)


def _owner(cls: type) -> type | None:
    """The class that defines what is called if a module of a class is."""
    return next((base for base in cls.__mro__ if "__call__" in vars(base)), None)


def _wrapped(
    owner: type, attribute: str, tracer: CallTracer, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = vars(self).get(attribute)
        if not tracer.is_on or path is None or _owner(type(self)) is not owner:  # a base class's part
            return original(self, *args, **kwargs)
        names = argument_names(original)[1:]
        return tracer.call(path, self, names, args, kwargs, functools.partial(original, self))

    return call


@contextmanager
def _linen_calls(model: JaxModel, tracer: CallTracer) -> Iterator[None]:
    """Intercept the calls of Linen modules, which Flax offers."""
    from flax import linen

    def intercept(proceed: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        is_root = not module.path and type(module) is type(model.function)
        if (
            context.method_name != "__call__"
            or not tracer.is_on
            or not (is_root or tracer.is_under_way)
            or tracer.is_part_of_last_call(module)
        ):
            return proceed(*args, **kwargs)
        names = argument_names(type(module).__call__)[1:]
        return tracer.call(".".join(module.path), module, names, args, kwargs, proceed)

    with linen.intercept_methods(intercept):
        yield
