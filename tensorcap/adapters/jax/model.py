"""The JAX model of a workload: a module or a function, and how it is run. Imports JAX only when it is run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar

from tensorcap.recording.probes import choose_under_way
from tensorcap.workload import class_name
from tensorcap_formats.errors import UsageError

if TYPE_CHECKING:
    from tensorcap.adapters.jax.call_tracer import CallTracer
    from tensorcap.adapters.jax.runs import TappedRuns

ModelKind = Literal["nnx", "linen", "function"]
TAP_RECEIVERS: Final[list[CallTracer]] = []  # captures that are under way
UNDER_CAPTURE: Final[dict[int, JaxModel]] = {}  # by the id of the module
_T = TypeVar("_T")


@dataclass(eq=False)
class JaxModel:
    """A JAX model and how it is run; a call runs it on arrays.

    An NNX module alone can be the model of a `Workload` too. Arguments may be arrays of numpy, JAX or torch,
    or structures of them; other leaves are constants of what is compiled.

    Attributes:
        function: A `flax.nnx.Module`, a `flax.linen.Module`, or a function of JAX.
        variables: Of a Linen module its variables (`{"params": …}`), which `apply` is given; of a function a
            structure of parameters, its first argument, or None if it has none. An NNX module has its own.
        jit: Whether it is compiled as a whole; if not, it runs operation by operation, save what its own code
            compiles.
        control: Whether a capture runs it once more without taps, to report what the taps change.

    Example:
        >>> JaxModel(abs).kind
        'function'
    """

    tensorcap_framework: ClassVar = "jax"

    function: Any
    variables: Any = None
    jit: bool = True
    control: bool = True
    tapped_runs: TappedRuns | None = field(default=None, init=False, repr=False)
    compiled: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be called, and a Linen module without variables.

        Raises:
            UsageError: It is one of these.
        """
        if not callable(self.function):
            raise UsageError(
                f"a {class_name(self.function)} cannot be called, expected a module of Flax or a function"
            )
        if self.kind == "linen" and self.variables is None:
            raise UsageError(
                f"{class_name(self.function)}: a Linen module without variables, expected "
                "JaxModel(module, variables)"
            )
        if self.kind == "nnx" and self.variables is not None:
            raise UsageError(
                f"{class_name(self.function)}: an NNX module has its own variables, expected JaxModel(module)"
            )

    @property
    def kind(self) -> ModelKind:
        """Whether it is a module of NNX or of Linen, or a function."""
        packages = [".".join(base.__module__.split(".")[:2]) for base in type(self.function).__mro__]
        if "flax.nnx" in packages:
            return "nnx"
        return "linen" if "flax.linen" in packages else "function"

    @classmethod
    def of(cls, model: Any) -> JaxModel:
        """The model itself, or that of a module, of which there is one while it is under capture.

        Raises:
            UsageError: It is a Linen module, which has no variables of its own.
        """
        return model if isinstance(model, cls) else UNDER_CAPTURE.get(id(model)) or cls(model)

    @staticmethod
    def tap(path: str, value: _T) -> _T:
        """Report a value as the result of a module, in code that has no modules.

        Under a capture it is recorded as the result of a module of this path, in what JAX compiles and in its
        loops too. To name a value that no module of the other implementation returns, take
        `tensorcap.probe`.

        Args:
            path: The path, such as `layers.0.attention`; best as the reference calls it.
            value: An array, or a structure of arrays.

        Returns:
            The value itself, or what an injection puts in its place.

        Raises:
            UsageError: The path is no text, or empty.

        Example:
            >>> JaxModel.tap("layers.0", 1.0)
            1.0
        """
        if not isinstance(path, str) or not path:
            raise UsageError(f"tap: the path is {path!r}, expected a text that is not empty")
        for receiver in choose_under_way(tuple(TAP_RECEIVERS)):
            value = receiver.tapped(path, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; return what it returns."""
        from tensorcap.adapters.jax.runs import run

        return run(self, args, kwargs)
