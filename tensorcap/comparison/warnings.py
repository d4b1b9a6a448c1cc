"""What a reader of a comparison has to know first: runs cut short, unlike inputs, empty archives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tensorcap.alignment import OrderedArchive
from tensorcap.comparison.injected import injection_text
from tensorcap.comparison.pair import Pair
from tensorcap_formats.archive import Archive
from tensorcap_formats.run_info import ErrorInfo


def _ending(error: ErrorInfo | None) -> str:
    """Why an archive is incomplete: its run ended by an exception, or somehow; or what a dump lacks."""
    if error is None or not error.text:
        return "its run ended early"
    return f"its run ended early ({error.text})" if error.type else error.text


def run_warnings(reference: Archive, target: Archive) -> Iterator[str]:
    """What has to be known of two archives before their tensors are looked at, a sentence each."""
    if reference is target or _is_same_file(reference.path, target.path):
        yield "Reference and target are the same file: this shows nothing."
    for name, archive in (("reference", reference), ("target", target)):
        if not len(archive):
            yield f"The {name} holds no tensors."
        elif not any(record.stored for record in archive.records):
            yield f"The {name} holds statistics and no values: only hashes and statistics were compared."
        if archive.skipped:
            some = ", ".join(f"{key} ({what})" for key, what in list(archive.skipped.items())[:3])
            more = f", … {len(archive.skipped)} in all" if len(archive.skipped) > 3 else ""
            yield f"The {name} holds what was not read: {some}{more}."
        unfinished = [point.site for point in archive.info.points if point.unfinished]
        if unfinished:
            sites = ", ".join(unfinished[:3]) + (", …" if len(unfinished) > 3 else "")
            yield f"In the {name}, calls of {len(unfinished)} modules did not return: {sites}."
        if archive.info.stopped:
            yield f"The capture of the {name} stopped at {archive.info.stopped.text}."
        if not archive.is_complete:
            yield f"The {name} is incomplete: {_ending(archive.info.error)}."
    for name, archive in (("reference", reference), ("target", target)):
        if archive.info.injected:
            yield f"The {name} is an injected run: {injection_text(archive.info.injected)}."
    root = target.info.injected.root if target.info.injected else ""
    if root and reference.root and root != reference.root:
        yield "What was injected into the target is not of this reference: errors are not its modules' own."
    if not reference.is_ordered:
        yield "The reference has no execution order: natural order of names is used instead."
    elif isinstance(reference, OrderedArchive):
        yield "The reference has no execution order: the target's is used instead."
    steps, others = _steps(reference), _steps(target)
    if steps and others and steps != others:
        limits = [f"the {n} was told to take steps {s}" for n, s in _limits(reference, target)]
        why = f" ({', '.join(limits)})" if limits else ""
        yield f"The runs have unlike numbers of steps: {steps} in the reference, {others} in the target{why}."
    unlike = _unlike_inputs(reference.info.inputs, target.info.inputs)
    if unlike:
        yield f"The two runs were fed different inputs: {', '.join(unlike)}."


def pair_warnings(pairs: Sequence[Pair]) -> Iterator[str]:
    """What has to be known of pairs that are green or not: values that are no numbers (CMP-18)."""
    held = [(pair, *_nonfinite(pair)) for pair in pairs if pair.is_compared]
    for index, name in ((1, "NaN"), (2, "Infinities")):
        found = [row[0] for row in held if row[index]]
        if found:
            count, first = len(found), found[0].key
            yield f"{name} in {count} of the reference tensors that were compared, first in {first}."


def _nonfinite(pair: Pair) -> tuple[int, int]:
    """Counts of NaN and of infinities in the reference of a pair."""
    if pair.difference is not None:
        found = pair.difference.nonfinite_reference
        return found.nan, found.posinf + found.neginf
    statistics = pair.reference.statistics if pair.reference else None
    return (statistics.nan, statistics.posinf + statistics.neginf) if statistics else (0, 0)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _steps(archive: Archive) -> int:
    """How many steps have records; 0 for names without steps."""
    return len({record.key.step for record in archive.records if not record.key.is_bare})


def _limits(reference: Archive, target: Archive) -> Iterator[tuple[str, str]]:
    """Which of two captures were limited to some steps, and to which."""
    for name, archive in (("reference", reference), ("target", target)):
        if archive.info.scope and archive.info.scope.steps:
            yield name, archive.info.scope.steps


def _unlike_inputs(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Inputs of both runs whose hashes differ."""
    return [key for key, sha256 in ours.items() if sha256 and theirs.get(key) and sha256 != theirs[key]]
