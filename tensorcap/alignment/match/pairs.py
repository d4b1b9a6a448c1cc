"""Pairs accepted so far: how far right values drift apart along a run, and whether a site is confirmed."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from tensorcap.alignment.match.candidates import Candidate, Fusion, Place
from tensorcap.alignment.match.fingerprints import UNRELATED, Fingerprint
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.names import Member, SiteTemplate
from tensorcap_formats.records import Record

RecordPair = tuple[Sequence[Record], Sequence[Record]]  # tensors of the reference and of the target

_REACH: Final = 4  # of what pairs mostly differ by, that others may


class Drift:
    """What pairs that values prove are apart by, on the way through a run.

    Args:
        proven: When each pair's result was given, and how far it is apart.
    """

    def __init__(self, proven: Iterable[tuple[int, float]]) -> None:
        self._orders: list[int] = []
        self._usual = [0.0]  # by how many pairs came before: three of four are no further apart
        nearer: list[float] = []  # three of four and the next, negated; two heaps give a running quantile
        further: list[float] = []
        for count, (order, distance) in enumerate(sorted(proven), 1):
            heapq.heappush(further, -heapq.heappushpop(nearer, -distance))
            if len(nearer) <= count * 3 // 4:
                heapq.heappush(nearer, -heapq.heappop(further))
            self._orders.append(order)
            self._usual.append(-nearer[0])

    def near(self, rounding: float, before: float = float("inf")) -> float:
        """How far pairs may be apart by what those before a result are, mostly."""
        usual = self._usual[bisect.bisect_left(self._orders, before)]
        return _REACH * max(rounding, min(usual, UNRELATED))


_LAST: Final = 3  # of a run's sites that are asked whether it ended right


class Pairs:
    """Pairs of site templates and of their sites.

    Attributes:
        sides: The reference and the target.
        is_ordered: Whether both archives have an order of results.
        rounding: How far equal values may be apart, relative to their size.
        accepted: The pairs.
        partner: By site, of each side.
        template_partners: The target's site templates by the reference's.
        paired_targets: All of the target's site templates among them.
        fused: Sites in fusions, with the number of their side.
        handed_on: Sites of the reference whose results the target has as arguments.
    """

    def __init__(self, reference: Side, target: Side, *, is_ordered: bool) -> None:
        self.sides = reference, target
        self.is_ordered = is_ordered
        self.rounding = self._dtype_rounding = max(reference.rounding, target.rounding)
        self.accepted: list[Candidate] = []
        self.partner: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self.template_partners: dict[str, set[str]] = defaultdict(set)
        self.paired_targets: set[str] = set()
        self.fused: set[tuple[int, str]] = set()
        self.handed_on: set[str] = set()
        self._orders = [sorted((side.order(site), site) for site in side.fingerprints) for side in self.sides]
        self._last_of: list[tuple[int, list[tuple[int, str]]]] = [(0, []), (0, [])]
        self._proven_pairs: list[tuple[tuple[str, str], float]] = []  # and how far they are apart
        self._drifts_of = Drift(()), Drift(())
        self._drifts_count = 0  # of pairs that they are of

    def has_partner(self, side: int, site: str) -> bool:
        """Whether a site is in a pair or in a fusion."""
        return site in self.partner[side] or (side, site) in self.fused

    def is_fully_paired(self, side: int, template: SiteTemplate) -> bool:
        """Whether all sites of a site template have a partner, or are in a fusion."""
        return all(self.has_partner(side, member.site) for member in template.members.values())

    def unpaired_templates(self) -> tuple[list[SiteTemplate], list[SiteTemplate]]:
        """The site templates of each side that are not fully paired."""
        reference, target = (
            [template for template in side.templates.values() if not self.is_fully_paired(i, template)]
            for i, side in enumerate(self.sides)
        )
        return reference, target

    def is_free(self, candidate: Candidate, place: Place) -> bool:
        """Whether neither of two members has a partner."""
        return not any(self.has_partner(i, site) for i, site in enumerate(self.sites_of(candidate, place)))

    def templates_of(self, candidate: Candidate) -> tuple[SiteTemplate, SiteTemplate]:
        """The two site templates of a candidate."""
        one, other = self.sides
        return one.templates[candidate.reference], other.templates[candidate.target]

    def members_of(self, candidate: Candidate, place: Place) -> tuple[Member, Member]:
        """The two members of a place."""
        template, target_template = self.templates_of(candidate)
        return template.members[place[0]], target_template.members[place[1]]

    def sites_of(self, candidate: Candidate, place: Place) -> tuple[str, str]:
        """The two sites of a place."""
        member, target_member = self.members_of(candidate, place)
        return member.site, target_member.site

    def records_of(self, candidate: Candidate, place: Place) -> RecordPair:
        """What the two sites of a place gave."""
        left, right = self.sites_of(candidate, place)
        return self.sides[0].records(left), self.sides[1].records(right)

    def sides_of_fusion(self, *, is_split: bool) -> tuple[Side, Side]:
        """The side of the parts and that of the whole."""
        return self.sides if is_split else self.sides[::-1]

    def templates_of_fusion(self, fusion: Fusion) -> tuple[list[SiteTemplate], SiteTemplate]:
        """The site templates of the parts, and that of the whole."""
        side, other = self.sides_of_fusion(is_split=fusion.is_split)
        return [side.templates[name] for name in fusion.parts], other.templates[fusion.whole]

    def accept(self, candidate: Candidate, places: tuple[Place, ...]) -> None:
        """Take a candidate as a pair."""
        candidate.places = places
        taken = set(places)
        candidate.agreeing = {p: a for p, a in candidate.agreeing.items() if p in taken}
        self.accepted.append(candidate)
        self.pair_templates(candidate.reference, candidate.target)
        for place in places:
            left, right = self.sites_of(candidate, place)
            self.partner[0][left], self.partner[1][right] = right, left

    def pair_templates(self, reference: str, target: str) -> None:
        """Take two site templates as partners."""
        self.template_partners[reference].add(target)
        self.paired_targets.add(target)

    def extend(self, candidate: Candidate, places: Iterable[Place]) -> None:
        """Take further members of a pair."""
        candidate.places = tuple(sorted({*candidate.places, *places}))
        for place in candidate.places:
            left, right = self.sites_of(candidate, place)
            self.partner[0][left], self.partner[1][right] = right, left

    def release(self, candidate: Candidate, place: Place) -> None:
        """Take two members of a pair apart; a pair without members is none."""
        self._drifts()  # what was proven stays so
        for partner, site in zip(self.partner, self.sites_of(candidate, place), strict=True):
            del partner[site]
        candidate.places = tuple(p for p in candidate.places if p != place)
        candidate.agreeing.pop(place, None)
        if not candidate.places:
            self.accepted.remove(candidate)
            self._drifts_count = len(self.accepted)
            templates = candidate.reference, candidate.target
            if all((other.reference, other.target) != templates for other in self.accepted):
                self.template_partners[candidate.reference].discard(candidate.target)

    def are_near(self, left: str, right: str) -> bool | None:
        """Whether two sites have values as near as pairs before them are; None if unknown."""
        one, other = self.sides[0].fingerprints.get(left), self.sides[1].fingerprints.get(right)
        return self.is_near(one, other, self.sides[0].order(left))

    def distance_between(self, left: str, right: str) -> float:
        """How far the values of two sites are apart; infinite if that is unknown."""
        one, other = self.sides[0].fingerprints.get(left), self.sides[1].fingerprints.get(right)
        return math.inf if one is None or other is None else one.distance(other)

    def is_near(self, one: Fingerprint | None, other: Fingerprint | None, order: int) -> bool | None:
        """Whether values are as near as pairs before that are; None if unknown.

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
        proven = [
            (self.sites_of(candidate, place), agreement.distance)
            for candidate in self.accepted[self._drifts_count :]
            for place, agreement in candidate.agreeing.items()
            if agreement.nats >= WEIGHTS.proof
        ]
        self._drifts_count = len(self.accepted)
        if proven:
            self._proven_pairs += proven
            one, other = (
                Drift((side.order(sites[i]), distance) for sites, distance in self._proven_pairs)
                for i, side in enumerate(self.sides)
            )
            self._drifts_of = one, other
        return self._drifts_of

    def is_confirmed(self, side: int, site: str, consumers: Sequence[str] | None = None) -> bool:
        """Whether a site's values were right, as what they were used for agrees.

        Args:
            side: The number of its side.
            site: The site.
            consumers: The sites that were given the values; by default those that were given its main result.

        A wrong tensor makes what follows wrong. What took it as an argument says so, or the nearest module
        around it that has a partner; if there is none, the end of the run does, if it has an order.
        """
        if consumers is None:
            consumers = self.sides[side].consumers_of(self.sides[side].records(site)[0])
        near = self._near_before(side, self.sides[side].order(site))
        if any(
            consumer in self.partner[side] and self._agrees(side, consumer, near) for consumer in consumers
        ):
            return True
        around = self._around(side, site)
        if around:
            return self._agrees(side, around, near)
        if not self.is_ordered:
            return False
        order = self.sides[side].order(site)
        following = [other for at, other in self._last_paired(side) if at > order]
        return bool(following) and all(self._agrees(side, other, near) for other in following)

    def agrees_around(self, site: str) -> bool:
        """Whether the nearest module around a site of the reference that has a partner agrees with it."""
        around = self._around(0, site)
        return bool(around) and self._agrees(0, around, self._near_before(0, self.sides[0].order(site)))

    def _around(self, side: int, site: str) -> str:
        """The nearest module around a site that has a partner, below the root; "" if there is none."""
        around = self.sides[side].module(site).rpartition(".")[0]
        while around and around not in self.partner[side]:
            around = around.rpartition(".")[0]
        return around

    def is_spoilt(self, side: int, site: str) -> bool:
        """Whether what comes of a site's values is known to differ, and nothing made of them agrees.

        Results of other sizes, as those of the last token alone, and such without fingerprints are unknown.
        """
        if self.is_confirmed(side, site) or not self.is_ordered:
            return False
        order, near = self.sides[side].order(site), self._near_before(side, self.sides[side].order(site))
        following = [
            (other, self.partner[side][other]) for at, other in self._last_paired(side) if at > order
        ]
        distances = [self.distance_between(*(pair if side == 0 else pair[::-1])) for pair in following]
        return any(near < distance < math.inf for distance in distances)

    def _last_paired(self, side: int) -> list[tuple[int, str]]:
        """The last sites of a run that have a partner, with their order."""
        count, last = self._last_of[side]
        if count != len(self.partner[side]):
            paired = (each for each in reversed(self._orders[side]) if each[1] in self.partner[side])
            last = [*itertools.islice(paired, _LAST)]
            self._last_of[side] = len(self.partner[side]), last
        return last

    def _agrees(self, side: int, site: str, near: float) -> bool:
        """Whether a site and its partner are no further apart than that."""
        one = self.sides[side].fingerprints.get(site)
        other = self.sides[1 - side].fingerprints.get(self.partner[side][site])
        return one is not None and other is not None and one.distance(other) <= near

    def find_near(self, side: int, site: str) -> list[str]:
        """The sites of the other side with a site's values, though nothing may prove it."""
        one, near = self.sides[side].fingerprints.get(site), self._near
        if one is None:
            return []
        other = self.sides[1 - side]
        names = other.nearest.within(near, one)
        return sorted(names, key=lambda name: (other.fingerprints[name].l2, name))
