"""Runs of a MAX model: the graph that tells of itself is executed, and what happened in it is recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tensorcap.adapters.max.engine import BufferType, NoBitsError, bits, initialised
from tensorcap.adapters.max.foreign_program import Foreign
from tensorcap.adapters.max.graph_builder import build
from tensorcap.adapters.max.graph_feed import feed
from tensorcap.adapters.max.graph_plan import Built, GraphSource, Told
from tensorcap.adapters.max.inputs import Given
from tensorcap.adapters.max.playback import play, symbolic_shapes
from tensorcap.adapters.max.printed_tensors import printing
from tensorcap.recording.recorder import Recorder
from tensorcap.recording.scope import Plan
from tensorcap.recording.substitution import Substitution
from tensorcap.workload.sources import class_name
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import UsageError


def run(model: GraphSource, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a model, through the capture that is under way if there is one."""
    tapped = model.compiled.tapped
    if tapped is None:
        return Executions(model).control(Given(model, args, kwargs))
    return tapped(args, kwargs)


class Executions:
    """Runs of a model with the weights that it has now.

    Attributes:
        weights: By their full names.
    """

    def __init__(self, model: GraphSource) -> None:
        self._model = model
        self.weights = weights_of(model)
        self._ready: list[tuple[Built, Any]] = []

    def built(self, given: Given, told: Told | None) -> Built:
        """A graph for these arguments that tells so much, made if there is none."""
        graphs = self._model.compiled.graphs
        for known in graphs:
            is_enough = known.told is told if not (known.told and told) else known.told.covers(told)
            if is_enough and known.signature == given.signature:
                return known
        graphs.append(build(self._model, given, told))
        return graphs[-1]

    def execute(self, built: Built, buffers: Sequence[Any]) -> list[Any]:
        """Run a graph."""
        ready = next((model for known, model in self._ready if known is built), None)
        if ready is None:
            ready = initialised(built.session, built.artifact, self.weights)
            self._ready.append((built, ready))
        return list(ready.execute(*buffers))

    def control(self, given: Given) -> list[Any]:
        """What the model gives without any taps."""
        buffers = [
            b.copy() if isinstance(t, BufferType) else b  # which a run writes to
            for b, t in zip(given.buffers, given.types, strict=True)
        ]
        return self.execute(self.built(given, None), buffers)


class Tapped:
    """A capture of a model that is under way.

    Attributes:
        unused: Names of modules with weights of which none is in the graph that ran last; None before.
    """

    def __init__(
        self,
        model: GraphSource,
        names: Collection[str],
        recorder: Recorder,
        plan: Plan,
        substitution: Substitution | None,
        foreign: Foreign,
    ) -> None:
        self.unused: frozenset[str] | None = None
        self._model = model
        self._names = names
        self._recorder = recorder
        self._plan = plan
        self._substitution = substitution
        self._foreign = foreign
        self._executions: Executions | None = None
        self._is_controlled = not model.control or substitution is not None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Run the model, record what happens in it, and return what it gives."""
        with self._foreign.paused():
            return self._run(args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        recorder = self._recorder
        executions = self._executions = self._executions or Executions(self._model)
        substitution = self._substitution if recorder.is_recording else None
        given = Given(self._model, args, kwargs)
        room = frozenset({*self._plan.injectable, *(substitution.kinds if substitution else ())})
        inputs = self._plan.inputs or "input" in room
        told = Told(frozenset(self._names), inputs, room, self._plan.inner)
        with recorder.waiting.on("MAX compiles the model"):
            built = executions.built(given, told)
        self.unused = built.unused
        buffers = feed(built, given, substitution, recorder.last_step + 1)
        with recorder.waiting.on("MAX compiles the model without taps, as a control"):
            alone = None if self._is_controlled else executions.control(given)
        # a graph writes to what it is given of a buffer type, and its notes hold none of those
        own = len(built.own_slots)
        with printing(built.session, built.events) as printed:
            found = executions.execute(built, buffers)
            play(
                built.events,
                given.buffers,
                buffers,
                found[own:],
                recorder,
                self._names,
                inputs=self._plan.inputs,
                printed=printed,
            )
        recorder.facts["graph"] = {
            "compile_seconds": round(built.seconds, 3),
            "outputs": own,
            "taps": built.taps,
            "switches": len(built.switches),
        }
        shapes = dict(symbolic_shapes(built.events))
        if shapes:
            recorder.facts["symbolic_shapes"] = shapes
        if alone is not None:
            self._is_controlled = True
            control = [of_control(*two) for two in zip(built.own_slots, alone, found[:own], strict=True)]
            recorder.facts["control"] = control
            recorder.facts.setdefault("notes", []).append(control_text(control))
        return found[:own]


def weights_of(model: GraphSource) -> Mapping[str, Any]:
    """A model's weights by their full names.

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


def of_control(slot: str, control: Any, tapped: Any) -> dict[str, Any]:
    """How far an output of the tapped graph is from that of the graph without taps."""
    told: dict[str, Any] = {"slot": slot}
    try:
        (alone, dtype), (own, _) = bits(control), bits(tapped)
    except NoBitsError as error:
        return {**told, "reason": str(error)}
    if alone.tobytes() == own.tobytes():
        return {**told, "identical": True, "max_abs": 0.0}
    one, other = (decode(stored, dtype).astype(np.float64) for stored in (alone, own))
    known = np.isfinite(one) & np.isfinite(other)
    told["identical"] = False
    told["max_abs"] = float(np.abs(one - other)[known].max(initial=0.0))
    told["largest"] = float(np.abs(one)[known].max(initial=0.0))
    unlike = int((~known & ~((one == other) | (np.isnan(one) & np.isnan(other)))).sum())
    if unlike:
        told["nonfinite_mismatches"] = unlike
    return told


def control_text(told: Sequence[Mapping[str, Any]]) -> str:
    """What a run without taps says of the taps, as a sentence."""
    if all(entry.get("identical") for entry in told):
        return "a run without taps gave the same bits"
    worst = max((e for e in told if "max_abs" in e), key=lambda e: e["max_abs"], default=None)
    if worst is None:
        return "a run without taps could not be compared with this one"
    text = (
        f"taps end the fusion of kernels: a run without them gave {worst['slot']} that differs by up to "
        f"{worst['max_abs']:.3g}, of values up to {worst.get('largest', 0.0):.3g}"
    )
    unlike = sum(int(entry.get("nonfinite_mismatches", 0)) for entry in told)
    return f"{text}; and {unlike} of its elements are not finite in one of both" if unlike else text
