"""The adapter for programs of ExecuTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from tensorcap.adapters.array_records import record_bits
from tensorcap.adapters.executorch.engine import VERSION
from tensorcap.adapters.executorch.model import ExecuTorchModel
from tensorcap.adapters.executorch.program import stored_elements
from tensorcap.adapters.executorch.tap import ModelTap, edge_program
from tensorcap.adapters.input_arrays import InputKind, make_arrays
from tensorcap.adapters.model_file import ModelFileAdapter
from tensorcap.adapters.protocol import Site, most_common_dtype
from tensorcap.recording import Call, CaptureOptions, Recorder, Substitution, summarize_weight
from tensorcap.workload import StoredInput, Workload, redact
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import escape

_A_LIST: Final = "no node of the graph lies in it but those of modules within it"


class ExecuTorchAdapter(ModelFileAdapter):
    """Sites are the modules of the source model, as the graph's nodes tell them."""

    title: ClassVar[str] = "ExecuTorch"
    suffix: ClassVar[str] = ".pte"
    settings: ClassVar[tuple[str, ...]] = ("inputs", "etrecord")

    def list_sites(self, model: Any, *, eager: bool = False) -> list[Site]:
        """The modules that nodes lie in, and those that hold weights, the model itself first."""
        program = edge_program(model)
        called = {"", *(call.path for call in program.calls)}
        paths = dict.fromkeys((*program.classes, *(module for module, _, _, _ in program.parameters())))
        return [Site(path, (), "" if path in called else _A_LIST) for path in paths]

    def describe(self, model: Any, *, digests: bool = False) -> dict[str, Any]:
        """Versions, modules and weights."""
        program = edge_program(model)
        kinds: dict[str, dict[str, dict[str, Any]]] = {}
        floats: list[tuple[str, int]] = []
        for module, name, kind, tensor in program.parameters():
            bits, dtype = stored_elements(tensor)
            if dtype.is_inexact:
                floats.append((dtype.name, tensor.numel()))
            entry = {"shape": list(tensor.shape), "dtype": dtype.name}
            entry |= summarize_weight(bits, dtype) if digests else {}
            kinds.setdefault(module, {}).setdefault(kind, {})[name] = entry
        main = most_common_dtype(floats)
        return {
            "framework": {
                "name": "executorch",
                "version": VERSION,
                "settings": {
                    "etrecord": redact(str(model.record_path)),
                    "inputs": dict(model.inputs) or "of the workload",
                },
            },
            "model": {"class": program.classes[""], "file": redact(str(model.source))},
            "dtype": main,
            "compute_dtype": main,
            "device": "cpu",
            "modules": [
                {
                    "path": path,
                    "class": program.classes.get(path, ""),
                    "parameters": kinds.get(path, {}).get("param", {}),
                    "buffers": kinds.get(path, {}).get("buffer", {}),
                    "training": False,
                }
                for path in dict.fromkeys((*program.classes, *kinds))
            ],
        }

    def read_sources(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """None: a graph has lines of its source at most."""
        return {}

    def model_of_file(self, path: str, settings: Mapping[str, Any]) -> ExecuTorchModel:
        """The model of a program.

        Raises:
            UsageError: There is no such file.
        """
        if not Path(path).is_file():
            raise UsageError(f"there is no file {path!r}")
        return ExecuTorchModel(path, settings.get("etrecord"))

    def input_kinds(self, model: Any) -> Mapping[str, InputKind]:
        """What each input of the graph has to be, by name."""
        return edge_program(model).kinds

    def adopt(self, workload: Workload, settings: Mapping[str, Any], *, seed: int = 0) -> Workload:
        """The workload with another ETRecord, or on inputs that are made or read from a file.

        Raises:
            UsageError: Its model is no `ExecuTorchModel`; an input is not to be had.
        """
        if not isinstance(workload.model, ExecuTorchModel):
            raise UsageError(f"a {type(workload.model).__name__}: expected a tensorcap.ExecuTorchModel")
        model = replace(workload.model, etrecord=settings.get("etrecord", workload.model.etrecord))
        if "inputs" not in settings:
            return replace(workload, model=model)
        arrays, model.inputs = make_arrays(
            str(model.source), self.input_kinds(model), settings["inputs"], seed
        )
        return replace(workload, model=model, inputs=arrays)

    def seed(self, seed: int) -> None:
        """Do nothing: a program has no random generators of its own."""

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """Put archived inputs in, by name; if none of the names is the program's, in order.

        Raises:
            UsageError: A dtype or a device is wanted; the archive has not the inputs of the program.
        """
        for option, value in (("dtype", dtype), ("device", device)):
            if value is not None:
                raise UsageError(
                    f"{option} {value}: a program of ExecuTorch has its {option} from its export"
                )
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
        """Record the operators and the calls of modules of each run."""
        self.refuse_requests(
            plan,
            substitution,
            levels=("module", "op"),
            lacks=("injection",),
            why="runs compiled programs",
        )
        if plan.params:
            for module, name, kind, tensor in edge_program(model).parameters():
                call = Call(recorder.points[module], 0, 0, is_of_run=True)
                slot = f"{kind}.{escape(name)}"
                if recorder.wants(call, slot):
                    record_bits(recorder, call, slot, *stored_elements(tensor))
        model.tapped_run = ModelTap(model, names, recorder, plan).run
        try:
            yield
        finally:
            model.tapped_run = None
