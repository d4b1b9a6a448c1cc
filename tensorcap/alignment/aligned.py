"""Align two archives: compute a mapping or read one, check it, and say what it covers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from tensorcap.alignment.coverage import MappingSummary
from tensorcap.alignment.equivalence_map import read_mapping
from tensorcap.alignment.links import Link
from tensorcap.alignment.map_file import parse_map
from tensorcap.alignment.mapping import Alignment, Entry
from tensorcap.alignment.match.proposal import By, propose
from tensorcap.alignment.names.rulesets import Rules
from tensorcap.alignment.resolution import resolve, resolve_each, token_alignments
from tensorcap.alignment.tokens.alignment import TokenAlignment
from tensorcap.alignment.tokens.ragged import by_equal_keys, with_tokens
from tensorcap.alignment.views import GatheredArchive, MappedArchive, mapped
from tensorcap.runs.archive_summary import ArchiveSummary
from tensorcap.runs.record_kinds import is_inner
from tensorcap.runs.views import PartialArchive
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError

NO_MAPPING = "none"
MappingSource = Alignment | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Aligned:
    """Two archives and the mapping between them.

    Attributes:
        alignment: Entries and what is left over.
        reference: The trusted archive, reduced to the tokens that are compared where tokens are matched.
        target: The archive under test, under the reference's keys and in its layout.
        tokens: Which tokens are compared with which; empty where positions are the same.
    """

    alignment: Alignment
    reference: GatheredArchive
    target: MappedArchive
    tokens: tuple[TokenAlignment, ...]

    def report(self) -> dict[str, object]:
        """All of it, as `tcap align --json` prints it (ALN-62)."""
        return {
            "format": "tensorcap-alignment",
            "version": 1,
            "reference": ArchiveSummary.of(self.reference),
            "target": ArchiveSummary.of(self.target.source),
            "entries": [_public(entry) for entry in self.alignment.entries],
            "left_over": self.alignment.left_over,
            "tokens": [found.text for found in self.tokens],
            "summary": self.summary,
            "exit_status": self.summary.exit_status,
        }

    @property
    def summary(self) -> MappingSummary:
        """What the mapping comes to."""
        return self.target.summary


def align(
    reference: Archive,
    target: Archive,
    *,
    mapping: MappingSource | None = None,
    rules: Rules | None = None,
    by: By | Literal["none"] | None = None,
    read_values: bool = True,
) -> Aligned:
    """Find which records of two archives belong together, and check it; no tensor is compared.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: A mapping, or a map file; its sites are left out of what is computed.
        rules: Rules that go before those that come with tensorcap, as for `propose`.
        by: As for `propose`; `none` computes nothing, and is the default where a mapping is given.
        read_values: As for `propose`.

    Raises:
        UsageError: An entry of the mapping makes no sense, or does not fit the archives.
        ReadError: A file cannot be read.
    """
    path, given = "", Alignment(())
    if isinstance(mapping, Alignment):
        given = mapping
    elif mapping is not None:
        path, given = str(mapping), read_mapping(mapping)
    found = given
    if by is None:
        by = "all" if mapping is None else "none"
    if by != "none":
        links = resolve(given, reference, target)
        rest = _without(reference, links, 0), _without(target, links, 1)
        computed = with_tokens(propose(*rest, rules=rules, by=by, read_values=read_values), *rest)
        found = _both(given, computed)
    ours, theirs = mapped(found, reference, target, path=path)
    used = {id(link.entry) for link in theirs.links.values()}
    found = replace(found, entries=tuple(entry for entry in found.entries if id(entry) in used))
    return Aligned(found, ours, theirs, tuple(token_alignments(found, reference, target)))


def _without(archive: Archive, links: Sequence[Link], side: int) -> Archive:
    """An archive without the sites that some links have something of."""
    used = {record.key.site for link in links for record in (link.reference, link.target)[side]}
    return (
        PartialArchive(archive, (r for r in archive.records if r.key.site not in used)) if used else archive
    )


def _both(given: Alignment, computed: Alignment) -> Alignment:
    """A mapping that was given, and what was computed of the rest."""
    said = {(left.side, place) for left in given.left_over for place in left.places}
    left_over = []
    for left in computed.left_over:
        places = tuple(place for place in left.places if (left.side, place) not in said)
        if places:
            left_over.append(replace(left, places=places))
    return Alignment((*given.entries, *computed.entries), (*given.left_over, *left_over), given.tokens)


def fitting(alignment: Alignment, reference: Archive, target: Archive) -> Alignment:
    """Those entries of a mapping that fit two archives, one of which holds a part of a run only."""
    found = resolve_each(alignment, reference, target)
    return replace(
        alignment, entries=tuple(entry for entry, links in found if not isinstance(links, UsageError))
    )


def _public(entry: Entry) -> dict[str, object]:
    """What a reader of JSON gets of an entry: what a map file holds."""
    return {
        "reference": entry.reference,
        "target": entry.target,
        "variables": entry.variables,
        "steps": entry.steps,
        "dims": entry.dims,
        "reference_dims": entry.reference_dims,
        "evidence": entry.evidence,
        "reason": entry.reason,
    }


def sides(
    reference: Archive, target: Archive, mapping: MappingSource | Literal["none"] | None = None
) -> tuple[Archive, Archive]:
    """Both archives as their records belong together.

    Where no mapping is given, one is computed if both sides have records of modules without a partner: by all
    evidence between runs that list their modules, else by names alone, since values alone are no reason to
    call a file of other names equal (CMP-74). Where keys are equal and shapes are not, rules say what a run
    without an axis for rows, a packed one, or one of last tokens has of the other (ALN-85, ALN-86). A run
    that was injected through a mapping has that (INJ-23).

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: A mapping or a map file; `"none"` for equal keys alone.

    Returns:
        The archives as they are where equal keys say it, or where the target has been mapped already.

    Raises:
        UsageError: An entry of the mapping makes no sense, or does not fit the archives.
        ReadError: A file cannot be read.
    """
    if isinstance(target, MappedArchive) or mapping == NO_MAPPING:
        return reference, target
    if mapping is not None:
        aligned = align(reference, target, mapping=mapping)
        return aligned.reference, aligned.target
    kept = _kept(target)
    if kept is not None:
        with suppress(UsageError):  # a part of the run was recorded, which lacks what entries name
            aligned = align(reference, target, mapping=kept)
            return aligned.reference, aligned.target
    if both_lack_partners(reference, target):
        found = propose(reference, target, by=evidence_between(reference, target))
        found = with_tokens(found, reference, target)
        keeping = tuple(_as_it_is(entry) for entry in found.entries)
        if not all(entry.reference == entry.target for entry in keeping):
            return mapped(replace(found, entries=keeping), reference, target)
    found = by_equal_keys(reference, target)
    return mapped(found, reference, target) if found.entries else (reference, target)


def in_reference_layout(
    reference: Archive, reference_key: str, target: Archive, target_key: str, steps: Sequence[str]
) -> MappedArchive:
    """One record of the target under the key of one of the reference, in the layout that steps make of it.

    Args:
        reference: The trusted archive.
        reference_key: Key of the trusted record, or a shorter text as `Archive.get` takes it.
        target: The archive under test.
        target_key: Key of the record under test.
        steps: Layout steps from the target's tensor to the reference's.

    Raises:
        UsageError: A step makes no sense, or does not fit.
        TensorNotFoundError: A key fits no record, or several.
    """
    record, partner = reference.get(reference_key), target.get(target_key)
    entry = Entry(
        (record.key.text,), (partner.key.text,), steps=tuple(steps), reason="given with the tensors"
    )
    layout = entry.layout()
    try:
        made = layout.shapes([partner.shape])
        layout.dtype(partner.dtype)
    except UsageError as error:
        raise entry.refuse(str(error), error.hint) from None
    if len(made) != 1:
        raise entry.refuse(f"its steps give {len(made)} tensors, expected one")
    link = Link((record,), (partner,), layout, entry)
    parts = PartialArchive(reference, [record]), PartialArchive(target, [partner])
    return MappedArchive(*parts, [link], map_path=f"steps {'; '.join(layout.texts)}")


def aligned_if_needed(
    reference: Archive, target: Archive, mapping: MappingSource | Literal["none"] | None = None
) -> Aligned | None:
    """The mapping by which a target is run on the reference's values, where one is needed.

    Args:
        reference: The trusted archive.
        target: A run of the target without injection.
        mapping: A mapping or a map file; `"none"` for equal keys alone. If None, one is computed where names
            leave records of both sides over.

    Returns:
        The mapping that was given or computed; None where equal keys say it.

    Raises:
        UsageError: An entry of the mapping makes no sense, or does not fit the archives.
        ReadError: A file cannot be read.
    """
    if mapping is not None:
        return None if mapping == NO_MAPPING else align(reference, target, mapping=mapping)
    if not both_lack_partners(reference, target):
        return None
    found = align(reference, target, by=evidence_between(reference, target))
    is_plain = all(entry.reference == entry.target for entry in found.alignment.entries)
    return None if is_plain else found


def _kept(target: Archive) -> Alignment | None:
    """The mapping that a run was injected through: one computed of its own values may say something else."""
    text = target.info.injected.map_text if target.info.injected else ""
    return parse_map(text, f"{target.path}: its map") if text else None


def _as_it_is(entry: Entry) -> Entry:
    """An entry that moves no elements where names are equal: that is an error until somebody allows it."""
    return replace(entry, steps=()) if entry.reference == entry.target and entry.layout().moves else entry


def evidence_between(reference: Archive, target: Archive) -> By:
    """What may pair two runs without being asked: values only if both list their modules (CMP-74)."""
    return "all" if all(archive.info.modules for archive in (reference, target)) else "names"


def both_lack_partners(reference: Archive, target: Archive) -> bool:
    """Whether each side has records of modules, not of what is within them, that the other has not."""
    ours = {record.key.text for record in reference.records if not is_inner(record.key)}
    theirs = {record.key.text for record in target.records if not is_inner(record.key)}
    lost, more = ours - theirs, theirs - ours
    known = {name for text in lost if (name := target.canonical(text)) in more}
    return bool(more - known) and any(target.canonical(text) not in more for text in lost)
