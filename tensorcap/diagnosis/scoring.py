"""What it takes to believe a hypothesis: the residual that it leaves, and the chance that it fits by luck."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]  # float64; also masks and indices of them

ROUNDINGS: Final = 4.0  # a hypothesis may leave that many roundings
SHARE: Final = 0.01  # or that share of the error before
INHERITED: Final = 2.0  # or that many times the error that the inputs arrive with
LESSENED: Final = 0.316  # and never more than that share: a tenth of the squared error
LEAST_PER_PARAMETER: Final = 4  # elements for each free parameter
LOG_CHANCE: Final = math.log(1e-9)  # that one of all that was tried fits noise so well
_WIDE_NOISE: Final = 2e-7  # what the order of operations in float32 alone may make
_WITHIN: Final = 2.0  # residuals that are nearer than that to each other are equal


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One hypothesis, worked out on values.

    Attributes:
        kind: Its name for programs; the clauses of `specs/diagnosis.md` list them.
        text: What it says, as a sentence without its end.
        observed: Values that it has to explain, any shape.
        predicted: What they are if it holds, the same shape.
        baseline: What they would be without a mistake; None where no element stands against another.
        parameters: Count of numbers that were fitted.
        log_alternatives: Natural logarithm of how many like it were looked at to find this one.
        hint: The usual mistake that looks so, as a sentence.
        facts: What was fitted or found, as JSON values.
        roundings: How many roundings it may leave.
    """

    kind: str
    text: str
    observed: Values
    predicted: Values
    baseline: Values | None
    parameters: int = 0
    log_alternatives: float = 0.0
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    roundings: float = ROUNDINGS


def inherited(observed: Values, predicted: Values, baseline: Values) -> Hypothesis:
    """The hypothesis that nothing is wrong here: the target follows from what it was given, as it should."""
    text = "the target is right for what it was given: the error arrives with that"
    hint = "Look at what comes before, at the inputs of this module."
    return Hypothesis("inherited", text, observed, predicted, baseline, 0, 0.0, hint)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A hypothesis and what it leaves.

    Attributes:
        kind: As in `Hypothesis`.
        text: As in `Hypothesis`.
        hint: As in `Hypothesis`.
        before: Relative error without it, no unit; None where shapes differ.
        after: Relative error that it leaves.
        limit: What it may leave.
        parameters: Count of numbers that were fitted.
        elements: Count of elements that it was tested on.
        score: How much it explains against what was free to choose; natural logarithm of odds.
        facts: As in `Hypothesis`.
    """

    kind: str
    text: str
    hint: str
    before: float | None
    after: float
    limit: float
    parameters: int
    elements: int
    score: float
    facts: Mapping[str, Any]

    @property
    def is_within(self) -> bool:
        """Whether what it leaves is little enough."""
        return self.after <= self.limit


def relative_error(observed: Values, predicted: Values) -> float:
    """Norm of the difference over the larger of the two norms; 0 where both are zero.

    Example:
        >>> relative_error(np.array([3.0, 4.0]), np.array([0.0, 0.0]))
        1.0
    """
    size = max(_norm(observed), _norm(predicted))
    return _norm(observed - predicted) / size if size else 0.0


@dataclass(slots=True)
class Scorer:
    """Weighs trials against the precision of a pair.

    Attributes:
        rounding: Relative error of one rounding, no unit; 0 for integers.
        inherited: Relative error that the values arrive with.
        tried: The trials so far, by kind: the smallest share of the error that one of them left.
        count: How many were tried, with all that were looked at to find them.
        is_explained: Whether one of them holds that says what is wrong here.
    """

    rounding: float
    inherited: float
    tried: dict[str, float] = field(default_factory=dict)
    count: int = 0
    is_explained: bool = False

    def weigh(self, trial: Hypothesis) -> Explanation:
        """Measure what a trial leaves."""
        after = relative_error(trial.observed, trial.predicted)
        before = None if trial.baseline is None else relative_error(trial.observed, trial.baseline)
        whole = 1.0 if before is None else before
        limit = max(trial.roundings * self.rounding, SHARE * whole, INHERITED * self.inherited)
        limit = min(limit, LESSENED * whole)
        self.count += 1
        if not math.isfinite(after):  # a function that overflows
            after = math.inf
        elif whole:
            self.tried[trial.kind] = min(self.tried.get(trial.kind, math.inf), after / whole)
        n, k = trial.observed.size, trial.parameters
        left = max(after, 1e-12) / whole if whole else math.inf
        score = -n * math.log(self._told(after) / whole) if whole and after < math.inf else 0.0
        score -= k / 2 * math.log(max(n, 2)) + trial.log_alternatives
        count = _erring(trial)
        is_fair = (
            math.isfinite(left)
            and k * LEAST_PER_PARAMETER <= count
            and self._log_chance(trial, count, left) <= LOG_CHANCE
        )
        found = Explanation(
            trial.kind,
            trial.text,
            trial.hint,
            before,
            after if is_fair else math.inf,
            limit,
            k,
            n,
            score,
            trial.facts,
        )
        self.is_explained |= found.is_within and found.kind != "inherited"
        return found

    def _told(self, after: float) -> float:
        """A residual as far as it tells hypotheses apart: exact, or within a rounding, or as it is."""
        exact = max(self.rounding / 20, 1e-12)
        return exact if after <= exact else max(after, self.rounding, _WIDE_NOISE)

    def _log_chance(self, trial: Hypothesis, count: float, left: float) -> float:
        """Logarithm of the chance that as many parameters explain as much of white noise.

        The share explained of n elements of noise by k parameters is Beta(k/2, (n-k)/2); this is Chernoff's
        bound of its tail, times all alternatives.
        """
        explained, usual = 1 - left * left, trial.parameters / count
        if explained <= usual:
            return 0.0
        divergence = (1 - usual) * math.log((1 - usual) / (left * left))
        if usual:
            divergence += usual * math.log(usual / explained)
        return trial.log_alternatives + math.log(self.count + 1) - count / 2 * divergence


def ranked(found: Sequence[Explanation]) -> tuple[Explanation, ...]:
    """Those that hold, the best first; without those that only say less exactly what another says.

    A hypothesis with several parameters says nothing beside one with fewer that leaves no more.
    """
    holding = [e for e in found if e.is_within]
    holding.sort(key=lambda e: (_is_place(e), e.kind == "holds", -e.score, e.kind, e.text))
    kept: list[Explanation] = []
    for one in holding:
        if any(_makes_needless(other, one) for other in holding if other is not one):
            continue
        if all((one.kind, one.text) != (other.kind, other.text) for other in kept):
            kept.append(one)
    return tuple(kept)


def _erring(trial: Hypothesis) -> float:
    """How many elements the error before is made of: all, if it is white noise; one, if it is an outlier."""
    size = trial.observed.size
    if trial.baseline is None or not size:
        return max(size, 1)
    square = (trial.observed - trial.baseline).reshape(-1) ** 2
    largest = float(square.max())
    if not largest:
        return 1
    square /= largest
    return min(size, 3 * float(square.sum()) ** 2 / float(np.dot(square, square)))


def _makes_needless(other: Explanation, one: Explanation) -> bool:
    """Whether `other` says all that `one` does: with fewer numbers, of the whole, or better."""
    floor = max(one.limit / 8, 1e-12)
    if other.kind == "holds" and not _is_place(one):  # that it is equal to something does not say why
        return False
    if other.after > _WITHIN * max(one.after, floor) or other.elements < one.elements / 2:
        return False
    if _is_place(one) != _is_place(other):
        return _is_place(one)
    if one.parameters >= 2 and other.parameters < one.parameters:
        return True
    is_special = _is_place(one) or "where" in one.facts or one.kind == other.kind
    return is_special and other.parameters <= one.parameters and other.score > one.score


def _is_place(one: Explanation) -> bool:
    """Whether it says where the error is and not what it is."""
    return one.kind.startswith("only-")


def _norm(values: Values) -> float:
    flat = values.reshape(-1)
    return math.sqrt(float(np.dot(flat, flat)))
