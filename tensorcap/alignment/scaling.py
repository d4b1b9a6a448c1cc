"""Tensors whose values are those of another one times a factor, or with other signs: mistakes of a port."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from tensorcap.alignment.candidates import Candidate, Place
from tensorcap.alignment.evidence import Near, Print
from tensorcap.alignment.matching import Matching

_FACTOR: Final = 2.0**-8  # by which values times a factor may differ; chance comes so near once in thousands
_EXACT: Final = 2.0**-16


class Scaled:
    """Finds what has the values of a site times a factor, among the sites that have no partner.

    Args:
        matching: What is paired.
        bound: How far equal values may be apart.
    """

    def __init__(self, matching: Matching, bound: float) -> None:
        self._bound = min(bound, _FACTOR)
        free = [
            {site: one for site, one in side.prints.items() if not matching.has_partner(i, site)}
            for i, side in enumerate(matching.sides)
        ]
        self._by_shape = [
            Near(prints, lambda one: one.mean * math.sqrt(one.size) / one.l2) for prints in free
        ]
        self._by_l2 = [Near(prints, lambda one: math.log(one.l2)) for prints in free]

    def of(self, side: int, one: Print) -> Mapping[str, str]:
        """The sites of the other side that have the values of a print, with what is to be said of each."""
        found: dict[str, str] = {}
        for sign in (1, -1):
            for name, other in self._by_shape[1 - side].around(one.times(sign), self._bound):
                factor = sign * one.l2 / other.l2
                if other.times(factor).distance(one) <= self._bound:
                    found.setdefault(name, f"has the values of {name} times {factor:.4g}")
        for name, other in self._by_l2[1 - side].around(one, _EXACT):
            peaks = [max(-p.minimum, p.maximum) for p in (one, other)]
            if math.isclose(*peaks, rel_tol=_EXACT) and not one.distance(other) <= self._bound:
                found.setdefault(name, f"has the magnitudes of {name} with other signs")
        return found


def pair_scaled(matching: Matching, bound: float) -> None:
    """Pair roles of which each member has the values of one member of the other, times a factor.

    What comes of a wrong tensor is wrong: pairs of which that agrees are not taken.
    """
    scaled = Scaled(matching, bound)
    places: dict[tuple[str, str], list[Place]] = defaultdict(list)
    one, other = matching.sides
    for site, print_ in one.prints.items():
        if matching.has_partner(0, site):
            continue
        found = _likest(matching, ((site, name) for name in scaled.of(0, print_)))
        if found is None:
            continue
        if _likest(matching, ((name, found[1]) for name in scaled.of(1, other.prints[found[1]]))) != found:
            continue
        (role, a), (target, b) = one.by_site[site], other.by_site[found[1]]
        places[role.name, target.name].append((a, b))
    for (role_name, target_name), pairs in sorted(places.items()):
        candidate = Candidate(role_name, target_name, tuple(pairs))
        candidate.places = tuple(p for p in pairs if not _is_refuted(matching, candidate, p))
        if candidate.places:
            matching.accept(candidate, candidate.places)


def _likest(matching: Matching, pairs: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """The pair of sites that stand at one place in both runs: they took the same, the same took them."""
    found = {pair: _standing(matching, *pair) for pair in pairs}
    best = [pair for pair, standing in found.items() if standing == max(found.values())]
    return best[0] if len(best) == 1 else None


def _standing(matching: Matching, left: str, right: str) -> int:
    one, other = matching.sides
    takers = {matching.partner[0].get(taker) for taker in one.takers_of(one.result(left))}
    mine, theirs = (
        [side.print_of(record) for record in side.member(site).arguments.values()]
        for side, site in ((one, left), (other, right))
    )
    is_given = any(matching.is_near(a, b, one.order(left)) for a in mine for b in theirs)
    return is_given + bool(takers.intersection(other.takers_of(other.result(right))))


def _is_refuted(matching: Matching, candidate: Candidate, place: Place) -> bool:
    """Whether values belong elsewhere, or what comes of them agrees; norms do, whatever the factor."""
    if matching.contradicts(candidate, place):
        return True
    for i, (side, site) in enumerate(zip(matching.sides, matching.sites_of(candidate, place), strict=True)):
        takers = side.takers_of(side.result(site))
        if matching.is_sealed(i, site, [t for t in takers if side.by_site[t][0].family != "norm"]):
            return True
    return False
