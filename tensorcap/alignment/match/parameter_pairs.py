"""Pair parameters, buffers and gradients like the results of their modules.

Within paired modules equal names are paired, then equal values, then what alone has its count of elements;
parts of a fused module have parts of the whole's. What is left of both sides is matched like results, as if
each tensor were a module of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.alignment.mapping import Entry, LeftOver, unexplained
from tensorcap.alignment.match.candidates import Candidate, Fusion, Place
from tensorcap.alignment.match.entries import (
    Written,
    entries_of_fusion,
    entries_of_pair,
    find_placed,
    write_entries,
)
from tensorcap.alignment.match.fusion import fit_fusion
from tensorcap.alignment.match.fusion_rules import fuse_by_values
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.member_layouts import fit_members
from tensorcap.alignment.match.pair_evidence import PairEvidence, Shapes
from tensorcap.alignment.match.pairs import RecordPair
from tensorcap.alignment.match.passes import (
    MatchState,
    Pass,
    pair_all_outputs_by_values,
    pair_by_names,
    pair_remaining_names,
    run_passes,
)
from tensorcap.alignment.match.sides import Side, sizes_of
from tensorcap.alignment.match.slots import SlotPair, Slots
from tensorcap.alignment.match.unmatched import Rivals, rivals
from tensorcap.alignment.names import (
    PARAMETER_SLOTS,
    Canonical,
    Member,
    Rules,
    Survey,
)

_TRIED: Final = 3  # members on which layouts are tried
_NEAR: Final = 8  # roundings, by which equal values differ at most
_BESIDE: Final = "the modules that hold them hold others of equal names that belong together"


def pair_beside(state: MatchState) -> None:
    """Pair what two modules hold under one name, if all else of theirs that is paired is so.

    A wrong scale, or a bias of another layer, makes other values, which prove nothing. What would be the
    partner of two, as one bias of a cell of the sum of both, is neither's.
    """
    matching = state.matching
    partners: dict[str, set[str]] = defaultdict(set)
    for one, other in matching.partner[0].items():
        (site, _, slot), (target_site, _, target_slot) = one.rpartition("/"), other.rpartition("/")
        partners[site].add(target_site if slot == target_slot else "")
    claims: dict[str, list[str]] = defaultdict(list)  # by what would be their partner
    for place in matching.sides[0].by_site:
        site, _, slot = place.rpartition("/")
        if len(partners[site]) == 1 and not matching.has_partner(0, place):
            claims[f"{next(iter(partners[site]))}/{slot}"].append(place)
    places: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for other, claiming in claims.items():
        if len(claiming) > 1 or other not in matching.sides[1].by_site or matching.has_partner(1, other):
            continue
        template, index = matching.sides[0].by_site[claiming[0]]
        target_template, target_index = matching.sides[1].by_site[other]
        candidate = Candidate(template.name, target_template.name, ())
        if matching.sizes_fit(candidate, (index, target_index)):
            places[template.name, target_template.name].append((index, target_index))
    for names, found in places.items():
        matching.accept(Candidate(*names, (), is_named=True, because=_BESIDE), tuple(found))


PASSES: Final = (  # of what is left of both sides, each tensor as a module of its own
    Pass("names", pair_by_names, needs_values=False),
    Pass("values", pair_all_outputs_by_values),
    Pass("fused_values", fuse_by_values),
    Pass("members", pair_beside),
    Pass("remaining_names", pair_remaining_names, needs_values=False),
)


@dataclass(frozen=True, slots=True)
class ParameterPair:
    """A slot of a site template and one of its partner that belong together.

    Attributes:
        candidate: The pair of site templates.
        reference: The one's slot.
        target: The other's.
        places: Members that have them.
    """

    candidate: Candidate
    reference: str
    target: str
    places: tuple[Place, ...]


class ParameterPairs:
    """Which slots beside results and arguments belong together.

    Args:
        matching: Pairs of modules.
        fused: Fusions of them.
    """

    def __init__(self, matching: Matching, fused: Iterable[Fusion]) -> None:
        self.matching = matching
        self.taken: tuple[set[str], set[str]] = (set(), set())  # places
        self.pairs = [pair for candidate in matching.accepted for pair in self._pair_slots(candidate)]
        self.fused = [(fusion, slots) for fusion in fused for slots in self._pair_fused_slots(fusion)]

    def _pair_slots(self, candidate: Candidate) -> list[ParameterPair]:
        places_by_slots: dict[SlotPair, list[Place]] = defaultdict(list)
        for place in candidate.places:
            member, target_member = self.matching.members_of(candidate, place)
            for slots in self._pair_member_slots(member, target_member):
                places_by_slots[slots].append(place)
                self._take(((member.site,), (target_member.site,)), slots)
        return [ParameterPair(candidate, *slots, tuple(places)) for slots, places in places_by_slots.items()]

    def _take(self, sites_of_sides: tuple[tuple[str, ...], tuple[str, ...]], slots: SlotPair) -> None:
        for places, sites, slot in zip(self.taken, sites_of_sides, slots, strict=True):
            places.update(f"{site}/{slot}" for site in sites)

    def tensors(self, pair: ParameterPair) -> list[RecordPair]:
        """The tensors of each place."""
        members = (self.matching.members_of(pair.candidate, place) for place in pair.places)
        return [
            (one.other_tensors[pair.reference], other.other_tensors[pair.target]) for one, other in members
        ]

    def _pair_member_slots(self, one: Member, other: Member) -> list[SlotPair]:
        """Slots of two modules that belong together."""
        slots, target_slots = dict(one.other_tensors), dict(other.other_tensors)
        pairs: list[SlotPair] = []

        def take(slot: str, partner: str) -> None:
            pairs.append((slot, partner))
            del slots[slot], target_slots[partner]

        if one.result is not None and other.result is not None:
            slot, partner = f"grad_{one.result.key.slot}", f"grad_{other.result.key.slot}"
            if slot in slots and partner in target_slots:
                take(slot, partner)
        for slot in [
            s for s in slots if s in target_slots and sizes_of(slots[s]) & sizes_of(target_slots[s])
        ]:
            take(slot, slot)
        for slot in list(slots):
            near = [other_slot for other_slot in target_slots if self._are_near(one, slot, other, other_slot)]
            if len(near) == 1:
                take(slot, near[0])
        for slot in list(slots):
            fitting = [
                [s for s in left if _kind(s) == _kind(slot) and sizes_of(left[s]) & sizes_of(slots[slot])]
                for left in (slots, target_slots)
            ]
            if len(fitting[0]) == len(fitting[1]) == 1:
                is_gradient = not slot.startswith(PARAMETER_SLOTS)  # of what may be another argument
                if not (is_gradient and self._are_near(one, slot, other, fitting[1][0]) is False):
                    take(slot, fitting[1][0])
        for slot in [*slots]:  # of unlike sizes
            if slot in target_slots and slot.startswith(PARAMETER_SLOTS):
                take(slot, slot)
        return pairs

    def _are_near(self, one: Member, slot: str, other: Member, other_slot: str) -> bool | None:
        """Whether two slots of one kind have near values; None if values are unknown."""
        if _kind(slot) != _kind(other_slot):
            return False
        fingerprint = self.matching.sides[0].joint_fingerprint_of(one.other_tensors[slot])
        target_fingerprint = self.matching.sides[1].joint_fingerprint_of(other.other_tensors[other_slot])
        if fingerprint is None or target_fingerprint is None:
            return None
        return fingerprint.distance(target_fingerprint) <= _NEAR * self.matching.rounding

    def _pair_fused_slots(self, fusion: Fusion) -> Iterator[SlotPair]:
        """Slots that all parts have, and the slots of the whole that they make."""
        part_side, whole_side = self.matching.sides_of_fusion(is_split=fusion.is_split)
        part_sites, whole_site = fusion.places[min(fusion.places)]
        parts = [part_side.member(site) for site in part_sites]
        left = dict(whole_side.member(whole_site).other_tensors)
        for slot in sorted(set.intersection(*(set(part.other_tensors) for part in parts))):
            size = sum(record.size for part in parts for record in part.other_tensors[slot])
            fitting = [
                s for s, rs in left.items() if _kind(s) == _kind(slot) and sum(r.size for r in rs) == size
            ]
            same = slot if slot in fitting else fitting[0] if len(fitting) == 1 else None
            if same is None:
                continue
            del left[same]
            slots = fusion.turned((slot, same))
            for sites, whole in fusion.places.values():
                self._take(fusion.turned((sites, (whole,))), slots)
            yield slots


def parameter_entries(
    slots: Slots,
    fused: Iterable[Fusion],
    surveys: tuple[Survey, Survey],
    canonical: Canonical | None,
    *,
    uses_values: bool,
    without: Collection[str] = (),
) -> tuple[list[Entry], list[LeftOver], Rivals, list[str]]:
    """Entries of parameters and buffers and of gradients, what is unsure or contested, and what failed.

    Args:
        slots: Finds layouts between tensors of paired modules.
        fused: Fusions of modules.
        surveys: All modules of both sides.
        canonical: What makes names equal; None if names are not to be used.
        uses_values: Whether values may be looked at.
        without: Names of passes to leave out.
    """
    parameter_pairs = ParameterPairs(slots.matching, fused)
    reference, target = (
        Side(survey_unpaired(survey, taken), fingerprints)
        for survey, taken, fingerprints in zip(
            surveys, parameter_pairs.taken, slots.fingerprints, strict=True
        )
    )
    for side in (reference, target):
        for template in side.templates.values():
            template.slot = template.name.rpartition("/")[2]
    matching = Matching(reference, target, canonical, is_ordered=False)
    own_slots = slots.for_pairs(matching, _shapes(parameter_pairs))
    state = MatchState(matching, own_slots, Rules())
    run_passes(PASSES, state, uses_values=uses_values, without=without)
    written = [
        *(
            entries_of_parameter_pair(slots, pair, parameter_pairs.tensors(pair), own_slots.judge)
            for pair in parameter_pairs.pairs
        ),
        *(
            entries_of_fusion(
                slots, fit_fusion(slots.matching, slots, fusion, slot_pair), slot_pair=slot_pair
            )
            for fusion, slot_pair in parameter_pairs.fused
        ),
        *(entries_of_pair(own_slots, candidate) for candidate in matching.accepted),
        *(entries_of_fusion(own_slots, fusion) for fusion in state.fusions),
    ]
    return (
        [e for entries, _ in written for e in entries],
        [leftover for _, unsure in written for leftover in unsure],
        rivals(matching),
        state.failed,
    )


def entries_of_parameter_pair(
    slots: Slots, pair: ParameterPair, tensors: Sequence[RecordPair], judge: PairEvidence
) -> Written:
    """Write one slot of paired site templates and its partner as entries.

    Args:
        slots: Finds layouts between tensors of paired modules.
        pair: The two slots.
        tensors: Their tensors in each place.
        judge: Knows which modules have transposed weights.
    """
    candidate, ends = pair.candidate, (f"/{pair.reference}", f"/{pair.target}")
    templates = slots.matching.templates_of(candidate)
    is_named = pair.reference == pair.target
    is_parameter = pair.reference.startswith(PARAMETER_SLOTS)
    is_transposed = judge.is_transposed(*templates) if is_parameter else None
    layouts = fit_members(
        slots,
        tensors,
        lambda records: find_placed(slots, records),
        first=range(min(len(tensors), _TRIED)),
        is_usual=lambda layout: bool(layout.fit.steps) == bool(is_transposed),
    )
    records, fit = tensors[layouts.number], layouts.layout.fit if layouts.layout else None
    evidence, reason = slots.judge.explain_parameters(
        candidate.evidence if is_named else "structure",
        tensors,
        records,
        fit,
        layouts.residuals,
        is_transposed=is_transposed,
    )
    members = [slots.matching.sites_of(candidate, place)[1] + ends[1] for place in pair.places]
    reason += layouts.describe_others(members)
    is_sure = fit is not None and fit.is_sure
    shapes = [[record.shape for record in side] for side in records]
    if not is_sure and (not is_named or (fit is not None and shapes[0] != shapes[1])):
        names = f"{candidate.reference}{ends[0]} and {candidate.target}{ends[1]}"
        sites = zip(*(slots.matching.sites_of(candidate, place) for place in pair.places), strict=True)
        left, right = ([site + end for site in side] for side, end in zip(sites, ends, strict=True))
        return [], unexplained(left, right, f"{names} belong together, but no layout of theirs is certain")
    steps = fit.steps if fit is not None and fit.is_sure else ()
    return write_entries(templates, pair.places, ends, steps, evidence, reason, records=records), []


def survey_unpaired(survey: Survey, taken: set[str]) -> Survey:
    """The tensors of modules that have no partner yet, each as a module of its own that gives it."""
    unpaired: dict[str, Member] = {}
    for site, member in survey.members.items():
        for slot, records in member.parameter_tensors.items():
            place, shards = f"{site}/{slot}", records if len(records) > 1 else ()
            if place not in taken:
                unpaired[place] = Member(place, records[0], {}, {}, member.module, None, shards)
    return Survey(unpaired, {})


def _shapes(parameter_pairs: ParameterPairs) -> Iterator[Shapes]:
    """Classes of paired modules, and the shapes of what they hold."""
    for pair in parameter_pairs.pairs:
        one, other = parameter_pairs.matching.templates_of(pair.candidate)
        records, target_records = parameter_pairs.tensors(pair)[0]
        if pair.reference.startswith(PARAMETER_SLOTS) and len(records) == len(target_records) == 1:
            yield one.first.module, other.first.module, records[0].shape, target_records[0].shape


def _kind(slot: str) -> str:
    return slot.partition(".")[0]
