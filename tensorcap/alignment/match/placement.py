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

from tensorcap.alignment.layout import Shape
from tensorcap.alignment.match.candidates import (
    Candidate,
    Place,
    places_like,
    shape_of,
    shifted_places,
    template_similarity,
)
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.passes import MatchState
from tensorcap.alignment.names import Index, SiteTemplate
from tensorcap.alignment.order import longest_rising

_IN_PLACE: Final = "alike, and between the same neighbours in order"
_ROUNDING: Final = 1e-9  # of sums that were added up in another order
_PAIRED: Final = 2  # members that show in which order others are
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
    chain = _find_anchors(matching)
    sequences = [
        sorted(unpaired, key=lambda r: (r.order, r.name)) for unpaired in matching.unpaired_templates()
    ]
    bounds: list[tuple[float, float]] = [(-1, -1), *chain, (math.inf, math.inf)]
    offsets = _find_offsets(matching)
    rarity = _score_shapes(matching)
    for (low, low_other), (high, high_other) in itertools.pairwise(bounds):
        segment = _between(sequences[0], low, high)
        target_segment = _between(sequences[1], low_other, high_other)
        is_lone = len(segment) == len(target_segment) == 1 and (low >= 0 or high < math.inf)
        if segment and target_segment and len(segment) * len(target_segment) <= _MOST:
            bonus = WEIGHTS.placement_alone if is_lone else 0.0
            _align_segment(matching, segment, target_segment, offsets, rarity, bonus=bonus)


def complete_templates(state: MatchState) -> None:
    """Give pairs of site templates the members that values did not pair: what holds of others holds of them.

    A member is added if it is free, has as many elements, is not refuted by values, and is wanted only once.
    """
    matching = state.matching
    extensions = []
    wanted: Counter[tuple[int, str]] = Counter()
    for candidate in matching.accepted:
        template, target_template = matching.templates_of(candidate)
        if template.rank != target_template.rank or len(candidate.places) == len(template.members):
            continue
        places = [
            place
            for place in places_like(template, target_template, candidate.places[0])
            if matching.is_free(candidate, place)
            and matching.sizes_fit(candidate, place)
            and not matching.is_refuted(candidate, place)
        ]
        extensions.append((candidate, places))
        wanted.update((i, s) for p in places for i, s in enumerate(matching.sites_of(candidate, p)))
    for candidate, places in extensions:
        lone = [p for p in places if all(wanted[x] == 1 for x in enumerate(matching.sites_of(candidate, p)))]
        matching.extend(candidate, lone)
    _complete_in_order(matching)


def _complete_in_order(matching: Matching) -> None:
    """Pair the last free member of two site templates, whose other members are paired in their order.

    Layers that one side counts in other steps than the other have no offset that holds of all.
    """
    places: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for candidate in matching.accepted:
        places[candidate.reference, candidate.target] += candidate.places
    for names, paired in places.items():
        new = Candidate(*names, ())
        one, other = matching.templates_of(new)
        if one.rank != other.rank or len(paired) < _PAIRED:
            continue
        free = [
            [index for index, member in template.members.items() if not matching.has_partner(i, member.site)]
            for i, template in enumerate((one, other))
        ]
        if len(free[0]) != 1 or len(free[1]) != 1:
            continue
        place = free[0][0], free[1][0]
        ordered = [b for _, b in sorted([*paired, place])]
        fits = matching.sizes_fit(new, place) and not matching.is_refuted(new, place)
        if ordered == sorted(ordered) and fits:
            matching.accept(new, (place,))


def pair_lone_children(state: MatchState) -> None:
    """Pair site templates that are the only ones left within two paired modules, if they are alike.

    1. Candidates are free templates of one parent's children each, whose similarity is `lone_child` or more.
    2. One that shares a template with another candidate is dropped.
    """
    matching = state.matching
    offsets = _find_offsets(matching)
    children: list[dict[str, list[SiteTemplate]]] = [defaultdict(list), defaultdict(list)]
    for side_children, unpaired in zip(children, matching.unpaired_templates(), strict=True):
        for template in unpaired:
            if template.family:
                side_children[template.parent].append(template)
    for pair in list(matching.accepted):
        free = [
            [template for template in children[i].get(name, ()) if not matching.is_fully_paired(i, template)]
            for i, name in enumerate((pair.reference, pair.target))
        ]
        every = (_make_candidate(matching, *both, offsets) for both in itertools.product(free[0], free[1]))
        candidates = [c for c in every if c is not None and c.similarity >= WEIGHTS.lone_child]
        for candidate in candidates:
            names = candidate.reference, candidate.target
            if not any((c.reference == names[0]) != (c.target == names[1]) for c in candidates):
                matching.accept(candidate, candidate.places)


def _between(templates: Sequence[SiteTemplate], low: float, high: float) -> Sequence[SiteTemplate]:
    """Those of some site templates in order that gave their first result between two others."""
    start = bisect.bisect_right(templates, low, key=lambda r: r.order)
    return templates[start : bisect.bisect_left(templates, high, lo=start, key=lambda r: r.order)]


def _find_anchors(matching: Matching) -> list[tuple[int, int]]:
    """The most pairs, as the orders of their two site templates, that follow each other on both sides."""
    templates = map(matching.templates_of, matching.accepted)
    orders = sorted({(template.order, target_template.order) for template, target_template in templates})
    return [orders[i] for i in longest_rising([order for _, order in orders], is_strict=True)]


def _find_offsets(matching: Matching) -> dict[tuple[str, str], int]:
    """By how much the numbers of two lists differ, for lists whose members are paired."""
    offsets: dict[tuple[str, str], int] = {}
    for candidate in matching.accepted:
        for a, b in candidate.places[:1]:
            names = _list_names(candidate.reference), _list_names(candidate.target)
            if len(a) == len(b):
                for name, target_name, x, y in zip(*names, a, b, strict=True):
                    offsets.setdefault((name, target_name), y - x)
    return offsets


def _list_names(name: str) -> list[str]:
    """The names of the lists that a site template's numbers count."""
    parts = name.split("{")
    return ["{".join(parts[: i + 1]) for i in range(len(parts) - 1)]


def _score_shapes(matching: Matching) -> dict[Shape, float]:
    """What it says that two results have a shape, in nats: less if many have it."""
    shapes = [shape_of(template) for side in matching.sides for template in side.templates.values()]
    return {shape: math.log(len(shapes) / count) for shape, count in Counter(shapes).items()}


def _align_segment(
    matching: Matching,
    templates: Sequence[SiteTemplate],
    target_templates: Sequence[SiteTemplate],
    offsets: dict[tuple[str, str], int],
    rarity: dict[Shape, float],
    *,
    bonus: float,
) -> None:
    """Lay two sequences of site templates side by side, and take the pairs that leave no doubt."""
    candidates: dict[tuple[int, int], Candidate] = {}
    for i, template in enumerate(templates):
        for j, target_template in enumerate(target_templates):
            candidate = _make_candidate(matching, template, target_template, offsets)
            if candidate is None:
                continue
            if shape_of(template) == shape_of(target_template):
                candidate.similarity += min(rarity[shape_of(template)], WEIGHTS.shape_most) + bonus
            if candidate.similarity >= WEIGHTS.placement_least:
                candidates[i, j] = candidate
    scores = {key: candidate.similarity + WEIGHTS.placement_pair for key, candidate in candidates.items()}
    forward = _needleman_wunsch(len(templates), len(target_templates), scores)
    turned = {(len(templates) - 1 - i, len(target_templates) - 1 - j): s for (i, j), s in scores.items()}
    backward = _needleman_wunsch(len(templates), len(target_templates), turned)
    best = forward[-1][-1]

    def through(i: int, j: int) -> float:
        return forward[i][j] + scores[i, j] + backward[len(templates) - 1 - i][len(target_templates) - 1 - j]

    rows, columns = (defaultdict[int, list[tuple[int, int]]](list) for _ in range(2))
    for i, j in candidates:
        rows[i].append((i, j))
        columns[j].append((i, j))
    for (i, j), candidate in sorted(candidates.items()):
        if through(i, j) < best - _ROUNDING:
            continue
        rivals = [k for k in (*rows[i], *columns[j]) if k != (i, j)]
        if all(through(*k) <= best - WEIGHTS.placement_margin for k in rivals):
            matching.accept(candidate, candidate.places)


def _needleman_wunsch(rows: int, columns: int, scores: dict[tuple[int, int], float]) -> list[list[float]]:
    """The scores of the best alignments of all prefixes of two sequences."""
    table = [[0.0] * (columns + 1) for _ in range(rows + 1)]
    for i in range(rows):
        for j in range(columns):
            both = table[i][j] + scores[i, j] if (i, j) in scores else -math.inf
            table[i + 1][j + 1] = max(table[i][j + 1], table[i + 1][j], both)
    return table


def _make_candidate(
    matching: Matching,
    template: SiteTemplate,
    target_template: SiteTemplate,
    offsets: dict[tuple[str, str], int],
) -> Candidate | None:
    if template.rank != target_template.rank:
        return None
    lists = _list_names(template.name), _list_names(target_template.name)
    starts = zip(*lists, min(template.members), min(target_template.members), strict=True)
    shift: Index = tuple(offsets.get((a, b), y - x) for a, b, x, y in starts)
    candidate = Candidate(template.name, target_template.name, (), because=_IN_PLACE)
    candidate.places = tuple(
        place
        for place in shifted_places(template, target_template, shift)
        if matching.is_free(candidate, place) and matching.sizes_fit(candidate, place)
    )
    if 2 * len(candidate.places) < max(len(template.members), len(target_template.members)):
        return None
    if any(matching.contents.differ(*matching.sites_of(candidate, place)) for place in candidate.places):
        return None
    if any(matching.is_refuted(candidate, place) for place in candidate.places):
        return None
    names = template.name, target_template.name
    candidate.similarity = template_similarity(template, target_template) + matching.children_similarity(
        *names
    )
    candidate.similarity += matching.name_similarity(*names)
    return candidate
