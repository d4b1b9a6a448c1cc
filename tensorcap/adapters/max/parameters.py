"""The weights of a MAX model: which module owns them, the values that it is run with, and their records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tensorcap.adapters.max.engine import Module
from tensorcap.adapters.max.graph_plan import GraphSource
from tensorcap.adapters.max.playback import record_array
from tensorcap.recording import Call, Recorder
from tensorcap.workload import class_name
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import escape

GRAPH_VALUE: Final = "_mlir_value"  # the attribute in which a weight keeps its value in a graph


def own_weights(module: Module) -> dict[str, Any]:
    """A module's own weights by their attributes."""
    shared = getattr(module, "_shared_weights", {})
    return {name: weight for name, weight in module.layer_weights.items() if name not in shared}


def is_in_graph(weight: Any) -> bool:
    """Whether the graph that is being made uses a weight."""
    return GRAPH_VALUE in vars(weight)


def load_weights(model: GraphSource) -> Mapping[str, Any]:
    """The weights that a model is run with, by full name.

    Raises:
        UsageError: One has no value.
    """
    if model.weights is not None:
        missing = sorted(model.module.raw_state_dict().keys() - model.weights.keys())
        reason = f"no weight {missing[0]!r} among the {len(model.weights)} given" if missing else ""
    else:
        try:
            weights: Mapping[str, Any] = model.module.state_dict(auto_initialize=False)
        except ValueError as error:
            reason = str(error).rstrip(".")
        else:
            return weights
    if reason:
        raise UsageError(
            f"{class_name(model.module)}: {reason}",
            hint="Load them with module.load_state_dict, or give them as MaxModel(module, weights=…).",
        )
    return dict(model.weights or {})


def record_parameters(model: GraphSource, modules: Mapping[str, Module], recorder: Recorder) -> None:
    """Record each module's own weights, as they are given to MAX, at the slots `param.NAME`."""
    names = {id(weight): name for name, weight in model.module.raw_state_dict().items()}
    values = load_weights(model)
    for name, module in modules.items():
        call = Call(recorder.points[name], 0, 0, is_of_run=True)
        for attribute, weight in own_weights(module).items():
            slot = f"param.{escape(attribute)}"
            try:
                record_array(recorder, call, slot, values[names[id(weight)]])
            except KeyError:
                recorder.lose(call.point, slot, "no value among the model's weights", call=call)
