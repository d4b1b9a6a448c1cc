"""Histograms as bars in a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tensorcap_cli.text.output import number_text

if TYPE_CHECKING:
    from tensorcap.metrics import Difference
    from tensorcap.runs import ValueHistogram

_BARS: Final = "▁▂▃▄▅▆▇█"
_SHIFT: Final = 50  # of the bits of a float64 to the number of its bin, four bins to a power of two (MET-11)
_MOST_BARS: Final = 32


def bars(counts: Sequence[int]) -> str:
    """Bars as high as the root of each count, since tails are what differs; none for a count of 0.

    Example:
        >>> bars([0, 1, 4, 64, 4])
        ' ▁▂█▂'
    """
    top = max(counts, default=0) or 1
    return "".join(_BARS[max(0, math.ceil(8 * math.sqrt(c / top)) - 1)] if c else " " for c in counts)


def value_line(histogram: ValueHistogram) -> str:
    """A histogram of values between the least and the largest of them."""
    low, high = number_text(histogram.low), number_text(histogram.high)
    return f"values {low} {bars(histogram.counts)} {high}"


def error_line(difference: Difference) -> str:
    """The absolute errors of a pair on a log scale, between the least and the largest; "" if alike."""
    bins = [(number, count) for number, count in difference.errors if number]
    if len(bins) < 2 or difference.max_abs is None or not math.isfinite(difference.max_abs):
        return ""
    first, last = bins[0][0], bins[-1][0]
    width = -(-(last - first + 1) // _MOST_BARS)
    counts = [0] * ((last - first) // width + 1)
    for number, count in bins:
        counts[(number - first) // width] += count
    low, high = number_text(_lower_edge(first), 2), number_text(difference.max_abs, 2)
    return f"errors {low} {bars(counts)} {high} (log scale)"


def _lower_edge(number: int) -> float:
    import numpy as np

    return float(np.int64(number << _SHIFT).view(np.float64))
