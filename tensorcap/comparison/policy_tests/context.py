"""The context of the policy's tests: both runs, pairs by key, their errors, routers that flipped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import ClassVar, Final

from tensorcap.comparison.injected import Injected
from tensorcap.comparison.padding import Padding
from tensorcap.comparison.pair import Finding, Pair
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.quantised_layers import QuantisedLayers
from tensorcap.comparison.robust_errors import RobustErrors
from tensorcap.comparison.routing import Flips, StepsAfterFlips
from tensorcap.metrics import Difference
from tensorcap.runs import Calls, Ops, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.light_dataclass import light_dataclass
from tensorcap_formats.records import Record


@light_dataclass(frozen=True, slots=True)
class MeasuredPair(Pair):
    """A pair of two records whose values were measured.

    Attributes:
        reference: The trusted record.
        target: The record under test.
        difference: The errors.
        is_whole: Whether one of both records holds whole numbers or bools.
        known_precision: `precision`; None if neither record is inexact.
    """

    reference: Record
    target: Record
    difference: Difference
    is_whole: bool = False
    known_precision: Precision | None = None

    @property
    def precision(self) -> Precision:
        """The precision that the errors are held against (POL-3); one of both records is inexact."""
        assert self.known_precision is not None
        return self.known_precision


@dataclass(frozen=True, slots=True)
class Gain:
    """The error that one module adds to that of its inputs.

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
    """Results of the tests of gains that the summary of the runs needs.

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
        runs_precision: The precision that both runs can agree in; None if neither says.
        calls: The reference's calls.
        ops: The reference's ops.
        pairs: The pairs that are not excluded by key text, in their order; those with values that were
            measured are `MeasuredPair`s.
        open_keys: Keys of the pairs that the policy judges; findings of others are not used.
        errors: Row errors by key text, of aligned rows if they were shuffled.
        aligned: Keys whose rows were aligned (POL-19).
        shuffled: Keys whose rows are ordered by expert, if experts flipped.
        choices: Findings of routers by the key text of each record that holds their choices.
        after_flips: Which tensors were made after a router chose other experts.
        injected: Which values of the target show a module's own error; none if it is no injected run.
        padding: Which tokens the masks of both runs leave out.
        layers: The quantised layers of the target, measured.
        gain_log: Filled by the tests of gains.
    """

    reference: Archive
    target: Archive
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
    injected: Injected
    padding: Padding
    layers: QuantisedLayers = field(default_factory=QuantisedLayers)
    gain_log: GainLog = field(default_factory=GainLog)

    @cached_property
    def robust_errors(self) -> RobustErrors:
        """Errors of pairs by robust measures."""
        return RobustErrors(self.reference, self.target)

    def measured(self, key: str) -> MeasuredPair | None:
        """Return the pair of a key text if its values were measured, else None."""
        pair = self.pairs.get(key)
        return pair if isinstance(pair, MeasuredPair) else None

    def open_pairs(self) -> Iterator[Pair]:
        """Yield the pairs that the policy judges, in order."""
        return (pair for pair in self.pairs.values() if pair.key in self.open_keys)

    def open_measured(self) -> Sequence[MeasuredPair]:
        """List those of them that were measured, in order."""
        return self._open_measured

    def open_floats(self) -> Sequence[MeasuredPair]:
        """List those of them that hold floats and are no parameters."""
        return self._open_floats

    def open_results(self) -> Sequence[tuple[MeasuredPair, float]]:
        """List those of them that have a row error, with it."""
        return self._open_results

    @cached_property
    def _open_measured(self) -> Sequence[MeasuredPair]:
        return [pair for pair in self.open_pairs() if isinstance(pair, MeasuredPair)]

    @cached_property
    def _open_floats(self) -> Sequence[MeasuredPair]:
        return [p for p in self._open_measured if not p.is_whole and not is_parameter(p.reference.key)]

    @cached_property
    def _open_results(self) -> Sequence[tuple[MeasuredPair, float]]:
        errors = ((pair, self.errors.get(pair.key)) for pair in self._open_floats)
        return [(pair, error) for pair, error in errors if error is not None]

    def known_errors(self, pairs: Sequence[Pair]) -> list[float] | None:
        """Return the row errors of pairs; None if one is not known."""
        errors = [self.errors.get(pair.key) for pair in pairs]
        known = [error for error in errors if error is not None]
        return known if len(known) == len(errors) else None


class PolicyTest(ABC):
    """A test of the policy. What its findings mean to those who read them is said by its attributes.

    Attributes:
        names: The names of its findings, as in `specs/policy.md`.
        is_local: Whether a failing finding speaks of the module itself, not of errors from before it.
        is_evidence: Whether a `diverged` finding is evidence against the module if only two archives are
            known: not if the values that it is about may have been passed on, as choices of experts are.
        is_growth: Whether a failing finding says no more than that errors grew past what is expected, which
            happens in correct runs of chaotic models too.
        fails_by_rounded_inputs: Whether a finding may fail because the module's inputs were rounded, as those
            of an injected run are.
    """

    names: ClassVar[tuple[str, ...]]
    is_local: ClassVar[bool]
    is_evidence: ClassVar[bool] = False
    is_growth: ClassVar[bool] = False
    fails_by_rounded_inputs: ClassVar[bool] = False

    @abstractmethod
    def judge(self, context: Context) -> Iterable[tuple[str, Finding]]:
        """Yield the key text and the finding of every pair that the test applies to."""


def measured_pair(pair: Pair, runs_precision: Precision | None) -> MeasuredPair | None:
    """Return a pair as one whose values were measured; None if they were not."""
    if pair.reference is None or pair.target is None or pair.difference is None:
        return None
    are_whole = is_whole(pair.reference), is_whole(pair.target)
    precision = None
    if not all(are_whole):
        precision = POLICY.precision_of_pair(runs_precision, pair.reference, pair.target)
    members = (*_members(pair), any(are_whole), precision)
    return MeasuredPair(*members)


_members: Final = attrgetter(*(field.name for field in fields(Pair)))


def is_whole(record: Record) -> bool:
    """Whether a record holds whole numbers or bools."""
    return not record.dtype.is_inexact
