"""What a test of the policy works on: both runs, pairs by key, their errors, routers that flipped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from tensorcap.comparison.injected import Injected
from tensorcap.comparison.pair import Finding, Pair
from tensorcap.comparison.policy import Policy, Precision
from tensorcap.comparison.robust_errors import RobustErrors
from tensorcap.comparison.routing import Flips, StepsAfterFlips
from tensorcap.metrics import Difference
from tensorcap.runs import Calls, Ops, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A pair of two records whose values were measured.

    Attributes:
        key: Key text of the reference record.
        reference: The trusted record.
        target: The record under test.
        difference: The errors.
        policy: The limits, which say what precision a dtype has.
        runs_precision: The precision that both runs can agree in; None if neither says.
    """

    key: str
    reference: Record
    target: Record
    difference: Difference
    policy: Policy
    runs_precision: Precision | None

    @property
    def precision(self) -> Precision:
        """The precision that the errors are held against (POL-3); one of both records is inexact."""
        return self.policy.precision_of_pair(self.runs_precision, self.reference, self.target)

    @property
    def row_error(self) -> float | None:
        """Median over rows of the relative error (`epsilon`), no unit."""
        return self.difference.row_error_median

    @property
    def tail_error(self) -> float | None:
        """The 95th percentile over rows of the relative error, no unit."""
        return self.difference.row_error_p95

    @property
    def elements(self) -> int:
        """Count of elements that the error is taken over."""
        return self.difference.measured

    @property
    def is_inexact(self) -> bool:
        """Whether the reference holds floats or complex numbers."""
        return self.reference.dtype.is_inexact

    @property
    def is_whole(self) -> bool:
        """Whether one of both records holds whole numbers or bools."""
        return is_whole(self.reference) or is_whole(self.target)


@dataclass(frozen=True, slots=True)
class Gain:
    """What one module adds to an error.

    Attributes:
        site: The leaf, the attention, or the module of an op.
        pair: The pair of its result.
        inputs: Row error of its inputs, together.
        output: Row error of its result.
        finding: The finding of the median row.
        tail: The finding of the worst rows; None if they were not tested.
    """

    site: str
    pair: Pair
    inputs: float
    output: float
    finding: Finding
    tail: Finding | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Both findings, or the one that there is."""
        return (self.finding,) if self.tail is None else (self.finding, self.tail)


@dataclass(slots=True)
class GainLog:
    """What the tests of gains leave for the summary of the runs.

    Attributes:
        gains: Every gain.
        untested: Sites of leaves whose inputs were not captured, or not compared.
        has_inputs: Whether the inputs of any leaf were compared.
    """

    gains: list[Gain] = field(default_factory=list)
    untested: dict[str, None] = field(default_factory=dict)
    has_inputs: bool = False


@dataclass(frozen=True)
class Context:
    """Everything that a test may look at.

    Attributes:
        reference: The trusted archive.
        target: The archive under test.
        policy: The limits.
        runs_precision: The precision that both runs can agree in; None if neither says.
        calls: The reference's calls.
        ops: The reference's ops.
        pairs: The pairs that are not excluded by key text, in their order.
        open_keys: Keys of the pairs that the policy judges; findings of others are not used.
        errors: Row errors by key text, of rows that were brought together if they were shuffled.
        aligned: Keys whose rows were brought together (POL-19).
        shuffled: Keys whose rows are ordered by expert, where experts flipped.
        choices: Findings of routers by the key text of each record that holds their choices.
        after_flips: Which tensors were made after a router chose other experts.
        injected: Which values of the target show a module's own error; None if it is no injected run.
        gain_log: Filled by the tests of gains.
    """

    reference: Archive
    target: Archive
    policy: Policy
    runs_precision: Precision | None
    calls: Calls
    ops: Ops
    pairs: Mapping[str, Pair]
    open_keys: Collection[str]
    errors: Mapping[str, float | None]
    aligned: Collection[str]
    shuffled: Mapping[str, Flips]
    choices: Mapping[str, Finding]
    after_flips: StepsAfterFlips
    injected: Injected | None
    gain_log: GainLog = field(default_factory=GainLog)

    @cached_property
    def robust_errors(self) -> RobustErrors:
        """Second looks at the values of pairs."""
        return RobustErrors(self.reference, self.target)

    def measured(self, pair: Pair) -> MeasuredPair | None:
        """Return a pair as one whose values were measured; None if they were not."""
        return measured_pair(pair, self.policy, self.runs_precision)

    def open_pairs(self) -> Iterator[Pair]:
        """Yield the pairs that the policy judges, in order."""
        return (pair for pair in self.pairs.values() if pair.key in self.open_keys)

    def open_measured(self) -> Iterator[MeasuredPair]:
        """Yield those of them that were measured, in order."""
        return (measured for pair in self.open_pairs() if (measured := self.measured(pair)) is not None)

    def open_results(self) -> Iterator[tuple[MeasuredPair, float]]:
        """Yield those of them that hold floats a model computed, with their row errors; no parameters."""
        for pair in self.open_measured():
            error = self.errors.get(pair.key)
            if error is not None and not pair.is_whole and not is_parameter(pair.reference.key):
                yield pair, error

    def own_kind(self, pair: Pair) -> str | None:
        """Return what an injected run's pair shows of a module's own error: see `Injected.own`."""
        return self.injected.own(pair) if self.injected is not None else None

    def was_replaced(self, pair: Pair) -> bool:
        """Whether another value than that of a pair went on, so that it says nothing of a gain."""
        return self.injected is not None and self.injected.was_replaced(pair)


class PolicyTest(Protocol):
    """A test of the policy."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its findings, as in `specs/policy.md`."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether a failing finding speaks of the module itself, not of errors that came from before it."""
        ...

    def judge(self, context: Context) -> Iterable[tuple[str, Finding]]:
        """Yield the key text and the finding of every pair that the test applies to."""
        ...


def measured_pair(pair: Pair, policy: Policy, runs_precision: Precision | None) -> MeasuredPair | None:
    """Return a pair as one whose values were measured; None if they were not."""
    if pair.reference is None or pair.target is None or pair.difference is None:
        return None
    return MeasuredPair(pair.key, pair.reference, pair.target, pair.difference, policy, runs_precision)


def is_whole(record: Record) -> bool:
    """Whether a record holds whole numbers or bools."""
    return record.dtype.kind in ("bool", "int", "uint")
