"""How a metric looks at a glance: green, yellow or red by the precision of the run; no verdict (RES-33)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

from tensorcap_formats.float_formats import UNIT_ROUNDOFFS

Shade = Literal["green", "yellow", "red"]
# Relative errors up to so many u, half the distance from 1 to the next value, are green, and yellow
_GREEN: Final = 8.0
_YELLOW: Final = 32.0
# What each metric is of a relative error e that is spread evenly
_FORMS: Final[Mapping[str, Literal["error", "square", "cosine", "decibel"]]] = {
    "relative_frobenius": "error",
    "relative_linf": "error",
    "mean_rel": "error",
    "row_error_median": "error",
    "row_error_p95": "error",
    "calc_diff": "square",
    "kl_mean": "square",
    "js_mean": "square",
    "cosine": "cosine",
    "pearson": "cosine",
    "psnr_db": "decibel",
    "sqnr_db": "decibel",
}


def shade(metric: str, value: float | None, precision: str) -> Shade | None:
    """The color of a metric's value.

    Args:
        metric: Its name.
        value: None where it is undefined.
        precision: Compute dtype of the target's run.

    Returns:
        None for a metric that is no relative one, a value that is undefined and an unknown precision.

    Example:
        >>> shade("relative_frobenius", 0.02, "bfloat16"), shade("relative_frobenius", 0.02, "float32")
        ('green', 'red')
    """
    form, unit = _FORMS.get(metric), UNIT_ROUNDOFFS.get(precision)
    if form is None or unit is None or value is None or math.isnan(value):
        return None
    error = _error(form, value)
    return "green" if error <= _GREEN * unit else "yellow" if error <= _YELLOW * unit else "red"


def _error(form: str, value: float) -> float:
    """The relative error that gives a metric this value."""
    if form == "square":
        return math.sqrt(2 * value)
    if form == "cosine":
        return math.sqrt(max(0.0, 2 * (1 - value)))
    return float(10 ** (-value / 20)) if form == "decibel" else value
