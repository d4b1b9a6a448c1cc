"""The adapter for ONNX models, which ONNX Runtime runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Final

from tensorcap.adapters.input_arrays import InputKind, make_arrays
from tensorcap.adapters.model_file import ModelFileAdapter
from tensorcap.adapters.onnx.description import describe
from tensorcap.adapters.onnx.model import OnnxModel
from tensorcap.adapters.onnx.parameters import record_parameters
from tensorcap.adapters.onnx.tap import LoadedModel, ModelTap
from tensorcap.adapters.protocol import Site
from tensorcap.recording import CaptureOptions, Recorder, Substitution
from tensorcap.workload import StoredInput, Workload
from tensorcap_formats.errors import UsageError

_OF_MODEL: Final = ("providers", "optimization")


class OnnxAdapter(ModelFileAdapter):
    """Sites are the modules of the source model, as far as names in the graph tell them."""

    title: ClassVar[str] = "ONNX Runtime"
    suffix: ClassVar[str] = ".onnx"
    has_operations: ClassVar[bool] = True
    settings: ClassVar[tuple[str, ...]] = ("inputs", *_OF_MODEL)

    def list_sites(self, model: Any, *, eager: bool = False) -> list[Site]:
        """The modules that nodes lie in, the model itself first."""
        scopes = LoadedModel.of(model).scopes
        called = {call.path for call in scopes.nodes_of}
        return [Site(path, (), "" if path in called else _A_LIST) for path in scopes.classes]

    def describe(self, model: Any, *, digests: bool = False) -> dict[str, Any]:
        """Versions, settings, modules and initialisers."""
        return describe(model, digests=digests)

    def read_sources(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """None: a file has lines of its source at most."""
        return {}

    def model_of_file(self, path: str, settings: Mapping[str, Any]) -> OnnxModel:
        """The model of a file."""
        return OnnxModel(path, **{name: settings[name] for name in _OF_MODEL if name in settings})

    def input_kinds(self, model: Any) -> Mapping[str, InputKind]:
        """What each input of the graph has to be, by name."""
        return LoadedModel.of(model).graph.inputs

    def adopt(self, workload: Workload, settings: Mapping[str, Any], *, seed: int = 0) -> Workload:
        """The workload with other settings of its sessions.

        Raises:
            UsageError: Its model is no `OnnxModel`.
        """
        if not isinstance(workload.model, OnnxModel):
            raise UsageError(f"a {type(workload.model).__name__}: expected a tensorcap.OnnxModel")
        own = {name: settings[name] for name in _OF_MODEL if name in settings}
        model = replace(workload.model, **own)
        if "inputs" not in settings:
            return replace(workload, model=model)
        arrays, model.inputs = make_arrays(
            str(model.source), self.input_kinds(model), settings["inputs"], seed
        )
        return replace(workload, model=model, inputs=arrays)

    def seed(self, seed: int) -> None:
        """Do nothing: a graph holds the seeds of its random operators."""

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """Put archived inputs in: those that the model has, by name.

        Raises:
            UsageError: A dtype or a device is wanted; the archive has none of the model's inputs.
        """
        if dtype is not None:
            raise UsageError(f"dtype {dtype}: an ONNX model has its dtype from where it was exported")
        if device is not None:
            raise UsageError(f"device {device}: expected --provider NAME, which says where a model runs")
        return self.with_archived_inputs(workload, inputs) if inputs else workload

    @contextmanager
    def tap(
        self,
        model: Any,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
    ) -> Iterator[None]:
        """Record the nodes and the calls of modules of each run."""
        self.refuse_requests(plan, levels=("module", "op"), why="runs graphs")
        if plan.params:
            record_parameters(LoadedModel.of(model), recorder)
        model.tapped_run = ModelTap(model, names, recorder, plan, substitution).run
        try:
            yield
        finally:
            model.tapped_run = None


_A_LIST: Final = "no node lies in it but those of modules within it"
