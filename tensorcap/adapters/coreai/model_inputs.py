"""The inputs of a Core AI model: numpy arrays by the names of its function's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError


def as_array(value: Any) -> Array:
    """An array of numpy, or of a framework that gives its arrays to numpy (a torch tensor on the CPU)."""
    return np.asarray(value.detach() if hasattr(value, "detach") else value)


def named_arrays(
    model_name: str,
    descriptor: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_converted: bool = False,
) -> dict[str, Array]:
    """The arrays of a run by name, floating ones in the precision of the function.

    Raises:
        UsageError: They are not those that the function takes, or of another shape or kind.
    """
    names = list(descriptor.input_names)
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    if sorted(values) != sorted(names) or len(args) + len(kwargs) != len(names):
        count = f"{len(args)} by position and {', '.join(kwargs) or 'none'} by name"
        raise UsageError(f"{model_name}: inputs: found {count}, expected {', '.join(names)}")
    inputs = {}
    for name in names:
        array, kind = as_array(values[name]), InputKind.of(descriptor, name)
        if not kind.fits(array):
            raise UsageError(
                f"{model_name}: input {name}: found {array.dtype.name}{list(array.shape)}, expected {kind}",
                hint=_SHAPES if is_converted else None,
            )
        inputs[name] = np.ascontiguousarray(array.astype(kind.dtype, copy=False))
    return inputs


_SHAPES: Final = "It was converted for the shapes of its first inputs; make a CoreAIModel for each."
_FLOATS: Final = ("float16", "float32", "float64")


class InputKind(NamedTuple):
    """What an input of a function has to be.

    Attributes:
        shape: Its shape; None for an axis of any length.
        dtype: Its dtype, as numpy names it.
    """

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, descriptor: Any, name: str) -> InputKind:
        """Parse the descriptor of an input, which has the text `[2, -1], float32, bytes`."""
        shape, _, rest = str(descriptor.input_descriptor(name)).partition("], ")
        sizes = [part.strip() for part in shape.lstrip("[").split(",") if part.strip()]
        return cls(
            tuple(int(size) if size.isdigit() else None for size in sizes), rest.partition(",")[0].strip()
        )

    def fits(self, array: Array) -> bool:
        """Whether an array is of this shape and kind; floating ones are converted."""
        is_floating = self.dtype in _FLOATS and array.dtype.kind == "f"
        fits_shape = len(self.shape) == array.ndim and all(
            size in (None, own) for size, own in zip(self.shape, array.shape, strict=True)
        )
        return fits_shape and (is_floating or array.dtype.name == self.dtype)

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"
