"""The Equivalence method's comparison of three tensors: is the target's error that of the precision alone?

R is the distance of the target from the reference, over that of a baseline: the reference's own computation
in the target's precision. BC and sigma compare the two distributions of errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError

EPSILON: Final = 1e-7  # of the norm of a float32 reference: a baseline that lies nearer is exact
_TINY: Final = 1e-30  # of the method's relative distances
_MOST_BINS: Final = 1000
_SIGMAS: Final = 5.0  # of a histogram of errors, around their mean


@dataclass(frozen=True, slots=True)
class ThreeTensors:
    """How far a target and a baseline lie from a reference.

    Attributes:
        elements: How many elements were compared.
        ratio: R, no unit; 0 if the target is exact, infinite if only the baseline is.
        bhattacharyya: BC, the overlap of both distributions of errors, from 0 to 1; None if there are none.
        sigma_ratio: Root mean square of the target's errors over that of the baseline's; None if the baseline
            is exact.
        is_baseline_exact: Whether the baseline has no error beyond `epsilon`.
        relative_error: Distance of the target from the reference, relative to the reference's norm.
        nonfinite: Elements of the target that are not finite where the reference is, or the other way round.
        metrics: The method's twelve distances, by its names.
    """

    elements: int
    ratio: float
    bhattacharyya: float | None
    sigma_ratio: float | None
    is_baseline_exact: bool
    relative_error: float
    nonfinite: int
    metrics: dict[str, float]


def compare_three(
    reference: Array, baseline: Array, target: Array, *, epsilon: float = EPSILON
) -> ThreeTensors:
    """Compare a target with a reference, by what a baseline shows of the precision.

    R = |target - reference| / max(|baseline - reference|, epsilon |reference|), in float64, with Frobenius
    norms; 0 if the target has no error. Elements that are not finite are left out, and if the target's are
    not where the reference's are, or the other way round, R is infinite.

    Args:
        reference: The trusted computation in a wide precision, any shape.
        baseline: The trusted computation in the target's precision, the same shape.
        target: The computation under test, the same shape.
        epsilon: The relative distance up to which a baseline counts as exact, no unit: the rounding of the
            reference's own precision.

    Raises:
        UsageError: The shapes differ, or there is no element.

    Example:
        >>> import numpy as np
        >>> three = compare_three(np.array([3.0, 4.0]), np.array([3.0, 4.1]), np.array([3.0, 4.2]))
        >>> round(three.ratio, 6), three.elements
        (2.0, 2)
    """
    arrays = [np.asarray(one, np.float64) for one in (reference, baseline, target)]
    shapes = [one.shape for one in arrays]
    if len(set(shapes)) > 1:
        raise UsageError(
            f"the shapes differ: reference {list(shapes[0])}, baseline {list(shapes[1])}, target "
            f"{list(shapes[2])}",
            hint="Bring them to one shape first: nothing is broadcast or cut.",
        )
    if not arrays[0].size:
        raise UsageError(f"there is no element: the shape is {list(shapes[0])}")
    wide, low, port = (one.reshape(-1) for one in arrays)
    are_finite = [np.isfinite(one) for one in (wide, low, port)]
    nonfinite = int((are_finite[0] != are_finite[2]).sum())
    compared = are_finite[0] & are_finite[1] & are_finite[2]
    wide, low, port = wide[compared], low[compared], port[compared]
    norm = float(np.linalg.norm(wide))
    of_port, of_low = port - wide, low - wide
    distance, own = float(np.linalg.norm(of_port)), float(np.linalg.norm(of_low))
    is_exact = own <= epsilon * norm
    return ThreeTensors(
        int(compared.sum()),
        math.inf if nonfinite else _ratio(distance, max(own, epsilon * norm)),
        bhattacharyya(of_low, of_port) if distance or own else None,
        None if is_exact else distance / own,
        is_exact,
        distance / norm if norm else (math.inf if distance else 0.0),
        nonfinite,
        {**_distances(wide, low, "2_1"), **_distances(wide, port, "3_1")},
    )


def bhattacharyya(one: Array, other: Array) -> float:
    """The overlap of two distributions: the sum of sqrt(p q) over the bins of a histogram that both share.

    Bins are the method's: as many as the root of the count, at most 1000, over five standard deviations to
    each side of the mean of both together; what lies further out is counted in the last bin of its side.

    Args:
        one: Errors, flat, at least one.
        other: Errors, as many.
    """
    both = np.concatenate([one, other])
    middle, width = float(both.mean()), float(both.std()) * _SIGMAS
    if not width:
        return 1.0
    bins = max(1, min(_MOST_BINS, math.isqrt(one.size)))
    edges = np.linspace(middle - width, middle + width, bins + 1)
    counts = [np.histogram(np.clip(part, edges[0], edges[-1]), edges)[0] for part in (one, other)]
    shares = [count / count.sum() for count in counts]
    return float(min(1.0, np.sqrt(shares[0] * shares[1]).sum()))


def _ratio(distance: float, baseline: float) -> float:
    if not distance:
        return 0.0
    return distance / baseline if baseline else math.inf


def _distances(reference: Array, other: Array, pair: str) -> dict[str, float]:
    """The method's six distances of a pair, by its names; a relative one is 0 where the reference is 0."""
    if not reference.size:
        return {}
    difference, sizes = np.abs(other - reference), np.abs(reference)
    relative = np.divide(difference, sizes, out=np.zeros_like(difference), where=sizes != 0)
    values: dict[str, Any] = {
        "abs_max_elem_diff": difference.max(),
        "abs_mean_elem_diff": difference.mean(),
        "rel_max_elem_diff": relative.max(),
        "rel_mean_elem_diff": relative.mean(),
        "rel_matrix_fro_norm_dist": np.linalg.norm(difference) / (np.linalg.norm(reference) + _TINY),
        "rel_matrix_inf_norm_dist": difference.max() / (sizes.max() + _TINY),
    }
    return {f"{name}_{pair}": float(value) for name, value in values.items()}
