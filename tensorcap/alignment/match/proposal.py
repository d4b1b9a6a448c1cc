"""Find which tensors of two archives belong together, by names, values, place and shapes.

`PASSES` is the whole of matching, in order; what it pairs becomes entries, the rest is left over with a
reason.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from tensorcap.alignment.mapping import Alignment, Entry, LeftOver
from tensorcap.alignment.match.content_passes import pair_by_contents, pair_by_weights
from tensorcap.alignment.match.contents import Contents, narrow_dtype
from tensorcap.alignment.match.derived_outputs import (
    find_handed_on,
    find_sums,
    fuse_remaining_sums,
    fuse_sums,
    pair_scaled,
)
from tensorcap.alignment.match.entries import (
    entries_of_folded,
    entries_of_fusion,
    entries_of_given,
    entries_of_handed_on,
    entries_of_pair,
)
from tensorcap.alignment.match.equal_contents import pair_equal_contents
from tensorcap.alignment.match.fingerprints import Fingerprints
from tensorcap.alignment.match.fusion_rules import (
    fuse_by_rules,
    fuse_by_shapes,
    fuse_by_values,
    keep_free_fusions,
)
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.named_projections import pair_named_projections
from tensorcap.alignment.match.numbered_operations import pair_numbered_operations
from tensorcap.alignment.match.parameter_pairs import parameter_entries
from tensorcap.alignment.match.passes import (
    MatchState,
    ParameterMark,
    Pass,
    pair_all_outputs_by_values,
    pair_by_names,
    pair_by_parameters,
    pair_main_outputs_by_values,
    pair_remaining_names,
    pair_tied,
    run_passes,
)
from tensorcap.alignment.match.placement import complete_templates, pair_by_place, pair_lone_children
from tensorcap.alignment.match.rounded_parameters import pair_by_rounded_parameters, pair_remaining_rounded
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.match.unmatched import Unmatched, leave_over
from tensorcap.alignment.names import Rules, Survey, builtin_rules
from tensorcap.alignment.resolution import ResolvedMapping, resolve_fitting
from tensorcap.runs import ops_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import rounded
from tensorcap_formats.run_info import TensorInfo

By = Literal["all", "values", "names"]

PASSES: Final = (
    Pass("sums", find_sums),  # known before names, which would pair a sum with its part
    Pass("names", pair_by_names, needs_values=False),
    Pass("fusion_rules", fuse_by_rules, needs_values=False),
    Pass("sums", fuse_sums),
    Pass("main_values", pair_main_outputs_by_values),
    Pass(
        "fused_values", fuse_by_values
    ),  # before the values of further outputs, which parts of a whole may be
    Pass("values", pair_all_outputs_by_values),
    Pass("fused_values", keep_free_fusions),
    Pass("parameters", pair_by_parameters),
    Pass("parameters", pair_by_rounded_parameters),
    Pass("values", pair_numbered_operations),  # what is no module's that is paired
    Pass("parameters", pair_remaining_rounded),
    Pass("weights", pair_by_weights),
    Pass("contents", pair_by_contents),
    Pass("values", pair_tied),
    Pass("members", complete_templates),  # from here on values prove nothing: place, shapes, nesting
    Pass("placement", pair_by_place),
    Pass("fused_shapes", fuse_by_shapes),  # within modules that place has paired
    Pass("placement", pair_by_place),  # between the neighbours that fusions have added
    Pass("lone_children", pair_lone_children),
    Pass("equal_contents", pair_equal_contents),
    Pass("projections", pair_named_projections),  # once it is known what comes of them
    Pass("scaled_values", pair_scaled),
    Pass("sums", fuse_remaining_sums),
    Pass("remaining_names", pair_remaining_names, needs_values=False),
    Pass("handed_on", find_handed_on),
)


def propose(
    reference: Archive,
    target: Archive,
    *,
    rules: Rules | None = None,
    by: By = "all",
    read_values: bool = True,
    without: Collection[str] = (),
) -> ResolvedMapping:
    """Find which sites of two runs belong together, by what evidence, and what is left over.

    1. Sites are folded to templates, each with a fingerprint of its values: `Survey`, `Side`.
    2. The passes of matching pair templates, see `PASSES`.
    3. Pairs are written as entries with layouts and reasons; parameters follow their modules.
    4. The entries are resolved; what does not fit and what is in none is left over, with the reason.

    Args:
        reference: The trusted run.
        target: The run under test.
        rules: Rules that go before those that come with tensorcap, as `read_rules` reads them.
        by: `names` looks at names alone, `values` at everything but names.
        read_values: Whether tensors may be read: a few, to find layouts, and of a file from elsewhere all of
            them once, for their statistics.
        without: Names of passes to leave out, to measure what they contribute.

    Returns:
        Entries with their evidence and links, and all sites that are in none, with the reason.

    Raises:
        UsageError: There is no pass of a name to leave out.
    """
    names = dict.fromkeys(each.name for each in PASSES)
    for name in sorted(set(without) - names.keys()):
        raise UsageError(f"without {name!r}: no pass of this name, expected one of {', '.join(names)}")
    surveys = Survey.of(reference), Survey.of(target)
    archives, uses_values = (reference, target), by != "names"
    fingerprints = (
        Fingerprints(reference, uses_values=uses_values, may_read=read_values),
        Fingerprints(target, uses_values=uses_values, may_read=read_values),
    )
    sides = [
        Side(survey, known, _operands(archive))
        for survey, known, archive in zip(surveys, fingerprints, archives, strict=True)
    ]
    known_rules = Rules() if by == "values" else (rules or Rules()).before(builtin_rules(reference, target))
    canonical = None if by == "values" else known_rules.canonical
    is_ordered = reference.is_ordered and target.is_ordered
    contents = Contents.of(archives) if uses_values else Contents()
    matching = Matching(sides[0], sides[1], canonical, is_ordered=is_ordered, contents=contents)
    slots = Slots(archives, fingerprints, matching, read_values=read_values)
    state = MatchState(matching, slots, known_rules, parameters=_parameter_marks(archives))
    run_passes(PASSES, state, uses_values=uses_values, without=without)
    slots.learn()
    entries, left_over = _write_entries(state)
    parameters, unsure, contested, failed = parameter_entries(
        slots, state.fusions, surveys, canonical, uses_values=uses_values, without=without
    )
    unmatched = Unmatched(matching, surveys, slots, known_rules, target.info)
    left_over += [*unsure, *unmatched.sites()]
    resolved, refusals = resolve_fitting(Alignment((*entries, *parameters)), reference, target)
    for entry, error in refusals:  # later calls have other shapes, or there are none of the same step
        left_over += leave_over(entry, str(error))
    left_over += unmatched.records(archives, resolved.links, left_over, contested)
    complete = replace(resolved.alignment, left_over=tuple(left_over), failed=(*state.failed, *failed))
    return _sorted(replace(resolved, alignment=complete), sides[0])


def _operands(archive: Archive) -> dict[str, frozenset[str]]:
    """Digests of what an operation takes, by its site; of those whose operands are all known."""
    ops, operands = ops_of(archive), dict[str, frozenset[str]]()
    digests = {record.key.text: record.digest for record in archive.records} if ops else {}
    for record in archive.records if ops else ():
        key = record.key
        taken = ops.inputs(key.where) if key.where in ops and key.site not in operands else None
        if taken is not None:
            operands[key.site] = frozenset(digests.get(text, "") for text in taken) - {""}
    return operands


def _parameter_marks(archives: tuple[Archive, Archive]) -> tuple[Mapping[str, frozenset[ParameterMark]], ...]:
    """What tells the parameters of each module of both sides from others, by its site, if all are known.

    1. Parameters of one dtype are told by their digests.
    2. Of one that is rounded on one side, extremes are: rounding keeps an order, so that those of the rounded
       values are those of the others, rounded.
    """
    narrow = narrow_dtype(archives)
    return tuple(_marks(archive, narrow) for archive in archives)


def _marks(archive: Archive, narrow: str) -> Mapping[str, frozenset[ParameterMark]]:
    marks: dict[str, frozenset[ParameterMark]] = {}
    for path, module in archive.info.modules.items():
        parameters = module.parameters.values()
        ends = [p.statistics for p in parameters if p.statistics is not None]
        is_known = all(p.digest for p in parameters) if not narrow else len(ends) == len(parameters)
        if is_known and any(s.minimum != s.maximum for s in ends):
            marks[path] = frozenset(_mark(p, narrow) for p in parameters)
    return marks


def _mark(parameter: TensorInfo, narrow: str) -> ParameterMark:
    statistics, size = parameter.statistics, math.prod(parameter.shape or ())
    if statistics is None:
        return ParameterMark(parameter.digest, is_constant=False, size=size)
    is_constant = statistics.minimum == statistics.maximum
    if not narrow:
        return ParameterMark(parameter.digest, is_constant, size)
    ends = [end for end in (statistics.minimum, statistics.maximum) if end is not None]
    text = f"{parameter.shape} {rounded(np.array(ends, float), narrow).tolist()}"
    return ParameterMark(text, is_constant, size)


def _write_entries(state: MatchState) -> tuple[list[Entry], list[LeftOver]]:
    """Write the pairs as entries, main outputs first; what has no certain layout is left over."""
    templates = state.matching.sides[0].templates
    accepted = sorted(state.matching.accepted, key=lambda pair: bool(templates[pair.reference].slot))
    written = [entries_of_pair(state.slots, candidate) for candidate in accepted]
    written += [entries_of_fusion(state.slots, fusion) for fusion in state.fusions]
    entries = [entry for entries, _ in written for entry in entries]
    for candidate, argument in state.handed_on:
        entries += entries_of_handed_on(state.slots, candidate, argument)
    given = {
        state.matching.sites_of(candidate, place)[1]
        for candidate, _ in state.handed_on
        for place in candidate.places
    }
    for folded in state.folded:
        if folded.target not in given:
            entries += entries_of_folded(state.slots, folded)
    entries += entries_of_given(state.slots)
    return entries, [left for _, unsure in written for left in unsure]


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
