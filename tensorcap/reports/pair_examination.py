"""What an examination adds to the metrics of pairs: preflight, error locations, logits, routing."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple, TypeVar

from tensorcap.comparison import (
    Comparison,
    Examination,
    Pair,
    contents,
    exchanged_operations,
    has_sync_points,
    points_of,
    worst,
)
from tensorcap.comparison.preflight import preflight
from tensorcap.metrics import (
    WIDEST,
    Difference,
    Location,
    LogitDifference,
    RoutingDifference,
    are_logits,
    is_routing,
    locate,
    logit_metrics,
    routing_metrics,
    shared_vocabulary,
)
from tensorcap.runs import ops_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record

Where = Literal["worst", "all", "none"]
_WORST: Final = 3  # besides the first divergence
_LARGE: Final = 1 << 27  # values: larger logits are compared as such only when asked for
_T = TypeVar("_T")


class _Measured(NamedTuple):
    """A pair whose values were read, and differ."""

    pair: Pair
    ours: Record
    theirs: Record
    difference: Difference


def examine(
    comparison: Comparison,
    reference: Archive,
    target: Archive,
    *,
    repeat: Archive | None = None,
    where: Where = "worst",
    logits: bool = False,
    routing: bool = False,
    compute_dtype: str | None = None,
) -> Examination:
    """Examine two archives that were compared.

    Args:
        comparison: Their comparison.
        reference: The trusted archive.
        target: The archive under test.
        repeat: A second run of the reference.
        where: Find where errors lie in the first divergence and the three worst pairs, in all pairs that are
            not green, or in none.
        logits: Compare every pair of floats as logits; else those whose names say so.
        routing: Compare all integers as choices of experts; else those whose names say so.
        compute_dtype: Precision of the target's run, in place of what its archive says.

    Raises:
        ReadError: Inputs or parameters cannot be read.
    """
    notes: list[str] = []
    measured = list(_measured(comparison.pairs))
    precision = compute_dtype or comparison.target.compute_dtype or None
    vocabulary = shared_vocabulary(reference, target)

    def find(m: _Measured) -> Location:
        masks = m.difference.mask_mismatches > 0
        return locate(reference, m.ours, target, m.theirs, masks=masks, largest=m.difference.max_abs)

    def compare_logits(m: _Measured) -> LogitDifference:
        return logit_metrics(
            reference, m.ours, target, m.theirs, vocabulary=vocabulary, compute_dtype=precision
        )

    def compare_routing(m: _Measured) -> RoutingDifference:
        return routing_metrics(reference, m.ours, target, m.theirs)

    checklist = None
    if comparison.is_of_archives:
        checklist = preflight(reference, target, repeat=repeat, layers=comparison.layers)
    return Examination(
        preflight=checklist,
        classes=site_classes(reference),
        sources=op_sources(comparison, reference),
        locations=_each(_to_locate(comparison, measured, where), find, notes),
        logits=_each(_logits(measured, logits, notes), compare_logits, notes),
        routing=_each([m for m in measured if _is_routing(m, routing)], compare_routing, notes),
        exchanged=exchanged_operations(comparison.pairs, reference, target),
        notes=(*notes, *_sync_points(comparison, reference, target)),
    )


def site_classes(archive: Archive) -> dict[str, str]:
    """The class of each module that a run lists, by site."""
    return {site: module.class_name for site, module in archive.info.modules.items() if module.class_name}


def op_sources(comparison: Comparison, reference: Archive) -> dict[str, str]:
    """The source line of the op that made each record, by key text of its pair."""
    ops = ops_of(reference)
    sources = {p.key: ops.source(p.reference.key.where) for p in comparison.pairs if p.reference and ops}
    return {key: source for key, source in sources.items() if source}


def _measured(pairs: Iterable[Pair]) -> Iterator[_Measured]:
    for pair in pairs:
        if pair.reference and pair.target and pair.difference and not pair.difference.same_bits:
            yield _Measured(pair, pair.reference, pair.target, pair.difference)


def _to_locate(comparison: Comparison, measured: list[_Measured], where: Where) -> list[_Measured]:
    bad = [m for m in measured if m.pair.is_required and not m.pair.is_green]
    if where != "worst":
        return bad if where == "all" else []
    keys = {pair.key for pair in worst((m.pair for m in bad), _WORST + 1)}
    if comparison.divergence is not None:
        keys.add(comparison.divergence.pair.key)
    return [m for m in bad if m.pair.key in keys]


def _logits(measured: list[_Measured], every: bool, notes: list[str]) -> Iterator[_Measured]:
    for m in measured:
        if "complex" in (m.ours.dtype.kind, m.theirs.dtype.kind) or not m.ours.shape:
            continue
        if every and "float" in (m.ours.dtype.kind, m.theirs.dtype.kind):
            yield m
        elif are_logits(m.ours.key):
            if m.ours.size <= _LARGE:
                yield m
            else:
                notes.append(
                    f"{m.pair.key} was not compared as logits: it is large, --metric kl does it all the same."
                )


def _is_routing(m: _Measured, every: bool) -> bool:
    are_whole = m.ours.dtype.is_whole and m.theirs.dtype.is_whole
    fits = are_whole and len(m.ours.shape) > 0 and m.ours.shape[-1] <= WIDEST
    return fits and (every or is_routing(m.ours))


def _each(
    chosen: Iterable[_Measured], examine_one: Callable[[_Measured], _T], notes: list[str]
) -> dict[str, _T]:
    results: dict[str, _T] = {}
    known: dict[object, _T] = {}  # by contents: an output that is handed on is the input of others
    for m in chosen:
        same = contents(m.pair) or m.pair.key
        try:
            results[m.pair.key] = known[same] = known[same] if same in known else examine_one(m)
        except OSError as error:  # it was readable a moment ago: the rest of the report stands
            notes.append(f"{m.pair.key} could not be read again: {error}.")
    return results


def _sync_points(comparison: Comparison, reference: Archive, target: Archive) -> Iterator[str]:
    """How many operations of a compiled program were compared, and what lists them."""
    if comparison.is_of_archives and has_sync_points(reference, target):
        points = points_of(comparison, reference, target)
        sides = " ".join(shlex.quote(str(side.path)) for side in (comparison.reference, comparison.target))
        yield f"sync points: {points.summary}; tcap sync-points {sides} lists them."
