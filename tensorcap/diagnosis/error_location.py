"""Where the error is if not everywhere: some tokens, heads, channels or experts; and what is true there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tensorcap.diagnosis.context import PairContext, values_of
from tensorcap.diagnosis.scoring import (
    INHERITED,
    ROUNDINGS,
    SHARE,
    Hypothesis,
    Scorer,
    Values,
    relative_error,
)

Hypotheses = Callable[[PairContext], Iterator[Hypothesis]]

_SPREAD: Final = 0.05  # share of the elements there that must take part: a single outlier is no place
_TAIL: Final = 0.75  # share of the tokens that are still a place where they are the last ones
_WINDOWS: Final = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
_HINTS: Final = {
    "padded": "Padded positions are computed or masked otherwise; whether that matters is seen behind them.",
    "window": "The length of the window, or the length from which positions are stretched, is another one.",
    "expert": "An expert has other weights, or takes another's place.",
    "head": "Heads are repeated, split or scaled otherwise.",
    "token": "Look at what these tokens are: begin tokens, images, the end of a window, a cache.",
}


def error_locations(exhibit: PairContext, scales: Scorer, within: Hypotheses) -> Iterator[Hypothesis]:
    """Axes along which some slices differ and the others do not; and hypotheses about those alone."""
    if not exhibit.is_same_shape or exhibit.r.size < 8:
        return
    before = relative_error(exhibit.t, exhibit.r)
    limit = max(ROUNDINGS * scales.rounding, SHARE * before, INHERITED * scales.inherited)
    for name, axis, r, t in _views(exhibit):
        differs = _differing(r, t, axis, limit)
        count, size = int(differs.sum()), len(differs)
        if not 0 < count < size:
            continue
        is_tail = bool(differs[size - count :].all())
        is_few = count <= size / 2 or (is_tail and name == "token" and count <= _TAIL * size)
        if not is_few or not _is_spread(r, t, axis, differs):
            continue
        where, hint, facts = _described(exhibit, name, differs)
        index = (slice(None),) * axis + (differs,)
        part = replace(exhibit, r=r, t=t).part(index)
        yield from _trials(exhibit, r, t, index, f"only-{name}", where, hint, facts, size)
        if part.r.size >= 16:
            for trial in within(part):
                yield from _embedded(trial, part, r, t, index, where, facts, size)
    yield from _experts(exhibit, limit)
    yield from _padded(exhibit, limit)


def _views(exhibit: PairContext) -> Iterator[tuple[str, int, Values, Values]]:
    r, t = exhibit.r, exhibit.t
    for axis in range(r.ndim):
        if r.shape[axis] > 1 and r.size > r.shape[axis]:
            yield exhibit.axis(axis), axis, r, t
    each = exhibit.head_dim
    width = r.shape[-1] if r.ndim else 1
    if each and width % each == 0 and width > each > 1 and width // each <= 4 * (exhibit.heads or 0):
        shape = (*r.shape[:-1], width // each, each)
        yield "head", r.ndim - 1, r.reshape(shape), t.reshape(shape)


def _differing(r: Values, t: Values, axis: int, limit: float) -> Values:
    """Which slices of an axis differ by more than is allowed."""
    others = tuple(other for other in range(r.ndim) if other != axis)
    wrong = ((t - r) ** 2).sum(axis=others)
    size = np.maximum((r * r).sum(axis=others), (t * t).sum(axis=others))
    return np.asarray(wrong > limit * limit * size)


def _is_spread(r: Values, t: Values, axis: int, differs: Values) -> bool:
    """Whether the error is in most of what differs, not in a few elements of it."""
    others = tuple(other for other in range(r.ndim) if other != axis)
    square = np.moveaxis((t - r) ** 2, axis, 0)[differs].reshape(int(differs.sum()), -1)
    if not others or square.shape[1] < 2:
        return False
    taking_part = square.sum(axis=1) ** 2 / np.maximum((square * square).sum(axis=1), 1e-300)
    return bool((taking_part >= max(2.0, _SPREAD * square.shape[1])).all())


def _described(exhibit: PairContext, name: str, differs: Values) -> tuple[str, str, dict[str, Any]]:
    """Where it is, in words; the usual mistake; facts."""
    at, size = np.flatnonzero(differs), len(differs)
    facts = {"axis": name, "indices": at[:64].tolist(), "size": size}
    hint = _HINTS.get(name, "")
    if name == "token" and len(at) == size - at[0]:
        for entry in _WINDOWS:
            window = exhibit.number(entry)
            if window and abs(int(window) - int(at[0])) <= 1 < at[0]:
                where = f"from token {at[0]} on, of {size}; {entry} is {int(window)}"
                return where, _HINTS["window"], {**facts, "window": entry}
    if len(at) == 1 and at[0] in (0, size - 1):
        return f"in the {'last' if at[0] else 'first'} {name} of {size}", hint, facts
    if len(at) > 2 and at[-1] - at[0] == len(at) - 1:
        return f"in {name}s {at[0]} to {at[-1]} of {size}", hint, facts
    shown = ", ".join(map(str, at[:12])) + (", …" if len(at) > 12 else "")
    return f"in {name}{'s' if len(at) > 1 else ''} {shown} of {size}", hint, facts


def _trials(
    exhibit: PairContext,
    r: Values,
    t: Values,
    index: tuple[Any, ...],
    kind: str,
    where: str,
    hint: str,
    facts: dict[str, Any],
    choices: int,
) -> Iterator[Hypothesis]:
    predicted = r.copy()
    predicted[index] = t[index]
    inside = t[index].size
    logs = choices * math.log(2) + inside / 2 * math.log(t.size)  # all that is there is taken as it is
    yield Hypothesis(
        kind.replace(" ", "-"), f"the error is only {where}", t, predicted, r, 0, logs, hint, facts
    )


def _embedded(
    trial: Hypothesis,
    part: PairContext,
    r: Values,
    t: Values,
    index: tuple[Any, ...],
    where: str,
    facts: dict[str, Any],
    choices: int,
) -> Iterator[Hypothesis]:
    """A hypothesis about a part, weighed on the whole."""
    if trial.predicted.shape != part.t.shape:
        return
    if trial.observed is part.t:
        observed, baseline = t, r
    elif trial.observed is part.r:
        observed, baseline = r, t
    else:
        return
    predicted = baseline.copy()
    predicted[index] = trial.predicted
    yield replace(
        trial,
        text=f"{where}: {trial.text}",
        observed=observed,
        predicted=predicted,
        baseline=baseline,
        log_alternatives=trial.log_alternatives + choices * math.log(2),
        facts={**trial.facts, "where": facts},
    )


def _wrong_rows(exhibit: PairContext, limit: float) -> Values:
    """Which rows, of all channels, differ: the shape without the last axis."""
    r, t = exhibit.r, exhibit.t
    size = np.maximum((r * r).sum(axis=-1), (t * t).sum(axis=-1))
    return np.asarray(((t - r) ** 2).sum(axis=-1) > limit * limit * size)


def _experts(exhibit: PairContext, limit: float) -> Iterator[Hypothesis]:
    """Rows that differ are those of certain experts."""
    if exhibit.r.ndim < 2 or exhibit.window is not None:
        return
    wrong = _wrong_rows(exhibit, limit).reshape(-1)
    if not 0 < wrong.sum() < len(wrong):
        return
    for record in exhibit.near():
        if record.dtype.kind not in ("int", "uint") or not 1 <= len(record.shape) <= 3 or not record.size:
            continue
        if record.size % len(wrong) or record.size // len(wrong) > 64 or "position" in record.key.slot:
            continue
        chosen = values_of(exhibit.ours, record).reshape(len(wrong), -1)
        experts = np.unique(chosen)
        if record.shape[-1] == 1 or len(record.shape) < 2 or len(experts) > 1024:
            continue
        guilty = [e for e in experts.tolist() if wrong[(chosen == e).any(axis=1)].all()]
        if not guilty or not np.array_equal(np.isin(chosen, guilty).any(axis=1), wrong):
            continue
        names = ", ".join(str(int(e)) for e in guilty[:12])
        where = f"in tokens of expert{'s' if len(guilty) > 1 else ''} {names} of {record.key.text}"
        facts = {"experts": [int(e) for e in guilty[:64]], "key": record.key.text}
        index = (wrong.reshape(exhibit.r.shape[:-1]),)
        yield from _trials(
            exhibit, exhibit.r, exhibit.t, index, "only-expert", where, _HINTS["expert"], facts, len(experts)
        )
        return


def _padded(exhibit: PairContext, limit: float) -> Iterator[Hypothesis]:
    """Rows that differ are those that a mask of attention leaves out."""
    if exhibit.r.ndim < 3 or exhibit.window is not None:
        return
    wrong = _wrong_rows(exhibit, limit)
    for record in exhibit.ours.records:
        if "attention_mask" not in record.key.slot or record.shape != wrong.shape or not record.stored:
            continue
        masked = values_of(exhibit.ours, record) == 0
        if masked.any() and wrong.any() and not wrong[~masked].any():
            where = f"in padded tokens, where {record.key.text} is 0"
            yield from _trials(
                exhibit,
                exhibit.r,
                exhibit.t,
                (wrong,),
                "only-padded",
                where,
                _HINTS["padded"],
                {"key": record.key.text},
                1,
            )
            return
