"""Rounding to narrower floats, of values in float64."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tensorcap_formats.dtypes import Array


class Form(NamedTuple):
    """A binary float: bits behind the point, exponent of its smallest normal number, largest number."""

    bits: int
    lowest: int
    largest: float


FORMS: Final = {
    "float32": Form(23, -126, 3.4028234663852886e38),
    "tf32": Form(10, -126, 3.4011621342146535e38),
    "bfloat16": Form(7, -126, 3.3895313892515355e38),
    "float16": Form(10, -14, 65504.0),
    "float8_e4m3fn": Form(3, -6, 448.0),
    "float8_e5m2": Form(2, -14, 57344.0),
}


def rounded(values: Array, dtype: str) -> Array:
    """Round to the nearest value of a dtype, ties to even; what is beyond its range becomes its largest.

    A dtype that is not among `FORMS` leaves the values as they are.

    Example:
        >>> rounded(np.array([1.00390625, 3.0, 500.0]), "float8_e4m3fn").tolist()
        [1.0, 3.0, 448.0]
    """
    form = FORMS.get(dtype)
    if form is None:
        return values
    exponent = np.frexp(values)[1] - 1
    step = np.ldexp(1.0, np.maximum(exponent, form.lowest) - form.bits)
    return np.asarray(np.clip(np.rint(values / step) * step, -form.largest, form.largest))
