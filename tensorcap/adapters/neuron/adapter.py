"""The adapter for ports to NxD Inference, which a CPU runs as modules of torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from tensorcap.adapters.neuron.model import inner_model, is_application
from tensorcap.adapters.neuron.processes import join_ranks
from tensorcap.adapters.neuron.stand_ins import stand_in_note
from tensorcap.adapters.torch.adapter import TorchAdapter
from tensorcap.recording import CaptureOptions, Recorder, Substitution
from tensorcap.workload import StoredInput, Workload


class NeuronAdapter(TorchAdapter):
    """Sites are the modules of the inner model; what calls it is the application, which pads its inputs."""

    is_of_one_shape: ClassVar[bool] = True

    def seed(self, seed: int) -> None:
        """Join the other ranks, before anything of the port runs, and set the random generators."""
        join_ranks()
        super().seed(seed)

    def adopt(self, workload: Workload, settings: Mapping[str, Any], *, seed: int = 0) -> Workload:
        """Of an application, the workload of its inner model, which the application calls.

        A module stays as it is.

        Raises:
            UsageError: The application has no inner model on a CPU, or several.
        """
        application = workload.model
        if not is_application(application):
            return workload
        run = workload.run

        def call(_: Any, *args: Any, **kwargs: Any) -> Any:
            return application(*args, **kwargs) if run is None else run(application, *args, **kwargs)

        join_ranks()
        return replace(workload, model=inner_model(application), run=call)

    def prepare(
        self,
        workload: Workload,
        *,
        dtype: str | None = None,
        input_dtype: str | None = None,
        device: str | None = None,
        inputs: Mapping[str, StoredInput] | None = None,
    ) -> Workload:
        """Prepare the workload of the inner model, as one of torch.

        Raises:
            UsageError: As `adopt`, and as for torch.
        """
        adopted = self.adopt(workload, {})
        return super().prepare(adopted, dtype=dtype, input_dtype=input_dtype, device=device, inputs=inputs)

    @contextmanager
    def tap(
        self,
        model: Any,
        names: Collection[str],
        recorder: Recorder,
        plan: CaptureOptions,
        substitution: Substitution | None = None,
    ) -> Iterator[None]:
        """Hook the named modules; of stand-ins for a runtime say which were called until the run ended."""
        try:
            with super().tap(model, names, recorder, plan, substitution):
                yield
        finally:
            if note := stand_in_note():
                recorder.facts.setdefault("notes", []).append(note)
