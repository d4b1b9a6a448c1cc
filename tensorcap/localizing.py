"""Localise: which module is guilty, by its own error under replay, or by archives alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from tensorcap.aligning import MappingSource, sides
from tensorcap.alignment.part import Part
from tensorcap.capturing import Around
from tensorcap.comparing import Source, compare, opened
from tensorcap.comparison import Comparison
from tensorcap.diagnosis.diagnosing import diagnose
from tensorcap.diagnosis.weighing import Explanation
from tensorcap.replaying import Replayed, replay_within
from tensorcap.verdicts.calls import Calls
from tensorcap.verdicts.divergence import Inputs, called_sites, caller_of, is_circumstance
from tensorcap.verdicts.gains import row_error
from tensorcap.verdicts.pairing import ABSENT, Pair
from tensorcap.verdicts.places import is_inner, is_parameter
from tensorcap.verdicts.policy import SEVERITY
from tensorcap.verdicts.replayed import Own
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorcapError

if TYPE_CHECKING:
    from tensorcap.workload import Workload

By = Literal["replay", "archives"]

_DIAGNOSED: Final = 3  # suspects, and tensors of each
_MOST: Final = 8  # suspects by archives alone
_GAINS: Final = frozenset({"D", "D'", "T", "T'", "E", "own"})


@dataclass(frozen=True, slots=True)
class Suspect:
    """A module that is accused.

    Attributes:
        module: Its site, in the reference's names.
        class_name: Its class, "" where that is not known.
        key: Key text of the tensor that speaks most against it.
        own: Row error that it makes itself; None where no model was replayed, or none is defined.
        inherited: Largest row error of what it was given in the target's own run; None where not known.
        total: Largest row error of its results there; None where not known.
        reason: Why it is accused, as a sentence.
        diagnosis: What explains its values; None where nothing does, or nobody looked.
    """

    module: str
    class_name: str
    key: str
    own: float | None
    inherited: float | None
    total: float | None
    reason: str
    diagnosis: Explanation | None


@dataclass(frozen=True, slots=True)
class Localization:
    """Who is accused.

    Attributes:
        suspects: The first one first; none if nothing is wrong.
        by: Whether a model was replayed, or the archives alone say it.
        nonfinite: Key text of the first tensor that is finite on one side only, and its module; None if none.
        notes: What else a reader should know, as sentences.
        open: Key texts of what is required, not green by more than growth, and no suspect answers for; none
            where there are suspects.
    """

    suspects: tuple[Suspect, ...]
    by: By
    nonfinite: tuple[str, str] | None
    notes: tuple[str, ...]
    open: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """1 where a module is accused, or something is wrong that no module is accused of; else 0."""
        return int(bool(self.suspects or self.open))


def localize(
    reference: Source,
    target: Source,
    workload: Workload | None = None,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
    seed: int | None = None,
    around: Around | None = None,
) -> Localization:
    """Rank the modules of a target by the evidence that they are wrong themselves.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path.
        workload: The reference's model and inputs, to be replayed on the target's values; without it the
            archives alone say what they can.
        mapping: As for `compare`.
        compute_dtype: What the target computed in, where its run does not say so.
        seed: Of the random generators before each replay; as they are if None.
        around: As for `capture_workload`.

    Raises:
        UsageError: The archives have nothing in common, or the mapping does not fit.
        CaptureError: Nothing was captured.
    """
    with ExitStack() as stack:
        trusted, tested = (stack.enter_context(opened(source)) for source in (reference, target))
        reduced, mapped = sides(trusted, tested, mapping)
        free = compare(reduced, mapped, mapping="none", compute_dtype=compute_dtype)
        if workload is None:
            return _with_open(_by_archives(reduced, mapped, free, compute_dtype), free, ())
        done = replay_within(
            stack,
            trusted,
            workload,
            mapped,
            mapping="none",
            compute_dtype=compute_dtype,
            seed=seed,
            around=around,
        )
        unjudged = (*done.found.lacking, *(own.key for own in done.found.unjudged))
        return _with_open(_by_replay(done, free, compute_dtype), free, unjudged)


def _with_open(found: Localization, free: Comparison, unjudged: Iterable[str]) -> Localization:
    """What was found, and what is wrong that nobody is accused of."""
    if found.suspects:
        return found
    wrong = (
        pair.key for pair in free.pairs if pair.is_required and not pair.is_green and pair.status != "suspect"
    )
    keys = tuple(dict.fromkeys([*wrong, *unjudged]))
    if not keys:
        return found
    note = f"{len(keys)} tensors are not green and no module is accused of them: {keys[0]}; see tcap compare."
    return replace(found, open=keys, notes=(*found.notes, note))


def _by_replay(done: Replayed, free: Comparison, compute_dtype: str | None) -> Localization:
    calls = Calls(done.reference)
    around = _Around(free)
    bad: dict[str, list[Own]] = {}
    for own in done.found.owns:
        if own.is_bad:
            bad.setdefault(own.module, []).append(own)
    order = {module: at for at, module in enumerate(bad)}
    ranked = sorted(bad, key=lambda m: (-max(map(_severity, bad[m])), not calls.is_leaf(m), order[m]))
    suspects = []
    for place, module in enumerate(ranked):
        against = sorted(bad[module], key=lambda own: -_severity(own))
        first = against[0]
        what = "its own result" if first.made == "result" else "what its code hands on"
        said = max(first.findings, key=lambda f: SEVERITY.index(f.status)) if first.findings else None
        reason = f"{what} is wrong for what the target gave it ({first.key})"
        if said is not None:
            reason += f": {said.text}"
        found = None
        if place < _DIAGNOSED:
            keys = [own.key for own in against[:_DIAGNOSED]]
            found = next(
                (
                    e
                    for key in keys
                    for e in _explanations(_until(done.run, key), done.target, key, compute_dtype)
                ),
                None,
            )
        inherited, total = around.of(module)
        name = calls.class_of(module)
        suspects.append(Suspect(module, name, first.key, first.error, inherited, total, reason, found))
    return Localization(tuple(suspects), "replay", around.nonfinite, done.found.notes)


def _by_archives(
    reference: Archive, target: Archive, free: Comparison, compute_dtype: str | None
) -> Localization:
    """What comparing says: the module of the first divergence, then those whose gain is too large."""
    note = (
        "No model was replayed: the archives alone tell a mistake only where it stands out of what errors "
        "do anyway."
    )
    around, calls, called = _Around(free), Calls(reference), called_sites(reference)
    first = free.divergence
    if first is None or first.is_growth or _is_nobodys(first.pair, Inputs(reference, free.pairs)):
        return Localization((), "archives", around.nonfinite, (note,))
    accused = {first.module: (first.pair, first.explanation)}
    for pair in free.pairs:
        if len(accused) < _MOST and pair.reference is not None and _stands_out(pair):
            site, slot = pair.reference.key.site, pair.reference.key.slot
            module = caller_of(site, called) if slot.startswith("input") else site
            said = next(f.text for f in pair.findings if f.test in _GAINS and f.status == "diverged")
            accused.setdefault(module, (pair, said))
    suspects = []
    for place, (module, (pair, reason)) in enumerate(accused.items()):
        found = None
        if place < _DIAGNOSED:
            found = next(_explanations(reference, target, pair.key, compute_dtype), None)
        inherited, total = around.of(module)
        name = calls.class_of(module)
        suspects.append(Suspect(module, name, pair.key, None, inherited, total, reason, found))
    return Localization(tuple(suspects), "archives", around.nonfinite, (note,))


def _is_nobodys(pair: Pair, inputs: Inputs) -> bool:
    """Whether a pair says nothing of who made it: it is missing, or differs by circumstance."""
    return pair.status in ABSENT or is_circumstance(pair, inputs.of(pair))


def _stands_out(pair: Pair) -> bool:
    if pair.reference is None or is_inner(pair.reference.key) or is_parameter(pair.reference.key):
        return False
    return any(f.test in _GAINS and f.status == "diverged" for f in pair.findings)


class _Around:
    """What the target's own run says of each module: errors that arrive and that leave."""

    def __init__(self, free: Comparison) -> None:
        self._in: dict[str, float] = {}
        self._out: dict[str, float] = {}
        self.nonfinite: tuple[str, str] | None = None
        for pair in free.pairs:
            if pair.reference is None or is_inner(pair.reference.key):
                continue
            key = pair.reference.key
            if pair.status == "nonfinite" and self.nonfinite is None:
                self.nonfinite = pair.key, key.site
            error = row_error(pair) if pair.is_compared else None
            kept = self._in if key.slot.startswith("input") else self._out
            if error is not None and key.slot.partition(".")[0] in ("input", "output"):
                kept[key.site] = max(error, kept.get(key.site, 0.0))

    def of(self, module: str) -> tuple[float | None, float | None]:
        """Inherited and total error."""
        return self._in.get(module), self._out.get(module)


def _until(run: Archive, key: str) -> Archive:
    """What a replay had made until a tensor: what came after it was made of the target's value of it."""
    last = run.get(key).order
    return Part(run, [r for r in run.records if r.order <= last or is_parameter(r.key)])


def _explanations(
    reference: Archive, target: Archive, key: str, compute_dtype: str | None
) -> Iterator[Explanation]:
    """What explains a tensor as a mistake of the module that made it, the best first."""
    try:
        found = diagnose(reference, target, key, compute_dtype=compute_dtype)
    except TensorcapError:  # complex values, or none were kept: nothing to look at
        return
    for explanation in found.explanations:
        if explanation.kind != "inherited" and not explanation.kind.startswith("only-"):
            yield explanation


def _severity(own: Own) -> int:
    return SEVERITY.index(own.status) if own.status in SEVERITY else 0
