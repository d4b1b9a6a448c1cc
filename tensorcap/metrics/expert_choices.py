"""How far two choices of experts differ: integers compared as sets along the last axis.

Definitions are normative in `specs/logits.md`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.metrics.value_blocks import read_value_blocks, require_rows, unravel
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.records import Record

WIDEST: Final = 64  # choices in a row
_NAMES: Final = re.compile(
    r"(?:^|[._/])(?:router|experts?|top_?k)(?:$|[._/])|(?:^|[./])gate(?:$|[./])", re.IGNORECASE
)
_BLOCK: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class RoutingDifference:
    """Two tensors of chosen numbers compared, a row being one set. None stands for undefined.

    Attributes:
        rows: Sets on each side.
        equal_sets: Rows whose sets are equal, whatever their order.
        equal_order: Rows that are equal as they stand.
        share: Share of rows with equal sets, 0 to 1.
        mean_overlap: Mean over rows of the numbers that both sets have, over the larger set, 0 to 1.
        least_overlap: The smallest such share of a row.
        first_unequal: The first row whose sets differ, one number for each leading axis.
    """

    rows: int
    equal_sets: int
    equal_order: int
    share: float | None
    mean_overlap: float | None
    least_overlap: float | None
    first_unequal: tuple[int, ...] | None


def is_routing(record: Record) -> bool:
    """Whether a record holds numbers of experts: integers, few a row, under the name of a router (LOG-20)."""
    return (
        record.dtype.is_whole
        and len(record.shape) >= 2
        and 0 < record.shape[-1] <= WIDEST
        and _NAMES.search(f"{record.key.site}/{record.key.slot}") is not None
    )


def routing_metrics(
    reference: Archive, reference_record: Record, target: Archive, target_record: Record
) -> RoutingDifference:
    """Compare stored integers as sets along the last axis, in bounded memory.

    Raises:
        UsageError: The shapes differ, the values are no integers, or a row has more than 64 of them.
        ReadError: One side cannot be read.
    """
    shape = require_rows(reference_record, target_record)
    key = reference_record.key.text
    if {reference_record.dtype.kind, target_record.dtype.kind} - {"int", "uint"} or shape[-1] > WIDEST:
        raise UsageError(f"{key}: expected integers, at most {WIDEST} along the last axis")
    leading, columns = shape[:-1], shape[-1]
    rows = equal_sets = equal_order = 0
    overlap_sum, least, first = 0.0, 1.0, None
    sides = read_value_blocks((reference, reference_record), (target, target_record), columns, _BLOCK)
    for _, ours, theirs in sides:
        x, y = (_sort_rows(side.reshape(-1, columns)) for side in (ours, theirs))
        shared = (x[:, :, None] == y[:, None, :]).any(axis=2)
        sizes = [np.count_nonzero(_are_first(side), axis=1) for side in (x, y)]  # a number twice counts once
        overlap = np.count_nonzero(shared & _are_first(x), axis=1) / np.maximum(*sizes)
        unequal = np.flatnonzero(overlap < 1)
        if first is None and unequal.size:
            first = rows + int(unequal[0])
        equal_sets += x.shape[0] - unequal.size
        equal_order += int(np.count_nonzero((ours == theirs).reshape(-1, columns).all(axis=1)))
        overlap_sum += float(overlap.sum())
        least = min(least, float(overlap.min()))
        rows += x.shape[0]
    return RoutingDifference(
        rows=rows,
        equal_sets=equal_sets,
        equal_order=equal_order,
        share=equal_sets / rows if rows else None,
        mean_overlap=overlap_sum / rows if rows else None,
        least_overlap=least if rows else None,
        first_unequal=unravel(first, leading),
    )


def _sort_rows(values: Array) -> Array:
    """Sort rows, as numbers that compare exactly whatever the signedness of both sides."""
    wide = values.astype(object) if values.dtype == np.uint64 and values.max() > 2**63 - 1 else values
    return np.sort(wide if wide.dtype == object else wide.astype(np.int64), axis=1)


def _are_first(ordered: Array) -> Array:
    """Return which numbers of a sorted row are the first of their value."""
    out = np.ones(ordered.shape, np.bool_)
    out[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return out
