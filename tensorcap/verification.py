"""Verify a port: capture, match and compare both sides, free-running and injected, and write a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensorcap.adapters.protocol import adapter_for
from tensorcap.alignment.aligned import Aligned, MappingSource, align, sides
from tensorcap.alignment.names.rule_files import read_rules
from tensorcap.alignment.order import Order, order_between
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.pipeline import Source, compare, opened
from tensorcap.comparison.preflight.checklist import preflight
from tensorcap.localization.evidence import evidence_of_archives, evidence_of_injection, evidence_of_replay
from tensorcap.localization.ranking import rank_suspects
from tensorcap.localization.verification import Verification
from tensorcap.localization.weights import WeightComparison, compare_weights
from tensorcap.reports.report_folder import replaced_folder
from tensorcap.reports.verification_files import write_files
from tensorcap.rerun.injection import inject
from tensorcap.rerun.module_replay import replay_within
from tensorcap.session.capture_session import capture_workload
from tensorcap.workload.workload import Workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.progress import Progress
from tensorcap_formats.run_info import RunInfo

REFERENCE: Final = "reference.h5"
TARGET: Final = "target.h5"
_ARCHIVE: Final = "the target is an archive, which cannot be run again"


@dataclass(frozen=True)
class Runnable:
    """A side that is run.

    Attributes:
        make: Makes the workload, and what the run's metadata say of it besides; of the target, given the
            reference's archive, of the reference None.
        seed: Of the random generators before each run.
    """

    make: Callable[[Archive | None], tuple[Workload, Mapping[str, Any]]]
    seed: int = 0

    @classmethod
    def of(cls, workload: Workload) -> Runnable:
        """A workload that is there already."""
        return cls(lambda _: (workload, {}))


def verify(
    reference: Runnable | Workload | Source,
    target: Runnable | Workload | Source,
    output: str | os.PathLike[str],
    *,
    mapping: MappingSource | None = None,
    rules: str | os.PathLike[str] | None = None,
    layers: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> Verification:
    """Verify a port, and write a folder that tells what came of it (`specs/verify.md`).

    Args:
        reference: The trusted side: a workload, or an archive, open or a path.
        target: The side under test; it is not injected if it is an archive.
        output: The folder, which is written whole or not at all.
        mapping: What belongs together, as for `compare`.
        rules: A file of rules for names, which go before those that come with tensorcap.
        layers: Whether to write a file for each tensor too.
        force: Whether to replace a folder that an earlier verification wrote.
        progress: As for `capture_workload`, of each run.
        tell: Told what is done next.

    Raises:
        UsageError: The folder exists, a side is none, or the mapping does not fit.
        CaptureError: A run gave nothing.
        ReadError: An archive cannot be read.
    """
    say = tell or (lambda _: None)
    final = Path(output)
    with replaced_folder(final, force=force) as folder, ExitStack() as stack:
        say("capturing the reference")
        trusted, original = _captured(reference, folder / REFERENCE, None, progress)
        trusted = stack.enter_context(opened(trusted))
        weights = None
        if isinstance(target, (Runnable, Workload)):
            target = _made(target, trusted)
            weights = _audited(trusted, original, target, rules, say)
        say("capturing the target")
        tested, workload = _captured(target, folder / TARGET, trusted, progress, injectable=("input",))
        tested = stack.enter_context(opened(tested))
        say("aligning")
        aligned = _ruled(trusted, tested, mapping, rules)
        known = mapping if aligned is None else aligned.alignment
        ours, theirs = (
            sides(trusted, tested, mapping) if aligned is None else (aligned.reference, aligned.target)
        )
        say("looking at what differs before any tensor does")
        checked = preflight(ours, theirs)
        say("comparing")
        free = compare(ours, theirs, mapping=None if ours is not trusted else "none")
        witnesses, notes = [], []
        if original is not None:
            say("replaying the reference's model on the target's values")
            seed = reference.seed if isinstance(reference, Runnable) else 0
            try:
                done = replay_within(
                    stack, trusted, original, theirs, mapping="none", seed=seed, progress=progress
                )
                witnesses.append(evidence_of_replay(done, seed))
            except UsageError as error:  # nothing that the target has can stand in the reference
                notes.append(f"No replay: {error}.")
        own, own_sides, why_not = None, (ours, theirs), _ARCHIVE
        if workload is not None:
            say("injecting")
            trusted.path = _lasting(trusted.path, folder, final)  # which the injected run's metadata name
            path = folder / "with_injection" / TARGET
            path.parent.mkdir()
            seed = target.seed if isinstance(target, Runnable) else 0  # as the free run had
            try:
                inject(trusted, workload, path, mapping=known, target=tested, seed=seed, progress=progress)
                why_not = ""
            except UsageError as error:  # a tensor does not fit, or nothing belongs together
                why_not = str(error).replace(f"{folder}{os.sep}", "")
            else:
                injected = stack.enter_context(opened(path))
                own_sides = sides(trusted, injected, known)
                own = compare(*own_sides, mapping="none")
                witnesses.append(evidence_of_injection(*own_sides, own))
        say("localising")
        found_by = witnesses or [evidence_of_archives(ours, theirs, free)]
        localization = rank_suspects(ours, theirs, free, found_by)
        order = free.mapping.order if free.mapping else _order(free)
        found = Verification(
            final,
            checked,
            order,
            free,
            own,
            why_not,
            workload is not None and own is None,
            localization,
            _inheriting(free, own),
            weights,
            tested.info.control,
            notes,
        )
        say("writing")
        return write_files(
            folder,
            found,
            (ours, theirs),
            own_sides if own else None,
            originals=(trusted, tested),
            layers=layers,
        )


def _made(side: Runnable | Workload, before: Archive) -> Runnable:
    """A side whose workload is there, so that it can be looked at before it runs."""
    runnable = Runnable.of(side) if isinstance(side, Workload) else side
    made = runnable.make(before)
    return Runnable(lambda _: made, runnable.seed)


def _audited(
    trusted: Archive,
    original: Workload | None,
    target: Runnable,
    rules: str | os.PathLike[str] | None,
    say: Callable[[str], None],
) -> WeightComparison | None:
    """The comparison of weights of unlike frameworks, which somebody had to adapt."""
    model = target.make(trusted)[0].model
    if trusted.info.framework == RunInfo.of(adapter_for(model).describe(model)).framework:
        return None
    say("comparing weights")
    before = None if rules is None else read_rules(rules)
    found = compare_weights(trusted if original is None else original.model, model, rules=before)
    if found is not None and found.unlike:
        count = found.comparison.compared
        say(f"{len(found.unlike)} of {count} weights are not the same numbers; going on")
    return found


def _captured(
    side: Runnable | Workload | Source,
    path: Path,
    before: Archive | None,
    progress: Progress | None,
    injectable: Sequence[str] = (),
) -> tuple[Source, Workload | None]:
    """The archive of a side; of one that is run also its workload."""
    if isinstance(side, Workload):
        side = Runnable.of(side)
    if not isinstance(side, Runnable):
        return side, None
    workload, run = side.make(before)
    adapter_for(workload.model).seed(side.seed)
    capture_workload(workload, path, run=run, progress=progress, injectable=injectable)
    return path, workload


def _lasting(path: Path, folder: Path, final: Path) -> Path:
    """Where an archive is going to be."""
    return final.absolute() / path.relative_to(folder) if path.is_relative_to(folder) else path


def _ruled(
    reference: Archive,
    target: Archive,
    mapping: MappingSource | None,
    rules: str | os.PathLike[str] | None,
) -> Aligned | None:
    """What rules of the user's make of two archives; None without rules."""
    if rules is None:
        return None
    return align(reference, target, mapping=mapping, rules=read_rules(rules), by="all")


def _order(comparison: Comparison) -> Order | None:
    if not (comparison.reference.is_ordered and comparison.target.is_ordered):
        return None
    return order_between((p.reference, p.target) for p in comparison.pairs if p.reference and p.target)


def _inheriting(free: Comparison, own: Comparison | None) -> tuple[str, ...]:
    if own is None:
        return ()
    right = {pair.key for pair in own.pairs if pair.is_green}
    return tuple(p.key for p in free.pairs if p.is_required and not p.is_green and p.key in right)
