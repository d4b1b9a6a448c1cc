"""Is the error of an elementwise leaf a function of its input, so that another function was computed?

Formula (POL-14): elements are sorted by the reference's input into `Policy.explained_bins` bins of equal
count; the share of the squared error in the means of the bins, less what noise and the input's own error put
there, is at most `Policy.explained`; none counts of an error in float32 that other kernels of the same
function make (`Policy.wide_noise`), as torch's for memory with gaps. Rounding errors do not depend on the
input's value; tanh for erf in a GELU does. Right activations in bfloat16 were measured at up to 7.6 %, and at
1.1 % once their rounding is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Limits
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair, PolicyTest
from tensorcap.comparison.robust_errors import sample
from tensorcap.runs import Call
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.float_formats import rounded
from tensorcap_formats.records import Record

_ELEMENTS: Final = 1 << 18  # as many tell
_FEWEST_A_BIN: Final = 16


class InputDependenceTest(PolicyTest):
    """Tests `input_dependence` of leaves without parameters whose output has the shape of their one input."""

    names = ("input_dependence",)
    is_local = True
    fails_by_rounded_inputs = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge elementwise leaves, but for results of an injected run that show a module's own error."""
        limits = Limits(POLICY.explained, math.inf)
        for leaf in context.calls.leaves:
            sides = _elementwise(leaf, context)
            if sides is None or context.injected.own(sides[1]) is not None:
                continue  # the rounding of an archived input depends on it, too
            source, result = sides
            values = _values(context.reference, context.target, source, result)
            if values[0].size < POLICY.explained_bins * _FEWEST_A_BIN:
                continue
            share = explained_by_input(*values, bins=POLICY.explained_bins)
            error = context.errors.get(result.key)
            if share is None or error is None:
                continue
            if result.precision.is_wide and error <= POLICY.noise(result.precision):
                share = 0.0  # other kernels of one function differ by that, and alike at like values
            if share > POLICY.explained:
                dtype = result.precision.name
                share = min(share, unexpected_by_input(*values, bins=POLICY.explained_bins, dtype=dtype))
            inner = context.layers.inner.get(
                leaf.site, 0.0
            )  # rounding to steps of its own depends on the input
            if math.sqrt(share) * error <= POLICY.quantised.green * inner:
                share = 0.0
            text = (
                f"{share:.0%} of the squared error is a function of the input, at most {POLICY.explained:.0%}"
            )
            yield result.key, limits.finding("input_dependence", share, text)


def explained_by_input(
    input_: Array, target_input: Array, output: Array, target_output: Array, *, bins: int
) -> float | None:
    """Return the share of the output's squared error that is a function of the input's value, not its error.

    Elements are sorted into `bins` of equal count by the reference's input. What the mean of each bin
    explains of the variance of the error is reduced by what as many bins explain of noise, and by what
    they explain of the input's error, which the output inherits.

    Args:
        input_: The reference's input, float64, one dimension, ascending.
        target_input: The target's input, in the same order.
        output: The reference's output.
        target_output: The target's output.
        bins: Count of bins.

    Returns:
        A share of 0 to 1; None if there is no error.
    """
    errors = target_output - output
    if not errors.any():
        return None
    return max(0.0, _share(errors, bins) - _share(target_input - input_, bins))


def unexpected_by_input(
    input_: Array, target_input: Array, output: Array, target_output: Array, *, bins: int, dtype: str
) -> float:
    """As `explained_by_input`, of the error less that which rounding the right result would make.

    If a target computes in few bits, so few values lie in a bin that their roundings do not cancel; of
    a function of about slope 1 they are even alike. What is right for the target's input is read off the
    function that the reference's elements are points of, and rounded to a dtype.
    """
    right = rounded(np.interp(target_input, input_, output), dtype)
    squares = float(((target_output - output) ** 2).sum())
    unexpected = target_output - right
    return _share(unexpected, bins) * float((unexpected**2).sum()) / squares


def _values(
    reference: Archive, target: Archive, source: tuple[Record, Record], result: MeasuredPair
) -> tuple[Array, Array, Array, Array]:
    """Read inputs and outputs of a leaf, sorted by the reference's input, if all four are finite."""
    records = [*source, result.reference, result.target]
    archives = [reference, target] * 2
    values = np.stack([sample(a, record, _ELEMENTS) for a, record in zip(archives, records, strict=True)])
    values = values[:, np.isfinite(values).all(axis=0)]
    input_, target_input, output, target_output = values[:, np.argsort(values[0], kind="stable")]
    return input_, target_input, output, target_output


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
    if len(leaf.inputs) != 1 or len(leaf.outputs) != 1 or context.calls.has_own_tensors(leaf.site):
        return None
    (input_,), (output,) = leaf.inputs, leaf.outputs
    source, result = context.pairs.get(input_.key.text), context.measured(output.key.text)
    if source is None or source.target is None or not source.is_compared or result is None:
        return None
    if input_.shape != output.shape or input_.dtype.kind != "float" or output.dtype.kind != "float":
        return None
    if input_.digest and input_.digest == output.digest:
        return None
    return ((input_, source.target), result) if output.stored and input_.stored else None
