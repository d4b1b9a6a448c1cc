"""Pair outputs that have no counterpart as they are: sums, arguments, and scaled values.

A sum: results of the target that add up to one of the reference, as a block that keeps its residual apart
gives. Only the mean of a sum follows from its parts, so it proves less than a fingerprint does; norms and
extremes say what is impossible, and the values, if they may be read, decide. An argument: a sum or an
activation without a module of its own. Scaled: values times a factor, or with other signs, mistakes of a
port.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tensorcap.alignment.match.candidates import Candidate, Fusion, Place, shift_between
from tensorcap.alignment.match.fingerprints import (
    UNRELATED,
    Agreement,
    Fingerprint,
    NearestFingerprints,
    agreements,
)
from tensorcap.alignment.match.fusion import settle_fusions
from tensorcap.alignment.match.fusion_rules import places_of
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.passes import MatchState
from tensorcap.alignment.names import Index, SiteTemplate


def find_handed_on(state: MatchState) -> None:
    """Pair results without a partner with arguments of the target that have their values.

    The reference has a module for a sum or an activation that the target writes as an expression: there the
    values appear only as what the next module was given.

    1. Results of the reference and arguments of the target are candidates if their fingerprints are mutual
       nearest neighbours; of equal arguments the first use counts.
    2. Candidates are grouped by template and argument, and accepted from the best down if `proof` is reached;
       each result once.
    """
    matching = state.matching
    reference, target = matching.sides
    groups = [g for g in reference.groups if not any(matching.has_partner(0, site) for site in g)]
    first_uses: dict[tuple[str, ...], tuple[int, str, str]] = {}  # order, site and argument, by values
    values: dict[tuple[str, ...], Fingerprint] = {}
    for site, (template, index) in target.by_site.items():
        member = template.members[index]
        for name, record in sorted(member.arguments.items()):
            known = target.fingerprint_of(record)
            if known is not None:
                place = record.order, site, name
                at = (record.digest,) if record.digest else (site, name)
                first_uses[at] = min(place, first_uses.get(at, place))
                values[at] = known
    keys = sorted(first_uses, key=lambda at: first_uses[at])
    near = agreements(
        [reference.fingerprints[g[0]] for g in groups], [values[at] for at in keys], matching.rounding
    )
    proofs: dict[tuple[str, str, str, Index | Place], dict[Place, Agreement]] = defaultdict(dict)
    for (i, j), agreement in sorted(near.items()):
        _, site, name = first_uses[keys[j]]
        template, b = target.by_site[site]
        first, a = reference.by_site[min(groups[i], key=lambda s: (reference.order(s), s))]
        proofs[first.name, template.name, name, shift_between(a, b)][a, b] = agreement
    state.handed_on += _accept_each_once(proofs)


def _accept_each_once(
    proofs: dict[tuple[str, str, str, Index | Place], dict[Place, Agreement]],
) -> Iterable[tuple[Candidate, str]]:
    """The proofs that suffice, the best first, each result once."""
    done: set[tuple[str, Index]] = set()
    candidates = [
        (Candidate(reference, target, tuple(sorted(agreeing)), agreeing), name)
        for (reference, target, name, _), agreeing in proofs.items()
    ]
    for candidate, name in sorted(candidates, key=lambda pair: (*pair[0].order, pair[1])):
        candidate.places = tuple(p for p in candidate.places if (candidate.reference, p[0]) not in done)
        candidate.agreeing = {place: candidate.agreeing[place] for place in candidate.places}
        if candidate.nats >= WEIGHTS.proof:
            done.update((candidate.reference, a) for a, _ in candidate.places)
            yield candidate, name


Means = dict[int, list[tuple[float, str]]]  # of the results of the reference, by size, in order

_PARTS: Final = (2, 3)
_REACH: Final = 8  # roundings by which the mean of a sum may be off
_MANY: Final = 64  # results with a mean; more prove nothing


def find_sums(state: MatchState) -> None:
    """Find results of one site of the target whose means add up to that of a result of the reference.

    1. Of each two or three results of a site the means are added; a binary search finds the reference's
       results of that mean.
    2. What the agreement of the mean proves is summed over all members; norms and extremes may exclude a sum.
    3. Those that reach `proof` are kept as possible, for `fuse_sums` and `fuse_remaining_sums`.
    """
    matching = state.matching
    reference, target = matching.sides
    by_size: Means = defaultdict(list)
    for site, fingerprint in reference.fingerprints.items():
        by_size[fingerprint.size].append((fingerprint.mean, site))
    for means in by_size.values():
        means.sort()
    tried: dict[tuple[tuple[str, ...], str, Index], Fusion] = {}
    for results in _results(matching):
        for parts in (p for count in _PARTS for p in itertools.combinations(results, count)):
            names = tuple(part.name for part in parts)
            for index in parts[0].members:
                sites = [part.members[index].site for part in parts if index in part.members]
                fingerprints = [target.fingerprints[site] for site in sites if site in target.fingerprints]
                if len(fingerprints) < len(parts):
                    continue
                for whole, numbers in _find_wholes(matching, by_size, fingerprints):
                    if len(numbers) != len(index):
                        continue
                    shift = tuple(a - b for a, b in zip(index, numbers, strict=True))
                    key = names, whole.name, shift
                    if key not in tried:
                        tried[key] = _make_sum(matching, by_size, parts, whole, shift)
    state.sums = [fusion for fusion in tried.values() if fusion.nats >= WEIGHTS.proof]


def fuse_sums(state: MatchState) -> None:
    """Accept sums greedily, except those whose whole or part is as likely to be something by itself."""
    state.fusions += settle_fusions(state.matching, state.slots, state.sums)


def fuse_remaining_sums(state: MatchState) -> None:
    """Accept the remaining sums greedily; now that partners are known, parts may have one besides."""
    state.fusions += settle_fusions(state.matching, state.slots, state.sums, may_repeat=True)


def _find_wholes(
    matching: Matching, by_size: Means, parts: Sequence[Fingerprint]
) -> list[tuple[SiteTemplate, Index]]:
    """The results of the reference whose mean is that of a sum, if they are few."""
    if len({part.size for part in parts}) > 1:
        return []
    means, (start, stop) = by_size.get(parts[0].size, []), _span(matching, by_size, parts)
    return [matching.sides[0].by_site[site] for _, site in means[start:stop]] if stop - start <= _MANY else []


def _span(matching: Matching, by_size: Means, parts: Sequence[Fingerprint]) -> tuple[int, int]:
    """The places, among the means of the reference in order, of those that are the mean of a sum."""
    means, mean = by_size.get(parts[0].size, []), sum(part.mean for part in parts)
    reach = _REACH * matching.rounding * max(part.l2 for part in parts) / math.sqrt(parts[0].size)
    start = bisect.bisect_left(means, (mean - reach, ""))
    return start, bisect.bisect_left(means, (mean + reach, ""), lo=start)


def _make_sum(
    matching: Matching, by_size: Means, parts: Sequence[SiteTemplate], whole: SiteTemplate, shift: Index
) -> Fusion:
    places = places_of(parts, None, whole, shift)
    agreements = {index: _measure_sum(matching, by_size, *place) for index, place in places.items()}
    agreeing = {index: agreement for index, agreement in agreements.items() if agreement is not None}
    names = tuple(part.name for part in parts)
    return Fusion(False, names, None, whole.name, places, shift, agreeing, is_sum=True)


def _results(matching: Matching) -> Iterator[list[SiteTemplate]]:
    """The results of each site of the target that has several, in order."""
    templates = matching.sides[1].templates
    by_site: dict[str, list[SiteTemplate]] = defaultdict(list)
    for template in templates.values():
        main = templates[template.parent] if template.slot else template
        if template.rank == main.rank and template.record.dtype.kind == "float":
            by_site[main.name].append(template)
    for results in by_site.values():
        if len(results) > 1:
            yield sorted(results, key=lambda template: (template.order, template.name))


def _measure_sum(matching: Matching, by_size: Means, sites: Sequence[str], whole: str) -> Agreement | None:
    """What the mean of a sum proves; None if it proves nothing, or norms or extremes exclude it."""
    reference, target = matching.sides
    parts = [target.fingerprints[site] for site in sites if site in target.fingerprints]
    if len(parts) < len(sites) or whole not in reference.fingerprints:
        return None
    fingerprint, rounding = reference.fingerprints[whole], matching.rounding
    if not _is_possible(fingerprint, parts, 8 * rounding):
        return None
    scale = max(part.l2 for part in (fingerprint, *parts)) / math.sqrt(fingerprint.size)
    mean = sum(part.mean for part in parts)
    start, stop = _span(matching, by_size, parts)
    means = by_size[fingerprint.size]
    beside = [abs(other - mean) for other, _ in (*means[:start][-1:], *means[stop : stop + 1])]
    usual = min(UNRELATED * scale, *(abs(part.mean) for part in (fingerprint, *parts)), *beside) / scale
    distance = abs(fingerprint.mean - mean) / scale
    if not math.isfinite(distance):
        return None
    nats = math.log(max(usual, rounding) / max(distance, rounding))
    return Agreement(distance, usual, min(nats, WEIGHTS.tensor_most)) if nats > WEIGHTS.fusion_least else None


def _is_possible(whole: Fingerprint, parts: Sequence[Fingerprint], slack: float) -> bool:
    """Whether norms and extremes allow a tensor to be the sum of others."""
    every = (whole, *parts)
    peak = slack * max(abs(value) for one in every for value in (one.minimum, one.maximum))
    return (
        2 * max(one.l2 for one in every) <= (1 + slack) * sum(one.l2 for one in every)
        and whole.maximum <= sum(part.maximum for part in parts) + peak
        and whole.minimum >= sum(part.minimum for part in parts) - peak
    )


_FACTOR: Final = 2.0**-8  # by which values times a factor may differ; chance comes so near once in thousands
_EXACT: Final = 2.0**-16
_SLACK: Final = 1 + 2.0**-20  # for what is rounded twice: times a factor, and to norm 1


class ScaledResults:
    """Finds what has the values of a site times a factor, among the sites that have no partner.

    Args:
        matching: What is paired.
        bound: How far equal values may be apart.
    """

    def __init__(self, matching: Matching, bound: float) -> None:
        self._bound = min(bound, _FACTOR)
        free = [
            {site: one for site, one in side.fingerprints.items() if not matching.has_partner(i, site)}
            for i, side in enumerate(matching.sides)
        ]
        self._free = free
        self._units = [
            NearestFingerprints({site: one.times(1 / one.l2) for site, one in side.items()}) for side in free
        ]
        self._magnitudes = [
            NearestFingerprints({site: _magnitudes(one) for site, one in side.items()}) for side in free
        ]

    def find(self, side: int, fingerprint: Fingerprint) -> Mapping[str, str]:
        """Find the sites of the other side that have the values of a fingerprint, and say so of each."""
        texts: dict[str, str] = {}
        others = self._free[1 - side]
        for sign in (1, -1):
            unit = fingerprint.times(sign / fingerprint.l2)
            names = self._units[1 - side].within(self._bound * _SLACK, unit)
            for name in sorted(names, key=lambda name: (_mean_over_rms(others[name]), name)):
                factor = sign * fingerprint.l2 / others[name].l2
                if others[name].times(factor).distance(fingerprint) <= self._bound:
                    texts.setdefault(name, f"has the values of {name} times {factor:.4g}")
        names = self._magnitudes[1 - side].within(_EXACT, _magnitudes(fingerprint))
        for name in sorted(names, key=lambda name: (others[name].l2, name)):
            if not fingerprint.distance(others[name]) <= self._bound:
                texts.setdefault(name, f"has the magnitudes of {name} with other signs")
        return texts


def _magnitudes(one: Fingerprint) -> Fingerprint:
    """What is known of a tensor's magnitudes: its norm and the largest."""
    peak = max(-one.minimum, one.maximum)
    return Fingerprint(one.size, 0.0, one.l2, -peak, peak)


def _mean_over_rms(one: Fingerprint) -> float:
    return one.mean * math.sqrt(one.size) / one.l2


def pair_scaled(state: MatchState) -> None:
    """Pair site templates of which each member has the values of one member of the other, times a factor.

    What comes of a wrong tensor is wrong: pairs are not taken if that agrees of one, as of a factor that is
    folded into the weights of all layers; nor if the other side makes the same of it before it is used.
    """
    matching = state.matching
    scaled = ScaledResults(matching, state.slots.judge.bound)
    places: dict[tuple[str, str], list[Place]] = defaultdict(list)
    one, other = matching.sides
    for site, fingerprint in one.fingerprints.items():
        if matching.has_partner(0, site):
            continue
        best = _find_best_pair(matching, ((site, name) for name in scaled.find(0, fingerprint)))
        if best is None:
            continue
        back = scaled.find(1, other.fingerprints[best[1]])
        if _find_best_pair(matching, ((name, best[1]) for name in back)) == best:
            (template, a), (target, b) = one.by_site[site], other.by_site[best[1]]
            places[template.name, target.name].append((a, b))
    if not places:
        return
    given = _GivenValues(matching, min(state.slots.judge.bound, _FACTOR))
    for (template_name, target_name), pairs in sorted(places.items()):
        candidate = Candidate(template_name, target_name, tuple(pairs))
        if not any(_is_refuted(matching, candidate, place) or given.has(candidate, place) for place in pairs):
            matching.accept(candidate, candidate.places)


class _GivenValues:
    """The values that modules of both sides are given.

    Args:
        matching: What is paired.
        bound: How far equal values may be apart.
    """

    def __init__(self, matching: Matching, bound: float) -> None:
        self._matching, self._bound = matching, bound
        self._records = [
            {
                f"{site}/{name}": record
                for site, (template, index) in side.by_site.items()
                for name, record in template.members[index].arguments.items()
            }
            for side in matching.sides
        ]
        self._arguments = [
            NearestFingerprints(
                {
                    name: fingerprint
                    for name, record in records.items()
                    if (fingerprint := side.fingerprint_of(record)) is not None
                }
            )
            for side, records in zip(matching.sides, self._records, strict=True)
        ]

    def has(self, candidate: Candidate, place: Place) -> bool:
        """Whether modules are given, behind one of two members, what the other one gave: nothing lacks."""
        sites, sides = self._matching.sites_of(candidate, place), self._matching.sides
        return any(
            self._records[i][name].order > sides[i].order(sites[i])
            for i in (0, 1)
            for name in self._arguments[i].within(self._bound, sides[1 - i].fingerprints[sites[1 - i]])
        )


def _find_best_pair(matching: Matching, pairs: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """The pair of sites that stand at one place in both runs: they took the same, the same took them."""
    standings = {pair: _standing(matching, *pair) for pair in pairs}
    most = max(standings.values(), default=0)
    best = [pair for pair, standing in standings.items() if standing == most]
    return best[0] if len(best) == 1 else None


def _standing(matching: Matching, left: str, right: str) -> int:
    one, other = matching.sides
    consumers = {matching.partner[0].get(consumer) for consumer in one.consumers_of(one.result(left))}
    mine, theirs = (
        [side.fingerprint_of(record) for record in side.member(site).arguments.values()]
        for side, site in ((one, left), (other, right))
    )
    is_given = any(matching.is_near(a, b, one.order(left)) for a in mine for b in theirs)
    return is_given + bool(consumers.intersection(other.consumers_of(other.result(right))))


def _is_refuted(matching: Matching, candidate: Candidate, place: Place) -> bool:
    """Whether values belong elsewhere, or what comes of them agrees; norms do, whatever the factor."""
    if matching.contradicts(candidate, place):
        return True
    for i, (side, site) in enumerate(zip(matching.sides, matching.sites_of(candidate, place), strict=True)):
        consumers = side.consumers_of(side.result(site))
        if matching.is_confirmed(i, site, [t for t in consumers if side.by_site[t][0].family != "norm"]):
            return True
    return False
