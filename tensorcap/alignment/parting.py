"""Which tensors of one side may be parts of one of the other, and what proves that they are.

Parts are siblings (`q`, `k`, `v`; `gate`, `up`), neighbours in order where names tell nothing, results of one
site, or all members of a list (experts, layers).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tensorcap.alignment.candidates import ENOUGH, Fusion
from tensorcap.alignment.evidence import UNRELATED, Agreement, Print, proof
from tensorcap.alignment.fusing import claim, fitted, settle
from tensorcap.alignment.matching import Matching
from tensorcap.alignment.roles import Index, Role
from tensorcap.alignment.slots import Slots
from tensorcap.alignment.survey import Member

_PARTS: Final = (2, 3, 4)
_WINDOW: Final = 6  # neighbours in order, where there are no siblings
_SIBLINGS: Final = 12


def fuse_by_values(matching: Matching, slots: Slots) -> list[Fusion]:
    """The fusions among what has no partner that statistics prove, with their layouts.

    Those for which no layout is certain come without one, and leave their sites free.
    """
    found = [f for is_split in (True, False) for f in _possible(matching, is_split=is_split)]
    return settle(matching, slots, [f for f in found if f.nats >= ENOUGH])


def fuse_by_shapes(matching: Matching, slots: Slots) -> list[Fusion]:
    """The fusions that are the only way in which shapes within two paired modules add up."""
    found = [
        f
        for is_split in (True, False)
        for f in _possible(matching, is_split=is_split)
        if f.axis is None and _add_up(matching, f)
    ]
    chosen: list[Fusion] = []
    for fusion in found:
        rivals = [f for f in found if f is not fusion and f.sites & fusion.sites]
        if not rivals and not matching.fused & fusion.sites:
            chosen.append(fitted(matching, slots, fusion))
    for fusion in chosen:
        claim(matching, fusion)
    return chosen


def _add_up(matching: Matching, fusion: Fusion) -> bool:
    """Whether parts and whole lie in paired modules, and the whole's weight has the parts' elements."""
    side, other = matching.sides if fusion.is_split else matching.sides[::-1]
    parts, whole = [side.roles[name] for name in fusion.parts], other.roles[fusion.whole]
    pair = (parts[0].parent, whole.parent) if fusion.is_split else (whole.parent, parts[0].parent)
    if pair[1] not in matching.role_partner.get(pair[0], ()):
        return False
    if any(matching.is_taken(0 if fusion.is_split else 1, part) for part in parts):
        return False
    largest = [role.parameters[0] if role.parameters else () for role in (*parts, whole)]
    return all(largest) and sum(map(math.prod, largest[:-1])) == math.prod(largest[-1])


def _possible(matching: Matching, *, is_split: bool) -> Iterator[Fusion]:
    side, other = matching.sides if is_split else matching.sides[::-1]
    number = 0 if is_split else 1
    roles = [role for role in side.roles.values() if not matching.is_taken(number, role)]
    wholes = [role for role in other.roles.values() if not matching.is_taken(1 - number, role)]
    by_size: dict[int, list[Role]] = defaultdict(list)
    for role in wholes:
        by_size[sum(record.size for record in other.records(role.first.site))].append(role)
    sizes = {role.name: sum(record.size for record in side.records(role.first.site)) for role in roles}
    for parts, axis in itertools.chain(_siblings(roles), _lists(roles)):
        if axis is None:
            size = sum(sizes[part.name] for part in parts)
        else:
            size = sum(r.size for part in parts for m in _group(part, axis) for r in side.records(m.site))
        for whole in by_size.get(size, ()):
            for shift in _shifts(parts, axis, whole):
                places = places_of(parts, axis, whole, shift)
                agreeing = {
                    index: agreement
                    for index, (sites, one) in places.items()
                    if (agreement := agreement_of(matching, side.prints, other.prints, sites, one))
                    is not None
                }
                if places:
                    names = tuple(role.name for role in parts)
                    yield Fusion(is_split, names, axis, whole.name, places, shift, agreeing)


def _siblings(roles: Sequence[Role]) -> Iterator[tuple[tuple[Role, ...], int | None]]:
    """Roles of one parent, and the results of one site."""
    families: dict[tuple[str, bool], list[Role]] = defaultdict(list)
    ranks = {role.name: role.rank for role in roles}
    for role in roles:
        families[role.parent, bool(role.slot)].append(role)
        module, _, last = role.name.rpartition(".")
        if role.record.key.is_bare and module:  # the weights of siblings, in a file without slots
            families[f"{module.rpartition('.')[0]}/{last}", False].append(role)
    for role in roles:
        if (role.name, True) in families and not role.slot:
            families[role.name, True].append(role)
    for children in families.values():
        children.sort(key=lambda r: (r.order, r.name))
        for start in range(len(children)):
            window = children[start : start + (_SIBLINGS if len(children) <= _SIBLINGS else _WINDOW)]
            for count in _PARTS:
                for rest in itertools.combinations(window[1:], count - 1):
                    if all(ranks[part.name] == ranks[window[0].name] for part in rest):
                        yield (window[0], *rest), None


def _lists(roles: Sequence[Role]) -> Iterator[tuple[tuple[Role, ...], int | None]]:
    for role in roles:
        for axis in range(role.rank):
            if len({index[axis] for index in role.members}) > 1:
                yield (role,), axis


def _group(role: Role, axis: int | None) -> list[Member]:
    """The parts of a role that the first whole would be made of."""
    if axis is None:
        return [role.first]
    first = min(role.members)
    rest = first[:axis] + first[axis + 1 :]
    return [m for index, m in sorted(role.members.items()) if index[:axis] + index[axis + 1 :] == rest]


def _shifts(parts: Sequence[Role], axis: int | None, whole: Role) -> list[Index]:
    """By how much the numbers of parts may be ahead of the whole's."""
    first = min(parts[0].members)
    first = first if axis is None else first[:axis] + first[axis + 1 :]
    if len(first) != whole.rank:
        return []
    zero = (0,) * whole.rank
    return list(dict.fromkeys([zero, tuple(a - b for a, b in zip(first, min(whole.members), strict=True))]))


def places_of(
    parts: Sequence[Role], axis: int | None, whole: Role, shift: Index
) -> dict[Index, tuple[tuple[str, ...], str]]:
    """The sites of the parts, and of the whole, by the whole's numbers."""
    found: dict[Index, list[str]] = defaultdict(list)
    if axis is None:
        for index in parts[0].members:
            if all(index in part.members for part in parts):
                found[index] = [part.members[index].site for part in parts]
    else:
        for index, member in sorted(parts[0].members.items()):
            found[index[:axis] + index[axis + 1 :]].append(member.site)
    places = {}
    for index, member in whole.members.items():
        sites = found.get(tuple(a + b for a, b in zip(index, shift, strict=True)))
        if sites:
            places[index] = tuple(sites), member.site
    return places


def agreement_of(
    matching: Matching,
    prints: Mapping[str, Print],
    wholes: Mapping[str, Print],
    sites: Sequence[str],
    whole: str,
) -> Agreement | None:
    """How the statistics of parts, added up, agree with those of a whole; None where they do not."""
    if whole not in wholes or not all(site in prints for site in sites):
        return None
    distance = Print.joined([prints[site] for site in sites]).distance(wholes[whole])
    nats = proof(distance, UNRELATED, matching.rounding)
    return Agreement(distance, UNRELATED, nats) if nats > 1.0 else None
