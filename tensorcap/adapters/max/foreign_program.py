"""Capture of a foreign program that makes, compiles and runs graphs of a model, without an edit of it.

Each graph in which a module of the model is called gets taps behind its own outputs; the caller of the
compiled graph gets its own outputs alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.adapters.max.compilation import compile_reported
from tensorcap.adapters.max.engine import Graph, InferenceSession, Model, Module, is_subgraph
from tensorcap.adapters.max.hooks import trace_subgraphs, wrap_calls
from tensorcap.adapters.max.injector import InjectedWeights
from tensorcap.adapters.max.playback import capture_prints, play_back, symbolic_shapes
from tensorcap.adapters.max.trace import Tracer
from tensorcap.adapters.max.trace_events import Event
from tensorcap.recording import CaptureOptions, Recorder, Substitution, collect_probes
from tensorcap.wording import counted
from tensorcap.workload import replace_attribute
from tensorcap_formats.errors import CaptureError, TensorcapError

_REPLAYS: Final = (
    "capture",
    "replay",
    "debug_verify_replay",
)  # methods of Model that run a graph without its execute
_NO_CONTROL: Final = (
    "taps may end the fusion of kernels; no run without them was made to see what they change"
)


@dataclass(eq=False)
class _ProgramGraph:
    """A graph of the model that the program makes.

    Attributes:
        graph: The graph.
        tracer: Traces the calls in it.
        injected: The weights that stand in it for archived tensors.
        events: Its trace events, once it is complete.
        own: How many outputs are the program's.
        taps: How many outputs are ours.
        runs: How often it was run under capture.
    """

    graph: Graph
    tracer: Tracer
    injected: InjectedWeights | None
    events: Sequence[Event] = ()
    own: int = 0
    taps: int = 0
    runs: int = 0

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.graph.name)


class ForeignProgram:
    """Watches a program for graphs of a model.

    Attributes:
        is_paused: Whether graphs are ignored, since they are our own.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None,
    ) -> None:
        self.is_paused = False
        self._modules = modules
        self._by_id = {id(module): name for name, module in modules.items()}
        self._traced_names = {*names, ""}
        self._with_inputs = plan.inputs or substitution is not None
        self._names = names
        self._recorder = recorder
        self._plan = plan
        self._substitution = substitution
        self._open: list[_ProgramGraph] = []  # those that are being traced
        self._complete: list[_ProgramGraph] = []
        self._compiled: dict[int, tuple[Any, list[_ProgramGraph]]] = {}  # by id, which the artifact keeps
        self._ready: dict[int, tuple[Any, _ProgramGraph, InferenceSession]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Capture the graphs that are made, compiled and run in the block."""
        binds = "init_all" if hasattr(InferenceSession, "init_all") else "load"
        with ExitStack() as stack:
            stack.enter_context(wrap_calls(self._call, map(type, self._modules.values())))
            stack.enter_context(collect_probes(self))
            stack.enter_context(trace_subgraphs(self._tracer))
            stack.enter_context(replace_attribute(Graph, "output", self._output))
            if "compile_async" in vars(InferenceSession):
                stack.enter_context(replace_attribute(InferenceSession, "compile_async", self._compile))
                stack.enter_context(replace_attribute(InferenceSession, "compile", self._wait))
            stack.enter_context(replace_attribute(InferenceSession, binds, self._bind))
            stack.enter_context(replace_attribute(Model, "execute", self._execute))
            for name in _REPLAYS:
                if name in vars(Model):
                    stack.enter_context(replace_attribute(Model, name, functools.partial(self._refuse, name)))
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore graphs until the block ends."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @property
    def is_under_way(self) -> bool:
        """Whether a call of the model is being traced in this thread."""
        return any(traced.tracer.is_under_way for traced in self._open)

    def probed(self, name: str, value: object, *, is_alone: bool) -> None:
        """Note a value that the model's code names by a probe."""
        traced = None if self.is_paused else self._current()
        if traced is not None:
            traced.tracer.probed(name, value, is_alone=is_alone)

    def _tracer(self) -> Tracer | None:
        traced = None if self.is_paused else self._current(is_new=False)
        return None if traced is None else traced.tracer

    def _current(self, *, is_new: bool = True) -> _ProgramGraph | None:
        """The graph that is traced in this thread; None outside of any, and in a subgraph outside of a call.

        Args:
            is_new: Whether it may be a graph of which nothing was traced before.
        """
        for traced in self._open:
            if traced.tracer.is_under_way:
                return traced
        try:
            graph = Graph.current
        except LookupError:
            return None
        for traced in self._open:
            if traced.graph is graph:
                return traced
        if is_subgraph(graph) or not is_new:
            return None
        injected = None if self._substitution is None else InjectedWeights(self._substitution)
        tracer = Tracer(
            self._by_id, self._traced_names, injected, inputs=self._with_inputs, prints=self._plan.inner
        )
        traced = _ProgramGraph(graph, tracer, injected)
        tracer.begin(graph, graph.inputs)
        self._open.append(traced)
        return traced

    def _call(
        self, original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.is_paused or id(layer) not in self._by_id:
            return original(layer, *args, **kwargs)
        traced = self._current()
        if traced is None:
            return original(layer, *args, **kwargs)
        return traced.tracer.call(original, layer, args, kwargs)

    def _output(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def output(graph: Graph, *outputs: Any) -> None:
            traced = next((t for t in self._open if t.graph is graph), None)
            if traced is None or self.is_paused:
                return original(graph, *outputs)
            values = traced.tracer.values
            original(graph, *outputs, *values)
            self._open.remove(traced)
            self._complete.append(traced)
            traced.own, traced.taps = len(outputs), len(values)
            traced.events = tuple(traced.tracer.events)
            values.clear()
            return None

        return output

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note which graphs an artifact is of; its own names may be those of earlier equal graphs."""

        @functools.wraps(original)
        def compile_(session: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = original(session, model, *args, **kwargs)
            graphs = self._graphs_in(model)
            if graphs:
                self._compiled[id(compiled)] = compiled, graphs
            return compiled

        return compile_

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Report a compilation that the program waits for, and let a signal end it."""

        @functools.wraps(original)
        def compile_(session: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            graphs = self._graphs_in(model)
            if not graphs:
                return original(session, model, *args, **kwargs)
            what = ", ".join(f"{traced.name} with {counted(traced.taps, 'tap')}" for traced in graphs)
            compiled, _ = compile_reported(what, lambda: original(session, model, *args, **kwargs))
            return compiled

        return compile_

    def _bind(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Add our weights to those that a program gives to compiled graphs; note the graph of each model."""

        @functools.wraps(original)
        def bind(session: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            _, graphs = self._compiled.get(id(model), (None, None))
            graphs = graphs or self._graphs_in(model)
            if not graphs:
                return original(session, model, *args, **kwargs)
            injected = {
                name: value
                for traced in graphs
                if traced.injected
                for name, value in traced.injected.values.items()
            }
            if injected:
                kwargs["weights_registry"] = {**(kwargs.get("weights_registry") or {}), **injected}
            result = original(session, model, *args, **kwargs)
            models = list(result.values()) if isinstance(result, dict) else [result]
            by_name = {traced.name: traced for traced in graphs}
            for each in models:
                traced = graphs[0] if len(models) == len(graphs) == 1 else by_name.get(each.name)
                if traced is None and len(graphs) == len(models):
                    raise self._failed(
                        CaptureError(
                            f"{each.name}: cannot be told from the other graphs that were compiled with it: "
                            f"{', '.join(by_name)}",
                            hint="Compile the graphs one by one.",
                        )
                    )
                if traced is not None:
                    self._ready[id(each)] = each, traced, session
            return result

        return bind

    def _graphs_in(self, model: Any) -> list[_ProgramGraph]:
        """The traced graphs in what is compiled: a graph, or an MLIR module of several."""
        if self.is_paused:
            return []
        if isinstance(model, Graph):
            return [traced for traced in self._complete if traced.graph is model]
        mlir = getattr(model, "mlir_module", None)
        return [t for t in self._complete if mlir is not None and t.graph.module.mlir_module is mlir]

    def _execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def execute(model: Any, *args: Any) -> Any:
            _, traced, session = self._ready.get(id(model), (None, None, None))
            if traced is None or session is None:
                return original(model, *args)
            if traced.injected is not None and self._recorder.is_recording:
                if traced.runs:
                    raise self._failed(
                        CaptureError(
                            f"{traced.name}: is run a second time, and what is injected is of one run",
                            hint="A workload of a MaxModel is injected step by step.",
                        )
                    )
                traced.injected.note_outcomes(traced.events)
            traced.runs += 1
            with capture_prints(session, traced.events) as printed:
                outputs = list(original(model, *args))
                self._record(traced, args, outputs[traced.own :], printed)
            return outputs[: traced.own]

        return execute

    def _record(
        self,
        traced: _ProgramGraph,
        args: Sequence[Any],
        taps: Sequence[Any],
        printed: Callable[[str], Any],
    ) -> None:
        recorder = self._recorder
        if not recorder.is_recording:
            return
        play_back(
            traced.events,
            args,
            args,
            taps,
            recorder,
            self._names,
            with_inputs=self._plan.inputs,
            printed=printed,
        )
        graphs = recorder.facts.setdefault("graphs", {})
        graphs[traced.name] = {"outputs": traced.own, "taps": traced.taps}
        notes = recorder.facts.setdefault("notes", [])
        if _NO_CONTROL not in notes:
            notes.append(_NO_CONTROL)
        shapes = dict(symbolic_shapes(traced.events))
        if shapes:
            recorder.facts.setdefault("symbolic_shapes", {}).update(shapes)

    def _refuse(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def refuse(model: Any, *args: Any, **kwargs: Any) -> Any:
            _, traced, _ = self._ready.get(id(model), (None, None, None))
            if traced is not None:
                raise self._failed(
                    CaptureError(
                        f"{traced.name}: Model.{method}: what a device graph replays is not seen",
                        hint="Switch device graphs off in the program (device_graph_capture=False).",
                    )
                )
            return original(model, *args, **kwargs)

        return refuse

    def _failed(self, error: TensorcapError) -> TensorcapError:
        """Keep an error for the end of the capture, since the program may swallow it."""
        self._recorder.failure = error
        return error
