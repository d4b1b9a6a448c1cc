"""Is the error of an elementwise leaf a function of its input, so that another function was computed?

Formula (POL-14): elements are sorted by the reference's input into `Policy.explained_bins` bins of equal
count; the share of the squared error in the means of the bins, less what noise and the input's own error put
there, is at most `Policy.explained`. Rounding errors do not depend on the input's value; tanh for erf in a
GELU does. Right activations in bfloat16 were measured at up to 7.6 %, and at 1.1 % once their rounding is
taken off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.comparison.pair import Finding, Status
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair
from tensorcap.comparison.robust_errors import sample
from tensorcap.runs import Call
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.float_formats import rounded
from tensorcap_formats.records import Record

_ELEMENTS: Final = 1 << 18  # as many tell
_FEWEST_A_BIN: Final = 16


class InputDependenceTest:
    """Tests `input_dependence` of leaves without parameters whose output has the shape of their one input."""

    names = ("input_dependence",)
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge elementwise leaves, but for results of an injected run that show a module's own error."""
        policy = context.policy
        for leaf in context.calls.leaves:
            records = _elementwise(leaf, context)
            if records is None:
                continue
            sources, result = records
            values = _values(context.reference, context.target, sources, result)
            if values[0].size < policy.explained_bins * _FEWEST_A_BIN:
                continue
            share = explained_by_input(*values, bins=policy.explained_bins)
            if share is None:
                continue
            if share > policy.explained:
                dtype = result.precision.name
                share = min(share, unexpected_by_input(*values, bins=policy.explained_bins, dtype=dtype))
            if context.own_kind(context.pairs[result.key]) is not None:
                continue  # the rounding of an archived input depends on it, too
            text = (
                f"{share:.0%} of the squared error is a function of the input, at most {policy.explained:.0%}"
            )
            status: Status = "within-rounding" if share <= policy.explained else "suspect"
            yield result.key, Finding("input_dependence", share, policy.explained, status, text)


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
    reference: Archive, target: Archive, sources: tuple[Record, Record], result: MeasuredPair
) -> tuple[Array, Array, Array, Array]:
    """Read inputs and outputs of a leaf, sorted by the reference's input, if all four are finite."""
    records = [(reference, sources[0]), (target, sources[1])]
    records += [(reference, result.reference), (target, result.target)]
    values = np.stack([sample(archive, record, _ELEMENTS) for archive, record in records])
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


def _elementwise(leaf: Call, context: Context) -> tuple[tuple[Record, Record], MeasuredPair] | None:
    """Return both records of a leaf's one input, and the pair of its one output; None for other leaves."""
    if len(leaf.inputs) != 1 or len(leaf.outputs) != 1 or context.calls.has_parameters(leaf.site):
        return None
    source, output = (context.pairs.get(records[0].key.text) for records in (leaf.inputs, leaf.outputs))
    if source is None or output is None or source.reference is None or source.target is None:
        return None
    result = context.measured(output)
    if result is None or not source.is_compared:
        return None
    given, made = source.reference, result.reference
    if given.shape != made.shape or given.dtype.kind != "float" or made.dtype.kind != "float":
        return None
    if given.digest and given.digest == made.digest:
        return None
    return ((given, source.target), result) if made.stored and given.stored else None
