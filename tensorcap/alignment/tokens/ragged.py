"""Runs without an axis for rows, packed ones, and tensors of last tokens: what rules say of unlike shapes.

MAX and servers give all tokens of a step along one axis, and make logits of the last token of each sequence.
What is taken for equal is an entry with its steps, its evidence is `rule`, and its reason says what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.alignment.links import Link
from tensorcap.alignment.mapping import Alignment, Entry
from tensorcap.alignment.resolution import resolve_each
from tensorcap.alignment.tokens.alignment import LAST, VALID, TokenAlignment, TokenRule
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

_Pair = tuple[Record, Record]

_LAYOUTS: Final = ((), ("unsqueeze 0",), ("squeeze 0",))
_TOKENS: Final = {
    (VALID,): "the tokens that both sides have",
    (VALID, LAST): "the last token of each sequence, which is all that one side has",
}
_TIMES: Final = 3  # as many tensors lack the axis as have it


def by_equal_keys(reference: Archive, target: Archive) -> Alignment:
    """Entries for records of equal keys and unlike shapes of which a rule says how they are laid out.

    Args:
        reference: The trusted archive.
        target: The archive under test.
    """
    theirs = {record.key.text: record for record in target.records}
    pairs = [(ours, theirs[ours.key.text]) for ours in reference.records if ours.key.text in theirs]
    unlike = [(ours, other) for ours, other in pairs if ours.shape != other.shape]
    if not unlike:
        return Alignment(())
    entries = _without_rows(pairs, reference, target)
    known = {entry.reference[0] for entry in entries}
    rest = {place: Entry((place,), (place,)) for one, _ in unlike if (place := _place(one.key)) not in known}
    found = with_tokens(Alignment(tuple(rest.values())), reference, target)
    return Alignment((*entries, *(entry for entry in found.entries if entry.steps)))


def with_tokens(alignment: Alignment, reference: Archive, target: Archive) -> Alignment:
    """A mapping whose entries of unlike shapes compare the tokens that both sides have, if ids are known.

    Args:
        alignment: The mapping.
        reference: The trusted archive.
        target: The archive under test.
    """
    if alignment.tokens is not None:
        return alignment
    resolved = [links for _, links in resolve_each(alignment, reference, target)]
    unlike = [n for n, links in enumerate(resolved) if not isinstance(links, UsageError) and not _fit(links)]
    if not unlike:
        return alignment
    try:
        tokens = TokenAlignment.of(reference, target, TokenRule(VALID))
    except UsageError:  # nothing says which tokens there are
        return alignment
    count = len(tokens.pairs)
    if tokens.unequal_ids or not count == tokens.reference.count == tokens.target.count:
        return alignment  # the runs were fed other tokens, which is an error to be found
    regrouped = [n for n in unlike if _are_regrouped(resolved[n])]
    if len(regrouped) < max(2, _TIMES * _in_place(alignment, resolved, reference, target, tokens)):
        unlike = [n for n in unlike if n not in regrouped]
    entries = list(alignment.entries)
    for how, what in _TOKENS.items():
        for layout in _LAYOUTS:
            tried = Alignment(tuple(_told(entries[n], (*layout, *how), what, tokens) for n in unlike))
            found = zip(unlike, resolve_each(tried, reference, target), strict=True)
            taken = {
                n: (entry, links)
                for n, (entry, links) in found
                if not isinstance(links, UsageError) and all(link.gathers for link in links)
            }
            if LAST in how and not _are_at_end(taken, resolved, unlike, reference, target):
                continue
            for n, (entry, _) in taken.items():
                entries[n] = entry
            unlike = [n for n in unlike if n not in taken]
    return replace(alignment, entries=tuple(entries))


def _are_regrouped(links: Iterable[Link] | UsageError) -> bool:
    """Whether the tensors have as many elements, which only lie along other axes."""
    return not isinstance(links, UsageError) and all(
        math.prod(shape) == record.size
        for link in links
        for shape, record in zip(link.shapes, link.reference, strict=True)
    )


def _in_place(
    alignment: Alignment,
    resolved: Sequence[Sequence[Link] | UsageError],
    reference: Archive,
    target: Archive,
    tokens: TokenAlignment,
) -> int:
    """How many results have rows and positions along the same two axes of both sides."""
    theirs = {record.key.text: record.shape for record in target.records}
    pairs = [(record, theirs.get(record.key.text)) for record in reference.records]
    for entry, links in zip(alignment.entries, resolved, strict=True):
        if not isinstance(links, UsageError) and not entry.steps:
            pairs += [(link.reference[0], link.target[0].shape) for link in links]
    grids = tokens.reference.grids
    return sum(
        record.key.slot.startswith("output")
        and record.shape == other
        and len(grids.get(record.key.step, ())) == 2
        and record.shape[:2] == grids[record.key.step]
        for record, other in pairs
    )


def _without_rows(pairs: Sequence[_Pair], reference: Archive, target: Archive) -> list[Entry]:
    """Entries for all that differ in a first axis of one element, if that is so throughout a run."""
    having = sum(
        ours.shape == other.shape and ours.shape[:1] == (1,) and len(ours.shape) > 1
        for ours, other in pairs
        if ours.key.slot.startswith("output")
    )
    least = 1 if "max" in (reference.info.framework, target.info.framework) else 2
    found = []
    for lacks, step in (("target", "unsqueeze 0"), ("reference", "squeeze 0")):
        lacking = [
            ours
            for ours, other in pairs
            if (ours.shape == (1, *other.shape) if lacks == "target" else (1, *ours.shape) == other.shape)
        ]
        if len(lacking) < max(least, _TIMES * having):
            continue
        reason = f"{len(lacking)} tensors of the {lacks} have no axis for rows, {having} have one"
        places = dict.fromkeys(_place(record.key) for record in lacking)
        entries = [Entry((p,), (p,), steps=(step,), evidence="rule", reason=reason) for p in places]
        resolved = resolve_each(Alignment(tuple(entries)), reference, target)
        found += [entry for entry, links in resolved if not isinstance(links, UsageError) and _fit(links)]
    return found


def _are_at_end(
    taken: Iterable[int],
    resolved: Sequence[Sequence[Link] | UsageError],
    unlike: Iterable[int],
    reference: Archive,
    target: Archive,
) -> bool:
    """Whether a run has its last tokens only from some module on: no result with all tokens follows."""
    if not reference.is_ordered:
        return True
    first: dict[int, int] = {}
    for record in _records(taken, resolved):
        first[record.key.step] = min(first.get(record.key.step, record.order), record.order)
    others = {record.key.text for record in _records(unlike, resolved)}
    return not any(
        record.order > first.get(record.key.step, record.order)
        and record.key.slot == "output"
        and record.key.site != ROOT_SITE
        and record.key.text not in others
        and record.key.text in target
        for record in reference.records
    )


def _records(entries: Iterable[int], resolved: Sequence[Sequence[Link] | UsageError]) -> Iterator[Record]:
    """The reference's records of some entries."""
    for number in entries:
        links = resolved[number]
        for link in () if isinstance(links, UsageError) else links:
            yield from link.reference


def _told(entry: Entry, steps: tuple[str, ...], what: str, tokens: TokenAlignment) -> Entry:
    reason = f"{entry.reason}; {what}" if entry.reason else what
    return replace(entry, steps=steps, evidence="rule", reason=f"{reason}: {tokens.text}")


def _fit(links: Iterable[Link]) -> bool:
    """Whether all tensors that come out have the reference's shapes."""
    return all(
        shape == record.shape
        for link in links
        if not link.gathers
        for shape, record in zip(link.shapes, link.reference, strict=True)
    )


def _place(key: Key) -> str:
    """The place of a key in a mapping, of any step and call."""
    rank = f"rank{key.rank}/" if key.rank else ""
    return f"{rank}{key.site}/{key.slot}" if key.slot else key.site
