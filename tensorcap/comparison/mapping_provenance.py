"""Provenance of the target's side of pairs under a mapping, or why there is none; hints for unlike shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.alignment import MappedArchive, MappingSummary, Reasons, placement_of
from tensorcap.alignment.layout import find_layout
from tensorcap.comparison.pair import Decision, Origin, Pair, decide
from tensorcap.comparison.pairing import Selection
from tensorcap.runs import is_result
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.records import Record

BY_VALUES: Final = "Paired by values"
_NAMED: Final = 3  # tensors in one sentence


def with_mapping(pairs: Sequence[Pair], target: MappedArchive, selection: Selection) -> list[Pair]:
    """Add to each pair what the mapping says of it (CMP-20, CMP-21).

    Args:
        pairs: As `pair_records` gives them for the mapped target.
        target: The target, under the reference's keys.
        selection: What a user asked for: what that requires may not be missing, whatever a mapping explains.
    """
    ours, theirs = Reasons(target.left_over, "reference"), Reasons(target.left_over, "target")
    sites = {record.key.site for link in target.links.values() for record in link.reference}
    mapped = [_with_origin(pair, target, ours, theirs, sites) for pair in pairs]
    return [
        _as_required(before, pair) if selection.is_required(pair.key) else pair
        for before, pair in zip(pairs, mapped, strict=True)
    ]


def with_places(pairs: Sequence[Pair], target: Archive) -> list[Pair]:
    """Add to pairs of nodes the name and the steps of a record that the target has otherwise (SYN-3).

    Args:
        pairs: As `pair_records` gives them.
        target: The target, with its nodes where the reference has them.
    """
    return [_with_place(pair, target) for pair in pairs]


def _with_place(pair: Pair, target: Archive) -> Pair:
    placed = None if pair.target is None else placement_of(target, pair.target.key.text)
    if placed is None:
        return pair
    placement, record = placed
    is_renamed = record.key.site != placement.key.site
    evidence = "structure" if is_renamed or not placement.steps else "shape"
    return replace(pair, origin=Origin((record.key.text,), placement.steps, evidence, placement.reason))


def _as_required(before: Pair, pair: Pair) -> Pair:
    """A pair that a user requires: what a mapping explains is missing all the same."""
    if pair.status != "explained":
        return pair
    return decide(before, Decision("mapping", before.status, pair.reason))


def matching_warnings(target: Archive) -> Sequence[str]:
    """Warn that a part of matching could not be run because of a fault in its own code."""
    alignment = target.alignment if isinstance(target, MappedArchive) else None
    return alignment.failed if alignment else ()


def summary_with_tokens(target: MappedArchive) -> MappingSummary:
    """The summary of a mapping, and that a rule left out tokens that the reference's tensors have alone."""
    summary = target.summary
    return replace(summary, tokens=(*summary.tokens, *_reduced_tokens(target)))


def _reduced_tokens(target: MappedArchive) -> Iterator[str]:
    reduced = [
        f"{record.key.text} ({len(gather.reference_rows)} of {len(gather.reference.cells)} tokens)"
        for link in {id(link): link for link in target.links.values()}.values()
        if link.entry.evidence == "rule"
        for record, gather in zip(link.reference, link.gathers, strict=bool(link.gathers))
        if not gather.is_whole
    ]
    if reduced:
        more = f", … {len(reduced)} in all" if len(reduced) > _NAMED else ""
        yield (
            "by rule, the tokens that both sides have were compared and no others, of: "
            f"{', '.join(reduced[:_NAMED])}{more}"
        )


def value_warnings(target: Archive) -> Iterator[str]:
    """That values, and not names, decided between the target's results."""
    if not isinstance(target, MappedArchive):
        return
    moved = [
        f"{text} with {source.key.text}"
        for text, link in target.links.items()
        if link.entry.evidence == "values" and link.is_renaming and text in target.source
        for source in target.sources[text]
        if is_result(source.key) and source.key.text != text
    ]
    if moved:
        more = f", … {len(moved)} in all" if len(moved) > _NAMED else ""
        yield (
            f"{BY_VALUES}, since the target's records of these names hold others: "
            f"{', '.join(moved[:_NAMED])}{more}."
        )


def _with_origin(
    pair: Pair, target: MappedArchive, ours: Reasons, theirs: Reasons, sites: Collection[str]
) -> Pair:
    if pair.target is not None:
        text = pair.target.key.text
        link, sources = target.links.get(text), target.sources[text]
        if link is not None:
            entry = link.entry
            steps = link.layout.texts if entry.dims else entry.steps
            keys = tuple(source.key.text for source in sources)
            return replace(pair, origin=Origin(keys, steps, entry.evidence, entry.reason))
        if pair.reference is None and not pair.reason:
            left = theirs.of(sources[0].key)
            return replace(pair, reason=left.reason if left and left.is_explained else "")
        if pair.status == "unexpected" and (left := theirs.of(sources[0].key)) and left.is_explained:
            return decide(pair, Decision("mapping", "missing-in-reference", left.reason))
        return pair
    if pair.reference is None or pair.status != "missing-in-target":
        return pair
    left = ours.of(pair.reference.key)
    if left is None:
        is_known = not target.links or pair.reason or pair.reference.key.site in sites
        decision = Decision("mapping", "unmapped", "no entry of the mapping has it")
        return pair if is_known else decide(pair, decision)
    if left.is_explained:
        return decide(pair, Decision("mapping", "explained", left.reason))
    return decide(pair, Decision("mapping", "unmapped", pair.reason or left.reason))


_TRIED: Final = 20  # pairs
_LEAST: Final = 8  # elements; fewer, and equal ones, prove nothing
_ROUNDING: Final = 2.0**-9  # of bfloat16, below which errors tell no layout from another


def with_hints(pairs: Iterable[Pair], reference: Archive, target: Archive) -> list[Pair]:
    """Add to pairs of unlike shapes, the first 20, the layout steps after which their values agree."""
    hinted = []
    tried = 0
    for pair in pairs:
        if pair.status == "shape-mismatch" and tried < _TRIED and pair.reference and pair.target:
            tried += 1
            hinted.append(_with_hint(pair, pair.reference, pair.target, (reference, target)))
        else:
            hinted.append(pair)
    return hinted


def _with_hint(pair: Pair, ours: Record, theirs: Record, archives: tuple[Archive, Archive]) -> Pair:
    if ours.size != theirs.size or ours.dtype.packed != theirs.dtype.packed or ours.size < _LEAST:
        return pair
    try:
        statistics = archives[0].statistics(ours)
        if statistics.minimum == statistics.maximum:
            return pair
        layout = find_layout([ours], [theirs], archives, _ROUNDING)
    except (OSError, UsageError):  # its shapes are what matters
        return pair
    if layout is None or not layout.is_proven or not layout.steps:
        return pair
    return replace(pair, reason=f"{pair.reason}; would match after {', '.join(layout.steps)}")
