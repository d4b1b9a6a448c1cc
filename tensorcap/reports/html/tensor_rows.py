"""All tensors of a comparison: the table's rows, and the points of curves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tensorcap.comparison import Comparison, Pair, contents, error_of
from tensorcap.drawing import Point
from tensorcap.reports.html.sources import ReportSource
from tensorcap.reports.layer_report import shape_texts
from tensorcap.runs import component_of, is_inner, is_result
from tensorcap.wording import shortened
from tensorcap_formats.keys import Key, module_of


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of the table.

    Attributes:
        order: Execution order number; None if the reference has no record of it.
        key: Key text.
        also: Count of further keys that hold the same tensor on both sides.
        component: What kind of module made it.
        class_name: Class of that module.
        status: Of the pair.
        is_green: Whether that is a green one.
        shape: Of the reference, else of the target; "" if neither has a record.
        error: Relative error; None if nothing was measured.
        own: What the module made itself; None if unknown.
        max_abs: Largest absolute error; None if nothing was measured.
        psnr: In decibels; None if undefined.
        reason: Why the status is what it is, or "".
    """

    order: int | None
    key: str
    also: int
    component: str
    class_name: str
    status: str
    is_green: bool
    shape: str
    error: float | None
    own: float | None
    max_abs: float | None
    psnr: float | None
    reason: str


def tensor_rows(source: ReportSource) -> Iterator[Row]:
    """A row for each tensor: keys with equal contents on both sides, in one status, share one."""
    also: dict[object, int] = {}
    first: dict[object, Pair] = {}
    for pair in source.comparison.pairs:
        same = contents(pair)
        tensor: object = (same, pair.status) if same else pair.key
        first.setdefault(tensor, pair)
        also[tensor] = also.get(tensor, -1) + 1
    for tensor, pair in first.items():
        yield _row(pair, also[tensor], source)


def _row(pair: Pair, also: int, source: ReportSource) -> Row:
    record, d = pair.reference or pair.target, pair.difference
    key = record.key if record else Key.parse(pair.key)  # what could not be captured has no record
    return Row(
        order=pair.reference.order if pair.reference else None,
        key=shortened(pair.key),
        also=also,
        component="" if key.is_bare else shortened(component_of(module_of(key.site)), 40),
        class_name=source.examination.classes.get(module_of(key.site), "").rpartition(".")[2],
        status=pair.status,
        is_green=not is_bad(pair),
        shape=shape_texts([record.shape]) if record else "",
        error=drawn_error(pair),
        own=source.own_errors.get(pair.key),
        max_abs=None if d is None else d.max_abs,
        psnr=None if d is None else d.psnr_db,
        reason=pair.reason,
    )


def results_of(comparison: Comparison) -> list[Pair]:
    """The pairs of results of modules, in execution order of the reference: the points of a curve."""
    results = [
        pair
        for pair in comparison.pairs
        if pair.reference is not None and pair.status != "excluded" and _is_module_result(pair.reference.key)
    ]
    return sorted(results, key=lambda pair: pair.reference.order if pair.reference else 0)


def _is_module_result(key: Key) -> bool:
    return not key.is_bare and is_result(key) and not is_inner(key)


def points_of(source: ReportSource) -> Iterator[Point]:
    """Results of modules in execution order, with what went into the call of each."""
    inherited: dict[str, float] = {}
    for pair in source.comparison.pairs:
        record, error = pair.reference, drawn_error(pair)
        if record is None or record.key.is_bare or error is None:
            continue
        if record.key.slot.startswith("input"):
            inherited[record.key.where] = max(error, inherited.get(record.key.where, 0.0))
    for pair in results_of(source.comparison):
        assert pair.reference is not None
        key = pair.reference.key
        own = source.own_errors.get(pair.key)
        yield Point(key.site, drawn_error(pair), inherited.get(key.where), own, not is_bad(pair))


def is_bad(pair: Pair) -> bool:
    """Whether a report marks it."""
    return pair.is_required and not pair.is_green


def drawn_error(pair: Pair) -> float | None:
    """The relative error of a pair, infinite if elements are finite on one side only."""
    if pair.difference is not None and pair.difference.mask_mismatches:
        return math.inf
    return error_of(pair)
