"""The adapter for JAX models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Final

import jax
from jax import numpy as jnp

from tensorcap.adapters.array_records import record_inputs
from tensorcap.adapters.input_arrays import replace_inputs
from tensorcap.adapters.jax.call_tracer import CallTracer
from tensorcap.adapters.jax.description import describe, describe_modules
from tensorcap.adapters.jax.flax_hooks import hook_calls
from tensorcap.adapters.jax.model import UNDER_CAPTURE, JaxModel
from tensorcap.adapters.jax.modules import is_container, model_argument_names, tree
from tensorcap.adapters.jax.runs import TappedRuns
from tensorcap.adapters.jax.tensors import ARRAYS, dtype_named, from_stored, kinds, to_arrays
from tensorcap.adapters.jax.variables import owned_variables, record_variables
from tensorcap.adapters.protocol import PROBE_HINT, Adapter, Site, further_names
from tensorcap.recording import CaptureOptions, Recorder, Substitution, collect_probes, rebuild, walk
from tensorcap.workload import StoredInput, Workload, find_sources
from tensorcap_formats.errors import UsageError

_A_LIST: Final = "a list or a mapping, whose members are called one by one"
_HOLDS: Final = "holds parameters; a function has no modules"


class JaxAdapter(Adapter):
    """Sites are the modules of Flax; those of Linen without parameters are known once they are called."""

    title: ClassVar[str] = "JAX"

    def list_sites(self, model: Any, *, eager: bool = False) -> list[Site]:
        """All modules of NNX; else the model, and what its parameters lie in."""
        model = JaxModel.of(model)
        modules, aliases = tree(model)
        if model.kind != "nnx":
            reason = _HOLDS if model.kind == "function" else ""
            return [Site(path, (), reason if path else "") for path in owned_variables(model)]
        further = further_names(aliases)
        return [
            Site(path, further.get(path, ()), _A_LIST if is_container(module) else "")
            for path, module in modules.items()
        ]

    def describe(self, model: Any, *, digests: bool = False) -> dict[str, Any]:
        """Versions, modules and variables."""
        return describe(JaxModel.of(model), digests=digests)

    def read_sources(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """The text of the classes of the named modules of NNX, or of the model's own."""
        modules, _ = tree(JaxModel.of(model))
        return find_sources(modules[name] for name in names if name in modules)

    def seed(self, seed: int) -> None:
        """Do nothing: random keys are arguments of a model, or variables of it."""

    def dtype_named(self, name: str) -> Any:
        """The dtype of that name.

        Raises:
            UsageError: There is no floating dtype of that name.
        """
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
        """Put archived inputs in, and cast them; a model's dtype is that which it was made in.

        Raises:
            UsageError: An input of the archive is none of the model's arguments; another dtype or device is
                wanted.
        """
        JaxModel.of(workload.model)
        workload = replace(workload, inputs=to_arrays(workload.inputs))
        if dtype is not None:
            raise UsageError(
                f"dtype {dtype}: a JAX model has its dtype from where it is made",
                hint="Let the function that makes the workload take dtype=.",
            )
        if device is not None:
            raise UsageError(
                f"device {device}: JAX chooses its devices itself",
                hint="JAX_PLATFORMS=cpu in the environment runs it on the CPU.",
            )
        if inputs:
            workload = replace(workload, inputs=_with_archived(workload, inputs))
        if input_dtype is None:
            return workload
        wanted = dtype_named(input_dtype)

        def change(name: str, array: Any) -> Any:
            is_cast = isinstance(array, ARRAYS) and jnp.issubdtype(array.dtype, jnp.floating)
            return jnp.asarray(array, wanted) if is_cast else array

        return replace(workload, inputs=rebuild(workload.inputs, kinds(), change))

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Call the model, or the workload's own function, once."""
        workload.call(JaxModel.of(workload.model))

    @contextmanager
    def tap(
        self,
        model: Any,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
    ) -> Iterator[None]:
        """Report the calls of modules and the probes of the block."""
        self.refuse_requests(plan, hint=PROBE_HINT)
        known = JaxModel.of(model)
        if plan.params:
            record_variables(known, recorder)
        tracer = CallTracer(recorder, names, inputs=plan.inputs, substitution=substitution)
        is_controlled = known.control and substitution is None
        known.tapped_runs = TappedRuns(known, tracer, recorder, is_controlled=is_controlled)
        UNDER_CAPTURE[id(known.function)] = known
        try:
            with (
                jax.disable_jit() if plan.eager else nullcontext(),
                tracer.watch(),
                hook_calls(known, tracer),
                collect_probes(tracer),
            ):
                yield
        finally:
            known.tapped_runs = None
            del UNDER_CAPTURE[id(known.function)]
            if known.kind == "linen":  # whose classes are known once they are called
                digests = plan.params is None
                recorder.facts["modules"] = describe_modules(known, tracer.classes, digests=digests)

    def record_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the arrays among `inputs`."""
        record_inputs(inputs, recorder)


def _with_archived(workload: Workload, inputs: Mapping[str, StoredInput]) -> dict[str, Any] | tuple[Any, ...]:
    """Archived inputs in the place of the workload's own, as `replace_inputs` puts them."""
    own = workload.inputs
    if isinstance(own, Mapping):
        values = dict(own)
    else:
        names = () if workload.run is not None else model_argument_names(JaxModel.of(workload.model))
        values = {names[i] if i < len(names) else str(i): value for i, value in enumerate(own)}
    arrays = {name: from_stored(*value) for name, value in inputs.items()}
    replaced, used = replace_inputs(values, arrays, kinds())
    for name in arrays:
        if name not in used.values():
            known = ", ".join(leaf.name for leaf in walk(values, kinds()) if leaf.is_tensor)
            raise UsageError(f"input {name!r} of the archive is none of the workload's: {known}")
    return replaced if isinstance(own, Mapping) else tuple(replaced.values())
