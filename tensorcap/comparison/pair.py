"""A pair of records: its status, errors, findings and origin, and `decide`, which alone sets the status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from tensorcap.metrics import Difference
from tensorcap_formats.light_dataclass import light_dataclass
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
    "explained",
    "excluded",
    "missing-in-reference",
    "unexpected",
]
STATUSES: Final[tuple[Status, ...]] = Status.__args__  # type: ignore[attr-defined] # no public name for it
GREEN: Final[frozenset[Status]] = frozenset({"identical", "match", "within-rounding"})
ABSENT: Final[frozenset[Status]] = frozenset(
    {"missing-in-target", "never-called", "not-capturable", "unmapped"}
)
JUDGED: Final[frozenset[Status]] = frozenset({"within-rounding", "suspect", "diverged"})  # by the policy
SEVERITY: Final[tuple[Status, ...]] = (  # from best to worst
    "excluded",
    "explained",
    "missing-in-reference",
    "identical",
    "match",
    "within-rounding",
    "unjudged",
    "unmapped",
    "not-capturable",
    "never-called",
    "missing-in-target",
    "unexpected",
    "suspect",
    "shape-mismatch",
    "diverged",
    "nonfinite",
    "unreadable",
)
State = Literal["measured", "baseline-exact", "both-exact", "undefined"]


@light_dataclass(frozen=True, slots=True)
class Finding:
    """The result of one test of one pair.

    Attributes:
        test: Name of the test: `tolerance`, a metric, or one of `specs/policy.md`.
        value: The value that was tested.
        limit: The largest value that is green, or the smallest for a metric of which more is better.
        status: The status that the pair would have by this test alone.
        text: The finding as a sentence.
    """

    test: str
    value: float
    limit: float
    status: Status
    text: str


def worst_status(findings: Iterable[Finding]) -> Status:
    """Return the worst status among findings, of which there is one at least."""
    return max({finding.status for finding in findings}, key=SEVERITY.index)


Stage = Literal[
    "pairing",
    "mapping",
    "metadata",
    "values",
    "tolerance",
    "masks",
    "routing",
    "policy",
    "calibration",
    "pass-through",
    "agreement",
    "ranks",
]


@light_dataclass(frozen=True, slots=True)
class Decision:
    """The decision of one stage of a comparison about one pair.

    Attributes:
        stage: The stage.
        status: The status that the pair gets; None if the stage leaves the status as it is.
        reason: Why, if it is not plain from the status; else "".
        findings: The results of tests that led to it.
        is_excused: See `Pair`.
    """

    stage: Stage
    status: Status | None
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    is_excused: bool = False

    @classmethod
    def of_findings(
        cls, stage: Stage, findings: Sequence[Finding], reason: str = "", *, is_excused: bool = False
    ) -> Decision:
        """Make the worst of some findings, of which there is one at least, the status."""
        return cls(stage, worst_status(findings), reason, tuple(findings), is_excused)


@dataclass(frozen=True, slots=True)
class Origin:
    """The records of the target that a mapping compares with one of the reference, and why.

    Attributes:
        target: Key texts of the target's records.
        steps: Layout steps from their tensors to the reference's.
        evidence: Kind of evidence that they correspond: `user`, `name`, `rule`, `structure`, `shape` or
            `values`.
        reason: The evidence in words.
    """

    target: tuple[str, ...]
    steps: tuple[str, ...]
    evidence: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """The three-way test of one pair.

    Attributes:
        state: `measured`; `baseline-exact` if the baseline has no error, so that there is no ratio;
            `both-exact`; `undefined` if the baseline lacks the record or its values.
        r: `||t - r|| / ||b - r||`, no unit; infinite in the state `baseline-exact`, None if undefined.
        sigma: RMS of the target's errors over that of the baseline's, over all steps and calls of the same
            site and slot, no unit; None if R is not measured.
        label: What R means, in a few words; never a verdict.
    """

    state: State
    r: float | None = None
    sigma: float | None = None
    label: str = ""


@light_dataclass(frozen=True, slots=True)
class Pair:
    """A record of the reference, one of the target, and the result of comparing them.

    Attributes:
        key: Key text of the reference record, or of the target's if there is no other.
        status: See `specs/comparison.md`.
        reference: The trusted record; None if only the target has one.
        target: The record under test; None if it is missing.
        difference: The errors; None if no values were read, so also for two equal digests.
        reason: Why the status is what it is, if that is not plain from it; else "".
        findings: The findings of tests that led to the status.
        baseline: Distance of the target from the reference in units of a baseline's distance, or None.
        is_optional: Whether it may be missing, since `--require` names others.
        origin: Where a mapping takes the target's side from; None if no mapping was used.
        history: The decision of each stage, in order; saved results lack it.
        is_excused: Whether tokens that may have chosen other experts are left out of what makes it green, as
            its whole error is not; saved results lack it.
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
    history: tuple[Decision, ...] = field(default=(), compare=False, repr=False)
    is_excused: bool = field(default=False, compare=False)

    def with_difference(self, difference: Difference | None) -> Pair:
        """Return the pair with other errors."""
        return Pair(  # by the thousand, and `replace` takes three times as long
            self.key,
            self.status,
            self.reference,
            self.target,
            difference,
            self.reason,
            self.findings,
            self.baseline,
            self.is_optional,
            self.origin,
            self.history,
            self.is_excused,
        )

    @property
    def is_compared(self) -> bool:
        """Whether values, or digests of values, were compared."""
        return self.status == "identical" or self.difference is not None

    @property
    def is_absent(self) -> bool:
        """Whether the target lacks what the reference has, and nothing explains it."""
        return self.status in ABSENT

    @property
    def is_required(self) -> bool:
        """Whether it may neither be missing nor differ: not if it is excluded, explained or a surplus."""
        may_lack = self.is_optional and self.status in ABSENT
        return self.status not in ("excluded", "explained", "missing-in-reference") and not may_lack

    @property
    def is_green(self) -> bool:
        """Whether it is identical, a match, or within rounding: nothing is wrong with it.

        That is all that a rule may conclude which asks whether anything is wrong, as with what the target
        lacks. A rule that excuses or accuses one tensor because another one holds the same has to ask for
        `is_equal`, unless it holds both of the target against each other (CMP-19).
        """
        return self.status in GREEN

    @property
    def agrees(self) -> bool:
        """Whether nothing is wrong with it, or it is explained."""
        return self.is_green or self.status == "explained"

    @property
    def is_equal(self) -> bool:
        """Whether it is green by all of its elements, whatever experts tokens chose."""
        return self.is_green and not self.is_excused

    @property
    def row_error(self) -> float | None:
        """Median over rows of the relative error (`epsilon`), no unit; 0 if nothing was measured."""
        return 0.0 if self.difference is None else self.difference.row_error_median

    @property
    def tail_error(self) -> float | None:
        """The 95th percentile over rows of the relative error, no unit; 0 if nothing was measured."""
        return 0.0 if self.difference is None else self.difference.row_error_p95

    @property
    def elements(self) -> int:
        """Count of elements that the error is taken over."""
        if self.difference is not None:
            return self.difference.measured
        return self.reference.size if self.reference is not None else 0

    @property
    def is_inexact(self) -> bool:
        """Whether there is a reference record of floats or complex numbers."""
        return self.reference is not None and self.reference.dtype.is_inexact


def decide(pair: Pair, decision: Decision) -> Pair:
    """Apply the decision of a stage to a pair: the only place that sets a status.

    A decision with a status replaces status, reason and findings; every decision is kept in the history.
    """
    status, reason, findings = decision.status, decision.reason, decision.findings
    is_excused = decision.is_excused
    if status is None:
        status, reason, findings, is_excused = pair.status, pair.reason, pair.findings, pair.is_excused
    return Pair(  # by the thousand, and `replace` takes three times as long
        pair.key,
        status,
        pair.reference,
        pair.target,
        pair.difference,
        reason,
        findings,
        pair.baseline,
        pair.is_optional,
        pair.origin,
        (*pair.history, decision),
        is_excused,
    )
