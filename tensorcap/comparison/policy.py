"""The limits by which pairs are judged if nobody gave a tolerance; clauses POL-n of `specs/policy.md`.

A table of thresholds by dtype accuses correct ports and passes wrong ones: the error of a correct run
depends on its depth, its weights and its precision. So the policy looks at what a module adds to the error
of its inputs, at outliers, at the growth along the depth, and at structure in the error (`policy_tests`). All
numbers are here, as data, and reports print them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from sys import intern
from typing import Any, Final

from tensorcap.comparison.pair import Finding, Status
from tensorcap.runs import is_state
from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.json_values import json_value
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo

# Tests that `specs/policy.md` and the member `test` of version 1 of a result name by a letter or another word
LETTERS: Final[Mapping[str, str]] = {
    "own_error_leaf": "A",
    "own_error_composite": "A'",
    "twin_ratio": "B",
    "ulp_share": "C",
    "gain": "D",
    "attention_gain": "D'",
    "gain_tail": "T",
    "attention_gain_tail": "T'",
    "outlier_element": "E",
    "growth": "F",
    "input_dependence": "G",
    "wide_error": "wide",
    "pass_through": "echo",
}
# Descriptions of the values of tests whose name does not say them
_PHRASES: Final[Mapping[str, str]] = {
    "own_error_leaf": "own error",
    "own_error_composite": "own error",
    "twin_ratio": "ratio to the twin's error",
    "ulp_share": "share of other values",
    "gain": "error gain",
    "gain_tail": "error gain of the worst rows",
    "attention_gain_tail": "attention gain of the worst rows",
    "code_gain": "gain of the code between modules",
    "row_gain": "error gain of one row",
    "run_gain": "error gain over all before",
    "outlier_element": "outlier",
    "growth": "row error",
    "input_dependence": "share explained by the input",
    "angles": "errors over those of rounded angles",
    "wide_error": "row error",
    "integers": "other whole numbers",
    "parameter": "other parameters",
    "weight_rounding": "errors over those of rounding",
    "quantisation": "own error over predicted error",
    "recomputed": "own error",
    "rank_part": "share of the error in one rank's part",
    "range": "values beyond the range",
    "routing": "share of other choices",
    "unequal_copies": "unlike copies",
    "unequal_since": "unlike copies",
    "unmerged": "tensors of ranks apart",
    "zeros": "rows of zeros",
}


@json_value.register
def _(value: Finding) -> Any:
    members = {name: json_value(getattr(value, name)) for name in ("value", "limit", "status", "text")}
    return {"test": LETTERS.get(value.test, value.test), "name": value.test, **members}


def describe_test(name: str) -> str:
    """Describe the value of a test in words.

    Example:
        >>> describe_test("gain"), describe_test("attention_gain"), describe_test("max_abs")
        ('error gain', 'attention gain', 'max_abs')
    """
    return _PHRASES.get(name, name.replace("_", " ") if name in LETTERS else name)


@dataclass(frozen=True, slots=True)
class Limits:
    """Green up to the first number, suspect up to the second, diverged above."""

    green: float
    suspect: float

    def status(self, value: float) -> Status:
        """Return the status of a value."""
        if value <= self.green:
            return "within-rounding"
        return "suspect" if value <= self.suspect else "diverged"

    def finding(self, test: str, value: float, text: str) -> Finding:
        """Make the finding of a test whose value has these limits."""
        return Finding(test, value, self.green, self.status(value), intern(text))  # of many pairs the same

    def scaled(self, factor: float) -> Limits:
        """Multiply both limits."""
        return self if factor == 1 else Limits(factor * self.green, factor * self.suspect)


@dataclass(frozen=True, slots=True)
class Precision:
    """The arithmetic that errors are measured against.

    Attributes:
        name: Its dtype.
        unit: `u`, half the distance from 1 to the next value, no unit.
        rounding: `rho`, the relative error of one rounding of many values, no unit.
        weights: What the weights were rounded to, if that is coarser, as `int8`; else "".
        weights_from: By step, the order of execution in the reference of the first result that such weights
            make, from which on they count; empty if that is not known, so that they count everywhere.
        own_roundings: `rho` of the results of each module of which it is known, by its site: of those with
            such weights, of which `rounding` is the largest, and of those that round nothing to few bits.
        recorded: `rho` of the dtype of both records, if they are coarser than the run without its weights.
    """

    name: str
    unit: float
    rounding: float
    weights: str = ""
    weights_from: tuple[tuple[int, int], ...] = ()
    own_roundings: Mapping[str, float] = field(default_factory=dict, compare=False)
    recorded: float = 0.0

    @property
    def text(self) -> str:
        """The dtype, and what weights were rounded to.

        Example:
            >>> Precision("float32", 0.02, 0.009, "int8").text
            'float32 with int8 weights'
        """
        return f"{self.name} with {self.weights} weights" if self.weights else self.name

    def of_module(self, site: str) -> Precision:
        """Return the precision of what a module adds itself; the run's if that is not known."""
        own = self.own_roundings.get(site)
        if own is None:
            return self
        own = max(own, self.recorded)
        return replace(self, unit=self.unit * own / self.rounding, rounding=own)

    def has_weights(self, record: Record) -> bool:
        """Whether rounded weights count for a record of the reference: their module's, or what follows."""
        if not self.weights_from or not self.weights or is_state(record.key):
            return bool(self.weights)
        first = dict(self.weights_from).get(record.key.step)
        return first is not None and record.order >= first

    @property
    def is_wide(self) -> bool:
        """Whether the order of accumulation, not rounding, makes the error (float32 and wider)."""
        return self.unit <= UNIT_ROUNDOFFS["float32"]


@dataclass(frozen=True, slots=True)
class Policy:
    """All numbers of the policy, without units unless it says so.

    Attributes:
        rounding: Relative error of one rounding, in units of `u`.
        leaf_gain: Limits of test `gain`.
        core_gain: Limits of test `attention_gain`.
        leaf_tail: Limits of test `gain_tail`.
        core_tail: Limits of test `attention_gain_tail`.
        expert_row: Limits of test `attention_gain_tail` of the worst row of experts.
        code_gain: Limits of test `code_gain`.
        row_gain: Limits of test `row_gain`.
        row_spread: The same: how many times the median row the worst one is off by at least.
        row_excess: The same: how many times what is expected at that depth.
        run_gain: Limits of test `run_gain`.
        run_excess: The same: how many times what is expected at that depth a result is off by at least.
        second_look: How many times smaller a robust error may be than the measured one and still count.
        function_error: Largest relative error, no unit, of a prediction from half of a leaf's elements by
            which the others are a function of its input. Smooth functions and kinks at thousands of points
            are predicted a hundred times better, norms and sums over elements are off by a tenth and more.
        outlier: Test `outlier_element`: how many times the row error an outlier may be.
        outlier_spread: The same: how many times the median the worst rows may be and still count as usual.
        least_row: The same: the least size of a row, in units of the usual one of its tensor.
        envelope: Test `growth`: `e0 * rho * sqrt(e1 + e2 * n)` at block n.
        summed: The same, of weights in few bits: how many times what all modules before round off together.
            Of right targets of seven kinds of quantisation it was 0.2 to 1.4, with fused nodes 3.1.
        angle: Test `angles`: `u * (a + b * angle)` is the largest error of a sine and cosine together: one
            rounding of each, nine of an angle whose frequency is the exponential of a rounded number of up
            to 9.2, the logarithm of 10,000, and seven of positions, quotients and products.
        few: How many standard deviations of a ratio of two RMS over `n` elements, `1 / sqrt(n)`, limits of
            such ratios are widened by.
        rough: Factor on the limits of `growth` and of float32 runs, of places within a module's code and of
            gradients: powers multiply a relative error, and what cancels makes it larger.
        leaf_own: Limits of test `own_error_leaf`, in roundings.
        composite_own: Limits of test `own_error_composite`.
        replayed_leaf: Limits of test `own_error_leaf` in a replay, in roundings.
        replayed_composite: Limits of test `own_error_composite` in a replay.
        replayed_tail: Factor on these limits, for the 95th percentile of rows.
        quantised: Limits of tests `weight_rounding` and `quantisation`.
        twin_ratio: Limits of test `twin_ratio`.
        twin_precise: R below which a target rounds less than the twin, which is no mistake.
        twin_bits: Limits of test `ulp_share`, shares of elements.
        twin_values: Test `ulp_share`: the share of elements of an activation that may differ at all.
        explained: Test `input_dependence`: the largest share of the squared error that the input's value may
            explain.
        explained_bins: Test `input_dependence`: count of bins of the input's value.
        wide_total: float32 against float32: limits of the whole error; of float64 in proportion to u.
        wide_own: The same, of a module's own error.
        wide_noise: The same: the relative error that the order of accumulation alone makes in a row.
        routing_margin: Flips of experts are explained up to this many times the error of their scores.
        routing_unexplained: Share of rows whose flips may be unexplained before the router is guilty.
        routing_flipped: Share of rows that may flip if scores alone do not decide.
        routing_growth: Factor on the limit of `growth` in steps behind one in which experts flipped.
        routing_typical: Test `growth`: share of rows behind a router that may have other experts before the
            median row is not what it was.
    """

    rounding: float = 0.425
    leaf_gain: Limits = Limits(1.5, 2.5)
    core_gain: Limits = Limits(4.0, 5.0)
    leaf_tail: Limits = Limits(1.8, 2.5)
    core_tail: Limits = Limits(4.0, 5.0)
    expert_row: Limits = Limits(10.0, 25.0)
    code_gain: Limits = Limits(4.0, 6.0)
    row_gain: Limits = Limits(5.0, 10.0)
    row_spread: float = 6.0
    row_excess: float = 1.25
    run_gain: Limits = Limits(10.0, math.inf)
    run_excess: float = 3.0
    second_look: float = 2.0
    function_error: float = 1e-2
    outlier: float = 25.0
    outlier_spread: float = 5.0
    least_row: float = 0.1
    envelope: tuple[float, float, float] = (2.0, 4.0, 30.0)
    summed: float = 4.0
    angle: tuple[float, float] = (2.0, 16.0)
    few: float = 3.0
    rough: float = 3.0
    leaf_own: Limits = Limits(2.5, 3.5)
    composite_own: Limits = Limits(6.0, 9.0)
    replayed_leaf: Limits = Limits(2.0, 3.0)
    replayed_composite: Limits = Limits(4.0, 6.0)
    replayed_tail: float = 1.5
    quantised: Limits = Limits(1.25, 1.5)
    twin_ratio: Limits = Limits(1.2, 1.5)
    twin_precise: float = 0.95
    twin_bits: Limits = Limits(0.001, 0.005)
    twin_values: float = 0.005
    explained: float = 0.05
    explained_bins: int = 64
    wide_total: Limits = Limits(1e-5, 1e-4)
    wide_own: Limits = Limits(1e-5, 1e-4)
    wide_noise: float = 4e-6
    routing_margin: float = 4.0
    routing_unexplained: float = 0.01
    routing_flipped: float = 0.1
    routing_growth: float = 6.0
    routing_typical: float = 0.25
    units: Mapping[str, float] = field(default_factory=lambda: UNIT_ROUNDOFFS, repr=False)

    def precision(self, name: str) -> Precision:
        """Return the precision of a dtype.

        Raises:
            UsageError: It is no floating dtype.
        """
        unit = self.units.get(name)
        if unit is None:
            known = ", ".join(self.units)
            raise UsageError(f"compute dtype {name!r} is unknown", hint=f"Known are: {known}.")
        return _precision(name, unit, self.rounding * unit)

    def precision_of_runs(
        self, reference: RunInfo, target: RunInfo, compute_dtype: str | None = None
    ) -> Precision | None:
        """Return the precision that two runs can agree in: the coarser of theirs (POL-3).

        Args:
            reference: What the reference's metadata say.
            target: What the target's metadata say.
            compute_dtype: What the user says that the target computed in.

        Returns:
            None if neither run says what it computed in.

        Raises:
            UsageError: `compute_dtype` is no floating dtype.
        """
        names = (compute_dtype or _compute_dtype(target), _compute_dtype(reference))
        named = [self.precision(name) for name in names if name]
        return max(named, key=lambda p: p.unit, default=None)

    def precision_of_pair(self, runs: Precision | None, reference: Record, target: Record) -> Precision:
        """Return the precision that errors of a pair are held against (POL-3).

        Args:
            runs: What the runs can agree in; None if neither says.
            reference: The trusted record.
            target: The record under test; one of both is inexact.

        Returns:
            That of the runs, or of the coarser record if that is coarser; of what comes before the first
            rounded weights that of the runs without them.
        """
        if runs is not None and runs.weights and not runs.has_weights(reference):
            runs = self.precision(runs.name)
        if reference.dtype is target.dtype:
            coarsest = reference.dtype.name
        else:
            names = [record.dtype.name for record in (reference, target) if record.dtype.is_inexact]
            coarsest = max(names, key=self.units.__getitem__)
        if runs is None or runs.unit < self.units[coarsest]:
            return self.precision(coarsest)
        if runs.weights and self.units[coarsest] > self.units[runs.name]:
            return replace(runs, recorded=self.precision(coarsest).rounding)
        return runs

    def envelope_at(self, depth: int, precision: Precision) -> float:
        """Return the largest row error that is green at a depth (POL-13)."""
        factor, start, growth = self.envelope
        return factor * precision.rounding * math.sqrt(start + growth * depth)

    def sampled(self, limits: Limits, elements: int) -> Limits:
        """Widen limits of a ratio of two RMS by how far so few elements may put it off (POL-30)."""
        return limits.scaled(self.widened_by(elements))

    def widened_by(self, elements: int) -> float:
        """Return the factor by which a limit of a ratio of two RMS over some elements is widened (POL-30)."""
        return 1 + self.few / math.sqrt(max(1, elements))

    def widened_by_ranks(self, limits: Limits, ranks: int) -> float:
        """Return the factor by which a leaf's own limit is widened whose result ranks add up (RPL-180).

        Each rank rounds its term, and each of the sums but the last, which any leaf rounds, is rounded too:
        in units of a rounding of the result, terms of one size and of any sign have squared errors of 1
        together, and a sum of k of n of them of k / n.

        Example:
            >>> round(POLICY.widened_by_ranks(Limits(2.0, 3.0), 4), 3)  # (4 + 1 + 2 / 4 + 3 / 4) ** 0.5 / 2
            1.25
        """
        if ranks < 2:
            return 1.0
        further = 1 + sum(range(2, ranks)) / ranks
        return math.sqrt(1 + further / limits.green**2)

    def in_proportion(self, limits: Limits, precision: Precision) -> Limits:
        """Convert limits for float32 into those for a wider precision."""
        return limits.scaled(precision.unit / self.units["float32"])

    def noise(self, precision: Precision) -> float:
        """Return the relative error that rounding, or the order of accumulation, alone makes in a row."""
        if not precision.is_wide:
            return precision.rounding
        return self.wide_noise * precision.unit / self.units["float32"]


@cache
def _precision(name: str, unit: float, rounding: float) -> Precision:
    return Precision(name, unit, rounding)


POLICY: Final = Policy()


def _compute_dtype(run: RunInfo) -> str:
    """Return the dtype of floats that a run says it computed in, "" if it does not say."""
    return next((name for name in (run.compute_dtype, run.dtype) if name in UNIT_ROUNDOFFS), "")
