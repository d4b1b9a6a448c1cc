"""Modules of a replay that compute with whole numbers in the target: their results are as precise as these.

In a comparison of free runs the error of such weights goes on to all that follows (POL-4). In a replay it
does not: what follows is given the target's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorcap.comparison import Pair, QuantisedModule, quantised_modules
from tensorcap.runs import enclosing_sites
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key


def quantised_sites(
    reference: Archive, target: Archive, pairs: Sequence[Pair], predicted: Mapping[str, float]
) -> Mapping[str, QuantisedModule]:
    """Return the modules of the reference that the target computes with weights of few bits.

    1. A module of the target is those of the reference whose results are made of its own, as the three
       projections of a fused one.
    2. One without such results, as each of a list of experts, computes within the nearest module around it
       that has some.

    Args:
        reference: The trusted side.
        target: The other side, under the reference's keys.
        pairs: Their comparison.
        predicted: As for `quantised_modules`.

    Returns:
        The modules of the target by those sites, the coarsest of those that count there.
    """
    modules = quantised_modules(reference.info, target.info, reference.records, predicted=predicted)
    coarsest: dict[str, QuantisedModule] = {}
    users = _users(pairs)
    known = {site for sites in users.values() for site in sites}
    for module, quantised in modules.items():
        has_name = module in reference.info.modules
        sites = {
            site
            for own, made in users.items()
            if module in made or (own == module and not has_name)
            for site in made
        }
        around = next((site for site in enclosing_sites(module) if site in known), ROOT_SITE)
        for site in sites or {around}:
            coarsest[site] = max(quantised, coarsest.get(site, quantised), key=lambda one: one.rounding)
    return coarsest


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
