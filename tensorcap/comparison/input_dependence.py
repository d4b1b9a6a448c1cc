"""Whether the error of a leaf is a function of its input: another function was computed (test G)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from tensorcap.comparison.pair import Finding, Pair, Status
from tensorcap.comparison.policy import Policy, Precision
from tensorcap.comparison.robust_errors import sample
from tensorcap.runs.calls import Call, Calls
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.float_formats import rounded

_ELEMENTS: Final = 1 << 18  # as many tell
_FEWEST_A_BIN: Final = 16


def explained_leaves(
    reference: Archive,
    target: Archive,
    calls: Calls,
    pairs: Mapping[str, Pair],
    *,
    policy: Policy,
    precision: Callable[[Pair], Precision],
) -> Iterator[tuple[Pair, Finding]]:
    """Test the leaves without parameters whose output has the shape of their one input."""
    for leaf in calls.leaves:
        found = _elementwise(leaf, calls, pairs)
        if found is None:
            continue
        source, result = found
        values = _values(reference, target, source, result)
        if values is None or values[0].size < policy.explained_bins * _FEWEST_A_BIN:
            continue
        share = explained_by_input(*values, bins=policy.explained_bins)
        if share is None:
            continue
        if share > policy.explained:
            dtype = precision(result).name
            share = min(share, unexpected_by_input(*values, bins=policy.explained_bins, dtype=dtype))
        is_green = share <= policy.explained
        text = f"{share:.0%} of the squared error is a function of the input, at most {policy.explained:.0%}"
        status: Status = "within-rounding" if is_green else "suspect"
        yield result, Finding("input_dependence", share, policy.explained, status, text)


def explained_by_input(
    given: Array, received: Array, made: Array, returned: Array, *, bins: int
) -> float | None:
    """The share of the output's squared error that is a function of the input's value and not of its error.

    Elements are sorted into `bins` of equal count by the reference's input. What the mean of each bin
    explains of the variance of the error is reduced by what as many bins explain of noise, and by what
    they explain of the input's error, which the output inherits.

    Args:
        given: The reference's input, float64, one dimension, ascending.
        received: The target's input, in the same order.
        made: The reference's output.
        returned: The target's output.
        bins: Count of bins.

    Returns:
        A share of 0 to 1; None where there is no error.
    """
    errors = returned - made
    if not errors.any():
        return None
    return max(0.0, _share(errors, bins) - _share(received - given, bins))


def unexpected_by_input(
    given: Array, received: Array, made: Array, returned: Array, *, bins: int, dtype: str
) -> float:
    """As `explained_by_input`, of the error less that which rounding the right result would make.

    Where a target computes in few bits, so few values lie in a bin that their roundings do not cancel; of
    a function of about slope 1 they are even alike. What is right for the target's input is read off the
    function that the reference's elements are points of, and rounded to a dtype.
    """
    right = rounded(np.interp(received, given, made), dtype)
    squares = float(((returned - made) ** 2).sum())
    strange = returned - right
    return _share(strange, bins) * float((strange**2).sum()) / squares


def _values(
    reference: Archive, target: Archive, source: Pair, result: Pair
) -> tuple[Array, Array, Array, Array] | None:
    """Inputs and outputs of a leaf, the reference's first, sorted by its input, as far as all are finite."""
    records = [(reference, source.reference), (target, source.target)]
    records += [(reference, result.reference), (target, result.target)]
    if any(record is None for _, record in records):
        return None
    values = np.stack([sample(a, record, _ELEMENTS) for a, record in records if record is not None])
    values = values[:, np.isfinite(values).all(axis=0)]
    given, received, made, returned = values[:, np.argsort(values[0], kind="stable")]
    return given, received, made, returned


def _share(errors: Array, bins: int) -> float:
    """The share of the sum of squares in the means of consecutive bins, less what noise puts there."""
    total = float((errors**2).sum())
    if not total:
        return 0.0
    edges = np.linspace(0, errors.size, bins + 1).astype(np.int64)
    counts = np.diff(edges)
    means = np.add.reduceat(errors, edges[:-1]) / counts
    left = max(0.0, total - float((counts * means**2).sum())) / (errors.size - bins)
    return max(0.0, 1 - left / (total / errors.size))


def _elementwise(leaf: Call, calls: Calls, pairs: Mapping[str, Pair]) -> tuple[Pair, Pair] | None:
    if len(leaf.inputs) != 1 or len(leaf.outputs) != 1 or calls.has_parameters(leaf.site):
        return None
    source, result = (pairs.get(records[0].key.text) for records in (leaf.inputs, leaf.outputs))
    if source is None or result is None or source.reference is None or result.reference is None:
        return None
    given, made = source.reference, result.reference
    if given.shape != made.shape or given.dtype.kind != "float" or made.dtype.kind != "float":
        return None
    if not source.is_compared or result.difference is None or (given.digest and given.digest == made.digest):
        return None
    return (source, result) if made.stored and given.stored else None
