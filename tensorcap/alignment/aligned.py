"""Align two archives: compute a mapping or read one, resolve it once, and view both archives through it.

A mapping goes one way: `propose` computes it (or a file holds it), `resolve` finds its records,
`apply_mapping` makes the views that are compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tensorcap.alignment.common_part import cut_texts, in_common
from tensorcap.alignment.coverage import MappingSummary
from tensorcap.alignment.equivalence_map import read_mapping
from tensorcap.alignment.graph_nodes import at_modules, share_nodes
from tensorcap.alignment.links import Link, place_of
from tensorcap.alignment.map_file import parse_map
from tensorcap.alignment.mapping import ENTRY_COLUMNS, SIDE_NAMES, Alignment, Entry, entry_row
from tensorcap.alignment.match import (
    WEIGHTS,
    By,
    find_systematic_layouts,
    match_tokens,
    pair_equal_keys,
    pair_moved_results,
    pair_numbered_children,
    propose,
    without_lone_moves,
)
from tensorcap.alignment.names import Rules, exported_wrapper, graph_rules, names_results, read_rules
from tensorcap.alignment.printed import as_printed
from tensorcap.alignment.resolution import ResolvedMapping, resolve, resolve_fitting
from tensorcap.alignment.step_order import in_thread_order
from tensorcap.alignment.tokens import TokenAlignment, rule_of_other_padding
from tensorcap.alignment.views import GatheredArchive, MappedArchive, OrderedArchive, apply_mapping
from tensorcap.runs import ArchiveSummary, PartialArchive, is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.json_values import json_value
from tensorcap_formats.notebook import ROWS, card
from tensorcap_formats.open import Source, opened_both

NO_MAPPING = "none"
_PUBLIC: Final = ("reference", "target", "variables", "steps", "dims", "reference_dims", "evidence", "reason")
MappingSource = Alignment | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Aligned:
    """Two archives and the mapping between them.

    Attributes:
        alignment: The entries, and the places without a counterpart.
        reference: The trusted archive, reduced to the tokens that are compared if tokens are matched.
        target: The archive under test, under the reference's keys and in its layout.
        tokens: Which tokens are compared with which; empty if positions are the same on both sides.
    """

    alignment: Alignment
    reference: GatheredArchive
    target: MappedArchive
    tokens: tuple[TokenAlignment, ...]

    @classmethod
    def of(cls, mapping: ResolvedMapping, *, path: str = "") -> Aligned:
        """View two archives through a mapping that is resolved on them.

        Args:
            mapping: The mapping.
            path: The map file; empty for a mapping that was computed.
        """
        return cls(mapping.alignment, *apply_mapping(mapping, path=path), mapping.tokens)

    def __repr__(self) -> str:
        return f"<Aligned {self.target.path} to {self.reference.path}: {self._coverage}>"

    def _repr_html_(self) -> str:
        """How much is mapped, and the first entries."""
        return card(
            self._coverage[0].upper() + self._coverage[1:],
            {"reference": str(self.reference.path), "target": str(self.target.path)},
            head=ENTRY_COLUMNS,
            rows=[entry_row(entry) for entry in self.alignment.entries[:ROWS]],
            count=len(self.alignment.entries),
            tone="red" if self.exit_status else "green",
        )

    @property
    def _coverage(self) -> str:
        ours = self.summary.reference
        left = f"{ours.explained} left over and explained, {len(ours.unexplained)} not explained"
        return f"{ours.mapped} of {ours.records} reference tensors mapped, {left}"

    @property
    def exit_status(self) -> int:
        """The exit status of `tcap align` (ALN-81)."""
        return self.summary.exit_status

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that `tcap align --json` prints (ALN-82)."""
        members = {
            "format": "tensorcap-alignment",
            "version": 1,
            "reference": ArchiveSummary.of(self.reference),
            "target": ArchiveSummary.of(self.target.source),
            "entries": [_public(entry) for entry in self.alignment.entries],
            "left_over": self.alignment.left_over,
            "tokens": self.summary.tokens,
            "failed": self.alignment.failed,
            "weights": WEIGHTS,
            "summary": self.summary,
            "exit_status": self.summary.exit_status,
        }
        return {name: json_value(member) for name, member in members.items()}

    @property
    def summary(self) -> MappingSummary:
        """Counts of what the mapping covers, and both orders of execution."""
        return self.target.summary


def align(
    reference: Source,
    target: Source,
    *,
    mapping: MappingSource | None = None,
    rules: Rules | str | os.PathLike[str] | None = None,
    by: By | Literal["none"] | None = None,
    read_values: bool = True,
) -> Aligned:
    """Find which records of two archives belong together, and check it; no tensor is compared.

    1. What only one run has, rows of a batch and words of a vocabulary, is cut off (ALN-41, ALN-42). Tokens
       whose padding lies elsewhere are matched (ALN-320).
    2. The entries of a given mapping are resolved; if it only says how tokens are matched, it has entries for
       all equal keys, or a mapping is computed if those leave modules of both sides without a partner.
    3. A mapping is computed for the sites that they leave, unless `by` is `none`.
    4. Both archives are viewed through the two mappings together.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: A mapping, or a map file; its sites are left out of what is computed.
        rules: Rules for names, or a file of them, that go before those that come with tensorcap.
        by: `all`, `names` or `values`: the evidence; `none` computes nothing, and is the default if a mapping
            is given.
        read_values: As for `propose`.

    Raises:
        UsageError: An entry of the mapping makes no sense, or does not fit the archives.
        ReadError: A file cannot be read.
    """
    path, written = "", Alignment(())
    if isinstance(mapping, Alignment):
        written = mapping
    elif mapping is not None:
        path, written = str(mapping), read_mapping(mapping)
    if rules is not None and not isinstance(rules, Rules):
        rules = read_rules(rules)
    with opened_both(reference, target) as (trusted, tested):
        trusted, tested = as_printed(trusted, tested)
        if mapping is None:
            trusted, tested = at_modules(trusted, tested)
        if not _says_which_part(written):
            trusted, tested = in_common(trusted, tested)
        if mapping is None:
            written = replace(written, tokens=rule_of_other_padding(trusted, tested))
        if by is None and written.tokens is not None and not written.entries:
            by = "all" if both_lack_partners(trusted, tested) else "none"
            written = replace(written, entries=_equal_keys(trusted, tested)) if by == "none" else written
        elif by is None:
            by = "all" if mapping is None else "none"
        resolved = resolve(written, trusted, tested)
        if by == "none":
            return Aligned.of(resolved, path=path)
        rules = _with_graph_names(rules or Rules(), trusted, tested, may_read=read_values)
        if mapping is None and by == "all":
            resolved = _with_numbered_children(resolved)
        rest = _without(trusted, resolved.links, 0), _without(tested, resolved.links, 1)
        if mapping is not None and written.tokens is not None:
            rest = in_common(*rest)  # pairs are found in what both have, whatever is compared of them
        computed = match_tokens(propose(*rest, rules=rules, by=by, read_values=read_values))
        if by != "names":
            computed = pair_moved_results(*rest, computed) or computed
        if resolved.alignment.entries or mapping is not None or written.tokens is not None:
            joined = _join(resolved.alignment, computed.alignment)  # tokens count for computed entries, too
            computed = resolve(joined, trusted, tested)
        return Aligned.of(computed, path=path)


def _with_numbered_children(mapping: ResolvedMapping) -> ResolvedMapping:
    """A mapping without entries, or one of children whose numbers are of other modules on each side."""
    entries = pair_numbered_children(mapping.reference, mapping.target)
    if not entries:
        return mapping
    alignment = replace(mapping.alignment, entries=entries)
    return resolve_fitting(alignment, mapping.reference, mapping.target)[0]


def _with_graph_names(rules: Rules, reference: Archive, target: Archive, *, may_read: bool = True) -> Rules:
    """The rules, and one for names of another runtime, or for what wraps the model that was exported."""
    archives = reference, target
    for side, dump, run in zip(SIDE_NAMES, archives, reversed(archives), strict=True):
        if names_results(dump) and any(not record.key.is_bare for record in run.records):
            return rules.before(graph_rules(dump, run, side, may_read=may_read))
        wrapper = exported_wrapper(dump, run) if dump.info.framework == "onnx" else None
        if wrapper is not None:
            return rules.before(wrapper)
    return rules


def _says_which_part(mapping: Alignment) -> bool:
    """Whether a given mapping itself says which rows and tokens of two runs are compared."""
    steps = (step for entry in mapping.entries for step in entry.steps)
    return mapping.tokens is not None or any(step.startswith("slice ") for step in steps)


def _equal_keys(reference: Archive, target: Archive) -> tuple[Entry, ...]:
    """An entry for each place of which both sides have a record of one key."""
    places = (place_of(record) for record in reference.records if record.key.text in target)
    return tuple(
        Entry((place,), (place,), evidence="name", reason="the same key") for place in dict.fromkeys(places)
    )


def _without(archive: Archive, links: Sequence[Link], side: int) -> Archive:
    """An archive without the sites of which some links have a record."""
    used = {record.key.site for link in links for record in (link.reference, link.target)[side]}
    return (
        PartialArchive(archive, (r for r in archive.records if r.key.site not in used)) if used else archive
    )


def _join(written: Alignment, computed: Alignment) -> Alignment:
    """Join a given mapping and the one computed of the rest; given reasons go before computed ones."""
    known = {(left.side, place) for left in written.left_over for place in left.places}
    left_over = []
    for left in computed.left_over:
        places = tuple(place for place in left.places if (left.side, place) not in known)
        if places:
            left_over.append(replace(left, places=places))
    entries, all_left_over = (*written.entries, *computed.entries), (*written.left_over, *left_over)
    return Alignment(entries, all_left_over, written.tokens, computed.failed)


def fitting(alignment: Alignment, reference: Archive, target: Archive) -> Alignment:
    """Keep the entries of a mapping that fit two archives, one of which holds a part of a run only."""
    return resolve_fitting(alignment, reference, target)[0].alignment


def _public(entry: Entry) -> dict[str, object]:
    """The members of an entry in JSON: those that a map file holds."""
    return {name: getattr(entry, name) for name in _PUBLIC}


def sides(
    reference: Archive, target: Archive, mapping: MappingSource | Literal["none"] | None = None
) -> tuple[Archive, Archive]:
    """View two archives so that records that belong together have equal keys and layouts.

    1. A target that is mapped already, and `"none"`: the archives as they are, but for steps that threads
       numbered by chance (CMP-34).
    2. A mapping that is given. Else what only one run has is cut off, rows of a batch and words of a
       vocabulary (ALN-41, ALN-42).
    3. The mapping that the target was injected through (INJ-23).
    4. If padding lies at other places, a mapping of the tokens (ALN-320). Else one that is computed because
       modules lack a partner, see `compute_if_needed`. Its entries of equal names move elements only if the
       whole target has that layout.
    5. Equal keys: a rule for runs without an axis for rows, packed ones, ones of last tokens, or ones in
       another layout throughout (ALN-39, ALN-40, ALN-43).
    6. Results that are equal bit for bit under other names, see `pair_moved_results`.

    A reference without an order of execution gets the target's.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: A mapping or a map file; `"none"` for equal keys alone.

    Returns:
        The views; the archives as they are if their keys are equal, or if the target has been mapped already.

    Raises:
        UsageError: An entry of the mapping makes no sense, or does not fit the archives.
        ReadError: A file cannot be read.
    """
    return aligned_sides(reference, target, mapping)[:2]


def aligned_sides(
    reference: Archive, target: Archive, mapping: MappingSource | Literal["none"] | None = None
) -> tuple[Archive, Archive, Aligned | None]:
    """View two archives as `sides` does, and hand out the mapping, too.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        mapping: A mapping or a map file; `"none"` for equal keys alone.

    Returns:
        The views, and the mapping by which the target can be run on the reference's values, as
        `aligned_if_needed` finds it; None if equal keys pair the records, and if it is of other numbers of
        steps or calls than those of the target, or one that the target was injected through.

    Raises:
        UsageError: An entry of the mapping makes no sense, or does not fit the archives.
        ReadError: A file cannot be read.
    """
    numbered = target if isinstance(target, MappedArchive) else in_thread_order(reference, target)
    trusted, tested, aligned = _paired_sides(reference, numbered, mapping)
    lacks_order = tested.is_ordered and not trusted.is_ordered
    if lacks_order and any(record.key.text in trusted for record in tested.records):
        trusted = OrderedArchive(trusted, tested)
    return trusted, tested, aligned if numbered is target else None


def _paired_sides(
    reference: Archive, target: Archive, mapping: MappingSource | Literal["none"] | None
) -> tuple[Archive, Archive, Aligned | None]:
    """The two archives, or views of them, with equal keys for what belongs together, and the mapping."""
    if isinstance(target, MappedArchive) or mapping == NO_MAPPING:
        return reference, target, None
    if mapping is not None:
        aligned = align(reference, target, mapping=mapping)
        return aligned.reference, aligned.target, aligned
    reference, target = in_common(*at_modules(*as_printed(reference, target)))
    injected = _parse_injected_map(target)
    if injected is not None:
        with suppress(UsageError):  # a part of the run was recorded, which lacks what entries name
            return *apply_mapping(resolve(injected, reference, target)), None
    found = _align_if_needed(reference, target)
    return (reference, target, None) if found is None else (found.reference, found.target, found)


def aligned_if_needed(
    reference: Archive, target: Archive, mapping: MappingSource | Literal["none"] | None = None
) -> Aligned | None:
    """Find the mapping by which a target is run on the reference's values, if it needs one.

    Args:
        reference: The trusted archive.
        target: A run of the target without injection.
        mapping: A mapping or a map file; `"none"` for equal keys alone. If None, see `compute_if_needed`.

    Returns:
        The mapping that was given or computed; None if equal keys pair the records.

    Raises:
        UsageError: An entry of the mapping makes no sense, or does not fit the archives.
        ReadError: A file cannot be read.
    """
    if mapping == NO_MAPPING:
        return None
    if mapping is not None:
        return align(reference, target, mapping=mapping)
    return _align_if_needed(*in_common(*at_modules(*as_printed(reference, target))))


def _align_if_needed(reference: Archive, target: Archive) -> Aligned | None:
    """Find the mapping of two archives as far as both have the same rows, steps 4 to 6 of `sides`."""
    if rule_of_other_padding(reference, target) is not None:
        return align(reference, target)
    resolved = compute_if_needed(reference, target)
    if resolved is not None:
        resolved = without_lone_moves(resolved)
    else:
        resolved = _with_layouts(pair_equal_keys(reference, target), reference, target)
        resolved = resolved or _with_cuts(reference, target)
    moved = pair_moved_results(reference, target, resolved)
    return None if moved is None else Aligned.of(moved)


def _with_cuts(reference: Archive, target: Archive) -> ResolvedMapping | None:
    """The mapping of equal keys of archives of which something is cut off; None if nothing is."""
    is_cut = cut_texts(reference) or cut_texts(target)
    return resolve(Alignment(()), reference, target) if is_cut else None


def compute_if_needed(reference: Archive, target: Archive) -> ResolvedMapping | None:
    """Compute a mapping if equal keys leave modules of both sides without a partner.

    It goes by all evidence between runs that list their modules, and between one and a file of results that
    have only names; else by names alone, since values alone are no reason to call a file of other names equal
    (CMP-20).

    Returns:
        The mapping; None if equal keys, or the keys that it finds, pair the records as they are; also if both
        sides are of graphs, whose nodes are paired already (SYN-1).
    """
    if share_nodes(reference, target):
        return None
    numbered = _with_numbered_children(resolve(Alignment(()), reference, target))
    if not numbered.links and not both_lack_partners(reference, target):
        return None
    is_known = all(archive.info.modules or names_results(archive) for archive in (reference, target))
    by: By = "all" if is_known and (reference.info.modules or target.info.modules) else "names"
    rules = _with_graph_names(Rules(), reference, target)
    if by == "names" or not numbered.links:
        resolved = match_tokens(propose(reference, target, rules=rules, by=by))
    else:
        rest = _without(reference, numbered.links, 0), _without(target, numbered.links, 1)
        computed = match_tokens(propose(*rest, rules=rules, by=by))
        resolved = resolve(_join(numbered.alignment, computed.alignment), reference, target)
    is_plain = all(
        link.entry.reference == link.entry.target and (link.gathers or _have_equal_keys(link))
        for link in resolved.links
    )
    return None if is_plain else resolved


def _have_equal_keys(link: Link) -> bool:
    return [record.key for record in link.reference] == [record.key for record in link.target]


def both_lack_partners(reference: Archive, target: Archive) -> bool:
    """Whether each side has records of modules, not of places within them, whose keys the other lacks."""
    ours = {record.key.text for record in reference.records if not is_inner(record.key)}
    theirs = {record.key.text for record in target.records if not is_inner(record.key)}
    missing, extra = ours - theirs, theirs - ours
    aliases = {name for text in missing if (name := target.canonical(text)) in extra}
    return bool(extra - aliases) and any(target.canonical(text) not in extra for text in missing)


def _parse_injected_map(target: Archive) -> Alignment | None:
    """The mapping that a run was injected through: one computed of its own values may say something else."""
    text = target.info.injected.map_text if target.info.injected else ""
    return parse_map(text, f"{target.path}: its map") if text else None


def _with_layouts(
    mapping: ResolvedMapping | None, reference: Archive, target: Archive
) -> ResolvedMapping | None:
    """A mapping of equal keys with the layouts that the whole target has otherwise (ALN-43)."""
    layouts = find_systematic_layouts(reference, target)
    if not layouts:
        return mapping
    entries = () if mapping is None else mapping.alignment.entries
    moved = {place for entry in layouts for place in entry.reference}
    kept = tuple(entry for entry in entries if not moved.intersection(entry.reference))
    return resolve(Alignment((*kept, *layouts)), reference, target)


def in_reference_layout(
    reference: Archive, reference_key: str, target: Archive, target_key: str, steps: Sequence[str]
) -> MappedArchive:
    """View one record of the target under the key of one of the reference, in the layout that steps make of
    it.

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
        shapes = layout.shapes([partner.shape])
        layout.dtype(partner.dtype)
    except UsageError as error:
        raise entry.refuse(str(error), error.hint) from None
    if len(shapes) != 1:
        raise entry.refuse(f"its steps give {len(shapes)} tensors, expected one")
    link = Link((record,), (partner,), layout, entry)
    parts = PartialArchive(reference, [record]), PartialArchive(target, [partner])
    return MappedArchive(*parts, [link], map_path=f"steps {'; '.join(layout.texts)}")
