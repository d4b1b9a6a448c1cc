"""The ONNX model of a workload: a file and the settings of its sessions. Imports ONNX only when it is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from tensorcap_formats.errors import UsageError

Optimization = Literal["none", "basic", "extended", "all"]
OPTIMIZATIONS: Final[tuple[Optimization, ...]] = Optimization.__args__  # type: ignore[attr-defined] # no public name
_TAPPED_BYTES: Final = 1 << 30


@dataclass(eq=False)
class OnnxModel:
    """An ONNX model in a file, which ONNX Runtime runs; a call runs it on numpy arrays.

    Attributes:
        source: Path of a `.onnx` file; weights beside it are found as in any session.
        providers: Execution providers; of each node the first that can run it.
        optimization: Optimisations of the graph by the runtime: `none`, `basic`, `extended`, `all`.
        tapped_bytes: Under capture the graph is run in sections, whose values take so many bytes at most; a
            section is one node at least.
        control: Whether a capture runs the model once more without taps, to report what the taps change.
        inputs: How each input was made, by name: `zeros`, `random, seed 0`, a file; kept in the archive.

    Example:
        >>> OnnxModel("net.onnx").optimization
        'all'
    """

    tensorcap_framework: ClassVar = "onnx"

    source: str | os.PathLike[str]
    providers: Sequence[str] = ("CPUExecutionProvider",)
    optimization: Optimization = "all"
    tapped_bytes: int = _TAPPED_BYTES
    control: bool = True
    inputs: Mapping[str, str] = field(default_factory=dict)
    tapped_run: Callable[..., Any] | None = field(default=None, init=False, repr=False)
    loaded: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse settings that there are none of.

        Raises:
            UsageError: There is no such optimisation, or no provider is named.
        """
        if self.optimization not in OPTIMIZATIONS:
            raise UsageError(
                f"optimization {self.optimization!r}: expected one of {', '.join(OPTIMIZATIONS)}"
            )
        if isinstance(self.providers, str) or not self.providers:
            raise UsageError(f"providers {self.providers!r}: expected a list of names")

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model; return its outputs by name, numpy arrays."""
        from tensorcap.adapters.onnx.tap import run

        return run(self, args, kwargs)
