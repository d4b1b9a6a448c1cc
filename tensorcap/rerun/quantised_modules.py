"""Modules of a replay that compute with whole numbers in the target: their results are as precise as these.

In a comparison of free runs the error of such weights goes on to all that follows (POL-4). In a replay it
does not: what follows is given the target's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tensorcap.comparison import Pair, QuantisedLayers, QuantisedModule, quantised_modules
from tensorcap.runs import enclosing_sites, rms_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key


def quantised_sites(
    reference: Archive, target: Archive, pairs: Sequence[Pair], layers: QuantisedLayers
) -> Mapping[str, QuantisedModule]:
    """Return the modules of the reference that the target computes with weights of few bits.

    1. A module of the target is those of the reference whose results are made of its own, as the three
       projections of a fused one.
    2. One without such results, as each of a list of experts, computes within the nearest module around it
       that has some, and counts by the size of its result in the reference over that of the largest there.
    3. If its results are not known, each is as far off at least as its weight is, if that is known.

    Args:
        reference: The trusted side.
        target: The other side, under the reference's keys.
        pairs: Their comparison.
        layers: The quantised layers of the target.

    Returns:
        The modules of the target by those sites, the coarsest of those that count there.
    """
    modules = quantised_modules(reference.info, target.info, reference.records, predicted=layers.own_errors)
    users = _users(pairs)
    known = {site for sites in users.values() for site in sites}
    places: dict[str, set[str]] = {}
    within: dict[str, dict[str, float]] = {}  # by the module around: sizes of results of those without users
    sizes = _sizes(reference)
    for module in modules:
        has_name = module in reference.info.modules
        places[module] = {
            site
            for own, made in users.items()
            if module in made or (own == module and not has_name)
            for site in made
        }
        if not places[module]:
            around = next((site for site in enclosing_sites(module) if site in known), ROOT_SITE)
            places[module] = {around}
            within.setdefault(around, {})[module] = sizes.get(module, 0.0)
    coarsest: dict[str, QuantisedModule] = {}
    for module, quantised in modules.items():
        rounding = quantised.rounding
        if module not in layers.own_errors:
            rounding = max(rounding, layers.of_weights.get(module, 0.0))
        for site in places[module]:
            beside = within.get(site, {})
            largest = max(beside.values(), default=0.0)
            share = beside[module] / largest if module in beside and largest else 1.0
            quantised = replace(quantised, rounding=rounding * share)
            coarsest[site] = max(quantised, coarsest.get(site, quantised), key=lambda one: one.rounding)
    return coarsest


def _sizes(archive: Archive) -> Mapping[str, float]:
    """The largest RMS of the results of each module, by site, of those whose statistics are known."""
    sizes: dict[str, float] = {}
    for record in archive.records:
        if record.key.slot.startswith("output"):
            sizes[record.key.site] = max(rms_of(record), sizes.get(record.key.site, 0.0))
    return sizes


def _users(pairs: Sequence[Pair]) -> Mapping[str, set[str]]:
    """The sites of results of the reference, by the target's own site of whose result each is made."""
    users: dict[str, set[str]] = {}
    for pair in pairs:
        if pair.reference is None or pair.target is None or not pair.reference.key.slot.startswith("output"):
            continue
        site = pair.reference.key.site
        texts = (pair.target.key.text,) if pair.origin is None else pair.origin.target
        for own in (Key.parse(text).site for text in texts):
            users.setdefault(own, set()).add(site)
    return users
