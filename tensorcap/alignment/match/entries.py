"""Write pairs of site templates as entries of a mapping: layouts of slots, variables for numbers, reasons."""

from __future__ import annotations

import itertools
import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from tensorcap.alignment.layout import CLOSE, Fit
from tensorcap.alignment.links import place_of
from tensorcap.alignment.mapping import Entry, Evidence, LeftOver, Values, unexplained
from tensorcap.alignment.match.candidates import Candidate, FoldedWeights, Fusion, Place, Placed
from tensorcap.alignment.match.fusion import tensors_of
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.member_layouts import fit_members
from tensorcap.alignment.match.pairs import RecordPair
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import SlotPair, Slots, Steps, describe_lack
from tensorcap.alignment.names import Index, Member, SiteTemplate, pattern

Written = tuple[list[Entry], list[LeftOver]]  # and what has no certain layout

_VARIABLES: Final = string.ascii_lowercase[8:]  # i, j, k …
_TRIED: Final = 3  # members on which layouts are tried, if the first leave doubt


def entries_of_pair(slots: Slots, candidate: Candidate) -> Written:
    """Write a pair of site templates as entries.

    1. The layout is that of most members, see `fit_members`. Without a certain one, the pair gets the usual
       layout of such shapes and a doubt, or is left over.
    2. Members whose calls the main outputs' layout pairs as a whole share an entry of the two sites.
    3. The others get an entry for each slot; arguments bring reasons of their own.
    """
    matching = slots.matching
    templates = reference, target = matching.templates_of(candidate)
    pairs = [matching.records_of(candidate, place) for place in candidate.places]
    layouts = fit_members(
        slots,
        pairs,
        lambda pair: find_placed(slots, pair),
        first=map(candidate.places.index, _best_places(candidate)),
        is_usual=lambda layout: not layout.fit.steps,
        is_borne_out=lambda i: matching.agrees_around(matching.sites_of(candidate, candidate.places[i])[0]),
    )
    place, records = candidate.places[layouts.number], pairs[layouts.number]
    fit = layouts.layout.fit if layouts.layout else None
    is_lost = fit is not None and _is_in_another_order(candidate, place, fit)
    is_doubtful = is_lost or slots.is_laid_out_otherwise(fit, *records)
    lack = describe_lack(fit, is_lost=is_lost) if fit is None or not fit.is_sure or is_doubtful else ""
    usual = slots.usual_layout(*records) if lack else None
    if lack and usual is None and not (candidate.is_named and fit is None):
        names = f"{candidate.reference} and {candidate.target}"
        left, right = zip(*(matching.sites_of(candidate, place) for place in candidate.places), strict=True)
        return [], unexplained(left, right, f"{names} belong together, but {lack}")
    evidence, reason = slots.judge.explain_pair(candidate, place, records, fit, layouts.residuals)
    sites = [matching.sites_of(candidate, place)[1] for place in candidate.places]
    reason += layouts.describe_others(sites)
    if usual is not None:  # what is certain is that they belong together
        reason += f"; but {lack}"
    steps = fit.steps if fit is not None and not lack else usual or ()
    by_slots: dict[tuple[SlotPair, Steps, Evidence, str], list[Place]] = defaultdict(list)
    is_sharded = any(len(side_records) > 1 for side_records in records)
    arguments = {} if is_sharded else slots.arguments(candidate)
    for place, pair in zip(candidate.places, pairs, strict=True):
        members, own_arguments = matching.members_of(candidate, place), arguments.get(place, ())
        if members[0].site in slots.covered:
            continue
        for own in own_arguments:
            argument = members[0].arguments[own.reference.removeprefix("input.")]
            partner = members[1].arguments[own.target.removeprefix("input.")]
            slots.note_given(argument, partner, own.steps)
        own_steps = slots.steps_of_member(steps, *pair)
        is_whole = bool(reference.slot) == bool(target.slot) and slots.is_whole(
            candidate, place, own_steps, own_arguments
        )
        if not any(member.other_tensors for member in members) and (is_sharded or is_whole):
            ends = "", ""
            if not is_whole:
                ends = _main_slot(matching.sides[0], reference), _main_slot(matching.sides[1], target)
            by_slots[ends, own_steps, evidence, reason].append(place)
            covered = (record.key.slot for record, _ in slots.other_results(*members))
            slots.covered |= {f"{members[0].site}/{slot}" for slot in covered}
            continue
        ends = _slot(reference, members[0]), _slot(target, members[1])
        by_slots[ends, own_steps, evidence, reason].append(place)
        for own in own_arguments:
            ends = f"/{own.reference}", f"/{own.target}"
            by_slots[ends, own.steps, own.evidence, own.reason].append(place)
    return [
        entry
        for (ends, of_steps, kind, text), places in by_slots.items()
        for entry in write_entries(templates, places, ends, of_steps, kind, text, records=records)
    ], []


def find_placed(slots: Slots, pair: RecordPair) -> Placed | None:
    """The best layout between the tensors of one place, the target's in their own order."""
    fit = slots.find_layout(*pair)
    return None if fit is None else Placed(fit, tuple(range(len(pair[1]))))


def write_entries(
    templates: tuple[SiteTemplate, SiteTemplate],
    places: Sequence[Place],
    ends: tuple[str, str],
    steps: Steps,
    evidence: Evidence,
    reason: str,
    *,
    records: RecordPair = ((), ()),
) -> list[Entry]:
    """Write members of two site templates as entries, with variables for their numbers.

    Args:
        templates: The two.
        places: The members.
        ends: What follows the names of either side: `/SLOT`, or nothing.
        steps: The layout steps.
        evidence: What they are known by.
        reason: Why, for a reader.
        records: The tensors of one place; if there is one of each rank, the entries are of all ranks.
    """
    one, other = templates
    if one.rank != other.rank:
        named = [((one.members[a].site, other.members[b].site), dict[str, Values]()) for a, b in places]
    else:
        offsets = tuple(y - x for x, y in zip(*places[0], strict=True))
        names = pattern(one, _VARIABLES, (0,) * one.rank), pattern(other, _VARIABLES, offsets)
        named = [(names, variables) for _, variables in _boxes(a for a, _ in places)]
    starts = ["rank*/" if len(side) > 1 else "" for side in records]
    return [
        Entry(
            (f"{starts[0]}{names[0]}{ends[0]}",),
            (f"{starts[1]}{names[1]}{ends[1]}",),
            variables,
            steps,
            evidence,
            reason,
        )
        for names, variables in named
    ]


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
    """Write results that the target has as an argument as entries; none if no layout is certain.

    Fingerprints say nothing of an order: of a table moved by a token they are much the same. If no layout
    makes the values of one of the other in any member, they are none.
    """
    matching, place = slots.matching, _best_places(candidate)[0]
    templates = matching.templates_of(candidate)
    pairs = []
    for one in (place, *(other for other in candidate.places if other != place)):
        member, target_member = matching.members_of(candidate, one)
        pairs.append(([matching.sides[0].result(member.site)], [target_member.arguments[argument]]))
    records, member = pairs[0], matching.members_of(candidate, place)[0]
    fit = slots.find_layout(*records)
    if fit is None or not fit.is_sure:
        return []
    residuals = [residual for residual in slots.residuals(fit, pairs) if residual is not None]
    if residuals and min(residuals) > CLOSE:
        return []
    reason = f"what the target hands on; {slots.judge.explain_handed_on(candidate, records, fit)}"
    matching.handed_on.update(matching.sites_of(candidate, p)[0] for p in candidate.places)
    ends = _slot(templates[0], member), f"/input.{argument}"
    return write_entries(templates, candidate.places, ends, fit.steps, "values", reason)


def entries_of_folded(slots: Slots, folded: FoldedWeights) -> list[Entry]:
    """Write what a module was given whose weights the target has with a norm's; none if that is paired."""
    one, other = (
        side.member(s) for side, s in zip(slots.matching.sides, (folded.site, folded.target), strict=True)
    )
    if len(one.arguments) != 1 or len(other.arguments) != 1:
        return []
    (name, record), (other_name, target) = *one.arguments.items(), *other.arguments.items()
    found = slots.find_steps(record, target, is_wrong=True)
    if found is None:
        return []
    slots.note_given(record, target, found[0])
    if any(place == place_of(target) for place, _ in slots.given.values()):
        return []
    reason = (
        f"what modules of the same weights were given, which the target has with those of a norm{found[1]}"
    )
    places = f"{one.site}/input.{name}", f"{other.site}/input.{other_name}"
    return [Entry((places[0],), (places[1],), {}, found[0], "structure", reason)]


def entries_of_given(slots: Slots) -> list[Entry]:
    """Write results that the target has as an argument alone, which `Slots.note_given` noted."""
    side = slots.matching.sides[0]
    reason = "what the target hands on: the reference gives it to the partner of the module that takes it"
    return [
        Entry((place_of(side.result(site)),), (place,), {}, steps, "structure", reason)
        for site, (place, steps) in slots.given.items()
    ]


def _is_in_another_order(candidate: Candidate, place: Place, fit: Fit) -> bool:
    """Whether two tensors have equal fingerprints, and no layout makes one of the other."""
    agreement = candidate.agreeing.get(place)
    proves = agreement is not None and agreement.nats >= WEIGHTS.proof
    return proves and fit.residual is not None and fit.residual > CLOSE


def entries_of_fusion(slots: Slots, fusion: Fusion, *, slot_pair: SlotPair | None = None) -> Written:
    """Write parts and their whole as entries: their results, or their parameters in a pair of slots."""
    part_side, whole_side = slots.matching.sides_of_fusion(is_split=fusion.is_split)
    fit, order = fusion.fit, fusion.order
    if fit is None:
        names = " and ".join(fusion.parts)
        what = "statistics" if fusion.agreeing and slot_pair is None else "shapes"
        reason = f"the {what} of {names} add up to those of {fusion.whole}, but no layout is certain"
        parts = [site for sites, _ in fusion.places.values() for site in sites]
        wholes = [site for _, site in fusion.places.values()]
        ends = [f"/{slot}" for slot in slot_pair] if slot_pair else ["", ""]
        both = zip(fusion.turned((parts, wholes)), ends, strict=True)
        left, right = ([site + end for site in sites] for sites, end in both)
        return [], unexplained(left, right, reason)
    tensors = [tensors_of(slots.matching, fusion, index, slot_pair) for index in fusion.places]
    pairs = [
        (reference, target_records if fusion.is_split else [target_records[i] for i in order])
        for reference, target_records in tensors
    ]
    residuals = slots.residuals(fit, pairs)
    evidence, reason = slots.judge.explain_fusion(
        fusion, tensors[0], fit, residuals, is_parameter=slot_pair is not None
    )
    slot, whole_slot = fusion.turned(slot_pair or ("", ""))
    whole, entries = whole_side.templates[fusion.whole], []
    for indices, variables in _boxes(fusion.places):
        whole_name = pattern(whole, _VARIABLES, (0,) * len(indices)) + (
            f"/{whole_slot}" if slot_pair else _main_slot(whole_side, whole)
        )
        if fusion.axis is None:
            templates = [part_side.templates[name] for name in fusion.parts]
            plain = [pattern(template, _VARIABLES, fusion.shift) for template in templates]
        else:
            templates = [part_side.templates[fusion.parts[0]]] * len(next(iter(fusion.places.values()))[0])
            plain = _listed(templates[0], fusion, indices)
        ends = [f"/{slot}" if slot_pair else _main_slot(part_side, template) for template in templates]
        ordered: tuple[str, ...] = tuple(plain[i] + ends[i] for i in order)
        entries.append(
            Entry(*fusion.turned((ordered, (whole_name,))), variables, fit.steps, evidence, reason)
        )
    entries += _parts_arguments(slots, fusion) if fusion.axis is None and slot_pair is None else []
    return entries, []


def _parts_arguments(slots: Slots, fusion: Fusion) -> list[Entry]:
    """Write entries of the arguments of parts, which are those of their whole.

    Where results differ, arguments may, too: those are paired that have equal values in other layers, or are
    the only ones.
    """
    part_side, whole_side = slots.matching.sides_of_fusion(is_split=fusion.is_split)
    whole = whole_side.templates[fusion.whole]
    members = {
        (index, name): fusion.turned((part_side.member(site), whole_side.member(whole_site)))
        for index, (sites, whole_site) in sorted(fusion.places.items())
        for name, site in zip(fusion.parts, sites, strict=True)
    }
    near = {key: slots.near_arguments(*both) for key, both in members.items()}
    known = {(name, *pair) for (_, name), pairs in near.items() for pair in pairs}
    by_slots: dict[tuple[str, str, str, tuple[str, ...], str], list[Index]] = defaultdict(list)
    used: set[tuple[Index, str]] = set()  # arguments of a whole of the reference
    for (index, name), (one, other) in members.items():
        reason, pairs = "what both sides were given", near[index, name]
        is_wrong = not (pairs or fusion.is_sum) and _is_fusion_wrong(slots, fusion, index)
        if is_wrong:
            lone = [*itertools.product(one.arguments, other.arguments)]
            pairs = [(a, b) for a, b in lone if (name, a, b) in known] or (lone if len(lone) == 1 else [])
            reason = "what both sides were given, by other layers, or as their only argument"
        for argument, partner in pairs:
            if one.arguments[argument].size != other.arguments[partner].size or (index, argument) in used:
                continue
            fit = slots.find_steps(one.arguments[argument], other.arguments[partner], is_wrong=is_wrong)
            if fit is not None:
                by_slots[name, argument, partner, fit[0], reason + fit[1]].append(index)
                used |= set() if fusion.is_split else {(index, argument)}
    entries = []
    for (name, argument, partner, steps, reason), numbers in by_slots.items():
        part_name = pattern(part_side.templates[name], _VARIABLES, fusion.shift)
        whole_name = pattern(whole, _VARIABLES, (0,) * whole.rank)
        left, right = fusion.turned((part_name, whole_name))
        for _, variables in _boxes(numbers):
            places = (f"{left}/input.{argument}",), (f"{right}/input.{partner}",)
            evidence: Evidence = "values" if reason == "what both sides were given" else "structure"
            entries.append(Entry(*places, variables, steps, evidence, reason))
    return entries


def _is_fusion_wrong(slots: Slots, fusion: Fusion, index: Index) -> bool:
    """Whether parts and whole of a place are known to have other values."""
    one, other = slots.matching.sides
    records, others = tensors_of(slots.matching, fusion, index, None)
    known = one.joint_fingerprint_of(records), other.joint_fingerprint_of(others)
    return slots.matching.is_near(*known, min(record.order for record in records)) is False


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
    numbers_by_rest: dict[tuple[Index, ...], list[int]] = {}
    for number, rest in rests.items():
        numbers_by_rest.setdefault(tuple(rest), []).append(number)
    return [[numbers, *box] for rest, numbers in numbers_by_rest.items() for box in _products(rest)]
