"""Matching of site templates: candidates by names and values, accepted by certainty.

Nothing depends on the order in which sites are listed: the most certain candidate is accepted first, one with
a rival as good as itself waits until the rival is gone, and what is contested to the end is reported.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Final

from tensorcap.alignment.match.candidates import (
    Candidate,
    Named,
    Place,
    namesakes,
    places_like,
    shift_between,
    shifted_places,
    template_similarity,
)
from tensorcap.alignment.match.contents import Contents
from tensorcap.alignment.match.fingerprints import Agreement, agreements
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.pairs import Pairs
from tensorcap.alignment.match.sides import Side, sizes_of
from tensorcap.alignment.names import Canonical, Index, SiteTemplate, name_of, plain_name
from tensorcap.runs import lies_within

_FAR_NEARER: Final = 0.5  # share of the distance of a pair within which another tensor is what it is
_DRIFT: Final = 0.01  # of the values, that runs are taken to differ by at most for being equal
_PRODUCT: Final = 4096  # of sites with equal values on both sides; more prove nothing about one another


class Matching(Pairs):
    """Pairs of site templates, found step by step.

    Attributes:
        contested: Candidates that others are as good as.
        contents: What the modules of both sides hold.
    """

    def __init__(
        self,
        reference: Side,
        target: Side,
        canonical: Canonical | None,
        *,
        is_ordered: bool = True,
        contents: Contents | None = None,
    ) -> None:
        super().__init__(reference, target, is_ordered=is_ordered)
        self.contested: list[Candidate] = []
        self._misfits: list[Candidate] = []
        self._canonical = canonical
        self._claims: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._similarities: dict[tuple[str, str], float] = {}
        self._standings: dict[tuple[int, int], Mapping[str, int]] = {}
        self._group_by_drift()
        self._preferred: set[tuple[str, str]] = set()  # by contents, to others of the same values
        self.contents = contents or Contents()
        self._same_contents = self._find_same_contents()
        self._candidates = self._find_candidates()
        if canonical is not None:
            self._add_names(canonical)

    @property
    def uses_names(self) -> bool:
        """Whether names may say what belongs together."""
        return self._canonical is not None

    def accept_named(self, explained: Container[tuple[str, str]] = ()) -> None:
        """Accept candidates of equal names, except pairs of templates that something else explains better."""
        candidates = self._candidates.values()
        self.accept_best([c for c in candidates if c.is_named and (c.reference, c.target) not in explained])

    def accept_proven(self, *, is_plain: bool) -> None:
        """Accept what values prove until nothing changes; if plain, main outputs only, list by list."""
        before = -1
        while before != len(self.accepted):
            before = len(self.accepted)
            proven = self._proven(is_plain=is_plain)
            self.accept_best([c for c in proven if self._is_leaf(c)])
            self.accept_best(proven)

    def _proven(self, *, is_plain: bool) -> list[Candidate]:
        """What values prove: of main outputs only if plain, else equal names count as well."""
        candidates = self._candidates.values()
        if is_plain:
            return [c for c in candidates if c.nats >= WEIGHTS.proof and self._is_plain(c)]
        return [c for c in candidates if c.nats >= WEIGHTS.proof or c.is_named]

    def accept_tied(self) -> None:
        """Accept what values prove of runs without an order, where several sites of a side have equal values.

        It makes no difference which of them it is; layers go before what hands on the last one's result.
        """
        if self.is_ordered:
            return
        proven = [c for c in self._candidates.values() if c.nats >= WEIGHTS.proof]
        for candidate in sorted(proven, key=lambda c: (not self.template_partners.get(c.reference), c.order)):
            places = tuple(place for place in candidate.places if place in candidate.agreeing)
            if places and all(self._may_accept(candidate, place) for place in places):
                candidate.is_tied = True
                self.accept(candidate, places)

    def best_similarity(self, reference: str, targets: Collection[str]) -> float:
        """What structure says at most for a proven candidate of one of these site templates that is free."""
        wanted = (c for c in self._candidates.values() if c.reference == reference or c.target in targets)
        proven = (c for c in wanted if c.nats >= WEIGHTS.proof and any(self.is_free(c, p) for p in c.places))
        return max(map(self.similarity, proven), default=-math.inf)

    def _is_plain(self, candidate: Candidate) -> bool:
        one, other = self.templates_of(candidate)
        return not one.slot and not other.slot and one.rank == other.rank

    def accept_misfits(self) -> None:
        """Accept candidates of equal names and unlike numbers of elements, in the places that are free."""
        for candidate in sorted(self._misfits, key=lambda c: c.order):
            places = tuple(place for place in candidate.places if self.is_free(candidate, place))
            if places:
                self.accept(candidate, places)

    def _is_leaf(self, candidate: Candidate) -> bool:
        return not any(template.inside for template in self.templates_of(candidate))

    def _find_nearest_groups(self) -> dict[tuple[int, int], Agreement]:
        """The groups of both sides that are nearest to each other."""
        firsts = [[side.fingerprints[group[0]] for group in side.groups] for side in self.sides]
        return agreements(firsts[0], firsts[1], self.rounding)

    def _group_by_drift(self) -> None:
        """Take as rounding what the runs differ by, if that is more than one rounding of their dtypes."""
        nearest = self._find_nearest_groups().values()
        distances = sorted(a.distance for a in nearest if a.nats >= WEIGHTS.proof)
        if distances:
            self.rounding = max(self.rounding, min(2 * distances[len(distances) // 2], _DRIFT))
        for side in self.sides:
            side.group(self.rounding)

    def _find_candidates(self) -> dict[tuple[object, ...], Candidate]:
        reference, target = self.sides
        candidates: dict[tuple[object, ...], Candidate] = {}
        for (i, j), agreement in sorted(self._find_nearest_groups().items()):
            if agreement.nats >= WEIGHTS.proof:
                self._claims[0][i], self._claims[1][j] = j, i
            if len(reference.groups[i]) * len(target.groups[j]) > _PRODUCT:
                continue
            for left in reference.groups[i]:
                for right in target.groups[j]:
                    candidate, place = self._get_candidate(candidates, left, right)
                    candidate.agreeing[place] = agreement
        for candidate in candidates.values():
            candidate.places = tuple(
                p
                for p in candidate.places
                if self._are_as_large(candidate, p)
                and not self._grows_apart(candidate, p)
                and not self.contradicts(candidate, p)
                and not self._is_another_by_contents(candidate, p)
            )
        return candidates

    def _are_as_large(self, candidate: Candidate, place: Place) -> bool:
        """Whether two members gave as many elements, without copies on further ranks where that is known."""
        one, other = (
            side.fingerprints.get(site)
            for side, site in zip(self.sides, self.sites_of(candidate, place), strict=True)
        )
        return self.sizes_fit(candidate, place) if one is None or other is None else one.size == other.size

    def _find_same_contents(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The module of the other side that holds the same parameters, of each side."""
        sizes = self.sides[0].modules, self.sides[1].modules
        pairs = [*self.contents.pairs((), sizes, is_certain=True)]
        return dict(pairs), {b: a for a, b in pairs}

    def _is_another_by_contents(self, candidate: Candidate, place: Place) -> bool:
        """Whether one of two members holds what another one holds that has the same values as its partner.

        An attention with matrices of its own is that of the reference, and not the projection it ends with.
        """
        if not any(self._same_contents):
            return False
        sites = self.sites_of(candidate, place)
        for i, side in enumerate(self.sides):
            same = self._same_contents[1 - i].get(sites[1 - i])
            group = side.group_of.get(sites[i])
            if same not in (None, sites[i]) and group is not None and side.group_of.get(same) == group:
                self._preferred.add((str(same), sites[1]) if i == 0 else (sites[0], str(same)))
                return True
        return False

    def release_refuted_contents(self) -> None:
        """Take modules apart that hold the same, if their values differ and what comes of them agrees.

        One of them does more than the other, such as adding what it is given. It is asked only where a pair
        with the module within that ends the other was not looked at for its sake.
        """
        for candidate in list(self.accepted):
            pairs = {self.sites_of(candidate, place) for place in candidate.places}
            refutes = (self.is_refuted(candidate, place) for place in candidate.places)
            if not candidate.is_named and pairs <= self._preferred and all(refutes):
                for place in candidate.places:
                    self.release(candidate, place)

    def _get_candidate(
        self, candidates: dict[tuple[object, ...], Candidate], left: str, right: str
    ) -> tuple[Candidate, Place]:
        (template, a), (target_template, b) = self.sides[0].by_site[left], self.sides[1].by_site[right]
        key = template.name, target_template.name, shift_between(a, b)
        if key not in candidates:
            places = places_like(template, target_template, (a, b))
            candidates[key] = Candidate(template.name, target_template.name, places)
        return candidates[key], (a, b)

    def contradicts(self, candidate: Candidate, place: Place) -> bool:
        """Whether the values of one of two members belong elsewhere."""
        sites = self.sites_of(candidate, place)
        numbers = [side.group_of.get(site, -1) for side, site in zip(self.sides, sites, strict=True)]
        claimed = [claims.get(n) for claims, n in zip(self._claims, numbers, strict=True)]
        return any(
            claim is not None and claim != numbers[1 - i] and not self._is_saturated(i, numbers[i], claim)
            for i, claim in enumerate(claimed)
        )

    def _is_saturated(self, side: int, number: int, claim: int) -> bool:
        """Whether all sites with the values of a group have a partner in it, so that it may have others."""
        group_of, partner = self.sides[side].group_of, self.partner[1 - side]
        claiming = self.sides[1 - side].groups[claim]
        return all(site in partner and group_of.get(partner[site]) == number for site in claiming)

    def _add_names(self, canonical: Canonical) -> None:
        """Make candidates of site templates whose names are equal."""
        named: list[dict[str, list[Named]]] = [defaultdict(list), defaultdict(list)]
        for side, by_name in zip(self.sides, named, strict=True):
            for template in side.templates.values():
                name, added = name_of(template, canonical)
                by_name[name].append((template, added))
        known: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
        for candidate in self._candidates.values():
            known[candidate.reference, candidate.target].append(candidate)
        done: set[tuple[int, str]] = set()
        for name in sorted(named[0].keys() & named[1].keys()):
            for (reference, added), (target, target_added) in namesakes(named[0][name], named[1][name]):
                if reference.rank == target.rank == len(added) == len(target_added):
                    shift = tuple(x - y for x, y in zip(added, target_added, strict=True))
                    self._add_named(reference, target, shift, known[reference.name, target.name])
                    done |= {(0, reference.name), (1, target.name)}
        self._add_single_names(canonical, done)

    def _add_single_names(self, canonical: Canonical, done: Container[tuple[int, str]]) -> None:
        """Make candidates of single sites with equal names, whose templates count other numbers."""
        sites: list[dict[str, list[str]]] = [defaultdict(list), defaultdict(list)]
        for i, side in enumerate(self.sides):
            for template in side.templates.values():
                if not template.slot and (i, template.name) not in done:
                    for member in template.members.values():
                        sites[i][canonical(member.site)].append(member.site)
        groups: dict[tuple[str, str, Index | Place], list[Place]] = defaultdict(list)
        for name in sorted(sites[0].keys() & sites[1].keys()):
            if len(sites[0][name]) == len(sites[1][name]) == 1:
                (reference, a), (target, b) = (
                    side.by_site[s[name][0]] for side, s in zip(self.sides, sites, strict=True)
                )
                groups[reference.name, target.name, shift_between(a, b)].append((a, b))
        for (left, right, _), places in groups.items():
            self._mark_named(self.sides[0].templates[left], self.sides[1].templates[right], tuple(places))

    def _add_named(
        self, one: SiteTemplate, other: SiteTemplate, shift: Index, known: Sequence[Candidate]
    ) -> None:
        """Make the candidate of two site templates with equal names; lists may begin at another number."""
        starts = tuple(b - a for a, b in zip(min(one.members), min(other.members), strict=True))
        if starts != shift and len(one.members) == len(other.members):
            proven = [c for c in known if c.nats >= WEIGHTS.proof and 2 * len(c.agreeing) > len(c.places)]
            if proven:
                self._mark_named(one, other, max(proven, key=lambda c: (c.nats, c.places)).places)
                return
            shift = starts
        self._mark_named(one, other, shifted_places(one, other, shift))

    def _mark_named(self, one: SiteTemplate, other: SiteTemplate, places: tuple[Place, ...]) -> None:
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
        candidate, _ = self._get_candidate(self._candidates, one.members[a].site, other.members[b].site)
        candidate.is_named, candidate.is_by_rule, candidate.places = True, is_by_rule, places

    def sizes_fit(self, candidate: Candidate, place: Place) -> bool:
        """Whether two members gave as many elements; ranks together, or each of them."""
        left, right = self.records_of(candidate, place)
        return bool(sizes_of(left) & sizes_of(right)) and not self._grows_apart(candidate, place)

    def _grows_apart(self, candidate: Candidate, place: Place) -> bool:
        """Whether one of two members of unlike names holds more in each step, and the other does not."""
        if candidate.is_named:
            return False
        left, right = self.sites_of(candidate, place)
        return (left in self.sides[0].growing) != (right in self.sides[1].growing)

    def is_refuted(self, candidate: Candidate, place: Place) -> bool:
        """Whether two members cannot belong together.

        1. Unless names are equal: one result is whole numbers and the other is not, or both are results of
           modules within that do not belong together.
        2. Their values differ, and belong elsewhere, or what comes of them agrees, or the target's is made of
           what the reference's is not given.
        """
        left, right = self.sites_of(candidate, place)
        is_whole = [
            side.result(site).dtype.is_whole for side, site in zip(self.sides, (left, right), strict=True)
        ]
        if is_whole[0] != is_whole[1] and not candidate.is_named:
            return True
        if self._hands_on_another(candidate, left, right) or self._ends_with_another(candidate, left, right):
            return True
        if self.are_near(left, right) is not False:
            return False
        return (
            self.contradicts(candidate, place)
            or self.is_confirmed(0, left)
            or self.is_confirmed(1, right)
            or self._is_more(left, right)
            or self._is_made_of_another(left, right)
        )

    def _may_accept(self, candidate: Candidate, place: Place) -> bool:
        return self.is_free(candidate, place) and not self._hands_on_another(
            candidate, *self.sites_of(candidate, place)
        )

    def _hands_on_another(self, candidate: Candidate, left: str, right: str) -> bool:
        """Whether a module hands on a result whose partner is not what an operation of the target makes.

        A dropout has no module in a graph that was exported: it is no addition that comes behind it.
        """
        one, other = self.sides
        own = one.result(left)
        is_operation = ":" in other.module(right) and ":" not in own.key.site
        if candidate.is_named or not is_operation or left not in one.fingerprints:
            return False
        alike = [site for site in one.sites_with(own.digest) if site != left]
        partners = [self.partner[0][site] for site in alike if site in self.partner[0]]
        made = other.result(right).digest
        return bool(partners) and all(other.result(site).digest != made for site in partners)

    def _ends_with_another(self, candidate: Candidate, left: str, right: str) -> bool:
        """Whether two modules hand on results of modules within that do not belong together.

        The reference's model ends with a norm, and the target's stack of layers, which lies beside its norm,
        with the last of the layers. What hands on what a part of the reference's last module makes lacks the
        rest of that.
        """
        one, other = self.sides
        last = [] if candidate.is_named else self._handed_on(0, left)
        other_last = self._handed_on(1, right) if last else []
        partners = [self.partner[1][site] for site in other_last if site in self.partner[1]]
        if not partners or any(
            lies_within(one.module(part), one.module(site)) for part in partners for site in last
        ):
            return False
        theirs = [self.partner[0][site] for site in last if site in self.partner[0]]
        is_there = any(lies_within(other.module(site), other.module(right)) for site in theirs)
        own = one.result(left).digest
        return not is_there and all(one.result(site).digest != own for site in partners)

    def _handed_on(self, side: int, site: str) -> list[str]:
        """Sites within a module whose result is, bit for bit, that of the module."""
        of_side = self.sides[side]
        alike = of_side.sites_with(of_side.result(site).digest) if site in of_side.fingerprints else []
        return [other for other in alike if lies_within(of_side.module(other), of_side.module(site))]

    def _is_more(self, left: str, right: str) -> bool:
        """Whether the target hands on a result where the reference hands on another one, far nearer to it.

        The target's result is then what the reference makes of its own and of others, as a sum of embeddings.
        """
        one, other = self.sides
        ours, theirs = one.fingerprints.get(left), other.fingerprints.get(right)
        if ours is None or theirs is None:
            return False
        users = {self.partner[1].get(site) for site in other.consumers_of(other.result(right))}
        given = set(one.consumers_of(one.result(left)))
        arguments = [
            fingerprint
            for site in users - given
            if site is not None
            for fingerprint in one.arguments(one.by_site[site][0].name, one.by_site[site][1])
        ]
        apart = min((argument.distance(theirs) for argument in arguments), default=math.inf)
        return not users & given and apart <= _FAR_NEARER * ours.distance(theirs)

    def _is_made_of_another(self, left: str, right: str) -> bool:
        """Whether an operation of the target takes what the reference's module isn't given, nor makes itself.

        A sum with the embedding of words is not the embedding of types, which is given whole numbers.
        """
        one, other = self.sides
        module = one.module(left)
        given = {record.digest for record in one.member(left).arguments.values()} - {""}
        partners = [
            self.partner[1][site]
            for digest in other.operands.get(other.module(right), ())
            for site in other.sites_with(digest)
            if site in self.partner[1]
        ]
        outside = [site for site in partners if not lies_within(one.module(site), module)]
        return bool(given) and any(one.result(site).digest not in given for site in outside)

    def find_values_elsewhere(self, candidate: Candidate, place: Place) -> str:
        """The other site template of the target that has the values of the reference's member, or ""."""
        left, right = self.sites_of(candidate, place)
        claimed = self._claims[0].get(self.sides[0].group_of.get(left, -1))
        if claimed is None or claimed == self.sides[1].group_of.get(right):
            return ""
        return self.sides[1].by_site[self.sides[1].groups[claimed][0]][0].name

    def name_similarity(self, reference: str, target: str) -> float:
        """How many words the last parts of two names share, in nats."""
        if self._canonical is None:
            return 0.0
        sites = self.sides[0].templates[reference].first.site, self.sides[1].templates[target].first.site
        lasts = (self._canonical(site).rpartition(".")[2].lower() for site in sites)
        one, other = (set(re.findall(r"[a-z]+", last)) for last in lasts)
        return WEIGHTS.name_words * len(one & other) / max(len(one | other), 1)

    def accept_best(self, candidates: Iterable[Candidate]) -> None:
        """Accept the best candidates greedily, with a margin test against rivals (Lowe's ratio test, in
        nats).

        1. Candidates are sorted by score: what values prove and structure says.
        2. One is accepted if no rival for one of its sites comes within `pair_margin`; else it waits.
        3. This is repeated until nothing changes: accepted pairs take rivals away.
        4. If both runs are ordered, ties between sites with equal values are broken by order, as in 2 and 3.
        5. Those that wait to the end are `contested`.
        """
        live = [c for c in candidates if any(self.is_free(c, place) for place in c.places)]
        for candidate in live:
            candidate.similarity = self.similarity(candidate)
        live = sorted((c for c in live if c.score >= WEIGHTS.proof or c.is_named), key=lambda c: c.order)
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
                    places = tuple(p for p in live[number].places if self._may_accept(live[number], p))
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
        """Whether another candidate pairs one of these sites otherwise, and is about as good.

        To sites with equal values that makes no difference: there, the better one may tie with the next.
        """
        for side in (0, 1):
            group_of = self.sides[1 - side].group_of
            for pair in pairs:
                site, other = pair[side], pair[1 - side]
                for rival, third in wanted[side][site]:
                    if third == other or scores[rival] <= scores[number] - WEIGHTS.pair_margin:
                        continue
                    if self.has_partner(1 - side, third):
                        continue
                    is_same = other in group_of and group_of[other] == group_of.get(third)
                    if not (may_tie and is_same and number < rival):
                        return True
        return False

    def similarity(self, candidate: Candidate) -> float:
        """What structure, shapes and arguments say of a candidate, in nats."""
        key = candidate.reference, candidate.target
        if key not in self._similarities:
            self._similarities[key] = template_similarity(*self.templates_of(candidate))
        score = self._similarities[key] + self.children_similarity(*key)
        score += WEIGHTS.name_equal if candidate.is_named else 0.0
        if not candidate.agreeing:
            return score
        best = min(candidate.agreeing, key=lambda p: (candidate.agreeing[p].distance, p))
        score += self._argument_similarity(candidate, best, candidate.agreeing[best].distance)
        return score + self._standing_similarity(candidate, best)

    def _argument_similarity(self, candidate: Candidate, place: Place, distance: float) -> float:
        ones = self.sides[0].arguments(candidate.reference, place[0])
        others = self.sides[1].arguments(candidate.target, place[1])
        if not ones or not others:
            return 0.0
        apart = min(a.distance(b) for a in ones for b in others)
        are_equal = apart <= max(4 * distance, 8 * self.rounding)
        return WEIGHTS.arguments_equal if are_equal else WEIGHTS.arguments_differ

    def _standing_similarity(self, candidate: Candidate, place: Place) -> float:
        """Whether both stand at one place, in order of results, among the sites that have their values."""
        standing = []
        for i, site in enumerate(self.sites_of(candidate, place)):
            places = self._places_in_group(i, self.sides[i].group_of[site])
            standing.append((places[site], len(places) - places[site]))
        return sum(WEIGHTS.standing_equal for a, b in zip(*standing, strict=True) if a == b)

    def _places_in_group(self, i: int, number: int) -> Mapping[str, int]:
        """Where each site of a group stands in order of results."""
        if (i, number) not in self._standings:
            side = self.sides[i]
            ordered = sorted(side.groups[number], key=lambda s: (side.order(s), s))
            self._standings[i, number] = {site: place for place, site in enumerate(ordered)}
        return self._standings[i, number]

    def children_similarity(self, reference: str, target: str) -> float:
        """How many of what lies inside the one is paired with what lies inside the other."""
        target_children = self.sides[1].templates[target].inside
        children = self.sides[0].templates[reference].inside
        partners = [self.template_partners[name] for name in children if self.template_partners.get(name)]
        if not partners:
            return 0.0
        target_partners = target_children & self.paired_targets
        both = sum(bool(names & target_children) for names in partners)
        span = WEIGHTS.children_paired - WEIGHTS.children_unpaired
        return span * both / max(len(partners), len(target_partners)) + WEIGHTS.children_unpaired
