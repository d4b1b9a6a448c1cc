"""The adapter for max.nn models, which MAX compiles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Final

from tensorcap.adapters.max.description import describe
from tensorcap.adapters.max.engine import LayerList, MaxDType
from tensorcap.adapters.max.foreign_program import ForeignProgram
from tensorcap.adapters.max.model import MaxModel
from tensorcap.adapters.max.model_inputs import cast_inputs, perturb, record_inputs, with_archived_inputs
from tensorcap.adapters.max.modules import module_of, tree
from tensorcap.adapters.max.parameters import is_in_graph, own_weights, record_parameters
from tensorcap.adapters.max.roots import Roots
from tensorcap.adapters.max.tap import ModelTap, compile_ahead
from tensorcap.adapters.max.tensors import dtype_named
from tensorcap.adapters.protocol import (
    PROBE_HINT,
    Adapter,
    CalledRoot,
    CompiledAhead,
    Site,
    further_names,
)
from tensorcap.recording import CaptureOptions, Recorder, Substitution
from tensorcap.workload import StoredInput, Workload, class_name, find_sources
from tensorcap_formats.errors import UsageError

_A_LIST: Final = "a list, whose members are called one by one"
_FUSED: Final = "code around it uses its weights and does not call it"


class MaxAdapter(Adapter):
    """Sites are modules; a site's name is the module's path, as torch would name it."""

    title: ClassVar[str] = "MAX"

    def list_sites(self, model: Any, *, eager: bool = False) -> list[Site]:
        """All modules, each once."""
        modules, aliases = tree(module_of(model))
        further = further_names(aliases)
        return [
            Site(name, further.get(name, ()), _A_LIST if type(module) is LayerList else "")
            for name, module in modules.items()
        ]

    @contextmanager
    def tap(
        self,
        model: Any,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
    ) -> Iterator[None]:
        """Run the model through an instrumented graph, and capture graphs that a program makes of it."""
        self.refuse_requests(plan, why="runs compiled graphs", hint=PROBE_HINT)
        known = MaxModel.of(model)
        modules, _ = tree(known.module)
        if plan.params:
            record_parameters(known, modules, recorder)
        program = ForeignProgram(modules, names, recorder, plan, substitution)
        model_tap = ModelTap(known, names, recorder, plan, substitution, program)
        known.compiled.tapped_run = model_tap.run
        try:
            with program.watch():
                yield
        finally:
            known.compiled.tapped_run = None
            for name, module in modules.items():
                point, weights = recorder.points[name], own_weights(module).values()
                if recorder.last_step >= 0 and not point.calls and weights:
                    unused = model_tap.unused
                    is_used = any(map(is_in_graph, weights)) if unused is None else name not in unused
                    point.note = _FUSED if is_used else "none of its weights is in the graph"

    def describe(self, model: Any, *, digests: bool = False) -> dict[str, Any]:
        """Classes, weights, settings and configuration."""
        module_of(model)
        return describe(MaxModel.of(model), digests=digests)

    def read_sources(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """The text of the classes of the named modules."""
        modules, _ = tree(module_of(model))
        return find_sources(modules[name] for name in names)

    def seed(self, seed: int) -> None:
        """Do nothing: a graph holds the seeds of its random operations."""

    def dtype_named(self, name: str) -> MaxDType:
        """The dtype of that name.

        Raises:
            UsageError: There is no floating dtype of that name.
        """
        return dtype_named(name)

    def load(
        self,
        path: str,
        settings: Mapping[str, Any],
        inputs: Mapping[str, StoredInput] | None = None,
        *,
        seed: int = 0,
    ) -> Workload:
        """The workload of MAX's own pipeline for a Hugging Face model, by folder or id.

        Raises:
            UsageError: There is no such model, pipeline, setting or input; it is a file of Python.
        """
        from tensorcap.adapters.max.pipeline import load_pipeline

        if path.endswith(".py"):
            return super().load(path, settings, inputs, seed=seed)
        return load_pipeline(path, settings, inputs)

    def check(self, path: str, settings: Mapping[str, Any]) -> None:
        """Refuse a pipeline that MAX does not have, or not so.

        Raises:
            UsageError: There is no such model, pipeline or setting.
        """
        from tensorcap.adapters.max.pipeline import check_pipeline

        check_pipeline(path, settings)

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """Put archived inputs in, and cast them; a model's dtype and devices are those that it was made for.

        Raises:
            UsageError: An input of the archive is none of the model's arguments; another dtype or device is
                wanted.
        """
        for option, value in (("dtype", dtype), ("device", device)):
            if value is not None:
                raise UsageError(
                    f"{option} {value}: a MAX model has its {option} from where it is made",
                    hint=f"Let the function that makes the workload take {option}=."
                    if option == "dtype"
                    else "MaxModel(module, input_types=…, devices=…) says where it runs.",
                )
        if inputs:
            workload = replace(workload, inputs=with_archived_inputs(workload, inputs))
        if input_dtype is None:
            return workload
        return replace(workload, inputs=cast_inputs(workload.inputs, dtype_named(input_dtype)))

    def perturb(self, workload: Workload, dtype: str) -> Workload:
        """Perturb floating inputs."""
        return perturb(workload, dtype)

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Call the model, or the workload's own function, once."""
        workload.call(MaxModel.of(workload.model))

    def compile_ahead(self, workload: Workload) -> list[CompiledAhead]:
        """Compile the graph with taps and switches, and that without, for the shapes of the workload."""
        model = MaxModel.of(workload.model)
        names = [site.name for site in self.list_sites(workload.model) if site.is_capturable]
        graphs = compile_ahead(model, names, lambda: self.run(replace(workload, model=model)))
        if not graphs:
            raise UsageError(
                f"{class_name(model.module)}: the workload does not call its model, expected at least one run"
            )
        return [CompiledAhead(graph.text, graph.seconds, graph.is_cached) for graph in graphs]

    def export(self, workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
        """Refuse: MAX has no other graph than the one that it runs."""
        raise UsageError("level export: MAX runs compiled graphs in any case, expected level module")

    def record_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the arrays among `inputs`."""
        record_inputs(inputs, recorder)

    def watch_roots(
        self, pattern: str | None, take: Callable[[Any], bool]
    ) -> AbstractContextManager[list[CalledRoot]]:
        """Find the models that a program makes graphs of."""
        return Roots(pattern, take).watch()
