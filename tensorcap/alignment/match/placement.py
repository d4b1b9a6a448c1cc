"""Pairs by place: site templates that stand between the same neighbours in both runs and are alike.

Where values say nothing, as behind the first mistake of a port, the order of execution and the shapes still
do. The two sequences of site templates are laid side by side between the pairs that are known, so that as
much as possible is alike; a pair is taken only if every other way to lay them is worse.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from tensorcap.alignment.match.candidates import (
    Candidate,
    Shape,
    shape_of,
    shifted_places,
    template_similarity,
)
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.passes import MatchState
from tensorcap.alignment.match.weights import WEIGHTS
from tensorcap.alignment.names.site_templates import Index, SiteTemplate

_ROUNDING: Final = 1e-9  # of sums that were added up in another order
_MOST: Final = 250_000  # pairs between two known ones


def pair_by_place(state: MatchState) -> None:
    """Pair site templates by position between known pairs, if both runs are ordered.

    1. Known pairs that follow each other on both sides (a longest increasing subsequence) cut both orders
       into segments.
    2. Each segment is aligned like two strings (Needleman-Wunsch); the score of a match is the similarity of
       the two templates, children and names included.
    3. A match is kept if the best alignment without it is worse by `placement_margin`.
    """
    matching = state.matching
    if not matching.is_ordered:
        return
    chain = _chain(matching)
    sequences = [
        sorted(
            (r for r in s.templates.values() if not matching.is_fully_paired(i, r)),
            key=lambda r: (r.order, r.name),
        )
        for i, s in enumerate(matching.sides)
    ]
    bounds = [(-1, -1), *chain, (math.inf, math.inf)]
    offsets = _offsets(matching)
    rarity = _rarity(matching)
    for (low, low_other), (high, high_other) in itertools.pairwise(bounds):
        ones = _between(sequences[0], low, high)
        others = _between(sequences[1], low_other, high_other)
        is_lone = len(ones) == len(others) == 1 and (low >= 0 or high < math.inf)
        if ones and others and len(ones) * len(others) <= _MOST:
            _lay(matching, ones, others, offsets, rarity, bonus=WEIGHTS.placement_alone if is_lone else 0.0)


def complete_templates(state: MatchState) -> None:
    """Give pairs of site templates the members that values did not pair: what holds of others holds of them.

    A member is added if it is free, has as many elements, is not refuted by values, and is wanted only once.
    """
    matching = state.matching
    found = []
    wanted: Counter[tuple[int, str]] = Counter()
    for candidate in matching.accepted:
        one, other = (
            matching.sides[0].templates[candidate.reference],
            matching.sides[1].templates[candidate.target],
        )
        if one.rank != other.rank or len(candidate.places) == len(one.members):
            continue
        offsets = tuple(y - x for x, y in zip(*candidate.places[0], strict=True))
        places = [
            place
            for place in shifted_places(one, other, offsets)
            if matching.is_free(candidate, place)
            and matching.sizes_fit(candidate, place)
            and not matching.is_refuted(candidate, place)
        ]
        found.append((candidate, places))
        wanted.update((i, s) for p in places for i, s in enumerate(matching.sites_of(candidate, p)))
    for candidate, places in found:
        lone = [p for p in places if all(wanted[x] == 1 for x in enumerate(matching.sites_of(candidate, p)))]
        matching.extend(candidate, lone)


def pair_lone_children(state: MatchState) -> None:
    """Pair site templates that are the only ones left within two paired modules, if they are alike.

    1. Candidates are free templates of one parent's children each, whose similarity is `lone_child` or more.
    2. One that shares a template with another candidate is dropped.
    """
    matching = state.matching
    offsets = _offsets(matching)
    children: list[dict[str, list[SiteTemplate]]] = [defaultdict(list), defaultdict(list)]
    for i, side in enumerate(matching.sides):
        for template in side.templates.values():
            if template.family and not matching.is_fully_paired(i, template):
                children[i][template.parent].append(template)
    for pair in list(matching.accepted):
        names = pair.reference, pair.target
        free = [
            [template for template in children[i].get(name, ()) if not matching.is_fully_paired(i, template)]
            for i, name in enumerate(names)
        ]
        every = (_possible(matching, one, other, offsets) for one in free[0] for other in free[1])
        found = [c for c in every if c is not None and c.similarity >= WEIGHTS.lone_child]
        for candidate in found:
            rivals = [
                c for c in found if (c.reference == candidate.reference) != (c.target == candidate.target)
            ]
            if not rivals:
                matching.accept(candidate, candidate.places)


def _between(templates: Sequence[SiteTemplate], low: float, high: float) -> Sequence[SiteTemplate]:
    """Those of some site templates in order that gave their first result between two others."""
    start = bisect.bisect_right(templates, low, key=lambda r: r.order)
    return templates[start : bisect.bisect_left(templates, high, lo=start, key=lambda r: r.order)]


def _chain(matching: Matching) -> list[tuple[float, float]]:
    """The most pairs, as the orders of their two site templates, that follow each other on both sides."""
    orders = sorted(
        {
            (matching.sides[0].templates[c.reference].order, matching.sides[1].templates[c.target].order)
            for c in matching.accepted
        }
    )
    ends: list[float] = []
    tails: list[int] = []
    before: list[int] = []
    for i, (_, other) in enumerate(orders):
        at = bisect.bisect_left(ends, other)
        ends[at : at + 1] = [other]
        tails[at : at + 1] = [i]
        before.append(tails[at - 1] if at else -1)
    chain: list[tuple[float, float]] = []
    at = tails[-1] if tails else -1
    while at >= 0:
        chain.append(orders[at])
        at = before[at]
    return chain[::-1]


def _offsets(matching: Matching) -> dict[tuple[str, str], int]:
    """By how much the numbers of two lists differ, for lists whose members are paired."""
    found: dict[tuple[str, str], int] = {}
    for candidate in matching.accepted:
        for a, b in candidate.places[:1]:
            names = _lists(candidate.reference), _lists(candidate.target)
            if len(a) == len(b):
                for one, other, x, y in zip(*names, a, b, strict=True):
                    found.setdefault((one, other), y - x)
    return found


def _lists(name: str) -> list[str]:
    """The names of the lists that a site template's numbers count."""
    parts = name.split("{")
    return ["{".join(parts[: i + 1]) for i in range(len(parts) - 1)]


def _rarity(matching: Matching) -> dict[Shape, float]:
    """What it says that two results have a shape, in nats: less if many have it."""
    shapes = [shape_of(template) for side in matching.sides for template in side.templates.values()]
    return {shape: math.log(len(shapes) / count) for shape, count in Counter(shapes).items()}


def _lay(
    matching: Matching,
    ones: Sequence[SiteTemplate],
    others: Sequence[SiteTemplate],
    offsets: dict[tuple[str, str], int],
    rarity: dict[Shape, float],
    *,
    bonus: float,
) -> None:
    """Lay two sequences of site templates side by side, and take the pairs that leave no doubt."""
    found: dict[tuple[int, int], Candidate] = {}
    for i, one in enumerate(ones):
        for j, other in enumerate(others):
            candidate = _possible(matching, one, other, offsets)
            if candidate is None:
                continue
            if shape_of(one) == shape_of(other):
                candidate.similarity += min(rarity[shape_of(one)], WEIGHTS.shape_most) + bonus
            if candidate.similarity >= WEIGHTS.placement_least:
                found[i, j] = candidate
    scores = {key: candidate.similarity + WEIGHTS.placement_pair for key, candidate in found.items()}
    forward = _best(len(ones), len(others), scores)
    turned = {(len(ones) - 1 - i, len(others) - 1 - j): s for (i, j), s in scores.items()}
    backward = _best(len(ones), len(others), turned)
    best = forward[-1][-1]

    def through(i: int, j: int) -> float:
        return forward[i][j] + scores[i, j] + backward[len(ones) - 1 - i][len(others) - 1 - j]

    for (i, j), candidate in sorted(found.items()):
        if through(i, j) < best - _ROUNDING:
            continue
        rivals = [k for k in found if (k[0] == i) != (k[1] == j)]
        if all(through(*k) <= best - WEIGHTS.placement_margin for k in rivals):
            matching.accept(candidate, candidate.places)


def _best(rows: int, columns: int, scores: dict[tuple[int, int], float]) -> list[list[float]]:
    """For so many of both sequences' first site templates, the similarity of the best way to lay them."""
    table = [[0.0] * (columns + 1) for _ in range(rows + 1)]
    for i in range(rows):
        for j in range(columns):
            both = table[i][j] + scores[i, j] if (i, j) in scores else -math.inf
            table[i + 1][j + 1] = max(table[i][j + 1], table[i + 1][j], both)
    return table


def _possible(
    matching: Matching, one: SiteTemplate, other: SiteTemplate, offsets: dict[tuple[str, str], int]
) -> Candidate | None:
    if one.rank != other.rank:
        return None
    starts = zip(_lists(one.name), _lists(other.name), min(one.members), min(other.members), strict=True)
    shift: Index = tuple(offsets.get((a, b), y - x) for a, b, x, y in starts)
    candidate = Candidate(one.name, other.name, (), is_placed=True)
    candidate.places = tuple(
        place
        for place in shifted_places(one, other, shift)
        if matching.is_free(candidate, place) and matching.sizes_fit(candidate, place)
    )
    if 2 * len(candidate.places) < max(len(one.members), len(other.members)):
        return None
    if any(matching.is_refuted(candidate, place) for place in candidate.places):
        return None
    candidate.similarity = template_similarity(one, other) + matching.children_similarity(
        one.name, other.name
    )
    candidate.similarity += matching.name_similarity(one.name, other.name)
    return candidate
