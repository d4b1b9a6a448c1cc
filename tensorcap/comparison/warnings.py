"""Warnings about two archives and their pairs: runs cut short, unlike inputs, no values, NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tensorcap.alignment import OrderedArchive
from tensorcap.comparison.exact import BY_RECORDED_DIGEST
from tensorcap.comparison.injected import injection_text
from tensorcap.comparison.pair import Pair
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.open import is_same_file
from tensorcap_formats.run_info import ErrorInfo, RanksInfo


def _ending(error: ErrorInfo | None) -> str:
    """Return why an archive is incomplete: an exception ended its run, or a dump lacks something."""
    if error is None or not error.text:
        return "its run ended early"
    return f"its run ended early ({error.text})" if error.type else error.text


def _rank_warnings(name: str, ranks: RanksInfo) -> Iterator[str]:
    """Yield what is to be known of an archive of one rank, or of several that were merged."""
    if ranks.rank is not None:
        yield (
            f"The {name} is of rank {ranks.rank} of {ranks.count or 'several'} alone: its tensors may be "
            "parts; see tcap merge."
        )
    if ranks.is_merged and ranks.problems:
        first = ranks.problems[0]
        keys = counted(len({problem.key for problem in ranks.problems}), "tensor")
        yield f"Ranks of the {name} do not agree about {keys}, first {first.key}: {first.text}."


def run_warnings(reference: Archive, target: Archive) -> Iterator[str]:
    """Yield warnings about two archives, a sentence each."""
    if reference is target or is_same_file(reference.path, target.path):
        yield "Reference and target are the same file: this shows nothing."
    for name, archive in (("reference", reference), ("target", target)):
        if not len(archive):
            yield f"The {name} holds no tensors."
        elif not any(record.stored for record in archive.records):
            yield f"The {name} holds statistics and no values: only hashes and statistics were compared."
        if archive.skipped:
            some = ", ".join(f"{key} ({reason})" for key, reason in list(archive.skipped.items())[:3])
            more = f", … {len(archive.skipped)} in all" if len(archive.skipped) > 3 else ""
            yield f"The {name} holds what was not read: {some}{more}."
        unfinished = [point.site for point in archive.info.points if point.unfinished]
        if unfinished:
            sites = ", ".join(unfinished[:3]) + (", …" if len(unfinished) > 3 else "")
            yield f"In the {name}, calls of {counted(len(unfinished), 'module')} did not return: {sites}."
        if archive.info.stopped:
            yield f"The capture of the {name} stopped at {archive.info.stopped.text}."
        if not archive.is_complete:
            yield f"The {name} is incomplete: {_ending(archive.info.error)}."
        if archive.info.ranks is not None:
            yield from _rank_warnings(name, archive.info.ranks)
    for name, archive in (("reference", reference), ("target", target)):
        if archive.info.injected:
            yield f"The {name} is an injected run: {injection_text(archive.info.injected)}."
    root = target.info.injected.root if target.info.injected else ""
    if root and reference.root and root != reference.root:
        yield "What was injected into the target is not of this reference: errors are not its modules' own."
    if not reference.is_ordered and len(reference.records) > 1:
        yield "The reference has no execution order: natural order of names is used instead."
    elif isinstance(reference, OrderedArchive):
        yield "The reference has no execution order: the target's is used instead."
    steps, others = _count_steps(reference), _count_steps(target)
    if steps and others and steps != others:
        limits = [
            f"the {name} was told to take steps {archive.info.scope.steps}"
            for name, archive in (("reference", reference), ("target", target))
            if archive.info.scope and archive.info.scope.steps
        ]
        why = f" ({', '.join(limits)})" if limits else ""
        yield f"The runs have unlike numbers of steps: {steps} in the reference, {others} in the target{why}."
    if order := _other_order(reference, target):
        yield (
            "Both runs were given the same inputs, in another order: step 0 of the reference is step "
            f"{order[0]} of the target."
        )
    if len(set(reference.info.threads)) > 1:
        yield (
            "Several threads called the model of the reference, so that chance numbered its steps: those of "
            "the target are paired with them by what they were given, if threads called it too."
        )
    if threaded := [site for site in reference.info.threaded_sites if site in target.info.threaded_sites]:
        names = ", ".join(threaded[:3]) + (", …" if len(threaded) > 3 else "")
        yield (
            f"Several threads called {names} in one step, so that chance numbered the calls: those of the "
            "target are paired with the reference's by what they were given."
        )
    unlike = _unlike_inputs(reference.info.inputs, target.info.inputs)
    if unlike:
        yield f"The two runs were fed different inputs: {', '.join(unlike)}."


def pair_warnings(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield warnings about reference tensors that have values that are no numbers (CMP-18)."""
    counts = {pair.key: _nonfinite(pair) for pair in pairs if pair.is_compared}
    for index, name in enumerate(("NaN", "Infinities")):
        keys = [key for key, count in counts.items() if count[index]]
        if keys:
            yield f"{name} in {len(keys)} of the reference tensors that were compared, first in {keys[0]}."


def digest_warnings(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield a warning if values that could be read were not, since digests were trusted."""
    unread = sum(
        pair.reason.endswith(BY_RECORDED_DIGEST) and pair.reference.stored and pair.target.stored
        for pair in pairs
        if pair.reference is not None and pair.target is not None
    )
    if unread:
        owner = "its" if unread == 1 else "their"
        yield f"{counted(unread, 'tensor', 'are')} identical by recorded digest: {owner} bytes were not read."


def _nonfinite(pair: Pair) -> tuple[int, int]:
    """Return the counts of NaN and of infinities in the reference of a pair."""
    statistics = pair.reference.statistics if pair.reference else None
    counts = pair.difference.nonfinite_reference if pair.difference is not None else statistics
    return (counts.nan, counts.posinf + counts.neginf) if counts else (0, 0)


def _count_steps(archive: Archive) -> int:
    """Count the steps that have records; 0 for names without steps."""
    return len({record.key.step for record in archive.records if not record.key.is_bare})


def _other_order(reference: Archive, target: Archive) -> list[int]:
    """Which step of the target has the inputs of each step of the reference; empty if it is the same one."""
    ours, theirs = _inputs_by_step(reference), _inputs_by_step(target)
    is_telling = len(set(ours)) == len(ours) and ours != theirs
    return [theirs.index(inputs) for inputs in ours] if is_telling and set(ours) == set(theirs) else []


def _inputs_by_step(archive: Archive) -> list[frozenset[tuple[str, str]]]:
    """What the model was given in each step, by digests; empty if the archive has none."""
    steps: dict[int, set[tuple[str, str]]] = {}
    for record in archive.records if archive.trusts_digests else ():
        key = record.key
        if key.site == ROOT_SITE and key.slot.startswith("input.") and record.digest:
            steps.setdefault(key.step, set()).add((key.slot, record.digest))
    return [frozenset(steps[step]) for step in sorted(steps)]


def _unlike_inputs(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """List the inputs of both runs whose hashes differ."""
    return [key for key, sha256 in ours.items() if sha256 and theirs.get(key) and sha256 != theirs[key]]
