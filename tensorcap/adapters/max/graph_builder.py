"""Build graphs of a MAX model: as the model is, or instrumented with taps and with switches for injection."""

from __future__ import annotations

import io
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from tensorcap.adapters.max.compilation import compile_reported
from tensorcap.adapters.max.engine import (
    DeviceRef,
    Graph,
    InferenceSession,
    MaxDType,
    StaticDim,
    SymbolicDim,
    TensorType,
    TensorValue,
    compile_graph,
    ops,
)
from tensorcap.adapters.max.graph_plan import CompiledGraph, GraphSource, InjectionPoint, Instrumentation
from tensorcap.adapters.max.hooks import trace_subgraphs, wrap_calls
from tensorcap.adapters.max.model_inputs import ModelInputs
from tensorcap.adapters.max.modules import devices_of, restore_modules, tree
from tensorcap.adapters.max.parameters import is_in_graph, own_weights
from tensorcap.adapters.max.trace import KINDS, Tracer
from tensorcap.recording import Kind, collect_probes, leaf_slot, walk
from tensorcap.wording import counted
from tensorcap.workload import class_name
from tensorcap_formats.errors import CaptureError, UsageError, abbreviate


class _PointCollector:
    """An injector that collects the injection points of a graph, and replaces nothing."""

    def __init__(self, injectable: Collection[str], model_inputs: ModelInputs) -> None:
        self.points: dict[InjectionPoint, TensorType] = {}
        self._injectable = injectable
        self._model_inputs = model_inputs

    def __call__(self, name: str, call: int, kind: Kind, slot: str, value: TensorValue) -> TensorValue:
        if name and kind in self._injectable and self._model_inputs.shape_of(value.shape) is not None:
            self.points[InjectionPoint(name, call, slot)] = TensorType(value.dtype, value.shape, value.device)
        return value


class _SwitchInserter:
    """An injector that puts a switch at each point, between the model's own value and a graph input."""

    def __init__(self, points: Mapping[InjectionPoint, TensorType], inputs: Sequence[Any]) -> None:
        self._values = dict(zip(points, inputs[: len(points)], strict=True))
        self._flags = dict(zip(points, inputs[len(points) :], strict=True))

    def __call__(self, name: str, call: int, kind: Kind, slot: str, value: TensorValue) -> TensorValue:
        flag = self._flags.get(InjectionPoint(name, call, slot))
        if flag is None:
            return value
        if value.device != flag.device:
            flag = flag.to(value.device)
        flag = ops.broadcast_to(ops.reshape(flag, [1] * len(value.shape)), value.shape)
        other = self._values[InjectionPoint(name, call, slot)]
        return ops.where(flag, other if other.shape == value.shape else other.rebind(value.shape), value)


def _input_types(points: Mapping[InjectionPoint, TensorType]) -> list[TensorType]:
    """The types of the inputs at switches; a computed dimension, which no input may have, gets a name."""
    names: dict[str, str] = {}

    def named(dim: Any) -> Any:
        is_computed = not isinstance(dim, (StaticDim, SymbolicDim))
        return names.setdefault(str(dim), f"tensorcap_{len(names)}") if is_computed else dim

    return [TensorType(t.dtype, [named(dim) for dim in t.shape], t.device) for t in points.values()]


def build(
    model: GraphSource, model_inputs: ModelInputs, instrumentation: Instrumentation | None
) -> CompiledGraph:
    """Build a graph of a model and compile it.

    1. For injection, trace the model once to collect the injection points.
    2. Trace it with a tracer that adds taps to the outputs and a switch at each point.
    3. Compile the graph, in the session of the model.

    Args:
        model: The model.
        model_inputs: The inputs, for whose types the graph is built.
        instrumentation: What to add to the graph; None for nothing, as a control.

    Raises:
        UsageError: A second graph cannot be made of the module, or MAX refuses its graph.
        CaptureError: MAX fails at compiling it.
    """
    began = time.perf_counter()
    modules, _ = tree(model.module)
    wanted = instrumentation or Instrumentation(frozenset())
    is_control = instrumentation is None
    names = {} if is_control else {id(module): name for name, module in modules.items()}
    traced_names = {*wanted.names, ""}
    points: Mapping[InjectionPoint, TensorType] = {}
    if wanted.injectable:
        collector = _PointCollector(wanted.injectable, model_inputs)
        _trace(
            model, model_inputs, modules, Tracer(names, traced_names, collector), {}, is_control=is_control
        )
        points = collector.points
    tracer = Tracer(names, traced_names, inputs=wanted.inputs, prints=wanted.prints)
    graph, own_slots, unused = _trace(model, model_inputs, modules, tracer, points, is_control=is_control)
    session = model.compiled.session
    if session is None:
        devices = list(model.devices) or [ref.to_device() for ref in devices_of(modules, model_inputs.types)]
        session = model.compiled.session = InferenceSession(devices=devices)
    name = type(model.module).__name__
    text = f"{name} without taps" if is_control else f"{name} with {_additions(tracer, points)}"
    try:
        artifact, is_cached = compile_reported(text, lambda: compile_graph(session, graph, model.extensions))
    except RuntimeError as error:
        reason = _one_line(error.__cause__ or error)
        raise CaptureError(
            f"{class_name(model.module)}: MAX failed to compile its graph: {reason}",
            hint="With MODULAR_DEBUG=source-tracebacks in the environment MAX says more.",
        ) from error
    return CompiledGraph(
        text,
        session,
        artifact,
        tuple(tracer.events),
        own_slots,
        len(tracer.values),
        points,
        time.perf_counter() - began,
        model_inputs.signature,
        instrumentation,
        unused,
        is_cached,
    )


def _additions(tracer: Tracer, points: Mapping[InjectionPoint, TensorType]) -> str:
    """What is added to a graph, in words."""
    taps = counted(len(tracer.values), "tap")
    return f"{taps} and switches at {counted(len(points), 'value')}" if points else taps


def _trace(
    model: GraphSource,
    model_inputs: ModelInputs,
    modules: Mapping[str, Any],
    tracer: Tracer,
    points: Mapping[InjectionPoint, TensorType],
    *,
    is_control: bool,
) -> tuple[Graph, list[str], frozenset[str]]:
    """Trace a model into a graph.

    Returns:
        The graph, the slots of its own outputs, and the names of modules whose weights are not in it.
    """
    flag = TensorType(MaxDType.bool, [], DeviceRef.CPU())
    types = [*model_inputs.types, *_input_types(points), *([flag] * len(points))]
    own = len(model_inputs.types)
    with restore_modules(modules), Graph(type(model.module).__name__, input_types=types) as graph:
        for name, weight in model.module.raw_state_dict().items():
            weight.name = name  # as in its state_dict
        inputs = list(graph.inputs)
        tracer.begin(graph, inputs[:own])
        if points:
            tracer.injector = _SwitchInserter(points, inputs[own:])
        args, kwargs = model_inputs.with_graph_inputs(inputs[:own])
        with (
            wrap_calls(tracer.call, map(type, modules.values())),
            nullcontext() if is_control else collect_probes(tracer),
            nullcontext() if is_control else trace_subgraphs(lambda: tracer),
            _refusals(class_name(model.module)),
        ):
            if model.forward is None:
                result = model.module(*args, **kwargs)
            else:
                result = model.forward(model.module, *args, **kwargs)
            leaves = [leaf for leaf in walk(result, KINDS) if leaf.is_tensor]
            with redirect_stdout(io.StringIO()):  # MAX prints a graph that it refuses, which may be long
                graph.output(*(leaf.value for leaf in leaves), *(() if is_control else tracer.values))
        unused = frozenset(
            name
            for name, module in modules.items()
            if (weights := own_weights(module).values()) and not any(map(is_in_graph, weights))
        )
    return graph, [leaf_slot("output", leaf.name) for leaf in leaves], unused


@contextmanager
def _refusals(model_class: str) -> Iterator[None]:
    """Turn MAX's refusal of a graph into one line."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if "outside" in text and "region" in text:
            raise UsageError(
                f"{model_class}: holds values of a graph that was made of it before",
                hint="Make a new module for the capture; what is kept outside of modules cannot be undone.",
            ) from error
        if "failed to verify" in text:
            raise UsageError(f"{model_class}: MAX takes no such graph: {_one_line(error)}") from error
        raise


def _one_line(error: BaseException) -> str:
    """The message of an error in one line."""
    return abbreviate(" ".join(str(error).split()), 300)
