"""Runs of a MAX model: its instrumented graph is executed, and the trace of each run is recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tensorcap.adapters.control_run import compare_with_control, describe_control
from tensorcap.adapters.max.engine import BufferType, init_model
from tensorcap.adapters.max.foreign_program import ForeignProgram
from tensorcap.adapters.max.graph_builder import build
from tensorcap.adapters.max.graph_plan import CompiledGraph, GraphSource, Instrumentation
from tensorcap.adapters.max.injector import feed
from tensorcap.adapters.max.model_inputs import ModelInputs
from tensorcap.adapters.max.parameters import load_weights
from tensorcap.adapters.max.playback import capture_prints, play_back, symbolic_shapes
from tensorcap.adapters.max.tensors import stored
from tensorcap.recording import CaptureOptions, Recorder, Substitution


def run(model: GraphSource, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run a model, through the capture that is under way if there is one."""
    tapped_run = model.compiled.tapped_run
    if tapped_run is None:
        return GraphExecutor(model).run_control(ModelInputs(model, args, kwargs))
    return tapped_run(args, kwargs)


class GraphExecutor:
    """Executes graphs of a model with the weights that it has now."""

    def __init__(self, model: GraphSource) -> None:
        self._model = model
        self._weights = load_weights(model)
        self._ready: list[tuple[CompiledGraph, Any]] = []

    def compiled(self, model_inputs: ModelInputs, instrumentation: Instrumentation | None) -> CompiledGraph:
        """A graph for these inputs with at least this instrumentation; it is built if there is none."""
        graphs = self._model.compiled.graphs
        for known in graphs:
            if known.instrumentation is None or instrumentation is None:
                is_enough = known.instrumentation is instrumentation
            else:
                is_enough = known.instrumentation.covers(instrumentation)
            if is_enough and known.signature == model_inputs.signature:
                return known
        graphs.append(build(self._model, model_inputs, instrumentation))
        return graphs[-1]

    def execute(self, graph: CompiledGraph, buffers: Sequence[Any]) -> list[Any]:
        """Run a graph, and return all its outputs."""
        ready = next((model for known, model in self._ready if known is graph), None)
        if ready is None:
            ready = init_model(graph.session, graph.artifact, self._weights)
            self._ready.append((graph, ready))
        return list(ready.execute(*buffers))

    def run_control(self, model_inputs: ModelInputs) -> list[Any]:
        """Run the model without any taps, and return its outputs."""
        buffers = with_fresh_state(model_inputs.buffers, model_inputs.types)
        return self.execute(self.compiled(model_inputs, None), buffers)


class ModelTap:
    """A capture of a model that is under way.

    Attributes:
        unused: Names of modules with weights of which none is in the graph that ran last; None before.
    """

    def __init__(
        self,
        model: GraphSource,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None,
        program: ForeignProgram,
    ) -> None:
        self.unused: frozenset[str] | None = None
        self._model = model
        self._names = names
        self._recorder = recorder
        self._plan = plan
        self._substitution = substitution
        self._program = program
        self._executor: GraphExecutor | None = None
        self._is_controlled = not model.control or substitution is not None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Run the model, record its calls, and return its outputs."""
        with self._program.paused():
            return self._run(args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Run the model under capture.

        1. Take or build the instrumented graph for these inputs.
        2. Fill its switches with what a substitution has.
        3. In the first run, run a graph without taps too, as a control.
        4. Execute the graph and record its trace.
        5. Note what the taps changed against the control.
        """
        recorder = self._recorder
        executor = self._executor = self._executor or GraphExecutor(self._model)
        substitution = self._substitution if recorder.is_recording else None
        model_inputs = ModelInputs(self._model, args, kwargs)
        if self._plan.injectable or substitution:
            instrumentation = Instrumentation.of_rerun(self._names, prints=self._plan.inner)
        else:
            instrumentation = Instrumentation(
                frozenset(self._names), self._plan.inputs, prints=self._plan.inner
            )
        with recorder.stage("MAX compiles the model"):
            graph = executor.compiled(model_inputs, instrumentation)
        self.unused = graph.unused
        buffers = feed(graph, model_inputs, substitution, recorder.last_step + 1)
        if not self._model.keeps_state:
            buffers = with_fresh_state(buffers, model_inputs.types)
        with recorder.stage("MAX compiles the model without taps, as a control"):
            control = None if self._is_controlled else executor.run_control(model_inputs)
        # a graph writes to the inputs of a buffer type, and its trace holds none of those
        own = len(graph.own_slots)
        with capture_prints(graph.session, graph.events) as printed:
            outputs = executor.execute(graph, buffers)
            play_back(
                graph.events,
                model_inputs.buffers,
                buffers,
                outputs[own:],
                recorder,
                self._names,
                with_inputs=self._plan.inputs,
                printed=printed,
            )
        recorder.facts["graph"] = {
            "compile_seconds": round(graph.seconds, 3),
            "outputs": own,
            "taps": graph.taps,
            "switches": len(graph.switches),
        }
        shapes = dict(symbolic_shapes(graph.events))
        if shapes:
            recorder.facts["symbolic_shapes"] = shapes
        if control is not None:
            self._is_controlled = True
            entries = [
                compare_with_control(slot, without, tapped, stored)
                for slot, without, tapped in zip(graph.own_slots, control, outputs[:own], strict=True)
            ]
            recorder.facts["control"] = entries
            recorder.facts.setdefault("notes", []).append(describe_control(entries))
        return outputs[:own]


def with_fresh_state(buffers: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """The inputs of a graph with copies of those that a run writes to; further ones stay as they are."""
    copies = [b.copy() if isinstance(t, BufferType) else b for b, t in zip(buffers, types, strict=False)]
    return [*copies, *buffers[len(copies) :]]


def compile_ahead(
    model: GraphSource, names: Collection[str], run_workload: Callable[[], object]
) -> list[CompiledGraph]:
    """Compile the graphs that captures, injections and bisections of a workload need.

    Args:
        model: The model.
        names: All its modules.
        run_workload: Runs the workload, which calls the model; it gets what the graph without taps returns,
            or that with taps, if captures of the model have no control run.

    Returns:
        The graphs, in the order in which they were needed.
    """
    executor = GraphExecutor(model)

    def compile_for(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        model_inputs = ModelInputs(model, args, kwargs)
        graph = executor.compiled(model_inputs, Instrumentation.of_rerun(names))
        if model.control:
            return executor.run_control(model_inputs)
        buffers = with_fresh_state(feed(graph, model_inputs, None, 0), model_inputs.types)
        return executor.execute(graph, buffers)[: len(graph.own_slots)]

    model.compiled.tapped_run = compile_for
    try:
        run_workload()
    finally:
        model.compiled.tapped_run = None
    return model.compiled.graphs
