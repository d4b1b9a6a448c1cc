"""Write pairs of site templates as entries of a mapping: layouts of slots, variables for numbers, reasons."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from tensorcap.alignment.layout import CLOSE, Fit
from tensorcap.alignment.mapping import Entry, Evidence, LeftOver, Values
from tensorcap.alignment.match.candidates import Candidate, Fusion, Place
from tensorcap.alignment.match.fusion import tensors_of
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots, describe_lack
from tensorcap.alignment.names import Index, Member, SiteTemplate, pattern
from tensorcap_formats.records import Record

Made = tuple[list[Entry], list[LeftOver]]

_VARIABLES: Final = string.ascii_lowercase[8:]  # i, j, k …
_TRIED: Final = 3  # members on which layouts are tried, if the first leave doubt


def entries_of_pair(slots: Slots, candidate: Candidate) -> Made:
    """Write a pair of site templates as entries.

    1. The layout is found on the members that agree best, see `_fit_members`. Without a certain one, the pair
       gets the usual layout of such shapes and a doubt, or is left over.
    2. Members whose calls the main outputs' layout pairs as a whole share an entry of the two sites.
    3. The others get an entry for each slot; arguments bring reasons of their own.
    """
    sides = slots.matching.sides
    reference, target = sides[0].templates[candidate.reference], sides[1].templates[candidate.target]
    place, records, fit = _fit_members(slots, candidate)
    is_lost = fit is not None and _is_in_another_order(candidate, place, fit)
    steps: tuple[str, ...] | None = ()
    if fit is None or not fit.is_sure or is_lost:
        steps = slots.usual_layout(*records)
        if steps is None and not (candidate.is_named and fit is None):
            return [], _unsure(slots, candidate, describe_lack(fit, is_lost=is_lost))
    residuals = _measure_residuals(slots, candidate, fit)
    evidence, reason = slots.judge.explain_pair(candidate, place, records, fit, residuals)
    if fit is None or not fit.is_sure or is_lost:  # what is certain is that they belong together
        reason += f"; but {describe_lack(fit, is_lost=is_lost)}" if steps is not None else ""
        fit = Fit(steps or (), (0,), None, float("inf"), 0, is_sure=False)
    prefixes = ["rank*/" if len(side_records) > 1 else "" for side_records in records]
    by_slots: dict[tuple[str, str, tuple[str, ...], Evidence, str], list[Place]] = defaultdict(list)
    arguments = {} if any(prefixes) else slots.arguments(candidate)
    for place in candidate.places:
        members, own_arguments = slots.members(candidate, place), arguments.get(place, ())
        if members[0].site in slots.covered:
            continue
        is_whole = bool(reference.slot) == bool(target.slot) and slots.is_whole(
            candidate, place, fit.steps, own_arguments
        )
        if not any(member.other_tensors for member in members) and (any(prefixes) or is_whole):
            slot, target_slot = "", ""
            if not is_whole:
                slot, target_slot = _main_slot(sides[0], reference), _main_slot(sides[1], target)
            by_slots[slot, target_slot, fit.steps, evidence, reason].append(place)
            covered = (record.key.slot for record, _ in slots.other_results(*members))
            slots.covered |= {f"{members[0].site}/{slot}" for slot in covered}
            continue
        slot, target_slot = _slot(reference, members[0]), _slot(target, members[1])
        by_slots[slot, target_slot, fit.steps, evidence, reason].append(place)
        for own in own_arguments:
            slot, target_slot = f"/{own.reference}", f"/{own.target}"
            by_slots[slot, target_slot, own.steps, own.evidence, own.reason].append(place)
    return [
        Entry(
            (f"{prefixes[0]}{names[0]}{slot}",),
            (f"{prefixes[1]}{names[1]}{target_slot}",),
            variables,
            entry_steps,
            entry_evidence,
            entry_reason,
        )
        for (slot, target_slot, entry_steps, entry_evidence, entry_reason), places in by_slots.items()
        for names, variables in placed(reference, target, places)
    ], []


def _fit_members(
    slots: Slots, candidate: Candidate
) -> tuple[Place, tuple[Sequence[Record], Sequence[Record]], Fit | None]:
    """Find the layout of a pair on its best members: the first that is proven, or else the last tried."""
    sides = slots.matching.sides
    for place in _best_places(candidate):
        left, right = slots.matching.sites_of(candidate, place)
        records = sides[0].records(left), sides[1].records(right)
        fit = slots.find_layout(*records)
        if fit is None or fit.is_proven:
            break
    return place, records, fit


def _measure_residuals(slots: Slots, candidate: Candidate, fit: Fit | None) -> list[float | None]:
    """The relative error that a layout leaves in each place; None if nothing is read."""
    if fit is None or fit.residual is None:
        return [None] * len(candidate.places)
    sides = slots.matching.sides
    sites = [slots.matching.sites_of(candidate, place) for place in candidate.places]
    return slots.residuals(fit, [(sides[0].records(left), sides[1].records(right)) for left, right in sites])


def _slot(template: SiteTemplate, member: Member) -> str:
    """The suffix that makes a template's name the place of a member's result: `/SLOT`, or "" if it is one."""
    is_in_name = template.slot or member.result is None or member.result.key.is_bare
    return "" if is_in_name or member.result is None else f"/{member.result.key.slot}"


def _main_slot(side: Side, template: SiteTemplate) -> str:
    """The suffix that makes a template's name the place of its results, if its sites have others as well."""
    has_others = any(len(side.results_of[side.module(m.site)]) > 1 for m in template.members.values())
    slots = {_slot(template, member) for member in template.members.values()}
    return slots.pop() if has_others and len(slots) == 1 else ""


def entries_of_handed_on(slots: Slots, candidate: Candidate, argument: str) -> list[Entry]:
    """Write results that the target has as an argument as entries; none if no layout is certain."""
    sides = slots.matching.sides
    template, target_template = sides[0].templates[candidate.reference], sides[1].templates[candidate.target]
    place = _best_places(candidate)[0]
    result, argument_record = (
        template.members[place[0]].result,
        target_template.members[place[1]].arguments[argument],
    )
    fit = slots.find_layout([result], [argument_record]) if result is not None else None
    if result is None or fit is None or not fit.is_sure or _is_in_another_order(candidate, place, fit):
        return []
    agreement = slots.judge.explain_handed_on(candidate, ((result,), (argument_record,)), fit)
    reason = f"what the target hands on; {agreement}"
    slot = _slot(template, template.members[place[0]])
    slots.matching.handed_on.update(sides[0].site(candidate.reference, a) for a, _ in candidate.places)
    return [
        Entry(
            (f"{names[0]}{slot}",), (f"{names[1]}/input.{argument}",), variables, fit.steps, "values", reason
        )
        for names, variables in placed(template, target_template, candidate.places)
    ]


def _is_in_another_order(candidate: Candidate, place: Place, fit: Fit) -> bool:
    """Whether two tensors have equal fingerprints, and no layout makes one of the other."""
    agreement = candidate.agreeing.get(place)
    proves = agreement is not None and agreement.nats >= WEIGHTS.proof
    return proves and fit.residual is not None and fit.residual > CLOSE


def entries_of_fusion(slots: Slots, fusion: Fusion, *, slot_pair: tuple[str, str] | None = None) -> Made:
    """Write parts and their whole as entries: their results, or their parameters in a pair of slots."""
    sides = slots.matching.sides
    part_side, whole_side = sides if fusion.is_split else sides[::-1]
    fit, order = fusion.fit, fusion.order
    if fit is None:
        names = " and ".join(fusion.parts)
        what = "statistics" if fusion.agreeing and slot_pair is None else "shapes"
        reason = f"the {what} of {names} add up to those of {fusion.whole}, but no layout is certain"
        parts_places = [site for sites, _ in fusion.places.values() for site in sites]
        whole_places = [site for _, site in fusion.places.values()]
        both_sites = (parts_places, whole_places) if fusion.is_split else (whole_places, parts_places)
        left, right = (tuple(_at(site, slot_pair, i) for site in sites) for i, sites in enumerate(both_sites))
        return [], [
            LeftOver("reference", left, reason, is_explained=False),
            LeftOver("target", right, reason, is_explained=False),
        ]
    tensors = [tensors_of(slots.matching, fusion, index, slot_pair) for index in fusion.places]
    pairs = [
        (reference, tuple(target_records) if fusion.is_split else [target_records[i] for i in order])
        for reference, target_records in tensors
    ]
    residuals = slots.residuals(fit, pairs) if fit.residual is not None else [None] * len(pairs)
    evidence, reason = slots.judge.explain_fusion(
        fusion, tensors[0], fit, residuals, is_parameter=slot_pair is not None
    )
    slot, whole_slot = ("", "") if slot_pair is None else slot_pair if fusion.is_split else slot_pair[::-1]
    entries = []
    for indices, variables in _boxes(fusion.places):
        whole = whole_side.templates[fusion.whole]
        whole_name = pattern(whole, _VARIABLES, (0,) * len(indices)) + (
            f"/{whole_slot}" if slot_pair else _main_slot(whole_side, whole)
        )
        if fusion.axis is None:
            templates = [part_side.templates[name] for name in fusion.parts]
            plain = [pattern(template, _VARIABLES, fusion.shift) for template in templates]
        else:
            templates = [part_side.templates[fusion.parts[0]]] * len(next(iter(fusion.places.values()))[0])
            plain = _listed(templates[0], fusion, indices)
        ends = (f"/{slot}" if slot_pair else _main_slot(part_side, template) for template in templates)
        parts_names = [name + end for name, end in zip(plain, ends, strict=True)]
        ordered = tuple(parts_names[i] for i in order)
        both = (ordered, (whole_name,)) if fusion.is_split else ((whole_name,), ordered)
        entries.append(Entry(both[0], both[1], variables, fit.steps, evidence, reason))
    entries += _parts_arguments(slots, fusion) if fusion.axis is None and slot_pair is None else []
    return entries, []


def _at(site: str, slot_pair: tuple[str, str] | None, side: int) -> str:
    return site if slot_pair is None else f"{site}/{slot_pair[side]}"


def _parts_arguments(slots: Slots, fusion: Fusion) -> list[Entry]:
    """Write entries of the arguments of parts, which are those of their whole."""
    sides = slots.matching.sides
    part_side, whole_side = sides if fusion.is_split else sides[::-1]
    by_slots: dict[tuple[str, str, str, tuple[str, ...]], list[Index]] = defaultdict(list)
    for index, (sites, whole_site) in sorted(fusion.places.items()):
        whole = whole_side.member(whole_site)
        used: set[str] = set()  # arguments of a whole of the reference
        for name, site in zip(fusion.parts, sites, strict=True):
            pair = part_side.member(site), whole
            reference_member, target_member = pair if fusion.is_split else pair[::-1]
            for name_of_reference, name_of_target in slots.near_arguments(reference_member, target_member):
                fit = slots.find_steps(
                    reference_member.arguments[name_of_reference], target_member.arguments[name_of_target]
                )
                if fit is not None and name_of_reference not in used:
                    by_slots[name, name_of_reference, name_of_target, fit[0]].append(index)
                    used |= set() if fusion.is_split else {name_of_reference}
    entries = []
    for (name, name_of_reference, name_of_target, steps), indices_found in by_slots.items():
        for indices, variables in _boxes(indices_found):
            names = [
                pattern(part_side.templates[name], _VARIABLES, fusion.shift),
                pattern(whole_side.templates[fusion.whole], _VARIABLES, (0,) * len(indices)),
            ]
            left, right = names if fusion.is_split else names[::-1]
            places = (f"{left}/input.{name_of_reference}",), (f"{right}/input.{name_of_target}",)
            entries.append(Entry(*places, variables, steps, "values", "what both sides were given"))
    return entries


def _listed(template: SiteTemplate, fusion: Fusion, indices: Sequence[Sequence[int]]) -> list[str]:
    """Names of all parts that a site template's number counts, the others being variables."""
    assert fusion.axis is not None
    numbers = sorted({index[fusion.axis] for index in template.members})
    names = []
    for number in numbers:
        variables = list(_VARIABLES[: len(indices)])
        variables.insert(fusion.axis, "@")
        shift = list(fusion.shift)
        shift.insert(fusion.axis, 0)
        names.append(pattern(template, variables, shift).replace("{@}", str(number)))
    return names


def _best_places(candidate: Candidate) -> list[Place]:
    """The members that agree best, on which layouts are tried."""
    agreeing = candidate.agreeing
    ordered = sorted(agreeing, key=lambda p: (agreeing[p].distance, p)) or candidate.places
    return list(ordered[:_TRIED])


def placed(
    one: SiteTemplate, other: SiteTemplate, places: Sequence[Place]
) -> list[tuple[tuple[str, str], dict[str, Values]]]:
    """Names of both sides with variables, and their values."""
    if one.rank != other.rank:
        return [((one.members[a].site, other.members[b].site), {}) for a, b in places]
    offsets = tuple(y - x for x, y in zip(*places[0], strict=True))
    names = pattern(one, _VARIABLES, (0,) * one.rank), pattern(other, _VARIABLES, offsets)
    return [(names, variables) for _, variables in _boxes(a for a, _ in places)]


def _boxes(indices: Iterable[Index]) -> list[tuple[list[list[int]], dict[str, Values]]]:
    """Index tuples as products of sets of numbers, and those as variables."""
    products = _products(sorted(set(indices)))
    return [
        (box, {_VARIABLES[i]: tuple(map(str, numbers)) for i, numbers in enumerate(box)}) for box in products
    ]


def _products(indices: Sequence[Index]) -> list[list[list[int]]]:
    if not indices or not indices[0]:
        return [[]] if indices else []
    rests: dict[int, list[Index]] = {}
    for index in indices:
        rests.setdefault(index[0], []).append(index[1:])
    find_near: dict[tuple[Index, ...], list[int]] = {}
    for number, rest in rests.items():
        find_near.setdefault(tuple(rest), []).append(number)
    return [[numbers, *box] for rest, numbers in find_near.items() for box in _products(rest)]


def _unsure(slots: Slots, candidate: Candidate, what: str) -> list[LeftOver]:
    sides = slots.matching.sides
    left = tuple(sides[0].site(candidate.reference, a) for a, _ in candidate.places)
    right = tuple(sides[1].site(candidate.target, b) for _, b in candidate.places)
    names = f"{candidate.reference} and {candidate.target}"
    return [
        LeftOver("reference", left, f"{names} belong together, but {what}", is_explained=False),
        LeftOver("target", right, f"{names} belong together, but {what}", is_explained=False),
    ]
