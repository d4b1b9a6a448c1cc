"""Propose where the error is, if not everywhere: tokens, heads, channels, experts; and what it is there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tensorcap.diagnosis.activations import propose_activations
from tensorcap.diagnosis.attention import propose_attention_cores
from tensorcap.diagnosis.context import PairContext, read_last_inputs, values_of
from tensorcap.diagnosis.factors import propose_factors
from tensorcap.diagnosis.hypothesis import INHERITED, ROUNDINGS, SHARE, Hypothesis
from tensorcap.diagnosis.pointwise import propose_functions
from tensorcap.diagnosis.values import Values, listed, other_axes, relative_error

_IN_PART: Final = (propose_factors, propose_functions)  # need the values of the two sides alone
_SPREAD: Final = 0.05  # share of the elements of a slice that must take part in its error
_FEW: Final = 0.5  # share of the slices that are a location
_TAIL: Final = 0.75  # or of the tokens, if they are the last ones
_LEAST_ELEMENTS: Final = 16  # of a part, to look for a mistake in it
_MOST_SLOTS: Final = 64  # experts that a token may choose
_MOST_EXPERTS: Final = 1024
_WINDOWS: Final = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
_HINTS: Final = {
    "padded": "Padded positions are computed or masked otherwise; whether that matters is seen behind them.",
    "window": "The length of the window, or the length from which positions are stretched, is another one.",
    "expert": "An expert has other weights, or takes another's place.",
    "head": "Heads are repeated, split or scaled otherwise.",
    "token": "Look at what these tokens are: begin tokens, images, the end of a window, a cache.",
}


@dataclass(frozen=True, slots=True)
class _Location:
    """Elements that err, and no others.

    Attributes:
        r: The reference.
        t: The target, in the same shape.
        index: The elements in that shape.
        where: Which they are, as the end of a sentence.
        facts: Which they are, as JSON values.
        choices: Of how many slices they are some.
    """

    r: Values
    t: Values
    index: tuple[slice | Values, ...]
    where: str
    facts: dict[str, Any]
    choices: int

    def as_hypothesis(self, kind: str, hint: str) -> Hypothesis:
        """State that the error is only here, whatever it is."""
        size = self.t[self.index].size
        return Hypothesis(
            kind,
            f"the error is only {self.where}",
            self.t,
            self._replace_in(self.r, self.t[self.index]),
            self.r,
            # nothing there is predicted
            log_alternatives=self.choices * math.log(2) + size / 2 * math.log(self.t.size),
            hint=hint,
            facts=self.facts,
        )

    def embed(self, hypothesis: Hypothesis, part: PairContext) -> Iterator[Hypothesis]:
        """Extend a hypothesis about this part to the whole, which is right elsewhere."""
        is_of_target = hypothesis.observed is part.t
        if hypothesis.predicted.shape != part.t.shape or not (is_of_target or hypothesis.observed is part.r):
            return
        observed, baseline = (self.t, self.r) if is_of_target else (self.r, self.t)
        yield replace(
            hypothesis,
            text=f"{self.where}: {hypothesis.text}",
            observed=observed,
            predicted=self._replace_in(baseline, hypothesis.predicted),
            baseline=baseline,
            log_alternatives=hypothesis.log_alternatives + self.choices * math.log(2),
            facts={**hypothesis.facts, "where": self.facts},
        )

    def _replace_in(self, whole: Values, part: Values) -> Values:
        """Copy the whole with other values here."""
        replaced = whole.copy()
        replaced[self.index] = part
        return replaced


def propose_mistakes_in_inner_inputs(context: PairContext) -> Iterator[Hypothesis]:
    """Propose other attention cores and activations in what the last modules within are given."""
    for inner in read_last_inputs(context):
        where = {"key": inner.reference.key.text}
        for hypothesis in (*propose_attention_cores(inner), *propose_activations(inner)):
            text = f"in {where['key']}: {hypothesis.text}"
            yield replace(hypothesis, text=text, facts={**hypothesis.facts, "where": where})


def propose_error_locations(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that only some slices of an axis err, and factors, offsets and functions of these alone.

    1. Slices of each axis, and heads within channels, err if their error is above what a hypothesis may
       leave.
    2. They are a location if they are at most half of them (or the last tokens), and the error is spread over
       each: an outlier is no location.
    3. The mistakes of `_IN_PART` are proposed for those slices, scored on the whole.
    4. Rows of certain experts, and padded rows, are locations too.
    """
    if not context.is_same_shape or context.r.size < 8:
        return
    before = relative_error(context.t, context.r)
    limit = max(ROUNDINGS * context.rounding, SHARE * before, INHERITED * context.inherited)
    for name, axis, r, t in _split_axes(context):
        differs = _find_erring(r, t, axis, limit)
        count, size = int(differs.sum()), len(differs)
        if not 0 < count < size:
            continue
        is_tail = bool(differs[size - count :].all())
        is_few = count <= _FEW * size or (is_tail and name == "token" and count <= _TAIL * size)
        if not is_few or not _is_spread(r, t, axis, differs):
            continue
        where, hint, facts = _describe(context, name, differs)
        location = _Location(r, t, (slice(None),) * axis + (differs,), where, facts, size)
        yield location.as_hypothesis(f"only-{name.replace(' ', '-')}", hint)
        part = replace(context, r=r, t=t).restrict(location.index)
        if part.r.size >= _LEAST_ELEMENTS:
            for propose in _IN_PART:
                for hypothesis in propose(part):
                    yield from location.embed(hypothesis, part)
    yield from _propose_experts(context, limit)
    yield from _propose_padded(context, limit)


def _split_axes(context: PairContext) -> Iterator[tuple[str, int, Values, Values]]:
    """Both sides with each axis, and with channels split into heads: name, axis, reference, target."""
    r, t = context.r, context.t
    for axis in range(r.ndim):
        if r.shape[axis] > 1 and r.size > r.shape[axis]:
            yield context.axis_name(axis), axis, r, t
    each = context.head_dim
    width = r.shape[-1] if r.ndim else 1
    if each and width % each == 0 and width > each > 1 and width // each <= 4 * (context.heads or 0):
        shape = (*r.shape[:-1], width // each, each)
        yield "head", r.ndim - 1, r.reshape(shape), t.reshape(shape)


def _find_erring(r: Values, t: Values, axis: int, limit: float) -> Values:
    """Find the slices of an axis whose relative error is above a limit."""
    others = other_axes(r, axis)
    square = ((t - r) ** 2).sum(axis=others)
    size = np.maximum((r * r).sum(axis=others), (t * t).sum(axis=others))
    return np.asarray(square > limit * limit * size)


def _is_spread(r: Values, t: Values, axis: int, differs: Values) -> bool:
    """Whether the error of each slice is spread over its elements, by their participation ratio."""
    square = np.moveaxis((t - r) ** 2, axis, 0)[differs].reshape(int(differs.sum()), -1)
    if square.shape[1] < 2:
        return False
    taking_part = square.sum(axis=1) ** 2 / np.maximum((square * square).sum(axis=1), 1e-300)
    return bool((taking_part >= max(2.0, _SPREAD * square.shape[1])).all())


def _describe(context: PairContext, name: str, differs: Values) -> tuple[str, str, dict[str, Any]]:
    """Describe a location: text, the usual mistake, facts."""
    at, size = np.flatnonzero(differs), len(differs)
    facts = {"axis": name, "indices": at[:64].tolist(), "size": size}
    hint = _HINTS.get(name, "")
    if name == "token" and len(at) == size - at[0]:
        for entry in _WINDOWS:
            window = context.config_number(entry)
            if window and abs(int(window) - int(at[0])) <= 1 < at[0]:
                where = f"from token {at[0]} on, of {size}; {entry} is {int(window)}"
                return where, _HINTS["window"], {**facts, "window": entry}
    if len(at) == 1 and at[0] in (0, size - 1):
        return f"in the {'last' if at[0] else 'first'} {name} of {size}", hint, facts
    if len(at) > 2 and at[-1] - at[0] == len(at) - 1:
        return f"in {name}s {at[0]} to {at[-1]} of {size}", hint, facts
    return f"in {name}{'s' if len(at) > 1 else ''} {listed(at, 12)} of {size}", hint, facts


def _find_erring_rows(context: PairContext, limit: float) -> Values:
    """Find the rows, of all channels, that err: the shape without the last axis."""
    r, t = context.r, context.t
    size = np.maximum((r * r).sum(axis=-1), (t * t).sum(axis=-1))
    return np.asarray(((t - r) ** 2).sum(axis=-1) > limit * limit * size)


def _propose_experts(context: PairContext, limit: float) -> Iterator[Hypothesis]:
    """Propose that the rows that err are those that chose certain experts, by a record of indices beside."""
    if context.r.ndim < 2 or context.window is not None:
        return
    erring = _find_erring_rows(context, limit).reshape(-1)
    if not 0 < erring.sum() < len(erring):
        return
    for record in context.find_neighbours():
        if record.dtype.kind not in ("int", "uint") or not 2 <= len(record.shape) <= 3 or not record.size:
            continue
        if record.size % len(erring) or record.size // len(erring) > _MOST_SLOTS:
            continue
        if "position" in record.key.slot or record.shape[-1] == 1:
            continue
        chosen = values_of(context.reference_archive, record).reshape(len(erring), -1)
        experts = np.unique(chosen)
        if len(experts) > _MOST_EXPERTS:
            continue
        guilty = [int(e) for e in experts.tolist() if erring[(chosen == e).any(axis=1)].all()]
        if not guilty or not np.array_equal(np.isin(chosen, guilty).any(axis=1), erring):
            continue
        names = ", ".join(map(str, guilty[:12]))
        where = f"in tokens of expert{'s' if len(guilty) > 1 else ''} {names} of {record.key.text}"
        facts = {"experts": guilty[:64], "key": record.key.text}
        index = (erring.reshape(context.r.shape[:-1]),)
        location = _Location(context.r, context.t, index, where, facts, len(experts))
        yield location.as_hypothesis("only-expert", _HINTS["expert"])
        return


def _propose_padded(context: PairContext, limit: float) -> Iterator[Hypothesis]:
    """Propose that the rows that err are those that an attention mask leaves out."""
    if context.r.ndim < 3 or context.window is not None:
        return
    erring = _find_erring_rows(context, limit)
    for record in context.reference_archive.records:
        if "attention_mask" not in record.key.slot or record.shape != erring.shape or not record.stored:
            continue
        masked = values_of(context.reference_archive, record) == 0
        if masked.any() and erring.any() and not erring[~masked].any():
            where = f"in padded tokens, where {record.key.text} is 0"
            location = _Location(context.r, context.t, (erring,), where, {"key": record.key.text}, 1)
            yield location.as_hypothesis("only-padded", _HINTS["padded"])
            return
