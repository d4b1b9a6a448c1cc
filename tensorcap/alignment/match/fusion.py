"""Accept fusions of several tensors to one, and find the layout between parts and whole.

Count, mean, l2, minimum and maximum of a whole follow from those of its parts; of a sum only the mean does.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.alignment.layout import CLOSE, Fit
from tensorcap.alignment.match.candidates import Fusion
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.names import Index
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
        matching.template_partners[reference].add(target)


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
    best = min(distances or fusion.places, key=lambda index: (distances.get(index, 0.0), index))
    reference, target = tensors_of(matching, fusion, best, slot_pair)
    plain = tuple(range(len(target)))
    is_fixed = fusion.is_split or fusion.is_sum or len(target) > _PARTS
    tried = [plain] if is_fixed else list(itertools.permutations(plain))
    most = _SUMMED if fusion.is_sum else CLOSE if fusion.agreeing and slot_pair is None else math.inf
    sure = [
        (order, fit)
        for order in tried
        if (fit := slots.find_layout(reference, [target[i] for i in order])) is not None
        and fit.is_sure
        and (fit.residual is None or fit.residual <= most)
    ]
    order, fit = min(sure, key=lambda f: f[1].residual or 0.0, default=((), None))
    if fit is None and slot_pair is not None:
        order, fit = _fit_as_results(slots, fusion, reference, target)
    return replace(fusion, fit=fit, order=fit.order if fit and fusion.is_split else order)


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
) -> tuple[tuple[int, ...], Fit | None]:
    """The layout of the results, on the one axis where it fits."""
    order, steps = fusion.order, fusion.fit.steps if fusion.fit else ()
    cuts = [step.split() for step in steps if not step.startswith(("squeeze", "unsqueeze"))]
    if len(cuts) != 1 or cuts[0][0] not in ("split", "concat"):
        return order, None
    name, _, *sizes = cuts[0]
    ordered = target if fusion.is_split else [target[i] for i in order]
    taken = order if fusion.is_split else (0,)
    among = [((" ".join([name, str(axis), *sizes]),), taken) for axis in range(len(reference[0].shape))]
    fits = [slots.find_layout(reference, ordered, among=[candidate]) for candidate in among]
    fitting = [fit for fit in fits if fit is not None]
    return order, fitting[0] if len(fitting) == 1 else None


def _tensors(side: Side, site: str, slot: str) -> Sequence[Record]:
    return side.member(site).other_tensors[slot] if slot else side.records(site)
