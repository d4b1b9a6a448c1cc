"""Layouts that a whole port has otherwise under equal names: interleaved rotary halves, channels last.

Equal names and a layout that moves elements are an error in one module, and a habit in all layers of a port
whose results agree. Only the second is compared after layout steps.
"""

from __future__ import annotations

import itertools
import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.alignment.layout import Fit, Layout, find_layout, residual
from tensorcap.alignment.links import place_of
from tensorcap.alignment.mapping import Entry
from tensorcap.alignment.match.contents import modules_in_few_bits
from tensorcap.alignment.match.fingerprints import rounding_of, statistics_distance
from tensorcap.alignment.resolution import ResolvedMapping
from tensorcap.runs import is_gradient, is_inner, is_result
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

_LEAST: Final = 16  # elements; fewer agree after some step by chance
_FIRST: Final = 1 << 16  # elements that say whether tensors agree as they are
_MOST: Final = 1 << 26  # elements that are read of one tensor
_ROUNDINGS: Final = 64  # relative errors up to so many roundings are none of layout
_FAR: Final = 2.5  # times smaller: the layout of a tensor whose values differ anyway
_COARSE: Final = (
    0.25  # relative error of what a module makes with weights in few bits; of a wrong layout it is 1
)
_TRIED: Final = 4  # layers of which none is made equal by steps: the others are not looked at
_CACHES: Final = ("cache", "past_key_values")
_PRIMES: Final = (2, 3, 5, 7, 11, 13, 17, 19)  # sizes that tell the axes of a tensor apart

_Pair = tuple[Record, Record]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Places that may have another layout throughout a port.

    Attributes:
        moved: Pairs of records that agree after the steps and not before, in execution order.
        unmoved: Those that agree as they are, or far better so.
        others: Those that say nothing: they agree with and without, or never, or cannot be read.
        steps: From the target's tensors to the reference's.
        entries: The entries that say so.
    """

    moved: tuple[_Pair, ...]
    unmoved: tuple[_Pair, ...]
    others: tuple[_Pair, ...]
    steps: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def pairs(self) -> tuple[_Pair, ...]:
        """All pairs."""
        return self.moved + self.unmoved + self.others


def find_systematic_layouts(reference: Archive, target: Archive) -> list[Entry]:
    """Find layouts that move elements between places of equal keys, in all layers alike.

    1. Places whose names differ only in numbers are looked at together. They come into question if the
       statistics of a pair agree, its values do not, and steps make them equal to rounding.
    2. More pairs agree far better after these steps than as they are, or as many; the others are errors, and
       stay ones. A pair that no steps make equal, or that cannot be read, has no vote.
    3. What is computed of one of them agrees, see `_has_agreeing_results`, or all of them lie behind one that
       stays as it is; of as many that stay as they are, what is computed differs. Results of the model itself
       are moved if it takes an argument in another order of axes, in that order, and never otherwise, save
       its caches.

    Returns:
        An entry for each place, with evidence `rule`.
    """
    partners = {record.key.text: record for record in target.records}
    groups: dict[str, list[_Pair]] = {}
    for record in reference.records:
        partner = partners.get(record.key.text)
        if partner is not None and _may_move(record) and record.size == partner.size:
            groups.setdefault(_template(record.key), []).append((record, partner))
    candidates: list[_Candidate] = []
    for pairs in groups.values():
        if _is_final(pairs[0][0].key):
            steps = _steps_of_arguments(pairs[0][0], reference, target) if _differ(pairs) else ()
        else:
            steps = _common_steps(pairs, reference, target)
        if steps:
            places = dict.fromkeys(place_of(record) for record, _ in pairs)
            is_final = _is_final(pairs[0][0].key)
            entries = tuple(_entry(place, steps, len(places), is_final=is_final) for place in places)
            candidates.append(_polled(pairs, steps, entries, reference, target))
    kept = _systematic(candidates, reference, target, lambda record: partners.get(record.key.text))
    return [entry for candidate in kept for entry in candidate.entries]


def without_lone_moves(mapping: ResolvedMapping) -> ResolvedMapping:
    """Take the steps that move elements from entries of equal names, unless a whole port has that layout."""
    candidates: list[_Candidate] = []
    partners: dict[str, Record] = {record.key.text: record for record in mapping.target.records}
    for entry, links in zip(mapping.alignment.entries, mapping.links_by_entry, strict=True):
        partners |= {link.reference[0].key.text: link.target[0] for link in links if link.is_renaming}
        if entry.moves_equal_names:
            pairs = [(link.reference[0], link.target[0]) for link in links]
            if all(
                _may_move(record) and _may_be_moved(record, entry.steps, mapping.reference, mapping.target)
                for record, _ in pairs
            ):
                candidates.append(_polled(pairs, entry.steps, (entry,), mapping.reference, mapping.target))
    kept = _systematic(
        candidates, mapping.reference, mapping.target, lambda record: partners.get(record.key.text)
    )
    confirmed = {id(entry) for candidate in kept for entry in candidate.entries}

    def changed(entry: Entry) -> Entry:
        if not entry.moves_equal_names:
            return entry
        return replace(entry, evidence="rule") if id(entry) in confirmed else replace(entry, steps=())

    return mapping.with_entries(map(changed, mapping.alignment.entries))


def _entry(place: str, steps: tuple[str, ...], count: int, *, is_final: bool) -> Entry:
    reason = f"the same key; the values of most of {count} such places agree after these steps only"
    if is_final:
        reason = "the same key; the target takes an argument of the model in this order of axes, too"
    return Entry((place,), (place,), steps=steps, evidence="rule", reason=reason)


def _template(key: Key) -> str:
    """The place of a key without the numbers of layers."""
    site = ".".join("#" if part.isdigit() else part for part in key.site.split("."))
    slot = key.slot
    if _is_of_cache(key):
        slot = ".".join("#" if part.isdigit() else part for part in slot.split("."))
    return f"{key.rank}/{site}/{slot}"


def _is_of_cache(key: Key) -> bool:
    return any(part in _CACHES for part in key.slot.split(".")[1:2])


def _is_final(key: Key) -> bool:
    """Whether it is of a result of the model that is no cache."""
    return key.site == ROOT_SITE and is_result(key) and not _is_of_cache(key)


def _may_move(record: Record) -> bool:
    """Whether a tensor may have another layout, if it is no result of the model: floats that can be read."""
    key = record.key
    return (
        record.dtype.kind == "float"
        and record.dtype.packed == 1
        and record.stored
        and _LEAST <= record.size <= _MOST
        and not (is_inner(key) or is_gradient(key))
    )


def _may_be_moved(record: Record, steps: tuple[str, ...], reference: Archive, target: Archive) -> bool:
    """Whether a tensor is no result of the model, or has the order of axes of the model's arguments."""
    if not _is_final(record.key):
        return True
    own = _order_of(steps, len(record.shape))
    return own is not None and own == _order_of(
        _steps_of_arguments(record, reference, target), len(record.shape)
    )


def _differ(pairs: Sequence[_Pair]) -> bool:
    """Whether tensors are not the same bit for bit in one shape."""
    return any(not one.digest or (one.digest, one.shape) != (two.digest, two.shape) for one, two in pairs)


def _steps_of_arguments(result: Record, reference: Archive, target: Archive) -> tuple[str, ...]:
    """The steps that give a result the order of axes in which the target is given an argument of the model.

    Arguments of the two models of as many elements belong together, whatever they are called, if steps make
    them equal. A result may have further axes behind theirs, which stay.

    Returns:
        The steps; none if all arguments are given as they are.
    """
    sides = [
        [
            record
            for record in archive.records
            if record.key.site == ROOT_SITE
            and record.key.slot.startswith("input")
            and record.key.step == record.key.call == record.key.rank == 0
            and record.stored
            and record.dtype.packed == 1
            and _LEAST <= record.size <= _MOST
        ]
        for archive in (reference, target)
    ]
    for ours, theirs in itertools.product(*sides):
        if ours.size != theirs.size or len(ours.shape) != len(theirs.shape):
            continue
        order = _order_of(_steps_of((ours, theirs), reference, target), len(ours.shape))
        if order is not None and len(order) <= len(result.shape):
            names = string.ascii_lowercase[: len(result.shape)]
            moved = [names[axis] for axis in (*order, *range(len(order), len(names)))]
            return (f'rearrange "{" ".join(names)} -> {" ".join(moved)}"',)
    return ()


def _order_of(steps: tuple[str, ...], ndim: int) -> tuple[int, ...] | None:
    """The order in which steps leave the axes of a tensor; None if they do anything else, or nothing."""
    sizes = _PRIMES[:ndim]
    if not steps or len(sizes) < ndim:
        return None
    try:
        shapes = Layout.parse(steps).shapes([sizes])
    except UsageError:
        return None
    if len(shapes) != 1 or sorted(shapes[0]) != sorted(sizes):
        return None
    return tuple(map(sizes.index, shapes[0]))


def _common_steps(pairs: Sequence[_Pair], reference: Archive, target: Archive) -> tuple[str, ...]:
    """The steps that make most of those pairs equal that any steps make equal; none if there are none."""
    votes: Counter[tuple[str, ...]] = Counter()
    for number, pair in enumerate(pairs):
        if number == _TRIED and not votes:
            break
        known = next((steps for steps in votes if _is_made_equal(pair, steps, reference, target)), ())
        steps = known or _steps_of(pair, reference, target)
        if steps:
            votes[steps] += 1
    return votes.most_common(1)[0][0] if votes else ()


def _is_made_equal(pair: _Pair, steps: tuple[str, ...], reference: Archive, target: Archive) -> bool:
    """Whether two tensors that differ are equal to rounding after some steps."""
    if pair[0].digest and pair[0].digest == pair[1].digest:
        return False
    after = _residual(pair, steps, reference, target)
    return after is not None and after <= _bound(pair)


def _polled(
    pairs: Sequence[_Pair],
    steps: tuple[str, ...],
    entries: tuple[Entry, ...],
    reference: Archive,
    target: Archive,
) -> _Candidate:
    """The candidate with the pairs that speak for it, those against, and those that say nothing."""
    sides: dict[bool | None, list[_Pair]] = {True: [], False: [], None: []}
    for pair in pairs:
        sides[_is_better_after(pair, steps, reference, target)].append(pair)
    moved, unmoved, others = map(tuple, sides.values())
    return _Candidate(moved, unmoved, others, steps, entries)


def _is_better_after(pair: _Pair, steps: tuple[str, ...], reference: Archive, target: Archive) -> bool | None:
    """Whether two tensors agree far better after steps than before, or far worse; None for neither."""
    after, before = (_residual(pair, each, reference, target) for each in (steps, ()))
    if after is None:
        return None
    bound = _bound(pair)
    if before is None or after * _FAR <= before or after <= bound < before:
        return True
    return False if before * _FAR <= after or before <= bound < after else None


def _steps_of(pair: _Pair, reference: Archive, target: Archive) -> tuple[str, ...]:
    """The steps that alone make two tensors equal to rounding; none if they agree, or never do."""
    ours, theirs = pair
    if ours.digest and ours.digest == theirs.digest and ours.shape == theirs.shape:
        return ()
    bound = _bound(pair)
    one, two = ours.statistics, theirs.statistics
    if one is not None and two is not None and statistics_distance(one, two, ours.size) > bound:
        return ()
    if ours.shape == theirs.shape and _is_equal(pair, reference, target, min(ours.size, _FIRST)):
        return ()
    fit = find_layout([ours], [theirs], (reference, target), bound / _ROUNDINGS)
    if fit is None or not fit.is_proven or fit.residual is None or fit.residual > bound:
        return ()
    return fit.steps if fit.steps and Layout.parse(fit.steps).moves else ()


def _systematic(
    candidates: Sequence[_Candidate],
    reference: Archive,
    target: Archive,
    partner: Callable[[Record], Record | None],
) -> list[_Candidate]:
    """The candidates that most of their pairs bear out, and whose consequences agree."""
    kept = [c for c in candidates if c.moved and len(c.moved) >= len(c.unmoved)]
    if not kept:
        return []
    results: dict[tuple[int, int, int, str], list[Record]] = {}
    for record in reference.records:
        if is_result(record.key):
            key = record.key
            results.setdefault((key.rank, key.step, key.call, key.site), []).append(record)
    agreeing: dict[str, bool] = {}
    in_few_bits = modules_in_few_bits(target.info)

    def agrees(record: Record) -> bool:
        text = record.key.text
        if text not in agreeing:
            other = partner(record)
            agreeing[text] = (
                other is not None
                and other.size == record.size
                and _is_equal(
                    (record, other),
                    reference,
                    target,
                    record.size,
                    _COARSE if other.key.site in in_few_bits else 0.0,
                )
            )
        return agreeing[text]

    def is_harmless(candidate: _Candidate, moved: Iterable[str]) -> bool:
        """Whether it is a layout: what is computed of it agrees, or is wrong before it."""
        unmoved = [ours for ours, _ in candidate.unmoved]
        is_right_without = any(_has_agreeing_results(ours, results, (), agrees) for ours in unmoved)
        if any(_has_agreeing_results(ours, results, moved, agrees) for ours, _ in candidate.moved):
            return not is_right_without or len(candidate.moved) > len(unmoved)
        first = min(ours.order for ours, _ in candidate.moved)
        return not is_right_without and any(ours.order < first for ours in unmoved)

    while True:
        moved = {record.key.text for candidate in kept for record, _ in candidate.pairs}
        harmless = [c for c in kept if is_harmless(c, moved)]
        if len(harmless) == len(kept):
            return kept
        kept = harmless


def _has_agreeing_results(
    record: Record,
    results: Mapping[tuple[int, int, int, str], Sequence[Record]],
    moved: Iterable[str],
    agrees: Callable[[Record], bool],
) -> bool:
    """Whether the nearest module that computes something of a tensor gives results that agree, or are moved.

    Of a parameter or an argument that is the module that has it, of a result the one around it.
    """
    key = record.key
    site = key.site
    if is_result(key) and site != ROOT_SITE:
        site = _around(site)
    while True:
        of_module = results.get((key.rank, key.step, key.call, site)) or results.get(
            (key.rank, key.step, 0, site)
        )
        others = [r for r in of_module or () if not _is_of_cache(r.key)]
        if others:
            return all(r.key.text in moved or agrees(r) for r in others)
        if site == ROOT_SITE:
            return False
        site = _around(site)


def _around(site: str) -> str:
    return site.rpartition(".")[0] or ROOT_SITE


def _bound(pair: _Pair) -> float:
    """The relative error that is rounding."""
    return _ROUNDINGS * max(rounding_of(record) for record in pair)


def _is_equal(pair: _Pair, reference: Archive, target: Archive, count: int, coarse: float = 0.0) -> bool:
    """Whether the first elements of two tensors of one shape can be read, and are equal to rounding.

    Args:
        pair: The tensors.
        reference: The archive of the one.
        target: That of the other.
        count: How many elements.
        coarse: A relative error that counts as rounding, too.
    """
    ours, theirs = pair
    if ours.size > _MOST:
        return False
    try:
        one, two = _first(reference, ours, count), _first(target, theirs, count)
    except OSError:  # the comparison says so
        return False
    both = np.isfinite(one) & np.isfinite(two)
    if not np.array_equal(np.isfinite(one), np.isfinite(two)):
        return False
    error, size = np.linalg.norm(one[both] - two[both]), np.linalg.norm(one[both])
    return bool(error <= max(_bound(pair), coarse) * size)


def _first(archive: Archive, record: Record, count: int) -> Array:
    values: Array = decode(archive.read_range(record, 0, count), record.dtype).astype(np.float64)
    return values


def _residual(pair: _Pair, steps: tuple[str, ...], reference: Archive, target: Archive) -> float | None:
    fit = Fit(steps, (0,), residual=None, other=math.inf, choices=1, is_sure=True)
    return residual(fit, [pair[0]], [pair[1]], (reference, target))
