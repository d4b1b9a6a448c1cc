"""The Core AI model of a workload: an asset, or what is converted to one. Imports Core AI only when run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from tensorcap_formats.errors import UsageError

ASSET_SUFFIX: Final = ".aimodel"


@dataclass(eq=False)
class CoreAIModel:
    """A Core AI asset, or a torch model that is converted to one; a call runs it on numpy arrays.

    Attributes:
        source: Path of an `.aimodel` folder, a `torch.nn.Module`, or a `torch.export.ExportedProgram`.
        precision: `fp32` or `fp16`, in which a module is converted; assets and programs have their own.
        function: The function of the asset that is run.
        mode: `debug`, or `release`, which keeps neither names nor source locations; an asset has its own.
        device_target: None or `host`: on Linux, Core AI runs on this machine alone.
        compute_units: None; Linux runs on the CPU and has no choice.
        inputs: How each input was made, by name: `zeros`, `random, seed 0`, a file; kept in the archive.

    Example:
        >>> CoreAIModel("net.aimodel").function
        'main'
    """

    tensorcap_framework: ClassVar = "coreai"

    source: Any
    precision: Literal["fp32", "fp16"] | None = None
    function: str = "main"
    mode: Literal["debug", "release"] | None = None
    device_target: str | None = None
    compute_units: str | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    tapped_run: Callable[..., Any] | None = field(default=None, init=False, repr=False)
    converted: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse settings that there are none of, or none on this system.

        Raises:
            UsageError: There is no such precision or mode; a device or compute units are asked for.
        """
        if self.precision not in (None, "fp32", "fp16"):
            raise UsageError(f"precision {self.precision!r}: expected fp32 or fp16")
        if self.mode not in (None, "debug", "release"):
            raise UsageError(f"mode {self.mode!r}: expected debug or release")
        if self.device_target not in (None, "host"):
            raise UsageError(
                f"device target {self.device_target!r}: to run on another device is for macOS only",
                hint="Leave it out: on Linux the model runs on this machine.",
            )
        if self.compute_units is not None:
            raise UsageError(
                f"compute units {self.compute_units!r}: SpecializationOptions of Core AI is for macOS only",
                hint="Leave them out: on Linux the model runs on the CPU.",
            )

    @property
    def is_asset(self) -> bool:
        """Whether it is an asset on disk, and not what is converted to one."""
        return isinstance(self.source, str | os.PathLike)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model; return its outputs by name."""
        from tensorcap.adapters.coreai.tap import run

        return run(self, args, kwargs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the asset that the model was converted to, after it ran.

        Args:
            path: A folder `NAME.aimodel` that is not there yet.

        Raises:
            UsageError: The model is an asset already, or has not run; the path is another.
        """
        from tensorcap.adapters.coreai.conversion import save

        self.check_path(path)
        save(self, Path(path))

    def check_path(self, path: str | os.PathLike[str]) -> None:
        """Refuse what no conversion can be saved to, before it is made.

        Raises:
            UsageError: There is no conversion to save, or the path is no new folder `NAME.aimodel`.
        """
        folder = Path(path)
        if self.is_asset:
            raise UsageError(f"{path}: there is nothing to keep, since {self.source} is an asset already")
        if folder.suffix != ASSET_SUFFIX or folder.exists():
            what = "something that is there" if folder.exists() else f"the suffix {folder.suffix!r}"
            raise UsageError(f"{path}: found {what}, expected a new folder NAME{ASSET_SUFFIX}")
