"""Rows that a run has in another order than its reference, since experts flipped: which belongs to which."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.verdicts.calls import Call, Calls
from tensorcap.verdicts.flips import Flips
from tensorcap.verdicts.pair import Pair
from tensorcap.verdicts.places import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_ROWS: Final = 256  # of the reference are looked for
_NEAR: Final = 4096
_ELEMENTS: Final = 1 << 22  # of one side are read; a longer tensor is not aligned


@dataclass(frozen=True, slots=True)
class Aligned:
    """A leaf inside experts whose rows were brought together.

    Attributes:
        source: The pair of its input.
        result: The pair of its output; None where it could not be aligned.
        input_error: Median over rows of the relative error of the input.
        output_error: The same of the output.
    """

    source: Pair
    result: Pair | None
    input_error: float
    output_error: float | None


def shuffled_calls(calls: Calls, flips: Sequence[Flips], copies: Mapping[str, Pair]) -> dict[str, Flips]:
    """Key texts of records whose rows are ordered by expert, where experts flipped, with the flips.

    They are the records of calls below a module that got the choices as an argument, within its call.
    """
    found: dict[str, Flips] = {}
    for call, chosen in _given_choices(calls, flips, copies):
        for below in calls.within(call):
            for record in (*below.inputs, *below.outputs):
                found[record.key.text] = chosen
    return found


def moved_ops(
    calls: Calls, reference: Archive, flips: Sequence[Flips], copies: Mapping[str, Pair]
) -> set[str]:
    """Key texts of records of places within the code of modules that got other choices, and of modules below.

    Args:
        calls: The reference's calls.
        reference: The trusted archive.
        flips: What became of the choices.
        copies: Pairs that hold choices again.
    """
    found: set[str] = set()
    inner: dict[tuple[int, int], list[Record]] = {}
    for call, _ in _given_choices(calls, flips, copies):
        if not inner:
            for record in reference.records:
                if is_inner(record.key):
                    inner.setdefault((record.key.rank, record.key.step), []).append(record)
        records = inner.get(call.place[:2], [])
        first = bisect_left(records, call.start, key=lambda record: record.order)
        for record in records[first:]:
            if record.order > call.end:
                break
            if f"{module_of(record.key.site)}.".startswith(f"{call.site}."):
                found.add(record.key.text)
    return found


def _given_choices(
    calls: Calls, flips: Sequence[Flips], copies: Mapping[str, Pair]
) -> Iterator[tuple[Call, Flips]]:
    """Calls that got the choices of a router as an argument, with what became of these."""
    by_key = {flip.pair.key: flip for flip in flips}
    for call in calls.calls:
        keys = [record.key.text for record in call.inputs]
        chosen = [by_key[copies[key].key] for key in keys if key in copies and copies[key].key in by_key]
        if chosen:
            yield call, chosen[0]


def aligned_leaves(
    reference: Archive,
    target: Archive,
    calls: Calls,
    pairs: Mapping[str, Pair],
    shuffled: Mapping[str, Flips],
) -> Iterator[Aligned]:
    """Bring the rows of leaves inside experts together by what the leaves were given."""
    for leaf in calls.leaves:
        source = _pair_of(leaf.inputs, pairs, shuffled)
        if source is None or source.reference is None:
            continue
        sides = [_rows(archive, record) for archive, record in _sides(reference, target, source)]
        if any(side is None for side in sides):
            continue
        x, y = sides
        assert x is not None
        assert y is not None
        order, partner = _partners(x, y, _reach(shuffled[source.key]))
        result = _pair_of(leaf.outputs, pairs, shuffled)
        output_error = None
        if result is not None:
            made = [_rows(archive, record) for archive, record in _sides(reference, target, result)]
            if all(side is not None and len(side) == len(x) for side in made):
                output_error = _error(made[0], made[1], order, partner)
        input_error = _error(x, y, order, partner)
        yield Aligned(source, result if output_error is not None else None, input_error, output_error)


def _pair_of(
    records: Sequence[Record], pairs: Mapping[str, Pair], shuffled: Mapping[str, Flips]
) -> Pair | None:
    for record in records:
        pair = pairs.get(record.key.text)
        is_shuffled = record.key.text in shuffled and record.dtype.kind == "float" and len(record.shape) >= 2
        if pair is not None and is_shuffled and pair.difference is not None:
            return pair
    return None


def _sides(reference: Archive, target: Archive, pair: Pair) -> list[tuple[Archive, Record]]:
    assert pair.reference is not None
    assert pair.target is not None
    return [(reference, pair.reference), (target, pair.target)]


def _rows(archive: Archive, record: Record) -> Array | None:
    if not 0 < record.size <= _ELEMENTS or not record.stored:
        return None
    values = decode(archive.read(record), record.dtype).reshape(-1, record.shape[-1]).astype(np.float64)
    return np.where(np.isfinite(values), values, 0.0)


def _reach(flips: Flips) -> int:
    """How many places away a row may be: each flip moves others, and sorting by expert need not be stable."""
    record = flips.pair.reference
    return max(_NEAR, 2 * flips.flipped * (record.shape[-1] if record is not None else 1))


def _partners(x: Array, y: Array, reach: int) -> tuple[Array, Array]:
    """Some rows of the reference and, for each, the nearest of the target's at most `reach` places away."""
    order = np.unique(np.linspace(0, len(x) - 1, min(len(x), _ROWS)).astype(np.int64))
    sizes = (y**2).sum(axis=1)
    partner = np.empty_like(order)
    for i, row in enumerate(order):
        low, high = max(0, row - reach), min(len(y), row + reach + 1)
        distance = sizes[low:high] - 2 * (y[low:high] @ x[row])
        partner[i] = low + int(distance.argmin())
    return order, partner


def _error(x: Array | None, y: Array | None, order: Array, partner: Array) -> float:
    assert x is not None
    assert y is not None
    d, r = y[partner] - x[order], x[order]
    sizes = (r**2).sum(axis=1)
    errors = (d**2).sum(axis=1)[sizes > 0] / sizes[sizes > 0]
    return float(np.sqrt(np.median(errors))) if errors.size else 0.0


def calls_that_align(aligned: Sequence[Aligned]) -> dict[str, float]:
    """Row errors by key text, as they are once rows were brought together."""
    errors = {}
    for found in aligned:
        errors[found.source.key] = found.input_error
        if found.result is not None and found.output_error is not None:
            errors[found.result.key] = found.output_error
    return errors
