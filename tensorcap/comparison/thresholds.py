"""Thresholds of a user: one tolerance for all, or a TOML file by glob (see `specs/policy.md`).

[[threshold]]
match = "0/*.mlp/output"
rtol = 1e-3
metric = "relative_frobenius"
limit = 5e-3
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from tensorcap.comparison.pair import Finding, Status
from tensorcap.metrics import Difference, LogitDifference, Tolerance
from tensorcap.wording import number_and_limit
from tensorcap_formats.errors import ReadError, UsageError, abbreviate
from tensorcap_formats.keys import matches

METRICS: Final[Mapping[str, Literal["lower", "higher"]]] = {  # which of two values is better
    "max_abs": "lower",
    "mean_abs": "lower",
    "max_rel": "lower",
    "mean_rel": "lower",
    "mse": "lower",
    "rmse": "lower",
    "relative_frobenius": "lower",
    "relative_linf": "lower",
    "calc_diff": "lower",
    "psnr_db": "higher",
    "sqnr_db": "higher",
    "cosine": "higher",
    "pearson": "higher",
    "max_ulp": "lower",
    "row_error_median": "lower",
    "row_error_p95": "lower",
    "row_error_max": "lower",
    "outlier": "lower",
    "p50_abs": "lower",
    "p90_abs": "lower",
    "p99_abs": "lower",
    "p999_abs": "lower",
    "unequal": "lower",
    "zero_reference_errors": "lower",
    "zero_rows": "lower",
    "needed_rtol": "lower",
    "needed_atol": "lower",
}
LOGIT_METRICS: Final[Mapping[str, Literal["lower", "higher"]]] = {  # of specs/logits.md
    "kl_mean": "lower",
    "kl_max": "lower",
    "js_mean": "lower",
    "js_max": "lower",
    "top1": "higher",
    "top5": "higher",
    "top10": "higher",
    "rank_mean": "lower",
    "rank_max": "lower",
}
_MEMBERS: Final = ("match", "rtol", "atol", "metric", "limit")


@dataclass(frozen=True, slots=True)
class Threshold:
    """One entry of a file of thresholds.

    Attributes:
        match: Glob over key texts.
        tolerance: Allowed for each element, or None.
        metric: A metric that is limited, or "".
        limit: The largest value of the metric that is green, or the smallest if more is better.
    """

    match: str
    tolerance: Tolerance | None = None
    metric: str = ""
    limit: float = math.nan


@dataclass(frozen=True, slots=True)
class KeyThresholds:
    """All thresholds of one key.

    Attributes:
        tolerance: Allowed for each element, or None.
        limits: Limits of metrics, by name.
    """

    tolerance: Tolerance | None
    limits: Mapping[str, float]

    def __bool__(self) -> bool:
        return self.tolerance is not None or bool(self.limits)

    @property
    def needs_logits(self) -> bool:
        """Whether a metric of logits is limited."""
        return not self.limits.keys().isdisjoint(LOGIT_METRICS)

    def judge_metrics(self, difference: Difference, logits: LogitDifference | None) -> list[Finding]:
        """Judge a difference by all limits of metrics.

        Args:
            difference: The errors.
            logits: The same tensors as logits; None if they are none, or no metric of logits is limited.
        """
        return [
            judge_metric(logits if name in LOGIT_METRICS else difference, name, limit)
            for name, limit in self.limits.items()
        ]

    def judge(self, difference: Difference, logits: LogitDifference | None = None) -> tuple[Finding, ...]:
        """Judge a difference, measured with this tolerance, by all thresholds; `logits` as for metrics."""
        findings = self.judge_metrics(difference, logits)
        if self.tolerance is not None and difference.mismatches is not None:
            status: Status = "diverged" if difference.mismatches else "match"
            text = f"{difference.mismatches} of {difference.measured} elements are outside rtol "
            text += f"{self.tolerance.rtol:g}, atol {self.tolerance.atol:g}"
            findings.insert(0, Finding("tolerance", difference.mismatches, 0, status, text))
        return tuple(findings)


@cache
def _by_default(tolerance: Tolerance | None) -> KeyThresholds:
    return KeyThresholds(tolerance, {})


@dataclass(frozen=True, slots=True)
class Thresholds:
    """All thresholds of a user; a later entry wins over an earlier one, and each over the default.

    Attributes:
        default: Tolerance for keys that no entry with a tolerance matches, or None.
        entries: Entries of the file, in its order.
        path: The file, or None.
    """

    default: Tolerance | None = None
    entries: tuple[Threshold, ...] = ()
    path: Path | None = None

    @classmethod
    def parse(
        cls, rtol: float | None, atol: float | None, path: str | os.PathLike[str] | None = None
    ) -> Thresholds:
        """Parse the options of a user.

        Raises:
            UsageError: A number is negative or not finite; the file has something that is no threshold.
            ReadError: The file cannot be read.
        """
        default = Tolerance.parse(rtol, atol)
        return cls(default) if path is None else cls(default, tuple(_entries(Path(path))), Path(path))

    def limits_for(self, text: str) -> KeyThresholds:
        """Return the thresholds of a key; those of all keys are one object, if there is no file."""
        if not self.entries:
            return _by_default(self.default)
        tolerance = self.default
        limits: dict[str, float] = {}
        for entry in self.entries:
            if matches(text, entry.match):
                tolerance = entry.tolerance or tolerance
                if entry.metric:
                    limits[entry.metric] = entry.limit
        return KeyThresholds(tolerance, limits)

    def require_hits(self, texts: Iterable[str]) -> None:
        """Refuse an entry that matches no key of the comparison: it is a slip.

        Raises:
            UsageError: There is one.
        """
        known = list(texts) if self.entries else []
        for entry in self.entries:
            if not any(matches(text, entry.match) for text in known):
                raise UsageError(
                    f"{self.path}: threshold for {abbreviate(entry.match)!r} matches no key of {len(known)}",
                    hint=_did_you_mean(entry.match, known),
                )


def judge_metric(measures: Difference | LogitDifference | None, metric: str, limit: float) -> Finding:
    """Judge one metric by a limit; one that is undefined here is unjudged."""
    value = getattr(measures, metric, None)
    if value is None:
        return Finding(metric, math.nan, limit, "unjudged", f"{metric} is undefined here")
    is_higher = is_better_if_higher(metric)
    is_within = value >= limit if is_higher else value <= limit
    shown, most = number_and_limit(value, limit, 6)
    text = f"{metric} is {shown}, expected at {'least' if is_higher else 'most'} {most}"
    return Finding(metric, float(value), limit, "match" if is_within else "diverged", text)


def is_better_if_higher(metric: str) -> bool:
    """Whether more of a metric is better; of one that no threshold is for, less is."""
    return {**METRICS, **LOGIT_METRICS}.get(metric) == "higher"


def metric_named(name: str, where: str = "metric") -> str:
    """Check the name of a metric.

    Raises:
        UsageError: There is none of that name; the hint says which was meant.
    """
    known = (*METRICS, *LOGIT_METRICS)
    if name in known:
        return name
    raise UsageError(
        f"{where}: metric {abbreviate(name)!r} is unknown",
        hint=_did_you_mean(name, known, cutoff=0.5) or f"Known are: {', '.join(known)}.",
    )


def _did_you_mean(name: str, known: Iterable[str], *, count: int = 3, cutoff: float = 0.6) -> str | None:
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ReadError: It cannot be read.
        UsageError: It is no TOML.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]  # the same, by its author
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReadError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also no UTF-8, and numbers of too many digits
        raise UsageError(f"{path}: no TOML: {error}") from None


def _entries(path: Path) -> list[Threshold]:
    document = read_toml(path)
    for name in document:
        if name != "threshold":
            raise UsageError(f"{path}: has {abbreviate(name)!r}, expected tables [[threshold]]")
    tables = document.get("threshold")
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path}: has no thresholds, expected tables [[threshold]]")
    return [_entry(table, f"{path}: threshold {i}") for i, table in enumerate(tables, 1)]


def _entry(table: object, where: str) -> Threshold:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: is no table")
    for name in table:
        if name not in _MEMBERS:
            raise UsageError(
                f"{where}: has {abbreviate(name)!r}, expected {', '.join(_MEMBERS)}",
                hint=_did_you_mean(name, _MEMBERS, count=1),
            )
    match, metric = table.get("match"), table.get("metric", "")
    if not isinstance(match, str) or not isinstance(metric, str):
        raise UsageError(f"{where}: expected a glob as match, and the name of a metric as metric")
    numbers = {name: _number(table, name, where) for name in ("rtol", "atol", "limit")}
    if metric:
        metric_named(metric, where)
    if bool(metric) != (numbers["limit"] is not None):
        raise UsageError(f"{where}: expected metric and limit together")
    try:
        tolerance = Tolerance.parse(numbers["rtol"], numbers["atol"])
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if tolerance is None and not metric:
        raise UsageError(f"{where}: limits nothing, expected rtol, atol, or metric and limit")
    limit = numbers["limit"]
    return Threshold(match, tolerance, metric, math.nan if limit is None else limit)


def _number(table: Mapping[str, Any], name: str, where: str) -> float | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise UsageError(f"{where}: {name} is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{where}: {name} is beyond float64, expected a smaller number") from None
