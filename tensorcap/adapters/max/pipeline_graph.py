"""The graph of a MAX pipeline, taken from the pipeline before MAX compiles it, with the inputs of one run.

A pipeline of `max.pipelines` lists its graphs as specifications (`PipelineModel.graph_specs`), has them
compiled, and runs the compiled models. In the block of `take_graph` nothing is compiled: the first model that
the pipeline runs gives its specification and its inputs, and the pipeline ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from tensorcap.adapters.max.engine import Graph, InferenceSession
from tensorcap.workload import class_name, replace_attribute
from tensorcap_formats.errors import UsageError


@dataclass(frozen=True)
class PipelineGraph:
    """A graph that a pipeline runs.

    Attributes:
        spec: Its specification: module, name, types of inputs, weights.
        session: The session that the pipeline would have compiled it in.
        buffers: The inputs of the run, caches among them.
    """

    spec: Any
    session: InferenceSession
    buffers: tuple[Any, ...]


class _GraphTaken(BaseException):  # a pipeline may catch exceptions
    """Ends a pipeline that has shown the graph that it runs."""

    def __init__(self, graph: PipelineGraph) -> None:
        super().__init__()
        self.graph = graph


class _Traced(BaseException):
    """Ends a trace with what the graph returns."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


@dataclass(frozen=True)
class _Uncompiled:
    """Stands for what MAX would compile of a few specifications; none if another way led to a graph."""

    specs: Sequence[Any] = ()


class _UncompiledModel:
    """Stands for a compiled model; a run of it ends the pipeline."""

    def __init__(self, spec: Any, session: InferenceSession) -> None:
        self._spec = spec
        self._session = session

    def execute(self, *buffers: Any) -> NoReturn:
        """End the pipeline.

        Raises:
            UsageError: Nothing is known of the graph.
        """
        if self._spec is None:
            raise UsageError(
                "runs a graph that it does not list in graph_specs",
                hint='tcap capture script -- "$(which max)" generate … captures what MAX runs itself.',
            )
        raise _GraphTaken(PipelineGraph(self._spec, self._session, buffers))

    __call__ = execute


def take_graph(spec_class: type, run_pipeline: Callable[[], object]) -> PipelineGraph | None:
    """Take the graph that a pipeline runs first, without compiling any.

    Args:
        spec_class: The class of specifications, `GraphSpec` of `max.pipelines`.
        run_pipeline: Makes the pipeline and runs it.

    Returns:
        None if the pipeline ran none.
    """
    grouped: dict[int, list[Any]] = {}

    def trace(_: Callable[..., Any]) -> Callable[..., Any]:
        def note(spec: Any, module: Any = None) -> Any:
            if module is None:
                return _Uncompiled([spec])
            grouped.setdefault(id(module), []).append(spec)
            return module

        return note

    def compile_(_: Callable[..., Any]) -> Callable[..., Any]:
        def skip(session: InferenceSession, graph: Any, **options: Any) -> _Uncompiled:
            return graph if isinstance(graph, _Uncompiled) else _Uncompiled(grouped.get(id(graph), ()))

        return skip

    def init_all(_: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(session: InferenceSession, compiled: _Uncompiled, **weights: Any) -> dict[str, Any]:
            return {spec.name: _UncompiledModel(spec, session) for spec in compiled.specs}

        return stand_in

    def load(_: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(session: InferenceSession, graph: Any, **options: Any) -> _UncompiledModel:
            return _UncompiledModel(None, session)

        return stand_in

    with ExitStack() as stack:
        stack.enter_context(replace_attribute(spec_class, "trace", trace))
        for name, make in (("compile_reusing_mefs", compile_), ("init_all", init_all), ("load", load)):
            stack.enter_context(replace_attribute(InferenceSession, name, make))
        try:
            run_pipeline()
        except _GraphTaken as taken:
            return taken.graph
    return None


def traced_by(spec: Any) -> Callable[..., Any]:
    """The function that a graph of a specification is traced by: the module, as the pipeline calls it.

    A pipeline calls its module with structures, such as caches, that it makes of the graph's inputs in the
    module's own `trace`, which is run here within another graph.
    """

    def forward(module: Any, *inputs: Any) -> Any:
        with _inlined_graph(inputs):
            try:
                module.trace(*spec.input_types, name=spec.name)
            except _Traced as traced:
                return traced.result
        raise UsageError(f"{class_name(module)}: its trace makes no graph of a function")

    return forward


@contextmanager
def _inlined_graph(inputs: Sequence[Any]) -> Iterator[None]:
    """Have the next graph that is made of a function not made: the function is called with these inputs."""
    is_waiting = True

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def init(graph: Graph, name: str, forward: Any = None, *args: Any, **kwargs: Any) -> None:
            nonlocal is_waiting
            if not is_waiting or forward is None:
                original(graph, name, forward, *args, **kwargs)
                return
            is_waiting = False
            raise _Traced(forward(*inputs))

        return init

    with replace_attribute(Graph, "__init__", make):
        yield


def weights_of(spec: Any) -> Mapping[str, Any]:
    """The weights that a pipeline gives to a graph, by name."""
    weights: Mapping[str, Any] = spec.weights_registry()
    return weights
