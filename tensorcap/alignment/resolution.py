"""Resolve a mapping on two archives: which records of the target make which records of the reference.

A mapping is resolved once; its users pass on the `ResolvedMapping`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.alignment.layout import Layout
from tensorcap.alignment.links import Gatherings, Link, LinkMaker
from tensorcap.alignment.mapping import SIDE_NAMES, Alignment, Entry
from tensorcap.alignment.tokens import TokenAlignment
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

# What the main tensor of a structured result is called, the first that is there (a block's hidden states).
_MAIN: Final = ("output", "output.hidden_states", "output.last_hidden_state", "output.0", "output.logits")

_NEAR: Final = 0.02  # of the largest value: what rounding to bfloat16 does over many layers
_RANK: Final = re.compile(r"rank[1-9][0-9]*/")
_CALL: Final = re.compile(r"(.+)@(0|[1-9][0-9]*)")
_NAMED: Final = -1  # stands for the number of a call that a place names

Place = tuple[str, str, str]  # site, with its rank, slot and number of the call; "" for all of them


class _Side:
    """The records of one archive by site."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._by_site: dict[str, list[Record]] = {}
        for record in archive.records:
            site = record.key.site if record.key.is_bare else _ranked(record.key.rank, record.key.site)
            self._by_site.setdefault(site, []).append(record)
        self._ranks = sorted({record.key.rank for record in archive.records})

    def places(self, place: str) -> list[Place]:
        """What a place says; several for `rank*/`."""
        head, slash, rest = place.partition("/")
        if head == "rank*" and slash:
            return [self._place(_ranked(rank, rest)) for rank in self._ranks]
        return [self._place(place)]

    def _place(self, place: str) -> Place:
        if place in self._by_site:
            return place, "", ""
        rank = _RANK.match(place)
        site, _, slot = place[rank.end() if rank else 0 :].partition("/")
        call = _CALL.fullmatch(site)
        return (rank[0] if rank else "") + (call[1] if call else site), slot, call[2] if call else ""

    def records(self, site: str) -> list[Record]:
        """The records of a site, those of a shared module under any of its names."""
        records = self._by_site.get(site)
        if records is None:
            aliases = self.archive.info.aliases
            records = self._by_site.get(aliases.get(site, site), [])
        return records


def _ranked(rank: int, site: str) -> str:
    return f"rank{rank}/{site}" if rank else site


@dataclass(frozen=True, slots=True)
class ResolvedMapping:
    """A mapping on two archives, with the records that each entry links.

    Attributes:
        alignment: The entries, and the places without a counterpart.
        reference: The trusted archive.
        target: The archive under test.
        links_by_entry: The links of each entry, in the order of the entries.
        tokens: Which tokens are compared with which; empty if positions are the same on both sides.
    """

    alignment: Alignment
    reference: Archive
    target: Archive
    links_by_entry: tuple[tuple[Link, ...], ...]
    tokens: tuple[TokenAlignment, ...] = ()

    @property
    def links(self) -> list[Link]:
        """The links of all entries."""
        return [link for links in self.links_by_entry for link in links]

    def with_entries(self, entries: Iterable[Entry]) -> ResolvedMapping:
        """Replace the entries; they are resolved anew only if one of them differs.

        Raises:
            UsageError: As for `resolve`.
        """
        changed = replace(self.alignment, entries=tuple(entries))
        return self if changed == self.alignment else resolve(changed, self.reference, self.target)


def resolve(alignment: Alignment, reference: Archive, target: Archive) -> ResolvedMapping:
    """Find the records of all entries, and check their shapes; few tensors are read, see `_pair_bare`.

    Raises:
        UsageError: An entry fits no record of a side; the shapes contradict its steps; it maps a record that
            another one maps already; or tokens are to be matched and cannot be.
        ReadError: Ids or masks cannot be read.
    """
    gatherings = Gatherings(alignment.tokens, reference, target)
    links_by_entry: list[tuple[Link, ...]] = []
    for _, links in resolve_each(alignment, reference, target, gatherings):
        if isinstance(links, UsageError):
            raise links
        links_by_entry.append(tuple(links))
    return ResolvedMapping(alignment, reference, target, tuple(links_by_entry), gatherings.alignments)


def resolve_fitting(
    alignment: Alignment, reference: Archive, target: Archive
) -> tuple[ResolvedMapping, list[tuple[Entry, UsageError]]]:
    """Resolve the entries that fit two archives.

    Returns:
        The mapping without the entries that do not fit, and those with the error that says why.
    """
    gatherings = Gatherings(alignment.tokens, reference, target)
    entries: list[Entry] = []
    links_by_entry: list[tuple[Link, ...]] = []
    refusals: list[tuple[Entry, UsageError]] = []
    for entry, links in resolve_each(alignment, reference, target, gatherings):
        if isinstance(links, UsageError):
            refusals.append((entry, links))
        else:
            entries.append(entry)
            links_by_entry.append(tuple(links))
    fitting = replace(alignment, entries=tuple(entries))
    resolved = ResolvedMapping(fitting, reference, target, tuple(links_by_entry), gatherings.alignments)
    return resolved, refusals


def resolve_each(
    alignment: Alignment, reference: Archive, target: Archive, gatherings: Gatherings
) -> list[tuple[Entry, list[Link] | UsageError]]:
    """Find the links of each entry, or the error that says why it has none.

    Entries that name a call go before the others, which are of the calls that those leave.
    """
    sides, mapped = (_Side(reference), _Side(target)), _Mapped()
    outcomes: dict[int, list[Link] | UsageError] = {}
    for number, entry in sorted(enumerate(alignment.entries), key=lambda item: not item[1].names_call):
        try:
            outcomes[number] = _links(entry, sides, LinkMaker(entry, gatherings.for_entry(entry)), mapped)
        except UsageError as error:
            outcomes[number] = error
    return [(entry, outcomes[number]) for number, entry in enumerate(alignment.entries)]


class _Mapped:
    """The records that entries have linked so far."""

    def __init__(self) -> None:
        self._references: dict[str, Entry] = {}
        self._of_calls: set[tuple[int, str]] = set()  # those of entries that name a call, with their side

    def add(self, entry: Entry, links: Sequence[Link]) -> None:
        """Add the links of an entry."""
        self._references |= {record.key.text: entry for link in links for record in link.reference}
        if entry.names_call:
            for link in links:
                self._of_calls |= {(0, record.key.text) for record in link.reference}
                self._of_calls |= {(1, record.key.text) for record in link.target}

    def goes_before(self, entry: Entry, link: Link) -> bool:
        """Whether an entry that names a call has a record of a link of one that names none.

        Raises:
            UsageError: Another entry has one, which goes before none.
        """
        sides = enumerate((link.reference, link.target))
        if not entry.names_call and any(
            (i, record.key.text) in self._of_calls for i, side in sides for record in side
        ):
            return True
        for record in link.reference:
            before = self._references.get(record.key.text)
            if before is not None:
                where = f", at {before.where}" if before.where else f" by {before.text}"
                raise entry.refuse(f"{record.key.text} is mapped already{where}")
        return False


def _links(entry: Entry, sides: tuple[_Side, _Side], making: LinkMaker, mapped: _Mapped) -> list[Link]:
    """The links of an entry, none of whose records of the reference others have mapped."""
    possible: list[Link] = []
    are_there = dict.fromkeys(SIDE_NAMES, False)
    for names in entry.expanded():
        placed = [
            [place for name in side_names for place in side.places(name)]
            for side, side_names in zip(sides, names, strict=True)
        ]
        for side_name, side, places in zip(SIDE_NAMES, sides, placed, strict=True):
            are_there[side_name] |= any(side.records(site) for site, *_ in places)
        for ours, theirs in _groups(sides, placed[0], placed[1], making.steps, entry.layout()):
            link = making.link(ours, theirs)
            if link is not None:
                possible.append(link)
    if not possible:
        lacking = [name for name, is_there in are_there.items() if not is_there]
        if lacking:
            raise entry.refuse(f"fits no record of the {' and none of the '.join(lacking)}")
        raise entry.refuse("both sides have records there, but none with the same step and call")
    links = [link for link in possible if not mapped.goes_before(entry, link)]
    mapped.add(entry, links)
    return links


def _groups(
    sides: tuple[_Side, _Side],
    reference: Sequence[Place],
    target: Sequence[Place],
    steps_of: Callable[[int], tuple[int, ...]],
    layout: Layout,
) -> Iterable[tuple[tuple[Record, ...], list[tuple[Record, ...]]]]:
    """Records of all places, for each step and call of the reference and the target's steps for it."""
    by_call = [_calls(sides[0].records(site), slot, call) for site, slot, call in reference]
    target_by_call = [_calls(sides[1].records(site), slot, call) for site, slot, call in target]
    if not by_call or not target_by_call:
        return
    if len(by_call) == len(target_by_call) == 1 and _is_bare(by_call[0]) != _is_bare(target_by_call[0]):
        pair = _pair_bare((sides[0].archive, sides[1].archive), (by_call[0], target_by_call[0]), layout)
        if pair is not None:
            yield (pair[0],), [(pair[1],)]
        return
    for (step, call), slots in by_call[0].items():
        calls = [(target_call, call) for target_call in steps_of(step)]
        if not all((step, call) in place for place in by_call) or not calls:
            continue
        if not all(target_call in place for target_call in calls for place in target_by_call):
            continue
        if len(by_call) == len(target_by_call) == 1:
            target_slots = [target_by_call[0][target_call] for target_call in calls]
            for record_of_slot, partner in pair_slots(slots, target_slots[0], layout):
                further = [of_step.get(partner.key.slot) for of_step in target_slots[1:]]
                if all(further):
                    yield (record_of_slot,), [(partner,), *((record,) for record in further if record)]
        else:
            mains = [main_of(place[step, call]) for place in by_call]
            target_mains = [
                [main_of(place[target_call]) for place in target_by_call] for target_call in calls
            ]
            if all(mains) and all(record for run in target_mains for record in run):
                yield tuple(filter(None, mains)), [tuple(filter(None, run)) for run in target_mains]


_ByCall = dict[tuple[int, int], dict[str, Record]]


def _is_bare(by_call: _ByCall) -> bool:
    """Whether it is a tensor of a file from elsewhere, which has a name and neither step nor slot."""
    return any(record.key.is_bare for slots in by_call.values() for record in slots.values())


def _pair_bare(
    archives: tuple[Archive, Archive], by_call: tuple[_ByCall, _ByCall], layout: Layout
) -> tuple[Record, Record] | None:
    """Pair a tensor that has only a name with a record of the place that it belongs to.

    1. Any step, call and slot of the place may be meant: of results if there are some, main ones first.
    2. Those count of which the layout makes the other's shape, or all main ones if it makes it of none.
    3. Of several it is the first with nearly the same values, or the first of all.

    Args:
        archives: The reference and the target.
        by_call: Records of the place in each, by step and call, and by slot.
        layout: From the target's tensor to the reference's.
    """
    if not by_call[0] or not by_call[1]:
        return None
    is_first = _is_bare(by_call[0])
    bare = next(iter(next(iter(by_call[1 - is_first].values())).values()))
    calls = list(by_call[is_first].values())
    mains = [main for slots in calls if (main := main_of(_results(slots))) is not None]
    results = [record for slots in calls for record in _results(slots).values()]
    kinds = [mains, results] if mains else [results or [r for slots in calls for r in slots.values()]]

    def paired(record: Record) -> tuple[Record, Record]:
        return (bare, record) if is_first else (record, bare)

    fitting = [[record for record in kind if _fits(layout, *paired(record))] for kind in kinds]
    candidates = next(filter(None, fitting), kinds[0])
    pairs = map(paired, candidates)
    near = (pair for pair in pairs if len(candidates) > 1 and _are_near(archives, pair, layout))
    return next(near, paired(candidates[0]))


def _results(slots: Mapping[str, Record]) -> dict[str, Record]:
    return {slot: record for slot, record in slots.items() if slot.partition(".")[0] == "output"}


def _are_near(archives: tuple[Archive, Archive], pair: tuple[Record, Record], layout: Layout) -> bool:
    """Whether the values of a pair differ by no more than rounding."""
    if not all(record.stored for record in pair) or not _fits(layout, *pair):
        return False
    try:
        stored = [archive.read(record) for archive, record in zip(archives, pair, strict=True)]
        outputs, dtype = layout.apply([stored[1]], [pair[1].dtype])
    except (ReadError, UsageError):
        return False
    reference, target = decode(stored[0], pair[0].dtype), decode(outputs[0], dtype)
    scale = float(np.abs(reference).max(initial=0))
    return np.allclose(target, reference, rtol=0, atol=_NEAR * scale, equal_nan=True)


def _calls(records: Iterable[Record], slot: str, call: str) -> dict[tuple[int, int], dict[str, Record]]:
    """Records by step and call, then by slot; of one slot or call only, if one is named."""
    calls: dict[tuple[int, int], dict[str, Record]] = {}
    for record in records:
        key: Key = record.key
        if (not slot or key.slot == slot) and (not call or key.call == int(call)):
            calls.setdefault((key.step, _NAMED if call else key.call), {})[key.slot] = record
    return calls


def main_of(slots: dict[str, Record]) -> Record | None:
    """The one record there is, or the main result of a call."""
    if len(slots) == 1:
        return next(iter(slots.values()))
    return next((slots[name] for name in _MAIN if name in slots), None)


def pair_slots(
    reference: dict[str, Record], target: dict[str, Record], layout: Layout
) -> list[tuple[Record, Record]]:
    """Pair what two calls took and gave.

    Equal names belong together. Of what is left, one result and one argument on each side do: the main
    result, and an argument that alone is left, or alone has its shape. A layout is that of the main results;
    besides those, it pairs what it moves no element of and brings to the other's shape.
    """
    pairs = _paired(reference, target)
    if not layout.steps or len(pairs) == 1:
        return pairs
    mains = main_of(reference), main_of(target)
    return [pair for pair in pairs if pair == mains or (not layout.moves and _fits(layout, *pair))]


def _fits(layout: Layout, reference: Record, target: Record) -> bool:
    try:
        return layout.shapes([target.shape]) == (reference.shape,)
    except UsageError:
        return False


def _paired(reference: dict[str, Record], target: dict[str, Record]) -> list[tuple[Record, Record]]:
    """Pairs by names, kinds and shapes."""
    pairs = [(record, target[name]) for name, record in reference.items() if name in target]
    if len(reference) == len(target) == 1 and not pairs:
        return [(next(iter(reference.values())), next(iter(target.values())))]
    for kind in ("output", "input"):
        unpaired, target_unpaired = (
            {n: r for n, r in side.items() if n.partition(".")[0] == kind and n not in opposite}
            for side, opposite in ((reference, target), (target, reference))
        )
        main, target_main = main_of(unpaired), main_of(target_unpaired)
        if len(unpaired) == len(target_unpaired) == 1 or kind == "output":
            if main is not None and target_main is not None:
                pairs.append((main, target_main))
        else:
            pairs += _by_shape(unpaired.values(), target_unpaired.values())
    return pairs


def _by_shape(reference: Iterable[Record], target: Iterable[Record]) -> list[tuple[Record, Record]]:
    """Pairs of records whose shape and dtype no other record of their side has."""
    sides = []
    for records in (reference, target):
        by_shape: dict[tuple[tuple[int, ...], str], list[Record]] = {}
        for record in records:
            by_shape.setdefault((record.shape, record.dtype.kind), []).append(record)
        sides.append(by_shape)
    return [
        (same_shape[0], sides[1][shape][0])
        for shape, same_shape in sides[0].items()
        if len(same_shape) == 1 and len(sides[1].get(shape, ())) == 1
    ]
