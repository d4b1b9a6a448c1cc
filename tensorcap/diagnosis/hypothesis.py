"""Score hypotheses: what each leaves of the error, and the chance that it fits by luck."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

import numpy as np

from tensorcap.diagnosis.values import Values, estimate_step, relative_error

ROUNDINGS: Final = 4.0  # a hypothesis may leave that many roundings
SHARE: Final = 0.01  # or that share of the error before
INHERITED: Final = 2.0  # or that many times the error that the inputs arrive with
LESSENED: Final = 0.316  # and never more than that share: a tenth of the squared error
LEAST_PER_PARAMETER: Final = 4  # elements for each free parameter
LOG_CHANCE: Final = math.log(1e-9)  # that one of all hypotheses tried fits noise so well
_CERTAIN_ROUNDINGS: Final = 2.0  # what a certain one may leave: as much as a right leaf's own error (POL-80)
_LEAST_STEP: Final = 1 / 4  # roundings that it has to change the values by
_STEP_SLACK: Final = 0.1  # by which the step may miss the one that it says, besides some standard errors
_STEP_DEVIATIONS: Final = 4.0  # so many
_NO_REASON: Final = ("holds", "nan")  # kinds that say what the target is and not why
_EQUAL: Final = 0.05  # share of the error that one that says what the target is may leave
_VAGUE: Final = ("setting-differs",)  # kinds of which a more special one says the same in clearer words
_MANY_PARAMETERS: Final = 2  # fitted numbers that describe an error rather than say its reason
_WIDE_NOISE: Final = 2e-7  # error that the order of operations in float32 alone may make
_EXACT: Final = 1e-12  # relative error of float64 arithmetic, below which no two hypotheses differ
_EXACT_PARTS: Final = 20  # a residual of less than a rounding divided by that is none
_EQUAL_RESIDUALS: Final = 2.0  # residuals within that factor of each other count as equal
_FLOOR_OF_LIMIT: Final = 1 / 8  # residuals below that share of the limit count as equal
_TIED: Final = 1.0  # nats between the scores of explanations that are as likely as each other
_LARGEST_PART: Final = 1 / 2  # a hypothesis on fewer elements than that share does not stand for the whole


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A mistake, and the values that it would make.

    Attributes:
        kind: Its name for programs; the clauses of `specs/diagnosis.md` list them.
        text: What it says, as a sentence without its end.
        observed: Values that it has to explain, any shape, float64.
        predicted: What they are if it holds, the same shape.
        baseline: What they would be without a mistake; None if the shapes of the two sides differ.
        parameters: Count of numbers that were fitted.
        log_alternatives: Natural logarithm of how many like it were looked at to find this one.
        hint: The usual mistake that looks so, as a sentence.
        facts: What was fitted or measured, as JSON values.
        roundings: How many roundings it may leave.
        is_exact: Whether it may leave nothing else: neither a share of the error nor what is inherited, as
            where a tensor of the target is another one of the target itself.
    """

    kind: str
    text: str
    observed: Values
    predicted: Values
    baseline: Values | None
    _: KW_ONLY
    parameters: int = 0
    log_alternatives: float = 0.0
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    roundings: float = ROUNDINGS
    is_exact: bool = False


def inherited_error(observed: Values, predicted: Values, baseline: Values) -> Hypothesis:
    """State that nothing is wrong here: the target follows from its inputs as it should."""
    text = "the target is right for what it was given: the error arrives with that"
    hint = "Look at what comes before, at the inputs of this module."
    return Hypothesis("inherited", text, observed, predicted, baseline, hint=hint)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A scored hypothesis.

    Attributes:
        kind: As in `Hypothesis`.
        text: As in `Hypothesis`.
        hint: As in `Hypothesis`.
        before: Relative error without it, no unit; None if shapes differ.
        after: Relative error that it leaves, no unit; infinite if it may fit by luck.
        limit: What it may leave, no unit.
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
        """Whether it leaves no more than it may."""
        return self.after <= self.limit

    @property
    def is_location(self) -> bool:
        """Whether it says where the error is and not what it is."""
        return self.kind.startswith("only-")


@dataclass(slots=True)
class Scorer:
    """Scores hypotheses against the precision of a pair, and counts them.

    Attributes:
        rounding: Relative error of one rounding, no unit; 0 for integers.
        inherited: Relative error that the inputs arrive with, no unit.
        tried: The kinds scored so far: the smallest share of the error that one of each left.
        count: How many hypotheses were scored.
        is_explained: Whether one of them holds that says what is wrong here, and does not describe it by many
            numbers.
    """

    rounding: float
    inherited: float
    tried: dict[str, float] = field(default_factory=dict)
    count: int = 0
    is_explained: bool = False

    def score(self, hypothesis: Hypothesis) -> Explanation:
        """Measure what a hypothesis leaves, and how much that is worth.

        1. `after` is its relative error, `before` that of its baseline (1 if there is none).
        2. The limit is the largest of some roundings, a share of `before`, and a multiple of the inherited
           error; never more than a tenth of the squared error, unless the hypothesis is certain. An exact one
           may leave roundings alone, and one that says what the target is and not why some percent.
        3. The score is -n log(after / before), less k/2 log n for k fitted numbers (the Bayesian information
           criterion), less the logarithm of its alternatives.
        4. It may fit by luck if it has too many fitted numbers for the elements that err, or if noise would
           be explained so well with a chance above 1e-9: then what it leaves is infinite.
        """
        after = relative_error(hypothesis.observed, hypothesis.predicted)
        baseline = hypothesis.baseline
        before = None if baseline is None else relative_error(hypothesis.observed, baseline)
        whole = 1.0 if before is None else before
        limit = hypothesis.roundings * self.rounding
        if not hypothesis.is_exact:
            limit = max(limit, SHARE * whole, INHERITED * self.inherited)
        limit = min(limit, (_EQUAL if hypothesis.kind in _NO_REASON else LESSENED) * whole)
        self.count += 1
        if limit < after <= _CERTAIN_ROUNDINGS * self.rounding and self._is_certain(hypothesis):
            limit = _CERTAIN_ROUNDINGS * self.rounding
        if not math.isfinite(after):  # a function that overflows
            after = math.inf
        elif whole:
            self.tried[hypothesis.kind] = min(self.tried.get(hypothesis.kind, math.inf), after / whole)
        n, k = hypothesis.observed.size, hypothesis.parameters
        share = max(after, _EXACT) / whole if whole else math.inf
        score = -n * math.log(self._distinct(after) / whole) if whole and after < math.inf else 0.0
        score -= k / 2 * math.log(max(n, 2)) + hypothesis.log_alternatives
        erring = _count_erring(hypothesis)
        is_fair = (
            math.isfinite(share)
            and k * LEAST_PER_PARAMETER <= erring
            and self._log_chance(hypothesis, erring, share) <= LOG_CHANCE
        )
        explanation = Explanation(
            hypothesis.kind,
            hypothesis.text,
            hypothesis.hint,
            before,
            after if is_fair else math.inf,
            limit,
            k,
            n,
            score,
            hypothesis.facts,
        )
        says_why = explanation.kind not in ("inherited", *_NO_REASON, *_VAGUE) and k < _MANY_PARAMETERS
        self.is_explained |= explanation.is_within and says_why
        return explanation

    def _is_certain(self, hypothesis: Hypothesis) -> bool:
        """Whether what it changes is known by so many standard errors that noise can't be the reason.

        1. It is a change of known values by no more than one fitted number; it changes them by more than a
           part of a rounding, and the inputs arrive with less than one.
        2. The step from the baseline to what it predicts is estimated from what was observed; it has to be 1
           and may not be 0.
        """
        baseline = hypothesis.baseline
        if baseline is None or hypothesis.parameters > 1 or self.inherited > self.rounding:
            return False
        if hypothesis.kind == "inherited" or hypothesis.kind.startswith("only-"):
            return False
        size = relative_error(hypothesis.predicted, baseline)
        if not size >= max(_LEAST_STEP * self.rounding, _WIDE_NOISE):
            return False
        step = estimate_step(hypothesis.observed, hypothesis.predicted, baseline)
        if abs(step.value - 1) > _STEP_SLACK + _STEP_DEVIATIONS * step.error:
            return False
        return step.log_chance + hypothesis.log_alternatives + math.log(self.count + 1) <= LOG_CHANCE

    def _distinct(self, after: float) -> float:
        """A residual as far as it distinguishes hypotheses: exact, or within a rounding, or as it is."""
        exact = max(self.rounding / _EXACT_PARTS, _EXACT)
        return exact if after <= exact else max(after, self.rounding, _WIDE_NOISE)

    def _log_chance(self, hypothesis: Hypothesis, count: float, left: float) -> float:
        """Logarithm of the chance that as many parameters explain as much of white noise.

        The share explained of n elements of noise by k parameters is Beta(k/2, (n-k)/2); this is Chernoff's
        bound of its tail, times all alternatives.

        Args:
            hypothesis: For its parameters and alternatives.
            count: Elements that err, n.
            left: Share of the error that is left, no unit.
        """
        explained, usual = 1 - left * left, hypothesis.parameters / count
        if explained <= usual:
            return 0.0
        divergence = (1 - usual) * math.log((1 - usual) / (left * left))
        if usual:
            divergence += usual * math.log(usual / explained)
        return hypothesis.log_alternatives + math.log(self.count + 1) - count / 2 * divergence


def rank_explanations(explanations: Sequence[Explanation]) -> tuple[Explanation, ...]:
    """Sort the explanations that hold, and drop those that another one makes needless.

    1. What says why comes before equality to another record or NaN, and that before where the error is.
    2. Within each, the higher score comes first.
    3. An explanation is dropped if another one says all that it says, with fewer numbers, of the whole, or
       better; so is a repetition of kind and text.
    """
    holding = [e for e in explanations if e.is_within]
    holding.sort(key=lambda e: (e.is_location, e.kind in _NO_REASON, -e.score, e.kind, e.text))
    kept: list[Explanation] = []
    for explanation in holding:
        if any(_makes_needless(other, explanation) for other in holding if other is not explanation):
            continue
        if all((explanation.kind, explanation.text) != (other.kind, other.text) for other in kept):
            kept.append(explanation)
    return tuple(kept)


def _makes_needless(other: Explanation, explanation: Explanation) -> bool:
    """Whether `other` says all that `explanation` does: with fewer numbers, of the whole, or better.

    1. That a record is equal to another one, or NaN, does not say why: it replaces locations only.
    2. What leaves clearly more, or was tested on less than half of the elements, replaces nothing.
    3. What an error is replaces where it is, never the other way round.
    4. Another setting that says little is replaced by what says more, with no more numbers.
    5. Of two fitted ones the one with fewer numbers stays.
    6. That a parameter is rolled says why a result is in another order, if it has no less than a nat of its
       score.
    7. Of one kind, of a part of the tensor, and of two locations the higher score stays.
    """
    floor = max(explanation.limit * _FLOOR_OF_LIMIT, _EXACT)
    if other.kind in _NO_REASON and not explanation.is_location:
        return False
    if other.after > _EQUAL_RESIDUALS * max(explanation.after, floor):
        return False
    if other.elements < explanation.elements * _LARGEST_PART:
        return False
    if explanation.is_location != other.is_location:
        return explanation.is_location
    if explanation.kind in _VAGUE and other.kind not in _VAGUE and other.parameters <= explanation.parameters:
        return True
    if explanation.parameters >= _MANY_PARAMETERS and other.parameters < explanation.parameters:
        return True
    if other.kind == "parameter-shift" and explanation.kind.endswith("-order"):
        return other.score > explanation.score - _TIED
    is_replaceable = explanation.is_location or "where" in explanation.facts or explanation.kind == other.kind
    return is_replaceable and other.parameters <= explanation.parameters and other.score > explanation.score


def _count_erring(hypothesis: Hypothesis) -> float:
    """Count the elements that the error before consists of: all, if it is white noise; 1 for an outlier."""
    size = hypothesis.observed.size
    if hypothesis.baseline is None or not size:
        return max(size, 1)
    square = (hypothesis.observed - hypothesis.baseline).reshape(-1) ** 2
    largest = float(square.max())
    if not largest:
        return 1
    square /= largest
    return min(size, 3 * float(square.sum()) ** 2 / float(np.dot(square, square)))
