"""Find which tensors of two archives belong together, by names, values, place and shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from tensorcap.alignment.entries import entries_of_fusion, entries_of_pair, entries_of_taken
from tensorcap.alignment.evidence import Prints
from tensorcap.alignment.fusing import Fusion, claim, fuse_by_shapes, fuse_by_values, is_free, settle
from tensorcap.alignment.mapping import Alignment, Entry, LeftOver
from tensorcap.alignment.matching import Matching
from tensorcap.alignment.naming import Naming, plain_name
from tensorcap.alignment.placing import pair_by_place
from tensorcap.alignment.sides import Side
from tensorcap.alignment.slots import Slots
from tensorcap.alignment.summing import possible_sums
from tensorcap.alignment.survey import Survey
from tensorcap.alignment.taking import taken_results
from tensorcap_formats.archive import Archive

By = Literal["all", "values", "names"]

_UNKNOWN: Final = "no counterpart was found"


def propose(
    reference: Archive,
    target: Archive,
    *,
    rules: Naming | None = None,
    by: By = "all",
    read_values: bool = True,
) -> Alignment:
    """Find which sites of two runs belong together, by what evidence, and what is left over.

    Args:
        reference: The trusted run.
        target: The run under test.
        rules: What makes names equal; if None, wrappers and doubled components are left out of them.
        by: `names` looks at names alone, `values` at everything but names.
        read_values: Whether tensors may be read: a few, to find layouts, and of a file from elsewhere all of
            them once, for their statistics.

    Returns:
        Entries with their evidence, and all sites that are in none, with the reason.
    """
    surveys = Survey.of(reference), Survey.of(target)
    archives = reference, target
    prints = tuple(Prints(archive, may_read=read_values) for archive in archives)
    one, other = (
        Side(survey, found, uses_values=by != "names") for survey, found in zip(surveys, prints, strict=True)
    )
    naming = plain_name if rules is None else rules.canonical
    is_ordered = reference.is_ordered and target.is_ordered
    matching = Matching(one, other, None if by == "values" else naming, is_ordered=is_ordered)
    slots = Slots(archives, prints, matching, read_values=read_values)
    sums = possible_sums(matching)
    matching.settle_names({(fusion.whole, part) for fusion in sums for part in fusion.parts})
    fused = _settle_values(matching, slots, sums) if by != "names" else []
    matching.pair_names_left()
    entries: list[Entry] = []
    left: list[LeftOver] = []
    for candidate in sorted(matching.accepted, key=lambda c: bool(one.roles[c.reference].slot)):
        made, unsure = entries_of_pair(slots, candidate)
        entries += made
        left += unsure
    for fusion in fused:
        made, unsure = entries_of_fusion(slots, fusion)
        entries += made
        left += unsure
    for candidate, argument in taken_results(matching, prints[1]) if by != "names" else ():
        entries += entries_of_taken(slots, candidate, argument)
    left += _left_over(matching, surveys)
    return Alignment(tuple(_sorted(entries, one)), tuple(left))


def _settle_values(matching: Matching, slots: Slots, sums: Sequence[Fusion]) -> list[Fusion]:
    """Settle all that values, place and shapes say, what is plain before what is not; returns the fusions."""
    matching.settle_leaves()
    found = settle(matching, slots, sums)
    matching.settle_proven(is_plain=True)
    found += fuse_by_values(matching, slots)
    matching.settle_proven(is_plain=False)
    fused = []
    for fusion in found:  # what remains without a layout is told, if nothing else was found for its sites
        if fusion.how is not None or is_free(matching, fusion):
            claim(matching, fusion)
            fused.append(fusion)
    if matching.is_ordered:
        pair_by_place(matching)
        fused += fuse_by_shapes(matching, slots)
        pair_by_place(matching)
    return fused + settle(matching, slots, sums, may_repeat=True)


def _sorted(entries: Iterable[Entry], side: Side) -> list[Entry]:
    """Entries in the order of the reference's results."""
    orders = {name: role.order for name, role in side.roles.items()}

    def order(entry: Entry) -> tuple[float, int, str]:
        names = list(entry.variables)
        site, _, slot = entry.reference[0].partition("/")
        for i, name in enumerate(names):
            site = site.replace(f"{{{name}}}", f"{{{i}}}")
        return orders.get(site, float("inf")), int(slot.startswith("output")), entry.text

    return sorted(entries, key=order)


def _left_over(matching: Matching, surveys: tuple[Survey, Survey]) -> list[LeftOver]:
    found: list[LeftOver] = []
    rivals = _rivals(matching)
    names: tuple[Literal["reference", "target"], ...] = ("reference", "target")
    for i, name in enumerate(names):
        side = matching.sides[i]
        told = {
            site: _reason(matching, i, site, rivals[i])
            for site in side.by_site
            if _is_left(matching, i, site)
        }
        whole = {module for module, sites in side.results_of.items() if all(site in told for site in sites)}
        for role in side.roles.values():
            reasons: dict[tuple[str, bool], list[str]] = defaultdict(list)
            for member in role.members.values():
                if member.site not in told:
                    continue
                module = side.module(member.site)
                if module not in whole:
                    reasons[told[member.site]].append(side.place(member.site))
                elif not role.slot:  # none of its results has a partner: told once, with the gravest reason
                    gravest = min((told[site] for site in side.results_of[module]), key=lambda r: r[1])
                    reasons[gravest].append(module)
            known = next((reason for reason, is_explained in reasons if is_explained), None)
            for (reason, is_explained), sites in reasons.items():
                if known is not None and reason == _UNKNOWN:  # one role, one reason
                    found.append(LeftOver(name, tuple(sites), f"as others of {role.name}: {known}"))
                else:
                    found.append(LeftOver(name, tuple(sites), reason, is_explained))
        never = [site for site in surveys[i].never_called if site not in side.by_site]
        if never:
            found.append(LeftOver(name, tuple(never), "never called"))
    return found


def _is_left(matching: Matching, side: int, site: str) -> bool:
    return not matching.has_partner(side, site) and (side == 1 or site not in matching.given)


def _rivals(matching: Matching) -> tuple[Mapping[str, list[str]], Mapping[str, list[str]]]:
    """What each site that is contested could be, best first."""
    found: tuple[dict[str, list[str]], dict[str, list[str]]] = (defaultdict(list), defaultdict(list))
    for candidate in matching.contested:
        for a, b in candidate.places:
            left = matching.sides[0].site(candidate.reference, a)
            right = matching.sides[1].site(candidate.target, b)
            if left not in matching.partner[0] and right not in matching.partner[1]:
                found[0][left].append(right)
                found[1][right].append(left)
    return found


def _reason(matching: Matching, i: int, site: str, rivals: Mapping[str, list[str]]) -> tuple[str, bool]:
    """Why a site has no partner, and whether that suffices."""
    side = matching.sides[i]
    options = [o for o in dict.fromkeys(rivals.get(site, ())) if o not in matching.partner[1 - i]]
    if options:
        more = f" and {len(options) - 3} more" if len(options) > 3 else ""
        return f"could be {' or '.join(options[:3])}{more}", False
    group = side.groups[side.group_of[site]] if site in side.group_of else ()
    known = [other for other in group if matching.has_partner(i, other)]
    if known:
        role = side.by_site[known[0]][0]
        return f"has the values of {role.name}, which has a partner", True
    other = "target" if i == 0 else "reference"
    if site in side.prints:
        alike = matching.alike(i, site)
        known = [found for found in alike if matching.has_partner(1 - i, found)]
        if known:
            role = matching.sides[1 - i].by_site[known[0]][0]
            return f"has the values of {role.name} of the {other}, which has another partner", True
        if not alike and matching.is_sealed(i, site):
            return f"nothing in the {other} has its values, and what comes of them agrees", True
    elif side.by_site[site][0].slot and matching.is_sealed(i, site):
        return "has no values to find it by, and what comes of them agrees", True
    return _UNKNOWN, False
