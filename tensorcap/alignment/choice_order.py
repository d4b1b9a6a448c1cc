"""Chosen experts in one order: which k experts a token has, and with which weights, is no matter of order.

A router may sort the experts that it chooses by their scores, and need not. Where one does not, and rows of
both runs hold the same numbers in another order, each row is sorted by them in a view, with the weights that
belong to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.metrics import WIDEST, is_routing
from tensorcap_formats.archive import Archive
from tensorcap_formats.digests import digest
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView

_MOST: Final = 1 << 22  # elements of chosen numbers that are read
_ALIKE: Final = 0.5  # of the rows hold the same numbers on both sides: others are of other tokens
_OTHERWISE: Final = 0.25  # of these are in another order: of fewer near ties may be why

Group = tuple[Record, tuple[Record, ...]]  # numbers of experts, and tensors of a value for each


class SortedChoices(ArchiveView):
    """An archive whose chosen experts, and what belongs to each, are sorted by their numbers in each row."""

    def __init__(self, source: Archive, groups: Iterable[Group]) -> None:
        self._chosen: Mapping[str, Record] = {
            record.key.text: chosen for chosen, others in groups for record in (chosen, *others)
        }
        super().__init__(
            source,
            [self._with_digest(source, record) for record in source.records],
            {record.key.text: (record,) for record in source.records},
        )

    def _with_digest(self, source: Archive, record: Record) -> Record:
        """A record with the digest of its sorted rows, by which copies of choices are known.

        It has none if they cannot be read.
        """
        chosen = self._chosen.get(record.key.text)
        if chosen is None or not record.digest:
            return record
        try:
            rows = np.ascontiguousarray(_sorted(source, chosen, record))
        except OSError:  # the comparison says so
            return replace(record, digest="")
        return replace(record, digest=digest(rows.data))

    def of_run(self, run: Archive) -> SortedChoices:
        """View another run of the same model so."""
        return SortedChoices(run, _groups(run))

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        chosen = self._chosen.get(record.key.text)
        if chosen is None:
            super()._read_flat(record, start, out)
            return
        (own,) = self.sources[record.key.text]
        rows = _sorted(self.source, chosen, own)
        out[:] = rows.reshape(-1)[start : start + out.size]


def _sorted(source: Archive, chosen: Record, record: Record) -> Array:
    """A tensor, as it is stored, with each row in the order of the chosen numbers."""
    order = np.argsort(source.load(chosen), axis=-1, kind="stable")
    return np.take_along_axis(source.read(record), order, axis=-1)


def _are_by_size(archive: Archive, weights: Record) -> bool:
    """Whether the largest weight is the first of each row, and so on: another order has other scores."""
    values = archive.load(weights)
    return bool((values[..., 1:] <= values[..., :-1]).all())


def in_one_order(reference: Archive, target: Archive) -> tuple[Archive, Archive]:
    """View two archives with chosen experts in one order, if one does not have that of its weights (ALN-308).

    Returns:
        The views; the archives as they are if few rows differ in their order alone. Of chosen experts that
        cannot be read nothing is known.
    """
    sides = [_groups(archive) for archive in (reference, target)]
    if not all(sides) or not any(is_routing(chosen) for groups in sides for chosen, _ in groups):
        return reference, target
    results = [[group for group in groups if group[0].key.slot.startswith("output")] for groups in sides]
    if len(results[0]) != len(results[1]):
        return reference, target
    for groups in zip(*results, strict=True):
        try:
            is_other = _has_other_order((reference, target), groups)
        except OSError:  # the comparison says so
            continue
        if is_other:
            return SortedChoices(reference, sides[0]), SortedChoices(target, sides[1])
    return reference, target


def _has_other_order(archives: tuple[Archive, Archive], groups: tuple[Group, Group]) -> bool:
    """Whether rows of chosen experts differ in their order alone, which is not that of weights on a side."""
    (ours, values), (theirs, other_values) = groups
    if ours.size != theirs.size or ours.shape[-1] != theirs.shape[-1] or ours.size > _MOST:
        return False
    if ours.digest and ours.digest == theirs.digest:
        return False
    one, other = (
        archive.load(record).reshape(-1, record.shape[-1])
        for archive, record in zip(archives, (ours, theirs), strict=True)
    )
    ordered, others = np.sort(one, axis=1), np.sort(other, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return False
    is_same = (ordered == others).all(axis=1)
    is_other = (one != other).any(axis=1)[is_same]
    if is_same.mean() < _ALIKE or is_other.mean() < _OTHERWISE:
        return False
    return not (_are_by_size(archives[0], values[0]) and _are_by_size(archives[1], other_values[0]))


def _groups(archive: Archive) -> Sequence[Group]:
    """Chosen experts and what belongs to each, of arguments and of results of each call, in order."""
    of_calls: dict[tuple[object, ...], list[Record]] = {}
    for record in archive.records:
        if record.dtype.is_whole and _is_row_wise(record) and _may_be_chosen(record):
            of_calls.setdefault(_place(record), []).append(record)
    if not of_calls:
        return []
    floats: dict[tuple[object, ...], list[Record]] = {place: [] for place in of_calls}
    for record in archive.records:
        if record.dtype.kind == "float" and _is_row_wise(record) and (place := _place(record)) in floats:
            floats[place].append(record)
    groups = []
    for place, choices in of_calls.items():
        for chosen in choices:
            others = tuple(record for record in floats[place] if record.shape == chosen.shape)
            if others:
                groups.append((chosen, others))
                break
    return groups


def _place(record: Record) -> tuple[object, ...]:
    key = record.key
    return key.rank, key.step, key.site, key.call, key.slot.partition(".")[0]


def _is_row_wise(record: Record) -> bool:
    is_narrow = len(record.shape) > 1 and 1 < record.shape[-1] <= WIDEST
    return is_narrow and record.stored and not record.key.is_bare


def _may_be_chosen(record: Record) -> bool:
    """Whether whole numbers may be those of experts: none is negative, and there are more than a row has."""
    least, most = (
        (record.statistics.minimum, record.statistics.maximum) if record.statistics else (0, math.inf)
    )
    return (least is None or least >= 0) and (most is None or most >= record.shape[-1] - 1)
