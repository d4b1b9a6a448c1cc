"""Passes that pair modules by what they hold: weights of the same sizes in order, and the same contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from tensorcap.alignment.layout import Shape
from tensorcap.alignment.match.candidates import FoldedWeights
from tensorcap.alignment.match.contents import SitePair, sorted_sizes
from tensorcap.alignment.match.passes import MatchState, accept_sites
from tensorcap.alignment.match.sides import Side

_HOLD_THE_SAME: Final = "of what both sides have they hold the same parameters and modules"
_IN_ORDER: Final = "each is number {} of the {} modules whose weights have these sizes, in order"


def pair_by_contents(state: MatchState) -> None:
    """Pair modules that hold the same parameters and the same modules, of those that both sides have.

    They are pairs though some of their parameters are fused or folded, and whatever values are behind a
    mistake; what values refute is none. See `Contents.pairs`.
    """
    matching = state.matching

    def is_known(site: str, other: str) -> bool:
        templates = [side.by_site[s][0].name for side, s in zip(matching.sides, (site, other), strict=True)]
        return templates[1] in matching.template_partners.get(templates[0], ())

    matching.release_refuted_contents()
    sizes = matching.sides[0].modules, matching.sides[1].modules
    known = -1
    while known != len(matching.accepted):
        known = len(matching.accepted)
        proven = [(a, b) for a, b in matching.partner[0].items() if a in sizes[0] and b in sizes[1]]
        pairs = matching.contents.pairs(proven, sizes, is_known)
        accept_sites(state, dict.fromkeys(pairs, _HOLD_THE_SAME), refuses_differing=True)


def pair_by_weights(state: MatchState) -> None:
    """Pair modules with weights by their order among those of their sizes, if both runs have as many.

    1. Modules are told by the sizes of their largest parameter, which has two axes at least. One that is
       given what another one of these sizes is given is left out: query and key may come in either order.
    2. Those of some sizes are paired in their order if both sides have as many, they hold about as many
       elements and no parameter of another one, and known pairs are in this order.
    3. If the reference has a norm right behind such a module, and the target none, its weights are folded:
       what the target gives is what the norm gives; and the other way round.
    """
    matching, contents = state.matching, state.matching.contents
    if not matching.is_ordered:
        return
    weighted = [_weighted(side) for side in matching.sides]
    norms = [_norms_behind(side, sites) for side, sites in zip(matching.sides, weighted, strict=True)]
    pairs: dict[SitePair, str] = {}
    folded: dict[SitePair, FoldedWeights] = {}
    for sizes in weighted[0].keys() & weighted[1].keys():
        both = weighted[0][sizes], weighted[1][sizes]
        if len(both[0]) != len(both[1]):
            continue
        in_order = [*zip(*both, strict=True)]
        if not all(contents.hold_as_many(*pair) and not contents.differ(*pair) for pair in in_order):
            continue
        results = [_results(pair, norms) for pair in in_order]
        ranks = [
            {site: n for n, pair in enumerate(in_order) for site in (pair[i], results[n][i])} for i in (0, 1)
        ]
        partners = {site: matching.partner[0][site] for site in ranks[0] if site in matching.partner[0]}
        if all(ranks[1].get(other, ranks[0][site]) == ranks[0][site] for site, other in partners.items()):
            pairs |= {pair: _IN_ORDER.format(n, len(results)) for n, pair in enumerate(results, 1)}
            folded |= {
                result: FoldedWeights(site, result[1])
                for site, result in zip(both[0], results, strict=True)
                if result[0] != site
            }
    accept_sites(state, pairs, refuses_differing=True)
    state.folded += [fold for (a, b), fold in folded.items() if matching.partner[0].get(a) == b]


def _results(pair: SitePair, norms: Sequence[Mapping[str, str]]) -> SitePair:
    """Whose results belong together: of two modules, or of one and the norm behind the other."""
    (site, other), (norm, other_norm) = pair, (known.get(s) for known, s in zip(norms, pair, strict=True))
    if norm and not other_norm:
        return norm, other
    return (site, other_norm) if other_norm and not norm else pair


def _weighted(side: Side) -> Mapping[Shape, Sequence[str]]:
    """The modules with weights by their sizes, in order of execution, of which no two are given the same."""
    by_sizes: dict[Shape, list[str]] = defaultdict(list)
    for site in sorted(side.modules, key=lambda s: (side.order(s), s)):
        template, _ = side.by_site[site]
        member = side.member(site)
        shapes = map(sorted_sizes, member.parameters.values())
        sizes = max(shapes, key=lambda shape: (len(shape), shape), default=())
        if len(sizes) > 1 and not template.inside:
            by_sizes[sizes].append(site)
    weighted = {}
    for sizes, sites in by_sizes.items():
        given: dict[str, int] = defaultdict(int)
        digests = {s: {r.digest for r in side.member(s).arguments.values() if r.digest} for s in sites}
        for of_site in digests.values():
            for digest in of_site:
                given[digest] += 1
        weighted[sizes] = [s for s in sites if all(given[digest] == 1 for digest in digests[s])]
    return weighted


def _norms_behind(side: Side, weighted: Mapping[Shape, Sequence[str]]) -> Mapping[str, str]:
    """The norm that alone takes the result of a module with weights, by that module."""
    norms, modules = {}, side.modules
    for site in (site for sites in weighted.values() for site in sites):
        users = [user for user in side.consumers_of(side.result(site)) if user in modules]
        inmost = [user for user in users if not side.by_site[user][0].inside]
        if len(inmost) == 1 and side.by_site[inmost[0]][0].family == "norm":
            norms[site] = inmost[0]
    return norms
