"""Replay: run a model on what another run was given, module by module, and compare what each makes of it.

Every module's arguments and results are replaced by archived ones, after the natural ones were recorded. So a
recorded result is what the model's own module makes of the archived arguments and of the archived results of
the modules within it, and a recorded argument is what the code of the caller makes of archived values: each
difference is of one module's own making (`specs/replay.md`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from tensorcap.adapters import Rerun, adapter_for
from tensorcap.alignment import NO_MAPPING, MappingSource, aligned_if_needed, as_seen, fed_in_common, sides
from tensorcap.comparison import ABSENT, POLICY, Comparison, Finding, Pair, Precision, compare
from tensorcap.recording import Substitution, no_fit
from tensorcap.rerun.compensation import Dependencies, Settled, settle
from tensorcap.rerun.finite_padding import with_finite_padding
from tensorcap.rerun.injection import open_run, reverse
from tensorcap.rerun.own_errors import OwnError, ReplayJudge, ReplayRuns
from tensorcap.rerun.replay_result import Replay, Way
from tensorcap.runs import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.open import Source, opened
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    from tensorcap.workload import Workload

_MOST_MISFITS: Final = 0.5  # of the tensors: versions of one model differ in some, other models in most


def replay(
    reference: Source,
    target: Source | None = None,
    *,
    reference_model: Workload | None = None,
    target_model: Workload | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
    twin: bool = True,
    progress: Progress | None = None,
) -> Replay:
    """Run one side's model on the other side's values, and compare what each module makes of them.

    With `reference_model` alone the trusted model is run on the target's values (reverse), or on its own if
    there is no target, which it has to repeat bit for bit. With `target_model` the target is run on the
    reference's values (forward), and `reference_model` says how much the computation rounds by itself.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path. With `target_model` it is a capture of that workload
            without injection, which a mapping is resolved against, and is made if it is None.
        reference_model: The reference's model, inputs and seed.
        target_model: The target's model, inputs and seed.
        mapping: As for `compare`.
        compute_dtype: What the target computed in, if its run does not say so.
        twin: Whether to run a copy of the reference's model in the target's precision too, which says how
            much the model itself rounds.
        progress: Shows what is being run.

    Raises:
        UsageError: There is no model, the archives have nothing in common, or the mapping does not fit.
        CaptureError: Nothing was captured.
    """
    progress = progress or Silent()
    with ExitStack() as stack:
        if target_model is not None:
            return _replay_forward(
                stack,
                reference,
                target,
                target_model,
                reference_model if twin else None,
                mapping=mapping,
                compute_dtype=compute_dtype,
                progress=progress,
            )
        if reference_model is None:
            raise UsageError("no model, expected reference_model or target_model")
        return replay_within(
            stack,
            reference,
            reference_model,
            target,
            mapping=mapping,
            compute_dtype=compute_dtype,
            twin=twin,
            progress=progress,
        ).replay


@dataclass(frozen=True, slots=True)
class OpenReplay:
    """A replay of the reference's model, while the archives of its runs are open.

    Attributes:
        replay: What it shows.
        reference: The trusted archive.
        target: The target under the reference's keys.
        run: What the reference's model made of the target's values.
        workload: That model, in the precision in which it was run, its inputs and its seed.
        fed: The reference in the rows that both runs were fed, whose inputs the model was given; None if
            those are all.
    """

    replay: Replay
    reference: Archive
    target: Archive
    run: Archive
    workload: Workload
    fed: Archive | None

    def rerun_call(self, module: str, key: str) -> Rerun | None:
        """Run the model until a call of a module, which can then be made again.

        Args:
            module: The module.
            key: Key text of a tensor that its code makes.

        Returns:
            The call; None if it cannot be made again, such as one of a compiled module.
        """
        slots = self.run.info.injected.slots if self.run.info.injected else ()
        replaced = {(s.site, s.slot) for s in slots if s.status == "injected"}
        keys = {r.key.text for r in self.target.records if (r.key.site, r.key.slot) in replaced}
        if not keys or key not in self.run:
            return None
        adapter = adapter_for(self.workload.model)
        if self.workload.seed is not None:
            adapter.seed(self.workload.seed)
        try:
            target = with_finite_padding(self.target, self.reference if self.fed is None else self.fed)
            substitution = Substitution(target, keys=keys, leaves_misfits=True, fed=self.fed)
            return adapter.rerun(self.workload, substitution, module, self.run.get(key).key)
        except Exception:  # a value that does not fit, or whatever a module that is no plain Python runs into
            return None


def replay_within(
    stack: ExitStack,
    reference: Source,
    reference_model: Workload,
    target: Source | None = None,
    *,
    seen: Archive | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
    twin: bool = True,
    free: Comparison | None = None,
    progress: Progress | None = None,
) -> OpenReplay:
    """Replay the reference's model on the target's values; the runs stay open for as long as the stack does.

    Of a target that was fed some rows of a batch, or has some tokens or words of a result, the same are taken
    of what the reference's model makes. `seen` is the reference as it was compared with a target that is a
    view already.

    1. The model is run, in float32 at least, with the target's tensors in the place of its own.
    2. So is a copy in the target's precision (the twin), which says how much the computation rounds itself.
    3. Each tensor of the first run is compared with the target's, and judged by its own error.
       Modules that the model calls more or less often than the reference did are left out of all this: no
       number says which of their calls belong together. So are tensors that it has in another shape.
    4. If one is bad, the twin is run once more with its attention written out, as many ports have it; the
       less severe of two verdicts counts.
    5. If several are bad, it is all done again with what is undone by what comes of it left in place, see
       `compensation.settle`.
    6. What the target lacks, or what cannot be judged, and the free runs explain, counts for nothing.
    """
    original = stack.enter_context(opened(reference))
    tested = original if target is None else stack.enter_context(opened(target))
    precision = POLICY.precision_of_runs(original.info, tested.info, compute_dtype)
    if target is not None:
        trusted, tested = sides(original, tested, mapping)
        seen = seen or trusted
    fed, _ = fed_in_common(original, tested)
    keys = _exchangeable(tested, fed)
    replays = _ReverseReplays(
        stack,
        original,
        tested,
        source=with_finite_padding(tested, fed),
        fed=fed,
        seen=seen or original,
        workload=reference_model if target is None else _exact(reference_model, original),
        twin=_cast(reference_model, precision)
        if twin and target is not None and precision is not None and not precision.is_wide
        else None,
        keys=keys,
        precision=precision,
        compute_dtype=compute_dtype,
        way="self" if target is None else "reverse",
        progress=progress or Silent(),
    )
    first = replays.judge(frozenset())
    if target is not None:
        unpaired, misfits = _unlike_calls(original, first.run), _misfits(tested, first.run, keys)
        if unpaired or misfits:
            left = {key for key in keys if Key.parse(key).site not in unpaired}.difference(misfits)
            replays = replace(replays, keys=left, unpaired=tuple(unpaired), misfits=misfits)
            first = replays.judge(frozenset())
    settled = Settled(first)
    shown = first.replay
    if target is not None and (shown.bad or shown.lacking or shown.unjudged):
        free = free or compare(seen or original, tested, mapping=NO_MAPPING, trust_digests=True)
        explained = {pair.key for pair in free.pairs if pair.status == "explained"}
        settled = settle(first, replays.judge, Dependencies(fed), tested, explained=explained)
        shown = replace(settled.judged.replay, own_errors=settled.own_errors)
        shown = _without_explained(shown, free)
    run = settled.judged.run
    return OpenReplay(shown, original, tested, run, replays.workload, None if fed is original else fed)


def _without_explained(result: Replay, free: Comparison) -> Replay:
    """A replay of which nothing lacks, or could not be judged, that the comparison of free runs explains."""
    reasons = {pair.key: pair.reason for pair in free.pairs if pair.status == "explained"}
    own_errors = tuple(
        replace(own, status="explained", findings=(Finding("free_run", 1, 0, "explained", reasons[own.key]),))
        if own.status == "unjudged" and own.key in reasons
        else own
        for own in result.own_errors
    )
    lacking = tuple(key for key in result.lacking if key not in reasons)
    return replace(result, own_errors=own_errors, lacking=lacking)


@dataclass(frozen=True, slots=True)
class _JudgedReplay:
    """A replay, and the run of the reference's model that it was read from."""

    replay: Replay
    run: Archive

    @property
    def own_errors(self) -> Sequence[OwnError]:
        return self.replay.own_errors


@dataclass(frozen=True, slots=True)
class _ReverseReplays:
    """Replays of the reference's model on the target's values, but for some that are left in place.

    Attributes:
        stack: Keeps the runs open.
        original: The trusted archive.
        tested: The target under the reference's keys.
        source: It with a padding that the reference's model can compute with.
        fed: The reference in the rows that both runs were fed.
        seen: The reference as it was compared with the target.
        workload: The reference's model in the precision in which it is run.
        twin: It in the target's precision; None without a twin.
        keys: Key texts of what can stand in the place of the model's own.
        precision: What errors are held against; None if no run says one.
        compute_dtype: What the target computed in, if its run does not say so.
        way: Whether the model is run on its own values.
        progress: Shows what is being run.
        unpaired: Modules whose calls do not correspond to those of the reference, which nothing is said of.
        misfits: Key texts of what this model has in another shape than the reference's run, likewise.
    """

    stack: ExitStack
    original: Archive
    tested: Archive
    _: KW_ONLY
    source: Archive
    fed: Archive
    seen: Archive
    workload: Workload
    twin: Workload | None
    keys: Collection[str]
    precision: Precision | None
    compute_dtype: str | None
    way: Way
    progress: Progress
    unpaired: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()

    def judge(self, released: frozenset[str]) -> _JudgedReplay:
        """Run the model and its twin, and judge what each module made.

        Args:
            released: Key texts of what is left in place.
        """
        left = ", what others undo left in place" if released else ""
        whose = "its own" if self.way == "self" else "the target's"
        stage = f"replaying the reference's model on {whose} values{left}"
        run = self._run(self.workload, stage, released, params=True)
        natural = tuple(_natural(self.original, self.keys))
        twin_run = None
        if self.twin is not None and self.precision is not None:
            twin_run = self._run(self.twin, f"replaying it in {self.precision.name}{left}", released)
        runs = ReplayRuns(run, self.tested, twin_run, self.precision, self.compute_dtype)
        result = _judge(self.fed, runs, self.way, self.keys, natural, released)
        if twin_run is not None and self.twin is not None and self.precision is not None and result.bad:
            explicit = adapter_for(self.twin.model).with_eager_attention(self.twin)
            if explicit is not None:
                stage = f"replaying it in {self.precision.name} with its attention written out{left}"
                explicit_run = self._run(explicit, stage, released)
                runs = replace(runs, twin=explicit_run)
                result = _less_severe(result, _judge(self.fed, runs, self.way, self.keys, natural, released))
        return _JudgedReplay(_without(result, self.unpaired, self.misfits), run)

    def _run(self, workload: Workload, stage: str, released: frozenset[str], **options: Any) -> Archive:
        substitution = Substitution(
            self.source,
            keys=frozenset(self.keys) - released,
            leaves_misfits=self.way != "self",
            fed=None if self.fed is self.original else self.fed,
        )
        run = open_run(
            self.stack, workload, stage, progress=self.progress, substitution=substitution, **options
        )
        return as_seen(self.seen, run)


def _unlike_calls(reference: Archive, run: Archive) -> dict[str, None]:
    """The modules that both runs called, and not equally often, as another version of their code may."""
    ours, theirs = (
        {point.site: point.calls for point in archive.info.points if point.calls and not point.slots}
        for archive in (reference, run)
    )
    return {site: None for site, calls in ours.items() if theirs.get(site, calls) != calls}


def _misfits(target: Archive, run: Archive, keys: Collection[str]) -> tuple[str, ...]:
    """Key texts of what the model has in another shape than the runs, as another version of its code may.

    Raises:
        UsageError: So it is with one of the model itself, or with most: this is another model.
    """
    records = [record for record in target.records if record.key.text in keys and record.key.text in run]
    misfits = [record for record in records if not _is_exchangeable(run, record)]
    of_model = [record for record in misfits if record.key.site == ROOT_SITE]
    if of_model or len(misfits) > _MOST_MISFITS * len(records):
        first = (of_model or misfits)[0]
        raise no_fit(target, first.key, first.shape, run.get(first.key.text).shape)
    return tuple(record.key.text for record in misfits)


def _without(result: Replay, unpaired: tuple[str, ...], misfits: tuple[str, ...]) -> Replay:
    """Leave out what modules made whose calls or shapes do not correspond, and name these.

    What is made of one that was not replaced is unjudged where it is bad: by its own module of an argument,
    by the modules around of a result.
    """
    keys = [Key.parse(text) for text in misfits]
    given = {key.site for key in keys if key.slot.startswith("input")}
    results = {key.site for key in keys if key.slot.startswith("output")}
    own_errors = tuple(
        _unjudged(own)
        if own.is_bad and (own.module in given or any(_lies_within(site, own.module) for site in results))
        else own
        for own in result.own_errors
        if own.key not in misfits and Key.parse(own.key).site not in unpaired
    )
    return replace(result, own_errors=own_errors, unpaired=unpaired, misfits=misfits)


def _unjudged(own: OwnError) -> OwnError:
    findings = tuple(replace(finding, status="unjudged") for finding in own.findings)
    return replace(own, status="unjudged", findings=findings)


def _less_severe(first: Replay, second: Replay) -> Replay:
    """Take the second verdict on each tensor that is bad by the first alone."""
    by_key = {own.key: own for own in second.own_errors}
    own_errors = tuple(
        by_key[own.key] if own.is_bad and not by_key[own.key].is_bad else own for own in first.own_errors
    )
    return replace(first, own_errors=own_errors)


def _replay_forward(
    stack: ExitStack,
    reference: Source,
    target: Source | None,
    target_model: Workload,
    reference_model: Workload | None,
    *,
    mapping: MappingSource | Literal["none"] | None,
    compute_dtype: str | None,
    progress: Progress,
) -> Replay:
    """Run the target on the reference's values.

    1. The target is captured as it is, unless such a capture was given, and aligned with the reference.
    2. It is run with the reference's tensors, under its own keys, in the place of its own.
    3. If the reference's model is known, a copy in the target's precision (the twin) is run on its own
       values.
    4. Each tensor of the run is compared with the reference's, and judged by its own error.
    """
    original = stack.enter_context(opened(reference))
    run_open = partial(open_run, stack, progress=progress)
    if target is None:
        free = run_open(target_model, "running the target as it is")
    else:
        free = stack.enter_context(opened(target))
    aligned = aligned_if_needed(original, free, mapping)
    source = original if aligned is None else reverse(aligned)
    _, fed = fed_in_common(original, free)
    keys = _exchangeable(source, fed)
    source = with_finite_padding(source, fed)
    stage = "replaying the target on the reference's values"
    substitution = Substitution(source, keys=keys, fed=None if fed is free else fed)
    run = run_open(target_model, stage, substitution=substitution)
    precision = POLICY.precision_of_runs(original.info, run.info, compute_dtype)
    trusted, tested = sides(original, run, NO_MAPPING if aligned is None else aligned.alignment)
    has_twin = precision is not None and not precision.is_wide
    twin_run = None
    if reference_model is not None and precision is not None and has_twin:
        twin_model = _cast(reference_model, precision)
        own_keys = _exchangeable(original, original)
        stage = f"replaying the reference's model in {precision.name}"
        twin_run = run_open(twin_model, stage, substitution=Substitution(original, keys=own_keys))
    runs = ReplayRuns(trusted, tested, twin_run, precision, compute_dtype)
    result = _judge(trusted, runs, "forward", keys, _natural(free, keys))
    return replace(result, lacks_twin=has_twin and reference_model is None)


def _cast(workload: Workload, precision: Precision) -> Workload:
    """Copy a workload into another precision."""
    copied = replace(workload, model=copy.deepcopy(workload.model))
    return adapter_for(workload.model).prepare(copied, dtype=precision.name, input_dtype=precision.name)


def _exact(workload: Workload, reference: Archive) -> Workload:
    """The reference's workload; if that is in low precision, a copy in float32."""
    own = POLICY.precision_of_runs(reference.info, reference.info)
    is_exact = own is None or own.is_wide
    return workload if is_exact else _cast(workload, POLICY.precision("float32"))


def _judge(
    reference: Archive,
    runs: ReplayRuns,
    way: Way,
    keys: Collection[str],
    natural: Iterable[str],
    released: Collection[str] = (),
) -> Replay:
    """Compare the runs, and judge what each module made."""
    comparison = compare(
        runs.exact,
        runs.target,
        mapping=NO_MAPPING,
        baseline=runs.twin,
        compute_dtype=runs.compute_dtype,
    )
    judge = ReplayJudge(reference, runs, comparison.pairs, is_forward=way == "forward", released=released)
    lacking = (
        pair.key
        for pair in comparison.pairs
        if pair.is_required and pair.status in ABSENT and _is_result(pair) and pair.key in reference
    )
    own_errors = [judge.judge(pair) for pair in comparison.pairs if _is_of_module(pair, judge)]
    return Replay(
        tuple(_without_inherited(own_errors, keys)),
        runs.precision.name if runs.precision else "",
        len(keys),
        tuple(natural),
        tuple(lacking),
        way,
    )


def _without_inherited(own_errors: Sequence[OwnError], keys: Collection[str]) -> Iterator[OwnError]:
    """Own errors; unjudged is what may be made of a wrong result within the module that was not replaced.

    Such are results of which the target has some tokens or words: they cannot stand in the whole's place.
    """
    kept = {own.module for own in own_errors if own.is_bad and own.made == "result" and own.key not in keys}
    for own in own_errors:
        inherits = own.is_bad and any(_lies_within(module, own.module) for module in kept)
        yield _unjudged(own) if inherits else own


def _lies_within(module: str, outer: str) -> bool:
    """Whether a module lies in another one, and is not that itself."""
    return module != outer and (outer == ROOT_SITE or module.startswith(f"{outer}."))


def _exchangeable(source: Archive, run: Archive) -> Collection[str]:
    """Key texts of an archive's tensors that can stand in the place of a run's own.

    Raises:
        UsageError: There are none.
    """
    keys = {record.key.text for record in source.records if _is_exchangeable(run, record)}
    if not keys:
        raise UsageError(
            f"{source.path}: has no argument or result of a module that the other side has",
            hint="tcap align tells what belongs together.",
        )
    return keys


def _is_exchangeable(run: Archive, record: Record) -> bool:
    """Whether a record has the shape and kind of the run's own under its key."""
    key = record.key
    if not (_is_slot(key) and record.stored and key.text in run):
        return False
    own = run.get(key.text)
    kinds = {own.dtype.kind, record.dtype.kind}
    return own.shape == record.shape and (len(kinds) == 1 or kinds == {"float", "bool"})


def _natural(run: Archive, keys: Collection[str]) -> Iterator[str]:
    """Key texts of arguments of a run that nothing replaced."""
    for record in run.records:
        key = record.key
        if key.slot.startswith("input") and not is_inner(key) and key.text not in keys:
            yield key.text


def _is_slot(key: Key) -> bool:
    """Whether a key is of an argument or a result of a module's call."""
    kind = key.slot.partition(".")[0]
    return kind in ("input", "output") and not key.rank and not key.is_bare and not is_inner(key)


def _is_of_module(pair: Pair, judge: ReplayJudge) -> bool:
    """Whether both sides have a tensor that a module made: inputs of the run are nobody's, but for states."""
    if pair.reference is None or pair.target is None or not _is_slot(pair.reference.key):
        return False
    key = pair.reference.key
    return key.site != ROOT_SITE or not key.slot.startswith("input") or judge.is_written(pair.reference)


def _is_result(pair: Pair) -> bool:
    key = pair.reference.key if pair.reference else None
    return key is not None and _is_slot(key) and key.slot.startswith("output")
