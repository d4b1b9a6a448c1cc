"""Results that a name says nothing of: both runs hold a tensor bit for bit, under other names.

A table that was one of two modules is a call of one module, or hidden states are counted from another layer.
Names pair what differs then, though values say which is which. They outweigh a name only if a third pair, of
equal names, holds them too: what was computed is used for the same purpose. So a mistake that exchanges two
results stays one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from tensorcap.alignment.links import place_of
from tensorcap.alignment.mapping import Alignment, Entry
from tensorcap.alignment.resolution import ResolvedMapping, resolve
from tensorcap.runs import Contents, contents_of, is_result, is_telling
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record

_REASON: Final = "equal bit for bit, which the records of equal names are not"


def pair_moved_results(
    reference: Archive, target: Archive, mapping: ResolvedMapping | None
) -> ResolvedMapping | None:
    """Pair results that are equal bit for bit and that a mapping, or equal keys, pair with something else.

    1. Results whose partner differs, is no result, or is not there, are looked up by their contents.
    2. They are paired if as many of the reference as of the target have these contents, in their order; and
       if one has a partner already, only if another pair of both sides has them too.
    3. Calls whose results all moved alike are one entry, with their arguments.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: What is paired so far, besides equal keys.

    Returns:
        The mapping with an entry for each call or result that moved; as it was if there is none.
    """
    has_digests = reference.trusts_digests and target.trusts_digests
    if not has_digests or reference.algorithm != target.algorithm or target.info.injected is not None:
        return mapping
    if not (reference.info.modules and target.info.modules):  # values alone pair no files from elsewhere
        return mapping
    if not _may_have_moved(reference, target):
        return mapping
    entries = _entries(reference, target, _moved(reference, target, mapping))
    if not entries:
        return mapping
    before = Alignment(()) if mapping is None else mapping.alignment
    return resolve(replace(before, entries=(*entries, *before.entries)), reference, target)


def _may_have_moved(reference: Archive, target: Archive) -> bool:
    """Whether the target may hold a result of the reference in another place; quick if keys are equal."""
    digests = {record.digest for record in target.records}
    if len(reference) != len(target):
        return any(record.digest in digests for record in reference.records)
    return any(
        ours.digest in digests
        and (ours.digest != theirs.digest or ours.key != theirs.key)
        and is_result(ours.key)
        for ours, theirs in zip(reference.records, target.records, strict=True)
    )


def _moved(
    reference: Archive, target: Archive, mapping: ResolvedMapping | None
) -> Iterator[tuple[Record, Record]]:
    """The results that moved, in the order of the reference."""
    links = mapping.links if mapping is not None else ()
    linked = {
        ours.key.text: theirs
        for link in links
        if link.is_renaming
        for ours, theirs in zip(link.reference, link.target, strict=True)
    }
    computed = {r.key.text for link in links if not link.is_renaming for r in link.reference}
    used = {record.key.text for link in links for record in link.target}
    by_key = {record.key.text: record for record in target.records if record.key.text not in used}
    settled = {r.key.text for link in links if not link.is_renaming for r in link.target}
    named: set[str] = set()  # the target's records that differ from the reference's of their name
    witnesses: set[Contents] = set()
    free: dict[Contents, list[Record]] = defaultdict(list)
    for record in reference.records:
        text, contents = record.key.text, contents_of(record)
        if text in computed:
            continue
        partner = linked.get(text) or by_key.get(text) or by_key.get(target.canonical(text))
        is_equal = partner is not None and contents_of(partner) == contents
        if is_equal:
            witnesses.add(contents)
        if partner is not None and is_equal and is_result(partner.key) == is_result(record.key):
            settled.add(partner.key.text)
        elif is_result(record.key) and is_telling(record):
            free[contents].append(record)
            if partner is not None and not is_equal:
                named |= {text, partner.key.text}
    candidates: dict[Contents, list[Record]] = defaultdict(list)
    for record in target.records if free else ():
        if is_result(record.key) and record.key.text not in settled and contents_of(record) in free:
            candidates[contents_of(record)].append(record)
    for contents, ours in free.items():
        theirs = candidates.get(contents, [])
        is_named = any(record.key.text in named for record in (*ours, *theirs))
        if len(ours) == len(theirs) and (contents in witnesses or not is_named):
            yield from zip(ours, theirs, strict=True)


def _entries(
    reference: Archive, target: Archive, moved: Iterable[tuple[Record, Record]]
) -> tuple[Entry, ...]:
    """Entries of calls and results that moved, alike in all steps."""
    sizes = [_counts(archive) for archive in (reference, target)]
    by_call: dict[tuple[str, str], list[tuple[Record, Record]]] = defaultdict(list)
    for record, partner in moved:
        by_call[record.key.where, partner.key.where].append((record, partner))
    places: dict[str, set[str]] = defaultdict(set)
    for (call, other), records in by_call.items():
        is_whole = sizes[0][call] == len(records) == sizes[1][other]
        is_whole &= all(record.key.slot == partner.key.slot for record, partner in records)
        for record, partner in records[:1] if is_whole else records:
            ours, theirs = (_place(each, is_whole=is_whole) for each in (record, partner))
            places[ours].add(theirs)
    partners = Counter(theirs for others in places.values() for theirs in others)
    return tuple(
        Entry((ours,), tuple(others), evidence="values", reason=_REASON)
        for ours, others in places.items()
        if len(others) == 1 and partners[next(iter(others))] == 1
    )


def _counts(archive: Archive) -> Mapping[str, int]:
    """How many results each call has."""
    counts: dict[str, int] = defaultdict(int)
    for record in archive.records:
        if is_result(record.key):
            counts[record.key.where] += 1
    return counts


def _place(record: Record, *, is_whole: bool) -> str:
    """The place of a record, or of its call, with the number of the call."""
    site, _, slot = place_of(record).rpartition("/")
    call = f"{site}@{record.key.call}"
    return call if is_whole else f"{call}/{slot}"
