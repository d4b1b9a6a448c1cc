"""Find fusions, several tensors of one side that are one of the other: by rules of names, values, or shapes.

`q_proj`, `k_proj`, `v_proj` of one side are `qkv_proj` of the other. Parts are siblings (`q`, `k`, `v`;
`gate`, `up`), neighbours in order if names say nothing, results of one site, or all members of a list
(experts).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.alignment.match.candidates import Fusion, Named
from tensorcap.alignment.match.fingerprints import UNRELATED, Agreement, Fingerprint, proof
from tensorcap.alignment.match.fusion import (
    claim,
    fit_fusion,
    is_free,
    restrict_to_free,
    settle_fusions,
    tensors_of,
)
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.passes import MatchState
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.names import Fused, Index, Member, Rules, SiteTemplate, name_of


def fuse_by_rules(state: MatchState) -> None:
    """Fuse site templates that a rule names as parts and whole, in the places that have no partner.

    1. For each whole that a rule names, its parts are looked up by name in the same parent.
    2. The layout is what values say, else the one that fits shapes, else the rule's; without one there is no
       fusion.
    """
    matching, slots, rules = state.matching, state.slots, state.rules
    if not rules.fused:
        return
    names = [_names(side, rules) for side in matching.sides]
    for is_split in (True, False):
        parts_by_name, wholes = names if is_split else names[::-1]
        for name, whole in wholes.items():
            parent, dot, last = name.rpartition(".")
            for rule in rules.fused:
                parts = [parts_by_name.get(f"{parent}{dot}{part}") for part in rule.parts]
                known = [part for part in parts if part is not None]
                if last != rule.whole or len(known) < len(parts):
                    continue
                fusion = _fuse_by_rule(matching, slots, rule, known, whole, is_split=is_split)
                if fusion is not None:
                    claim(matching, fusion)
                    state.fusions.append(fusion)


def _names(side: Side, rules: Rules) -> Mapping[str, Named]:
    named = {}
    for template in side.templates.values():
        if not template.slot:
            name, added = name_of(template, rules.canonical)
            named[name] = template, added
    return named


def _fuse_by_rule(
    matching: Matching, slots: Slots, rule: Fused, parts: Sequence[Named], whole: Named, *, is_split: bool
) -> Fusion | None:
    """The fusion of a rule with its layout; None if tensors do not add up, or have partners."""
    templates, added = [template for template, _ in parts], parts[0][1]
    has_one_rank = len({template.rank for template in (*templates, whole[0])}) == 1
    if not has_one_rank or any(more != added for _, more in parts):
        return None
    shift = tuple(theirs - ours for ours, theirs in zip(added, whole[1], strict=True))
    possible = _make_fusion(matching, templates, None, whole[0], shift, is_split=is_split)
    free = restrict_to_free(matching, replace(possible, is_by_rule=True))
    if not free.places:
        return None
    fusion = fit_fusion(matching, slots, free)
    if fusion.fit is None and rule.axis is not None:
        fusion = _fit_by_rule(matching, slots, free, rule.axis)
    return fusion if fusion.fit is not None else None


def _fit_by_rule(matching: Matching, slots: Slots, fusion: Fusion, axis: int) -> Fusion:
    """The fusion with its parts one after the other along an axis, if they fit so."""
    reference, target = tensors_of(matching, fusion, min(fusion.places), None)
    parts = reference if fusion.is_split else target
    if not all(-len(record.shape) <= axis < len(record.shape) for record in parts):
        return fusion
    sizes = ",".join(str(record.shape[axis]) for record in parts)
    order = tuple(range(len(parts)))
    choice = ((f"split {axis} {sizes}",), order) if fusion.is_split else ((f"concat {axis}",), (0,))
    return replace(fusion, fit=slots.find_layout(reference, target, among=[choice]), order=order)


_PARTS: Final = (2, 3, 4)
_WINDOW: Final = 6  # neighbours in order, where there are no siblings
_SIBLINGS: Final = 12


def _make_fusion(
    matching: Matching,
    parts: Sequence[SiteTemplate],
    axis: int | None,
    whole: SiteTemplate,
    shift: Index,
    *,
    is_split: bool,
) -> Fusion:
    """The fusion of some parts in all places, with what the values say of each."""
    places = places_of(parts, axis, whole, shift)
    agreements = {
        index: agreement_of(matching, sites, whole_site, is_split=is_split)
        for index, (sites, whole_site) in places.items()
    }
    agreeing = {index: agreement for index, agreement in agreements.items() if agreement is not None}
    return Fusion(is_split, tuple(part.name for part in parts), axis, whole.name, places, shift, agreeing)


def fuse_by_values(state: MatchState) -> None:
    """Fuse site templates whose statistics add up to those of a whole, with their layouts.

    1. Possible parts are siblings, neighbours in order, results of one site, and members of a list.
    2. A fusion is a candidate if the fingerprint of all parts together is that of the whole, by `proof`.
    3. Candidates are accepted greedily, see `fusion.settle_fusions`. Those for which no layout is certain
       come without one, and leave their sites free.
    """
    proven = [f for f in _find_possible(state.matching) if f.nats >= WEIGHTS.proof]
    state.fusions += settle_fusions(state.matching, state.slots, proven)


def keep_free_fusions(state: MatchState) -> None:
    """Claim the sites of fusions without a layout, which are reported; drop those paired since otherwise."""
    fusions = []
    for fusion in state.fusions:
        if fusion.fit is not None or is_free(state.matching, fusion):
            claim(state.matching, fusion)
            fusions.append(fusion)
    state.fusions = fusions


def fuse_by_shapes(state: MatchState) -> None:
    """Fuse what is left within two paired modules, if there is only one way in which sizes add up.

    1. Candidates are parts and wholes whose outputs and largest parameters have the same number of elements.
    2. One that shares a site with another candidate, or with a fusion, is dropped.
    """
    matching = state.matching
    if not matching.is_ordered:
        return
    possible = _find_possible(matching)
    candidates = [f for f in possible if f.axis is None and _do_sizes_add_up(matching, f)]
    wanted = Counter(site for fusion in candidates for site in fusion.sites)
    chosen = [
        fit_fusion(matching, state.slots, fusion)
        for fusion in candidates
        if all(wanted[site] == 1 and site not in matching.fused for site in fusion.sites)
    ]
    for fusion in chosen:
        claim(matching, fusion)
    state.fusions += chosen


def _do_sizes_add_up(matching: Matching, fusion: Fusion) -> bool:
    """Whether parts and whole lie in paired modules, and the whole's weight has the parts' elements."""
    parts, whole = matching.templates_of_fusion(fusion)
    parent, target_parent = fusion.turned((parts[0].parent, whole.parent))
    if target_parent not in matching.template_partners.get(parent, ()):
        return False
    if any(matching.is_fully_paired(0 if fusion.is_split else 1, part) for part in parts):
        return False
    largest = [template.parameters[0] if template.parameters else () for template in (*parts, whole)]
    return all(largest) and sum(map(math.prod, largest[:-1])) == math.prod(largest[-1])


def _find_possible(matching: Matching) -> Iterator[Fusion]:
    for is_split in (True, False):
        yield from _find_possible_from(matching, is_split=is_split)


def _find_possible_from(matching: Matching, *, is_split: bool) -> Iterator[Fusion]:
    side, other = matching.sides_of_fusion(is_split=is_split)
    unpaired = matching.unpaired_templates()
    templates, wholes = unpaired if is_split else unpaired[::-1]
    by_size: dict[int, list[SiteTemplate]] = defaultdict(list)
    for template in wholes:
        by_size[other.size(template.first.site)].append(template)
    sizes = {template.name: side.size(template.first.site) for template in templates}
    shifts = _shifts_by_parents(matching, is_split=is_split)
    for parts, axis in itertools.chain(_siblings(templates), _lists(templates)):
        if axis is None:
            size = sum(sizes[part.name] for part in parts)
        else:
            size = sum(side.size(member.site) for part in parts for member in _group(part, axis))
        for whole in by_size.get(size, ()):
            known = shifts.get((parts[0].parent, whole.parent), ())
            yield from _without_proven(
                [
                    _make_fusion(matching, parts, axis, whole, shift, is_split=is_split)
                    for shift in _shifts(parts, axis, whole, known)
                ]
            )


def _shifts_by_parents(matching: Matching, *, is_split: bool) -> Mapping[tuple[str, str], list[Index]]:
    """By how much numbers of parts are ahead of wholes' in pairs of their siblings, by their parents.

    There are several if layers of the one side are counted in other steps than those of the other.
    """
    shifts: dict[tuple[str, str], dict[Index, None]] = defaultdict(dict)
    for candidate in matching.accepted:
        one, other = matching.templates_of(candidate)
        if one.rank == other.rank and one.rank:
            parents = (one.parent, other.parent) if is_split else (other.parent, one.parent)
            for pair in candidate.places:
                part, whole = pair if is_split else pair[::-1]
                shifts[parents][tuple(a - b for a, b in zip(part, whole, strict=True))] = None
    return {parents: list(known) for parents, known in shifts.items()}


def _without_proven(fusions: Sequence[Fusion]) -> Iterator[Fusion]:
    """Fusions of the same site templates, each without the places that values prove of another one."""
    for fusion in fusions:
        proven = {
            site
            for other in fusions
            if other is not fusion
            for index, agreement in other.agreeing.items()
            if agreement.nats >= WEIGHTS.proof
            for site in (*other.places[index][0], other.places[index][1])
        }
        places = {
            index: (sites, whole)
            for index, (sites, whole) in fusion.places.items()
            if index in fusion.agreeing or not proven & {*sites, whole}
        }
        if places:
            yield replace(fusion, places=places)


def _siblings(templates: Sequence[SiteTemplate]) -> Iterator[tuple[tuple[SiteTemplate, ...], int | None]]:
    """Site templates of one parent, and the results of one site."""
    families: dict[tuple[str, bool], list[SiteTemplate]] = defaultdict(list)
    ranks = {template.name: template.rank for template in templates}
    for template in templates:
        families[template.parent, bool(template.slot)].append(template)
        module, _, last = template.name.rpartition(".")
        if template.record.key.is_bare and module:  # the weights of siblings, in a file without slots
            families[f"{module.rpartition('.')[0]}/{last}", False].append(template)
    for template in templates:
        if (template.name, True) in families and not template.slot:
            families[template.name, True].append(template)
    for children in families.values():
        children.sort(key=lambda r: (r.order, r.name))
        for start in range(len(children)):
            window = children[start : start + (_SIBLINGS if len(children) <= _SIBLINGS else _WINDOW)]
            for count in _PARTS:
                for rest in itertools.combinations(window[1:], count - 1):
                    if all(ranks[part.name] == ranks[window[0].name] for part in rest):
                        yield (window[0], *rest), None


def _lists(templates: Sequence[SiteTemplate]) -> Iterator[tuple[tuple[SiteTemplate, ...], int | None]]:
    for template in templates:
        for axis in range(template.rank):
            if len({index[axis] for index in template.members}) > 1:
                yield (template,), axis


def _group(template: SiteTemplate, axis: int) -> list[Member]:
    """The members of a site template that the first whole would be made of."""
    first = min(template.members)
    rest = first[:axis] + first[axis + 1 :]
    return [m for index, m in sorted(template.members.items()) if index[:axis] + index[axis + 1 :] == rest]


def _shifts(
    parts: Sequence[SiteTemplate], axis: int | None, whole: SiteTemplate, known: Sequence[Index]
) -> list[Index]:
    """By how much the numbers of parts may be ahead of the whole's.

    Args:
        parts: The parts.
        axis: Which of their numbers counts parts; None if none does.
        whole: The whole.
        known: What pairs of their siblings say.
    """
    first = min(parts[0].members)
    first = first if axis is None else first[:axis] + first[axis + 1 :]
    if len(first) != whole.rank:
        return []
    zero = (0,) * whole.rank
    by_first = tuple(a - b for a, b in zip(first, min(whole.members), strict=True))
    return list(dict.fromkeys([zero, by_first, *(known if axis is None else ())]))


def places_of(
    parts: Sequence[SiteTemplate], axis: int | None, whole: SiteTemplate, shift: Index
) -> dict[Index, tuple[tuple[str, ...], str]]:
    """The sites of the parts, two at least, and of the whole, by the whole's numbers."""
    parts_by_index: dict[Index, list[str]] = defaultdict(list)
    if axis is None:
        for index in parts[0].members:
            if all(index in part.members for part in parts):
                parts_by_index[index] = [part.members[index].site for part in parts]
    else:
        for index, member in sorted(parts[0].members.items()):
            parts_by_index[index[:axis] + index[axis + 1 :]].append(member.site)
    places = {}
    for index, member in whole.members.items():
        sites = parts_by_index.get(tuple(a + b for a, b in zip(index, shift, strict=True)))
        if sites is not None and len(sites) > 1:
            places[index] = tuple(sites), member.site
    return places


def agreement_of(matching: Matching, sites: Sequence[str], whole: str, *, is_split: bool) -> Agreement | None:
    """How the statistics of parts, added up, agree with those of a whole; None if they do not."""
    side, other = matching.sides_of_fusion(is_split=is_split)
    fingerprints, wholes = side.fingerprints, other.fingerprints
    if whole not in wholes or not all(site in fingerprints for site in sites):
        return None
    distance = Fingerprint.concatenated([fingerprints[site] for site in sites]).distance(wholes[whole])
    nats = proof(distance, UNRELATED, matching.rounding)
    return Agreement(distance, UNRELATED, nats) if nats > WEIGHTS.fusion_least else None
