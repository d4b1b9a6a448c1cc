"""The adapter for max.nn models, which MAX compiles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tensorcap.adapters.max.description import describe
from tensorcap.adapters.max.engine import LayerList, MaxDType, Module, bits, buffer_of
from tensorcap.adapters.max.executions import Tapped, weights_of
from tensorcap.adapters.max.foreign_program import Foreign
from tensorcap.adapters.max.inputs import ARRAYS, named
from tensorcap.adapters.max.model import MaxModel
from tensorcap.adapters.max.modules import is_in_graph, own_weights, tree
from tensorcap.adapters.max.playback import record
from tensorcap.adapters.max.roots import Roots
from tensorcap.adapters.protocol import CalledRoot, Site
from tensorcap.recording.options import CaptureOptions
from tensorcap.recording.recorder import Call, Recorder
from tensorcap.recording.structure import rebuilt
from tensorcap.recording.substitution import Substitution
from tensorcap.workload.sources import class_name, find_sources
from tensorcap.workload.workload import StoredInput, Workload
from tensorcap_formats.dtypes import DTYPES, decode, encode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import FLOAT_FORMATS
from tensorcap_formats.keys import Key, escape

_A_LIST: Final = "a list, whose members are called one by one"
_UNUSED: Final = "none of its weights is in the graph"
_FUSED: Final = "code around it uses its weights and does not call it"


class MaxAdapter:
    """Sites are modules; a site's name is the module's path, as torch would have it."""

    def sites(self, model: Any, *, eager: bool = False) -> list[Site]:
        """All modules once."""
        modules, aliases = tree(_module(model))
        further: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            further.setdefault(name, []).append(alias)
        return [
            Site(name, tuple(further.get(name, ())), _A_LIST if type(module) is LayerList else "")
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
        """Have runs of the model go through a graph that tells of itself."""
        _refuse(plan)
        known = MaxModel.of(model)
        modules, _ = tree(known.module)
        if plan.params:
            _record_weights(known, modules, recorder)
        foreign = Foreign(modules, names, recorder, plan, substitution)
        tapped = Tapped(known, names, recorder, plan, substitution, foreign)
        known.compiled.tapped = tapped.run
        try:
            with foreign.watch():
                yield
        finally:
            known.compiled.tapped = None
            for name, module in modules.items():
                point, weights = recorder.points[name], own_weights(module).values()
                if recorder.last_step >= 0 and not point.calls and weights:
                    unused = tapped.unused
                    is_used = any(map(is_in_graph, weights)) if unused is None else name not in unused
                    point.note = _FUSED if is_used else _UNUSED

    def describe(self, model: Any) -> dict[str, Any]:
        """Classes, weights, configuration."""
        _module(model)
        return describe(MaxModel.of(model))

    def sources(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """The text of the classes of the named modules."""
        modules, _ = tree(_module(model))
        return find_sources(modules[name] for name in names)

    def seed(self, seed: int) -> None:
        """Nothing: a graph has the seeds of its random operations in it."""

    def dtype(self, name: str) -> MaxDType:
        """The dtype of that name.

        Raises:
            UsageError: There is no floating dtype of that name.
        """
        short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
        found = getattr(MaxDType, short.get(name, name), None)
        if not isinstance(found, MaxDType) or not found.is_float():
            raise UsageError(
                f"dtype {name!r} is no floating dtype of MAX",
                hint="Known are: bfloat16, float16, float32, float64.",
            )
        return found

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """Put archived inputs in; a model's dtype and devices are those that it was made for.

        Raises:
            UsageError: An input of the archive is none of the model's arguments; another dtype or device is
                wanted.
        """
        for what, wanted in (("dtype", dtype), ("device", device)):
            if wanted is not None:
                raise UsageError(
                    f"{what} {wanted}: a MAX model has its {what} from where it is made",
                    hint=f"Let the function that makes the workload take {what}=."
                    if what == "dtype"
                    else "MaxModel(module, input_types=…, devices=…) says where it runs.",
                )
        if not inputs:
            return workload
        return replace(workload, inputs=_with_inputs(workload, inputs))

    def perturb(self, workload: Workload, dtype: str) -> Workload:
        """Multiply floating inputs by 1 plus or minus the machine epsilon of a dtype.

        Raises:
            UsageError: There is none, or no such dtype.
        """
        if dtype not in DTYPES or dtype not in FLOAT_FORMATS:
            raise UsageError(f"dtype {dtype!r}: its machine epsilon is not known")
        epsilon = FLOAT_FORMATS[dtype].epsilon
        signs = np.random.default_rng(0)
        changed = 0

        def change(path: str, array: Any) -> Any:
            nonlocal changed
            stored, own = bits(array)
            if own.kind != "float":
                return array
            changed += 1
            values = decode(stored, own).astype(np.float64)
            return buffer_of(encode(values * (1 + epsilon * signs.choice((-1, 1), values.shape)), own), own)

        values = rebuilt(workload.inputs, ARRAYS, change)
        if not changed:
            raise UsageError(
                f"{class_name(_module(workload.model))}: has no floating input to perturb",
                hint="A baseline by another precision needs none.",
            )
        return replace(workload, inputs=values)

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Call the model, or the workload's own function, once."""
        model = MaxModel.of(workload.model)
        call = model if workload.run is None else workload.run
        first = () if workload.run is None else (model,)
        if isinstance(workload.inputs, Mapping):
            call(*first, **workload.inputs)
        else:
            call(*first, *workload.inputs)

    def attending_openly(self, workload: Workload) -> None:
        """None: MAX has no such choice."""

    def rerun(self, workload: Workload, substitution: Substitution, site: str, key: Key) -> None:
        """None: what is compiled has no modules that could be called again."""

    def export(self, workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
        """Refuse: there is no other graph than the one that is run."""
        raise UsageError("level export: MAX runs compiled graphs in any case, expected level module")

    def keep_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the arrays among `inputs`."""
        call = Call(recorder.points[""], 0, 0)

        def keep(path: str, array: Any) -> Any:
            record(recorder, call, f"given.{escape(path)}", array, required=True)
            return array

        rebuilt(inputs, ARRAYS, keep)

    def roots(
        self, pattern: str | None, take: Callable[[Any], bool]
    ) -> AbstractContextManager[list[CalledRoot]]:
        """Look out for models whose graphs a program makes."""
        return Roots(pattern, take).watch()


def _module(model: Any) -> Module:
    module = model.module if isinstance(model, MaxModel) else model
    if not isinstance(module, Module):
        raise UsageError(f"a {class_name(module)} is no max.nn.Module, expected one")
    return module


def _refuse(plan: CaptureOptions) -> None:
    """Refuse what cannot be seen of compiled graphs."""
    for what, is_asked in (
        (f"level {plan.level}", plan.level != "module"),
        ("watched functions", bool(plan.watch)),
        ("gradients", plan.grads),
    ):
        if is_asked:
            raise UsageError(
                f"{what}: not to be had of MAX, which runs compiled graphs",
                hint="tensorcap.probe in the model's code names a value within a module.",
            )


def _record_weights(model: MaxModel, modules: Mapping[str, Module], recorder: Recorder) -> None:
    """Record each module's own weights, as they are given to MAX."""
    full = {id(weight): name for name, weight in model.module.raw_state_dict().items()}
    values = weights_of(model)
    for name, module in modules.items():
        call = Call(recorder.points[name], 0, 0, is_of_run=True)
        for attribute, weight in own_weights(module).items():
            slot = f"param.{escape(attribute)}"
            try:
                record(recorder, call, slot, values[full[id(weight)]])
            except KeyError:
                recorder.lose(call.point, slot, "no value among the model's weights", call=call)


def _with_inputs(workload: Workload, inputs: Mapping[str, StoredInput]) -> dict[str, Any] | tuple[Any, ...]:
    """Put archived inputs in the place of the workload's own, by argument and field, or by position."""
    own = workload.inputs
    if isinstance(own, Mapping):
        values = dict(own)
    elif workload.run is None:
        values = dict(named(MaxModel.of(workload.model), own, {}))
    else:
        values = {str(i): value for i, value in enumerate(own)}
    left = {name: buffer_of(*stored) for name, stored in inputs.items()}
    found = rebuilt(values, ARRAYS, lambda name, array: left.pop(name, array))
    for name in left:
        raise UsageError(f"input {name!r} of the archive is none of the workload's: {', '.join(values)}")
    return found if isinstance(own, Mapping) else tuple(found.values())
