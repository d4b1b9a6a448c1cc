"""Find which tensors of two archives belong together, by names, values, place and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from tensorcap.alignment.mapping import Alignment, Entry, LeftOver
from tensorcap.alignment.match.candidates import Fusion
from tensorcap.alignment.match.derived_outputs import find_handed_on, pair_scaled, possible_sums
from tensorcap.alignment.match.entries import entries_of_fusion, entries_of_handed_on, entries_of_pair
from tensorcap.alignment.match.fingerprints import Fingerprints
from tensorcap.alignment.match.fusion import claim, is_free, settle_fusions
from tensorcap.alignment.match.fusion_rules import fuse_by_rules, fuse_by_shapes, fuse_by_values
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.parameter_pairs import parameter_entries
from tensorcap.alignment.match.placement import complete_templates, pair_by_place, pair_lone_children
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.match.unmatched import Unmatched, refused
from tensorcap.alignment.names.rule_files import builtin_rules
from tensorcap.alignment.names.rulesets import Rules
from tensorcap.alignment.names.site_templates import Survey
from tensorcap.alignment.resolution import ResolvedMapping, resolve_fitting
from tensorcap_formats.archive import Archive

By = Literal["all", "values", "names"]


def propose(
    reference: Archive,
    target: Archive,
    *,
    rules: Rules | None = None,
    by: By = "all",
    read_values: bool = True,
) -> ResolvedMapping:
    """Find which sites of two runs belong together, by what evidence, and what is left over.

    Args:
        reference: The trusted run.
        target: The run under test.
        rules: Rules that go before those that come with tensorcap, as `read_rules` reads them.
        by: `names` looks at names alone, `values` at everything but names.
        read_values: Whether tensors may be read: a few, to find layouts, and of a file from elsewhere all of
            them once, for their statistics.

    Returns:
        Entries with their evidence and links, and all sites that are in none, with the reason.
    """
    surveys = Survey.of(reference), Survey.of(target)
    archives = reference, target
    fingerprints = Fingerprints(reference, may_read=read_values), Fingerprints(target, may_read=read_values)
    one, other = (
        Side(survey, found, uses_values=by != "names")
        for survey, found in zip(surveys, fingerprints, strict=True)
    )
    known = Rules() if by == "values" else (rules or Rules()).before(builtin_rules(reference, target))
    naming = None if by == "values" else known.canonical
    is_ordered = reference.is_ordered and target.is_ordered
    matching = Matching(one, other, naming, is_ordered=is_ordered)
    slots = Slots(archives, fingerprints, matching, read_values=read_values)
    sums = possible_sums(matching)
    matching.settle_names({(fusion.whole, part) for fusion in sums for part in fusion.parts})
    fused = fuse_by_rules(matching, slots, known)
    fused += _settle_values(matching, slots, sums) if by != "names" else []
    matching.pair_names_left()
    slots.learn()
    entries: list[Entry] = []
    left: list[LeftOver] = []
    for candidate in sorted(matching.accepted, key=lambda c: bool(one.templates[c.reference].slot)):
        made, unsure = entries_of_pair(slots, candidate)
        entries += made
        left += unsure
    for fusion in fused:
        made, unsure = entries_of_fusion(slots, fusion)
        entries += made
        left += unsure
    for candidate, argument in find_handed_on(matching, fingerprints[1]) if by != "names" else ():
        entries += entries_of_handed_on(slots, candidate, argument)
    held, unsure, contested = parameter_entries(slots, fused, surveys, naming, by)
    entries += held
    left += unsure
    unmatched = Unmatched(matching, surveys, slots.judge.bound, known)
    left += unmatched.sites()
    resolved, refusals = resolve_fitting(Alignment(tuple(entries)), reference, target)
    for entry, error in refusals:  # later calls have other shapes, or there are none of the same step
        left += refused(entry, str(error))
    left += unmatched.records(archives, resolved.links, left, contested)
    return _sorted(replace(resolved, alignment=replace(resolved.alignment, left_over=tuple(left))), one)


def _settle_values(matching: Matching, slots: Slots, sums: Sequence[Fusion]) -> list[Fusion]:
    """Settle all that values, place and shapes say, what is plain before what is not; returns the fusions."""
    matching.settle_leaves()
    found = settle_fusions(matching, slots, sums)
    matching.settle_proven(is_plain=True)
    found += fuse_by_values(matching, slots)
    matching.settle_proven(is_plain=False)
    fused = []
    for fusion in found:  # what remains without a layout is told, if nothing else was found for its sites
        if fusion.fit is not None or is_free(matching, fusion):
            claim(matching, fusion)
            fused.append(fusion)
    complete_templates(matching)
    if matching.is_ordered:
        pair_by_place(matching)
        fused += fuse_by_shapes(matching, slots)
        pair_by_place(matching)
    pair_lone_children(matching)
    pair_scaled(matching, slots.judge.bound)
    return fused + settle_fusions(matching, slots, sums, may_repeat=True)


def _sorted(mapping: ResolvedMapping, side: Side) -> ResolvedMapping:
    """The mapping with its entries in the order of the reference's results."""
    orders = {name: template.order for name, template in side.templates.items()}

    def order(entry: Entry) -> tuple[float, int, str]:
        names = list(entry.variables)
        site, _, slot = entry.reference[0].partition("/")
        for i, name in enumerate(names):
            site = site.replace(f"{{{name}}}", f"{{{i}}}")
        return orders.get(site, float("inf")), int(slot.startswith("output")), entry.text

    entries = mapping.alignment.entries
    numbers = sorted(range(len(entries)), key=lambda number: order(entries[number]))
    return replace(
        mapping,
        alignment=replace(mapping.alignment, entries=tuple(entries[number] for number in numbers)),
        links_by_entry=tuple(mapping.links_by_entry[number] for number in numbers),
    )
