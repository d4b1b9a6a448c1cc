"""Modules whose weights the target holds in few bits, paired by what these are as floats.

Results of quantised modules drift apart with depth until values prove little. Weights do not: each differs by
its own rounding alone, from a weight that has nothing to do with it by more than its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from tensorcap.alignment.match.contents import SitePair
from tensorcap.alignment.match.fingerprints import UNRELATED, agreements
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.passes import MatchState, accept_sites
from tensorcap_formats.records import Record

_NEAREST: Final = "the weights of the target in few bits are those of the reference, rounded"
_LEFT: Final = "left over on both sides, with weights and results of one size"
_ALIKE: Final = 0.5  # relative error of a weight in few bits; of one that is another's it is 1.4
_TRIED: Final = 3  # weights that are read for each one that statistics do not find
_NEARER: Final = 0.5  # of the distance of what the next one is given


def pair_by_rounded_parameters(state: MatchState) -> None:
    """Pair modules without a partner whose weights belong together, the target's in few bits.

    1. Of each module the largest parameter that was recorded counts.
    2. Those are paired that are each other's nearest by statistics, if these prove it.
    3. For each one that is left, those of the nearest ones are read that are left as well.
    """
    matching = state.matching
    ours, theirs = (_free_with_weights(state, i) for i in (0, 1))
    pairs = [*_proven(matching, ours, theirs)] if ours and theirs else []
    for left, right in pairs:
        del ours[left], theirs[right]
    for right, record in theirs.items():
        known = matching.sides[1].fingerprint_of(record)
        apart = {
            left: one.distance(known)
            for left, other in ours.items()
            if known is not None and (one := matching.sides[0].fingerprint_of(other)) is not None
        }
        near = sorted((site for site in apart if apart[site] <= UNRELATED), key=lambda site: apart[site])
        left = next((site for site in near[:_TRIED] if _are_alike(state, ours[site], record)), "")
        if left:
            pairs.append((left, right))
            del ours[left]
    accept_sites(state, dict.fromkeys(pairs, _NEAREST), has_equal_parameters=True)


def pair_remaining_rounded(state: MatchState) -> None:
    """Pair modules that are left, the target's with weights in few bits, by what they are given.

    A wrong step or zero point makes another weight of one, which values do not find. Two are paired whose
    largest parameters and results have as many elements, if what they are given is far nearer than what
    others of these are given, or if they are the only ones.
    """
    matching = state.matching
    known = [_free_with_weights(state, i) for i in (0, 1)]
    sizes = [
        {site: (record.size, side.size(site)) for site, record in of_side.items()}
        for side, of_side in zip(matching.sides, known, strict=True)
    ]
    apart = {
        (left, right): _apart(matching, left, right)
        for left, own in sizes[0].items()
        for right, other in sizes[1].items()
        if own == other
    }
    while apart:
        nearest_first = sorted(apart, key=lambda pair: (apart[pair], pair))
        chosen = next((pair for pair in nearest_first if _is_clear(pair, apart)), None)
        if chosen is None:
            return
        accept_sites(state, {chosen: _LEFT})
        apart = {pair: d for pair, d in apart.items() if not {*pair} & {*chosen}}


def _is_clear(pair: SitePair, apart: Mapping[SitePair, float]) -> bool:
    """Whether all other pairs of either of two modules are given something far less alike."""
    others = [
        d for other, d in apart.items() if other != pair and (other[0] == pair[0] or other[1] == pair[1])
    ]
    return all(apart[pair] <= _NEARER * other for other in others) and (
        not others or math.isfinite(apart[pair])
    )


def _apart(matching: Matching, left: str, right: str) -> float:
    """The least distance of an argument of the one from one of the other; infinite if it is unknown."""
    sides = [
        [side.fingerprint_of(record) for record in side.member(site).arguments.values()]
        for side, site in zip(matching.sides, (left, right), strict=True)
    ]
    pairs = [(one, other) for one in sides[0] for other in sides[1] if one is not None and other is not None]
    return min((one.distance(other) for one, other in pairs), default=math.inf)


def _proven(
    matching: Matching, ours: Mapping[str, Record], theirs: Mapping[str, Record]
) -> Iterator[SitePair]:
    """Yield modules whose weights are each other's nearest, if statistics prove it."""
    sites = [*ours], [*theirs]
    fingerprints = [
        [one for record in records.values() if (one := side.fingerprint_of(record)) is not None]
        for side, records in zip(matching.sides, (ours, theirs), strict=True)
    ]
    found = agreements(fingerprints[0], fingerprints[1], matching.rounding)
    proven = sorted(numbers for numbers, agreement in found.items() if agreement.nats >= WEIGHTS.proof)
    for i, j in proven:
        yield sites[0][i], sites[1][j]


def _free_with_weights(state: MatchState, i: int) -> dict[str, Record]:
    """The largest parameter of each module without a partner; of the target, of those in few bits."""
    side, modules = state.matching.sides[i], state.slots.archives[i].info.modules
    largest: dict[str, Record] = {}
    for site in side.by_site:
        settings = modules[site].settings if site in modules else {}
        kept = {f"param.{name}" for name in settings.get("dequantised", ())}
        records = [
            records[0]
            for slot, records in side.member(site).parameter_tensors.items()
            if len(records) == 1 and (i == 0 or slot in kept)
        ]
        record = max(records, key=lambda each: each.size, default=None)
        is_known = record is not None and side.fingerprint_of(record) is not None
        if record is not None and is_known and not state.matching.has_partner(i, site):
            largest[site] = record
    return largest


def _are_alike(state: MatchState, one: Record, other: Record) -> bool:
    """Whether two weights hold nearly the same where they are read."""
    fit = state.slots.find_layout([one], [other])
    return fit is not None and fit.residual is not None and fit.residual <= _ALIKE
