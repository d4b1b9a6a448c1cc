"""The adapter for torch modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from tensorcap.adapters import Site
from tensorcap.adapters._torch_description import describe, sources, tree
from tensorcap.adapters._torch_leaves import Leaves
from tensorcap.adapters._torch_perturbation import perturb
from tensorcap.adapters._torch_tap import is_compiled, record_inputs, tap
from tensorcap.adapters._torch_tensors import device_named, dtype_named, from_stored
from tensorcap.plan import Plan
from tensorcap.recorder import Recorder
from tensorcap.workload import StoredInput, Workload
from tensorcap_formats.errors import UsageError

_SCRIPTED: Final = "scripted (torch.jit)"
_COMPILED: Final = "inside a compiled graph (torch.compile)"
_NO_FORWARD: Final = "has no forward of its own"


class TorchAdapter:
    """Sites are modules; a site's name is the module's path."""

    def sites(self, model: nn.Module) -> list[Site]:
        """All modules once; those that run inside a compiled or scripted one cannot be captured."""
        modules, aliases = tree(model)
        further: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            further.setdefault(name, []).append(alias)
        found = []
        obstacles: dict[str, str] = {}
        for name, module in modules.items():
            obstacle = obstacles.get(name.rpartition(".")[0], "") if name else ""
            below = obstacle
            if isinstance(module, torch.jit.ScriptModule):
                obstacle = below = obstacle or _SCRIPTED
            elif getattr(module, "_compiled_call_impl", None) is not None:
                obstacle = below = obstacle or _COMPILED
            elif _is_compiled_wrapper(module) or is_compiled(module.forward):
                below = obstacle or _COMPILED
            obstacles[name] = below
            note = obstacle or (_NO_FORWARD if _is_bare(module) else "")
            found.append(Site(name, tuple(further.get(name, ())), note, is_capturable=not obstacle))
        return found

    @contextmanager
    def tap(self, model: nn.Module, names: Collection[str], recorder: Recorder, plan: Plan) -> Iterator[None]:
        """Hook the named modules."""
        modules, _ = tree(model)
        leaves = Leaves(recorder)
        with tap(modules, model, names, leaves, inputs=plan.inputs):
            yield

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Classes, parameters, configuration, settings."""
        return describe(model)

    def sources(self, model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
        """The text of the classes of the named modules."""
        modules, _ = tree(model)
        return sources(modules[name] for name in names)

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

    def run(self, workload: Workload) -> None:
        """Call the model, or the workload's own function, once."""
        call = workload.model if workload.run is None else workload.run
        first = () if workload.run is None else (workload.model,)
        with torch.no_grad():
            if isinstance(workload.inputs, Mapping):
                call(*first, **workload.inputs)
            else:
                call(*first, *workload.inputs)

    def keep_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the tensors among `inputs`."""
        record_inputs(inputs, recorder)


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


def _is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether the module is what torch.compile made of another; its own arguments and result are seen."""
    return type(module).__module__ == "torch._dynamo.eval_frame" and hasattr(module, "_orig_mod")


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
