"""Runs of an ONNX model: as it is, and in sections whose values are recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tensorcap.adapters.array_records import record_bits
from tensorcap.adapters.control_run import compare_with_control, describe_control
from tensorcap.adapters.input_arrays import named_arrays, note_places
from tensorcap.adapters.onnx.boundaries import boundaries
from tensorcap.adapters.onnx.engine import (
    Session,
    element_type_of,
    refuse_absent_providers,
    stored,
    to_runtime,
)
from tensorcap.adapters.onnx.graph import GraphNode, OnnxGraph
from tensorcap.adapters.onnx.model import OnnxModel
from tensorcap.adapters.onnx.op_facts import arguments_of, constant_value, input_names
from tensorcap.adapters.onnx.quantisation import find_grids, own_grid
from tensorcap.adapters.onnx.scopes import ModuleCall, Scopes
from tensorcap.adapters.onnx.sections import TappedGraph
from tensorcap.adapters.onnx.switches import Feed, Switches, feed_inputs, feed_switches
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.recording import Call, CaptureOptions, Recorder, Substitution
from tensorcap.wording import counted, some
from tensorcap_formats.dtypes import Array, DType, bits_of, decode, dtype_of
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import escape

_Stored = tuple[Array, DType]
_NOT_ENTERED: Final = "a graph within the node, which is not entered: {}"


class LoadedModel:
    """A model's graph, its modules, and the sessions that were made of it.

    Attributes:
        graph: The graph.
        scopes: The modules that its nodes lie in.
        boundaries: Arguments and results of each call of a module.
        grids: What values that are whole numbers stand for, by name.
    """

    def __init__(self, model: OnnxModel) -> None:
        """Load a model.

        Raises:
            ReadError: It cannot be read.
            UsageError: A provider is absent.
        """
        refuse_absent_providers(str(model.source), model.providers)
        self.graph = OnnxGraph(Path(model.source).expanduser())
        self.scopes = Scopes(self.graph)
        self.boundaries = boundaries(self.graph, self.scopes)
        self.grids = find_grids(self.graph)
        self._model = model
        self._tapped: dict[tuple[Any, bool], TappedGraph] = {}
        self._plain: Session | None = None

    @classmethod
    def of(cls, model: OnnxModel) -> LoadedModel:
        """The model as it was loaded before, or now."""
        if not model.loaded:
            model.loaded.append(cls(model))
        loaded: LoadedModel = model.loaded[0]
        return loaded

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Array]:
        """The model's inputs by name.

        Raises:
            UsageError: They are not those that it takes.
        """
        return named_arrays(str(self._model.source), self.graph.inputs, args, kwargs)

    def run_plain(
        self, arrays: Mapping[str, Array], *, is_profiled: bool = False
    ) -> tuple[dict[str, Any], Any]:
        """Run the graph without taps; its outputs, and its session."""
        session = None if is_profiled else self._plain
        if session is None:
            graph, model = self.graph, self._model
            own = {stored.name for stored in graph.plain.graph.initializer}
            session = Session(
                str(model.source),
                graph.plain.SerializeToString(),
                providers=model.providers,
                optimization=model.optimization,
                folder=graph.path.parent.resolve(),
                weights={name: value for name, value in graph.apart.items() if name in own},
                is_profiled=is_profiled,
            )
            self._plain = self._plain if is_profiled else session
        values = {name: to_runtime(array) for name, array in arrays.items()}
        return session.run(self.graph.outputs, values), session

    def tapped(self, values: Mapping[str, Any], signature: Any, *, is_switched: bool) -> TappedGraph:
        """The graph with taps for inputs of a signature; with switches for injections, or if it has some."""
        key = signature, is_switched or (signature, True) in self._tapped
        if key not in self._tapped:
            switches = Switches(self.graph, self.scopes, self.boundaries) if is_switched else None
            self._tapped[key] = TappedGraph(self._model, self.graph, values, switches)
        return self._tapped[key]


def run(model: OnnxModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """Run a model, through the capture that is under way if there is one."""
    if model.tapped_run is not None:
        outputs: dict[str, Array] = model.tapped_run(args, kwargs)
        return outputs
    loaded = LoadedModel.of(model)
    results, _ = loaded.run_plain(loaded.inputs(args, kwargs))
    return {name: _values(value) for name, value in results.items()}


class ModelTap:
    """A capture of a model that is under way."""

    def __init__(
        self,
        model: OnnxModel,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None,
    ) -> None:
        self._model = model
        self._loaded = LoadedModel.of(model)
        self._names = names
        self._recorder = recorder
        self._plan = plan
        self._substitution = substitution
        self._is_controlled = not model.control or substitution is not None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Array]:
        """Run the model under capture.

        1. Put archived inputs of the model in the place of its own.
        2. Take or make the sections for inputs of these shapes, and feed their switches.
        3. Run them, and record each node, and each call of a module.
        4. In the first run, run the graph without taps too, and note what the taps changed.
        """
        recorder, loaded = self._recorder, self._loaded
        graph = loaded.graph
        substitution = self._substitution if recorder.is_recording else None
        arrays = loaded.inputs(args, kwargs)
        inputs = {name: (bits_of(array), dtype_of(array)) for name, array in arrays.items()}
        own = {name: to_runtime(array) for name, array in arrays.items()}
        step = recorder.last_step + 1
        try:
            feed = feed_inputs(
                inputs, own, lambda name: element_type_of(inputs[name][1].name), substitution, step
            )
            is_switched = bool(self._plan.injectable) or substitution is not None
            signature = tuple(
                (name, tuple(value.shape()), value.data_type()) for name, value in feed.own.items()
            )
            with recorder.stage("ONNX Runtime prepares the graph"):
                tapped = loaded.tapped(feed.own, signature, is_switched=is_switched)
            if tapped.switches is not None:
                feed_switches(
                    feed,
                    tapped.switches,
                    loaded.boundaries,
                    loaded.grids,
                    tapped.shapes,
                    tapped.element_type,
                    tapped.dtype_of,
                    substitution,
                    step,
                )
        except UsageError as error:
            if substitution is not None:
                substitution.failure = error
            raise
        record = _RunRecord(loaded, recorder, self._plan, self._names, feed, tapped.switches, inputs)
        tapped.run({**feed.own, **feed.values}, record.receive)
        outputs = record.finish()
        note_places(self._model.inputs, self._recorder)
        recorder.facts["graph"] = {
            "nodes": len(graph.nodes),
            "sections": tapped.count,
            **({"switches": len(tapped.switches.by_place)} if tapped.switches is not None else {}),
        }
        if not self._is_controlled:
            self._is_controlled = True
            self._control(arrays, outputs)
        return {name: decode(*pair) for name, pair in outputs.items()}

    def _control(self, arrays: Mapping[str, Array], outputs: Mapping[str, _Stored]) -> None:
        """Run the graph without taps, and note what it computes otherwise."""
        facts, loaded = self._recorder.facts, self._loaded
        with self._recorder.stage("ONNX Runtime runs the graph without taps, as a control"):
            results, session = loaded.run_plain(arrays, is_profiled=True)
        kernels = session.kernels()
        entries = [
            compare_with_control(_slot(name, loaded.graph.outputs), stored(results[name]), pair, _same)
            for name, pair in outputs.items()
        ]
        facts["control"] = entries
        facts["graph"]["kernels_without_taps"] = kernels
        notes = facts.setdefault("notes", [])
        notes.append(_fusion_note(kernels, loaded.graph))
        notes.append(describe_control(entries))


def _fusion_note(kernels: Mapping[str, int], graph: OnnxGraph) -> str:
    """What the runtime makes of the graph without taps, in a sentence."""
    own = {node.op.rpartition(".")[2] for node in graph.nodes}
    fused = [f"{count} {op}" for op, count in kernels.items() if op not in own and op != "Constant"]
    total = counted(sum(kernels.values()), "kernel")
    text = f"without taps the runtime computes {counted(len(graph.nodes), 'node')} in {total}"
    return f"{text}, of its own: {some(fused)}" if fused else text


class _RunRecord:
    """The records of one run."""

    def __init__(
        self,
        loaded: LoadedModel,
        recorder: Recorder,
        plan: CaptureOptions,
        names: Collection[str],
        feed: Feed,
        switches: Switches | None,
        inputs: Mapping[str, _Stored],
    ) -> None:
        self._loaded = loaded
        self._graph = loaded.graph
        self._recorder = recorder
        self._plan = plan
        self._names = names
        self._feed = feed
        self._switches = switches
        self._inputs = inputs
        self._outputs: dict[str, _Stored] = {}
        self._calls: dict[ModuleCall, Call | None] = {}
        self._references: dict[str, dict[str, Any]] = {}
        self._beginning: dict[int, list[ModuleCall]] = {}
        self._ending: dict[int, list[ModuleCall]] = {}
        for call, boundary in loaded.boundaries.items():
            self._beginning.setdefault(boundary.first, []).append(call)
            self._ending.setdefault(boundary.last, []).insert(0, call)
        self._root = recorder.enter(recorder.points[""], id(self), is_outermost=True)
        if self._root is not None:
            for name, pair in inputs.items():
                slot = f"input.{escape(name)}"
                record_bits(recorder, self._root, slot, *pair, required=True)
                self._references[name] = {"record": self._root.key(slot).text}

    def receive(self, node: GraphNode, values: Mapping[str, Any]) -> None:
        """Record a node, and the calls of modules that begin and end with it."""
        if self._root is None:
            self._keep_outputs(node, values)
            return
        for call in self._beginning.get(node.index, ()):
            self._begin(call, values)
        self._record_node(node, values)
        self._keep_outputs(node, values)
        for call in self._ending.get(node.index, ()):
            self._end(call, values)

    def finish(self) -> dict[str, _Stored]:
        """Record the model's outputs, and return their stored elements by name."""
        graph, recorder = self._graph, self._recorder
        for name in graph.outputs:
            if name not in graph.makers:  # an input or a weight, as it is
                self._outputs[name] = self._inputs[name] if name in self._inputs else graph.read(name)
        if self._root is not None:
            for name in sorted(graph.outputs, key=self._is_input):  # of which the first is the main one
                record_bits(recorder, self._root, _slot(name, graph.outputs), *self._outputs[name])
        if self._root is not None:
            recorder.leave(self._root.point, id(self))
            recorder.finish(self._root)
        return {name: self._outputs[name] for name in graph.outputs}

    def _is_input(self, name: str) -> bool:
        """Whether an output of the model is an input of it, handed on."""
        while name in self._graph.makers and self._graph.makers[name].op == "Identity":
            name = self._graph.makers[name].inputs[0]
        return name in self._graph.inputs

    def _keep_outputs(self, node: GraphNode, values: Mapping[str, Any]) -> None:
        for name in node.outputs:
            if name in self._graph.outputs:
                self._outputs[name] = self._natural(name, None, values)

    def _begin(self, call: ModuleCall, values: Mapping[str, Any]) -> None:
        recorder = self._recorder
        point = recorder.points[call.path]
        entered = recorder.enter(point, id(self._loaded) + 1) if call.path in self._names else None
        self._calls[call] = entered
        if entered is None:
            return
        recorder.leave(point, id(self._loaded) + 1)  # nodes of calls need not be neighbours
        if self._plan.inputs:
            boundary = self._loaded.boundaries[call]
            self._record_slots(entered, call, boundary.inputs, values)

    def _end(self, call: ModuleCall, values: Mapping[str, Any]) -> None:
        entered = self._calls.get(call)
        if entered is not None:
            self._record_slots(entered, call, self._loaded.boundaries[call].outputs, values)
            self._recorder.finish(entered)

    def _record_slots(
        self, entered: Call, call: ModuleCall, slots: Mapping[str, str], values: Mapping[str, Any]
    ) -> None:
        for slot, name in slots.items():
            if not self._recorder.wants(entered, slot):
                continue
            try:
                pair = self._at_boundary(call, slot, name, values)
                if name in self._loaded.grids:
                    floats = self._loaded.grids[name].floats(decode(*pair))
                    pair = bits_of(floats), dtype_of(floats)
            except NotCapturableError as error:
                self._recorder.lose(entered.point, slot, str(error), call=entered)
                continue
            record_bits(self._recorder, entered, slot, *pair)

    def _at_boundary(self, call: ModuleCall, slot: str, name: str, values: Mapping[str, Any]) -> _Stored:
        """The value at an argument or a result, with what switches before it put in its place."""
        if self._switches is None:
            return self._stored(name, values)
        own = self._switches.by_place[call, slot]
        takers = (*self._graph.takers.get(name, ()), None)
        for taker in takers:
            passed = self._switches.passed(name, taker)
            if own in passed:
                archived = self._feed.natural(passed[: passed.index(own)])
                return self._stored(name, values) if archived is None else archived
        return self._stored(name, values)

    def _natural(self, name: str, taker: GraphNode | None, values: Mapping[str, Any]) -> _Stored:
        """What a node takes of a value, with what switches put in its place."""
        passed = [] if self._switches is None else self._switches.passed(name, taker)
        archived = self._feed.natural(passed)
        return self._stored(name, values) if archived is None else archived

    def _stored(self, name: str, values: Mapping[str, Any]) -> _Stored:
        return self._inputs[name] if name in self._inputs else stored(values[name])

    def _record_node(self, node: GraphNode, values: Mapping[str, Any]) -> None:
        recorder = self._recorder
        scope = self._loaded.scopes.nodes[node.index]
        outer = next(
            (self._calls[call] for call in reversed(scope.calls) if self._calls.get(call) is not None),
            self._root,
        )
        assert outer is not None  # a node is recorded within a call of the model
        call = recorder.inner(scope.name, "op", outer=outer)
        if call is None:
            return
        inputs, arguments = self._arguments(node)
        facts = {
            "op": node.op,
            "order": recorder.next_order(),
            "module": outer.point.site,
            "module_call": outer.number,
            "class": self._loaded.scopes.classes.get(scope.calls[-1].path if scope.calls else "", ""),
            "file": scope.file or None,
            "line": scope.line,
            "function": scope.function or None,
            "inputs": inputs,
            "arguments": arguments,
            "node": node.name,
        }
        grid = own_grid(self._loaded.grids, node)
        if grid is not None:
            facts |= {"step": grid.step, "zero": grid.zero}
        names = [name for name in node.outputs if name]
        outputs = []
        for number, name in enumerate(names):
            slot = "output" if len(names) == 1 else f"output.{number}"
            try:
                lost = record_bits(recorder, call, slot, *stored(values[name]))
            except NotCapturableError as error:
                lost = str(error)
                recorder.lose(call.point, slot, lost, call=call)
            reference = {"lost": lost} if lost else {"record": call.key(slot).text}
            self._references[name] = reference
            outputs.append({"slot": slot, **reference})
        for graph in node.subgraphs:
            named = f"{counted(len(graph.nodes), 'node')}: {some(graph.nodes)}" if graph.nodes else "no node"
            recorder.lose(call.point, graph.name, _NOT_ENTERED.format(named), call=call, absence="fused")
        if recorder.wants(call, "op"):
            recorder.value(call, "op", {**facts, "outputs": outputs})

    def _arguments(self, node: GraphNode) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        graph = self._graph
        names = input_names(node, graph.opsets)
        inputs, arguments = [], arguments_of(node)
        for name, value in zip(names, node.inputs, strict=False):
            if not value:
                continue
            if value in graph.constants:
                arguments[name] = constant_value(graph.constants[value])
            elif value in graph.weights:
                inputs.append({"name": name, "parameter": value})
            else:
                lost = {"lost": "it was not recorded"}
                inputs.append({"name": name, **self._references.get(value, lost)})
        return inputs, arguments


def _slot(name: str, outputs: Collection[str]) -> str:
    return "output" if len(outputs) == 1 else f"output.{escape(name)}"


def _same(pair: _Stored) -> _Stored:
    return pair


def _values(value: Any) -> Array:
    try:
        return decode(*stored(value))
    except NotCapturableError:
        array: Array = value.numpy()
        return array
