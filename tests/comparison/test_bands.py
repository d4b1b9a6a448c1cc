"""The five metrics of sync points and their colours, against float64 arithmetic and literal values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import SYNC_METRICS, Bands, SyncMetric
from tensorcap.comparison.bands import metric_values, peak_of
from tensorcap.metrics import measure
from tensorcap_formats.errors import UsageError


def measured(make_archive: Callable[..., Any], reference: Any, target: Any) -> Any:
    archives = [make_archive({"x": np.asarray(x, np.float32)}) for x in (reference, target)]
    return measure(archives[0], archives[0].records[0], archives[1], archives[1].records[0])


@pytest.mark.spec("SYN-30")
def test_metrics_are_those_of_float64(make_archive: Callable[..., Any]) -> None:
    difference = measured(make_archive, [[1.0, -4.0], [0.0, 2.0]], [[1.5, -4.0], [0.25, 2.0]])
    values = metric_values(difference)
    assert values["psnr"] == pytest.approx(10 * math.log10(16 / (0.3125 / 4)), abs=1e-9)
    assert values["mean-abs"] == 0.75 / 4
    assert values["mean-squared"] == 0.3125 / 4
    assert values["max-abs"] == 0.5
    assert values["mean-relative"] == pytest.approx(0.5 / 3, rel=2e-7)  # the zero is left out
    assert peak_of(difference) == pytest.approx(4.0, rel=1e-9)


@pytest.mark.spec("SYN-30")
def test_no_error_is_infinitely_good_and_gets_no_epsilon(make_archive: Callable[..., Any]) -> None:
    for values in (metric_values(None), metric_values(measured(make_archive, [0.0, 1.0], [-0.0, 1.0]))):
        assert values == {
            "psnr": math.inf,
            "mean-abs": 0,
            "mean-squared": 0,
            "max-abs": 0,
            "mean-relative": 0,
        }
    tiny = metric_values(measured(make_archive, [1.0, 1.0], [1.0, 1.0 + 2**-20]))
    assert tiny["psnr"] == pytest.approx(10 * math.log10(2 * 2.0**40), abs=1e-9)


@pytest.mark.spec("SYN-31")
@pytest.mark.parametrize(
    ("precision", "green", "red"),
    [
        pytest.param("float32", 60, 40, id="float32"),
        pytest.param("float64", 60, 40, id="float64"),
        pytest.param("float16", 40, 25, id="float16"),
        pytest.param("bfloat16", 40, 25, id="bfloat16"),
        pytest.param("float8_e4m3fn", 35, 20, id="float8"),
        pytest.param("float32 with int8 weights", 35, 20, id="int8"),
        pytest.param("float16 with int4 weights", 30, 15, id="int4"),
        pytest.param("", 60, 40, id="unknown"),
    ],
)
def test_each_precision_has_its_bands(precision: str, green: float, red: float) -> None:
    bands = Bands.of(precision)
    assert (bands.green, bands.red) == (green, red)
    shades = [bands.shade("psnr", value, 1.0) for value in (green, green - 0.1, red, red - 0.1)]
    assert shades == ["green", "yellow", "yellow", "red"]
    assert bands.shade("psnr", math.inf, 0.0) == "green"
    assert bands.shade("psnr", None, 1.0) is None


@pytest.mark.spec("SYN-32")
@pytest.mark.parametrize(
    ("metric", "green", "red"),
    [
        pytest.param("mean-squared", 4e-4, 4 * 10**-2.5, id="mean-squared"),
        pytest.param("mean-abs", 2e-2, 2 * 10**-1.25, id="mean-abs"),
        pytest.param("max-abs", 0.16, 16 * 10**-1.25, id="max-abs"),
        pytest.param("mean-relative", 1e-3, 1e-1, id="mean-relative"),
    ],
)
def test_other_metrics_have_the_bands_of_the_psnr(metric: SyncMetric, green: float, red: float) -> None:
    """With a peak of 2 and bands of 40 and 25 dB: 4 * 10^-4, and its root 0.02."""
    bands = Bands.of("float16")
    assert list(bands.limits(metric, 2.0)) == pytest.approx([green, red])
    shades = [bands.shade(metric, value, 2.0) for value in (0.99 * green, 1.01 * green, 1.01 * red)]
    assert shades == ["green", "yellow", "red"]


@pytest.mark.spec("SYN-32")
def test_limits_of_a_relative_error_move_with_the_bands() -> None:
    green, red = Bands.of("float32").limits("mean-relative", 1.0)
    assert green == pytest.approx(1e-4)  # 20 dB more than float16
    assert red == pytest.approx(1e-1 * 10 ** (-15 / 20))


@pytest.mark.spec("SYN-31")
@pytest.mark.parametrize("text", ["40", "a/b", "20/40", "inf/3", "1/2/3", "nan/1"])
def test_bands_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected GREEN/RED in dB of PSNR, GREEN at least RED, as 40/25"):
        Bands.parse(text)


def test_every_metric_has_a_name() -> None:
    assert SYNC_METRICS == ("psnr", "mean-abs", "mean-squared", "max-abs", "mean-relative")
