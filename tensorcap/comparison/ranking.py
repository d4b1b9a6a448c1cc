"""Rankings of pairs, errors by class of module, and colours of metrics by precision.

The colour of a metric, green, yellow or red, is for a glance and no verdict (RES-34).
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tensorcap.comparison.pair import SEVERITY, Pair, Status
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import module_of


@dataclass(frozen=True, slots=True)
class Group:
    """The errors of all pairs whose modules are of one class.

    Attributes:
        class_name: The class, "" if it is not known.
        count: Pairs that were compared.
        statuses: How many pairs have each status.
        minimum: Smallest relative Frobenius error; None if no pair has one.
        median: The median.
        maximum: The largest.
        worst: Key of the pair that has it, "" if there is none.
    """

    class_name: str
    count: int
    statuses: Mapping[Status, int]
    minimum: float | None
    median: float | None
    maximum: float | None
    worst: str


_SEVERITIES: Final = {status: number for number, status in enumerate(SEVERITY)}


def error_of(pair: Pair) -> float | None:
    """Return the relative Frobenius error of a pair; 0 for equal digests, None if nothing was measured."""
    if pair.difference is not None:
        return pair.difference.relative_frobenius
    return 0.0 if pair.status == "identical" else None


def severity(pair: Pair) -> tuple[bool, int, float, float]:
    """Sort key: the larger, the worse. Status first, then by how much a test failed, then by error."""
    excess = max([_excess(f.value, f.limit) for f in pair.findings if f.status == pair.status], default=0.0)
    error = error_of(pair)
    return pair.is_required, _SEVERITIES[pair.status], excess, error or 0.0


def _excess(value: float, limit: float) -> float:
    """Return how far a value is beyond its limit, whichever of both should be the larger."""
    if not (math.isfinite(value) and math.isfinite(limit)):
        return math.inf
    if limit == 0 or value == 0:
        return abs(value - limit)
    return max(value / limit, limit / value)


def worst(pairs: Iterable[Pair], count: int) -> list[Pair]:
    """List required pairs with values that are not green, the worst first; of equal contents only one."""
    known: dict[object, tuple[tuple[bool, int, float, float], Pair]] = {}  # by contents: in order
    for pair in pairs:
        if not pair.is_required or pair.is_green or pair.is_absent:
            continue
        same, rank = contents(pair) or pair.key, severity(pair)
        if same not in known or rank > known[same][0]:
            known.pop(same, None)
            known[same] = rank, pair
    ranked = heapq.nlargest(count, known.values(), key=lambda entry: entry[0])
    return [pair for _, pair in ranked]


def contents(pair: Pair) -> tuple[str, str] | None:
    """Return the digests of both sides, or None; pairs of a tensor that was passed on have the same."""
    ours, theirs = pair.reference, pair.target
    return (ours.digest, theirs.digest) if ours and theirs and ours.digest and theirs.digest else None


def by_error(pair: Pair) -> tuple[bool, float]:
    """Sort key: what is required and cannot be measured, then by relative error."""
    difference = pair.difference
    if difference is None or difference.mask_mismatches:
        return pair.is_required and not pair.is_green, math.inf
    return False, difference.relative_frobenius or 0.0


def by_module(pairs: Iterable[Pair], classes: Mapping[str, str]) -> list[Group]:
    """Summarize errors by class of module, the largest error first.

    Args:
        pairs: Those of a comparison.
        classes: Class of each site.
    """
    members: dict[str, list[Pair]] = {}
    for pair in pairs:
        record = pair.reference
        if record is not None and pair.status != "excluded":
            members.setdefault(classes.get(module_of(record.key.site), ""), []).append(pair)
    groups = [_group(name, pairs_of_class) for name, pairs_of_class in members.items()]
    return sorted(groups, key=lambda g: -1.0 if g.maximum is None else g.maximum, reverse=True)


def _group(class_name: str, pairs: list[Pair]) -> Group:
    statuses: dict[Status, int] = {}
    for pair in pairs:
        statuses[pair.status] = statuses.get(pair.status, 0) + 1
    errors = [(error, pair.key) for pair in pairs if (error := error_of(pair)) is not None]
    maximum, key = max(errors, default=(None, ""), key=lambda entry: entry[0])
    return Group(
        class_name,
        sum(pair.is_compared for pair in pairs),
        statuses,
        min((error for error, _ in errors), default=None),
        statistics.median(error for error, _ in errors) if errors else None,
        maximum,
        key,
    )


Shade = Literal["green", "yellow", "red"]
# Relative errors up to so many u, half the distance from 1 to the next value, are green, and yellow
SHADES: Final = (8.0, 32.0)
# What each metric is of a relative error e that is spread evenly
_FORMS: Final[Mapping[str, Literal["error", "square", "cosine", "decibel"]]] = {
    "relative_frobenius": "error",
    "relative_linf": "error",
    "mean_rel": "error",
    "row_error_median": "error",
    "row_error_p95": "error",
    "row_error_max": "error",
    "calc_diff": "square",
    "kl_mean": "square",
    "js_mean": "square",
    "cosine": "cosine",
    "pearson": "cosine",
    "psnr_db": "decibel",
    "sqnr_db": "decibel",
}


def shade(metric: str, value: float | None, precision: str) -> Shade | None:
    """Return the colour of a metric's value.

    Args:
        metric: Its name.
        value: None if it is undefined.
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
    return "green" if error <= SHADES[0] * unit else "yellow" if error <= SHADES[1] * unit else "red"


def _error(form: str, value: float) -> float:
    """Return the relative error that gives a metric this value."""
    if form == "square":
        return math.sqrt(2 * value)
    if form == "cosine":
        return math.sqrt(max(0.0, 2 * (1 - value)))
    return float(10 ** (-value / 20)) if form == "decibel" else value
