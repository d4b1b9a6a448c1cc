"""Initialisers as parameters of modules: their records, and their digests in a description.

Weights in few bits are recorded as floats, with their steps and zero points beside them.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tensorcap.adapters.array_records import record_bits
from tensorcap.adapters.onnx.quantisation import (
    QuantisedWeight,
    input_rounders,
    read_floats,
    result_grid,
    rounded_result,
    rounds_inputs,
)
from tensorcap.adapters.onnx.scopes import Share
from tensorcap.adapters.onnx.tap import LoadedModel
from tensorcap.recording import Call, Recorder, summarize_weight
from tensorcap_formats.dtypes import Array, DType, bits_of, dtype_of
from tensorcap_formats.keys import escape


def record_parameters(loaded: LoadedModel, recorder: Recorder) -> None:
    """Record each module's initialisers as the file has them, at the slots `param.NAME`."""
    for path, names in loaded.scopes.parameters.items():
        call = Call(recorder.points[path], 0, 0, is_of_run=True)
        for own, name in names.items():
            slot = f"param.{escape(own)}"
            if recorder.wants(call, slot):
                record_bits(recorder, call, slot, *loaded.graph.read(name))
    for path, shares in loaded.scopes.shares.items():
        call = Call(recorder.points[path], 0, 0, is_of_run=True)
        for own, share in shares.items():
            slot = f"param.{escape(own)}"
            if recorder.wants(call, slot):
                record_bits(recorder, call, slot, *_read_share(loaded, share))
    for path, weights in loaded.scopes.quantised.items():
        call = Call(recorder.points[path], 0, 0, is_of_run=True)
        for own, weight in weights.items():
            _record_weight(loaded, recorder, call, f"param.{escape(own)}", weight)


def _read_share(loaded: LoadedModel, share: Share) -> tuple[Array, DType]:
    """The stored elements of a part of an initialiser, and its dtype."""
    bits, dtype = loaded.graph.read(share.name)
    return np.ascontiguousarray(np.split(bits, share.count, axis=-1)[share.number]), dtype


def _record_weight(
    loaded: LoadedModel, recorder: Recorder, call: Call, slot: str, weight: QuantisedWeight
) -> None:
    """Record a weight in few bits as floats, and its steps and zero points."""
    if not recorder.wants(call, slot):
        return
    floats = read_floats(loaded.graph, weight)
    for end, side in (("", floats.values), ("_step", floats.steps), ("_zero", floats.zeros)):
        if side is not None and recorder.wants(call, slot + end):
            record_bits(recorder, call, slot + end, bits_of(side), dtype_of(side))


def module_settings(loaded: LoadedModel, path: str) -> dict[str, Any]:
    """How a module's weights are kept and its inputs and results rounded (`specs/capture.md`, CAP-330)."""
    weights = loaded.scopes.quantised.get(path, {})
    nodes = [node for call, nodes in loaded.scopes.nodes_of.items() if call.path == path for node in nodes]
    settings: dict[str, Any] = {}
    if weights:
        settings = {
            "dequantised": list(weights),
            "numbers": {name: weight.number for name, weight in weights.items()},
            "one_scale": all(loaded.graph.elements(weight.steps).size == 1 for weight in weights.values()),
        }
    within = {node.index for node in nodes}
    if not nodes:  # a fused node of another module computes with its weights
        takers = [loaded.graph.takers.get(weight.numbers, ()) for weight in weights.values()]
        nodes, within = list(itertools.chain(*takers)), {node.index for node in loaded.graph.nodes}
    for node in nodes if weights else ():
        settings |= rounds_inputs(loaded.graph, node, within)
    if weights:
        return settings | rounded_result(loaded.grids, nodes, input_rounders(loaded.graph))
    results = [list(b.outputs.values()) for call, b in loaded.boundaries.items() if call.path == path]
    return settings | result_grid(loaded.graph, loaded.grids, [names[0] for names in results if names])


def describe_parameters(loaded: LoadedModel, path: str, *, digests: bool) -> dict[str, dict[str, Any]]:
    """Shape and dtype of a module's initialisers by name, and with `digests` their digests and statistics."""
    entries = {}
    for own, name in loaded.scopes.parameters.get(path, {}).items():
        tensor = loaded.graph.weights[name]
        entries[own] = {"shape": list(tensor.shape), "dtype": tensor.dtype.name}
        if digests:
            entries[own] |= summarize_weight(*loaded.graph.read(name))
    for own, share in loaded.scopes.shares.get(path, {}).items():
        *rest, last = loaded.graph.weights[share.name].shape
        shape = [*rest, last // share.count]
        entries[own] = {"shape": shape, "dtype": loaded.graph.weights[share.name].dtype.name}
        if digests:
            entries[own] |= summarize_weight(*_read_share(loaded, share))
    for own, weight in loaded.scopes.quantised.get(path, {}).items():
        *rest, last = loaded.graph.shape_of(weight.numbers)
        entries[own] = {"shape": [*rest, last // weight.part[1]], "dtype": weight.number}
        if digests and weight.numbers in loaded.graph.weights and weight.part[1] == 1:
            entries[own] |= summarize_weight(*loaded.graph.read(weight.numbers))
    return entries
