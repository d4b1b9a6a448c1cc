"""Runs of a JAX model: compiled or not, with and without a capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tensorcap.adapters.control_run import compare_with_control, describe_control
from tensorcap.adapters.jax.call_tracer import CallTracer
from tensorcap.adapters.jax.model import JaxModel
from tensorcap.adapters.jax.modules import model_argument_names
from tensorcap.adapters.jax.tensors import ARRAYS, kinds, stored, to_array
from tensorcap.recording import Recorder, leaf_slot, walk


def run(model: JaxModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a model, through the capture that is under way if there is one."""
    if model.tapped_runs is not None:
        return model.tapped_runs.run(args, kwargs)
    return _run_plain(model, args, kwargs)


class TappedRuns:
    """The runs of a model under capture.

    Attributes:
        tracer: Reports the calls of its modules.
    """

    def __init__(
        self, model: JaxModel, tracer: CallTracer, recorder: Recorder, *, is_controlled: bool
    ) -> None:
        self.tracer = tracer
        self._model = model
        self._recorder = recorder
        self._awaits_control = is_controlled

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model, and in the first run once more without taps, in the same state."""
        model = self._model
        before = _state_of(model)
        result = _run_plain(model, args, kwargs)
        jax.block_until_ready([leaf.value for leaf in walk(result, kinds()) if leaf.is_tensor])
        jax.effects_barrier()
        if self._awaits_control:
            self._awaits_control = False
            with self.tracer.off(), self._recorder.stage("JAX runs the model without taps, as a control"):
                control, _ = _run_in_state(model, before, args, kwargs)
            self._note_control(control, result)
        return result

    def _note_control(self, control: Any, tapped: Any) -> None:
        without = {leaf.name: leaf.value for leaf in walk(control, kinds()) if leaf.is_tensor}
        entries = [
            compare_with_control(leaf_slot("output", leaf.name), without[leaf.name], leaf.value, stored)
            for leaf in walk(tapped, kinds())
            if leaf.is_tensor and leaf.name in without
        ]
        self._recorder.facts["control"] = entries
        self._recorder.facts.setdefault("notes", []).append(describe_control(entries))


def _run_plain(model: JaxModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a model; a module of NNX is then in the state that the run left it in."""
    result, state = _run_in_state(model, _state_of(model), args, kwargs)
    if model.kind == "nnx":
        from flax import nnx

        nnx.update(model.function, state)
    return result


def _state_of(model: JaxModel) -> Any:
    """What a run takes beside its arguments, and may change."""
    if model.kind != "nnx":
        return model.variables
    from flax import nnx

    return nnx.state(model.function)


def _run_in_state(
    model: JaxModel, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Run a model in a state, compiled unless it is not to be; return its result, and the state after it.

    Arrays among the arguments are inputs of what is compiled, all other leaves constants of it.
    """
    leaves, structure = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)))
    leaves = [to_array(leaf) for leaf in leaves]
    graph = _graph_of(model)
    if not model.jit:
        return _call(model, graph, state, *jax.tree_util.tree_unflatten(structure, leaves))
    is_array = tuple(isinstance(leaf, ARRAYS) for leaf in leaves)
    constants = [None if own else leaf for leaf, own in zip(leaves, is_array, strict=True)]

    def call(state: Any, arrays: Sequence[Any]) -> tuple[Any, Any]:
        left = iter(arrays)
        filled = [next(left) if own else leaf for leaf, own in zip(constants, is_array, strict=True)]
        return _call(model, graph, state, *jax.tree_util.tree_unflatten(structure, filled))

    arrays = [leaf for leaf, own in zip(leaves, is_array, strict=True) if own]
    try:
        # equal ones may differ, as 0.0 and -0.0 do
        parts = [structure, graph, *constants]
        key = is_array, *((type(part), part, repr(part)) for part in parts)
        compiled = model.compiled.setdefault(key, jax.jit(call))
    except TypeError:  # of constants that have no hash
        compiled = jax.jit(call)
    result, after = compiled(state, arrays)
    return result, after


def _graph_of(model: JaxModel) -> Any:
    """What a module of NNX is but for its state."""
    if model.kind != "nnx":
        return None
    from flax import nnx

    return nnx.graphdef(model.function)


def _call(
    model: JaxModel, graph: Any, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Call a model in a state; return its result, and the state after it."""
    if model.kind == "nnx":
        from flax import nnx

        module = nnx.merge(graph, state)
        return module(*args, **kwargs), nnx.state(module)
    if model.kind == "linen":
        return model.function.apply(state, *args, **kwargs), state
    own = () if model.variables is None else (state,)

    def proceed(*args: Any, **kwargs: Any) -> Any:
        return model.function(*own, *args, **kwargs)

    if model.tapped_runs is None or not model.tapped_runs.tracer.is_on:
        return proceed(*args, **kwargs), state
    tracer = model.tapped_runs.tracer
    return tracer.call("", model.function, model_argument_names(model), args, kwargs, proceed), state
