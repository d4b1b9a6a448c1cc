"""From pairs of roles to entries of a mapping: the layout of each slot, places with variables, reasons."""

from __future__ import annotations

import itertools
import string
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tensorcap.alignment.evidence import Prints
from tensorcap.alignment.fitting import Candidate as LayoutChoice
from tensorcap.alignment.fitting import Fit, fit
from tensorcap.alignment.fusing import Fusion
from tensorcap.alignment.judging import Judge
from tensorcap.alignment.layout import Layout
from tensorcap.alignment.mapping import Entry, LeftOver, Values
from tensorcap.alignment.matching import Candidate, Matching, Place
from tensorcap.alignment.resolution import pair_slots
from tensorcap.alignment.roles import Index, Role, pattern
from tensorcap.alignment.sides import Side
from tensorcap.alignment.survey import Member
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.records import Record

Made = tuple[list[Entry], list[LeftOver]]

_VARIABLES: Final = string.ascii_lowercase[8:]  # i, j, k …
_PROVEN: Final = 6.0  # nats
_TRIED: Final = 3  # members on which layouts are tried, if the first leave doubt
_AGREE: Final = 0.4  # residual of values that agree; unrelated ones leave 1.4


class Slots:
    """Finds layouts between the tensors of paired sites."""

    def __init__(
        self,
        archives: tuple[Archive, Archive],
        prints: tuple[Prints, Prints],
        matching: Matching,
        *,
        read_values: bool,
        turned: Mapping[tuple[str, str], bool] | None = None,
    ) -> None:
        self._archives = archives if read_values else None
        self._all_archives = archives
        self.prints = prints
        self.matching = matching
        self.judge = Judge(matching, turned or {})
        self.fused: dict[tuple[tuple[str, ...], str], tuple[tuple[int, ...], tuple[str, ...]]] = {}

    def of(self, matching: Matching, turned: Mapping[tuple[str, str], bool]) -> Slots:
        """The same for other pairs of the same archives; see `Judge` for what is turned."""
        read_values = self._archives is not None
        return Slots(self._all_archives, self.prints, matching, read_values=read_values, turned=turned)

    def fit(
        self,
        reference: Sequence[Record],
        target: Sequence[Record],
        *,
        among: Sequence[LayoutChoice] | None = None,
    ) -> Fit | None:
        """The layout from some tensors of the target to some of the reference."""
        if len(reference) == len(target) == 1:
            one, other = reference[0], target[0]
            is_square = len({size for size in one.shape if size > 1}) < sum(size > 1 for size in one.shape)
            if one.shape == other.shape and one.digest and one.digest == other.digest and not is_square:
                return Fit((), (0,), 0.0, float("inf"), 1, is_sure=True, is_proven=True)
        return fit(reference, target, self._archives, self.matching.rounding, among=among)

    def arguments(self, one: Member, other: Member) -> list[tuple[str, str, tuple[str, ...]]]:
        """Arguments of two sites that belong together: equal names, equal values, or the only ones left."""
        mine, theirs = dict(one.arguments), dict(other.arguments)
        pairs: list[tuple[str, str]] = []

        def take(name: str, found: str) -> None:
            pairs.append((name, found))
            del mine[name], theirs[found]

        for name in [n for n in mine if n in theirs and mine[n].size == theirs[n].size]:
            take(name, name)
        for name in list(mine):
            near = self._nearest(mine[name], theirs)
            if near is not None:
                take(name, near)
        by_size = [[n for n, r in side.items() if r.dtype.kind == "float"] for side in (mine, theirs)]
        if len(by_size[0]) == len(by_size[1]) == 1:
            name, found = by_size[0][0], by_size[1][0]
            if mine[name].size == theirs[found].size:
                take(name, found)
        fits = ((n, f, self._plainly(one.arguments[n], other.arguments[f])) for n, f in pairs)
        return [(name, found, steps) for name, found, steps in fits if steps is not None]

    def further(self, one: Member, other: Member) -> list[tuple[str, str, tuple[str, ...]]]:
        """Slots of two sites that belong together, beside their main results, with their steps."""
        found = [(f"input.{a}", f"input.{b}", steps) for a, b, steps in self.arguments(one, other)]
        for slot, record in one.results.items():
            if record is not one.result and slot in other.results and other.results[slot] is not other.result:
                steps = self._plainly(record, other.results[slot])
                if steps is not None:
                    found.append((slot, slot, steps))
        return found

    def _plainly(self, record: Record, other: Record) -> tuple[str, ...] | None:
        """The steps between two tensors, which are read only where shapes leave a choice."""
        if record.shape == other.shape:
            return ()
        how = fit([record], [other], None, self.matching.rounding)
        if how is not None and how.choices > 1:
            how = self.fit([record], [other])
        return how.steps if how is not None and how.is_sure else None

    def _nearest(self, record: Record, theirs: Mapping[str, Record]) -> str | None:
        """The one argument whose values are those of a record."""
        mine = self.prints[0].of(record)
        if mine is None:
            return None
        apart = {
            name: mine.distance(found)
            for name, other in theirs.items()
            if (found := self.prints[1].of(other)) is not None
        }
        near = [name for name, distance in apart.items() if distance <= 8 * self.matching.rounding]
        return near[0] if len(near) == 1 else None


def entries_of_pair(slots: Slots, candidate: Candidate) -> Made:
    """The entries of a pair of roles."""
    matching = slots.matching
    sides = matching.sides
    one, other = sides[0].roles[candidate.reference], sides[1].roles[candidate.target]
    for place in _telling(candidate):
        records = tuple(
            side.records(s) for side, s in zip(sides, matching.sites_of(candidate, place), strict=True)
        )
        how = slots.fit(*records)
        if how is None or how.is_proven:
            break
    is_lost = how is not None and _is_in_another_order(candidate, place, how)
    if how is None or not how.is_sure or is_lost:
        shapes = [list(found[0].shape) for found in records]
        if not candidate.is_named or (how is not None and shapes[0] != shapes[1]):
            return [], _unsure(slots, candidate, how, is_lost=is_lost)
    evidence, reason = slots.judge.pair(candidate, place, (records[0], records[1]), how)
    if how is None or not how.is_sure or is_lost:
        how = Fit((), (0,), None, float("inf"), 0, is_sure=False)
    prefix = tuple("rank*/" if len(found) > 1 else "" for found in records)
    by_slots: dict[tuple[str, str, tuple[str, ...]], list[Place]] = defaultdict(list)
    for a, b in candidate.places:
        pair = one.members[a], other.members[b]
        is_plain = any(prefix) or not how.choices or _suits_all(slots, pair, how.steps)
        if is_plain and not any(member.further for member in pair):
            by_slots["", "", how.steps].append((a, b))
            continue
        mains = [f"/{m.result.key.slot}" for m in pair if m.result]
        by_slots[mains[0], mains[1], how.steps].append((a, b))
        for mine, theirs, steps in slots.further(*pair) if not any(prefix) else ():
            by_slots[f"/{mine}", f"/{theirs}", steps].append((a, b))
    made = []
    for (slot, other_slot, steps), places in by_slots.items():
        for names, variables in placed(one, other, places):
            mine = f"{prefix[0]}{names[0]}{slot}"
            theirs = f"{prefix[1]}{names[1]}{other_slot}"
            made.append(Entry((mine,), (theirs,), variables, steps, evidence, reason))
    return made, []


def entries_of_taken(slots: Slots, candidate: Candidate, argument: str) -> list[Entry]:
    """The entries of results that the target has as an argument; none if no layout is certain."""
    sides = slots.matching.sides
    one, other = sides[0].roles[candidate.reference], sides[1].roles[candidate.target]
    place = _telling(candidate)[0]
    result, taken = one.members[place[0]].result, other.members[place[1]].arguments[argument]
    how = slots.fit([result], [taken]) if result is not None else None
    if result is None or how is None or not how.is_sure or _is_in_another_order(candidate, place, how):
        return []
    said = slots.judge.handed_on(candidate, ((result,), (taken,)), how)
    reason = f"what the target hands on; {said}"
    slot = "" if result.key.is_bare else f"/{result.key.slot}"
    slots.matching.given.update(sides[0].site(candidate.reference, a) for a, _ in candidate.places)
    return [
        Entry(
            (f"{names[0]}{slot}",), (f"{names[1]}/input.{argument}",), variables, how.steps, "values", reason
        )
        for names, variables in placed(one, other, candidate.places)
    ]


def _is_in_another_order(candidate: Candidate, place: Place, how: Fit) -> bool:
    """Whether two tensors have the same elements, by their prints, and no layout brings them together."""
    agreement = candidate.agreeing.get(place)
    proves = agreement is not None and agreement.nats >= _PROVEN
    return proves and how.residual is not None and how.residual > _AGREE


def _suits_all(slots: Slots, members: tuple[Member, Member], steps: tuple[str, ...]) -> bool:
    """Whether the steps of the main result make all tensors of one site that belong to some of the other."""
    if any(m.result is None or m.result.key.is_bare for m in members):
        return True
    one, other = ({r.key.slot: r for r in (*m.results.values(), *m.arguments.values())} for m in members)
    pairs = pair_slots(one, other)
    known = {(mine.key.slot, theirs.key.slot) for mine, theirs in pairs}
    if not all((f"input.{a}", f"input.{b}") in known for a, b, _ in slots.arguments(*members)):
        return False
    try:
        layout = Layout.parse(steps)
        return all(layout.shapes([theirs.shape]) == (mine.shape,) for mine, theirs in pairs)
    except UsageError:
        return False


def entries_of_fusion(slots: Slots, fusion: Fusion, *, held: tuple[str, str] | None = None) -> Made:
    """The entries of parts and their whole: of their results, or of what they hold in these slots."""
    sides = slots.matching.sides
    part_side, whole_side = sides if fusion.is_split else sides[::-1]
    index = min(fusion.agreeing or fusion.places, key=lambda i: (_distance(fusion, i), i))
    sites, whole_site = fusion.places[index]
    part_slot, whole_slot = ("", "") if held is None else held if fusion.is_split else held[::-1]
    parts = [record for site in sites for record in _tensors(part_side, site, part_slot)]
    whole = _tensors(whole_side, whole_site, whole_slot)
    reference, target = (parts, whole) if fusion.is_split else (whole, parts)
    tried = _orders(reference, target, is_split=fusion.is_split)
    fits = [(order, slots.fit(reference, [target[i] for i in order])) for order in tried]
    sure = [(order, how) for order, how in fits if how is not None and how.is_sure]
    order, how = min(sure, key=lambda f: f[1].residual or 0.0, default=((), None))
    if how is None and held is not None:
        order, how = _as_results(slots, fusion, reference, target)
    if how is None:
        names = " and ".join(fusion.parts)
        what = "statistics" if fusion.agreeing else "shapes"
        reason = f"the {what} of {names} add up to those of {fusion.whole}, but no layout is certain"
        listed = [(s, w) for s, w in fusion.places.values()]
        left = [_at(site, held, 0) for s, w in listed for site in (s if fusion.is_split else (w,))]
        right = [_at(site, held, 1) for s, w in listed for site in ((w,) if fusion.is_split else s)]
        return [], [
            LeftOver("reference", tuple(left), reason, is_explained=False),
            LeftOver("target", tuple(right), reason, is_explained=False),
        ]
    if fusion.is_split:
        order = how.order
    if held is None:
        slots.fused[fusion.parts, fusion.whole] = order, how.steps
    evidence, reason = slots.judge.fusion(fusion, (reference, target), order, how, is_held=held is not None)
    made = []
    for indices, variables in _boxes(fusion.places):
        whole_name = pattern(whole_side.roles[fusion.whole], _VARIABLES, (0,) * len(indices))
        if fusion.axis is None:
            roles = [part_side.roles[name] for name in fusion.parts]
            parts_names = [pattern(role, _VARIABLES, fusion.shift) for role in roles]
        else:
            parts_names = _listed(part_side.roles[fusion.parts[0]], fusion, indices)
        ordered = tuple(parts_names[i] for i in order)
        both: tuple[Sequence[str], Sequence[str]] = (
            (ordered, (whole_name,)) if fusion.is_split else ((whole_name,), ordered)
        )
        mine, theirs = (tuple(_at(name, held, i) for name in names) for i, names in enumerate(both))
        made.append(Entry(mine, theirs, variables, how.steps, evidence, reason))
    if held is None and fusion.is_split and fusion.axis is None:
        made += _parts_arguments(slots, fusion)
    return made, []


def _as_results(
    slots: Slots, fusion: Fusion, reference: Sequence[Record], target: Sequence[Record]
) -> tuple[tuple[int, ...], Fit | None]:
    """The layout of what modules hold that is that of their results, on the one axis where it fits."""
    order, steps = slots.fused.get((fusion.parts, fusion.whole), ((), ()))
    cuts = [step.split() for step in steps if not step.startswith(("squeeze", "unsqueeze"))]
    if len(cuts) != 1 or cuts[0][0] not in ("split", "concat"):
        return order, None
    name, _, *sizes = cuts[0]
    theirs = target if fusion.is_split else [target[i] for i in order]
    taken = order if fusion.is_split else (0,)
    among = [((" ".join([name, str(axis), *sizes]),), taken) for axis in range(len(reference[0].shape))]
    found = [slots.fit(reference, theirs, among=[candidate]) for candidate in among]
    fitting = [how for how in found if how is not None]
    return order, fitting[0] if len(fitting) == 1 else None


def _tensors(side: Side, site: str, slot: str) -> Sequence[Record]:
    """What a site gave, or what it holds in a slot."""
    role, index = side.by_site[site]
    return role.members[index].further[slot] if slot else side.records(site)


def _at(site: str, held: tuple[str, str] | None, side: int) -> str:
    return site if held is None else f"{site}/{held[side]}"


def _distance(fusion: Fusion, index: Index) -> float:
    return fusion.agreeing[index].distance if index in fusion.agreeing else 0.0


def _parts_arguments(slots: Slots, fusion: Fusion) -> list[Entry]:
    """Entries of what the parts were given, which is what their whole was given."""
    sides = slots.matching.sides
    index = min(fusion.places)
    sites, whole_site = fusion.places[index]
    role, at = sides[1].by_site[whole_site]
    made = []
    for name, site in zip(fusion.parts, sites, strict=True):
        part, part_at = sides[0].by_site[site]
        for mine, theirs, steps in slots.arguments(part.members[part_at], role.members[at]):
            for indices, variables in _boxes(fusion.places):
                zero = (0,) * len(indices)
                one = pattern(sides[0].roles[name], _VARIABLES, fusion.shift)
                other = pattern(role, _VARIABLES, zero)
                places = (f"{one}/input.{mine}",), (f"{other}/input.{theirs}",)
                made.append(Entry(*places, variables, steps, "values", "what the parts were given"))
    return made


def _orders(
    reference: Sequence[Record], target: Sequence[Record], *, is_split: bool
) -> list[tuple[int, ...]]:
    """Orders in which the target's tensors may be joined; for a split, `fit` looks for the order itself."""
    plain = tuple(range(len(target)))
    if is_split or len(target) > 4:
        return [plain]
    return list(itertools.permutations(plain))


def _listed(role: Role, fusion: Fusion, indices: Sequence[Sequence[int]]) -> list[str]:
    """Names of all parts that a role's number counts, the others being variables."""
    assert fusion.axis is not None
    numbers = sorted({index[fusion.axis] for index in role.members})
    names = []
    for number in numbers:
        variables = list(_VARIABLES[: len(indices)])
        variables.insert(fusion.axis, "@")
        shift = list(fusion.shift)
        shift.insert(fusion.axis, 0)
        names.append(pattern(role, variables, shift).replace("{@}", str(number)))
    return names


def _telling(candidate: Candidate) -> list[Place]:
    """The members that agree best."""
    agreeing = candidate.agreeing
    found = sorted(agreeing, key=lambda p: (agreeing[p].distance, p)) or candidate.places
    return list(found[:_TRIED])


def placed(
    one: Role, other: Role, places: Sequence[Place]
) -> list[tuple[tuple[str, str], dict[str, Values]]]:
    """Names of both sides with variables, and their values."""
    if one.rank != other.rank:
        return [((one.members[a].site, other.members[b].site), {}) for a, b in places]
    offsets = tuple(y - x for x, y in zip(*places[0], strict=True))
    names = pattern(one, _VARIABLES, (0,) * one.rank), pattern(other, _VARIABLES, offsets)
    return [(names, variables) for _, variables in _boxes(a for a, _ in places)]


def _boxes(indices: Iterable[Index]) -> list[tuple[list[list[int]], dict[str, Values]]]:
    """Index tuples as products of sets of numbers, and those as variables."""
    found = _products(sorted(set(indices)))
    return [
        (box, {_VARIABLES[i]: tuple(map(str, numbers)) for i, numbers in enumerate(box)}) for box in found
    ]


def _products(indices: Sequence[Index]) -> list[list[list[int]]]:
    if not indices or not indices[0]:
        return [[]] if indices else []
    rests: dict[int, list[Index]] = {}
    for index in indices:
        rests.setdefault(index[0], []).append(index[1:])
    alike: dict[tuple[Index, ...], list[int]] = {}
    for number, rest in rests.items():
        alike.setdefault(tuple(rest), []).append(number)
    return [[numbers, *box] for rest, numbers in alike.items() for box in _products(rest)]


def _unsure(slots: Slots, candidate: Candidate, how: Fit | None, *, is_lost: bool) -> list[LeftOver]:
    if is_lost:
        what = "their elements are in different orders and no layout brings them together"
    elif how is None:
        what = "no layout fits their shapes"
    else:
        what = f"{how.choices} layouts fit their shapes and none is certain"
    sides = slots.matching.sides
    left = tuple(sides[0].site(candidate.reference, a) for a, _ in candidate.places)
    right = tuple(sides[1].site(candidate.target, b) for _, b in candidate.places)
    names = f"{candidate.reference} and {candidate.target}"
    return [
        LeftOver("reference", left, f"{names} belong together, but {what}", is_explained=False),
        LeftOver("target", right, f"{names} belong together, but {what}", is_explained=False),
    ]
