"""Ops of an exported graph: `torch.export` traces a model, and its graph is run node by node.

Targets that are compiled from an exported program have the same names of nodes for the same values. The
graph runs with the model's own parameters and buffers. The output of torch while it traces stays off the
terminal, and it keeps the frames of all functions meanwhile, if its release allows that.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from tensorcap.adapters.protocol import decomposed
from tensorcap.adapters.torch.capture_gaps import is_compiled_model
from tensorcap.adapters.torch.graph_nodes import INNER, graph_nodes, operator_of, source_of
from tensorcap.adapters.torch.module_tap import ModuleTap
from tensorcap.adapters.torch.modules import argument_names, tree
from tensorcap.adapters.torch.op_mode import modules_below
from tensorcap.adapters.torch.op_recorder import OpRecorder
from tensorcap.adapters.torch.parameters import record_parameters
from tensorcap.adapters.torch.program_module import ProgramModule
from tensorcap.adapters.torch.staging_buffer import StagingBuffer
from tensorcap.adapters.torch.tensor_leaves import KINDS, TensorLeaves
from tensorcap.recording import Call, CaptureOptions, Point, Recorder, leaf_slot, walk
from tensorcap.workload import Workload, class_name, replace_attribute
from tensorcap_formats.errors import CaptureError, MissingPackageError, UsageError, abbreviate
from tensorcap_formats.keys import escape

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def export(workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
    """Export the model of a workload.

    Returns:
        A function that runs the graph once and records its nodes.

    Raises:
        UsageError: The workload is no single forward, or the plan needs the model's own code.
        CaptureError: torch cannot export the model.
    """
    model = workload.model
    if isinstance(model, ProgramModule):
        own_frames = {"frames": "as the program has them"}
        return partial(_run, model.program, own_frames, model, *workload.arguments, plan)
    name = class_name(model)
    unfit = [what for what in ("watch", "grads") if getattr(plan, what)]
    if unfit:
        raise UsageError(
            f"{name}: level export runs a graph and not the model's code, found {' and '.join(unfit)}",
            hint="Take level op.",
        )
    program, has_all_frames = export_program(workload, plan.decompositions)
    args, kwargs = workload.arguments
    facts = {
        "strict": False,
        "grad": torch.is_grad_enabled(),
        "frames": "all" if has_all_frames else "of functions named forward",
    }
    return partial(_run, program, facts, model, args, kwargs, plan)


def export_program(workload: Workload, decompositions: str) -> tuple[ExportedProgram, bool]:
    """Export the model of a workload, as `exported` does.

    Raises:
        UsageError: The workload is no single forward.
        CaptureError: torch cannot export the model.
    """
    model = workload.model
    name = class_name(model)
    if workload.run is not None:
        raise UsageError(
            f"{name}: level export runs one forward, found a workload that runs a function of its own",
            hint="Leave the function out (--max-new-tokens), or take level op.",
        )
    if isinstance(model, ProgramModule):
        return model.program, True
    args, kwargs = workload.arguments
    try:
        return exported(model, args, kwargs, decompositions)
    except (MissingPackageError, UsageError):
        raise
    except Exception as error:
        raise _failure(name, error) from error


def exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], decompositions: str = ""
) -> tuple[ExportedProgram, bool]:
    """Export a model, which stays as it was, and decompose its graph as the converter of a framework does.

    Returns:
        The program, and whether its nodes keep the frames of all functions, not only of those named
        `forward`.
    """
    with _quiet(), _kept_attributes(model), _all_frames() as has_all_frames:
        program = torch.export.export(model, args, kwargs, strict=False)
        if decompositions:
            program = decomposed(program, decompositions)
    return program, has_all_frames


def _failure(name: str, error: Exception) -> CaptureError:
    reason = abbreviate(str(error).strip().partition("\n")[0].rstrip(". "), 300)
    frames = _of_model(traceback.extract_tb(error.__traceback__))
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    hint = "Turn its cache off (use_cache=False), or take" if "Cache'" in reason else "Take"
    return CaptureError(
        f"{name}: torch.export cannot export it{where}: {type(error).__name__}: {reason}",
        hint=f"{hint} level op, which records any model as it runs.",
    )


def _run(
    program: ExportedProgram,
    facts: dict[str, Any],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: CaptureOptions,
    recorder: Recorder,
) -> None:
    recorder.facts["export"] = facts
    recorder.facts["exported_nodes"] = [asdict(node) for node in graph_nodes(program)]
    modules, _ = tree(model)
    if is_compiled_model(modules.values()):
        recorder.facts.setdefault("notes", []).append(
            "the model is compiled (torch.compile): level export ran a graph of the code that it was "
            "compiled from, and not the compiled code"
        )
    points = {name: recorder.points[name] for name in modules}
    names = modules_below(class_name(model), plan.ops_in, points) if plan.ops_in else modules
    sites = frozenset(points[name].site for name in names)
    with torch.no_grad(), StagingBuffer(recorder) as staging:
        leaves = TensorLeaves(recorder, staging)
        with record_parameters(modules, leaves) if plan.params else contextlib.nullcontext():
            _GraphRun(program, model, leaves, sites).run(args, kwargs)


class _GraphRun:
    """One run of an exported graph.

    Args:
        program: The exported program.
        model: The model that it was exported from.
        leaves: Takes the tensors.
        sites: The sites of the modules whose nodes are recorded.
    """

    def __init__(
        self, program: ExportedProgram, model: nn.Module, leaves: TensorLeaves, sites: frozenset[str]
    ) -> None:
        modules, self._aliases = tree(model)
        self._program = program
        self._model = model
        self._leaves = leaves
        self._recorder = leaves.recorder
        self._sites = sites
        self._op_recorder = OpRecorder(modules, leaves)
        self._calls: dict[str, Call] = {}  # calls of modules, by their keys in the metadata of nodes

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the graph on the model's arguments."""
        recorder, point = self._recorder, self._recorder.points[""]
        slots = tuple(f"input.{escape(name)}" for name in argument_names(self._model, {}))
        root = ModuleTap(point, recorder, self._leaves, slots, inputs=True, is_root=True)
        call = root.begin(self._model, id(self))
        if call is None:
            return
        self._root = call
        root.record_inputs(call, args, kwargs)
        try:
            result = self._compute(args, kwargs)
        finally:
            self._op_recorder.finish()
        root.end(recorder.leave(point, id(self)), result)
        for point in recorder.points.values():
            if point.kind == "module" and point.is_capturable and not (point.calls or point.reason):
                point.reason = "no node of the exported graph lies in it"

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.export.graph_signature import InputKind, OutputKind

        program = self._program
        user_inputs = iter(pytree.tree_leaves((args, kwargs)))
        weights = {**program.constants, **program.state_dict}
        if isinstance(self._model, ProgramModule):
            weights = self._model.weights
        signature = program.graph_signature
        values = [
            next(user_inputs) if spec.kind is InputKind.USER_INPUT else weights.get(spec.target or "")
            for spec in signature.input_specs
        ]
        graph = self._describe_ends(values)
        outputs = _NodeInterpreter(program.graph_module, self.node).run(*values, enable_io_processing=False)
        self._describe_constants(values, graph["weights"])
        own = []
        for value, spec in zip(outputs, signature.output_specs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                own.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION:  # before torch 2.6, graphs do not write themselves
                weights[spec.target or ""].copy_(value)
        result = pytree.tree_unflatten(own, program.call_spec.out_spec)
        graph["outputs"] = self._describe_outputs(outputs, result)
        return result

    def _describe_ends(self, values: Sequence[Any]) -> dict[str, Any]:
        """Note in the run's metadata what goes into the graph (CAP-220)."""
        from torch.export.graph_signature import InputKind

        graph: dict[str, Any] = {"inputs": {}, "weights": {}, "outputs": []}
        self._recorder.facts["graph"] = graph
        for spec, value in zip(self._program.graph_signature.input_specs, values, strict=True):
            reference = self._op_recorder.reference(value) if isinstance(value, torch.Tensor) else None
            if reference is not None and spec.kind is InputKind.USER_INPUT:
                graph["inputs"][spec.arg.name] = reference
            elif reference is not None and spec.target:
                graph["weights"][spec.target] = reference
        return graph

    def _describe_constants(self, values: Sequence[Any], weights: dict[str, Any]) -> None:
        """Note the constants of the code, which are recorded when a node reads them (CAP-26)."""
        for spec, value in zip(self._program.graph_signature.input_specs, values, strict=True):
            if spec.target and spec.target not in weights and isinstance(value, torch.Tensor):
                reference = self._op_recorder.reference(value)
                if reference is not None:
                    weights[spec.target] = reference

    def _describe_outputs(self, outputs: Sequence[Any], result: Any) -> list[dict[str, Any]]:
        """The nodes that the graph returns, and the slots of the model's result that they are in."""
        slots: dict[int, list[str]] = {}
        for leaf in walk(result, KINDS):
            slots.setdefault(id(leaf.value), []).append(leaf_slot("output", leaf.name))
        (nodes,) = self._program.graph_module.graph.output_node().args
        return [
            {"node": node.name, "slots": slots.get(id(value), [])}
            for node, value in zip(nodes, outputs, strict=True)
            if isinstance(node, Node)
        ]

    def node(
        self,
        name: str,
        node: Node,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """Run a node and record it."""
        known, args = operator_of(node, args)
        outer = self._module_call(node)
        call = None
        if outer.point.site in self._sites:
            call = self._recorder.inner(name, "op", outer=outer)
        return self._op_recorder.record(
            known, call, (outer, source_of(node)), args, kwargs, compute, node=name
        )

    def _module_call(self, node: Node) -> Call:
        """The innermost call of a module that a node lies in."""
        call = self._root
        for key, (known, _) in (node.meta.get("nn_module_stack") or {}).items():
            if key not in self._calls:
                path = ".".join(part for part in known.split(".") if part != "_orig_mod")
                point = self._recorder.points.get(self._aliases.get(path, path))
                if point is None:  # a module that is made in the forward
                    continue
                is_same = point is call.point  # what torch.compile made of a module, and that itself
                entered = call if is_same else self._enter(point) if path else self._root
                if entered is None:
                    continue
                self._calls[key] = entered
            call = self._calls[key]
        return call

    def _enter(self, point: Point) -> Call | None:
        """Count a call of a module, and end it at once: its nodes need not be neighbours."""
        call = self._recorder.enter(point, id(point))
        if call is not None:
            self._recorder.leave(point, id(point))
            self._recorder.finish(call)
        return call


_RunNode = Callable[[str, Node, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]


class _NodeInterpreter(Interpreter):
    """Runs a graph node by node, and the graphs that operators of it take."""

    def __init__(self, graph: GraphModule, node: _RunNode, prefix: str = "") -> None:
        super().__init__(graph)
        self.extra_traceback = False  # an error of a node is raised as the model's own
        self._node = node
        self._prefix = prefix

    def run_node(self, n: Node) -> Any:
        compute = partial(super().run_node, n)
        if n.op == "call_function":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return self._node(self._prefix + n.name, n, args, kwargs, compute)
        value = compute()
        if n.op == "get_attr" and isinstance(value, GraphModule):
            return _NodeInterpreter(value, self._node, f"{self._prefix}{n.name}.").run
        return value


def _of_model(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of code outside of torch, from the outermost function `forward` on."""
    within = dropwhile(lambda frame: frame.name != "forward", frames)
    return [frame for frame in within if not frame.filename.startswith(INNER)]


@contextlib.contextmanager
def _kept_attributes(model: nn.Module) -> Iterator[None]:
    """Give modules their attributes back: torch puts copies in the place of tuples, lists and dicts."""
    saved = [(module, {**vars(module)}) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in saved:
            vars(module).update(attributes)


@contextlib.contextmanager
def _all_frames() -> Iterator[bool]:
    """Have nodes that are made in the block keep the frames of all functions, not only those named `forward`.

    Yields:
        Whether this release of torch can do that.
    """
    from torch.fx.proxy import TracerBase

    name = "_filter_traceback_frames"
    if name not in vars(TracerBase):
        yield False
        return

    def frames_of_model(_: Any, summary: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(_of_model(summary))

    with replace_attribute(TracerBase, name, lambda _: frames_of_model):
        yield True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back warnings, logs and the standard error stream, to which torch prints graphs.

    The text of the stream is written after all, unless the export fails: the model may have printed it.
    """
    stream = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(stream):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
    sys.stderr.write(stream.getvalue())
