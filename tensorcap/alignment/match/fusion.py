"""Accept fusions of several tensors to one, and find the layout between parts and whole.

Count, mean, l2, minimum and maximum of a whole follow from those of its parts; of a sum only the mean does.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.alignment.layout import CLOSE, Fit, candidates
from tensorcap.alignment.match.candidates import Fusion, Placed
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.member_layouts import fit_members
from tensorcap.alignment.match.pair_evidence import order_by_names
from tensorcap.alignment.match.pairs import RecordPair
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.names import PARAMETER_SLOTS, Index
from tensorcap_formats.records import Record

_PARTS: Final = 4  # tensors whose order in a fused one is looked for
_SUMMED: Final = 0.05  # of sums, of which one part may be nearly the whole


def settle_fusions(
    matching: Matching, slots: Slots, fusions: Sequence[Fusion], *, may_repeat: bool = False
) -> list[Fusion]:
    """Take the most certain fusions one after the other, those of modules without others inside first.

    A sum is left for the end if its whole or its parts are as likely to be something by themselves. There
    its parts `may_repeat`, what they are by themselves being known.
    """
    chosen: list[Fusion] = []
    for is_leaf in (True, False):
        free = [restrict_to_free(matching, f) for f in fusions if not is_leaf or _is_leaf(matching, f)]
        live = [replace(f, similarity=_similarity(matching, f)) for f in free if f.nats >= WEIGHTS.proof]
        live.sort(key=lambda f: (-f.score, _order(matching, f), f.parts, f.whole))
        wanted: dict[tuple[int, str], list[int]] = defaultdict(list)
        for i, fusion in enumerate(live):
            for site in fusion.sites:
                wanted[site].append(i)
        for i, fusion in enumerate(live):
            numbers = sorted({number for site in fusion.sites for number in wanted[site]} - {i})
            rivals = _find_rivals(matching, live, i, numbers) if is_free(matching, fusion) else None
            if rivals is None:
                continue
            if fusion.is_sum and not may_repeat and _has_better_pair(matching, fusion):
                continue
            fitted = replace(fit_fusion(matching, slots, fusion), is_tied=bool(rivals))
            if fitted.fit is not None:
                claim(matching, fitted)
            if fitted.fit is not None or not (is_leaf or fusion.is_sum):  # a sum that values refute is none
                chosen.append(fitted)
    return chosen


def restrict_to_free(matching: Matching, fusion: Fusion) -> Fusion:
    """A fusion in the places where none of its sites has a partner."""
    part = 0 if fusion.is_split else 1
    places = {
        index: (sites, whole)
        for index, (sites, whole) in fusion.places.items()
        if not matching.has_partner(1 - part, whole)
        and (fusion.is_sum or not any(matching.has_partner(part, site) for site in sites))
    }
    agreeing = {index: one for index, one in fusion.agreeing.items() if index in places}
    return replace(fusion, places=places, agreeing=agreeing)


def _has_better_pair(matching: Matching, fusion: Fusion) -> bool:
    """Whether structure says more for a pair of the whole, or of one of the parts, than for the sum."""
    parts = itertools.chain.from_iterable(sites for sites, _ in fusion.places.values())
    if any(matching.has_partner(1, part) for part in parts):
        return True
    return matching.best_similarity(fusion.whole, fusion.parts) >= fusion.similarity


def claim(matching: Matching, fusion: Fusion) -> None:
    """Take a fusion's sites."""
    matching.fused |= fusion.sites
    for part in fusion.parts:
        reference, target = fusion.turned((part, fusion.whole))
        matching.pair_templates(reference, target)


def is_free(matching: Matching, fusion: Fusion) -> bool:
    """Whether none of a fusion's sites has a partner."""
    sites = ((0, whole) for _, whole in fusion.places.values()) if fusion.is_sum else fusion.sites
    return not any(matching.has_partner(side, site) for side, site in sites)


def _find_rivals(
    matching: Matching, live: Sequence[Fusion], number: int, others: Iterable[int]
) -> list[Fusion] | None:
    """The fusions with equal values that share sites with this one; None if one of them comes first.

    Of those with equal values, which come first in order of results is taken.
    """
    fusion = live[number]
    rivals = []
    for i in others:
        rival = live[i]
        if rival.score <= fusion.score - WEIGHTS.fusion_margin:
            continue
        is_same = matching.is_ordered and _groups(matching, rival) == _groups(matching, fusion)
        if is_free(matching, rival) and not (is_same and number < i):
            return None
        rivals += [rival] if is_same else []
    return rivals


def _groups(matching: Matching, fusion: Fusion) -> set[tuple[int, int]]:
    """The groups of equal values that a fusion's sites belong to."""
    return {(side, matching.sides[side].group_of.get(site, -1)) for side, site in fusion.sites}


def _order(matching: Matching, fusion: Fusion) -> list[int]:
    parts, whole = matching.templates_of_fusion(fusion)
    return [template.order for template in (*parts, whole)]


def _is_leaf(matching: Matching, fusion: Fusion) -> bool:
    parts, whole = matching.templates_of_fusion(fusion)
    return not any(template.inside for template in (*parts, whole))


def _similarity(matching: Matching, fusion: Fusion) -> float:
    """What nesting, classes and parameters say of a fusion, in nats."""
    parts, whole = matching.templates_of_fusion(fusion)
    score = 0.0
    if any(bool(part.inside) != bool(whole.inside) for part in parts):
        score += WEIGHTS.nesting_differs
    if fusion.axis is not None or fusion.is_sum:
        score += matching.children_similarity(*fusion.turned((parts[0].name, whole.name)))
    if fusion.is_sum:
        return score
    families = {part.family for part in parts}
    if whole.family and all(families):
        score += WEIGHTS.family_equal if families == {whole.family} else WEIGHTS.family_differs
    mine = [math.prod(part.parameters[0]) for part in parts if part.parameters]
    count = len(next(iter(fusion.places.values()))[0])
    if mine and whole.parameters:
        is_sum = sum(mine) * (count // len(parts)) == math.prod(whole.parameters[0])
        score += WEIGHTS.fused_parameters_equal if is_sum else WEIGHTS.parameters_differ
    elif (mine or whole.parameters) and parts[0].first.module and whole.first.module:
        score += WEIGHTS.parameters_one_sided
    return score


def fit_fusion(
    matching: Matching, slots: Slots, fusion: Fusion, slot_pair: tuple[str, str] | None = None
) -> Fusion:
    """A fusion with the layout that makes the target's tensors the reference's, if one is certain.

    That of parameters and buffers in some slots is the one of their results, where it fits and nothing is
    certain.
    """
    distances = {index: agreement.distance for index, agreement in fusion.agreeing.items()}
    places = sorted(
        fusion.places, key=lambda index: (index not in distances, distances.get(index, 0.0), index)
    )
    pairs = [tensors_of(matching, fusion, index, slot_pair) for index in places]
    most = _SUMMED if fusion.is_sum else CLOSE if fusion.agreeing and slot_pair is None else math.inf
    usual = order_by_names([*fusion.parts], fusion.whole) if fusion.axis is None and not fusion.is_sum else ()
    plainest = next(candidates(*([record.shape for record in side] for side in pairs[0])), ((), ()))[0]

    def is_usual(layout: Placed) -> bool:
        if usual:
            return (layout.fit.order if fusion.is_split else layout.order) == usual
        return layout.fit.steps == plainest

    layouts = fit_members(
        slots, pairs, lambda pair: _search(slots, fusion, pair, most), first=[0], is_usual=is_usual
    )
    layout = layouts.layout
    if layout is None:
        layout = _fit_as_results(slots, fusion, *pairs[0]) if slot_pair is not None else None
        return _with_layout(fusion, layout)
    others = {places[number]: other for number, other in layouts.others.items()}
    fitted = _with_layout(fusion, layout, others)
    is_lone = 2 * len(layouts.voters) <= len(places) and layout.fit.residual is not None
    if not usual or fitted.order == usual or slot_pair is not None or not is_lone:
        return fitted
    order = _order_without_majority(matching, slots, fitted, [places[i] for i in layouts.voters], usual)
    if order == fitted.order:
        return fitted
    ordered = _in_order(slots, fusion, layout, pairs[layouts.number], order)
    return _with_layout(fusion, ordered, {places[number]: layout for number in layouts.voters})


def _with_layout(
    fusion: Fusion, layout: Placed | None, others: Mapping[Index, Placed] | None = None
) -> Fusion:
    """A fusion with its layout, and the layouts of members that have another one."""
    if layout is None:
        return replace(fusion, fit=None, order=())
    order = layout.fit.order if fusion.is_split else layout.order
    return replace(fusion, fit=layout.fit, order=order, others=others or {})


def _order_without_majority(
    matching: Matching, slots: Slots, fusion: Fusion, voters: Sequence[Index], usual: tuple[int, ...]
) -> tuple[int, ...]:
    """The order of parts of which few layers have another one than their names say, and most say nothing.

    It is that of their weights, if these are stored; else that of their values, if what is computed of them
    agrees in one of these layers; else that of their names: the layers that follow are wrong because of them.
    """
    weights = _weights_in_order(matching, slots, fusion)
    if weights is not None:
        return weights
    side = 1 if fusion.is_split else 0
    is_confirmed = any(matching.is_confirmed(side, fusion.places[index][1]) for index in voters)
    return fusion.order if is_confirmed else usual


def _weights_in_order(matching: Matching, slots: Slots, fusion: Fusion) -> tuple[int, ...] | None:
    """The order in which the weights of parts are in that of their whole; None if none is proven."""
    part_side, whole_side = matching.sides_of_fusion(is_split=fusion.is_split)
    sites, whole_site = fusion.places[min(fusion.places)]
    whole = whole_side.member(whole_site).other_tensors
    for slot in sorted(set.intersection(*(set(part_side.member(site).other_tensors) for site in sites))):
        if slot.startswith(PARAMETER_SLOTS) and slot in whole:
            of_weights = fit_fusion(matching, slots, fusion, (slot, slot))
            if of_weights.fit is not None and of_weights.fit.is_proven:
                return of_weights.order
    return None


def _in_order(
    slots: Slots, fusion: Fusion, layout: Placed, pair: RecordPair, order: tuple[int, ...]
) -> Placed:
    """A layout with the parts in another order, whatever values say."""
    reference, target = pair
    if not fusion.is_split:
        ordered, choice = [target[i] for i in order], (layout.fit.steps, layout.fit.order)
    else:
        ordered, choice = list(target), (_reordered(layout.fit, order), order)
    fit = slots.find_layout(reference, ordered, among=[choice])
    assert fit is not None  # the parts have the same shapes in any order
    return Placed(fit, order if not fusion.is_split else layout.order)


def _reordered(fit: Fit, order: tuple[int, ...]) -> tuple[str, ...]:
    """The steps of a layout that give parts in another order."""
    steps = []
    for step in fit.steps:
        name, *rest = step.split()
        if name == "split" and "," in rest[-1]:
            sizes = dict(zip(fit.order, rest[-1].split(","), strict=True))
            step = f"split {rest[0]} {','.join(sizes[i] for i in order)}"
        steps.append(step)
    return tuple(steps)


def _search(slots: Slots, fusion: Fusion, pair: RecordPair, most: float) -> Placed | None:
    """The best layout of one place, in any order of the target's parts; None if none is certain."""
    plain = tuple(range(len(pair[1])))
    is_fixed = fusion.is_split or fusion.is_sum or len(plain) > _PARTS
    fits = (
        (order, slots.find_layout(pair[0], [pair[1][i] for i in order]))
        for order in ([plain] if is_fixed else itertools.permutations(plain))
    )
    sure = [
        Placed(fit, order)
        for order, fit in fits
        if fit is not None and fit.is_sure and (fit.residual is None or fit.residual <= most)
    ]
    return min(sure, key=lambda layout: layout.fit.residual or 0.0, default=None)


def tensors_of(
    matching: Matching, fusion: Fusion, index: Index, slot_pair: tuple[str, str] | None
) -> tuple[Sequence[Record], Sequence[Record]]:
    """The results of both sides in a place, or what their modules hold in these slots."""
    part_side, whole_side = matching.sides_of_fusion(is_split=fusion.is_split)
    sites, whole_site = fusion.places[index]
    slot, whole_slot = fusion.turned(slot_pair or ("", ""))
    parts = [record for site in sites for record in _tensors(part_side, site, slot)]
    return fusion.turned((parts, _tensors(whole_side, whole_site, whole_slot)))


def _fit_as_results(
    slots: Slots, fusion: Fusion, reference: Sequence[Record], target: Sequence[Record]
) -> Placed | None:
    """The layout of the results, on the one axis where it fits."""
    order, steps = fusion.order, fusion.fit.steps if fusion.fit else ()
    cuts = [step.split() for step in steps if not step.startswith(("squeeze", "unsqueeze"))]
    if len(cuts) != 1 or cuts[0][0] not in ("split", "concat"):
        return None
    name, _, *sizes = cuts[0]
    ordered = target if fusion.is_split else [target[i] for i in order]
    taken = order if fusion.is_split else (0,)
    among = [((" ".join([name, str(axis), *sizes]),), taken) for axis in range(len(reference[0].shape))]
    fits = [slots.find_layout(reference, ordered, among=[candidate]) for candidate in among]
    fitting = [fit for fit in fits if fit is not None]
    return (
        Placed(fitting[0], tuple(range(len(target))) if fusion.is_split else order)
        if len(fitting) == 1
        else None
    )


def _tensors(side: Side, site: str, slot: str) -> Sequence[Record]:
    return side.member(site).other_tensors[slot] if slot else side.records(site)
