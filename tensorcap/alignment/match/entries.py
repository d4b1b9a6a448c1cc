"""Write pairs of site templates as entries of a mapping: layouts of slots, places with variables, reasons."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from tensorcap.alignment.layout.fits import CLOSE, Fit
from tensorcap.alignment.mapping import Entry, Evidence, LeftOver, Values
from tensorcap.alignment.match.candidates import Candidate, Fusion, Place
from tensorcap.alignment.match.fusion import tensors_of
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots, describe_lack
from tensorcap.alignment.match.weights import WEIGHTS
from tensorcap.alignment.names.site_templates import Index, Member, SiteTemplate, pattern

Made = tuple[list[Entry], list[LeftOver]]

_VARIABLES: Final = string.ascii_lowercase[8:]  # i, j, k …
_TRIED: Final = 3  # members on which layouts are tried, if the first leave doubt


def entries_of_pair(slots: Slots, candidate: Candidate) -> Made:
    """The entries of a pair of site templates."""
    matching = slots.matching
    sides = matching.sides
    one, other = sides[0].templates[candidate.reference], sides[1].templates[candidate.target]
    for place in _telling(candidate):
        records = tuple(
            side.records(s) for side, s in zip(sides, matching.sites_of(candidate, place), strict=True)
        )
        fit = slots.find_layout(*records)
        if fit is None or fit.is_proven:
            break
    is_lost = fit is not None and _is_in_another_order(candidate, place, fit)
    steps: tuple[str, ...] | None = ()
    if fit is None or not fit.is_sure or is_lost:
        steps = slots.usual_layout(*records)
        if steps is None and not (candidate.is_named and fit is None):
            return [], _unsure(slots, candidate, describe_lack(fit, is_lost=is_lost))
    evidence, reason = slots.judge.pair(
        candidate, place, (records[0], records[1]), fit, _measure_residuals(slots, candidate, fit)
    )
    if fit is None or not fit.is_sure or is_lost:  # what is certain is that they belong together
        reason += f"; but {describe_lack(fit, is_lost=is_lost)}" if steps is not None else ""
        fit = Fit(steps or (), (0,), None, float("inf"), 0, is_sure=False)
    prefix = tuple("rank*/" if len(found) > 1 else "" for found in records)
    by_slots: dict[tuple[str, str, tuple[str, ...], Evidence, str], list[Place]] = defaultdict(list)
    arguments = {} if any(prefix) else slots.arguments(candidate)
    for place in candidate.places:
        pair, taken = slots.members(candidate, place), arguments.get(place, ())
        if pair[0].site in slots.covered:
            continue
        has_more = any(member.other_tensors for member in pair)
        is_whole = bool(one.slot) == bool(other.slot) and slots.is_whole(candidate, place, fit.steps, taken)
        if not has_more and (any(prefix) or is_whole):
            bare = ("", "") if is_whole else (_main_slot(sides[0], one), _main_slot(sides[1], other))
            by_slots[(*bare, fit.steps, evidence, reason)].append(place)
            slots.covered |= {f"{pair[0].site}/{mine.key.slot}" for mine, _ in slots.other_results(*pair)}
            continue
        mains = _slot(one, pair[0]), _slot(other, pair[1])
        by_slots[(*mains, fit.steps, evidence, reason)].append(place)
        for each in taken:
            key = f"/{each.reference}", f"/{each.target}", each.steps, each.evidence, each.reason
            by_slots[key].append(place)
    made = []
    for (slot, other_slot, steps, known_by, why), places in by_slots.items():
        for names, variables in placed(one, other, places):
            mine = f"{prefix[0]}{names[0]}{slot}"
            theirs = f"{prefix[1]}{names[1]}{other_slot}"
            made.append(Entry((mine,), (theirs,), variables, steps, known_by, why))
    return made, []


def _measure_residuals(slots: Slots, candidate: Candidate, fit: Fit | None) -> list[float | None]:
    """What a layout leaves in each place."""
    if fit is None or fit.residual is None:
        return [None] * len(candidate.places)
    sides = slots.matching.sides
    sites = [slots.matching.sites_of(candidate, place) for place in candidate.places]
    return slots.residuals(fit, [(sides[0].records(left), sides[1].records(right)) for left, right in sites])


def _slot(template: SiteTemplate, member: Member) -> str:
    """What a site template's name lacks of the place of a member's result."""
    is_said = template.slot or member.result is None or member.result.key.is_bare
    return "" if is_said or member.result is None else f"/{member.result.key.slot}"


def _main_slot(side: Side, template: SiteTemplate) -> str:
    """What a site template's name lacks of the place of its results, if its sites have others besides."""
    has_others = any(len(side.results_of[side.module(m.site)]) > 1 for m in template.members.values())
    found = {_slot(template, member) for member in template.members.values()}
    return found.pop() if has_others and len(found) == 1 else ""


def entries_of_handed_on(slots: Slots, candidate: Candidate, argument: str) -> list[Entry]:
    """The entries of results that the target has as an argument; none if no layout is certain."""
    sides = slots.matching.sides
    one, other = sides[0].templates[candidate.reference], sides[1].templates[candidate.target]
    place = _telling(candidate)[0]
    result, taken = one.members[place[0]].result, other.members[place[1]].arguments[argument]
    fit = slots.find_layout([result], [taken]) if result is not None else None
    if result is None or fit is None or not fit.is_sure or _is_in_another_order(candidate, place, fit):
        return []
    said = slots.judge.handed_on(candidate, ((result,), (taken,)), fit)
    reason = f"what the target hands on; {said}"
    slot = _slot(one, one.members[place[0]])
    slots.matching.given.update(sides[0].site(candidate.reference, a) for a, _ in candidate.places)
    return [
        Entry(
            (f"{names[0]}{slot}",), (f"{names[1]}/input.{argument}",), variables, fit.steps, "values", reason
        )
        for names, variables in placed(one, other, candidate.places)
    ]


def _is_in_another_order(candidate: Candidate, place: Place, fit: Fit) -> bool:
    """Whether two tensors have equal fingerprints, and no layout makes one of the other."""
    agreement = candidate.agreeing.get(place)
    proves = agreement is not None and agreement.nats >= WEIGHTS.proof
    return proves and fit.residual is not None and fit.residual > CLOSE


def entries_of_fusion(slots: Slots, fusion: Fusion, *, held: tuple[str, str] | None = None) -> Made:
    """The entries of parts and their whole: of their results, or of what they hold in these slots."""
    sides = slots.matching.sides
    part_side, whole_side = sides if fusion.is_split else sides[::-1]
    fit, order = fusion.fit, fusion.order
    if fit is None:
        names = " and ".join(fusion.parts)
        what = "statistics" if fusion.agreeing and held is None else "shapes"
        reason = f"the {what} of {names} add up to those of {fusion.whole}, but no layout is certain"
        listed = [(s, w) for s, w in fusion.places.values()]
        left = [_at(site, held, 0) for s, w in listed for site in (s if fusion.is_split else (w,))]
        right = [_at(site, held, 1) for s, w in listed for site in ((w,) if fusion.is_split else s)]
        return [], [
            LeftOver("reference", tuple(left), reason, is_explained=False),
            LeftOver("target", tuple(right), reason, is_explained=False),
        ]
    tensors = [tensors_of(slots.matching, fusion, index, held) for index in fusion.places]
    theirs = [
        (ours, tuple(found) if fusion.is_split else [found[i] for i in order]) for ours, found in tensors
    ]
    residuals = slots.residuals(fit, theirs) if fit.residual is not None else [None] * len(theirs)
    evidence, reason = slots.judge.fusion(fusion, tensors[0], fit, residuals, is_parameter=held is not None)
    slot, whole_slot = ("", "") if held is None else held if fusion.is_split else held[::-1]
    made = []
    for indices, variables in _boxes(fusion.places):
        whole = whole_side.templates[fusion.whole]
        whole_name = pattern(whole, _VARIABLES, (0,) * len(indices)) + (
            f"/{whole_slot}" if held else _main_slot(whole_side, whole)
        )
        if fusion.axis is None:
            templates = [part_side.templates[name] for name in fusion.parts]
            plain = [pattern(template, _VARIABLES, fusion.shift) for template in templates]
        else:
            templates = [part_side.templates[fusion.parts[0]]] * len(next(iter(fusion.places.values()))[0])
            plain = _listed(templates[0], fusion, indices)
        ends = (f"/{slot}" if held else _main_slot(part_side, template) for template in templates)
        parts_names = [name + end for name, end in zip(plain, ends, strict=True)]
        ordered = tuple(parts_names[i] for i in order)
        both = (ordered, (whole_name,)) if fusion.is_split else ((whole_name,), ordered)
        made.append(Entry(both[0], both[1], variables, fit.steps, evidence, reason))
    made += _parts_arguments(slots, fusion) if fusion.axis is None and held is None else []
    return made, []


def _at(site: str, held: tuple[str, str] | None, side: int) -> str:
    return site if held is None else f"{site}/{held[side]}"


def _parts_arguments(slots: Slots, fusion: Fusion) -> list[Entry]:
    """Entries of what the parts were given, which is what their whole was given."""
    sides = slots.matching.sides
    part_side, whole_side = sides if fusion.is_split else sides[::-1]
    by_slots: dict[tuple[str, str, str, tuple[str, ...]], list[Index]] = defaultdict(list)
    for index, (sites, whole_site) in sorted(fusion.places.items()):
        whole = whole_side.member(whole_site)
        done: set[str] = set()  # arguments of a whole of the reference
        for name, site in zip(fusion.parts, sites, strict=True):
            pair = part_side.member(site), whole
            mine_by, theirs_by = pair if fusion.is_split else pair[::-1]
            for mine, theirs in slots.near_arguments(mine_by, theirs_by):
                fit = slots.find_steps(mine_by.arguments[mine], theirs_by.arguments[theirs])
                if fit is not None and mine not in done:
                    by_slots[name, mine, theirs, fit[0]].append(index)
                    done |= set() if fusion.is_split else {mine}
    made = []
    for (name, mine, theirs, steps), found in by_slots.items():
        for indices, variables in _boxes(found):
            names = [
                pattern(part_side.templates[name], _VARIABLES, fusion.shift),
                pattern(whole_side.templates[fusion.whole], _VARIABLES, (0,) * len(indices)),
            ]
            left, right = names if fusion.is_split else names[::-1]
            places = (f"{left}/input.{mine}",), (f"{right}/input.{theirs}",)
            made.append(Entry(*places, variables, steps, "values", "what both sides were given"))
    return made


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


def _telling(candidate: Candidate) -> list[Place]:
    """The members that agree best."""
    agreeing = candidate.agreeing
    found = sorted(agreeing, key=lambda p: (agreeing[p].distance, p)) or candidate.places
    return list(found[:_TRIED])


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
    found = _products(sorted(set(indices)))
    return [
        (box, {_VARIABLES[i]: tuple(map(str, numbers)) for i, numbers in enumerate(box)}) for box in found
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
