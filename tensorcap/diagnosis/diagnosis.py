"""Diagnose one pair: which hypotheses about a mistake explain its values, and what each leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from tensorcap.adapters.edits import Rerun
from tensorcap.comparison.policy import POLICY
from tensorcap.diagnosis.activations import activations
from tensorcap.diagnosis.attention.hypotheses import attentions
from tensorcap.diagnosis.context import PairContext, last_inputs, pair_context
from tensorcap.diagnosis.error_location import error_locations
from tensorcap.diagnosis.mutation_trials import mutation_hypotheses
from tensorcap.diagnosis.norms import norms
from tensorcap.diagnosis.ordering import orders
from tensorcap.diagnosis.pointwise import pointwise
from tensorcap.diagnosis.products import products
from tensorcap.diagnosis.records import other_records
from tensorcap.diagnosis.rotations import rotations
from tensorcap.diagnosis.routers import routings
from tensorcap.diagnosis.scaling import scalings
from tensorcap.diagnosis.scoring import Explanation, Hypothesis, Scorer, Values, ranked, relative_error
from tensorcap.diagnosis.simple import degenerates, dropouts, positions
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError, no_such_tensor
from tensorcap_formats.records import Record

LIMIT: Final = 1 << 22
_MOST_ELEMENTS: Final = 1 << 24

Status = Literal["identical", "explained", "unexplained"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found about one pair.

    Attributes:
        key: Key text of the reference's record.
        target_key: Key text of the target's.
        status: `identical`: nothing to explain; `explained`: a hypothesis holds; `unexplained`: none does.
        before: Relative error of the target, no unit; None where shapes differ.
        rounding: Relative error of one rounding in the coarser precision of the pair, no unit.
        precision: The name of that precision; "" for integers.
        inherited: Relative error that the values arrive with: what no hypothesis can undo.
        explanations: Hypotheses that hold, the best first.
        tried: Kinds that were tried, and the smallest share of the error that each left.
        notes: What else a reader should know.
    """

    key: str
    target_key: str
    status: Status
    before: float | None
    rounding: float
    precision: str
    inherited: float
    explanations: tuple[Explanation, ...]
    tried: dict[str, float]
    notes: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """0 where nothing is left to explain, 1 where no hypothesis holds."""
        return int(self.status == "unexplained")

    def report(self) -> dict[str, Any]:
        """All of it, as `tcap diagnose --json` prints it (DIA-60)."""
        return {
            "format": "tensorcap-diagnosis",
            "version": 1,
            "key": self.key,
            "target_key": self.target_key,
            "status": self.status,
            "before": self.before,
            "rounding": self.rounding,
            "precision": self.precision,
            "inherited": self.inherited,
            "explanations": self.explanations,
            "tried": self.tried,
            "notes": self.notes,
            "exit_status": self.exit_status,
        }


def diagnose(
    reference: Archive,
    target: Archive,
    key: str,
    *,
    target_key: str | None = None,
    compute_dtype: str | None = None,
    limit: int = LIMIT,
    rerun: Rerun | None = None,
) -> Diagnosis:
    """Test hypotheses about a mistake on the values of one pair.

    Args:
        reference: The trusted archive.
        target: The archive under test, or that as a mapping gives it.
        key: The reference's record, as `Archive.get` takes it.
        target_key: The target's, where it is another.
        compute_dtype: Precision in which the target computed, where its archive does not say.
        limit: Elements of the pair that are looked at, 1 to 2^24: of a larger pair the first part that
            differs.
        rerun: The call of the reference's module that made its record, which can be made again.

    Raises:
        TensorNotFoundError: One of the records does not exist.
        UsageError: The values are complex, or were not kept.
        ReadError: An archive cannot be read.
    """
    if not 1 <= limit <= _MOST_ELEMENTS:
        raise UsageError(f"limit: is {limit}, expected 1 to {_MOST_ELEMENTS}")
    ours = reference.get(key)
    wanted = target_key or ours.key.text
    if target_key is None and wanted not in target:
        raise no_such_tensor(str(target.path), wanted, [record.key.text for record in target.records])
    theirs = target.get(wanted)
    for archive, record in ((reference, ours), (target, theirs)):
        if not record.stored:
            raise UsageError(f"{archive.path}: {record.key.text}: only its statistics were kept")
    exhibit, r, t = pair_context(reference, ours, target, theirs, limit=limit)
    name, rounding = _precision(exhibit, compute_dtype)
    same = exhibit.is_same_shape
    if same and np.array_equal(r, t, equal_nan=True):
        notes = _dtype_notes(ours, theirs)
        return Diagnosis(ours.key.text, theirs.key.text, "identical", 0.0, rounding, name, 0.0, (), {}, notes)
    inherited, notes = _inherited(exhibit)
    scales = Scorer(rounding, inherited)
    weighed = [scales.weigh(trial) for trial in degenerates(r, t)]
    if not any(one.is_within for one in weighed):
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            weighed += [scales.weigh(trial) for trial in _hypotheses(exhibit, scales, rerun)]
    found = ranked(weighed)
    return Diagnosis(
        ours.key.text,
        theirs.key.text,
        "explained" if found else "unexplained",
        relative_error(exhibit.t, exhibit.r) if same else None,
        rounding,
        name,
        inherited,
        found,
        dict(sorted(scales.tried.items(), key=lambda item: item[1])),
        (*_dtype_notes(ours, theirs), *notes, *_more_notes(exhibit, r, t)),
    )


def _hypotheses(exhibit: PairContext, scales: Scorer, rerun: Rerun | None) -> Iterator[Hypothesis]:
    yield from _simple(exhibit)
    yield from positions(exhibit)
    yield from dropouts(exhibit)
    yield from orders(exhibit)
    yield from rotations(exhibit)
    yield from activations(exhibit, scales)
    yield from norms(exhibit, scales)
    yield from products(exhibit, scales)
    yield from routings(exhibit, scales)
    yield from attentions(exhibit, scales)
    yield from _within(exhibit, scales)
    yield from other_records(exhibit, scales)
    yield from mutation_hypotheses(exhibit, scales, rerun)
    yield from error_locations(exhibit, scales, _simple)


def _within(exhibit: PairContext, scales: Scorer) -> Iterator[Hypothesis]:
    """What the last modules within this one are given: the core of an attention, a gated product."""
    for inner in last_inputs(exhibit):
        where = {"key": inner.reference.key.text}
        for trial in (*attentions(inner, scales), *activations(inner, scales)):
            text = f"in {where['key']}: {trial.text}"
            yield replace(trial, text=text, facts={**trial.facts, "where": where})


def _simple(exhibit: PairContext) -> Iterator[Hypothesis]:
    """What needs the two sides alone."""
    yield from scalings(exhibit)
    yield from pointwise(exhibit)


def _precision(exhibit: PairContext, compute_dtype: str | None) -> tuple[str, float]:
    """The coarser precision of the pair, and the relative error of one rounding in it."""
    records = exhibit.reference, exhibit.target
    if not any(record.dtype.is_inexact for record in records):
        return "", 0.0
    runs = POLICY.precision_of_runs(exhibit.ours.info, exhibit.theirs.info, compute_dtype)
    precision = POLICY.precision_of_pair(runs, *records)
    return precision.name, precision.rounding


def _inherited(exhibit: PairContext) -> tuple[float, tuple[str, ...]]:
    """The largest error that an input of the module arrives with, and what to say of it."""
    given = [(slot, relative_error(y, x)) for slot, x, y in exhibit.inputs if x.ndim]
    if exhibit.reference.key.slot.startswith("input.") or not given:
        return 0.0, ("What the module was given is not known: an error may come from there.",)
    slot, error = max(given, key=lambda item: item[1])
    if error == 0:
        return 0.0, ("What the module was given is the same on both sides.",)
    text = f"{slot} arrives with a relative error of {error:.2g}: no hypothesis can leave less than it makes."
    return error, (text,)


def _dtype_notes(ours: Record, theirs: Record) -> tuple[str, ...]:
    if ours.dtype.name == theirs.dtype.name:
        return ()
    return (f"The dtypes differ: {ours.dtype.name} in the reference, {theirs.dtype.name} in the target.",)


def _more_notes(exhibit: PairContext, r: Values, t: Values) -> Iterator[str]:
    """What the values show besides, as sentences."""
    if exhibit.window is not None:
        axis, start, stop = exhibit.window
        yield f"Looked at indices {start} to {stop - 1} of axis {axis} alone, the first part that differs."
    for name, values in (("reference", r), ("target", t)):
        count = int(values.size - np.isfinite(values).sum())
        if count:
            yield f"{count} values of the {name} are not finite and were left out."
    if not exhibit.is_same_shape:
        yield f"The shapes differ: {r.shape} in the reference, {t.shape} in the target."
        return
    yield from _first_token_notes(exhibit)
    size = math.sqrt(float(np.vdot(exhibit.r, exhibit.r)) * float(np.vdot(exhibit.t, exhibit.t)))
    if size and abs(float(np.vdot(exhibit.r, exhibit.t))) < 0.5 * size:
        cosine = float(np.vdot(exhibit.r, exhibit.t)) / size
        yield f"The cosine is {cosine:.3f}: the target is hardly related to the reference."


def _first_token_notes(exhibit: PairContext) -> Iterator[str]:
    """The first token sees nothing but itself: if it alone is right, that is what is wrong."""
    axis = next((a for a in range(exhibit.r.ndim) if exhibit.axis(a) == "token"), None)
    if axis is None or exhibit.r.shape[axis] < 3:
        return
    first = (slice(None),) * axis + (slice(0, 1),)
    wrong = relative_error(exhibit.t, exhibit.r)
    if relative_error(exhibit.t[first], exhibit.r[first]) < 0.1 * wrong:
        yield (
            "The first token is right, or nearly: look at what tokens see of each other (attention, "
            "masks) and at positions."
        )
