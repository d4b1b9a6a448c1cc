"""Results of the target that add up to one of the reference: a block that keeps its residual apart.

Of the statistics of a sum only the mean follows from those of its parts, so it proves less than a print does;
norms and extremes say what is impossible, and the values, where they may be read, decide.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from tensorcap.alignment.candidates import ENOUGH, Fusion
from tensorcap.alignment.evidence import UNRELATED, Agreement, Print
from tensorcap.alignment.matching import Matching
from tensorcap.alignment.parting import places_of
from tensorcap.alignment.roles import Index, Role

Means = dict[int, list[tuple[float, str]]]  # of the results of the reference, by size, in order

_PARTS: Final = (2, 3)
_MOST: Final = 20.0  # nats
_REACH: Final = 8  # roundings by which the mean of a sum may be off
_MANY: Final = 64  # results with a mean; more prove nothing


def possible_sums(matching: Matching) -> list[Fusion]:
    """Results of one site of the target whose means add up to that of a result of the reference."""
    one, other = matching.sides
    by_size: Means = defaultdict(list)
    for site, found in one.prints.items():
        by_size[found.size].append((found.mean, site))
    for means in by_size.values():
        means.sort()
    tried: dict[tuple[tuple[str, ...], str, Index], Fusion] = {}
    for results in _results(matching):
        for parts in (p for count in _PARTS for p in itertools.combinations(results, count)):
            names = tuple(part.name for part in parts)
            for index in parts[0].members:
                sites = [part.members[index].site for part in parts if index in part.members]
                prints = [other.prints[site] for site in sites if site in other.prints]
                for whole, numbers in _near(matching, by_size, prints) if len(prints) == len(parts) else ():
                    if len(numbers) == len(index):
                        shift = tuple(a - b for a, b in zip(index, numbers, strict=True))
                        if (names, whole.name, shift) not in tried:
                            tried[names, whole.name, shift] = _fusion(matching, by_size, parts, whole, shift)
    return [fusion for fusion in tried.values() if fusion.nats >= ENOUGH]


def _near(matching: Matching, by_size: Means, parts: Sequence[Print]) -> list[tuple[Role, Index]]:
    """The results of the reference whose mean is that of a sum, if they are few."""
    if len({part.size for part in parts}) > 1:
        return []
    means, (start, stop) = by_size.get(parts[0].size, []), _span(matching, by_size, parts)
    return [matching.sides[0].by_site[site] for _, site in means[start:stop]] if stop - start <= _MANY else []


def _span(matching: Matching, by_size: Means, parts: Sequence[Print]) -> tuple[int, int]:
    """The places, among the means of the reference in order, of those that are the mean of a sum."""
    means, mean = by_size.get(parts[0].size, []), sum(part.mean for part in parts)
    reach = _REACH * matching.rounding * max(part.l2 for part in parts) / math.sqrt(parts[0].size)
    start = bisect.bisect_left(means, (mean - reach, ""))
    return start, bisect.bisect_left(means, (mean + reach, ""), lo=start)


def _fusion(matching: Matching, by_size: Means, parts: Sequence[Role], whole: Role, shift: Index) -> Fusion:
    places = places_of(parts, None, whole, shift)
    found = {index: _agreement(matching, by_size, *place) for index, place in places.items()}
    agreeing = {index: one for index, one in found.items() if one is not None}
    names = tuple(part.name for part in parts)
    return Fusion(False, names, None, whole.name, places, shift, agreeing, is_sum=True)


def _results(matching: Matching) -> Iterator[list[Role]]:
    """The results of each site of the target that has several, in order."""
    roles = matching.sides[1].roles
    by_site: dict[str, list[Role]] = defaultdict(list)
    for role in roles.values():
        main = roles[role.parent] if role.slot else role
        if role.rank == main.rank and role.record.dtype.kind == "float":
            by_site[main.name].append(role)
    for results in by_site.values():
        if len(results) > 1:
            yield sorted(results, key=lambda role: (role.order, role.name))


def _agreement(matching: Matching, by_size: Means, sites: Sequence[str], whole: str) -> Agreement | None:
    """What the mean of a sum proves; None where it proves nothing, or norms or extremes exclude it."""
    one, other = matching.sides
    parts = [other.prints[site] for site in sites if site in other.prints]
    if len(parts) < len(sites) or whole not in one.prints:
        return None
    made, rounding = one.prints[whole], matching.rounding
    if not _is_possible(made, parts, 8 * rounding):
        return None
    scale = max(part.l2 for part in (made, *parts)) / math.sqrt(made.size)
    mean = sum(part.mean for part in parts)
    start, stop = _span(matching, by_size, parts)
    means = by_size[made.size]
    beside = [abs(found - mean) for found, _ in (*means[:start][-1:], *means[stop : stop + 1])]
    usual = min(UNRELATED * scale, *(abs(part.mean) for part in (made, *parts)), *beside) / scale
    distance = abs(made.mean - mean) / scale
    nats = math.log(max(usual, rounding) / max(distance, rounding))
    return Agreement(distance, usual, min(nats, _MOST)) if nats > 1.0 else None


def _is_possible(whole: Print, parts: Sequence[Print], slack: float) -> bool:
    """Whether norms and extremes allow a tensor to be the sum of others."""
    every = (whole, *parts)
    peak = slack * max(abs(value) for one in every for value in (one.minimum, one.maximum))
    return (
        2 * max(one.l2 for one in every) <= (1 + slack) * sum(one.l2 for one in every)
        and whole.maximum <= sum(part.maximum for part in parts) + peak
        and whole.minimum >= sum(part.minimum for part in parts) - peak
    )
