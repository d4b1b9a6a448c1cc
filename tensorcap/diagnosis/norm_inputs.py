"""Propose that a norm is given another tensor, or a sum of two, as where blocks stand in series."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext, values_of
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.values import Values, relative_error
from tensorcap_formats.records import Record

_LEAST_CHANNELS: Final = 4
_LEAST_ROWS: Final = 8  # to fit a weight and a bias of each channel
_MOST: Final = 16  # neighbours that are tried, and their sums of two
_EPS: Final = 1e-5
_HINT: Final = (
    "The norm stands elsewhere: before or behind a sum, or two parts stand in series on one side and side by "
    "side on the other."
)


def propose_other_inputs_of_norms(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that the norm whose result a tensor is was given something else.

    1. The tensor is what a module makes of one tensor of its shape, itself or handed on as an argument.
    2. That is a norm if rows that are centred and scaled, or scaled alone, times a weight and with a bias of
       each channel, which are fitted to the reference, are it.
    3. The same is made of neighbours of the target, and of sums of two.
    """
    if not context.is_same_shape or context.window is not None or context.r.ndim < 2:
        return
    rows, channels = context.r.size // context.r.shape[-1], context.r.shape[-1]
    if channels < _LEAST_CHANNELS or rows < _LEAST_ROWS:
        return
    neighbours = list(context.read_neighbours(context.r.shape))
    for argument, x in _find_inputs(context):
        norm = _fit_norm(x, context.r, context.tolerance())
        if norm is None:
            continue
        name = argument.key.site
        others = [(key, theirs) for key, _, theirs in neighbours if key != argument.key.text]
        known = {key: theirs for key, theirs in others if theirs is not None}
        single = dict(itertools.islice(known.items(), _MOST))
        sums = {
            f"the sum of {one} and {other}": single[one] + single[other]
            for one, other in itertools.combinations(single, 2)
        }
        candidates = {**single, **sums}
        for what, given in candidates.items():
            if not np.array_equal(given, x):
                yield context.propose(
                    "operand-exchanged",
                    f"the target is what {name} makes of {what}",
                    norm(given),
                    hint=_HINT,
                    facts={"module": name, "input": what},
                    log_alternatives=math.log(len(candidates)),
                )
        return


def _find_inputs(context: PairContext) -> Iterator[tuple[Record, Values]]:
    """What modules whose result the tensor is were given."""
    archive, own = context.reference_archive, context.reference
    makers = [own] if own.key.slot.startswith("output") else []
    for record in () if makers else context.find_neighbours():
        if (
            record.key.slot.startswith("output")
            and record.shape == own.shape
            and record.dtype.kind == "float"
        ):
            is_same = record.digest != "" and record.digest == own.digest
            if is_same or relative_error(values_of(archive, record), context.r) <= context.tolerance():
                makers.append(record)
    for maker in makers:
        for record in archive.records:
            is_input = record.key.where == maker.key.where and record.key.slot.startswith("input.")
            if is_input and record.shape == own.shape and record.stored and record.dtype.kind == "float":
                yield record, values_of(archive, record)


def _fit_norm(x: Values, result: Values, tolerance: float) -> Callable[[Values], Values] | None:
    """Fit a norm that makes a result; None if none does."""
    for is_centred in (True, False):
        scaled = _scale(x, is_centred=is_centred).reshape(-1, x.shape[-1])
        rows = result.reshape(-1, x.shape[-1])
        mean, other = scaled.mean(axis=0), rows.mean(axis=0)
        spread = ((scaled - mean) ** 2).mean(axis=0)
        weight = ((scaled - mean) * (rows - other)).mean(axis=0) / np.where(spread > 0, spread, 1.0)
        bias = other - weight * mean

        def norm(
            y: Values, weight: Values = weight, bias: Values = bias, centred: bool = is_centred
        ) -> Values:
            return np.asarray(_scale(y, is_centred=centred) * weight + bias)

        if relative_error(result, norm(x)) <= tolerance:
            return norm
    return None


def _scale(x: Values, *, is_centred: bool) -> Values:
    centred = x - x.mean(axis=-1, keepdims=True) if is_centred else x
    return np.asarray(centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + _EPS))
