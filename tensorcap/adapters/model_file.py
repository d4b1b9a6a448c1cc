"""Adapters of models in files of one suffix, which run on arrays by name and keep no state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from tensorcap.adapters.array_records import record_inputs
from tensorcap.adapters.input_arrays import (
    ARRAY_KINDS,
    InputKind,
    archived_arrays,
    make_arrays,
    origins_of,
    replace_inputs,
)
from tensorcap.adapters.protocol import Adapter
from tensorcap.recording import Recorder
from tensorcap.workload import StoredInput, Workload
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import UsageError


class ModelFileAdapter(Adapter):
    """What the adapters of such models have in common.

    Attributes:
        suffix: Of the files.
    """

    suffix: ClassVar[str]

    @abstractmethod
    def model_of_file(self, path: str, settings: Mapping[str, Any]) -> Any:
        """The model of a file of the suffix, whose `inputs` say how its inputs were made.

        Raises:
            UsageError: There is no such file, or it is none of the framework's.
        """

    @abstractmethod
    def input_kinds(self, model: Any) -> Mapping[str, InputKind]:
        """What each input of the model has to be, by name."""

    def load(
        self,
        path: str,
        settings: Mapping[str, Any],
        inputs: Mapping[str, StoredInput] | None = None,
        *,
        seed: int = 0,
    ) -> Workload:
        """The workload of a file, on inputs that are made, read from a file, or archived.

        Raises:
            UsageError: It is no model of the framework; there are no inputs for it; a setting is unknown.
        """
        self.refuse_unknown_settings(path, settings)
        if Path(path).suffix != self.suffix:
            raise UsageError(f"{path}: expected NAME{self.suffix} or FILE.py:FUNCTION")
        model = self.model_of_file(path, settings)
        if inputs is not None:
            return self.prepare(Workload(model, {}), inputs=inputs)
        kinds = self.input_kinds(model)
        arrays, model.inputs = make_arrays(path, kinds, settings.get("inputs", ()), seed)
        return Workload(model, arrays)

    def with_archived_inputs(self, workload: Workload, inputs: Mapping[str, StoredInput]) -> Workload:
        """The workload on archived inputs: those of its run function, or else those of the model.

        Raises:
            UsageError: The archive has none of them, or one has no value.
        """
        model, own = workload.model, workload.inputs
        if workload.run is None:
            known = own if isinstance(own, Mapping) else {}
            names = list(self.input_kinds(model))
            given, model.inputs = archived_arrays(str(model.source), names, known, inputs)
            return replace(workload, inputs=given)
        values = own if isinstance(own, Mapping) else {str(i): value for i, value in enumerate(own)}
        arrays = {name: decode(stored.bits, stored.dtype) for name, stored in inputs.items()}
        replaced, origins = replace_inputs(values, arrays, ARRAY_KINDS)
        if not origins:
            raise UsageError(
                f"{model.source}: found the inputs {', '.join(inputs)}, expected {', '.join(values)}, which "
                "its run function takes"
            )
        model.inputs = origins_of(origins)
        return replace(workload, inputs=replaced if isinstance(own, Mapping) else tuple(replaced.values()))

    def dtype_named(self, name: str) -> str:
        """The name itself, for a function of the user's."""
        return name

    def run(self, workload: Workload, *, grads: bool = False) -> None:
        """Call the model, or the workload's own function, once."""
        workload.call(workload.model)

    def record_inputs(self, inputs: Any, recorder: Recorder) -> None:
        """Record the arrays among `inputs`."""
        record_inputs(inputs, recorder)
