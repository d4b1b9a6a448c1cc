"""Limits from archives of known-good ports: quantiles with a margin, per metric and kind of module."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap.comparison.pair import Finding, Pair
from tensorcap.comparison.policy import Limits
from tensorcap.comparison.thresholds import LOGIT_METRICS, is_better_if_higher, metric_named, read_toml
from tensorcap.metrics import LogitDifference, are_logits
from tensorcap.runs import Calls
from tensorcap.wording import number_and_limit
from tensorcap_formats.errors import UsageError, abbreviate
from tensorcap_formats.keys import Key

FORMAT: Final = "tensorcap-calibration"
VERSION: Final = 1
CALIBRATED: Final = ("row_error_median", "row_error_p95", "relative_frobenius", "outlier")
FEWEST_RUNS: Final = 2
FEWEST_SAMPLES: Final = 20  # of one metric and kind: a quantile of fewer is no more than their maximum

MeasuresLogits = Callable[[Pair], LogitDifference | None]
Kind = tuple[str, str]  # class of the module, and `input` or `output`


@dataclass(frozen=True, slots=True)
class Calibration:
    """Limits from known-good ports.

    Attributes:
        precision: The precision that they were judged in.
        quantile: Which quantile the limits are, 0 to 1.
        margin: What the quantile was multiplied by, no unit.
        runs: Count of pairs of archives.
        limits: Limit and count of samples by kind of module, then by metric.
        path: Where it was read from, or None.
    """

    precision: str
    quantile: float
    margin: float
    runs: int
    limits: Mapping[Kind, Mapping[str, tuple[float, int]]]
    path: Path | None = None

    def judge(self, pair: Pair, calls: Calls, logits: MeasuresLogits) -> list[Finding]:
        """Judge a measured pair by the limits of its kind; no findings if there are none."""
        if pair.difference is None or pair.reference is None:
            return []
        findings = []
        for metric, (limit, count) in self.limits.get(kind_of(pair.reference.key, calls), {}).items():
            value = _value(pair, metric, logits)
            if value is None:
                continue
            shown, most = number_and_limit(value, limit, 3)
            text = f"{metric} is {shown}, expected at most {most} by {count} of known-good ports"
            findings.append(Limits(limit, math.inf).finding(metric, float(value), text))
        return findings

    def document(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "precision": self.precision,
            "quantile": self.quantile,
            "margin": self.margin,
            "runs": self.runs,
            "limit": [
                {"module": class_name, "slot": slot, "metric": metric, "limit": limit, "count": count}
                for (class_name, slot), metrics in sorted(self.limits.items())
                for metric, (limit, count) in metrics.items()
            ],
        }

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `write_calibration` wrote.

        Raises:
            ReadError: The file cannot be read.
            UsageError: It is no calibration, or limits what it cannot.
        """
        file = Path(path)
        return cls.of(read_toml(file), path=file)

    @classmethod
    def of(cls, document: Mapping[str, Any], *, path: Path | None) -> Calibration:
        """Parse what `document` returns.

        Args:
            document: A calibration file, parsed.
            path: Where it was read from, or None.

        Raises:
            UsageError: It is no calibration, or limits what it cannot.
        """
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise UsageError(f"{path}: is no calibration of version {VERSION}, as tcap calibrate writes it")
        limits: dict[Kind, dict[str, tuple[float, int]]] = {}
        entries = document.get("limit")
        if not isinstance(entries, list) or not entries:
            raise UsageError(f"{path}: is no whole calibration: has no tables [[limit]]")
        for i, entry in enumerate(entries, 1):
            where = f"{path}: limit {i}"
            if not isinstance(entry, dict):
                raise UsageError(f"{where}: is no table")
            metric = metric_named(_text(entry, "metric", where), where)
            _require_error(metric, where)
            kind = _text(entry, "module", where), _text(entry, "slot", where)
            numbers = _number(entry, "limit", where), int(_number(entry, "count", where))
            limits.setdefault(kind, {})[metric] = numbers
        return cls(
            _text(document, "precision", str(path)),
            _number(document, "quantile", str(path)),
            _number(document, "margin", str(path)),
            int(_number(document, "runs", str(path))),
            limits,
            path,
        )


def _value(pair: Pair, metric: str, logits: MeasuresLogits) -> Any:
    """A metric of a pair that was measured; None if it is undefined, or of logits and the pair holds none."""
    if metric not in LOGIT_METRICS:
        return getattr(pair.difference, metric, None)
    is_one = pair.reference is not None and are_logits(pair.reference.key)
    return getattr(logits(pair), metric, None) if is_one else None


def _text(table: Mapping[str, Any], name: str, where: str) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} is {_shown(value)}, expected a text")
    return value


def _number(table: Mapping[str, Any], name: str, where: str) -> float:
    value = table.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise UsageError(f"{where}: {name} is {_shown(value)}, expected a finite number of at least 0")


def _shown(value: object) -> str:
    return "missing" if value is None else abbreviate(repr(value))


def _require_error(metric: str, where: str) -> None:
    if is_better_if_higher(metric):
        raise UsageError(f"{where}: metric {metric!r}: more of it is better, expected a metric of errors")


def kind_of(key: Key, calls: Calls) -> Kind:
    """Return the kind of module of a record, by its class or the last part of its name; and the op."""
    module, colon, point = key.site.partition(":")
    name = calls.class_of(module) or module.rpartition(".")[2]
    return name + colon + point, key.slot.partition(".")[0]


def check_settings(quantile: float, margin: float, metrics: Sequence[str]) -> None:
    """Refuse settings that give no limits.

    Raises:
        UsageError: The quantile is not between 0 and 1, the margin is below 1, or more of a metric is better.
    """
    if not 0.5 <= quantile <= 1:
        raise UsageError(f"quantile: is {quantile!r}, expected 0.5 to 1")
    if not (math.isfinite(margin) and margin >= 1):
        raise UsageError(f"margin: is {margin!r}, expected at least 1")
    for name in metrics:
        _require_error(metric_named(name), "calibration")


class CalibrationBuilder:
    """Collects the errors of comparisons of known-good ports, and computes limits from them.

    Args:
        metrics: Metrics to limit.
    """

    def __init__(self, metrics: Sequence[str] = CALIBRATED) -> None:
        self._metrics = metrics
        self._samples: dict[Kind, dict[str, list[float]]] = {}
        self._precisions: dict[str, None] = {}
        self._runs = 0

    def add(self, pairs: Sequence[Pair], calls: Calls, precision: str, logits: MeasuresLogits) -> None:
        """Add the pairs of one run."""
        self._runs += 1
        self._precisions[precision] = None
        for pair in pairs:
            if pair.reference is None or not pair.reference.dtype.is_inexact:
                continue
            kind = self._samples.setdefault(kind_of(pair.reference.key, calls), {})
            for metric, value in self._values(pair, logits):
                kind.setdefault(metric, []).append(value)

    def result(self, *, quantile: float, margin: float) -> Calibration:
        """Compute the limits.

        Raises:
            UsageError: There are too few runs or samples, or the runs differ in precision.
        """
        if self._runs < FEWEST_RUNS:
            raise UsageError(f"{self._runs} passing runs, expected at least {FEWEST_RUNS} to calibrate by")
        if len(self._precisions) != 1:
            raise UsageError(f"runs of several precisions: {', '.join(self._precisions)}, expected one")
        limits = {
            kind: {
                metric: (margin * float(np.quantile(values, quantile, method="higher")), len(values))
                for metric, values in metrics.items()
                if len(values) >= FEWEST_SAMPLES
            }
            for kind, metrics in self._samples.items()
        }
        limits = {kind: metrics for kind, metrics in limits.items() if metrics}
        if not limits:
            raise UsageError(
                f"no kind of module has the {FEWEST_SAMPLES} samples that a quantile needs",
                hint="Calibrate by more runs, or by runs of more layers.",
            )
        return Calibration(next(iter(self._precisions)), quantile, margin, self._runs, limits)

    def _values(self, pair: Pair, logits: MeasuresLogits) -> Iterator[tuple[str, float]]:
        for metric in self._metrics:
            value = 0.0 if pair.status == "identical" else _value(pair, metric, logits)
            if value is not None and math.isfinite(value):
                yield metric, float(value)
