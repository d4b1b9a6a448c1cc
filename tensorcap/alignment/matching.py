"""Which role of the reference is which of the target: candidates by names and values, settled by certainty.

Nothing depends on the order in which sites are listed: the most certain candidate is taken first, one that
has a rival as good as itself waits until the rival is gone, and what is contested to the end is told.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorcap.alignment.drift import Drift
from tensorcap.alignment.evidence import Agreement, Print, agreements
from tensorcap.alignment.likeness import roles_alike
from tensorcap.alignment.mapping import Evidence
from tensorcap.alignment.naming import Canonical, name_of, plain_name
from tensorcap.alignment.roles import Index, Role
from tensorcap.alignment.sides import Side

Place = tuple[Index, Index]  # numbers of the reference's member, and of the target's

_ENOUGH: Final = 6.0  # nats: one in 400 by chance
_MARGIN: Final = 1.0  # by which a candidate has to be better than its rivals
_UNRELATED: Final = 0.1
_DRIFT: Final = 0.01  # of the values, that runs are taken to differ by at most for being equal
_TINY: Final = 1e-12
_LAST: Final = 3  # of a run's sites that are asked whether it ended right
_PRODUCT: Final = 4096  # of sites with equal values on both sides; more prove nothing about one another


@dataclass(slots=True)
class Candidate:
    """A role of the reference that may be a role of the target.

    Attributes:
        reference: The one's name.
        target: The other's.
        places: Members that would belong together.
        agreeing: How the values of some of them agree.
        is_named: Whether their names are equal, by rules.
        is_by_rule: Whether they are so by rules only.
        is_placed: Whether their place between others is what speaks for them.
        is_tied: Whether only the order of results tells it from others with equal values.
        likeness: What structure, shapes and arguments say, in nats.
    """

    reference: str
    target: str
    places: tuple[Place, ...]
    agreeing: dict[Place, Agreement] = field(default_factory=dict)
    is_named: bool = False
    is_by_rule: bool = False
    is_placed: bool = False
    is_tied: bool = False
    likeness: float = 0.0

    @property
    def nats(self) -> float:
        """What the values prove."""
        return sum(agreement.nats for agreement in self.agreeing.values())

    @property
    def score(self) -> float:
        """What speaks for it altogether."""
        return self.nats + self.likeness

    @property
    def order(self) -> tuple[float, str, str]:
        """The better first; names settle nothing, they only make the order the same every time."""
        return -self.score, self.reference, self.target

    @property
    def evidence(self) -> Evidence:
        """What it is known by."""
        if self.is_named:
            return "rule" if self.is_by_rule else "name"
        return "values" if self.nats >= _ENOUGH and not self.is_tied else "structure"


class Matching:
    """Pairs of roles, found step by step.

    Attributes:
        is_ordered: Whether both archives have an order of results.
        accepted: The pairs.
        contested: Candidates that others are as good as.
    """

    def __init__(
        self, reference: Side, target: Side, canonical: Canonical | None, *, is_ordered: bool = True
    ) -> None:
        self.is_ordered = is_ordered
        self.sides = reference, target
        self.rounding = self._dtype_rounding = max(reference.rounding, target.rounding)
        self.accepted: list[Candidate] = []
        self.contested: list[Candidate] = []
        self.given: set[str] = set()  # sites of the reference whose results the target has as arguments
        self.partner: tuple[dict[str, str], dict[str, str]] = ({}, {})  # by site
        self.fused: set[tuple[int, str]] = set()  # sites in fusions, with the number of their side
        self.role_partner: dict[str, set[str]] = defaultdict(set)
        self._misfits: list[Candidate] = []
        self._canonical = canonical
        self._claims: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._alike: dict[tuple[str, str], float] = {}
        self._group_by_drift()
        self._candidates = self._by_values()
        self._orders = [sorted((side.order(site), site) for site in side.prints) for side in self.sides]
        self._seen, self._known_drifts = -1, (Drift(()), Drift(()))
        if canonical is not None:
            self._add_names(canonical)

    def settle_names(self, outdone: Container[tuple[str, str]] = ()) -> None:
        """Settle what has equal names, but for pairs of roles that something better is known for."""
        every = self._candidates.values()
        self._settle([c for c in every if c.is_named and (c.reference, c.target) not in outdone])

    def settle_leaves(self) -> None:
        """Settle modules without others inside that values prove, by their main results, list by list."""
        self._settle([c for c in self._proven(is_plain=True) if self._is_leaf(c)])

    def settle_proven(self, *, is_plain: bool) -> None:
        """Settle what values prove; if plain, only by main results, and only one list as another."""
        before = -1
        while before != len(self.accepted):
            before = len(self.accepted)
            proven = self._proven(is_plain=is_plain)
            self._settle([c for c in proven if self._is_leaf(c)])
            self._settle(proven)

    def _proven(self, *, is_plain: bool) -> list[Candidate]:
        found = [c for c in self._candidates.values() if c.nats >= _ENOUGH or (c.is_named and not is_plain)]
        return [c for c in found if self._is_plain(c)] if is_plain else found

    def likest(self, reference: str, targets: Collection[str]) -> float:
        """What structure says at most for a proven candidate of one of these roles that is free."""
        wanted = (c for c in self._candidates.values() if c.reference == reference or c.target in targets)
        proven = (c for c in wanted if c.nats >= _ENOUGH and any(self.is_free(c, p) for p in c.places))
        return max(map(self.likeness, proven), default=-math.inf)

    def _is_plain(self, candidate: Candidate) -> bool:
        one, other = self.sides[0].roles[candidate.reference], self.sides[1].roles[candidate.target]
        return not one.slot and not other.slot and one.rank == other.rank

    def pair_names_left(self) -> None:
        """Pair what has equal names though not as many elements, if nothing else was found for either."""
        for candidate in sorted(self._misfits, key=lambda c: c.order):
            places = tuple(place for place in candidate.places if self.is_free(candidate, place))
            if places:
                self.accept(candidate, places)

    def has_partner(self, side: int, site: str) -> bool:
        """Whether a site is in a pair or in a fusion."""
        return site in self.partner[side] or (side, site) in self.fused

    def is_taken(self, side: int, role: Role) -> bool:
        """Whether all sites of a role have a partner, or are in a fusion."""
        return all(self.has_partner(side, member.site) for member in role.members.values())

    def _is_leaf(self, candidate: Candidate) -> bool:
        return not (
            self.sides[0].roles[candidate.reference].inside or self.sides[1].roles[candidate.target].inside
        )

    def _nearest(self) -> dict[tuple[int, int], Agreement]:
        """The groups of both sides that are nearest to each other."""
        firsts = [[side.prints[group[0]] for group in side.groups] for side in self.sides]
        return agreements(firsts[0], firsts[1], self.rounding)

    def _group_by_drift(self) -> None:
        """Take as rounding what the runs differ by, if that is more than one rounding of their dtypes."""
        distances = sorted(a.distance for a in self._nearest().values() if a.nats >= _ENOUGH)
        if distances:
            self.rounding = max(self.rounding, min(2 * distances[len(distances) // 2], _DRIFT))
        for side in self.sides:
            side.group(self.rounding)

    def _by_values(self) -> dict[tuple[object, ...], Candidate]:
        one, other = self.sides
        found: dict[tuple[object, ...], Candidate] = {}
        for (i, j), agreement in sorted(self._nearest().items()):
            if agreement.nats >= _ENOUGH:
                self._claims[0][i], self._claims[1][j] = j, i
            if len(one.groups[i]) * len(other.groups[j]) > _PRODUCT:
                continue
            for left in one.groups[i]:
                for right in other.groups[j]:
                    candidate, place = self._candidate(found, left, right)
                    candidate.agreeing[place] = agreement
        for candidate in found.values():
            candidate.places = tuple(p for p in candidate.places if not self.contradicts(candidate, p))
        return found

    def _candidate(
        self, found: dict[tuple[object, ...], Candidate], left: str, right: str
    ) -> tuple[Candidate, Place]:
        (one, a), (other, b) = self.sides[0].by_site[left], self.sides[1].by_site[right]
        if len(a) == len(b):
            offsets = tuple(y - x for x, y in zip(a, b, strict=True))
            key: tuple[object, ...] = one.name, other.name, offsets
            if key not in found:
                found[key] = Candidate(one.name, other.name, shifted(one, other, offsets))
        else:
            key = one.name, other.name, a, b
            found.setdefault(key, Candidate(one.name, other.name, ((a, b),)))
        return found[key], (a, b)

    def contradicts(self, candidate: Candidate, place: Place) -> bool:
        """Whether the values of one of two members belong elsewhere."""
        sites = self.sites_of(candidate, place)
        numbers = [side.group_of.get(site, -1) for side, site in zip(self.sides, sites, strict=True)]
        claimed = [claims.get(n) for claims, n in zip(self._claims, numbers, strict=True)]
        return any(
            claim is not None and claim != numbers[1 - i] and not self._is_met(i, numbers[i], claim)
            for i, claim in enumerate(claimed)
        )

    def _is_met(self, side: int, number: int, claim: int) -> bool:
        """Whether all sites with the values of a group have a partner in it, so that it may have others."""
        group = self.sides[side].groups[number]
        partners = [self.partner[1 - side].get(site) for site in self.sides[1 - side].groups[claim]]
        return all(partner in group for partner in partners)

    def _add_names(self, canonical: Canonical) -> None:
        """Make candidates of roles whose names are equal."""
        named: list[dict[str, list[tuple[Role, Index]]]] = [defaultdict(list), defaultdict(list)]
        for side, by_name in zip(self.sides, named, strict=True):
            for role in side.roles.values():
                name, added = name_of(role, canonical)
                by_name[name].append((role, added))
        known: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
        for candidate in self._candidates.values():
            known[candidate.reference, candidate.target].append(candidate)
        taken: set[tuple[int, str]] = set()
        for name in sorted(named[0].keys() & named[1].keys()):
            for (one, added), (other, other_added) in _namesakes(named[0][name], named[1][name]):
                if one.rank == other.rank == len(added) == len(other_added):
                    shift = tuple(x - y for x, y in zip(added, other_added, strict=True))
                    self._add_named(one, other, shift, known[one.name, other.name])
                    taken |= {(0, one.name), (1, other.name)}
        self._add_single_names(canonical, taken)

    def _add_single_names(self, canonical: Canonical, taken: Container[tuple[int, str]]) -> None:
        """Make candidates of sites whose names are equal, of roles that are told apart by other numbers."""
        sites: list[dict[str, list[str]]] = [defaultdict(list), defaultdict(list)]
        for i, side in enumerate(self.sides):
            for role in side.roles.values():
                if not role.slot and (i, role.name) not in taken:
                    for member in role.members.values():
                        sites[i][canonical(member.site)].append(member.site)
        groups: dict[tuple[object, ...], list[Place]] = defaultdict(list)
        for name in sorted(sites[0].keys() & sites[1].keys()):
            if len(sites[0][name]) == len(sites[1][name]) == 1:
                (one, a), (other, b) = (
                    side.by_site[s[name][0]] for side, s in zip(self.sides, sites, strict=True)
                )
                apart = tuple(y - x for x, y in zip(a, b, strict=True)) if len(a) == len(b) else (a, b)
                groups[one.name, other.name, apart].append((a, b))
        for (left, right, _), places in groups.items():
            self._mark_named(self.sides[0].roles[str(left)], self.sides[1].roles[str(right)], tuple(places))

    def _add_named(self, one: Role, other: Role, shift: Index, known: Sequence[Candidate]) -> None:
        """Make the candidate of two roles with equal names; lists may begin at another number."""
        starts = tuple(b - a for a, b in zip(min(one.members), min(other.members), strict=True))
        if starts != shift and len(one.members) == len(other.members):
            proven = [c for c in known if c.nats >= _ENOUGH and 2 * len(c.agreeing) > len(c.places)]
            if proven:
                self._mark_named(one, other, max(proven, key=lambda c: (c.nats, c.places)).places)
                return
            shift = starts
        self._mark_named(one, other, shifted(one, other, shift))

    def _mark_named(self, one: Role, other: Role, places: tuple[Place, ...]) -> None:
        is_by_rule = name_of(one, plain_name)[0] != name_of(other, plain_name)[0]
        named = Candidate(one.name, other.name, places, is_named=True, is_by_rule=is_by_rule)
        places = tuple(place for place in places if self.sizes_fit(named, place))
        if one.slot.rpartition(".")[2].isdigit():  # a place in a tuple is hardly a name
            places = tuple(place for place in places if not self.contradicts(named, place))
        elif not places:
            self._misfits.append(named)
        if not places:
            return
        a, b = places[0]
        candidate, _ = self._candidate(self._candidates, one.members[a].site, other.members[b].site)
        candidate.is_named, candidate.is_by_rule, candidate.places = True, is_by_rule, places

    def sizes_fit(self, candidate: Candidate, place: Place) -> bool:
        """Whether two members gave as many elements; ranks together, or each of them."""
        sizes = [
            {sum(r.size for r in records), records[0].size}
            for records in (
                side.records(site)
                for side, site in zip(self.sides, self.sites_of(candidate, place), strict=True)
            )
        ]
        return bool(sizes[0] & sizes[1])

    def is_refuted(self, candidate: Candidate, place: Place) -> bool:
        """Whether two members cannot belong together: their values differ, and what comes of them agrees."""
        left, right = self.sites_of(candidate, place)
        if self.are_near(left, right) is not False:
            return False
        return self.contradicts(candidate, place) or self.is_sealed(0, left) or self.is_sealed(1, right)

    def are_near(self, left: str, right: str) -> bool | None:
        """Whether two sites have values as near as pairs before them are; None where they tell nothing."""
        one, other = self.sides[0].prints.get(left), self.sides[1].prints.get(right)
        return self.is_near(one, other, self.sides[0].order(left))

    def is_near(self, one: Print | None, other: Print | None, order: int) -> bool | None:
        """Whether values are as near as pairs before that are; None where they tell nothing.

        Args:
            one: The reference's.
            other: The target's.
            order: When the reference gave or took it.
        """
        return None if one is None or other is None else one.distance(other) <= self._near_before(0, order)

    @property
    def _near(self) -> float:
        """How far pairs are apart, mostly."""
        return self._drifts()[0].near(self.rounding)

    def _near_before(self, side: int, order: int) -> float:
        """How far those pairs are apart, mostly, whose results a side gave before.

        What an error does to those that follow says nothing about what it may differ by itself.
        """
        if not self.is_ordered:
            return self._near
        return self._drifts()[side].near(self._dtype_rounding, order)

    def _drifts(self) -> tuple[Drift, Drift]:
        """What the pairs are apart that values prove, by the order of either side."""
        if self._seen != len(self.accepted):
            self._seen = len(self.accepted)
            proven = [(c, p, a) for c in self.accepted for p, a in c.agreeing.items() if a.nats >= _ENOUGH]
            found = [(self.sites_of(c, p), a.distance) for c, p, a in proven]
            one, other = (
                Drift((side.order(sites[i]), distance) for sites, distance in found)
                for i, side in enumerate(self.sides)
            )
            self._known_drifts = one, other
        return self._known_drifts

    def is_sealed(self, side: int, site: str, takers: Sequence[str] | None = None) -> bool:
        """Whether a site's values were right, as what they were used for agrees.

        Args:
            side: The number of its side.
            site: The site.
            takers: The sites that were given the values; by default those that were given its main result.

        A wrong tensor makes what follows wrong. What took it as an argument says so, or the nearest module
        around it that has a partner; where there is none, the end of the run does, if it has an order.
        """
        if takers is None:
            takers = self.sides[side].takers_of(self.sides[side].records(site)[0])
        near = self._near_before(side, self.sides[side].order(site))
        if any(taker in self.partner[side] and self._agrees(side, taker, near) for taker in takers):
            return True
        around = self.sides[side].module(site).rpartition(".")[0]
        while around and around not in self.partner[side]:
            around = around.rpartition(".")[0]
        if around:
            return self._agrees(side, around, near)
        if not self.is_ordered:
            return False
        orders = self._orders[side]
        at = bisect.bisect_right(orders, (self.sides[side].order(site), "\uffff"))
        following = [other for _, other in orders[at:] if other in self.partner[side]]
        return bool(following) and all(self._agrees(side, other, near) for other in following[-_LAST:])

    def _agrees(self, side: int, site: str, near: float) -> bool:
        """Whether a site and its partner are no further apart than that."""
        one = self.sides[side].prints.get(site)
        other = self.sides[1 - side].prints.get(self.partner[side][site])
        return one is not None and other is not None and one.distance(other) <= near

    def alike(self, side: int, site: str) -> list[str]:
        """The sites of the other side with a site's values, though nothing may prove it."""
        one, near = self.sides[side].prints.get(site), self._near
        if one is None:
            return []
        others = self.sides[1 - side].by_l2.around(one, -math.log1p(-near) + _TINY)
        return [name for name, other in others if one.distance(other) <= near]

    def values_elsewhere(self, candidate: Candidate, place: Place) -> str:
        """The role of the target that has the values of the reference's member, where that is another one."""
        left, right = self.sites_of(candidate, place)
        claimed = self._claims[0].get(self.sides[0].group_of.get(left, -1))
        if claimed is None or claimed == self.sides[1].group_of.get(right):
            return ""
        return self.sides[1].by_site[self.sides[1].groups[claimed][0]][0].name

    def words_alike(self, reference: str, target: str) -> float:
        """How many words the last parts of two names share, in nats."""
        if self._canonical is None:
            return 0.0
        one, other = (
            set(
                re.findall(r"[a-z]+", self._canonical(side.roles[name].first.site).rpartition(".")[2].lower())
            )
            for side, name in zip(self.sides, (reference, target), strict=True)
        )
        return 2.0 * len(one & other) / max(len(one | other), 1)

    def _settle(self, candidates: Iterable[Candidate]) -> None:
        """Take the most certain candidates one after the other."""
        live = [c for c in candidates if any(self.is_free(c, place) for place in c.places)]
        for candidate in live:
            candidate.likeness = self.likeness(candidate)
        live = sorted((c for c in live if c.score >= _ENOUGH or c.is_named), key=lambda c: c.order)
        scores = [c.score for c in live]
        wanted: tuple[dict[str, list[tuple[int, str]]], ...] = (defaultdict(list), defaultdict(list))
        for number, candidate in enumerate(live):
            for place in candidate.places:
                left, right = self.sites_of(candidate, place)
                wanted[0][left].append((number, right))
                wanted[1][right].append((number, left))
        waiting = list(range(len(live)))
        for may_tie in (False, True)[: 1 + self.is_ordered]:
            before = -1
            while before != len(self.accepted):
                before = len(self.accepted)
                numbers, waiting = waiting, []
                for number in numbers:
                    places = tuple(p for p in live[number].places if self.is_free(live[number], p))
                    if not places:
                        continue
                    pairs = [self.sites_of(live[number], place) for place in places]
                    if self._has_rival(number, pairs, wanted, scores, may_tie=may_tie):
                        waiting.append(number)
                    else:
                        live[number].is_tied = may_tie
                        self.accept(live[number], places)
        self.contested = [live[number] for number in waiting]

    def _has_rival(
        self,
        number: int,
        pairs: Sequence[tuple[str, str]],
        wanted: tuple[dict[str, list[tuple[int, str]]], ...],
        scores: Sequence[float],
        *,
        may_tie: bool,
    ) -> bool:
        """Whether another candidate wants one of these sites for another one, and is about as good.

        To sites with equal values that makes no difference: there, the better one may tie with the next.
        """
        for side in (0, 1):
            group_of = self.sides[1 - side].group_of
            for pair in pairs:
                site, other = pair[side], pair[1 - side]
                for rival, third in wanted[side][site]:
                    if third == other or scores[rival] <= scores[number] - _MARGIN:
                        continue
                    if self.has_partner(1 - side, third):
                        continue
                    is_same = other in group_of and group_of[other] == group_of.get(third)
                    if not (may_tie and is_same and number < rival):
                        return True
        return False

    def is_free(self, candidate: Candidate, place: Place) -> bool:
        """Whether neither of two members has a partner."""
        return not any(self.has_partner(i, site) for i, site in enumerate(self.sites_of(candidate, place)))

    def accept(self, candidate: Candidate, places: tuple[Place, ...]) -> None:
        """Take a candidate as a pair."""
        candidate.places = places
        candidate.agreeing = {p: a for p, a in candidate.agreeing.items() if p in places}
        self.accepted.append(candidate)
        self.role_partner[candidate.reference].add(candidate.target)
        for place in places:
            left, right = self.sites_of(candidate, place)
            self.partner[0][left], self.partner[1][right] = right, left

    def extend(self, candidate: Candidate, places: Iterable[Place]) -> None:
        """Take further members of a pair."""
        candidate.places = tuple(sorted({*candidate.places, *places}))
        for place in candidate.places:
            left, right = self.sites_of(candidate, place)
            self.partner[0][left], self.partner[1][right] = right, left

    def sites_of(self, candidate: Candidate, place: Place) -> tuple[str, str]:
        """The two sites of a place."""
        return (
            self.sides[0].site(candidate.reference, place[0]),
            self.sides[1].site(candidate.target, place[1]),
        )

    def likeness(self, candidate: Candidate) -> float:
        """What structure, shapes and arguments say of a candidate, in nats."""
        key = candidate.reference, candidate.target
        if key not in self._alike:
            self._alike[key] = roles_alike(self.sides[0].roles[key[0]], self.sides[1].roles[key[1]])
        found = self._alike[key] + self.parts_alike(*key) + (8.0 if candidate.is_named else 0.0)
        if not candidate.agreeing:
            return found
        best = min(candidate.agreeing, key=lambda p: (candidate.agreeing[p].distance, p))
        found += self._arguments(candidate, best, candidate.agreeing[best].distance)
        return found + self._standing(candidate, best)

    def _arguments(self, candidate: Candidate, place: Place, distance: float) -> float:
        ones = self.sides[0].arguments(candidate.reference, place[0])
        others = self.sides[1].arguments(candidate.target, place[1])
        if not ones or not others:
            return 0.0
        apart = min(a.distance(b) for a in ones for b in others)
        return 5.0 if apart <= max(4 * distance, 8 * self.rounding) else -3.0

    def _standing(self, candidate: Candidate, place: Place) -> float:
        """Whether both stand at one place, in order of results, among the sites that have their values."""
        standing = []
        for side, site in zip(self.sides, self.sites_of(candidate, place), strict=True):
            group = side.groups[side.group_of[site]]
            ordered = sorted(group, key=lambda s: (side.order(s), s))
            standing.append((ordered.index(site), len(ordered) - ordered.index(site)))
        return sum(0.3 for a, b in zip(*standing, strict=True) if a == b)

    def parts_alike(self, reference: str, target: str) -> float:
        """How many of what lies inside the one is paired with what lies inside the other."""
        inside, others = self.sides[0].roles[reference].inside, self.sides[1].roles[target].inside
        mine = [name for name in inside if self.role_partner.get(name)]
        theirs = {t for found in self.role_partner.values() for t in found} & others if mine else set()
        if not mine:
            return 0.0
        both = sum(bool(self.role_partner[name] & others) for name in mine)
        return 12.0 * both / max(len(mine), len(theirs), 1) - 6.0


def _namesakes(
    ones: Sequence[tuple[Role, Index]], others: Sequence[tuple[Role, Index]]
) -> Iterator[tuple[tuple[Role, Index], tuple[Role, Index]]]:
    """Roles of both sides whose names mean the same: those of equal names, else of equal names but for
    wrappers, else all; of names within one another the inmost, which is what wrappers wrap.
    """
    for same in (lambda role: role.name, lambda role: name_of(role, plain_name)[0], lambda _: ""):
        mine, theirs = (_by_name(found, same) for found in (ones, others))
        for name in sorted(mine.keys() & theirs.keys()):
            yield from itertools.product(_inmost(mine[name]), _inmost(theirs[name]))
        ones, others = (
            [r for r in found if same(r[0]) not in mine.keys() & theirs.keys()] for found in (ones, others)
        )


def _by_name(
    roles: Sequence[tuple[Role, Index]], name: Callable[[Role], str]
) -> dict[str, list[tuple[Role, Index]]]:
    found: dict[str, list[tuple[Role, Index]]] = defaultdict(list)
    for one in roles:
        found[name(one[0])].append(one)
    return found


def _inmost(roles: Sequence[tuple[Role, Index]]) -> list[tuple[Role, Index]]:
    """Roles that none of the others lies in."""
    return [one for one in roles if not any(r.name.startswith(f"{one[0].name}.") for r, _ in roles)]


def shifted(one: Role, other: Role, offsets: Index) -> tuple[Place, ...]:
    """Members whose numbers differ by these offsets."""
    found = ((a, tuple(x + y for x, y in zip(a, offsets, strict=True))) for a in one.members)
    return tuple((a, b) for a, b in found if b in other.members)
