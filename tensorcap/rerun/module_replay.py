"""Replay: run a model on what another run was given, module by module, and compare what each makes of it.

Every module's arguments and results are replaced by archived ones, after the natural ones were recorded. So a
recorded result is what the model's own module makes of the archived arguments and of the archived results of
the modules within it, and a recorded argument is what the code of the caller makes of archived values: each
difference is of one module's own making (`specs/replay.md`).
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tensorcap.adapters.protocol import adapter_for
from tensorcap.alignment.aligned import NO_MAPPING, MappingSource, aligned_if_needed, sides
from tensorcap.comparison.pair import ABSENT, Pair
from tensorcap.comparison.pipeline import Source, compare, opened
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.recording.substitution import Substitution
from tensorcap.rerun.injection import reversed_by
from tensorcap.rerun.own_errors import ReplayJudge
from tensorcap.rerun.replay_result import Replay, Way, notes_of
from tensorcap.runs.record_kinds import is_inner
from tensorcap.session.capture_session import capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    from tensorcap.workload.workload import Workload
    from tensorcap_formats.progress import Progress


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay while its runs are still there.

    Attributes:
        found: What it found.
        reference: The trusted archive.
        target: The target under the reference's keys.
        run: What the reference's model made of the target's values.
        workload: That model, in the precision in which it was run, and its inputs.
    """

    found: Replay
    reference: Archive
    target: Archive
    run: Archive
    workload: Workload


def replay(
    reference: Source,
    workload: Workload,
    target: Source | None = None,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
    twin: bool = True,
    compute_dtype: str | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Run the reference's model on a target's values, and hold what each module makes against the target's.

    Args:
        reference: The trusted archive, open or a path.
        workload: The reference's model and inputs.
        target: The archive under test; without one the reference's own, which has to repeat itself.
        mapping: As for `compare`.
        twin: Whether to run a copy in the target's precision too, for tests B and C.
        compute_dtype: What the target computed in, where its run does not say so.
        seed: Of the random generators before each run; as they are if None.
        progress: As for `capture_workload`.

    Raises:
        UsageError: The archives have nothing in common, or the mapping does not fit.
        CaptureError: Nothing was captured.
    """
    with ExitStack() as stack:
        done = replay_within(
            stack,
            reference,
            workload,
            target,
            mapping=mapping,
            twin=twin,
            compute_dtype=compute_dtype,
            seed=seed,
            progress=progress,
        )
        return done.found


def replay_within(
    stack: ExitStack,
    reference: Source,
    workload: Workload,
    target: Source | None = None,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
    twin: bool = True,
    compute_dtype: str | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Replayed:
    """As `replay`; the runs stay there for as long as the stack does."""
    original = stack.enter_context(opened(reference))
    tested = original if target is None else stack.enter_context(opened(target))
    precision = POLICY.precision_of_runs(original.info, tested.info, compute_dtype)
    if target is not None:
        _, tested = sides(original, tested, mapping)
    keys = _exchanged(tested, original)
    runner = _Runner(stack, seed, progress)
    exact = workload if target is None else _exact(workload, original)
    run = runner.run(exact, Substitution(tested, keys=keys), params=True)
    low = None
    if twin and target is not None and precision is not None and not precision.is_wide:
        low = runner.run(_in(precision, workload), Substitution(tested, keys=keys))
    way: Way = "self" if target is None else "reverse"
    given, natural = _Sides(run, tested, low, precision, compute_dtype), tuple(_natural(original, keys))
    found = _found(original, given, way, keys, natural)
    if low is not None and precision is not None and found.bad:
        copied = _in(precision, workload)
        openly = adapter_for(copied.model).with_eager_attention(copied)
        if openly is not None:
            other = replace(given, twin=runner.run(openly, Substitution(tested, keys=keys)))
            found = _milder(found, _found(original, other, way, keys, natural))
    return Replayed(found, original, tested, run, exact)


def _milder(one: Replay, other: Replay) -> Replay:
    """Of each tensor what the less severe of two verdicts says."""
    found = {own.key: own for own in other.owns}
    owns = tuple(found[own.key] if own.is_bad and not found[own.key].is_bad else own for own in one.owns)
    milder = replace(one, owns=owns)
    return replace(milder, notes=tuple(notes_of(milder)))


def replay_forward(
    reference: Source,
    workload: Workload,
    target: Source | None = None,
    *,
    model: Workload | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Run the target's model on the reference's values, and hold what each module makes against its results.

    Args:
        reference: The trusted archive, open or a path.
        workload: The target's model and inputs.
        target: A capture of it without injection, open or a path, which a mapping is resolved against; it is
            made first where there is none.
        model: The reference's model and inputs, of which a copy in the target's precision is run on the same
            values, for tests B and C; without it those are not made.
        mapping: As for `compare`.
        compute_dtype: What the target computes in, where its run does not say so.
        seed: Of the random generators before each run; as they are if None.
        progress: As for `capture_workload`.

    Raises:
        UsageError: The two have nothing in common, or the mapping does not fit.
        CaptureError: Nothing was captured.
    """
    with ExitStack() as stack:
        original = stack.enter_context(opened(reference))
        runner = _Runner(stack, seed, progress)
        free = runner.run(workload) if target is None else stack.enter_context(opened(target))
        aligned = aligned_if_needed(original, free, mapping)
        source = original if aligned is None else reversed_by(aligned, original, free)
        keys = _exchanged(source, free)
        run = runner.run(workload, Substitution(source, keys=keys))
        precision = POLICY.precision_of_runs(original.info, run.info, compute_dtype)
        trusted, tested = sides(original, run, NO_MAPPING if aligned is None else aligned.alignment)
        low = None
        if model is not None and precision is not None and not precision.is_wide:
            own = _exchanged(original, original)
            low = runner.run(_in(precision, model), Substitution(original, keys=own))
        found = _found(
            trusted,
            _Sides(trusted, tested, low, precision, compute_dtype),
            "forward",
            keys,
            _natural(free, keys),
        )
        if model is not None or precision is None or precision.is_wide:
            return found
        note = "The reference's model was not named: no twin says how much it rounds itself."
        return replace(found, notes=(*found.notes, note))


@dataclass(slots=True)
class _Runner:
    """Runs workloads, whose archives stay open for as long as a stack does."""

    stack: ExitStack
    seed: int | None
    progress: Progress | None
    count: int = field(default=0, init=False)
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-")))

    def run(self, what: Workload, substitution: Substitution | None = None, **options: Any) -> Archive:
        if self.seed is not None:
            adapter_for(what.model).seed(self.seed)
        self.count += 1
        path = self.folder / f"{self.count}.h5"
        capture_workload(what, path, progress=self.progress, substitution=substitution, **options)
        return self.stack.enter_context(open_archive(path))


def _in(precision: Precision, workload: Workload) -> Workload:
    """A copy of a workload in another precision."""
    copied = replace(workload, model=copy.deepcopy(workload.model))
    return adapter_for(workload.model).prepare(copied, dtype=precision.name, input_dtype=precision.name)


def _exact(workload: Workload, reference: Archive) -> Workload:
    """The reference's workload, or where that is in low precision a copy in float32."""
    own = POLICY.precision_of_runs(reference.info, reference.info)
    is_exact = own is None or own.is_wide
    return workload if is_exact else _in(POLICY.precision("float32"), workload)


@dataclass(frozen=True, slots=True)
class _Sides:
    """What is held against each other.

    Attributes:
        exact: What the reference's modules made.
        target: What the target's made, under the reference's keys.
        twin: What the reference's made in the target's precision; None without.
        precision: What errors are held against.
        compute_dtype: What the target computed in, where its run does not say so.
    """

    exact: Archive
    target: Archive
    twin: Archive | None
    precision: Precision | None
    compute_dtype: str | None


def _found(
    reference: Archive, given: _Sides, way: Way, keys: Collection[str], natural: Iterable[str]
) -> Replay:
    """What each module made, and what could not be held against anything."""
    compared = compare(
        given.exact,
        given.target,
        mapping=NO_MAPPING,
        baseline=given.twin,
        compute_dtype=given.compute_dtype,
    )
    judge = ReplayJudge(
        reference,
        exact=given.exact,
        target=given.target,
        twin=given.twin,
        precision=given.precision,
        pairs=compared.pairs,
        is_forward=way == "forward",
    )
    lacking = (
        pair.key
        for pair in compared.pairs
        if pair.is_required and pair.status in ABSENT and _is_result(pair) and pair.key in reference
    )
    found = Replay(
        tuple(judge.of(pair) for pair in compared.pairs if _is_of_module(pair)),
        given.precision.name if given.precision else "",
        len(keys),
        tuple(natural),
        tuple(lacking),
        way,
    )
    return replace(found, notes=tuple(notes_of(found)))


def _exchanged(source: Archive, run: Archive) -> Collection[str]:
    """Key texts of an archive's tensors that can stand in the place of a run's own.

    Raises:
        UsageError: There are none.
    """
    keys = {record.key.text for record in source.records if _is_exchanged(run, record)}
    if not keys:
        raise UsageError(
            f"{source.path}: has no argument or result of a module that the other side has",
            hint="tcap align tells what belongs together.",
        )
    return keys


def _is_exchanged(run: Archive, record: Record) -> bool:
    """Whether a record can stand in a run of which another archive is."""
    key = record.key
    if not (_is_slot(key) and record.stored and key.text in run):
        return False
    own = run.get(key.text)
    kinds = {own.dtype.kind, record.dtype.kind}
    return own.shape == record.shape and (len(kinds) == 1 or kinds == {"float", "bool"})


def _natural(run: Archive, keys: Collection[str]) -> Iterable[str]:
    """Key texts of arguments of a run that nothing replaced."""
    for record in run.records:
        key = record.key
        if key.slot.startswith("input") and not is_inner(key) and key.text not in keys:
            yield key.text


def _is_slot(key: Key) -> bool:
    kind = key.slot.partition(".")[0]
    return kind in ("input", "output") and not key.rank and not key.is_bare and not is_inner(key)


def _is_of_module(pair: Pair) -> bool:
    return (
        pair.reference is not None
        and pair.target is not None
        and _is_slot(pair.reference.key)
        and not (pair.reference.key.site == ROOT_SITE and pair.reference.key.slot.startswith("input"))
    )


def _is_result(pair: Pair) -> bool:
    key = pair.reference.key if pair.reference else None
    return key is not None and _is_slot(key) and key.slot.startswith("output")
