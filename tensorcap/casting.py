"""Values of one dtype in another, by numpy alone (INJ-5)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tensorcap.metrics.representable import FORMATS
from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.errors import UsageError

_LEAST: Final = {
    "float16": -65504.0,
    "bfloat16": -(2.0**127) * (2 - 2.0**-7),
    "float32": -(2.0**127) * (2 - 2.0**-23),
    "float64": -math.ldexp(2 - 2.0**-52, 1023),
}
_SENTINELS: Final = (-math.inf, -1e9, *_LEAST.values())


def cast(bits: Array, dtype: DType, wanted: DType) -> tuple[Array, str]:
    """Stored elements of one dtype as those of another, and how they came there.

    Floats are rounded to nearest, ties to even. A mask sentinel beyond the range becomes the least finite
    value. A bool mask becomes one of 0 and the least finite value, and the other way round.

    Args:
        bits: Stored elements of `dtype`, any shape.
        dtype: Their dtype.
        wanted: The dtype that they are to have.

    Returns:
        Stored elements of `wanted`, and a text; "" where nothing was done.

    Raises:
        UsageError: A finite value would not be finite any more, a whole number would change, or one side has
            floats and the other has not.

    Example:
        >>> from tensorcap_formats.dtypes import DTYPES
        >>> cast(np.array([1.5], "<f4"), DTYPES["float32"], DTYPES["bfloat16"])
        (array([16320], dtype=uint16), 'float32 to bfloat16')
    """
    if dtype == wanted:
        return bits, ""
    names = f"{dtype.name} to {wanted.name}"
    values = decode(bits, dtype)
    kinds = dtype.kind, wanted.kind
    if kinds == ("float", "bool"):
        attends = values == 0
        if bool((attends | _is_blocked(values)).all()):
            return attends, f"{names}, as a mask"
    elif kinds == ("bool", "float") and wanted.name in _LEAST:
        return encode(np.where(values, 0.0, _LEAST[wanted.name]), wanted), f"{names}, as a mask"
    elif {*kinds} <= {"int", "uint"}:
        made = values.astype(wanted.storage)
        if wanted.is_native and bool(((made == values) & ((made < 0) == (values < 0))).all()):
            return made, names
        raise UsageError(f"whole numbers of {names} change")
    elif kinds == ("float", "float") and wanted.name in _LEAST:
        return _rounded(values.astype(np.float64), wanted, names)
    raise UsageError(f"{dtype.name} in the archive, {wanted.name} in the model")


def encode(values: Array, wanted: DType) -> Array:
    """Stored elements of a float dtype of two bytes or more, rounded to nearest; too large becomes infinite.

    Args:
        values: float64, any shape.
        wanted: float16, bfloat16, float32 or float64.

    Example:
        >>> from tensorcap_formats.dtypes import DTYPES
        >>> encode(np.array([-1.0, 1e39, np.nan]), DTYPES["bfloat16"]).tolist()
        [49024, 32640, 32704]
    """
    if wanted.is_native:
        with np.errstate(over="ignore"):
            return np.asarray(values).astype(wanted.storage)
    known = np.isfinite(values)
    magnitude = np.where(np.isnan(values), 0x7FC0, 0x7F80)
    numbers = np.abs(FORMATS[wanted.name].numbers(np.where(known, values, 0.0)))
    found = np.where(known, numbers, magnitude).astype(wanted.storage)
    return np.asarray(found | (np.signbit(values).astype(wanted.storage) << 15))


def _rounded(values: Array, wanted: DType, names: str) -> tuple[Array, str]:
    made = encode(values, wanted)
    lost = np.isfinite(values) & ~np.isfinite(decode(made, wanted))
    blocked = lost & _is_blocked(values)
    if bool(blocked.any()):
        least = _LEAST[wanted.name]
        made = np.where(blocked, encode(np.array(least), wanted), made)
        names += f", mask sentinels to {least:g}"
    lost &= ~blocked
    if bool(lost.any()):
        raise UsageError(f"{values[lost].flat[0]:g} is beyond the range of {wanted.name}")
    return made, names


def _is_blocked(values: Array) -> Array:
    """Where a value stands for minus infinity (MET-4)."""
    return np.isin(values.astype(np.float64), _SENTINELS)
