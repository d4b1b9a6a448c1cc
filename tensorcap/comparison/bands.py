"""Bands of metrics, green, yellow and red, by the precision of the target: a way to look, and no verdict.

Apple publishes no limits of its colours. These are in decibels of the peak signal-to-noise ratio, chosen from
what its public repositories call good, and what they say is to be looked into:

| precision | green from | red below | why |
|---|---|---|---|
| float32, float64 | 60 dB | 40 dB | models are to have 70 dB, and less than 60 dB is to be looked into |
| float16, bfloat16 | 40 dB | 25 dB | more than 50 dB, less than 40 dB; a wrong activation gives 20 to 30 dB |
| 8 bits | 35 dB | 20 dB | 55 dB at the end of a model, which averages what inner values have; gate: 22 dB |
| 4 bits | 30 dB | 15 dB | about 40 dB, less than 30 to 35 dB; gate: 15 dB |
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tensorcap.comparison.ranking import Shade
from tensorcap.metrics import Difference
from tensorcap_formats.errors import UsageError

SyncMetric = Literal["psnr", "mean-abs", "mean-squared", "max-abs", "mean-relative"]
SYNC_METRICS: Final[tuple[SyncMetric, ...]] = SyncMetric.__args__  # type: ignore[attr-defined] # no public name
METRIC_TEXTS: Final[Mapping[SyncMetric, str]] = {
    "psnr": "PSNR, 10 log10(max r^2 / mean (t - r)^2) in dB; identical values have an infinite one",
    "mean-abs": "mean of |t - r|",
    "mean-squared": "mean of (t - r)^2",
    "max-abs": "largest |t - r|",
    "mean-relative": "mean of |t - r| / |r| over elements with r other than 0",
}
_FLOATS: Final = {"float32": 32, "float64": 32, "float16": 16, "bfloat16": 16}
_BITS: Final = re.compile(r"\D*(\d+)")
_WEIGHTS: Final = re.compile(r"with (\S+) weights")
# Largest of many errors over their RMS: 5 of a million normal ones, more of errors that are not
_LARGEST: Final = 8.0
# Mean relative errors of float16; of other bands, as many times more as their errors are
_RELATIVE: Final = (1e-3, 1e-1)


@dataclass(frozen=True, slots=True)
class Bands:
    """From which PSNR on a value is green, and below which it is red.

    Attributes:
        green: In dB.
        red: In dB.
        name: What they are of, `16-bit floats`; "given" for a user's.
    """

    green: float
    red: float
    name: str

    @classmethod
    def of(cls, precision: str) -> Bands:
        """The bands of a precision, as a comparison names it.

        Example:
            >>> Bands.of("float16"), Bands.of("float32 with int4 weights").name
            (Bands(green=40.0, red=25.0, name='16-bit floats'), '4 bits')
        """
        weights = _WEIGHTS.search(precision)
        match = _BITS.match(weights[1] if weights else precision)
        bits = _FLOATS.get(precision, int(match[1]) if match else 32)
        return next(bands for most, bands in _TABLE if bits <= most)

    @classmethod
    def parse(cls, text: str) -> Bands:
        """Read `GREEN/RED`, both in dB.

        Raises:
            UsageError: It is no pair of finite numbers, the first at least the second.

        Example:
            >>> Bands.parse("50/30")
            Bands(green=50.0, red=30.0, name='given')
        """
        try:
            green, red = map(float, text.split("/"))
        except ValueError:
            green, red = math.nan, math.nan
        if not (math.isfinite(green) and math.isfinite(red) and green >= red):
            raise UsageError(
                f"bands {text!r}: expected GREEN/RED in dB of PSNR, GREEN at least RED, as 40/25"
            )
        return cls(green, red, "given")

    @property
    def text(self) -> str:
        """Where the bands lie, and what they are of.

        Example:
            >>> Bands.of("bfloat16").text
            'green from 40 dB, red below 25 dB of PSNR (16-bit floats)'
        """
        return f"green from {self.green:g} dB, red below {self.red:g} dB of PSNR ({self.name})"

    def limits(self, metric: SyncMetric, peak: float) -> tuple[float, float]:
        """From where on a metric is green, and from where on it is red.

        The PSNR bounds the mean squared error: `peak^2 * 10^(-dB / 10)`. The mean absolute error is at most
        its root; of the largest one, 8 times the root is expected; a mean relative error has limits of its
        own, which do not depend on the peak.

        Args:
            metric: The metric.
            peak: Largest absolute value of the reference, in the tensor's unit.
        """
        if metric == "psnr":
            return self.green, self.red
        if metric == "mean-relative":
            ratios = (
                10 ** ((base - own) / 20) for base, own in ((_HALF.green, self.green), (_HALF.red, self.red))
            )
            green, red = (limit * ratio for limit, ratio in zip(_RELATIVE, ratios, strict=True))
            return green, red
        factor = _LARGEST if metric == "max-abs" else 1.0
        errors = (factor * peak * 10 ** (-decibels / 20) for decibels in (self.green, self.red))
        green, red = (error**2 if metric == "mean-squared" else error for error in errors)
        return green, red

    def shade(self, metric: SyncMetric, value: float | None, peak: float) -> Shade | None:
        """The colour of a metric's value; None if it is undefined.

        Args:
            metric: The metric.
            value: Its value.
            peak: As for `limits`.

        Example:
            >>> Bands.of("float16").shade("psnr", 91.7, 1.0), Bands.of("float32").shade("psnr", 91.7, 1.0)
            ('green', 'green')
            >>> Bands.of("float16").shade("mean-squared", 1e-3, 1.0)
            'yellow'
        """
        if value is None or math.isnan(value):
            return None
        green, red = self.limits(metric, peak)
        if metric == "psnr":
            return "green" if value >= green else "red" if value < red else "yellow"
        return "green" if value <= green else "red" if value > red else "yellow"


_HALF: Final = Bands(40.0, 25.0, "16-bit floats")
_TABLE: Final = (  # most bits, bands
    (4, Bands(30.0, 15.0, "4 bits")),
    (8, Bands(35.0, 20.0, "8 bits")),
    (16, _HALF),
    (1 << 30, Bands(60.0, 40.0, "32-bit floats")),
)


def metric_values(difference: Difference | None) -> dict[SyncMetric, float | None]:
    """The five metrics of a pair; of equal digests, which are not measured, those of no error.

    Args:
        difference: The pair's; None if it is identical.
    """
    if difference is None:
        return {"psnr": math.inf, "mean-abs": 0.0, "mean-squared": 0.0, "max-abs": 0.0, "mean-relative": 0.0}
    is_equal = difference.mse == 0 and not difference.mask_mismatches
    return {
        "psnr": math.inf if is_equal else difference.psnr_db,
        "mean-abs": difference.mean_abs,
        "mean-squared": difference.mse,
        "max-abs": difference.max_abs,
        "mean-relative": 0.0 if is_equal else difference.mean_rel,
    }


def peak_of(difference: Difference | None) -> float:
    """Largest absolute value of a reference's measured elements, as its errors say; 0 if they do not.

    Example:
        >>> peak_of(None)
        0.0
    """
    if difference is None or not difference.mse or difference.psnr_db is None:
        return 0.0
    if not math.isfinite(difference.psnr_db):
        return 0.0
    return math.sqrt(difference.mse) * float(10 ** (difference.psnr_db / 20))
