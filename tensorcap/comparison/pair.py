"""A pair of records and what became of it: status, errors, findings of tests, what a mapping says of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from tensorcap.metrics.difference import Difference
from tensorcap_formats.records import Record

Status = Literal[
    "identical",
    "match",
    "within-rounding",
    "unjudged",
    "suspect",
    "diverged",
    "nonfinite",
    "shape-mismatch",
    "missing-in-target",
    "never-called",
    "not-capturable",
    "unmapped",
    "unreadable",
    "excluded",
    "missing-in-reference",
]
STATUSES: Final[tuple[Status, ...]] = Status.__args__  # type: ignore[attr-defined] # no public name for it
GREEN: Final[frozenset[Status]] = frozenset({"identical", "match", "within-rounding"})
ABSENT: Final[frozenset[Status]] = frozenset(
    {"missing-in-target", "never-called", "not-capturable", "unmapped"}
)
JUDGED: Final[frozenset[Status]] = frozenset({"within-rounding", "suspect", "diverged"})  # by the policy
SEVERITY: Final[tuple[Status, ...]] = (  # from best to worst
    "excluded",
    "missing-in-reference",
    "identical",
    "match",
    "within-rounding",
    "unjudged",
    "unmapped",
    "not-capturable",
    "never-called",
    "missing-in-target",
    "suspect",
    "shape-mismatch",
    "diverged",
    "nonfinite",
    "unreadable",
)
State = Literal["measured", "baseline-exact", "both-exact", "undefined"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one test said of one pair.

    Attributes:
        test: Name of the test: `tolerance`, a metric, or one of `specs/policy.md`.
        value: What was found.
        limit: What is green at most, or at least for a metric of which more is better.
        status: What the test alone would make of the pair.
        text: The finding as a sentence.
    """

    test: str
    value: float
    limit: float
    status: Status
    text: str


def worst_status(findings: Iterable[Finding]) -> Status:
    """The worst status among findings, of which there is one at least."""
    return max((finding.status for finding in findings), key=SEVERITY.index)


@dataclass(frozen=True, slots=True)
class Origin:
    """What of the target a mapping compares with a record of the reference, and why.

    Attributes:
        target: Key texts of the target's records.
        steps: Layout steps from their tensors to the reference's.
        evidence: What they are known to belong together by: `user`, `name`, `rule`, `structure`, `shape` or
            `values`.
        reason: More of that, for a reader.
    """

    target: tuple[str, ...]
    steps: tuple[str, ...]
    evidence: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """The three-way test of one pair.

    Attributes:
        state: `measured`; `baseline-exact` where the baseline has no error, so that there is no ratio;
            `both-exact`; `undefined` where the baseline lacks the record or its values.
        r: `||t - r|| / ||b - r||`, no unit; infinite in the state `baseline-exact`, None if undefined.
        sigma: RMS of the target's errors over that of the baseline's, over all steps and calls of the same
            site and slot, no unit; None where R is not measured.
        label: What R means, in a few words; never a verdict.
    """

    state: State
    r: float | None = None
    sigma: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """One comparison and what became of it.

    Attributes:
        key: Key text of the reference record, or of the target's where there is no other.
        status: See `specs/comparison.md`.
        reference: The trusted record; None where only the target has one.
        target: The record under test; None where it is missing.
        difference: The errors; None where no values were read, so also for two equal digests.
        reason: Why the status is what it is, where that is not plain from it; else "".
        findings: What the tests said that led to the status.
        baseline: How far the target lies from the reference in units of a baseline's distance, or None.
        is_optional: Whether it may be missing: `--require` names others, it is a cast (CMP-71), or a mapping
            explains that it has no counterpart.
        origin: What a mapping made the target's side of; None where keys are equal and no mapping was used.
    """

    key: str
    status: Status
    reference: Record | None
    target: Record | None
    difference: Difference | None = None
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    baseline: Ratio | None = None
    is_optional: bool = False
    origin: Origin | None = None

    @property
    def is_compared(self) -> bool:
        """Whether values, or digests of values, were held against each other."""
        return self.status == "identical" or self.difference is not None

    @property
    def is_required(self) -> bool:
        """Whether a reference record stands behind it that nobody excluded, and that may not be missing."""
        may_lack = self.is_optional and self.status in ABSENT
        return self.status not in ("excluded", "missing-in-reference") and not may_lack

    @property
    def is_green(self) -> bool:
        """Whether it is identical, a match, or within rounding."""
        return self.status in GREEN
