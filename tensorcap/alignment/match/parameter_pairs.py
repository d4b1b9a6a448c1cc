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

from tensorcap.alignment.layout import Fit
from tensorcap.alignment.mapping import Entry, LeftOver
from tensorcap.alignment.match.candidates import Candidate, Fusion, Place
from tensorcap.alignment.match.entries import Made, entries_of_fusion, entries_of_pair, placed
from tensorcap.alignment.match.fusion import fit_fusion
from tensorcap.alignment.match.fusion_rules import fuse_by_values
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.pair_evidence import PairEvidence, Shapes
from tensorcap.alignment.match.passes import (
    MatchState,
    Pass,
    pair_all_outputs_by_values,
    pair_by_names,
    pair_remaining_names,
    run_passes,
)
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.match.unmatched import Rivals, rivals
from tensorcap.alignment.names import (
    PARAMETER_SLOTS,
    Canonical,
    Member,
    NameTemplate,
    Rules,
    SiteTemplate,
    Survey,
    fold,
)
from tensorcap_formats.records import Record

SlotPair = tuple[str, str]  # slot of the reference, slot of the target

PASSES: Final = (  # of what is left of both sides, each tensor as a module of its own
    Pass("names", pair_by_names, needs_values=False),
    Pass("values", pair_all_outputs_by_values),
    Pass("fused_values", fuse_by_values),
    Pass("remaining_names", pair_remaining_names, needs_values=False),
)
_TRIED: Final = 3  # members on which layouts are tried
_NEAR: Final = 8  # roundings, by which equal values differ at most


@dataclass(frozen=True, slots=True)
class ParameterPair:
    """A slot of a site template and one of its partner that belong together.

    Attributes:
        reference: The one's slot.
        target: The other's.
        places: Members that have them.
    """

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
        self.pairs = [(candidate, self._pair_slots(candidate)) for candidate in matching.accepted]
        self.fused = [(fusion, slots) for fusion in fused for slots in self._pair_fused_slots(fusion)]

    def _pair_slots(self, candidate: Candidate) -> list[ParameterPair]:
        sides = self.matching.sides
        template, target_template = (
            sides[0].templates[candidate.reference],
            sides[1].templates[candidate.target],
        )
        places_by_slots: dict[SlotPair, list[Place]] = defaultdict(list)
        for a, b in candidate.places:
            for slots in self._pair_member_slots(template.members[a], target_template.members[b]):
                places_by_slots[slots].append((a, b))
                self._take((template.members[a].site,), (target_template.members[b].site,), slots)
        return [
            ParameterPair(slot, target_slot, tuple(places))
            for (slot, target_slot), places in places_by_slots.items()
        ]

    def _take(
        self, sites_of_reference: Iterable[str], sites_of_target: Iterable[str], slots: SlotPair
    ) -> None:
        for places, sites, slot in zip(self.taken, (sites_of_reference, sites_of_target), slots, strict=True):
            places.update(f"{site}/{slot}" for site in sites)

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
        for slot in [s for s in slots if s in target_slots and _sizes(slots[s]) & _sizes(target_slots[s])]:
            take(slot, slot)
        for slot in list(slots):
            near = [other_slot for other_slot in target_slots if self._are_near(one, slot, other, other_slot)]
            if len(near) == 1:
                take(slot, near[0])
        for slot in list(slots):
            fitting = [
                [s for s in left if _kind(s) == _kind(slot) and _sizes(left[s]) & _sizes(slots[slot])]
                for left in (slots, target_slots)
            ]
            if len(fitting[0]) == len(fitting[1]) == 1:
                is_gradient = not slot.startswith(PARAMETER_SLOTS)  # of what may be another argument
                if not (is_gradient and self._are_near(one, slot, other, fitting[1][0]) is False):
                    take(slot, fitting[1][0])
        for slot in [
            s for s in slots if s in target_slots and s.startswith(PARAMETER_SLOTS)
        ]:  # of unlike sizes
            take(slot, slot)
        return pairs

    def _are_near(self, one: Member, slot: str, other: Member, other_slot: str) -> bool | None:
        """Whether two slots of one kind have near values; None if they tell nothing."""
        if _kind(slot) != _kind(other_slot):
            return False
        fingerprint = self.matching.sides[0].joint_fingerprint_of(one.other_tensors[slot])
        target_fingerprint = self.matching.sides[1].joint_fingerprint_of(other.other_tensors[other_slot])
        if fingerprint is None or target_fingerprint is None:
            return None
        return fingerprint.distance(target_fingerprint) <= _NEAR * self.matching.rounding

    def _pair_fused_slots(self, fusion: Fusion) -> Iterator[SlotPair]:
        """Slots that all parts have, and the slots of the whole that they make."""
        parts_side, whole_side = (0, 1) if fusion.is_split else (1, 0)
        part_sites, whole_site = fusion.places[min(fusion.places)]
        parts = [self.matching.sides[parts_side].member(site) for site in part_sites]
        whole = self.matching.sides[whole_side].member(whole_site)
        left = dict(whole.other_tensors)
        for slot in sorted(set.intersection(*(set(part.other_tensors) for part in parts))):
            size = sum(record.size for part in parts for record in part.other_tensors[slot])
            fitting = [
                s for s, rs in left.items() if _kind(s) == _kind(slot) and sum(r.size for r in rs) == size
            ]
            same = slot if slot in fitting else fitting[0] if len(fitting) == 1 else None
            if same is None:
                continue
            del left[same]
            slots = (slot, same) if fusion.is_split else (same, slot)
            for parts_of_place, whole_of_place in fusion.places.values():
                sites = (
                    (parts_of_place, (whole_of_place,))
                    if fusion.is_split
                    else ((whole_of_place,), parts_of_place)
                )
                self._take(sites[0], sites[1], slots)
            yield slots


def parameter_entries(
    slots: Slots,
    fused: Iterable[Fusion],
    surveys: tuple[Survey, Survey],
    canonical: Canonical | None,
    *,
    uses_values: bool,
    without: Collection[str] = (),
) -> tuple[list[Entry], list[LeftOver], Rivals]:
    """Entries of parameters and buffers and of gradients, what is unsure, and what is contested.

    Args:
        slots: Finds layouts between tensors of paired modules.
        fused: Fusions of modules.
        surveys: All modules of both sides.
        canonical: What makes names equal; None if names tell nothing.
        uses_values: Whether values may be looked at.
        without: Names of passes to leave out.
    """
    parameter_pairs = ParameterPairs(slots.matching, fused)
    rest = [
        survey_unpaired(survey, taken) for survey, taken in zip(surveys, parameter_pairs.taken, strict=True)
    ]
    reference, target = (
        Side(survey, fingerprints, uses_values=uses_values)
        for survey, fingerprints in zip(rest, slots.fingerprints, strict=True)
    )
    for side in (reference, target):
        for template in side.templates.values():
            template.slot = template.name.rpartition("/")[2]
    matching = Matching(reference, target, canonical, is_ordered=False)
    own_slots = slots.of(matching, _shapes(parameter_pairs))
    state = MatchState(matching, own_slots, Rules())
    run_passes(PASSES, state, uses_values=uses_values, without=without)
    written = [
        *(
            entries_of_parameter_pair(slots, c, parameter_pair, own_slots.judge)
            for c, entries in parameter_pairs.pairs
            for parameter_pair in entries
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
    )


def entries_of_parameter_pair(
    slots: Slots, candidate: Candidate, parameter_pair: ParameterPair, judge: PairEvidence
) -> Made:
    """The entries of one slot of paired site templates and its partner."""
    one, other = (
        side.templates[name]
        for side, name in zip(slots.matching.sides, (candidate.reference, candidate.target), strict=True)
    )
    pairs = [
        (
            one.members[a].other_tensors[parameter_pair.reference],
            other.members[b].other_tensors[parameter_pair.target],
        )
        for a, b in parameter_pair.places
    ]
    for records in pairs[:_TRIED]:
        fit = slots.find_layout(*records)
        if fit is None or fit.is_proven:
            break
    is_named = parameter_pair.reference == parameter_pair.target
    evidence, reason = slots.judge.explain_parameters(
        candidate.evidence if is_named else "structure",
        pairs,
        records,
        fit,
        slots.residuals(fit, pairs) if fit is not None and fit.residual is not None else [None] * len(pairs),
        is_transposed=judge.is_transposed(one, other)
        if parameter_pair.reference.startswith(PARAMETER_SLOTS)
        else None,
    )
    if fit is None or not fit.is_sure:
        shapes = [[record.shape for record in found] for found in records]
        if not is_named or (fit is not None and shapes[0] != shapes[1]):
            return [], _unsure(candidate, parameter_pair, one, other)
        fit = Fit((), (0,), None, float("inf"), 0, is_sure=False)
    prefix = ["rank*/" if len(found) > 1 else "" for found in records]
    return [
        Entry(
            (f"{prefix[0]}{names[0]}/{parameter_pair.reference}",),
            (f"{prefix[1]}{names[1]}/{parameter_pair.target}",),
            variables,
            fit.steps,
            evidence,
            reason,
        )
        for names, variables in placed(one, other, parameter_pair.places)
    ], []


def _unsure(
    candidate: Candidate, parameter_pair: ParameterPair, one: SiteTemplate, other: SiteTemplate
) -> list[LeftOver]:
    names = f"{candidate.reference}/{parameter_pair.reference}", f"{candidate.target}/{parameter_pair.target}"
    reason = f"{names[0]} and {names[1]} belong together, but no layout of theirs is certain"
    left = tuple(f"{one.members[a].site}/{parameter_pair.reference}" for a, _ in parameter_pair.places)
    right = tuple(f"{other.members[b].site}/{parameter_pair.target}" for _, b in parameter_pair.places)
    return [
        LeftOver("reference", left, reason, is_explained=False),
        LeftOver("target", right, reason, is_explained=False),
    ]


def survey_unpaired(survey: Survey, taken: set[str]) -> Survey:
    """Parameters and buffers and has no partner yet, each as a module of its own that gives it."""
    unpaired_templates: dict[str, NameTemplate] = {}
    for template in survey.templates.values():
        for member in template.members.values():
            for slot, records in member.held.items():
                place = f"{member.site}/{slot}"
                if place not in taken:
                    shards = records if len(records) > 1 else ()
                    name, index = fold(place)
                    lone = Member(place, records[0], {}, {}, member.module, None, shards)
                    unpaired_templates.setdefault(name, NameTemplate(name)).members[index] = lone
    return Survey(unpaired_templates, {})


def _shapes(parameter_pairs: ParameterPairs) -> Iterator[Shapes]:
    """Classes of paired modules, and the shapes of what they hold."""
    sides = parameter_pairs.matching.sides
    for candidate, slot_pairs in parameter_pairs.pairs:
        template, target_template = (
            sides[0].templates[candidate.reference],
            sides[1].templates[candidate.target],
        )
        for parameter_pair in slot_pairs:
            a, b = parameter_pair.places[0]
            records = (
                template.members[a].other_tensors[parameter_pair.reference],
                target_template.members[b].other_tensors[parameter_pair.target],
            )
            if (
                parameter_pair.reference.startswith(PARAMETER_SLOTS)
                and len(records[0]) == len(records[1]) == 1
            ):
                yield (
                    template.first.module,
                    target_template.first.module,
                    records[0][0].shape,
                    records[1][0].shape,
                )


def _sizes(records: Sequence[Record]) -> set[int]:
    """Numbers of elements: of all ranks together, or of each."""
    return {sum(record.size for record in records), records[0].size}


def _kind(slot: str) -> str:
    return slot.partition(".")[0]
