"""The distance of a target from its reference in units of a baseline's distance: the three-way test (POL-60).

A baseline is a second reference run in the target's precision, or of a perturbed input. The ratio is a
label and no verdict: a correct port may lie at half or at twice the baseline's distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.comparison.pair import Pair, Ratio
from tensorcap.metrics import Difference
from tensorcap_formats.records import Record

LABELS: Final = (  # upper end of R, label
    (0.95, "over-precise"),
    (1.05, "equivalent"),
    (1.2, "equivalent within 1.2"),
    (3.0, "precision or order of operations"),
    (10.0, "a factor is missing"),
    (100.0, "a step is missing"),
    (math.inf, "another computation"),
)
RELATIVE_EPSILON: Final = 1e-7  # of the reference's norm: below, a run in low precision is exact


def ratio(target: Difference | None, baseline: Difference | None, epsilon: float = RELATIVE_EPSILON) -> Ratio:
    """Set the target's error against the baseline's.

    Args:
        target: Target against reference; None if the two are identical.
        baseline: Baseline against reference; None if the two are identical.
        epsilon: Relative error up to which a run is exact.
    """
    return ratio_of(_relative(target), _relative(baseline), epsilon)


def ratio_of(ours: float | None, theirs: float | None, epsilon: float = RELATIVE_EPSILON) -> Ratio:
    """Set one relative error against another, as `ratio`.

    Args:
        ours: Norm of the target's error over the reference's norm, no unit; None if undefined.
        theirs: The baseline's.
        epsilon: As for `ratio`.

    Example:
        >>> ratio_of(0.03, 0.02).r, ratio_of(0.0, 0.0).r, ratio_of(0.1, 0.0).r
        (1.5, 1.0, inf)
    """
    if ours is None or theirs is None:
        return Ratio("undefined")
    if theirs <= epsilon:
        if ours <= epsilon:
            return Ratio("both-exact", 1.0, label="exact")
        return Ratio("baseline-exact", math.inf, label="the baseline is exact here")
    return Ratio("measured", ours / theirs, label=label_of(ours / theirs))


def label_of(r: float) -> str:
    """Return the words for a ratio.

    Example:
        >>> [label_of(r) for r in (0.5, 1.0, 2.0, 300.0)]
        ['over-precise', 'equivalent', 'precision or order of operations', 'another computation']
    """
    return next(label for limit, label in LABELS if r <= limit)


def with_ratios(
    pairs: Sequence[Pair], baseline: Mapping[str, Difference | None], epsilon: float = RELATIVE_EPSILON
) -> list[Pair]:
    """Add to pairs their ratios.

    Args:
        pairs: Pairs of reference and target.
        baseline: By key text, baseline against reference; None if the two are identical. Pairs whose
            key it lacks are `undefined`.
        epsilon: As for `ratio`.
    """
    squares: dict[tuple[str, str], list[float]] = {}
    for pair in pairs:
        if pair.reference is not None and pair.is_compared and pair.key in baseline:
            sums = squares.setdefault((pair.reference.key.site, pair.reference.key.slot), [0.0, 0.0])
            for i, difference in enumerate((pair.difference, baseline[pair.key])):
                if difference is not None and difference.mse is not None:
                    sums[i] += difference.mse * difference.measured

    def three_way(pair: Pair, record: Record) -> Ratio:
        if not pair.is_compared or pair.key not in baseline:
            return Ratio("undefined")
        measured = ratio(pair.difference, baseline[pair.key], epsilon)
        ours, theirs = squares[record.key.site, record.key.slot]
        has_sigma = measured.state == "measured" and theirs
        return replace(measured, sigma=math.sqrt(ours / theirs)) if has_sigma else measured

    return [
        replace(pair, baseline=three_way(pair, pair.reference))
        if pair.reference and pair.is_inexact
        else pair
        for pair in pairs
    ]


def _relative(difference: Difference | None) -> float | None:
    return 0.0 if difference is None else difference.relative_frobenius
