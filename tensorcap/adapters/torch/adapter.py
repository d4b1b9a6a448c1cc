"""The adapter for torch modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from tensorcap.adapters.operation_graph import OperationGraph
from tensorcap.adapters.protocol import Adapter, CalledRoot, Site, further_names
from tensorcap.adapters.torch.call_inputs import put_back
from tensorcap.adapters.torch.capture_gaps import (
    attention_note,
    capture_gaps,
    eager_mode,
    fused_note,
    graph_note,
    layers_in_parts,
)
from tensorcap.adapters.torch.description import describe
from tensorcap.adapters.torch.gradients import Gradients, backward, clear_gradients, with_labels
from tensorcap.adapters.torch.grafts import TorchGrafts
from tensorcap.adapters.torch.model_inputs import map_tensors, perturb, record_inputs, with_archived_inputs
from tensorcap.adapters.torch.modules import cast_model, has_no_forward, tree, unwrapped
from tensorcap.adapters.torch.op_mode import record_ops
from tensorcap.adapters.torch.parallel_layers import place_parallel_layers
from tensorcap.adapters.torch.parameters import record_parameters
from tensorcap.adapters.torch.points import tap_points
from tensorcap.adapters.torch.rerun import ModuleRerun
from tensorcap.adapters.torch.roots import Roots
from tensorcap.adapters.torch.staging_buffer import StagingBuffer
from tensorcap.adapters.torch.tap import tap
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves
from tensorcap.adapters.torch.tensors import device_named, dtype_named
from tensorcap.adapters.torch.token_model import TorchTokenModel
from tensorcap.recording import CaptureOptions, Recorder, Substitution
from tensorcap.workload import StoredInput, TokenModel, Workload, class_name, find_sources
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key


class TorchAdapter(Adapter):
    """Sites are modules; a site's name is the module's path."""

    has_operations: ClassVar[bool] = True

    def list_sites(self, model: nn.Module, *, eager: bool = False) -> list[Site]:
        """All modules, each once; those that run inside a compiled or scripted one cannot be captured.

        Raises:
            UsageError: The model is no module.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"a {class_name(model)} is no torch.nn.Module, expected one",
                hint="Of a module itself, level export makes an exported program.",
            )
        modules, aliases = tree(model)
        further = further_names(aliases)
        gaps = capture_gaps(modules, eager=eager)
        sites = []
        for name, module in modules.items():
            gap = gaps[name]
            note = gap or ("has no forward of its own" if has_no_forward(module) else "")
            sites.append(Site(name, further.get(name, ()), note, is_capturable=not gap))
        return sites

    @contextmanager
    def tap(
        self,
        model: nn.Module,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
    ) -> Iterator[None]:
        """Hook the named modules."""
        modules, _ = tree(model)
        notes = [fused_note(modules.values())]
        if plan.level == "module":
            notes += [attention_note(model, map(unwrapped, modules.values())), graph_note(modules)]
        if any(notes):
            recorder.facts.setdefault("notes", []).extend(filter(None, notes))
        with (
            eager_mode() if plan.eager else nullcontext(),
            layers_in_parts(modules.values()),
            StagingBuffer(recorder) as staging,
        ):
            leaves = TensorLeaves(recorder, staging)
            place_parallel_layers(modules, recorder)
            gradients = Gradients(leaves, inputs=plan.inputs) if plan.grads else None
            if plan.watch or plan.level == "op":
                # points and ops within a module are recorded by its name, whether or not the module is
                names = [name for name, point in recorder.points.items() if point.is_capturable]
            with (
                leaves.placements.watch(),
                record_parameters(modules, leaves) if plan.params else nullcontext(),
                gradients.watch_parameters(modules) if gradients else nullcontext(),
                tap_points(plan.watch, leaves, eager=plan.eager),
                record_ops(model, modules, plan.ops_in, leaves) if plan.level == "op" else nullcontext(),
                tap(
                    modules,
                    model,
                    names,
                    leaves,
                    inputs=plan.inputs,
                    gradients=gradients,
                    substitution=substitution,
                ),
            ):
                yield

    def describe(self, model: nn.Module, *, digests: bool = False) -> dict[str, Any]:
        """Classes, parameters, configuration, settings."""
        return describe(model, digests=digests)

    def read_sources(self, model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
        """The text of the classes of the named modules."""
        modules, _ = tree(model)
        return find_sources(unwrapped(modules[name]) for name in names)

    def process_rank(self) -> tuple[int, int] | None:
        """The rank in the default process group, once there is one."""
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            return None
        return distributed.get_rank(), distributed.get_world_size()

    def gather_texts(self, text: str) -> list[str]:
        """What each rank of the default process group says here, by rank."""
        from torch import distributed

        rank = self.process_rank()
        if rank is None:
            return [text]
        texts: list[Any] = [None] * rank[1]
        distributed.all_gather_object(texts, text)
        return texts

    def grafts(self, reference: Workload, target: Workload) -> TorchGrafts:
        """Modules of the same path in both models.

        Raises:
            UsageError: The reference is no torch model.
        """
        if not isinstance(reference.model, nn.Module):
            raise UsageError(f"the reference is a {class_name(reference.model)}, expected a torch module")
        return TorchGrafts(reference, target)

    def seed(self, seed: int) -> None:
        """Set the random generators of all devices."""
        torch.manual_seed(seed)

    def dtype_named(self, name: str) -> torch.dtype:
        """The dtype of that name."""
        return dtype_named(name)

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """Put archived inputs in, cast, move; buffers that are not saved with a model keep their precision.

        Raises:
            UsageError: An input of the archive is none of the model's arguments; a dtype or a device is
                unknown.
        """
        model = workload.model
        values = with_archived_inputs(workload, inputs) if inputs else workload.inputs
        values = dict(values) if isinstance(values, Mapping) else tuple(values)
        if dtype is not None:
            cast_model(model, dtype_named(dtype))
        if input_dtype is not None:
            wanted = dtype_named(input_dtype)
            values = map_tensors(values, lambda t: t.to(wanted) if t.is_floating_point() else t)
        if device is not None:
            target_device = device_named(device)
            model.to(target_device)
            values = map_tensors(values, lambda t: t.to(target_device))
        return replace(workload, model=model, inputs=values)

    def perturb(self, workload: Workload, dtype: str) -> Workload:
        """Perturb floating inputs, or the output of the token embedding."""
        return perturb(workload, dtype_named(dtype))

    def token_model(self, workload: Workload) -> TokenModel:
        """A workload whose model returns logits, run on other tokens."""
        return TorchTokenModel(workload)

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Call the model, or the workload's own function, once."""
        if grads:
            workload = with_labels(workload)
        cleared = clear_gradients(workload.model) if grads else nullcontext()
        with torch.set_grad_enabled(grads), cleared, put_back(workload.inputs):
            result = workload.call(workload.model)
            if grads:
                backward(workload.model, result)

    def with_eager_attention(self, workload: Workload) -> Workload | None:
        """Hugging Face's eager attention, on the same model."""
        set_attention = getattr(workload.model, "set_attn_implementation", None)
        own = getattr(getattr(workload.model, "config", None), "_attn_implementation", None)
        if set_attention is None or own is None or own == "eager":
            return None
        with suppress(ValueError):  # of a class with one implementation only
            set_attention("eager")
            return workload
        return None

    def rerun(
        self, workload: Workload, substitution: Substitution, site: str, key: Key
    ) -> ModuleRerun | None:
        """Run the workload until a call of a module, which can then be made again."""
        rerun = ModuleRerun(workload.model, substitution, site, key)
        return rerun if rerun.find_call(lambda: self.run(workload)) else None

    def export(self, workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
        """Export the model by torch.export, not strictly."""
        from tensorcap.adapters.torch.export import export

        return export(workload, plan)

    def operation_graph(self, workload: Workload, decompositions: str) -> OperationGraph:
        """Export the model by torch.export, not strictly."""
        from tensorcap.adapters.torch.exported_graph import ExportedGraph

        return ExportedGraph.of(workload, decompositions)

    def program_workload(self, program: Any, inputs: Any) -> Workload:
        """The program as a model, and its inputs by the names of its graph."""
        from tensorcap.adapters.torch.program_module import named_inputs, program_module

        if not isinstance(program, torch.export.ExportedProgram):
            return super().program_workload(program, inputs)
        return Workload(program_module(program), named_inputs(program, inputs))

    def record_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the tensors among `inputs`."""
        record_inputs(inputs, recorder)

    def watch_roots(
        self, pattern: str | None, take: Callable[[nn.Module], bool]
    ) -> AbstractContextManager[list[CalledRoot]]:
        """Find the modules that no other module calls."""
        return Roots(pattern, take).watch()
