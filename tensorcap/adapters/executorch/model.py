"""The ExecuTorch model of a workload: a program and its ETRecord. Imports ExecuTorch only when it is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

RECORD_SUFFIX: Final = ".etrecord"


@dataclass(eq=False)
class ExecuTorchModel:
    """A program of ExecuTorch in a file, which its runtime for Python runs; a call runs it on arrays.

    Attributes:
        source: Path of a `.pte` file.
        etrecord: Path of the ETRecord of the same export, which `executorch.devtools.generate_etrecord`
            writes; by default the file beside the program that is called as it is, with `.etrecord`.
        control: Whether a capture runs the model once more without events, to report what they change.
        inputs: How each input was made, by name; kept in the archive.

    Example:
        >>> str(ExecuTorchModel("net.pte").record_path)
        'net.etrecord'
    """

    tensorcap_framework: ClassVar = "executorch"

    source: str | os.PathLike[str]
    etrecord: str | os.PathLike[str] | None = None
    control: bool = True
    inputs: Mapping[str, str] = field(default_factory=dict)
    tapped_run: Callable[..., Any] | None = field(default=None, init=False, repr=False)
    loaded: list[Any] = field(default_factory=list, init=False, repr=False)

    @property
    def record_path(self) -> Path:
        """Where its ETRecord is."""
        return Path(self.source).with_suffix(RECORD_SUFFIX) if self.etrecord is None else Path(self.etrecord)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model; return its outputs by the names of the graph's nodes, torch tensors."""
        from tensorcap.adapters.executorch.tap import run

        return run(self, args, kwargs)
