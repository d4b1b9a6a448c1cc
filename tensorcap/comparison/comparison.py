"""Two archives compared: the result, and its JSON (RES-1 to RES-5, `specs/result.schema.json`).

What each status means is normative in `specs/comparison.md`.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from tensorcap.alignment import MappingSummary
from tensorcap.comparison.blind_spots import RunSummary
from tensorcap.comparison.calibration import Calibration
from tensorcap.comparison.divergence import Divergence
from tensorcap.comparison.examination import Examination
from tensorcap.comparison.pair import ABSENT, STATUSES, Pair, Status
from tensorcap.comparison.policy import Policy
from tensorcap.comparison.quantised_layers import QuantisedLayers
from tensorcap.comparison.ranking import by_module, error_of, worst
from tensorcap.metrics import ErrorMap, Histogram, Tolerance
from tensorcap.runs import ArchiveSummary
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import module_of
from tensorcap_formats.notebook import ROWS, card
from tensorcap_formats.records import Record


def is_number(value: object) -> bool:
    """Whether a value that is no tensor is a number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_within(ours: Any, theirs: Any, tolerance: Tolerance) -> bool:
    """Whether two finite numbers agree, computed exactly, since whole numbers may exceed float64."""
    if not (is_number(ours) and is_number(theirs)):
        return False
    if any(isinstance(value, float) and not math.isfinite(value) for value in (ours, theirs)):
        return False
    trusted, rtol, atol = Fraction(ours), Fraction(tolerance.rtol), Fraction(tolerance.atol)
    return abs(Fraction(theirs) - trusted) <= atol + rtol * abs(trusted)


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """An argument or a result that is no tensor and differs (CMP-15).

    Attributes:
        key: Its key text.
        reference: JSON value of the reference, None also if it has none.
        target: JSON value of the target, None also if it has none.
        is_result: Whether it is a number that a module returned.
        is_within: Whether a tolerance that was given allows it.
    """

    key: str
    reference: Any
    target: Any
    is_result: bool = False
    is_within: bool = False

    @property
    def is_red(self) -> bool:
        """Whether the comparison is not green for it."""
        return self.is_result and not self.is_within

    def judged(self, tolerance: Tolerance | None) -> ValueDifference:
        """Return the difference judged by a tolerance, or as it was without one."""
        if tolerance is None or not self.is_result:
            return self
        return replace(self, is_within=_is_within(self.reference, self.target, tolerance))


@dataclass(frozen=True)
class Comparison:
    """Two archives compared.

    Attributes:
        reference: The trusted archive.
        target: The archive under test.
        tolerance: What was allowed if a file of thresholds says nothing else, or None.
        pairs: All pairs: in execution order of the reference, then records that only the target has.
        divergence: The first pair that is not green, and its module; None if all are.
        value_differences: Arguments and results that are no tensors and differ.
        warnings: What a reader has to know first, a sentence each.
        is_of_archives: False if two records were named, so that it matters to nobody what else there is.
        account: What the policy's tests say of the runs as a whole, and what they cannot see.
        thresholds: The file of thresholds, or None.
        calibration: The calibration that limits came from, or None.
        baseline: The baseline of the three-way test, or None.
        mapping: What is compared with what; None if equal keys say it.
        layers: The quantised layers of the target, as they were measured; saved results lack them.
    """

    reference: ArchiveSummary
    target: ArchiveSummary
    tolerance: Tolerance | None
    pairs: Sequence[Pair]
    divergence: Divergence | None
    value_differences: Sequence[ValueDifference]
    warnings: Sequence[str]
    is_of_archives: bool = True
    account: RunSummary | None = None
    thresholds: Path | None = None
    calibration: Calibration | None = None
    baseline: ArchiveSummary | None = None
    mapping: MappingSummary | None = None
    layers: QuantisedLayers = field(default_factory=QuantisedLayers, compare=False, repr=False)

    @property
    def headline(self) -> str:
        """What came of it, in a few words."""
        if self.exit_status == 0:
            return "within rounding (not proven)" if self.counts.get("within-rounding") else "no divergence"
        if not self.compared:
            return "nothing was compared"
        if self.divergence is not None:
            return f"not the same, first in {self.divergence.module} at {self.divergence.pair.key}"
        return f"not the same, {len(self.absent)} missing" if self.absent else "not green"

    def __repr__(self) -> str:
        paths = f"{self.target.path} against {self.reference.path}"
        return f"<Comparison of {paths}: {self.compared} of {self.records} compared, {self.headline}>"

    def _repr_html_(self) -> str:
        """The verdict, what it is over, and the tensors that are worst."""
        return card(
            f"{self.headline[0].upper()}{self.headline[1:]}",
            {"reference": str(self.reference.path), "target": str(self.target.path)},
            lines=(
                f"{self.compared} of {self.records} compared: "
                + ", ".join(f"{count} {status}" for status, count in self.counts.items()),
                *([self.divergence.explanation] if self.divergence else []),
            ),
            head=("tensor", "status", "relative error"),
            rows=[
                (pair.key, pair.status, "" if (error := error_of(pair)) is None else f"{error:.3g}")
                for pair in worst(self.pairs, ROWS)
            ],
            tone="green" if self.exit_status == 0 else "red",
        )

    @property
    def policy(self) -> Policy | None:
        """The limits of pairs that nothing was given for; None if no pair was judged by them."""
        return self.account.policy if self.account else None

    @property
    def blind_spots(self) -> Sequence[str]:
        """What this run cannot see, a sentence each."""
        return self.account.blind if self.account else ()

    @cached_property
    def counts(self) -> dict[Status, int]:
        """How many pairs have each status that occurs, in the order of the specification."""
        counts = Counter(pair.status for pair in self.pairs)
        return {status: counts[status] for status in STATUSES if counts[status]}

    @cached_property
    def records(self) -> int:
        """Count of all reference records: the denominator."""
        return sum(pair.reference is not None for pair in self.pairs)

    @cached_property
    def compared(self) -> int:
        """Count of reference records whose values, or digests, were compared with the target's."""
        return sum(pair.is_compared for pair in self.pairs)

    @cached_property
    def absent(self) -> Sequence[Pair]:
        """Pairs that are required and missing in the target, and that nothing explains."""
        return [pair for pair in self.pairs if pair.is_required and pair.status in ABSENT]

    @cached_property
    def is_green(self) -> bool:
        """Whether something was compared, nothing required is missing, and every required pair is green."""
        return (
            self.compared > 0
            and (not self.is_of_archives or (self.reference.is_complete and self.target.is_complete))
            and not any(difference.is_red for difference in self.value_differences)
            and all(pair.is_green for pair in self.pairs if pair.is_required)
        )

    @cached_property
    def exit_status(self) -> int:
        """3 if a pair could not be read, else 0 if green and 1 if not (CMP-51)."""
        if any(pair.status == "unreadable" for pair in self.pairs):
            return 3
        return 0 if self.is_green else 1

    def to_json(self, examination: Examination | None = None) -> dict[str, Any]:
        """Convert to the object that `tcap compare --json` prints, ready for `json.dumps`.

        Args:
            examination: What `tcap compare` examines besides; its members are null or empty without.
        """
        return {**_head(self, examination), "pairs": list(_pairs(self, examination))}


def json_pieces(comparison: Comparison, examination: Examination | None = None) -> Iterator[str]:
    """`Comparison.to_json` as text, a pair at a time, so that 100,000 never are in memory as text."""
    head = _dumps(_head(comparison, examination))
    yield f'{head[:-1]},"pairs":['
    separator = ""
    for pair in _pairs(comparison, examination):
        yield separator + _dumps(pair)
        separator = ",\n"
    yield "]}\n"


@json_value.register
def _(value: Pair) -> Any:
    return value.key  # all pairs are members of the object itself


@json_value.register
def _(value: Calibration) -> Any:
    return {**value.document(), "path": json_value(value.path)}


@json_value.register
def _(value: Divergence) -> Any:
    return {
        "key": value.pair.key,
        "status": value.pair.status,
        "module": value.module,
        "class": value.class_name,
        "is_run_input": value.is_run_input,
        "explanation": value.explanation,
    }


@json_value.register
def _(value: Histogram) -> Any:
    return [*map(list, value)]


@json_value.register
def _(value: ErrorMap) -> Any:
    levels = base64.b64encode(value.levels).decode("ascii")
    return {"rows": value.rows, "columns": value.columns, "levels": levels}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _head(comparison: Comparison, examination: Examination | None) -> dict[str, Any]:
    tolerance, extra = comparison.tolerance, examination or Examination()
    return {
        "format": "tensorcap-comparison",
        "version": 1,
        "reference": json_value(comparison.reference),
        "target": json_value(comparison.target),
        "is_of_archives": comparison.is_of_archives,
        "rtol": tolerance.rtol if tolerance else None,
        "atol": tolerance.atol if tolerance else None,
        "thresholds": json_value(comparison.thresholds),
        "calibration": json_value(comparison.calibration),
        "baseline": json_value(comparison.baseline),
        "mapping": json_value(comparison.mapping),
        "compared": comparison.compared,
        "records": comparison.records,
        "counts": comparison.counts,
        "exit_status": comparison.exit_status,
        "warnings": list(comparison.warnings),
        "preflight": json_value(extra.preflight),
        "first_divergence": json_value(comparison.divergence),
        "exchanged_operations": json_value(extra.exchanged),
        "modules": json_value(by_module(comparison.pairs, extra.classes)),
        "value_differences": json_value(comparison.value_differences),
        "account": json_value(comparison.account),
        "notes": list(extra.notes),
    }


def _pairs(comparison: Comparison, examination: Examination | None) -> Iterator[dict[str, Any]]:
    extra = examination or Examination()
    for pair in comparison.pairs:
        record = pair.reference or pair.target
        yield {
            "key": pair.key,
            "class": extra.classes.get(module_of(record.key.site), "") if record else "",
            "source": extra.sources.get(pair.key, ""),
            "status": pair.status,
            "reason": pair.reason,
            "is_optional": pair.is_optional,
            "reference": _record(pair.reference),
            "target": _record(pair.target),
            "origin": json_value(pair.origin),
            "difference": json_value(pair.difference),
            "findings": json_value(pair.findings),
            "baseline": json_value(pair.baseline),
            "location": json_value(extra.locations.get(pair.key)),
            "logits": json_value(extra.logits.get(pair.key)),
            "routing": json_value(extra.routing.get(pair.key)),
        }


def _record(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "key": record.key.text,
        "dtype": record.dtype.name,
        "shape": list(record.shape),
        "order": record.order,
        "digest": record.digest,
        "stored": record.stored,
        "statistics": json_value(record.statistics),
    }
