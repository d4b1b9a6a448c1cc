"""Operations of a graph that stand for layers, with a number behind their name: `softmax`, `softmax_1`.

Behind quantised layers one by itself proves little: those of other layers come as near. All of one name, or
each second, third, … of them, are one template of as many members, and are paired as one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from tensorcap.alignment.match.fingerprints import agreements
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.passes import MatchState, accept_sites
from tensorcap.alignment.match.sides import Side

_NUMBERED: Final = re.compile(r"(?P<base>[^:]*:.*?)(?:_(?P<number>[1-9]\d*))?")
_LEAST: Final = 2  # members
_NUMBERED_ALIKE: Final = (
    "operations of one name, in the order of its numbers, are nearest to the others of its kind"
)
_Sites = tuple[str, ...]


def pair_numbered_operations(state: MatchState) -> None:
    """Pair the members of site templates with operations of one name, in their order.

    1. A template of m members may be each k-th of m k operations of a name, from any of the first k on.
    2. Of most members fingerprints are to be nearest to each other, among members of the same place, and all
       together to prove it. Of operations of equal values those count that have the template's shape, or else
       the last.
    3. Members are paired whose values have no partner; those that have one must have these.
    """
    matching = state.matching
    reference, target = matching.sides
    templates: dict[_Sites, _Sites] = {}
    for template in sorted(reference.templates.values(), key=lambda each: (each.order, each.name)):
        sites = tuple(member.site for _, member in sorted(template.members.items()))
        is_free = any(not matching.has_partner(0, site) for site in sites)
        if template.rank == 1 and len(sites) >= _LEAST and is_free and ":" not in template.name:
            digests = tuple(reference.result(site).digest for site in sites)
            templates.setdefault(digests if all(digests) else sites, sites)
    known = [sites for sites in templates.values() if all(site in reference.fingerprints for site in sites)]
    for count in sorted({len(sites) for sites in known}):
        options: dict[tuple[int, ...], list[_Sites]] = defaultdict(list)
        for sites in _runs_of(target, count):
            options[tuple(target.group_of[site] for site in sites)].append(sites)
        ours, theirs = [sites for sites in known if len(sites) == count], [*options.values()]
        nats = _proofs(matching, ours, [alike[0] for alike in theirs])
        for (i, j), proven in sorted(nats.items(), key=lambda each: (-each[1], each[0])):
            fitting = [sites for sites in theirs[j] if _fits(matching, ours[i], sites)]
            if proven >= WEIGHTS.proof and fitting:
                shape = reference.result(ours[i][0]).shape
                chosen = max(fitting, key=lambda s: _rank(target, s, shape))
                accept_sites(state, dict.fromkeys(zip(ours[i], chosen, strict=True), _NUMBERED_ALIKE))


def _proofs(
    matching: Matching, ours: Sequence[_Sites], theirs: Sequence[_Sites]
) -> dict[tuple[int, int], float]:
    """What values prove of pairs of as many members, in nats, by their positions: each member by itself.

    Those are left out of which half of the members or fewer are nearest to each other.
    """
    reference, target = matching.sides
    agreeing: dict[tuple[int, int], list[float]] = defaultdict(list)
    for number in range(len(ours[0])):
        near = agreements(
            [reference.fingerprints[sites[number]] for sites in ours],
            [target.fingerprints[sites[number]] for sites in theirs],
            matching.rounding,
        )
        for pair, agreement in near.items():
            agreeing[pair].append(agreement.nats)
    return {pair: sum(nats) for pair, nats in agreeing.items() if 2 * len(nats) > len(ours[0])}


def _rank(target: Side, sites: _Sites, shape: tuple[int, ...]) -> tuple[bool, int]:
    first = target.result(sites[0])
    return first.shape == shape, target.order(sites[0])


def _runs_of(side: Side, count: int) -> Iterator[_Sites]:
    """So many operations of one name that stand equally far apart, in order, and are all of that name."""
    named: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for site in side.fingerprints:
        match = _NUMBERED.fullmatch(site) if ":" in site else None
        if match is not None:
            named[match["base"]].append((int(match["number"] or 0), site))
    for numbered in named.values():
        sites = [site for _, site in sorted(numbered)]
        step, rest = divmod(len(sites), count)
        for start in range(step if not rest else 0):
            yield tuple(sites[start::step])


def _fits(matching: Matching, sites: _Sites, others: _Sites) -> bool:
    """Whether results are of equal sizes, in one order, and none has another partner."""
    reference, target = matching.sides
    if len(sites) != len(others) or [*map(target.order, others)] != sorted(map(target.order, others)):
        return False
    return all(
        reference.size(site) == target.size(other)
        and (
            matching.partner[0].get(site) == other
            or (_is_free(matching, 0, site) and _is_free(matching, 1, other))
        )
        for site, other in zip(sites, others, strict=True)
    )


def _is_free(matching: Matching, i: int, site: str) -> bool:
    """Whether no result of a site's values has a partner."""
    side = matching.sides[i]
    return not any(matching.has_partner(i, each) for each in side.groups[side.group_of[site]])
