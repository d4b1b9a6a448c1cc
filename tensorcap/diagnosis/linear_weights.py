"""Propose mistakes in the weight of a linear layer that is called again: zero points, scales of groups.

The weight is the reference's; what the target multiplied by is solved from its own inputs and results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.hypothesis import LEAST_PER_PARAMETER, Hypothesis
from tensorcap.diagnosis.values import Values, listed, relative_error

_LARGEST: Final = 1 << 24  # elements of a weight
_MOST_ROWS: Final = 4096  # tokens that are looked at, the first ones
_GROUPS: Final = (16, 32, 64, 128, 256)  # inputs that share a scale
_NOTHING: Final = 0.02  # a factor of a column that is left out, and what one that is not is off from 1 by
_ORDER_OF_SUMS: Final = 1e-5  # that the order of sums in float32 may leave


@dataclass(frozen=True, slots=True)
class _Product:
    """What a linear layer does with the target's input.

    Attributes:
        x: The target's input, `[tokens, inputs]`.
        weight: The reference's, `[outputs, inputs]`.
        t: The target's result, `[tokens, outputs]`.
        expected: What the reference makes of the target's input.
    """

    x: Values
    weight: Values
    t: Values
    expected: Values


def propose_linear_weights(context: PairContext) -> Iterator[Hypothesis]:
    """Propose another weight of a linear layer, as far as tokens suffice to solve it, by least squares.

    1. One number for each row is added to the whole row: what stands for zero was not taken off.
    2. One number for each column is added to the whole column.
    3. Each column is multiplied by one number: a scale of channels is missing, or is another one.
    4. Each group of inputs of a row is multiplied by one number: scales of groups lie elsewhere.
    """
    product = _find_product(context)
    if product is None:
        return
    x, weight, t, expected = product.x, product.weight, product.t, product.expected
    rows, columns = weight.shape
    shape = context.t.shape
    rest = t - expected

    def propose(kind: str, text: str, predicted: Values, count: int, hint: str) -> Hypothesis:
        return Hypothesis(
            kind, f"the weight of the target has {text}", t, predicted, expected, parameters=count, hint=hint
        )

    if len(t) * rows != int(np.prod(shape)):
        return
    if len(x) >= LEAST_PER_PARAMETER:
        total = x.sum(axis=1)
        added = total @ rest / max(float(total @ total), 1e-300)
        hint = "What stands for zero is not taken off when whole numbers are given back, or twice."
        yield propose(
            "weight-offset", "a number added to each row", expected + np.outer(total, added), rows, hint
        )
    if len(x) * rows >= LEAST_PER_PARAMETER * columns and len(x) > columns:
        mean = rest.mean(axis=1)
        added = np.linalg.lstsq(x, mean, rcond=None)[0]
        hint = "What stands for zero of each column is not taken off, or taken off twice."
        predicted = expected + (x @ added)[:, None]
        yield propose("weight-offset", "a number added to each column", predicted, columns, hint)
    if len(x) * rows >= LEAST_PER_PARAMETER * columns:
        gram = (x.T @ x) * (weight.T @ weight)
        shift = expected - x @ weight.T
        sums = np.einsum("nj,oj,no->j", x, weight, t - shift, optimize=True)
        factors = np.linalg.lstsq(gram, sums, rcond=None)[0]
        left_out = np.flatnonzero(np.abs(factors) < _NOTHING)
        predicted = (x * factors) @ weight.T + shift
        if left_out.size and np.abs(np.delete(factors, left_out) - 1).max(initial=0.0) < _NOTHING:
            hint = "Not all inputs are summed: those of another device, or of the other tiles, are missing."
            text = f"no columns {listed(left_out, 8)}, {left_out.size} of {columns}"
            predicted = np.delete(x, left_out, 1) @ np.delete(weight, left_out, 1).T + shift
            partial = propose("partial-sum", text, predicted, 0, hint)
            yield replace(partial, log_alternatives=columns * math.log(2))
        else:
            hint = "A scale of each input channel is missing, as of a norm that was folded, or stands twice."
            yield propose("weight-factor", "each column multiplied by a number", predicted, columns, hint)
    for size in _GROUPS:
        count = columns // size
        if columns % size or count < 2 or len(x) < LEAST_PER_PARAMETER * count:
            continue
        parts = np.einsum("ngj,ogj->ong", x.reshape(len(x), count, size), weight.reshape(rows, count, size))
        shift = expected - x @ weight.T
        scales = [
            np.linalg.lstsq(part, wanted, rcond=None)[0]
            for part, wanted in zip(parts, (t - shift).T, strict=True)
        ]
        predicted = np.einsum("ong,og->no", parts, np.stack(scales)) + shift
        hint = "Scales of a quantised weight are read in another order, or are those of other groups."
        text = f"each group of {size} inputs of a row multiplied by a number"
        yield propose("quantisation-scales", text, predicted, rows * count, hint)


def _find_product(context: PairContext) -> _Product | None:
    """Find input and weight by which the call makes the reference; None if it is no linear layer."""
    call = context.repeated_call
    if call is None or not context.is_same_shape or context.r.ndim < 2:
        return None
    names = [name for name, shape in call.rerun.tensors.items() if len(shape) == 2]
    floats = [slot for slot, argument in call.rerun.arguments.items() if argument.kind == "float"]
    given = [theirs for slot, _, theirs in context.inputs if slot in floats]
    if len(names) != 1 or len(given) != 1 or len(floats) != 1 or call.rerun.results:
        return None
    weight = call.rerun.read_tensor(names[0])
    x = given[0]
    if weight.size > _LARGEST or not x.ndim or x.shape[:-1] != context.r.shape[:-1]:
        return None
    if weight.shape == (x.shape[-1], context.r.shape[-1]) and weight.shape[0] != weight.shape[1]:
        weight = weight.T  # as convolutions of GPT-2 have it
    if weight.shape != (context.r.shape[-1], x.shape[-1]):
        return None
    x, expected, t = (side.reshape(-1, side.shape[-1])[:_MOST_ROWS] for side in (x, call.values, context.t))
    if (
        len(x) * context.r.shape[-1] != context.r.size
    ):  # the first tokens stand for all only where all are few
        return None
    shift = expected - x @ weight.T
    if relative_error(shift, np.broadcast_to(shift.mean(axis=0), shift.shape)) > 1e-3 and (
        relative_error(expected, x @ weight.T) > context.tolerance(least=_ORDER_OF_SUMS)
    ):
        return None
    return _Product(x, weight, t, expected)
