"""Propose other records in the values of the target: in their place, added, left out, or multiplied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import LARGEST, PairContext, values_of
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.values import Values, evenly_spaced, relative_error
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_READS: Final = 12  # tensors that are read because their statistics fit
_TERMS: Final = 24  # neighbours and tables that are tried as terms
_LOG_TERMS: Final = math.log(2 * _TERMS)
_MOST_EXCHANGES: Final = 4  # pairs of terms that are proposed
_SAMPLE: Final = 4096  # elements by which a term is chosen
_CORRELATED: Final = 0.5  # cosine with the difference that a term needs
_LESSENED: Final = 0.5  # share of the error that a product may leave on the sample
_UNIT_TOLERANCE: Final = 0.02  # by which the factor of a term may miss 1
_NORM_ROUNDINGS: Final = 8  # by which the norms of equal records may differ
_NORM_INHERITED: Final = 4
_NORM_TOLERANCE: Final = 1e-6


def propose_other_records(context: PairContext) -> Iterator[Hypothesis]:
    """Propose the module's own input, the value of another record, and sums and products with neighbours."""
    if not context.is_same_shape or context.window is not None:
        return
    for slot, ours, theirs in context.inputs:
        if theirs.size == context.t.size and not np.array_equal(ours.reshape(-1), context.r.reshape(-1)):
            yield replace(_identity(context, slot, theirs), is_exact=True)
    yield from _propose_calls_in_another_order(context)
    yield from _propose_skipped_modules(context)
    yield from _propose_equal_records(context)
    yield from _propose_terms(context)
    yield from _propose_exchanges(context)


def _identity(context: PairContext, slot: str, values: Values) -> Hypothesis:
    """State that the target returns an input as it is, or is given one argument in the place of another."""
    if context.reference.key.slot.startswith("input."):
        return context.propose(
            "term-exchanged",
            f"the target gives the value of {slot} for this argument of the same call",
            values.reshape(context.t.shape),
            hint="A residual, or another term, is taken from before or behind the step that it belongs to.",
            facts={"slot": slot},
        )
    return context.propose(
        "identity",
        f"the target returns its {slot} as it is",
        values.reshape(context.t.shape),
        hint="The module does nothing: it is skipped, replaced or an identity.",
        facts={"slot": slot},
    )


def _propose_calls_in_another_order(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that a call is given what another one returns, which the reference makes only after it.

    Of the target's own results of the same parent module, one is this argument, bit by bit. If that call is
    given in the target what the reference gives this one, the order is the opposite one.
    """
    key, target, digest = context.reference.key, context.target_archive, context.target.digest
    if not key.slot.startswith("input.") or not digest:
        return
    site = module_of(key.site)
    for later in _find_later_calls(context, site):
        text = replace(key, site=later, slot="output").text
        theirs = target.get(text) if text in target else None
        if theirs is None or theirs.digest != digest or not theirs.stored or theirs.size != context.t.size:
            continue
        is_turned = any(
            relative_error(x, context.r) <= context.tolerance() for x in _read_arguments(context, later)
        )
        yield context.propose(
            "calls-order" if is_turned else "operand-exchanged",
            f"the target gives {site} what {later} returns, which the reference calls after it",
            values_of(target, theirs).reshape(context.t.shape),
            hint=f"{site} and {later} are called in the opposite order."
            if is_turned
            else f"{site} is called on another branch, or too late.",
            facts={"call": site, "other": later},
        )


def _read_arguments(context: PairContext, site: str) -> Iterator[Values]:
    """Read what the target gives a module in this step, of the pair's shape."""
    key, target = context.reference.key, context.target_archive
    for record in target.records:
        is_of_call = (record.key.site, record.key.step, record.key.rank) == (site, key.step, key.rank)
        is_like = record.stored and record.shape == context.r.shape
        if is_of_call and is_like and record.key.slot.startswith("input."):
            yield values_of(target, record)


def _find_later_calls(context: PairContext, site: str) -> list[str]:
    """Find modules of the same parent that the reference calls after one."""
    parent, _, own = site.rpartition(".")
    if context.rerun is not None:
        names = list(context.rerun.results)
        later = names[names.index(own) + 1 :] if own in names else []
        return [f"{parent}.{name}" if parent else name for name in later]
    key, order = context.reference.key, context.reference.order
    return [
        result.key.site
        for result in context.reference_archive.records
        if result.order > order
        and (result.key.step, result.key.rank, result.key.slot) == (key.step, key.rank, "output")
        and ":" not in result.key.site
        and result.key.site.rpartition(".")[0] == parent
        and result.key.site != site
    ]


def _propose_skipped_modules(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that a module is skipped: the target hands on what it is given in the place of its result.

    1. In the reference the tensor is the result of another module's call, which the target does not make and
       which is not what that call is given.
    2. What that call is given is the target's own tensor, if it has the one of these bytes, else the
       reference's.
    """
    reference, archive, target = context.reference, context.reference_archive, context.target_archive
    if not reference.digest:
        return
    of_step = [
        r for r in archive.records if (r.key.step, r.key.rank) == (reference.key.step, reference.key.rank)
    ]
    for result in of_step:
        is_result = result.key.slot.startswith("output") and ":" not in result.key.site
        if not is_result or result.digest != reference.digest or result.row == reference.row:
            continue
        if result.key.text in target:
            continue
        for given in of_step:
            is_argument = given.key.where == result.key.where and given.key.slot.startswith("input")
            if not is_argument or given.size != context.target.size or not given.stored:
                continue
            if given.digest == result.digest:  # a dropout that drops nothing: to skip it changes nothing
                continue
            same = [r.key.text for r in of_step if given.digest and r.digest == given.digest]
            own = next((target.get(text) for text in same if text in target), None)
            has_own = own is not None and own.stored and own.size == given.size
            values = values_of(target, own) if own is not None and has_own else values_of(archive, given)
            proposed = context.propose(
                "skipped",
                f"the target has what {result.key.site} is given in the place of its result",
                values.reshape(context.t.shape),
                hint=f"{result.key.site} is skipped, or what it does is done elsewhere.",
                facts={"module": result.key.site, "key": given.key.text},
            )
            yield replace(proposed, is_exact=bool(has_own))


def _propose_equal_records(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that the target holds the value of another record of the reference.

    1. Records of the same size and kind of dtype are candidates.
    2. Those with the digest of the target are read, then those whose norm is that of the target.
    """
    t, reference, archive = context.t, context.reference, context.reference_archive
    fitting = [
        r
        for r in archive.records
        if r.size == context.target.size
        and r.row != reference.row
        and r.stored
        and r.dtype.kind == reference.dtype.kind
        and not (r.digest and r.digest == reference.digest)
    ]
    same = [r for r in fitting if _has_equal_digest(r, context)]
    norm = math.sqrt(float(np.vdot(t, t)))
    tolerance = norm * max(
        _NORM_ROUNDINGS * context.rounding, _NORM_INHERITED * context.inherited, _NORM_TOLERANCE
    )
    for record in fitting:
        if len(same) >= _READS:
            break
        l2 = record.statistics.l2 if record.statistics is not None else None
        if record not in same and l2 is not None and abs(l2 - norm) <= tolerance:
            same.append(record)
    for record in same:
        value = values_of(archive, record).reshape(t.shape)
        if np.array_equal(value, context.r):
            continue
        if record.key.slot.startswith("input.") and record.key.where == context.reference.key.where:
            yield _identity(context, record.key.slot, value)  # which has another name in the target
        else:
            yield context.propose(
                "holds",
                f"the target holds the value of {record.key.text}",
                value,
                log_alternatives=math.log(1 + len(fitting)),
                hint="Another tensor is taken: names, an index, or the order of results.",
                facts={"key": record.key.text},
            )


def _has_equal_digest(record: Record, context: PairContext) -> bool:
    """Whether a record has the digest of the target, if both archives use one algorithm."""
    algorithm, target = context.reference_archive.algorithm, context.target
    is_known = bool(record.digest) and algorithm is not None and algorithm == context.target_archive.algorithm
    return is_known and (record.digest, record.dtype) == (target.digest, target.dtype)


def _propose_terms(context: PairContext) -> Iterator[Hypothesis]:
    """Propose the reference plus a multiple of another tensor, or times it.

    1. Neighbours of the same shape and tables of positions are candidates.
    2. On a sample, one that the difference correlates with is proposed as a term, one by which the error
       lessens as a factor.
    """
    r, t = context.r, context.t
    difference = t - r
    picked = evenly_spaced(r.size, _SAMPLE)
    few, few_r, few_t = (side.reshape(-1)[picked] for side in (difference, r, t))
    before = relative_error(few_t, few_r)
    for label, x in itertools.islice(_read_candidates(context), _TERMS):
        wide = np.broadcast_to(x, r.shape)
        sample = wide.reshape(-1)[picked]
        size = math.sqrt(float(sample @ sample) * float(few @ few))
        if size and abs(float(sample @ few)) >= _CORRELATED * size:
            yield from _propose_sums(context, label, wide, difference)
        if relative_error(few_t * sample, few_r) < _LESSENED * before:
            yield Hypothesis(
                "product-missing",
                f"the reference is the target times {label}",
                r,
                t * wide,
                t,
                log_alternatives=_LOG_TERMS,
                hint=f"The multiplication by {label} is missing in the target.",
                facts={"key": label},
            )
        if relative_error(few_t, few_r * sample) < _LESSENED * before:
            yield context.propose(
                "product-added",
                f"the target is the reference times {label}",
                r * wide,
                log_alternatives=_LOG_TERMS,
                hint=f"The target multiplies by {label} once more.",
                facts={"key": label},
            )


def _propose_exchanges(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that one record is added in the place of another: the difference is that of two of them.

    Neighbours and arguments of modules around are compared in pairs, on a sample; the nearest are proposed.
    """
    shape = context.r.shape
    records: dict[str, Values] = {}
    for label, ours in itertools.islice(context.read_with_arguments_around(shape), _TERMS):
        records[label] = ours
    if len(records) < 2:
        return
    labels = list(records)
    picked = evenly_spaced(context.r.size, _SAMPLE)
    few = np.stack([records[label].reshape(-1)[picked] for label in labels])
    difference = (context.t - context.r).reshape(-1)[picked]
    wanted = few + difference  # what would stand in the place of each
    squares = (few * few).sum(axis=1)
    left = (wanted * wanted).sum(axis=1)[:, None] - 2 * wanted @ few.T + squares[None]
    size = float(difference @ difference)
    np.fill_diagonal(left, np.inf)
    for at in np.argsort(left, axis=None, kind="stable")[:_MOST_EXCHANGES].tolist():
        one, other = divmod(at, len(labels))
        if left[one, other] > _LESSENED * _LESSENED * size:
            return
        ours, theirs = labels[one], labels[other]
        yield context.propose(
            "term-exchanged",
            f"the target adds {theirs} where the reference adds {ours}",
            context.r - records[ours] + records[theirs],
            log_alternatives=2 * _LOG_TERMS,
            hint=f"A residual, or another term, is taken from the wrong place: {theirs} for {ours}.",
            facts={"key": ours, "target_key": theirs},
        )


def _propose_sums(context: PairContext, label: str, x: Values, difference: Values) -> Iterator[Hypothesis]:
    """Propose a term, with the factor that leaves least, or once if that is about 1 or -1."""
    factor = float(np.vdot(x, difference)) / float(np.vdot(x, x))
    facts: dict[str, object] = {"key": label}
    for sign, kind, how, hint in (
        (-1, "term-missing", f"without {label}", f"A residual, or another sum with {label}, is missing."),
        (
            1,
            "term-twice",
            f"plus {label} once more",
            f"The residual, or another term, is added twice: {label}.",
        ),
    ):
        if abs(factor - sign) < _UNIT_TOLERANCE:
            text, predicted = f"the target is the reference {how}", context.r + sign * x
            yield context.propose(kind, text, predicted, log_alternatives=_LOG_TERMS, hint=hint, facts=facts)
    yield context.propose(
        "term-scaled",
        f"the target is the reference plus {factor:.5g} times {label}",
        context.r + factor * x,
        parameters=2,
        log_alternatives=_LOG_TERMS,
        hint=f"{label} comes in with another factor.",
        facts={**facts, "factor": factor},
    )


def _read_candidates(context: PairContext) -> Iterator[tuple[str, Values]]:
    """Read neighbours of the pair's shape, and rows of parameters of that width: tables of positions."""
    shape = context.r.shape
    for label, ours, _ in context.read_neighbours(shape):
        yield label, ours
    if len(shape) < 2:
        return
    rows = shape[-2]
    for record in context.reference_archive.records:
        if not record.key.slot.startswith(("param.", "buffer.")) or not record.stored:
            continue
        if not 1 <= record.size <= LARGEST or record.dtype.kind != "float" or not record.shape:
            continue
        if len(record.shape) == 2 and record.shape[1] == shape[-1] and record.shape[0] >= rows > 1:
            table = values_of(context.reference_archive, record)
            for start in dict.fromkeys((0, min(2, record.shape[0] - rows))):
                yield f"{record.key.text}[{start}:{start + rows}]", table[start : start + rows]
