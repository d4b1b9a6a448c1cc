"""The adapter for Core AI models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch.export import ExportedProgram

from tensorcap.adapters.coreai.asset import operations_of
from tensorcap.adapters.coreai.conversion import decompose
from tensorcap.adapters.coreai.description import describe, modules_of
from tensorcap.adapters.coreai.engine import AIProgram
from tensorcap.adapters.coreai.model import ASSET_SUFFIX, CoreAIModel
from tensorcap.adapters.coreai.operation_map import mappings_of
from tensorcap.adapters.coreai.tap import input_kinds, name_of, tapped
from tensorcap.adapters.input_arrays import InputKind, as_array, make_arrays
from tensorcap.adapters.model_file import ModelFileAdapter
from tensorcap.adapters.protocol import ProgramOperation, Site
from tensorcap.recording import CaptureOptions, Recorder, Substitution
from tensorcap.workload import StoredInput, Workload, class_name
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import UsageError

_OF_MODEL: Final = ("precision", "function", "mode", "device_target", "compute_units")


class CoreAIAdapter(ModelFileAdapter):
    """Sites are modules of the torch source; an asset has the model itself alone."""

    title: ClassVar[str] = "Core AI"
    suffix: ClassVar[str] = ASSET_SUFFIX
    decompositions: ClassVar[str] = "coreai"
    settings: ClassVar[tuple[str, ...]] = ("inputs", *_OF_MODEL)

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

    def model_of_file(self, path: str, settings: Mapping[str, Any]) -> CoreAIModel:
        """The model of an asset."""
        return CoreAIModel(path, **{name: settings[name] for name in _OF_MODEL if name in settings})

    def input_kinds(self, model: Any) -> Mapping[str, InputKind]:
        """What each input of the model has to be, by name."""
        return input_kinds(model)

    def adopt(self, workload: Workload, settings: Mapping[str, Any], *, seed: int = 0) -> Workload:
        """The workload with a Core AI model of these settings, which a torch model is converted to.

        Raises:
            UsageError: The model is none that Core AI can run; it has no such inputs.
        """
        own = {name: settings[name] for name in _OF_MODEL if name in settings}
        model = workload.model
        if isinstance(model, CoreAIModel):
            model = replace(model, **own)
        elif isinstance(model, torch.nn.Module | ExportedProgram):
            model = CoreAIModel(model, **own)
        else:
            raise UsageError(
                f"{class_name(model)}: expected a torch module, an ExportedProgram or a CoreAIModel"
            )
        workload = replace(workload, model=model)
        if "inputs" not in settings:
            return workload
        args, kwargs = workload.arguments
        named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        kinds = {name: InputKind.like(as_array(value)) for name, value in named.items()}
        arrays, model.inputs = make_arrays(name_of(model), kinds, settings["inputs"], seed)
        return replace(workload, inputs=tuple(arrays.values()) if args else arrays)

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
        workload.model.inputs = dict.fromkeys(inputs, "of the archive")
        arrays = {name: decode(value.bits, value.dtype) for name, value in inputs.items()}
        if isinstance(workload.inputs, Mapping):
            unknown = arrays.keys() - workload.inputs.keys()
            if unknown and workload.inputs:
                raise UsageError(
                    f"input {min(unknown)!r} of the archive is none of the workload's: "
                    f"{', '.join(workload.inputs)}"
                )
            return replace(workload, inputs={**workload.inputs, **arrays})
        return replace(workload, inputs=arrays)

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
        self.refuse_requests(
            plan,
            substitution,
            lacks=("parameters", "injection"),
            why="records its operations in any case",
        )
        model.tapped_run = tapped(model, recorder)
        try:
            yield
        finally:
            model.tapped_run = None

    def export(self, workload: Workload, plan: CaptureOptions) -> Callable[[Recorder], None]:
        """Refuse: operations are recorded in any case."""
        raise UsageError("level export: Core AI records its operations in any case, expected level module")

    def decompose(self, program: ExportedProgram) -> ExportedProgram:
        """Decompose an exported graph with Core AI's own table."""
        return decompose(program)

    def program_operations(self, path: Path) -> list[ProgramOperation]:
        """The operations of an asset that compute a value."""
        return operations_of(path)

    def program_mappings(self, program: Any) -> dict[str, Any]:
        """Operators of a converted program and the nodes that they were made of, in Apple's form."""
        if not isinstance(program, AIProgram):
            return super().program_mappings(program)
        return mappings_of(program)
