"""Verify a port: capture, match and compare both sides, free-running and injected, and write a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensorcap.adapters import adapter_for
from tensorcap.aligning import Aligned, MappingSource, align, sides
from tensorcap.alignment.order import Order, order_between
from tensorcap.alignment.rules import read_rules
from tensorcap.auditing import Audit, audit
from tensorcap.capturing import Around, capture_workload
from tensorcap.comparing import Source, compare, opened
from tensorcap.comparison import Comparison
from tensorcap.diagnosis.diagnosing import Diagnosis, diagnose_pair
from tensorcap.injecting import inject
from tensorcap.preflight.checklist import Preflight, preflight
from tensorcap.reports.report_folder import replaced_folder
from tensorcap.reports.verification_files import write_files
from tensorcap.verdicts.divergence import first_divergence
from tensorcap.verdicts.pairing import ABSENT, Pair
from tensorcap.workload import Workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE

REFERENCE: Final = "reference.h5"
TARGET: Final = "target.h5"
_DIAGNOSED: Final = 3  # suspects
_OWN: Final = frozenset({"A", "A'"})
_ARCHIVE: Final = "the target is an archive, which cannot be run again"


@dataclass(frozen=True)
class Runnable:
    """A side that is run.

    Attributes:
        make: Makes the workload, and what the run's metadata say of it besides; of the target, given the
            reference's archive, of the reference None.
        seed: Of the random generators before each run.
        framework: Whose model it makes; None where that is known only once it is made.
    """

    make: Callable[[Archive | None], tuple[Workload, Mapping[str, Any]]]
    seed: int = 0
    framework: str | None = None

    @classmethod
    def of(cls, workload: Workload) -> Runnable:
        """A workload that is there already."""
        return cls(lambda _: (workload, {}))


@dataclass(frozen=True, slots=True)
class Suspect:
    """A module that is accused.

    Attributes:
        module: Its site in the reference, `@root` for the model itself.
        class_name: Its class there, "" where unknown.
        pair: What shows it.
        explanation: How the module was found, as a sentence.
        is_own: Whether the error is known to be the module's own: it was given the reference's tensors.
        diagnosis: What kind of mistake it is; None where the values could not be looked at.
    """

    module: str
    class_name: str
    pair: Pair
    explanation: str
    is_own: bool
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found of a port.

    Attributes:
        path: The folder.
        preflight: What differs apart from tensors.
        order: Both orders of execution; None where a side has none.
        free: The comparison of the free runs.
        injected: That of the injected run; None without one.
        why_not_injected: Why there is none, "" if there is.
        is_refused: Whether there should have been one, and the reference's tensors did not fit.
        suspects: Modules that are accused, the first one first.
        inheriting: Keys of what is not green in the free run, and green once the inputs are right.
        weights: The comparison of weights before the target ran, of unlike frameworks.
        control: Of each output of a compiled target, how far a run without taps is from the free run.
        notes: What could not be written, a sentence each.
        summary: What is wrong, as sentences.
    """

    path: Path
    preflight: Preflight
    order: Order | None
    free: Comparison
    injected: Comparison | None
    why_not_injected: str
    is_refused: bool
    suspects: Sequence[Suspect]
    inheriting: Sequence[str]
    weights: Audit | None = None
    control: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    summary: Sequence[str] = ()

    @property
    def exit_status(self) -> int:
        """That of the worst comparison, and 1 at least if an injection was refused (VER-40)."""
        injected = self.injected.exit_status if self.injected else int(self.is_refused)
        return max(self.free.exit_status, injected, self.weights.exit_status if self.weights else 0)


def verify(
    reference: Runnable | Workload | Source,
    target: Runnable | Workload | Source,
    output: str | os.PathLike[str],
    *,
    mapping: MappingSource | None = None,
    rules: str | os.PathLike[str] | None = None,
    layers: bool = False,
    force: bool = False,
    around: Around | None = None,
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
        around: As for `capture_workload`, of each run.
        tell: Told what is done next.

    Raises:
        UsageError: The folder exists, a side is none, or the mapping does not fit.
        CaptureError: A run gave nothing.
        ReadError: An archive cannot be read.
    """
    say = tell or (lambda _: None)
    final = Path(output)
    with replaced_folder(final, force=force) as folder, ExitStack() as stack:
        trusted, tested, tried, weights = _both(reference, target, folder, stack, rules, around, say)
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
        own, own_sides, why_not = None, (ours, theirs), _ARCHIVE
        if tried is not None:
            say("injecting")
            trusted.path = _lasting(trusted.path, folder, final)  # which the injected run's metadata name
            path = folder / "with_injection" / TARGET
            path.parent.mkdir()
            try:
                inject(
                    trusted,
                    tried.workload,
                    path,
                    mapping=known,
                    target=tested,
                    seed=tried.seed,  # as the free run had
                    around=around,
                )
                why_not = ""
            except UsageError as error:  # a tensor does not fit, or nothing belongs together
                why_not = str(error).replace(f"{folder}{os.sep}", "")
            else:
                injected = stack.enter_context(opened(path))
                own_sides = sides(trusted, injected, known)
                own = compare(*own_sides, mapping="none")
        say("diagnosing")
        suspects = [
            Suspect(
                s.module, s.class_name, s.pair, s.explanation, s.is_own, diagnose_pair(*own_sides, s.pair)
            )
            if at < _DIAGNOSED
            else s
            for at, s in enumerate(suspects_of(trusted, free, own))
        ]
        order = free.mapping.order if free.mapping else _order(free)
        found = Verification(
            final,
            checked,
            order,
            free,
            own,
            why_not,
            tried is not None and own is None,
            tuple(suspects),
            _inheriting(free, own),
            weights,
            _control(tested.run),
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


def suspects_of(reference: Archive, free: Comparison, own: Comparison | None) -> list[Suspect]:
    """Modules that are accused, the first one first.

    With an injected run, those with an error of their own, in execution order, what an earlier one within
    them explains left out. Without one, the module of the first divergence, if an error of its own is told
    from one that only grew.
    """
    comparison = own or free
    first = comparison.divergence
    found: list[Suspect] = []
    if first is not None and not first.is_growth and first.pair.status not in ABSENT:
        is_own = own is not None
        found.append(Suspect(first.module, first.class_name, first.pair, first.explanation, is_own))
    for pair in own.pairs if own is not None else ():
        if not (pair.is_required and not pair.is_green and pair.reference and _OWN & _failed(pair)):
            continue
        blamed = first_divergence(reference, [pair])
        if blamed is None or any(_is_within(one.module, blamed.module) for one in found):
            continue
        found.append(Suspect(blamed.module, blamed.class_name, pair, blamed.explanation, True))
    return found


def _failed(pair: Pair) -> set[str]:
    return {finding.test for finding in pair.findings if finding.status in ("suspect", "diverged")}


def _is_within(module: str, other: str) -> bool:
    return other in (module, ROOT_SITE) or module.startswith(f"{other}.")


class _Runs(NamedTuple):
    """Both archives, what the target's is of, and what its weights are."""

    reference: Archive
    target: Archive
    made: _Made | None
    weights: Audit | None


def _both(
    reference: Runnable | Workload | Source,
    target: Runnable | Workload | Source,
    folder: Path,
    stack: ExitStack,
    rules: str | os.PathLike[str] | None,
    around: Around | None,
    say: Callable[[str], None],
) -> _Runs:
    """Capture both sides; in between, compare the weights of unlike frameworks, as somebody adapted them."""
    made: _Made | None = None
    if isinstance(reference, (Runnable, Workload)):
        say("capturing the reference")
        made = _made(reference, None)
        reference = _captured(made, folder / REFERENCE, around)
    trusted = stack.enter_context(opened(reference))
    if not isinstance(target, (Runnable, Workload)):
        return _Runs(trusted, stack.enter_context(opened(target)), None, None)
    if isinstance(target, Runnable) and target.framework == "torch":
        made = None  # whose weights take memory, and nobody is going to look at
    tried, weights = _made(target, trusted), None
    model = tried.workload.model
    if _framework_of(trusted.run) != _framework_of(adapter_for(model).describe(model)):
        say("comparing weights")
        before = None if rules is None else read_rules(rules)
        weights = audit(trusted if made is None else made.workload.model, model, rules=before)
        if weights is not None and weights.unlike:
            count = weights.comparison.compared
            say(f"{len(weights.unlike)} of {count} weights are not the same numbers; going on")
    made = None
    say("capturing the target")
    tested = _captured(tried, folder / TARGET, around, room=("input",))
    return _Runs(trusted, stack.enter_context(opened(tested)), tried, weights)


class _Made(NamedTuple):
    """A side that is going to be run."""

    workload: Workload
    run: Mapping[str, Any]
    seed: int


def _made(side: Runnable | Workload, before: Archive | None) -> _Made:
    """The workload of a side."""
    runnable = Runnable.of(side) if isinstance(side, Workload) else side
    return _Made(*runnable.make(before), runnable.seed)


def _captured(made: _Made, path: Path, around: Around | None, room: Sequence[str] = ()) -> Path:
    adapter_for(made.workload.model).seed(made.seed)
    capture_workload(made.workload, path, run=made.run, around=around, room=room)
    return path


def _framework_of(run: Mapping[str, Any]) -> object:
    about = run.get("framework")
    return about.get("name") if isinstance(about, Mapping) else None


def _control(run: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    told = run.get("control")
    return tuple(one for one in told if isinstance(one, Mapping)) if isinstance(told, list) else ()


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
