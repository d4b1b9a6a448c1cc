"""Somebody else's program that makes, compiles and runs graphs of a model, captured without an edit.

Each graph in which a module of the model is called gives out what happens in it, behind its own outputs; the
caller of the compiled graph gets its own alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from tensorcap.adapters.max.engine import Graph, InferenceSession, Model, Module, is_subgraph
from tensorcap.adapters.max.injected_weights import Planted
from tensorcap.adapters.max.layer_calls import watching
from tensorcap.adapters.max.playback import play, symbolic_shapes
from tensorcap.adapters.max.printed_tensors import printing
from tensorcap.adapters.max.subgraphs import subgraphs
from tensorcap.adapters.max.trace import Tracing
from tensorcap.adapters.max.trace_events import Event
from tensorcap.recording.options import CaptureOptions
from tensorcap.recording.probes import probing
from tensorcap.recording.recorder import Recorder
from tensorcap.recording.substitution import Substitution
from tensorcap.workload.patch import replaced
from tensorcap_formats.errors import CaptureError, TensorcapError

_REPLAYS: Final = ("capture", "replay", "debug_verify_replay")  # of Model, past its execute
_NO_CONTROL: Final = (
    "taps may end the fusion of kernels; no run without them was made to see what they change"
)


class _Traced:
    """A graph of the model that the program makes.

    Attributes:
        graph: The graph.
        name: Its name.
        tracing: What takes notes of it.
        planted: The weights that stand in it for archived tensors.
        events: The notes.
        own: How many outputs are the program's.
        taps: How many are ours.
        runs: How often it was run under capture.
    """

    def __init__(self, graph: Graph, tracing: Tracing, planted: Planted | None) -> None:
        self.graph = graph
        self.name = str(graph.name)
        self.tracing = tracing
        self.planted = planted
        self.events: Sequence[Event] = ()
        self.own = 0
        self.taps = 0
        self.runs = 0


class Foreign:
    """Watches a program for graphs of a model.

    Attributes:
        is_paused: Whether it looks away, while we make and run graphs of our own.
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
        self._noted = {*names, ""}
        self._inputs = plan.inputs or substitution is not None
        self._names = names
        self._recorder = recorder
        self._plan = plan
        self._substitution = substitution
        self._tracings: list[_Traced] = []
        self._made: list[_Traced] = []
        self._compiled: dict[int, tuple[Any, list[_Traced]]] = {}
        self._ready: dict[int, tuple[Any, _Traced, InferenceSession]] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See graphs that are made, compiled and run in the block."""
        binds = "init_all" if hasattr(InferenceSession, "init_all") else "load"
        with ExitStack() as stack:
            stack.enter_context(watching(self._call, map(type, self._modules.values())))
            stack.enter_context(probing(self))
            stack.enter_context(subgraphs(self._tracing))
            stack.enter_context(replaced(Graph, "output", self._output))
            if "compile_async" in vars(InferenceSession):
                stack.enter_context(replaced(InferenceSession, "compile_async", self._compile))
            stack.enter_context(replaced(InferenceSession, binds, self._bind))
            stack.enter_context(replaced(Model, "execute", self._execute))
            for name in _REPLAYS:
                if name in vars(Model):
                    stack.enter_context(replaced(Model, name, functools.partial(self._refuse, name)))
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away until the block ends."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @property
    def is_under_way(self) -> bool:
        """Whether a call of the model is being traced in this thread."""
        return any(traced.tracing.is_under_way for traced in self._tracings)

    def probed(self, name: str, value: object, *, is_alone: bool) -> None:
        """Note a value that code of the model has given a name."""
        traced = None if self.is_paused else self._current()
        if traced is not None:
            traced.tracing.probed(name, value, is_alone=is_alone)

    def _tracing(self) -> Tracing | None:
        traced = None if self.is_paused else self._current(is_new=False)
        return None if traced is None else traced.tracing

    def _current(self, *, is_new: bool = True) -> _Traced | None:
        """The graph that is traced in this thread; none outside of any, and in a subgraph of no call.

        Args:
            is_new: Whether it may be one of which nothing was noted before.
        """
        for traced in self._tracings:
            if traced.tracing.is_under_way:
                return traced
        try:
            graph = Graph.current
        except LookupError:
            return None
        for traced in self._tracings:
            if traced.graph is graph:
                return traced
        if is_subgraph(graph) or not is_new:
            return None
        planted = None if self._substitution is None else Planted(self._substitution)
        traced = _Traced(
            graph,
            Tracing(self._by_id, self._noted, planted, inputs=self._inputs, prints=self._plan.inner),
            planted,
        )
        traced.tracing.begin(graph, graph.inputs)
        self._tracings.append(traced)
        return traced

    def _call(
        self, original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.is_paused or id(layer) not in self._by_id:
            return original(layer, *args, **kwargs)
        traced = self._current()
        if traced is None:
            return original(layer, *args, **kwargs)
        return traced.tracing.call(original, layer, args, kwargs)

    def _output(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def output(graph: Graph, *outputs: Any) -> None:
            traced = next((t for t in self._tracings if t.graph is graph), None)
            if traced is None or self.is_paused:
                return original(graph, *outputs)
            values = traced.tracing.values
            original(graph, *outputs, *values)
            self._tracings.remove(traced)
            self._made.append(traced)
            traced.own, traced.taps = len(outputs), len(values)
            traced.events = tuple(traced.tracing.events)
            values.clear()
            return None

        return output

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note which graphs a compiled artifact is of; its own names may be those of equal graphs before."""

        @functools.wraps(original)
        def compile_(session: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            compiled = original(session, model, *args, **kwargs)
            made = self._of(model)
            if made:
                self._compiled[id(compiled)] = compiled, made
            return compiled

        return compile_

    def _bind(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Where weights are given to compiled graphs, give ours too, and note which graph each model runs."""

        @functools.wraps(original)
        def bind(session: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            _, made = self._compiled.get(id(model), (None, None))
            made = made or self._of(model)
            if not made:
                return original(session, model, *args, **kwargs)
            more = {n: v for traced in made if traced.planted for n, v in traced.planted.values.items()}
            if more:
                kwargs["weights_registry"] = {**(kwargs.get("weights_registry") or {}), **more}
            found = original(session, model, *args, **kwargs)
            models = list(found.values()) if isinstance(found, dict) else [found]
            by_name = {traced.name: traced for traced in made}
            for each in models:
                traced = made[0] if len(models) == len(made) == 1 else by_name.get(each.name)
                if traced is None and len(made) == len(models):
                    raise self._failed(
                        CaptureError(
                            f"{each.name}: cannot be told from the other graphs that were compiled with it: "
                            f"{', '.join(by_name)}",
                            hint="Compile the graphs one by one.",
                        )
                    )
                if traced is not None:
                    self._ready[id(each)] = each, traced, session
            return found

        return bind

    def _of(self, model: Any) -> list[_Traced]:
        """The graphs of ours in what is compiled: a graph, or a module of several."""
        if self.is_paused:
            return []
        if isinstance(model, Graph):
            return [traced for traced in self._made if traced.graph is model]
        inner = getattr(model, "mlir_module", None)
        return [t for t in self._made if inner is not None and t.graph.module.mlir_module is inner]

    def _execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def execute(model: Any, *args: Any) -> Any:
            _, traced, session = self._ready.get(id(model), (None, None, None))
            if traced is None or session is None:
                return original(model, *args)
            if traced.planted is not None and self._recorder.is_recording:
                if traced.runs:
                    raise self._failed(
                        CaptureError(
                            f"{traced.name}: is run a second time, and what is injected is of one run",
                            hint="A workload of a MaxModel is injected step by step.",
                        )
                    )
                traced.planted.tell(traced.events)
            traced.runs += 1
            with printing(session, traced.events) as printed:
                found = list(original(model, *args))
                self._play(traced, args, found[traced.own :], printed)
            return found[: traced.own]

        return execute

    def _play(
        self,
        traced: _Traced,
        args: Sequence[Any],
        found: Sequence[Any],
        printed: Callable[[str], Any],
    ) -> None:
        recorder = self._recorder
        if not recorder.is_recording:
            return
        play(
            traced.events,
            args,
            args,
            found,
            recorder,
            self._names,
            inputs=self._plan.inputs,
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

    def _refuse(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def refuse(model: Any, *args: Any, **kwargs: Any) -> Any:
            _, traced, _ = self._ready.get(id(model), (None, None, None))
            if traced is not None:
                raise self._failed(
                    CaptureError(
                        f"{traced.name}: Model.{what}: what a device graph replays is not seen",
                        hint="Switch device graphs off in the program (device_graph_capture=False).",
                    )
                )
            return original(model, *args, **kwargs)

        return refuse

    def _failed(self, error: TensorcapError) -> TensorcapError:
        self._recorder.failure = error
        return error
