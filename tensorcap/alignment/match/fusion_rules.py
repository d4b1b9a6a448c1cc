"""Fusions that rules tell by names: `q_proj`, `k_proj`, `v_proj` of one side are `qkv_proj` of the other.

Which tensors of one side may be parts of one of the other, and what proves that they are.

Parts are siblings (`q`, `k`, `v`; `gate`, `up`), neighbours in order where names tell nothing, results of one
site, or all members of a list (experts, layers).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.alignment.match.candidates import ENOUGH, Fusion
from tensorcap.alignment.match.fingerprints import UNRELATED, Agreement, Fingerprint, proof
from tensorcap.alignment.match.fusion import claim, fitted, freed, settle, tensors_of
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.names.rulesets import Fused, Rules
from tensorcap.alignment.names.site_templates import Index, Member, SiteTemplate, name_of

Named = tuple[SiteTemplate, Index]  # a role, and what its rules add to its numbers


def fuse_by_rules(matching: Matching, slots: Slots, rules: Rules) -> list[Fusion]:
    """The fusions that rules tell by names, of what has no partner.

    Their layout is what values say, else the one that fits shapes, else the rule's.
    """
    chosen: list[Fusion] = []
    if not rules.fused:
        return chosen
    names = [_names(side, rules) for side in matching.sides]
    for is_split in (True, False):
        parts_by_name, wholes = names if is_split else names[::-1]
        for name, whole in wholes.items():
            parent, dot, last = name.rpartition(".")
            for rule in rules.fused:
                parts = [parts_by_name.get(f"{parent}{dot}{part}") for part in rule.parts]
                found = [part for part in parts if part is not None]
                if last != rule.whole or len(found) < len(parts):
                    continue
                fusion = _ruled(matching, slots, rule, found, whole, is_split=is_split)
                if fusion is not None:
                    claim(matching, fusion)
                    chosen.append(fusion)
    return chosen


def _names(side: Side, rules: Rules) -> Mapping[str, Named]:
    found = {}
    for role in side.roles.values():
        if not role.slot:
            name, added = name_of(role, rules.canonical)
            found[name] = role, added
    return found


def _ruled(
    matching: Matching, slots: Slots, rule: Fused, parts: Sequence[Named], whole: Named, *, is_split: bool
) -> Fusion | None:
    """The fusion of a rule with its layout; None where tensors do not add up, or have partners."""
    roles, added = [role for role, _ in parts], parts[0][1]
    if len({role.rank for role in (*roles, whole[0])}) > 1 or any(more != added for _, more in parts):
        return None
    shift = tuple(theirs - ours for ours, theirs in zip(added, whole[1], strict=True))
    side, other = matching.sides if is_split else matching.sides[::-1]
    places = places_of(roles, None, whole[0], shift)
    agreeing = {
        index: agreement
        for index, (sites, one) in places.items()
        if (agreement := agreement_of(matching, side.prints, other.prints, sites, one)) is not None
    }
    names = tuple(role.name for role in roles)
    free = freed(
        matching, Fusion(is_split, names, None, whole[0].name, places, shift, agreeing, is_by_rule=True)
    )
    if not free.places:
        return None
    made = fitted(matching, slots, free)
    if made.how is None and rule.axis is not None:
        made = _as_the_rule_says(matching, slots, free, rule.axis)
    return made if made.how is not None else None


def _as_the_rule_says(matching: Matching, slots: Slots, fusion: Fusion, axis: int) -> Fusion:
    """The fusion with its parts one after the other along an axis, if they fit so."""
    reference, target = tensors_of(matching, fusion, min(fusion.places), None)
    parts = reference if fusion.is_split else target
    if not all(-len(record.shape) <= axis < len(record.shape) for record in parts):
        return fusion
    sizes = ",".join(str(record.shape[axis]) for record in parts)
    order = tuple(range(len(parts)))
    choice = ((f"split {axis} {sizes}",), order) if fusion.is_split else ((f"concat {axis}",), (0,))
    return replace(fusion, how=slots.fit(reference, target, among=[choice]), order=order)


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
    by_size: dict[int, list[SiteTemplate]] = defaultdict(list)
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


def _siblings(roles: Sequence[SiteTemplate]) -> Iterator[tuple[tuple[SiteTemplate, ...], int | None]]:
    """Roles of one parent, and the results of one site."""
    families: dict[tuple[str, bool], list[SiteTemplate]] = defaultdict(list)
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


def _lists(roles: Sequence[SiteTemplate]) -> Iterator[tuple[tuple[SiteTemplate, ...], int | None]]:
    for role in roles:
        for axis in range(role.rank):
            if len({index[axis] for index in role.members}) > 1:
                yield (role,), axis


def _group(role: SiteTemplate, axis: int | None) -> list[Member]:
    """The parts of a role that the first whole would be made of."""
    if axis is None:
        return [role.first]
    first = min(role.members)
    rest = first[:axis] + first[axis + 1 :]
    return [m for index, m in sorted(role.members.items()) if index[:axis] + index[axis + 1 :] == rest]


def _shifts(parts: Sequence[SiteTemplate], axis: int | None, whole: SiteTemplate) -> list[Index]:
    """By how much the numbers of parts may be ahead of the whole's."""
    first = min(parts[0].members)
    first = first if axis is None else first[:axis] + first[axis + 1 :]
    if len(first) != whole.rank:
        return []
    zero = (0,) * whole.rank
    return list(dict.fromkeys([zero, tuple(a - b for a, b in zip(first, min(whole.members), strict=True))]))


def places_of(
    parts: Sequence[SiteTemplate], axis: int | None, whole: SiteTemplate, shift: Index
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
    prints: Mapping[str, Fingerprint],
    wholes: Mapping[str, Fingerprint],
    sites: Sequence[str],
    whole: str,
) -> Agreement | None:
    """How the statistics of parts, added up, agree with those of a whole; None where they do not."""
    if whole not in wholes or not all(site in prints for site in sites):
        return None
    distance = Fingerprint.joined([prints[site] for site in sites]).distance(wholes[whole])
    nats = proof(distance, UNRELATED, matching.rounding)
    return Agreement(distance, UNRELATED, nats) if nats > 1.0 else None
