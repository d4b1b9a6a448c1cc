"""The adapter for Core AI models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from tensorcap.adapters.coreai.conversion import decompose
from tensorcap.adapters.coreai.description import describe, modules_of
from tensorcap.adapters.coreai.model_inputs import as_array
from tensorcap.adapters.coreai.tap import tapped
from tensorcap.adapters.protocol import Adapter, CalledRoot, Site
from tensorcap.recording import Call, CaptureOptions, Recorder, Substitution
from tensorcap.workload import StoredInput, Workload
from tensorcap_formats.dtypes import bits_of, decode, dtype_of
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import escape

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class CoreAIAdapter(Adapter):
    """Sites are modules of the torch source; an asset has the model itself alone."""

    decompositions: ClassVar[str] = "coreai"

    def list_sites(self, model: Any, *, eager: bool = False) -> list[Site]:
        """The modules that operations can lie in."""
        return [Site(path) for path in modules_of(model)]

    def describe(self, model: Any, *, digests: bool = False) -> dict[str, Any]:
        """Settings and modules."""
        return describe(model)

    def read_sources(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """None: lines stand in the operation map."""
        return {}

    def seed(self, seed: int) -> None:
        """Set the random generators of torch, which makes the models that are converted."""
        torch.manual_seed(seed)

    def dtype_named(self, name: str) -> str:
        """The precision of that name.

        Raises:
            UsageError: Core AI converts to none of that name.
        """
        precisions = {"fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32"}
        if name not in precisions:
            raise UsageError(f"dtype {name!r}: expected float32 or float16, which Core AI converts to")
        return precisions[name]

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """Put archived inputs in, and convert to another precision.

        Raises:
            UsageError: A device is wanted; an asset is wanted in another precision; an archived input is
                none of the workload's.
        """
        if device is not None:
            raise UsageError(
                f"device {device}: Core AI runs on the CPU on Linux; compute units are for macOS"
            )
        if dtype is not None:
            model = replace(workload.model, precision=self.dtype_named(dtype))
            workload = replace(workload, model=model)
        if not inputs:
            return workload
        arrays = {name: decode(value.bits, value.dtype) for name, value in inputs.items()}
        if isinstance(workload.inputs, Mapping):
            unknown = arrays.keys() - workload.inputs.keys()
            if unknown:
                raise UsageError(
                    f"input {min(unknown)!r} of the archive is none of the workload's: "
                    f"{', '.join(workload.inputs)}"
                )
            return replace(workload, inputs={**workload.inputs, **arrays})
        return replace(workload, inputs=arrays)

    def perturb(self, workload: Workload, dtype: str) -> Workload:
        """Refuse: the reference's run is the one to perturb."""
        raise UsageError("perturb: not to be had of Core AI, expected a torch model")

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Call the model, or the workload's own function, once."""
        workload.call(workload.model)

    @contextmanager
    def tap(
        self,
        model: Any,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
    ) -> Iterator[None]:
        """Record the operations of each run."""
        for request, is_asked in (
            (f"level {plan.level}", plan.level != "module"),
            ("watched functions", bool(plan.watch)),
            ("gradients", plan.grads),
            ("parameters", bool(plan.params)),
            ("injection", substitution is not None),
        ):
            if is_asked:
                raise UsageError(
                    f"{request}: not to be had of Core AI, which records its operations in any case"
                )
        model.tapped_run = tapped(model, recorder)
        try:
            yield
        finally:
            model.tapped_run = None

    def record_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the arrays among `inputs`."""
        named = inputs if isinstance(inputs, Mapping) else {str(i): value for i, value in enumerate(inputs)}
        call = Call(recorder.points[""], 0, 0)
        for name, value in named.items():
            array = np.array(as_array(value), order="C")
            recorder.tensor(
                call, f"given.{escape(name)}", bits_of(array), dtype_of(array), array.shape, required=True
            )

    def watch_roots(
        self, pattern: str | None, take: Callable[[Any], bool]
    ) -> AbstractContextManager[list[CalledRoot]]:
        """None: a program's own assets are not watched."""
        return nullcontext([])

    def export(self, workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
        """Refuse: operations are recorded in any case."""
        raise UsageError("level export: Core AI records its operations in any case, expected level module")

    def decompose(self, program: ExportedProgram) -> ExportedProgram:
        """Decompose an exported graph with Core AI's own table."""
        return decompose(program)
