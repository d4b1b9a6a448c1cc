"""Reverse replay: the reference's model run on the target's values, or on its own."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tensorcap.adapters import Rerun, adapter_for
from tensorcap.alignment import (
    NO_MAPPING,
    GatheredArchive,
    MappingSource,
    as_seen,
    fed_in_common,
    in_own_steps,
    in_whole_tensors,
    joined_steps_of,
    sides,
)
from tensorcap.comparison import (
    POLICY,
    Comparison,
    Finding,
    Precision,
    compare,
    given_unlike_on_ranks,
    measure_layers,
    require_readable,
)
from tensorcap.recording import Substitution
from tensorcap.rerun.call_through import GatheredCall
from tensorcap.rerun.compensation import Dependencies, Settled, settle
from tensorcap.rerun.finite_padding import with_finite_padding
from tensorcap.rerun.injection import open_run
from tensorcap.rerun.own_errors import OwnError
from tensorcap.rerun.producers import Producers
from tensorcap.rerun.replay_judge import ReplayRuns, judge_replay, unjudged
from tensorcap.rerun.replay_result import Replay, Way
from tensorcap.rerun.substitutes import exchangeable, misfits, natural_arguments, unlike_calls
from tensorcap.runs import lies_within
from tensorcap.wording import one_line
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import Source, opened
from tensorcap_formats.progress import Progress, Silent

if TYPE_CHECKING:
    from tensorcap.workload import Workload


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
        producers: Who made what the target has no tensors before.
        source: The target in the reference's whole tensors, as it stood in that model.
    """

    replay: Replay
    reference: Archive
    target: Archive
    run: Archive
    workload: Workload
    fed: Archive | None
    producers: Producers
    source: Archive

    def rerun_call(self, module: str, key: str) -> Rerun | None:
        """Run the model until a call of a module, which can then be made again.

        Args:
            module: The module.
            key: Key text of a tensor that its code makes, or that is its result and handed on.

        Returns:
            The call; None if it cannot be made again, such as one of a compiled module.
        """
        slots = self.run.info.injected.slots if self.run.info.injected else ()
        replaced = {(s.site, s.slot) for s in slots if s.status == "injected"}
        keys = {r.key.text for r in self.source.records if (r.key.site, r.key.slot) in replaced}
        result = self.producers.results.get(key)
        produced = Key.parse(key) if result is None or result.key.site != module else result.key
        if not keys or produced.text not in self.run or joined_steps_of(self.run) is not None:
            return None
        adapter = adapter_for(self.workload.model)
        if self.workload.seed is not None:
            adapter.seed(self.workload.seed)
        try:
            target = with_finite_padding(self.source, self.reference if self.fed is None else self.fed)
            substitution = Substitution(target, keys=keys, leaves_misfits=True, fed=self.fed)
            call = adapter.rerun(self.workload, substitution, module, self.run.get(produced.text).key)
        except Exception:  # a value that does not fit, or whatever a module that is no plain Python runs into
            return None
        gathered = self.run if isinstance(self.run, GatheredArchive) else None
        if call is None or gathered is None or produced.text not in gathered.gathers:
            return call
        shape = gathered.source.get(produced.text).shape
        return GatheredCall(call, gathered.gathers[produced.text], shape)


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
    of what the reference's model makes; tokens that lie elsewhere in the target are put into the reference's
    places, without its masks. `seen` is the reference as it was compared with a target that is a
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
    tested = original if target is None else stack.enter_context(opened(target, reference=original))
    precision = POLICY.precision_of_runs(original.info, tested.info, compute_dtype)
    if target is not None:
        trusted, tested = sides(original, tested, mapping)
        seen = seen or trusted
        original = joined_steps_of(seen) or original
    fed, _ = fed_in_common(original, tested)
    whole = in_whole_tensors(tested, seen or original)
    keys = exchangeable(whole, fed)
    replays = _ReverseReplays(
        stack,
        original,
        tested,
        source=with_finite_padding(whole, fed),
        fed=fed,
        seen=seen or original,
        workload=reference_model if target is None else _exact(reference_model, original),
        twin=cast_workload(reference_model, precision)
        if twin and target is not None and precision is not None and not precision.is_wide
        else None,
        keys=keys,
        precision=precision,
        compute_dtype=compute_dtype,
        way="self" if target is None else "reverse",
        progress=progress or Silent(),
        producers=Producers() if target is None else Producers.of(fed, tested),
        unmatched=frozenset(r.key.text for r in tested.records if r.key.text not in whole),
    )
    if target is not None:
        layers = measure_layers(seen or original, tested, precision) if free is None else free.layers
        replays = replace(replays, keys=set(keys) - layers.inside)
        keys = replays.keys
    first = replays.judge(frozenset())
    if target is not None:
        unpaired, unfitting = unlike_calls(original, first.run), misfits(tested, first.run, keys)
        if unpaired or unfitting:
            left = {key for key in keys if Key.parse(key).site not in unpaired}.difference(unfitting)
            replays = replace(replays, keys=left, unpaired=tuple(unpaired), misfits=unfitting)
            first = replays.judge(frozenset())
    settled = Settled(first)
    shown = first.replay
    if target is not None and (shown.bad or shown.lacking or shown.unjudged):
        free = free or compare(seen or original, tested, mapping=NO_MAPPING)
        require_readable(free.pairs)
        explained = {pair.key for pair in free.pairs if pair.status == "explained"}
        settled = settle(first, replays.judge, Dependencies(fed, tested), explained=explained)
        shown = replace(settled.judged.replay, own_errors=settled.own_errors)
        shown = _without_explained(shown, free)
    run = settled.judged.run
    fed_alone = None if fed is original else fed
    return OpenReplay(shown, original, tested, run, replays.workload, fed_alone, replays.producers, whole)


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
        original: The trusted archive, its steps joined as the target was fed the tokens.
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
        producers: Who made what the target has no tensors before.
        unpaired: Modules whose calls do not correspond to those of the reference, which nothing is said of.
        misfits: Key texts of what this model has in another shape than the reference's run, likewise.
        unmatched: Key texts of what has tokens at other places than the reference, and is compared as it is.
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
    producers: Producers
    unpaired: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    unmatched: frozenset[str] = frozenset()

    def judge(self, released: frozenset[str]) -> _JudgedReplay:
        """Run the model and its twin, and judge what each module made.

        Args:
            released: Key texts of what is left in place.
        """
        left = ", what others undo left in place" if released else ""
        whose = "its own" if self.way == "self" else "the target's"
        stage = f"replaying the reference's model on {whose} values{left}"
        run = self._run(self.workload, stage, released, params=True)
        natural = tuple(natural_arguments(self.original, self.keys))
        twin_run, failure = None, ""
        if self.twin is not None and self.precision is not None:
            try:
                twin_run = self._run(self.twin, f"replaying it in {self.precision.name}{left}", released)
            except TensorcapError:
                raise
            except Exception as error:  # of the model's own code, such as a product of unlike dtypes
                failure = one_line(f"{type(error).__name__}: {error}")
        runs = ReplayRuns(run, self.tested, twin_run, self.precision, self.compute_dtype, self.producers)
        result = judge_replay(self.fed, runs, self.way, self.keys, natural, released)
        if twin_run is not None and self.twin is not None and self.precision is not None and result.bad:
            explicit = adapter_for(self.twin.model).with_eager_attention(self.twin)
            if explicit is not None:
                stage = f"replaying it in {self.precision.name} with its attention written out{left}"
                explicit_run = self._run(explicit, stage, released)
                runs = replace(runs, twin=explicit_run)
                result = _less_severe(
                    result, judge_replay(self.fed, runs, self.way, self.keys, natural, released)
                )
        result = replace(_without(result, self.unpaired, self.misfits), twin_failure=failure)
        result = _with_unjudged(result, self.unmatched)
        given = given_unlike_on_ranks(self.seen, self.tested)
        return _JudgedReplay(_without_unlike_ranks(result, given), run)

    def _run(self, workload: Workload, stage: str, released: frozenset[str], **options: Any) -> Archive:
        source, keys = in_own_steps(self.source, self.original, frozenset(self.keys) - released)
        substitution = Substitution(
            source,
            keys=keys,
            leaves_misfits=self.way != "self",
            fed=None if self.fed is self.original else self.fed,
        )
        run = open_run(
            self.stack, workload, stage, progress=self.progress, substitution=substitution, **options
        )
        return as_seen(self.seen, run)


def _without(result: Replay, unpaired: tuple[str, ...], misfits: tuple[str, ...]) -> Replay:
    """Leave out what modules made whose calls or shapes do not correspond, and name these.

    What is made of one that was not replaced is unjudged where it is bad: by its own module of an argument,
    by the modules around of a result.
    """
    keys = [Key.parse(text) for text in misfits]
    given = {key.site for key in keys if key.slot.startswith("input")}
    results = {key.site for key in keys if key.slot.startswith("output")}
    own_errors = tuple(
        unjudged(own)
        if own.is_bad and (own.module in given or any(lies_within(site, own.module) for site in results))
        else own
        for own in result.own_errors
        if own.key not in misfits and Key.parse(own.key).site not in unpaired
    )
    return replace(result, own_errors=own_errors, unpaired=unpaired, misfits=misfits)


def _with_unjudged(result: Replay, keys: Collection[str]) -> Replay:
    """Leave tensors of some keys unjudged that are bad."""
    own_errors = tuple(unjudged(own) if own.is_bad and own.key in keys else own for own in result.own_errors)
    return replace(result, own_errors=own_errors)


def _without_unlike_ranks(result: Replay, given: Collection[str]) -> Replay:
    """Leave modules unjudged that ranks gave unlike arguments, of which the replay has one rank's."""
    own_errors = tuple(
        unjudged(own) if own.is_bad and own.module in given else own for own in result.own_errors
    )
    return replace(result, own_errors=own_errors)


def _less_severe(first: Replay, second: Replay) -> Replay:
    """Take the second verdict on each tensor that is bad by the first alone."""
    by_key = {own.key: own for own in second.own_errors}
    own_errors = tuple(
        by_key[own.key] if own.is_bad and not by_key[own.key].is_bad else own for own in first.own_errors
    )
    return replace(first, own_errors=own_errors)


def cast_workload(workload: Workload, precision: Precision) -> Workload:
    """Copy a workload into another precision."""
    copied = replace(workload, model=copy.deepcopy(workload.model))
    return adapter_for(workload.model).prepare(copied, dtype=precision.name, input_dtype=precision.name)


def _exact(workload: Workload, reference: Archive) -> Workload:
    """The reference's workload; if that is in low precision, a copy in float32."""
    own = POLICY.precision_of_runs(reference.info, reference.info)
    is_exact = own is None or own.is_wide
    return workload if is_exact else cast_workload(workload, POLICY.precision("float32"))
