"""Layouts by rule for runs without a row axis, packed runs, and tensors of last tokens only.

MAX and inference servers lay all tokens of a step along one axis, and compute logits of the last token of
each sequence. An entry whose shapes differ for that reason gets the steps, the evidence `rule`, and a reason
that says what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.alignment.links import Gatherings, Link, place_of
from tensorcap.alignment.mapping import SIDE_NAMES, Alignment, Entry, LeftOver
from tensorcap.alignment.resolution import ResolvedMapping, resolve, resolve_each, resolve_fitting
from tensorcap.alignment.tokens import LAST, VALID, TokenAlignment, TokenRule, token_counters
from tensorcap.wording import conjugated, counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_LAYOUTS: Final = ((), ("unsqueeze 0",), ("squeeze 0",))  # a row axis added or removed
_EXPLANATIONS: Final = {  # of the steps on tokens, in the order in which they are tried
    (VALID,): "the tokens that both sides have",
    (VALID, LAST): "the last token of each sequence, which is all that one side has",
}
_TIMES: Final = 3  # as many tensors must lack the axis as have it: a rule holds throughout a run


def pair_equal_keys(reference: Archive, target: Archive) -> ResolvedMapping | None:
    """Find layouts by rule for records of equal keys and unlike shapes.

    1. If all tensors of one run lack a first axis of one element, each gets `squeeze 0` or `unsqueeze 0`.
    2. The others get token steps, if `match_tokens` finds some.

    Returns:
        Entries for the records that a rule explains; None if there are none.
    """
    targets = {record.key.text: record for record in target.records}
    pairs = [(record, targets[record.key.text]) for record in reference.records if record.key.text in targets]
    unlike = [(record, partner) for record, partner in pairs if record.shape != partner.shape]
    if not unlike:
        return None
    entries = _pair_without_rows(pairs, reference, target)
    explained = {entry.reference[0] for entry in entries}
    places = dict.fromkeys(place_of(record) for record, _ in unlike)
    rest = Alignment(tuple(Entry((place,), (place,)) for place in places if place not in explained))
    resolved, _ = resolve_fitting(rest, reference, target)
    entries += [entry for entry in match_tokens(resolved).alignment.entries if entry.steps]
    return resolve(Alignment(tuple(entries)), reference, target) if entries else None


def match_tokens(mapping: ResolvedMapping) -> ResolvedMapping:
    """Compare the tokens that both sides have, in entries whose shapes differ for that reason.

    1. Entries whose tensors come out in other shapes than the reference's are candidates, if both runs were
       fed the same tokens; of a whole module those of its tensors. Tensors that only lie along other axes
       count if most results do.
    2. Each is tried with `valid_tokens`, then with `last_token`, each alone and with a row axis added or
       removed.
    3. The first steps with which all tensors of the entry fit are taken; `last_token` only if it holds to
       the end of the run.
    4. Arguments of the same calls that no entry has, since their shapes differ, get an entry with the steps
       of the result.
    5. Arguments of the models that say which tokens there are need no counterpart: the tokens are the same.
    """
    if mapping.alignment.tokens is not None:
        return mapping
    original, mapping = mapping, _by_slots(mapping)
    entries, links_by_entry = list(mapping.alignment.entries), mapping.links_by_entry
    unlike = [number for number, links in enumerate(links_by_entry) if not _has_reference_shapes(links)]
    if not unlike:
        return original
    try:
        tokens = TokenAlignment.of(mapping.reference, mapping.target, TokenRule(VALID))
    except (UsageError, OSError):  # nothing says which tokens there are
        return original
    count = len(tokens.pairs)
    if tokens.unequal_given or not count == tokens.reference.count == tokens.target.count:
        return original  # the runs were fed other tokens, which is an error to be reported
    regrouped = [number for number in unlike if _are_regrouped(links_by_entry[number])]
    if len(regrouped) < max(2, _TIMES * _count_in_place(mapping, tokens)):
        unlike = [number for number in unlike if number not in regrouped]
    for token_steps, explanation in _EXPLANATIONS.items():
        for layout in _LAYOUTS:
            steps = (*layout, *token_steps)
            trial = {n: _with_steps(entries[n], steps, f"{explanation}: {tokens.text}") for n in unlike}
            fitting = {n: trial[n] for n in _find_gathered(trial, mapping)}
            if LAST in token_steps and not _are_at_end(fitting, unlike, mapping):
                continue
            for number, entry in fitting.items():
                entries[number] = entry
            unlike = [number for number in unlike if number not in fitting]
    pairs = zip(mapping.alignment.entries, entries, strict=True)
    if all(entry is before for before, entry in pairs):
        return _with_arguments(original)
    return _without_token_counters(_with_arguments(mapping.with_entries(entries)), count)


def _without_token_counters(mapping: ResolvedMapping, count: int) -> ResolvedMapping:
    """The mapping in which masks and starts of sequences are explained: both sides have `count` tokens."""
    counters = [token_counters(archive) for archive in (mapping.reference, mapping.target)]
    left_over: list[LeftOver] = []
    for left in mapping.alignment.left_over:
        places = counters[SIDE_NAMES.index(left.side)]
        explained = tuple(place for place in left.places if place in places and not left.is_explained)
        reason = f"it says which tokens there are, and both sides have the same {count}"
        rest = tuple(place for place in left.places if place not in explained)
        left_over += [replace(left, places=rest)] if rest else []
        left_over += [LeftOver(left.side, explained, reason)] if explained else []
    return replace(mapping, alignment=replace(mapping.alignment, left_over=tuple(left_over)))


def _with_arguments(mapping: ResolvedMapping) -> ResolvedMapping:
    """Add an entry for each argument of which the tokens are matched as those of its result.

    Two arguments belong together if they have one name, or if each is the only one of its call without an
    entry. Their values are no evidence: a tensor of fewer tokens has other statistics.
    """
    ours, theirs = (_arguments(archive) for archive in (mapping.reference, mapping.target))
    linked = [
        {place_of(record) for link in mapping.links for record in (link.target if i else link.reference)}
        for i in range(len(SIDE_NAMES))
    ]
    trial: dict[int, Entry] = {}
    for entry, links in zip(mapping.alignment.entries, mapping.links_by_entry, strict=True):
        if not entry.token_steps or not any(link.gathers for link in links):
            continue
        sites = {(link.reference[0].key.site, link.target[0].key.site) for link in links}
        for one, other in sorted(sites):
            free = [
                [place for slot in slots.get(site, ()) if (place := f"{site}/{slot}") not in side]
                for slots, site, side in zip((ours, theirs), (one, other), linked, strict=True)
            ]
            for place, partner in _partners(*free):
                reason = f"an argument of a result that has {_EXPLANATIONS[entry.token_steps]}"
                own = Entry((place,), (partner,), steps=entry.steps, evidence="rule", reason=reason)
                trial[len(trial)] = own
    fitting = [trial[number] for number in _find_gathered(trial, mapping)]
    if not fitting:
        return mapping
    placed = (
        {place for entry in fitting for place in entry.reference},
        {place for entry in fitting for place in entry.target},
    )
    left_over = []
    for left in mapping.alignment.left_over:
        rest = tuple(place for place in left.places if place not in placed[SIDE_NAMES.index(left.side)])
        if rest:
            left_over.append(replace(left, places=rest))
    alignment = replace(mapping.alignment, left_over=tuple(left_over))
    entries = (*alignment.entries, *fitting)
    return resolve(replace(alignment, entries=entries), mapping.reference, mapping.target)


def _partners(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    """Pair the places of arguments of two calls: those of equal slots, or the only one of each."""
    slots = {place.rpartition("/")[2]: place for place in theirs}
    pairs = [(place, slots[slot]) for place in ours if (slot := place.rpartition("/")[2]) in slots]
    return pairs or ([(ours[0], theirs[0])] if len(ours) == len(theirs) == 1 else [])


def _arguments(archive: Archive) -> dict[str, list[str]]:
    """The slots of the arguments of each module but the model itself."""
    slots: dict[str, dict[str, None]] = {}
    for record in archive.records:
        if record.key.slot.startswith("input") and record.key.site != ROOT_SITE and not record.key.rank:
            slots.setdefault(record.key.site, {})[record.key.slot] = None
    return {site: [*names] for site, names in slots.items()}


def _by_slots(mapping: ResolvedMapping) -> ResolvedMapping:
    """Split entries of whole modules if some of their tensors have the reference's shapes: these stay.

    A model returns logits of last tokens, and its ids and its mask are whole: a mask of which padding is left
    out would no longer say what is padding.
    """
    entries: list[Entry] = []
    for entry, links in zip(mapping.alignment.entries, mapping.links_by_entry, strict=True):
        is_plain = not (entry.steps or entry.dims or entry.variables)
        if not is_plain or {place.count("/") for place in (*entry.reference, *entry.target)} != {0}:
            entries.append(entry)
            continue
        pairs: dict[tuple[str, str], list[Link]] = {}
        for link in links:
            if len(link.reference) == len(link.target) == 1:
                pairs.setdefault((place_of(link.reference[0]), place_of(link.target[0])), []).append(link)
        fit = [_has_reference_shapes(of_pair) for of_pair in pairs.values()]
        if all(fit) or not any(fit) or sum(map(len, pairs.values())) < len(links):
            entries.append(entry)
            continue
        entries += [replace(entry, reference=(one,), target=(other,)) for one, other in pairs]
    return mapping.with_entries(entries)


def _find_gathered(trial: Mapping[int, Entry], mapping: ResolvedMapping) -> list[int]:
    """Find the entries, by number, that match tokens, and whose tensors of the same places have one shape."""
    alignment = Alignment(tuple(trial.values()))
    gatherings = Gatherings(None, mapping.reference, mapping.target)
    outcomes = resolve_each(alignment, mapping.reference, mapping.target, gatherings)
    return [
        number
        for number, (_, links) in zip(trial, outcomes, strict=True)
        if not isinstance(links, UsageError)
        and any(link.gathers for link in links)
        and _has_reference_shapes(links)
    ]


def _with_steps(entry: Entry, steps: tuple[str, ...], reason: str) -> Entry:
    reason = f"{entry.reason}; {reason}" if entry.reason else reason
    return replace(entry, steps=steps, evidence="rule", reason=reason)


def _are_regrouped(links: Iterable[Link]) -> bool:
    """Whether the tensors have equal numbers of elements, only along other axes."""
    return all(
        math.prod(shape) == record.size
        for link in links
        for shape, record in zip(link.shapes, link.reference, strict=True)
    )


def _count_in_place(mapping: ResolvedMapping, tokens: TokenAlignment) -> int:
    """Count the results that have rows and positions along the same two axes on both sides."""
    targets = {record.key.text: record.shape for record in mapping.target.records}
    pairs = [(record, targets.get(record.key.text)) for record in mapping.reference.records]
    for entry, links in zip(mapping.alignment.entries, mapping.links_by_entry, strict=True):
        if not entry.steps:
            pairs += [(link.reference[0], link.target[0].shape) for link in links]
    grids = tokens.reference.grids
    return sum(
        record.key.slot.startswith("output")
        and record.shape == shape
        and len(grids.get(record.key.step, ())) == 2
        and record.shape[:2] == grids[record.key.step]
        for record, shape in pairs
    )


def _pair_without_rows(
    pairs: Sequence[tuple[Record, Record]], reference: Archive, target: Archive
) -> list[Entry]:
    """Make entries for all tensors that differ in a first axis of one element, if most of a run do."""
    with_rows = sum(
        record.shape == partner.shape and record.shape[:1] == (1,) and len(record.shape) > 1
        for record, partner in pairs
        if record.key.slot.startswith("output")
    )
    least = 1 if "max" in (reference.info.framework, target.info.framework) else 2
    entries: list[Entry] = []
    for side, step in (("target", "unsqueeze 0"), ("reference", "squeeze 0")):
        without_rows = [
            record
            for record, partner in pairs
            if (
                record.shape == (1, *partner.shape)
                if side == "target"
                else (1, *record.shape) == partner.shape
            )
        ]
        if len(without_rows) < max(least, _TIMES * with_rows):
            continue
        tensors, have = counted(len(without_rows), "tensor"), conjugated(len(without_rows), "have")
        reason = f"{tensors} of the {side} {have} no axis for rows, "
        reason += f"{with_rows} {conjugated(with_rows, 'have')} one"
        places = dict.fromkeys(place_of(record) for record in without_rows)
        trial = [Entry((p,), (p,), steps=(step,), evidence="rule", reason=reason) for p in places]
        resolved, _ = resolve_fitting(Alignment(tuple(trial)), reference, target)
        outcomes = zip(resolved.alignment.entries, resolved.links_by_entry, strict=True)
        entries += [entry for entry, links in outcomes if _has_reference_shapes(links)]
    return entries


def _are_at_end(fitting: Iterable[int], unlike: Iterable[int], mapping: ResolvedMapping) -> bool:
    """Whether a run has last tokens only from some module on: no result with all tokens follows.

    Args:
        fitting: Numbers of the entries whose target has last tokens only.
        unlike: Numbers of all entries of unlike shapes, which do not count as results with all tokens.
        mapping: The entries.
    """
    if not mapping.reference.is_ordered:
        return True
    first: dict[int, int] = {}
    for record in _references(fitting, mapping):
        first[record.key.step] = min(first.get(record.key.step, record.order), record.order)
    others = {record.key.text for record in _references(unlike, mapping)}
    return not any(
        record.order > first.get(record.key.step, record.order)
        and record.key.slot == "output"
        and record.key.site != ROOT_SITE
        and record.key.text not in others
        and record.key.text in mapping.target
        for record in mapping.reference.records
    )


def _references(numbers: Iterable[int], mapping: ResolvedMapping) -> Iterator[Record]:
    """The reference's records of some entries."""
    for number in numbers:
        for link in mapping.links_by_entry[number]:
            yield from link.reference


def _has_reference_shapes(links: Iterable[Link]) -> bool:
    """Whether all tensors that come out have the reference's shapes; those of matched tokens do."""
    return all(
        shape == record.shape
        for link in links
        if not link.gathers
        for shape, record in zip(link.shapes, link.reference, strict=True)
    )
