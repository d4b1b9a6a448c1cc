"""What a reader of a comparison has to know first: runs cut short, unlike inputs, empty archives."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorcap.side import error_of
from tensorcap.verdicts.injected import injection_text
from tensorcap.verdicts.pair import Pair
from tensorcap.verdicts.places import points_of
from tensorcap_formats.archive import Archive


def _ending(run: Mapping[str, Any]) -> str:
    """Why an archive is incomplete: its run ended by an exception, or somehow; or what a dump lacks."""
    error, text = run.get("error"), error_of(run)
    if text and isinstance(error, Mapping) and not error.get("type"):
        return text
    return f"its run ended early{f' ({text})' if text else ''}"


def caveats(reference: Archive, target: Archive) -> Iterator[str]:
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
        unfinished = [point["site"] for point in points_of(archive.run) if point.get("unfinished")]
        if unfinished:
            sites = ", ".join(unfinished[:3]) + (", …" if len(unfinished) > 3 else "")
            yield f"In the {name}, calls of {len(unfinished)} modules did not return: {sites}."
        stopped = archive.run.get("stopped")
        if isinstance(stopped, Mapping):
            most, at = stopped.get("max_bytes"), stopped.get("at")
            yield f"The capture of the {name} stopped at its limit of {most} bytes, at {at}."
        if not archive.is_complete:
            yield f"The {name} is incomplete: {_ending(archive.run)}."
    for name, archive in (("reference", reference), ("target", target)):
        injection = injection_text(archive.run)
        if injection:
            yield f"The {name} is an injected run: {injection}."
    root = target.run.get("injected", {}).get("root") if injection else None
    if root and reference.root and root != reference.root:
        yield "What was injected into the target is not of this reference: errors are not its modules' own."
    if not reference.is_ordered:
        yield "The reference has no execution order: natural order of names is used instead."
    steps, others = _steps(reference), _steps(target)
    if steps and others and steps != others:
        limits = [f"the {n} was told to take steps {s}" for n, s in _limits(reference, target)]
        why = f" ({', '.join(limits)})" if limits else ""
        yield f"The runs have unlike numbers of steps: {steps} in the reference, {others} in the target{why}."
    unlike = _unlike_inputs(reference.run.get("inputs"), target.run.get("inputs"))
    if unlike:
        yield f"The two runs were fed different inputs: {', '.join(unlike)}."


def caveats_of_pairs(pairs: Sequence[Pair]) -> Iterator[str]:
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
        scope = archive.run.get("scope")
        steps = scope.get("steps") if isinstance(scope, Mapping) else None
        if isinstance(steps, str):
            yield name, steps


def _unlike_inputs(ours: object, theirs: object) -> list[str]:
    """Inputs of both runs whose hashes differ."""
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return []
    unlike = []
    for key, found in ours.items():
        one, other = _sha256(found), _sha256(theirs.get(key))
        if one and other and one != other:
            unlike.append(str(key))
    return unlike


def _sha256(described: object) -> object:
    return described.get("sha256") if isinstance(described, Mapping) else None
