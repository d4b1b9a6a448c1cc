"""A target run on the reference's arguments, and the error that each of its modules makes by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from tensorcap.alignment import Aligned, MappedArchive, MappingSource, sides
from tensorcap.comparison import (
    GROWTH_TESTS,
    ROUNDED_INPUT_TESTS,
    Comparison,
    Decision,
    Injected,
    compare,
    decide,
    explain_as,
    first_divergence,
    holds_packed_weights,
)
from tensorcap.rerun.compensation import Dependencies, settle
from tensorcap.rerun.injection import inject
from tensorcap.rerun.injection_judge import InjectionJudge
from tensorcap.rerun.own_errors import TOO_LARGE, OwnError
from tensorcap_formats.archive import Archive
from tensorcap_formats.open import open_archive
from tensorcap_formats.progress import Progress

if TYPE_CHECKING:
    from tensorcap.workload import Workload


_UNCERTAIN: Final = GROWTH_TESTS | ROUNDED_INPUT_TESTS  # tests that an argument's rounding may fail


@dataclass(frozen=True, slots=True)
class InjectedRun:
    """An injected run, compared with the reference.

    Attributes:
        path: Its archive.
        reference: The trusted archive, as it was compared.
        target: The run under the same keys.
        comparison: Their comparison.
        own_errors: What each module made itself, in execution order.
        unknown: Key texts of arguments that were left in place and of which the reference has no counterpart.
        unjudged: Key texts of what is wrong and was made of these.
    """

    path: Path
    reference: Archive
    target: Archive
    comparison: Comparison
    own_errors: Sequence[OwnError]
    unknown: Sequence[str]
    unjudged: Sequence[str] = ()


def run_injected(
    stack: ExitStack,
    reference: Archive,
    target_model: Workload,
    path: Path,
    *,
    target: Archive,
    compared: Archive,
    free: Comparison,
    mapping: MappingSource | Literal["none"] | None,
    aligned: Aligned | None,
    compute_dtype: str | None,
    source_path: Path | None,
    progress: Progress,
) -> InjectedRun:
    """Run a target on the reference's arguments, and judge what each module makes of them.

    1. All arguments are replaced. Of weights in few bits values are kept if they are of the run without.
    2. If several modules are wrong, it is run again with arguments left in place whose error is undone by
       what is computed of them, see `compensation.settle`; that run is the one that is kept.

    Args:
        stack: Keeps archives open.
        reference: The trusted archive.
        target_model: The target's model, inputs and seed.
        path: Where to put the archive.
        target: A run of the target without injection.
        compared: That run under the reference's keys.
        free: The comparison of that with the reference.
        mapping: As for `compare`.
        aligned: What it comes to between the reference and `target`, if that is known.
        compute_dtype: What the target computed in, if its run does not say so.
        source_path: As for `inject`.
        progress: Shows what is being run.

    Raises:
        UsageError: A tensor does not fit, or nothing belongs together.
        CaptureError: Nothing was captured.
    """
    own_keys: dict[str, list[str]] = {}  # of the target's model, by those of the reference
    runs: dict[frozenset[str], InjectedRun] = {}  # by the arguments that were left in place

    def run(released: frozenset[str], at: Path) -> InjectedRun:
        left = frozenset(key for text in released for key in own_keys.get(text, ()))
        if left in runs:  # what is not an argument is never replaced
            return judge(runs[left], released)
        inject(
            reference,
            target_model,
            at,
            target=target,
            mapping=aligned or mapping,
            left=sorted(left),
            leaves_misfits=True,
            source_path=source_path,
            progress=progress,
            params=True if holds_packed_weights(target) else None,
        )
        ours, theirs = sides(reference, stack.enter_context(open_archive(at)), mapping)
        comparison = compare(ours, theirs, mapping="none", compute_dtype=compute_dtype)
        comparison = explain_as(comparison, free, ours)
        runs[left] = judge(InjectedRun(at, ours, theirs, comparison, (), ()), released)
        return runs[left]

    def judge(made: InjectedRun, released: frozenset[str]) -> InjectedRun:
        judged = InjectionJudge(made.reference, made.target, made.comparison.pairs, released=released)
        own_errors = judged.judge_all()
        return replace(
            made, own_errors=own_errors, unknown=tuple(judged.unknown), unjudged=tuple(judged.unjudged)
        )

    def again(released: frozenset[str]) -> InjectedRun:
        beside = tempfile.TemporaryDirectory(prefix="tensorcap-", dir=path.parent)  # to be moved to the path
        folder = stack.enter_context(beside)
        return run(released, Path(folder) / path.name)

    first = run(frozenset(), path)
    injected = Injected(first.target, first.reference)
    for pair in first.comparison.pairs:
        if pair.reference is not None and pair.reference.key.slot.startswith("input"):
            own_keys[pair.key] = [key.text for key in injected.keys_of(pair)]
    explained = {pair.key for pair in free.pairs if pair.status == "explained"}
    dependencies = Dependencies(first.reference, compared)
    settled = settle(
        first,
        again,
        dependencies,
        explained=explained,
        replaced=own_keys,
        wrong_in_place=_wrong_in_free_run(first, dependencies, compared, free),
    )
    if not settled.released:
        return first
    kept = settled.judged
    if kept.path != path:
        kept.path.replace(path)
        ours, theirs = sides(reference, stack.enter_context(open_archive(path)), mapping)
        kept = replace(kept, path=path, reference=ours, target=theirs)
    return _explained(kept, settled.own_errors)


def _wrong_in_free_run(
    injected: InjectedRun, dependencies: Dependencies, target: Archive, free: Comparison
) -> set[str]:
    """Key texts of what would be wrong with all that is `diverged` left in place, as the free run shows.

    There, too, it was computed of these tensors, which have the bits that they have in the injected run, and
    otherwise of the reference's.

    Args:
        injected: The run in which everything was replaced.
        dependencies: Of the reference.
        target: The run without injection, under the reference's keys.
        free: The comparison of that with the reference.
    """
    if not (injected.target.trusts_digests and target.trusts_digests):
        return set()
    diverged = {own.key for own in injected.own_errors if own.status == "diverged"}
    left = {text for text in dependencies.equal(diverged) if text in dependencies}
    statuses = {pair.key: pair.status for pair in free.pairs}

    def is_as_in_free_run(text: str) -> bool:
        if text not in left:
            return statuses.get(text) == "identical"
        digests = _digests(injected.target, text)
        return bool(digests) and digests == _digests(target, text)

    return {
        pair.key
        for pair in free.pairs
        if pair.status == "diverged"
        and any(f.status in TOO_LARGE and f.test not in _UNCERTAIN for f in pair.findings)
        and pair.key in dependencies
        and not left.isdisjoint(sources := dependencies.of(pair.key))
        and all(map(is_as_in_free_run, sources))
    }


def _digests(run: Archive, text: str) -> tuple[str, ...]:
    """Digests of what a tensor was read from; empty if one is not known."""
    if text not in run:
        return ()
    sources = run.sources[text] if isinstance(run, MappedArchive) else (run.get(text),)
    digests = tuple(source.digest for source in sources if source.digest)
    return digests if len(digests) == len(sources) else ()


def _explained(run: InjectedRun, own_errors: Sequence[OwnError]) -> InjectedRun:
    """The run with own errors as they are settled, and with the pairs of what is undone `explained`."""
    undone = {
        own.key: own.findings[0].text for own in own_errors if own.status == "explained" and own.findings
    }
    pairs = [
        decide(pair, Decision("agreement", "explained", undone[pair.key], pair.findings))
        if pair.key in undone
        else pair
        for pair in run.comparison.pairs
    ]
    divergence = first_divergence(run.reference, pairs)
    comparison = replace(run.comparison, pairs=tuple(pairs), divergence=divergence)
    return replace(run, comparison=comparison, own_errors=tuple(own_errors))
