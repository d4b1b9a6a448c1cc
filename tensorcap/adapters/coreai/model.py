"""The Core AI model of a workload: an asset, or what is converted to one. Imports Core AI only when run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tensorcap_formats.errors import UsageError


@dataclass(eq=False)
class CoreAIModel:
    """A Core AI asset, or a torch model that is converted to one; a call runs it on numpy arrays.

    Attributes:
        source: Path of an `.aimodel` folder, a `torch.nn.Module`, or a `torch.export.ExportedProgram`.
        precision: `fp32` or `fp16`, in which a module is converted; assets and programs have their own.
        function: The function of the asset that is run.
        mode: `debug`, or `release`, which keeps no source locations.
        compute_units: None; Linux runs on the CPU and has no choice.

    Example:
        >>> CoreAIModel("net.aimodel").function
        'main'
    """

    tensorcap_framework: ClassVar = "coreai"

    source: Any
    precision: Literal["fp32", "fp16"] | None = None
    function: str = "main"
    mode: Literal["debug", "release"] = "debug"
    compute_units: str | None = None
    tapped_run: Callable[..., Any] | None = field(default=None, init=False, repr=False)
    converted: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse settings that there are none of, or none on this system.

        Raises:
            UsageError: There is no such precision or mode; compute units are asked for.
        """
        if self.precision not in (None, "fp32", "fp16"):
            raise UsageError(f"precision {self.precision!r}: expected fp32 or fp16")
        if self.mode not in ("debug", "release"):
            raise UsageError(f"mode {self.mode!r}: expected debug or release")
        if self.compute_units is not None:
            raise UsageError(
                f"compute units {self.compute_units!r}: SpecializationOptions of Core AI is for macOS only",
                hint="Leave them out: on Linux the model runs on the CPU.",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model; return its outputs by name."""
        from tensorcap.adapters.coreai.tap import run

        return run(self, args, kwargs)
