"""Other records in the values of the target: in their place, added, left out, or multiplied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import LARGEST, PairContext, values_of
from tensorcap.diagnosis.scoring import Hypothesis, Scorer, Values, relative_error
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record

_READS: Final = 12  # tensors that are read because their statistics fit
_TERMS: Final = 24
_SAMPLE: Final = 4096
_CORRELATED: Final = 0.5


def other_records(exhibit: PairContext, scales: Scorer) -> Iterator[Hypothesis]:
    """All uses of other records."""
    if not exhibit.is_same_shape or exhibit.window is not None:
        return
    yield from _own_input(exhibit)
    yield from _held(exhibit, scales)
    yield from _terms(exhibit)


def _own_input(exhibit: PairContext) -> Iterator[Hypothesis]:
    for slot, ours, theirs in exhibit.inputs:
        if theirs.size == exhibit.t.size and not np.array_equal(ours.reshape(-1), exhibit.r.reshape(-1)):
            yield _returned(exhibit, slot, theirs)


def _returned(exhibit: PairContext, slot: str, given: Values) -> Hypothesis:
    text = f"the target returns its {slot} as it is"
    hint = "The module does nothing: it is skipped, replaced or an identity."
    value = given.reshape(exhibit.t.shape)
    return Hypothesis("identity", text, exhibit.t, value, exhibit.r, 0, 0, hint, {"slot": slot})


def _held(exhibit: PairContext, scales: Scorer) -> Iterator[Hypothesis]:
    """The values of another record of the reference."""
    t, size = exhibit.t, exhibit.target.size
    ours = exhibit.ours
    fitting = [r for r in ours.records if r.size == size and r.row != exhibit.reference.row and r.stored]
    fitting = [
        r for r in fitting if r.dtype.kind == exhibit.reference.dtype.kind and not _is_alias(r, exhibit)
    ]
    logs = math.log(1 + len(fitting))
    same = [r for r in fitting if _is_same_print(r, exhibit.target, ours, exhibit.theirs)]
    norm = math.sqrt(float(np.vdot(t, t)))
    near = max(8 * scales.rounding, 4 * scales.inherited, 1e-6) * norm
    for record in fitting:
        if len(same) >= _READS:
            break
        known = record.statistics
        if record not in same and known is not None and known.l2 is not None and abs(known.l2 - norm) <= near:
            same.append(record)
    for record in same:
        value = values_of(ours, record).reshape(t.shape)
        if np.array_equal(value, exhibit.r):
            continue
        if record.key.slot.startswith("input.") and record.key.where == exhibit.reference.key.where:
            yield _returned(exhibit, record.key.slot, value)  # which has another name in the target
        else:
            text = f"the target holds the value of {record.key.text}"
            hint = "Another tensor is taken: names, an index, or the order of results."
            facts = {"key": record.key.text}
            yield Hypothesis("holds", text, t, value, exhibit.r, 0, logs, hint, facts)


def _is_alias(record: Record, exhibit: PairContext) -> bool:
    return bool(record.digest) and record.digest == exhibit.reference.digest


def _is_same_print(record: Record, target: Record, ours: Archive, theirs: Archive) -> bool:
    is_known = bool(record.digest) and ours.algorithm is not None and ours.algorithm == theirs.algorithm
    return is_known and (record.digest, record.dtype) == (target.digest, target.dtype)


def _terms(exhibit: PairContext) -> Iterator[Hypothesis]:
    """The reference plus a multiple of another record, or times it, or without it."""
    r, t = exhibit.r, exhibit.t
    difference = t - r
    picked = np.linspace(0, r.size - 1, min(r.size, _SAMPLE)).astype(np.int64)
    few = difference.reshape(-1)[picked]
    few_r, few_t = r.reshape(-1)[picked], t.reshape(-1)[picked]
    before = relative_error(few_t, few_r)
    for label, x in itertools.islice(_candidates(exhibit), _TERMS):
        wide = np.broadcast_to(x, r.shape)
        sample = wide.reshape(-1)[picked]
        size = math.sqrt(float(sample @ sample) * float(few @ few))
        logs = math.log(2 * _TERMS)
        if size and abs(float(sample @ few)) >= _CORRELATED * size:
            yield from _added(exhibit, label, wide, difference, logs)
        if relative_error(few_t * sample, few_r) < 0.5 * before:
            text = f"the reference is the target times {label}"
            hint = f"The multiplication by {label} is missing in the target."
            yield Hypothesis("product-missing", text, r, t * wide, t, 0, logs, hint, {"key": label})
        if relative_error(few_t, few_r * sample) < 0.5 * before:
            text = f"the target is the reference times {label}"
            hint = f"The target multiplies by {label} once more."
            yield Hypothesis("product-added", text, t, r * wide, r, 0, logs, hint, {"key": label})


def _added(
    exhibit: PairContext, label: str, x: Values, difference: Values, logs: float
) -> Iterator[Hypothesis]:
    r, t = exhibit.r, exhibit.t
    factor = float(np.vdot(x, difference)) / float(np.vdot(x, x))
    facts = {"key": label}
    if abs(factor + 1) < 0.02:
        text = f"the target is the reference without {label}"
        hint = f"A residual, or another sum with {label}, is missing."
        yield Hypothesis("term-missing", text, t, r - x, r, 0, logs, hint, facts)
    elif abs(factor - 1) < 0.02:
        text = f"the target is the reference plus {label} once more"
        hint = f"The residual, or another term, is added twice: {label}."
        yield Hypothesis("term-twice", text, t, r + x, r, 0, logs, hint, facts)
    text = f"the target is the reference plus {factor:.5g} times {label}"
    hint = f"{label} comes in with another factor."
    yield Hypothesis("term-scaled", text, t, r + factor * x, r, 2, logs, hint, {**facts, "factor": factor})


def _candidates(exhibit: PairContext) -> Iterator[tuple[str, Values]]:
    """Values beside the pair, and parameters of the model that fit its last axes, as tables of positions."""
    shape = exhibit.r.shape
    for label, ours, _ in exhibit.beside(shape):
        yield label, ours
    for record in exhibit.ours.records:
        if not record.key.slot.startswith(("param.", "buffer.")) or not record.stored:
            continue
        if not 1 <= record.size <= LARGEST or record.dtype.kind != "float" or not record.shape:
            continue
        rows = shape[-2] if len(shape) >= 2 else 1
        if len(record.shape) == 2 and record.shape[1] == shape[-1] and record.shape[0] >= rows > 1:
            table = values_of(exhibit.ours, record)
            for start in dict.fromkeys((0, min(2, record.shape[0] - rows))):
                yield f"{record.key.text}[{start}:{start + rows}]", table[start : start + rows]
