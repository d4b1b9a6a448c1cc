"""Initialisers as parameters of modules: their records, and their digests in a description."""

from __future__ import annotations

from typing import Any

from tensorcap.adapters.array_records import record_bits
from tensorcap.adapters.onnx.tap import LoadedModel
from tensorcap.recording import Call, Recorder, summarize_weight
from tensorcap_formats.keys import escape


def record_parameters(loaded: LoadedModel, recorder: Recorder) -> None:
    """Record each module's initialisers as the file has them, at the slots `param.NAME`."""
    for path, names in loaded.scopes.parameters.items():
        call = Call(recorder.points[path], 0, 0, is_of_run=True)
        for own, name in names.items():
            slot = f"param.{escape(own)}"
            if recorder.wants(call, slot):
                record_bits(recorder, call, slot, *loaded.graph.read(name))


def describe_parameters(loaded: LoadedModel, path: str, *, digests: bool) -> dict[str, dict[str, Any]]:
    """Shape and dtype of a module's initialisers by name, and with `digests` their digests and statistics."""
    entries = {}
    for own, name in loaded.scopes.parameters.get(path, {}).items():
        tensor = loaded.graph.weights[name]
        entries[own] = {"shape": list(tensor.shape), "dtype": tensor.dtype.name}
        if digests:
            entries[own] |= summarize_weight(*loaded.graph.read(name))
    return entries
