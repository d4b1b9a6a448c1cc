"""Fusions that rules tell by names: `q_proj`, `k_proj`, `v_proj` of one side are `qkv_proj` of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tensorcap.alignment.candidates import Fusion
from tensorcap.alignment.fusing import claim, fitted, freed, tensors_of
from tensorcap.alignment.matching import Matching
from tensorcap.alignment.naming import name_of
from tensorcap.alignment.parting import agreement_of, places_of
from tensorcap.alignment.roles import Index, Role
from tensorcap.alignment.rules import Fused, Rules
from tensorcap.alignment.sides import Side
from tensorcap.alignment.slots import Slots

Named = tuple[Role, Index]  # a role, and what its rules add to its numbers


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
