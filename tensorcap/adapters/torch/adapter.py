"""The adapter for torch modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters.protocol import CalledRoot, Site
from tensorcap.adapters.torch.backward import backward, own_gradients, with_labels
from tensorcap.adapters.torch.capture_gaps import attention_note, capture_gaps, eagerly
from tensorcap.adapters.torch.description import describe, tree
from tensorcap.adapters.torch.gradients import Gradients
from tensorcap.adapters.torch.op_mode import ops
from tensorcap.adapters.torch.parameters import parameters
from tensorcap.adapters.torch.perturbation import perturb
from tensorcap.adapters.torch.points import tap_points
from tensorcap.adapters.torch.rerun import ModuleRerun
from tensorcap.adapters.torch.roots import Roots
from tensorcap.adapters.torch.staging import Staging
from tensorcap.adapters.torch.substitution import Exchange
from tensorcap.adapters.torch.tap import record_inputs, tap
from tensorcap.adapters.torch.tensor_leaves import TensorLeaves
from tensorcap.adapters.torch.tensors import device_named, dtype_named, from_stored
from tensorcap.recording.options import CaptureOptions
from tensorcap.recording.recorder import Recorder
from tensorcap.recording.substitution import Substitution
from tensorcap.workload.sources import class_name, find_sources
from tensorcap.workload.workload import StoredInput, Workload
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key

_NO_FORWARD: Final = "has no forward of its own"


class TorchAdapter:
    """Sites are modules; a site's name is the module's path."""

    def sites(self, model: nn.Module, *, eager: bool = False) -> list[Site]:
        """All modules once; those that run inside a compiled or scripted one cannot be captured.

        Raises:
            UsageError: It is something else of torch.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"a {class_name(model)} is no torch.nn.Module, expected one",
                hint="Of a module itself, level export makes an exported program.",
            )
        modules, aliases = tree(model)
        further: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            further.setdefault(name, []).append(alias)
        in_the_way = capture_gaps(modules, eager=eager)
        found = []
        for name, module in modules.items():
            obstacle = in_the_way[name]
            note = obstacle or (_NO_FORWARD if _is_bare(module) else "")
            found.append(Site(name, tuple(further.get(name, ())), note, is_capturable=not obstacle))
        return found

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
        note = attention_note(model, modules.values()) if plan.level == "module" else ""
        if note:
            recorder.facts.setdefault("notes", []).append(note)
        with eagerly() if plan.eager else nullcontext(), Staging(recorder) as staging:
            leaves = TensorLeaves(recorder, staging)
            gradients = Gradients(leaves, inputs=plan.inputs) if plan.grads else None
            if plan.watch or plan.level == "op":
                # what lies within a module is recorded by its name, whether or not the module is
                names = [name for name, point in recorder.points.items() if point.is_capturable]
            with (
                parameters(modules, leaves) if plan.params else nullcontext(),
                gradients.watching(modules) if gradients else nullcontext(),
                tap_points(plan.watch, leaves, eager=plan.eager),
                ops(model, modules, plan.ops_in, leaves) if plan.level == "op" else nullcontext(),
                tap(
                    modules,
                    model,
                    names,
                    leaves,
                    inputs=plan.inputs,
                    gradients=gradients,
                    exchange=None if substitution is None else Exchange(substitution),
                ),
            ):
                yield

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Classes, parameters, configuration, settings."""
        return describe(model)

    def sources(self, model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
        """The text of the classes of the named modules."""
        modules, _ = tree(model)
        return find_sources(modules[name] for name in names)

    def seed(self, seed: int) -> None:
        """Set the random generators of all devices."""
        torch.manual_seed(seed)

    def dtype(self, name: str) -> torch.dtype:
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
        values = _with_inputs(workload, inputs) if inputs else workload.inputs
        values = dict(values) if isinstance(values, Mapping) else tuple(values)
        if dtype is not None:
            cast_model(model, dtype_named(dtype))
        if input_dtype is not None:
            wanted = dtype_named(input_dtype)
            values = _mapped(values, lambda t: t.to(wanted) if t.is_floating_point() else t)
        if device is not None:
            place = device_named(device)
            model.to(place)
            values = _mapped(values, lambda t: t.to(place))
        return replace(workload, model=model, inputs=values)

    def perturb(self, workload: Workload, dtype: str) -> Workload:
        """Perturb floating inputs, or the output of the token embedding."""
        return perturb(workload, dtype_named(dtype), _mapped)

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Call the model, or the workload's own function, once."""
        if grads:
            workload = with_labels(workload)
        call = workload.model if workload.run is None else workload.run
        first = () if workload.run is None else (workload.model,)
        with torch.set_grad_enabled(grads), own_gradients(workload.model) if grads else nullcontext():
            if isinstance(workload.inputs, Mapping):
                result = call(*first, **workload.inputs)
            else:
                result = call(*first, *workload.inputs)
            if grads:
                backward(workload.model, result)

    def attending_openly(self, workload: Workload) -> Workload | None:
        """Hugging Face's eager attention, on the same model."""
        change = getattr(workload.model, "set_attn_implementation", None)
        own = getattr(getattr(workload.model, "config", None), "_attn_implementation", None)
        if change is None or own is None or own == "eager":
            return None
        with suppress(ValueError):  # of a class that has it in one way only
            change("eager")
            return workload
        return None

    def rerun(
        self, workload: Workload, substitution: Substitution, site: str, key: Key
    ) -> ModuleRerun | None:
        """Run the workload until a call of a module, which can then be made again."""
        found = ModuleRerun(workload.model, substitution, site, key)
        return found if found.find(lambda: self.run(workload)) else None

    def export(self, workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
        """Export the model by torch.export, not strictly."""
        from tensorcap.adapters.torch.export import export

        return export(workload, plan)

    def keep_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the tensors among `inputs`."""
        record_inputs(inputs, recorder)

    def roots(
        self, pattern: str | None, take: Callable[[nn.Module], bool]
    ) -> AbstractContextManager[list[CalledRoot]]:
        """Look out for modules that no other module calls."""
        return Roots(pattern, take).watch()


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers, as loading a checkpoint in `dtype` would; other buffers stay.

    `model.to(dtype)` would round the tables of rotary embeddings too, which no loaded model has rounded.
    """
    kept = _kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and not kept(path, name):
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            is_saved = name not in module._non_persistent_buffers_set
            if buffer is not None and is_saved and buffer.is_floating_point() and not kept(path, name):
                module._buffers[name] = buffer.to(dtype)


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> Callable[[str, str], bool]:
    """Which parameters a Hugging Face model loads in float32 whatever dtype it is asked for."""
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return lambda path, name: not names.isdisjoint((*path.split("."), name))


def _is_bare(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _with_inputs(
    workload: Workload, inputs: Mapping[str, StoredInput]
) -> Mapping[str, Any] | tuple[Any, ...]:
    """Put archived inputs in the place of the workload's own, by argument and field, or by position."""
    own = workload.inputs
    if isinstance(own, Mapping):
        values = dict(own)
    else:
        names = [str(i) for i in range(len(own))]
        if workload.run is None:
            parameters = [*inspect.signature(workload.model.forward).parameters]
            names = [*parameters[: len(own)], *(f"args.{i}" for i in range(len(own) - len(parameters)))]
        values = dict(zip(names, own, strict=True))
    left = {name: from_stored(*stored) for name, stored in inputs.items()}
    values = {name: _substituted(value, name, left) for name, value in values.items()}
    for name, tensor in left.items():
        if "." in name or not isinstance(own, Mapping):
            raise UsageError(f"input {name!r} of the archive is none of the workload's: {', '.join(values)}")
        values[name] = tensor
    return values if isinstance(own, Mapping) else tuple(values.values())


def _substituted(value: Any, name: str, left: dict[str, torch.Tensor]) -> Any:
    """The value with its tensors taken out of `left`, which has them by the names of `structure.walk`."""
    if isinstance(value, torch.Tensor):
        return left.pop(name, value)
    if type(value) is dict:
        return {key: _substituted(item, f"{name}.{key}", left) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return type(value)(*(_substituted(item, f"{name}.{field}", left) for field, item in fields))
    if type(value) in (list, tuple):
        return type(value)(_substituted(item, f"{name}.{i}", left) for i, item in enumerate(value))
    return left.pop(name, value)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same containers with every tensor changed; objects of other classes are left as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value
