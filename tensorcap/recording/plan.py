"""What a capture taps beside the outputs of modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap_formats.errors import UsageError

Level = Literal["module", "op", "export"]
LEVELS: Final[tuple[Level, ...]] = Level.__args__  # type: ignore[attr-defined] # no public name for it


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tapped.

    Attributes:
        inputs: Whether the inputs of modules are recorded.
        level: `module`, `op` for every op within them too, or `export` for every node of an exported graph.
        ops_in: Globs of the modules, with all below them, whose ops are recorded; all where it is empty.
        watch: Local variables of functions, as `package.module:Class.method:variable,variable`.
        grads: Whether gradients of activations and of parameters are recorded.
        params: Whether parameters and buffers are recorded, once.
        eager: Whether what is compiled or fused runs as the plain code that it was made from.
        room: Which values, `input` or `output`, later runs of the same model are going to replace: what has
            to be compiled makes room for them at once.
        inner: Whether a compiled graph prints into files what it cannot give out.
    """

    inputs: bool = True
    level: Level = "module"
    ops_in: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()
    grads: bool = False
    params: bool = False
    eager: bool = False
    room: tuple[str, ...] = ()
    inner: bool = False

    def __post_init__(self) -> None:
        """Refuse a plan that contradicts itself.

        Raises:
            UsageError: There is no such level, or `ops_in` is given where no ops are recorded.
        """
        if self.level not in LEVELS:
            raise UsageError(f"level {self.level!r}: expected one of {', '.join(LEVELS)}")
        if self.ops_in and self.level == "module":
            raise UsageError(
                "ops_in is of ops, and the level is module", hint="Take level op, or level export."
            )

    def describe(self) -> dict[str, Any]:
        """The plan, as the run's metadata keep it: what is not as by default, and `inputs`."""
        found: dict[str, Any] = {"inputs": self.inputs}
        if self.level != "module":
            found["level"] = self.level
        if self.ops_in:
            found["ops_in"] = list(self.ops_in)
        if self.watch:
            found["watch"] = list(self.watch)
        if self.grads:
            found["grads"] = True
        if self.params:
            found["params"] = True
        if self.eager:
            found["eager"] = True
        if self.inner:
            found["inner"] = True
        return found
