"""Parameters and other state of a JAX model: which module owns them, and their records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from tensorcap.adapters.array_records import record_bits
from tensorcap.adapters.jax.model import JaxModel
from tensorcap.adapters.jax.modules import tree
from tensorcap.adapters.jax.tensors import ARRAYS, array_in, stored
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.recording import Call, Recorder
from tensorcap_formats.keys import escape

Owned = dict[str, dict[str, Any]]


def owned_variables(model: JaxModel) -> Owned:
    """The arrays of each module by slot, `param.kernel` or `buffer.mean`, by the module's path.

    Of NNX, a `Param` is a parameter and every other variable a buffer, states of random streams left out. Of
    Linen, the collection `params` has the parameters. Of a function, all leaves are parameters.
    """
    owned: Owned = {"": {}}
    if model.kind == "nnx":
        for path, module in tree(model)[0].items():
            owned[path] = dict(_of_module(module))
        return owned
    collections = model.variables if model.kind == "linen" else {"params": model.variables}
    for collection, variables in collections.items():
        kind = "param" if collection == "params" else "buffer"
        for path, value in _leaves(variables):
            owner, _, name = path.rpartition(".")
            for above in _above(owner):
                owned.setdefault(above, {})
            owned[owner][f"{kind}.{escape(name)}"] = value
    return owned


def _of_module(module: Any) -> Iterator[tuple[str, Any]]:
    from flax import nnx

    for name, value in vars(module).items():
        if isinstance(value, nnx.Variable) and not isinstance(value, nnx.RngState):
            yield f"{'param' if isinstance(value, nnx.Param) else 'buffer'}.{escape(name)}", value


def _leaves(variables: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a structure, by path; boxes of Linen are opened."""
    if variables is None:
        return
    for path, value in jax.tree_util.tree_leaves_with_path(variables):
        names = [_name(part) for part in path]
        while names and names[-1] == "value" and not isinstance(path[-1], jax.tree_util.DictKey):
            names.pop()  # of a box around an array
            path = path[:-1]
        if isinstance(value, ARRAYS):
            yield ".".join(names), value


def _name(part: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def _above(path: str) -> list[str]:
    """A path and those that it lies in, the outermost first."""
    names = path.split(".") if path else []
    return [".".join(names[: i + 1]) for i in range(len(names))] or [""]


def record_variables(model: JaxModel, recorder: Recorder) -> None:
    """Record the variables of each module, as they are when the capture begins."""
    for path, variables in owned_variables(model).items():
        call = Call(recorder.points[path], 0, 0, is_of_run=True)
        for slot, value in variables.items():
            if not recorder.wants(call, slot):
                continue
            try:
                record_bits(recorder, call, slot, *stored(value))
            except NotCapturableError as error:
                recorder.lose(call.point, slot, str(error), call=call)


def shapes_and_dtypes(variables: Mapping[str, Any]) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of each of a module's variables, by slot."""
    return {
        slot: (list(value.shape), str(value.dtype))
        for slot, value in variables.items()
        if _is_storable(value)
    }


def _is_storable(value: Any) -> bool:
    try:
        array_in(value)
    except NotCapturableError:
        return False
    return True
