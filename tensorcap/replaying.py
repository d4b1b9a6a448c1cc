"""Replay: run a model on what another run was given, module by module, and compare what each makes of it.

Every module's arguments and results are replaced by archived ones, after the natural ones were recorded. So a
recorded result is what the model's own module makes of the archived arguments and of the archived results of
the modules within it, and a recorded argument is what the code of the caller makes of archived values: each
difference is of one module's own making (`specs/replay.md`).
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from tensorcap.adapters import adapter_for
from tensorcap.aligning import MappingSource, sides
from tensorcap.capturing import Around, capture_workload
from tensorcap.comparing import Source, compare, opened
from tensorcap.substitution import Substitution
from tensorcap.verdicts.calls import Calls
from tensorcap.verdicts.divergence import called_sites, caller_of
from tensorcap.verdicts.gains import row_error
from tensorcap.verdicts.pairing import ABSENT, Finding, Pair, Status
from tensorcap.verdicts.places import is_inner
from tensorcap.verdicts.policy import POLICY, SEVERITY, Precision
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.opening import open_archive
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    from tensorcap.workload import Workload

Made = Literal["result", "argument"]

_FLOATS: Final = ("float", "complex")


@dataclass(frozen=True, slots=True)
class Own:
    """What one module itself made of archived values, against what the archive holds.

    Attributes:
        key: Key text of the tensor, in the names of the model that was run.
        module: The module whose code made it: of an argument, the caller.
        made: Whether it is a result of `module` or an argument that it hands on.
        is_leaf: Whether a leaf of known kind made it.
        error: Row error, no unit; None where none is defined.
        ratio: R against the twin on the same values; None without one.
        status: `identical`, `within-rounding`, `suspect` or `diverged`, or `unjudged`.
        findings: What the tests said.
    """

    key: str
    module: str
    made: Made
    is_leaf: bool
    error: float | None
    ratio: float | None
    status: Status
    findings: tuple[Finding, ...]

    @property
    def is_bad(self) -> bool:
        """Whether it is suspect or worse."""
        return self.status in ("suspect", "diverged")


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

    Attributes:
        owns: What each module made, in execution order.
        precision: Name of the precision that errors were held against; "" where no run says one.
        replaced: Count of tensors that were put in the place of the model's own.
        natural: Key texts of arguments that the archive has no tensor for, so that they stayed natural.
        lacking: Key texts of results of the reference that the target lacks, which nothing explains.
        is_self: Whether the model was run on its own tensors.
        notes: What else a reader should know, as sentences.
    """

    owns: tuple[Own, ...]
    precision: str
    replaced: int
    natural: tuple[str, ...]
    lacking: tuple[str, ...]
    is_self: bool
    notes: tuple[str, ...]

    @property
    def bad(self) -> Sequence[Own]:
        """What is suspect or worse, in execution order."""
        return [own for own in self.owns if own.is_bad]

    @property
    def unjudged(self) -> Sequence[Own]:
        """What nothing could judge, such as a tensor that cannot be read."""
        return [own for own in self.owns if own.status == "unjudged"]

    @property
    def exit_status(self) -> int:
        """1 where something is suspect or worse or not judged, or a run does not repeat itself; else 0."""
        if self.is_self:
            return int(not self.owns or any(own.status != "identical" for own in self.owns))
        return int(bool(self.bad or self.unjudged or self.lacking) or not self.owns)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay while its runs are still there.

    Attributes:
        found: What it found.
        reference: The trusted archive.
        target: The target under the reference's keys.
        run: What the reference's model made of the target's values.
    """

    found: Replay
    reference: Archive
    target: Archive
    run: Archive


def replay(
    reference: Source,
    workload: Workload,
    target: Source | None = None,
    *,
    mapping: MappingSource | Literal["none"] | None = None,
    twin: bool = True,
    compute_dtype: str | None = None,
    seed: int | None = None,
    around: Around | None = None,
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
        around: As for `capture_workload`.

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
            around=around,
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
    around: Around | None = None,
) -> Replayed:
    """As `replay`; the runs stay there for as long as the stack does."""
    original = stack.enter_context(opened(reference))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-")))
    tested = original if target is None else stack.enter_context(opened(target))
    precision = POLICY.precision_of_runs(original.run, tested.run, compute_dtype)
    if target is not None:
        _, tested = sides(original, tested, mapping)
    keys = {record.key.text for record in tested.records if _is_exchanged(original, record)}
    if not keys:
        raise UsageError(
            f"{tested.path}: has no argument or result of a module that the reference has",
            hint="tcap align tells what belongs together.",
        )

    def ran(what: Workload, name: str) -> Archive:
        if seed is not None:
            adapter_for(what.model).seed(seed)
        path = folder / name
        capture_workload(
            what, path, params=name == "run.h5", around=around, substitution=Substitution(tested, keys=keys)
        )
        return stack.enter_context(open_archive(path))

    run = ran(workload, "run.h5")
    is_narrow = precision is not None and not precision.is_wide
    low = None
    if twin and is_narrow and target is not None and precision is not None:
        adapter = adapter_for(workload.model)
        copied = replace(workload, model=copy.deepcopy(workload.model))
        low = ran(adapter.prepare(copied, dtype=precision.name, input_dtype=precision.name), "twin.h5")
    compared = compare(run, tested, mapping="none", baseline=low, compute_dtype=compute_dtype)
    judge = _Judge(original, tested, run, low, precision)
    owns = tuple(judge.of(pair) for pair in compared.pairs if _is_of_module(pair))
    natural = [
        record.key.text
        for record in original.records
        if record.key.slot.startswith("input") and not is_inner(record.key) and record.key.text not in keys
    ]
    lacking = [
        pair.key
        for pair in compared.pairs
        if pair.is_required and pair.status in ABSENT and _is_result(pair) and pair.key in original
    ]
    name = "" if precision is None else precision.name
    found = Replay(owns, name, len(keys), tuple(natural), tuple(lacking), target is None, ())
    found = replace(found, notes=tuple(_notes(found)))
    return Replayed(found, original, tested, run)


class _Judge:
    """Judges what modules made, by tests A, A', B, C and E."""

    def __init__(
        self,
        reference: Archive,
        target: Archive,
        run: Archive,
        twin: Archive | None,
        precision: Precision | None,
    ) -> None:
        self._calls = Calls(reference)
        self._called = called_sites(reference)
        self._target, self._run, self._twin = target, run, twin
        self._precision = precision
        self._inputs = {call.place: call.inputs for call in self._calls.calls}

    def of(self, pair: Pair) -> Own:
        """What became of one tensor."""
        assert pair.reference is not None
        assert pair.target is not None
        key = pair.reference.key
        is_result = key.slot.startswith("output")
        module = key.site if is_result else caller_of(key.site, self._called)
        is_leaf = is_result and self._calls.is_leaf(key.site) and self._calls.is_simple(key.site)
        ratio = None if pair.baseline is None else pair.baseline.r
        status, findings = self._judged(pair, ratio, is_leaf=is_leaf)
        made: Made = "result" if is_result else "argument"
        return Own(pair.key, module, made, is_leaf, row_error(pair), ratio, status, findings)

    def _judged(
        self, pair: Pair, ratio: float | None, *, is_leaf: bool
    ) -> tuple[Status, tuple[Finding, ...]]:
        if pair.status in ("identical", "match"):
            return pair.status, ()
        if pair.status in ("nonfinite", "shape-mismatch"):
            return "diverged", (Finding(pair.status, 1, 0, "diverged", _wrong(pair)),)
        error = row_error(pair)
        assert pair.reference is not None
        key = pair.reference.key
        assert pair.target is not None
        if error is None or pair.difference is None or pair.reference.dtype.kind not in _FLOATS:
            return (pair.status if pair.status in SEVERITY else "unjudged"), pair.findings
        precision = POLICY.precision_of_pair(
            self._precision, pair.reference.dtype.name, pair.target.dtype.name
        )
        found = list(POLICY.judge_replayed(error, pair.difference.row_error_p95, precision, is_leaf=is_leaf))
        if ratio is not None and ratio <= POLICY.twin_ratio.green:  # the model itself rounds as much
            found = [replace(f, status="within-rounding") for f in found]
        elif ratio is not None and math.isfinite(ratio) and self._tells_by_twin(pair, is_leaf=is_leaf):
            found.append(POLICY.judge_twin(ratio))
        found += [finding for finding in pair.findings if finding.test == "E"]
        is_precise = ratio is not None and ratio < POLICY.twin_precise
        if not (is_precise and self._calls.has_parameters(key.site)):
            found += self._of_bits(pair)
        return max((f.status for f in found), key=SEVERITY.index), tuple(found)

    def _tells_by_twin(self, pair: Pair, *, is_leaf: bool) -> bool:
        """Whether R is judged: of leaves that are no products, and of weights that routers give."""
        assert pair.reference is not None
        assert pair.target is not None
        key, known, twin = pair.reference.key, pair.reference.statistics, self._twin
        if is_leaf or not self._calls.is_router(key.site) or twin is None or key.text not in twin:
            return is_leaf and not self._calls.is_linear(key.site)
        is_as_wide = twin.get(key.text).dtype == pair.target.dtype
        return is_as_wide and known is not None and known.minimum is not None and float(known.minimum) >= 0

    def _of_bits(self, pair: Pair) -> list[Finding]:
        """Test C, of leaves that compute a tensor of another of its shape: activations and norms."""
        assert pair.reference is not None
        assert pair.target is not None
        key, twin = pair.reference.key, self._twin
        if twin is None or key.text not in twin or not self._keeps_shape(pair.reference):
            return []
        other = twin.get(key.text)
        if other.dtype != pair.target.dtype or other.shape != pair.target.shape:
            return []
        ours = decode(twin.read(other), other.dtype).astype(np.float64)
        theirs = decode(self._target.read(pair.target), pair.target.dtype).astype(np.float64)
        exact = decode(self._run.read(pair.reference), pair.reference.dtype).astype(np.float64)
        is_plain = not self._calls.has_parameters(key.site)
        unit = POLICY.units[other.dtype.name]
        off, other_values = shares_off(exact, ours, theirs, unit, rounds_once=is_plain)
        found = [POLICY.judge_bits(off)]
        if is_plain:
            found.append(POLICY.judge_other_values(other_values))
        return found

    def _keeps_shape(self, record: Record) -> bool:
        key = record.key
        if not (self._calls.is_leaf(key.site) and self._calls.is_simple(key.site)):
            return False
        inputs = self._inputs.get((key.rank, key.step, key.site, key.call), ())
        is_alone = len(inputs) == 1 and inputs[0].shape == record.shape
        return is_alone and not self._calls.is_linear(key.site)


def shares_off(
    exact: Any, twin: Any, target: Any, unit: float, *, rounds_once: bool = True
) -> tuple[float, float]:
    """How many elements are neither the twin's nor the exact ones rounded once (test C).

    Args:
        exact: What the model makes in its own precision, float64.
        twin: What it makes in the target's.
        target: What the target made.
        unit: `u` of the target's dtype.
        rounds_once: Whether the exact ones rounded once are as good as the twin's, to the last place.

    Returns:
        The share of elements that are more than one unit in the last place off, and of those that are off
        both at all.
    """
    if not target.size:
        return 0.0, 0.0
    _, exponent = np.frexp(np.maximum(np.abs(exact), np.abs(target)))
    ulp = np.ldexp(2 * unit, exponent - 1)
    with np.errstate(invalid="ignore"):
        from_twin, from_exact = np.abs(target - twin), np.abs(target - exact)
        far = from_twin > 1.001 * ulp
        other = (from_twin > 0) & (from_exact > 0.501 * ulp)
        if rounds_once:
            far &= from_exact > 1.501 * ulp
    return float(far.mean()), float(other.mean())


def _is_exchanged(reference: Archive, record: Record) -> bool:
    """Whether a record of the target can stand in a run of the reference's model."""
    key = record.key
    if not (_is_slot(key) and record.stored and key.text in reference):
        return False
    own = reference.get(key.text)
    kinds = {own.dtype.kind, record.dtype.kind}
    return own.shape == record.shape and (len(kinds) == 1 or kinds == {"float", "bool"})


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


def _wrong(pair: Pair) -> str:
    if pair.status == "nonfinite" and pair.difference is not None:
        count, all_of = pair.difference.mask_mismatches, pair.difference.elements
        return f"{count} of {all_of} elements are finite on one side only"
    return pair.reason or "the shapes differ"


def _notes(found: Replay) -> list[str]:
    notes = []
    first = next((own.key for own in found.owns if own.status != "identical"), "")
    if found.is_self and first:
        notes.append(f"The model does not repeat its own run ({first}): believe nothing else that it says.")
    if found.natural:
        count = len(found.natural)
        notes.append(f"{count} arguments of the reference have none in the target: they stay natural.")
    if found.lacking:
        count, first = len(found.lacking), found.lacking[0]
        notes.append(
            f"{count} results of the reference have none in the target and were not judged: {first}."
        )
    if found.unjudged:
        count, first = len(found.unjudged), found.unjudged[0].key
        notes.append(f"{count} tensors could not be judged: {first}.")
    return notes
