"""Tests that need no model of rounding: whole numbers, parameters, dtypes, rows of zeros, statistics.

Whole numbers are equal or wrong, the choices of routers aside (POL-17, POL-18). Parameters may differ by one
rounding to the coarser dtype (POL-28). A record that is coarser than all dtypes that both runs name was cast,
though no run says so (POL-3). Rows of zeros in the reference have no relative error (POL-20). Records without
values have norms and means, which prove a least error by the triangle inequality (POL-21).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from tensorcap.comparison.exact import coarser_dtype
from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Limits
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair, PolicyTest, is_whole
from tensorcap.comparison.policy_tests.growth import judge_total_error
from tensorcap.comparison.quantised_weights import packed_weights
from tensorcap.comparison.weight_grids import find_weight_grid
from tensorcap.metrics import is_routing
from tensorcap.runs import is_parameter
from tensorcap.wording import counted
from tensorcap_formats.records import Record


class WholeNumberTest(PolicyTest):
    """Tests `integers`, and `routing` of records that hold the choices of a router."""

    names = ("integers", "routing")
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge whole numbers and bools."""
        for pair in context.open_measured():
            if pair.is_whole:
                yield pair.key, context.choices.get(pair.key) or _judge_whole_numbers(pair)


class StatisticsTest(PolicyTest):
    """Tests `statistics`, of records whose values were not kept."""

    names = ("statistics",)
    is_local = False

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge the least error that norms and means prove; what is green by it proves nothing."""
        for pair in context.open_pairs():
            if pair.reference is None or pair.target is None or pair.difference is not None:
                continue
            if is_whole(pair.reference) or is_whole(pair.target):
                continue
            error = _least_error(pair.reference, pair.target)
            if error is None:
                continue
            precision = POLICY.precision_of_pair(context.runs_precision, pair.reference, pair.target)
            depth = context.calls.depth(pair.reference)
            finding = judge_total_error(error, depth, precision, elements=pair.reference.size)
            if finding.status != "within-rounding":
                text = f"norms or means prove {finding.text}"
                yield pair.key, replace(finding, test="statistics", text=text)


class ParameterTest(PolicyTest):
    """Tests `parameter`, or `weight_rounding`; no other test applies to parameters and buffers."""

    names = ("parameter", "weight_rounding")
    is_local = False

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge parameters and buffers, which were measured with the tolerance of one rounding."""
        packed = packed_weights(context.target.info)
        for pair in context.open_measured():
            if not pair.is_whole and is_parameter(pair.reference.key):
                finding = _judge_parameter(pair)
                if finding.status == "diverged" and _is_packed(pair, packed):
                    measured = context.layers.weights.get(pair.key)
                    finding = (measured and measured.finding) or _rounded_to_grid(context, pair) or finding
                yield pair.key, finding


class CoarserDtypeTest(PolicyTest):
    """Tests `dtype`."""

    names = ("dtype",)
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge records that are coarser than the other one and than what both runs say they computed in."""
        units = POLICY.units
        infos = (context.reference.info, context.target.info)
        stated = [[name for name in (run.compute_dtype, run.dtype) if name in units] for run in infos]
        if not all(stated):
            return
        name = max((name for names in stated for name in names), key=units.__getitem__)
        for pair in context.open_floats():
            coarse = max((pair.reference, pair.target), key=lambda record: units[record.dtype.name])
            low, high = sorted(units[record.dtype.name] for record in (pair.reference, pair.target))
            if low == high or high <= units[name]:
                continue
            text = f"a record is {coarse.dtype.name}, and both runs say that they computed in {name} or finer"
            yield pair.key, Finding("dtype", high, low, "suspect", text)


class ZeroRowTest(PolicyTest):
    """Tests `zeros`."""

    names = ("zeros",)
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge rows that are all zeros in the reference and not in the target."""
        for pair in context.open_floats():
            count = pair.difference.zero_rows
            if count:
                text = f"{counted(count, 'row', 'are')} all zeros in the reference and not in the target"
                yield pair.key, Finding("zeros", count, 0, "suspect", text)


def _judge_whole_numbers(pair: MeasuredPair) -> Finding:
    unequal = pair.difference.unequal
    text = f"{unequal} of {pair.difference.elements} whole numbers differ"
    if is_routing(pair.reference):
        text = f"{text}, and the scores that they were chosen by were not captured"
        return Finding("integers", unequal, 0, "suspect", text)
    return Finding("integers", unequal, 0, "diverged", text)


def _judge_parameter(pair: MeasuredPair) -> Finding:
    """Judge a parameter that was measured with the tolerance of its rounding (POL-28)."""
    difference = pair.difference
    unlike = difference.unequal if difference.mismatches is None else difference.mismatches
    text = f"{unlike} of {difference.measured} numbers that the model holds are not those of the reference"
    coarse = coarser_dtype(pair.reference.dtype, pair.target.dtype)
    if coarse is not None and pair.reference.dtype.name != pair.target.dtype.name:
        text += f", rounded to {coarse.name}"
    return Limits(0, 0).finding("parameter", unlike, text)


def _is_packed(pair: MeasuredPair, packed: Collection[tuple[str, str]]) -> bool:
    """Whether a parameter is recorded in floats, and its module says that it holds whole numbers."""
    key = pair.target.key
    return pair.target.dtype.kind == "float" and (key.site, key.slot.partition(".")[2]) in packed


def _rounded_to_grid(context: Context, pair: MeasuredPair) -> Finding | None:
    """What says that a weight is the reference's, rounded to whole numbers; None if it is not."""
    sides = context.reference.load(pair.reference), context.target.load(pair.target)
    ours, theirs = (side.astype(np.float64) for side in sides)
    grid = find_weight_grid(ours, theirs, POLICY.units[pair.target.dtype.name])
    if grid is None:
        return None
    return Limits(0, 0).finding("parameter", 0, f"the reference's, rounded to {grid.text}")


def _least_error(reference: Record, target: Record) -> float | None:
    """Compute the relative Frobenius error that norms and means prove, by the triangle inequality."""
    ours, theirs = reference.statistics, target.statistics
    if ours is None or theirs is None or not ours.l2 or theirs.l2 is None:
        return None
    least = abs(theirs.l2 - ours.l2)
    if ours.mean is not None and theirs.mean is not None:
        least = max(least, abs(theirs.mean - ours.mean) * math.sqrt(reference.size))
    return least / ours.l2
