"""The inputs of a Core AI model: numpy arrays by the names of its function's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError


def as_array(value: Any) -> Array:
    """An array of numpy, or of a framework that gives its arrays to numpy (a torch tensor on the CPU)."""
    return np.asarray(value.detach() if hasattr(value, "detach") else value)


def named_arrays(
    model_name: str, descriptor: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
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
    return {name: _fitted(model_name, name, as_array(values[name]), descriptor) for name in names}


def _fitted(model_name: str, name: str, array: Array, descriptor: Any) -> Array:
    """The array, checked against the input's descriptor, which has the text `[2, 8], float32, bytes`."""
    text = str(descriptor.input_descriptor(name))
    shape_text, _, rest = text.partition("], ")
    sizes = [part.strip() for part in shape_text.lstrip("[").split(",") if part.strip()]
    dtype = rest.partition(",")[0].strip()
    is_floating = dtype in ("float16", "float32", "float64") and array.dtype.kind == "f"
    fits_shape = len(sizes) == array.ndim and all(
        not size.isdigit() or int(size) == own for size, own in zip(sizes, array.shape, strict=False)
    )
    if not fits_shape or not (is_floating or array.dtype.name == dtype):
        own = f"{array.dtype.name}[{', '.join(map(str, array.shape))}]"
        raise UsageError(f"{model_name}: input {name}: found {own}, expected {dtype}[{', '.join(sizes)}]")
    return np.ascontiguousarray(array.astype(dtype, copy=False))
