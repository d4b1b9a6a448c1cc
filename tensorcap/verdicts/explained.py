"""Whether the error of a leaf is a function of its input: another function was computed (test G)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from tensorcap.verdicts.calls import Call, Calls
from tensorcap.verdicts.looks import sample
from tensorcap.verdicts.pairing import Finding, Pair, Status
from tensorcap.verdicts.policy import Policy
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array

_ELEMENTS: Final = 1 << 18  # as many tell
_FEWEST_A_BIN: Final = 16


def explained_leaves(
    reference: Archive, target: Archive, calls: Calls, pairs: Mapping[str, Pair], policy: Policy
) -> Iterator[tuple[Pair, Finding]]:
    """Test the leaves without parameters whose output has the shape of their one input."""
    for leaf in calls.leaves:
        found = _elementwise(leaf, calls, pairs)
        if found is None:
            continue
        source, result = found
        share = explained_by_input(reference, target, source, result, bins=policy.explained_bins)
        if share is None:
            continue
        is_green = share <= policy.explained
        text = f"{share:.0%} of the squared error is a function of the input, at most {policy.explained:.0%}"
        status: Status = "within-rounding" if is_green else "suspect"
        yield result, Finding("G", share, policy.explained, status, text)


def explained_by_input(
    reference: Archive, target: Archive, source: Pair, result: Pair, *, bins: int = 64
) -> float | None:
    """The share of the output's squared error that is a function of the input's value and not of its error.

    Elements are sorted into `bins` of equal count by the reference's input. What the mean of each bin
    explains of the variance of the error is reduced by what as many bins explain of noise, and by what
    they explain of the input's error, which the output inherits.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        source: The pair of the input.
        result: The pair of the output, of equal shape.
        bins: Count of bins.

    Returns:
        A share of 0 to 1; None where there is no error, or too few elements to tell.
    """
    if source.reference is None or source.target is None or result.reference is None or result.target is None:
        return None
    x = sample(reference, source.reference, _ELEMENTS)
    inherited = sample(target, source.target, _ELEMENTS) - x
    errors = sample(target, result.target, _ELEMENTS) - sample(reference, result.reference, _ELEMENTS)
    usable = np.isfinite(x) & np.isfinite(inherited) & np.isfinite(errors)
    x, inherited, errors = x[usable], inherited[usable], errors[usable]
    if x.size < bins * _FEWEST_A_BIN or not errors.any():
        return None
    order = np.argsort(x, kind="stable")
    share = _share(errors[order], bins)
    return max(0.0, share - _share(inherited[order], bins))


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
