"""What tests of the policy and of a replay, and families of hypotheses, decide alone on the zoo.

An entry is captured once. It is compared as it is, and again with the failing findings of one test excused;
its replay is judged once, and again without the findings of one test; what explains the guilty module is
looked for again without each family that has an explanation.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from tensorcap.comparison import ABSENT, Finding, compare
from tensorcap.comparison.policy_tests import TESTS, Context, PolicyTest
from tensorcap.diagnosis import (
    FAMILIES,
    Diagnosis,
    Explanation,
    Family,
    Hypothesis,
    PairContext,
    Search,
    diagnose,
    rank_explanations,
)
from tensorcap.localization import Localization, find_mistake, localize, ranking
from tensorcap.rerun import BAD, OwnError
from tensorcap.session import capture_workload
from tests.zoo.catalogue import ENTRIES
from tests.zoo.deep_mistakes import MISTAKES as DEEP_MISTAKES
from tests.zoo.deep_models import archive_of, make
from tests.zoo.effect import is_exercised
from tests.zoo.entry import DTYPES, Entry, Mistake, build
from tests.zoo.localisers import zoo_kind

Test = tuple[str, str]  # class, name of the findings

LEVELS: Final = ("module", "op")
DEEP: Final = "deep twin"
SETTINGS: Final = (*LEVELS, DEEP)
POLICY_TESTS: Final = tuple((type(test).__name__, name) for test in TESTS for name in test.names)
MECHANISMS: Final[Mapping[str, tuple[str, Callable[..., Any]]]] = {  # what is put in the place of what
    "second looks": (
        "tensorcap.comparison.policy_tests.gains.RobustVerdict.of",
        lambda _, first, measured, **__: (first, *measured),
    ),
    "flipped experts": ("tensorcap.comparison.judge.find_flips", lambda *_, **__: []),
    "reordered rows": ("tensorcap.comparison.judge.aligned_errors", lambda *_: {}),
    "cancellation": ("tensorcap.comparison.policy_tests.growth.cancellation_scale", lambda *_: 1.0),
    "padding": ("tensorcap.comparison.judge.Padding.without", lambda _, pair: pair),
    "masks": ("tensorcap.comparison.judge.judge_masks", lambda _, __, pair, ___: pair),
    "agreement": ("tensorcap.comparison.pipeline.explain_by_agreement", lambda _, __, pairs, *___: pairs),
    "passed through": ("tensorcap.comparison.pipeline.judge_pass_through", lambda _, __, pairs, *___: pairs),
}
EVIDENCE: Final = ("replay", "archives")  # with the reference's model and without
REPLAY_TESTS: Final = ("own_error_leaf", "own_error_composite", "twin_ratio", "ulp_share", "outlier_element")
FAMILY_NAMES: Final = tuple(family.name for family in FAMILIES)
_WRONG_LAYER: Final = 3
_FAILING: Final = ("suspect", "diverged")
_FAMILY: Final = "family"  # the fact that names the family of an explanation


@dataclass(frozen=True)
class Verdict:
    """What a comparison says of a target.

    Attributes:
        is_red: Whether a required pair is suspect or worse.
        module: That of the first divergence; None if there is none, or something is only absent.
    """

    is_red: bool
    module: str | None


@dataclass
class Naming:
    """How a mistake is named.

    Attributes:
        kind: The kind of the zoo that is named; None if there is none.
        is_right: Whether it is true.
        without: By family that has an explanation, whether the kind is right without it.
    """

    kind: str | None
    is_right: bool
    without: dict[str, bool] = field(default_factory=dict)


@dataclass
class Trial:
    """What decided on one entry in one dtype.

    Attributes:
        entry: Its name.
        dtype: Of the target.
        guilty: Sites that are right answers; none if nobody should be accused.
        compared: By setting, the verdict of all tests.
        without: By setting and test, the verdict without a test that failed somewhere; by setting and
            mechanism if it differs.
        replayed: By test, whether a module that should be accused is so by it, and whether by it alone.
        named: By evidence, how the guilty module's mistake is named, if it is a suspect.
    """

    entry: str
    dtype: str
    guilty: frozenset[str]
    compared: dict[str, Verdict] = field(default_factory=dict)
    without: dict[tuple[str, Test | str], Verdict] = field(default_factory=dict)
    replayed: dict[str, bool] = field(default_factory=dict)
    named: dict[str, Naming] = field(default_factory=dict)

    @property
    def is_mistake(self) -> bool:
        """Whether it is a mistake that the inputs exercise."""
        return bool(self.guilty)


@dataclass(frozen=True)
class _Excused:
    """A test of the policy whose findings of one name never fail; what fails is added to `failing`."""

    test: PolicyTest
    excused: Test | None
    failing: set[Test]

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        for key, finding in self.test.judge(context):
            test = type(self.test).__name__, finding.test
            if finding.status in _FAILING:
                self.failing.add(test)
            yield key, replace(finding, status="within-rounding") if test == self.excused else finding


def try_apart(names: Sequence[str], parts: Sequence[str]) -> list[Trial]:
    """Try entries of one architecture in both dtypes, in a process of its own.

    Args:
        names: Of the entries.
        parts: `policy`, `hypotheses` or both.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in itertools.product(names, DTYPES):
            try:
                trials.append(_try(ENTRIES[name], dtype, parts, Path(folder)))
            except Exception as failure:  # whatever it is, the others count
                print(f"{name}, {dtype}: left out: {type(failure).__name__}: {failure}", file=sys.stderr)
    print(f"{ENTRIES[names[0]].architecture}: done", file=sys.stderr)
    return trials


def try_deep_apart(architecture: str) -> list[Trial]:
    """Compare bfloat16 twins of a deep model, right ones and wrong ones, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        for layers, scale, names in (
            (32, 0.02, [""]),
            (32, 0.06, [""]),
            (32, 0.15, [""]),
            (8, 0.06, DEEP_MISTAKES),
        ):
            reference, target = Path(folder) / f"{layers}-{scale}.h5", Path(folder) / "target.h5"
            archive_of(make(architecture, std=scale, layers=layers), reference)
            for name in names:
                if name == "without_one_plus" and architecture != "gemma2":
                    continue
                twin = make(architecture, std=scale, layers=layers, dtype="bfloat16")
                guilty = {DEEP_MISTAKES[name](twin, _WRONG_LAYER)} if name else ()
                trial = Trial(f"{architecture} {scale} {name}", "bfloat16", frozenset(guilty))
                archive_of(twin, target)
                _compare_each_way(trial, DEEP, partial(compare, reference, target))
                trials.append(trial)
    print(f"deep {architecture}: done", file=sys.stderr)
    return trials


def _try(entry: Entry, dtype: str, parts: Sequence[str], folder: Path) -> Trial:
    pair = build(entry, dtype)
    is_mistake = isinstance(entry, Mistake) and is_exercised(entry, dtype)
    guilty = {entry.guilty, *entry.also} if isinstance(entry, Mistake) and is_mistake else ()
    trial = Trial(entry.name, dtype, frozenset(guilty))
    mapping = None
    if not isinstance(entry, Mistake) and entry.mapping is not None:
        mapping = folder / f"{entry.name}.toml"
        mapping.write_text(entry.mapping)
    for level in LEVELS if "policy" in parts else LEVELS[:1]:
        reference, target = folder / f"reference-{level}.h5", folder / f"target-{level}.h5"
        if not reference.exists():
            capture_workload(pair.reference, reference, level=level)
        torch.manual_seed(0)
        capture_workload(pair.target, target, level=level)
        if "policy" in parts:
            _compare_each_way(trial, level, partial(compare, reference, target, mapping=mapping))
        if level == "module":
            run = partial(localize, reference, target, mapping=mapping)
            with_model = partial(run, reference_model=replace(pair.reference, seed=0))
            localization = _name_each_way(trial, "replay", entry, with_model, parts)
            own_errors = [
                own for own in localization.own_errors if not trial.guilty or own.module in trial.guilty
            ]
            trial.replayed = dict(_deciding(own_errors))
            if "hypotheses" in parts and trial.is_mistake:
                _name_each_way(trial, "archives", entry, run, parts)
        target.unlink()
    return trial


def _compare_each_way(trial: Trial, level: str, run: Callable[[], Any]) -> None:
    def verdict(excused: Test | None = None) -> tuple[Verdict, set[Test]]:
        failing: set[Test] = set()
        tests = tuple(_Excused(test, excused, failing) for test in TESTS)
        with patch("tensorcap.comparison.judge.TESTS", tests):
            comparison = run()
        divergence = comparison.divergence
        is_named = divergence is not None and divergence.pair.status not in ABSENT
        is_red = any(pair.status in BAD for pair in comparison.pairs if pair.is_required)
        return Verdict(is_red, divergence.module if is_named else None), failing

    trial.compared[level], failing = verdict()
    for test in failing:
        trial.without[level, test], _ = verdict(test)
    for mechanism, (name, replacement) in MECHANISMS.items():
        with patch(name, replacement):
            less, _ = verdict()
        if less != trial.compared[level]:
            trial.without[level, mechanism] = less


def _name_each_way(
    trial: Trial, by: str, entry: Entry, run: Callable[[], Localization], parts: Sequence[str]
) -> Localization:
    """Localize once; diagnose the guilty module again without each family that has an explanation."""
    truths = {entry.kind, *entry.also_kinds} if isinstance(entry, Mistake) else set()
    original, holding = ranking._diagnose, set[str]()

    def ranked(explanations: Sequence[Explanation]) -> tuple[Explanation, ...]:
        holding.update(str(e.facts[_FAMILY]) for e in explanations if e.is_within)
        return rank_explanations(explanations)

    def watched(examination: Any, *, has_makers: bool) -> Diagnosis | None:
        module = examination.evidence.module
        if module not in trial.guilty or by in trial.named or "hypotheses" not in parts:
            return original(examination, has_makers=has_makers)
        holding.clear()
        with (
            patch("tensorcap.diagnosis.diagnosis.FAMILIES", tuple(map(_tagged, FAMILIES))),
            patch("tensorcap.diagnosis.diagnosis.rank_explanations", ranked),
        ):
            whole = original(examination, has_makers=has_makers)
        naming = trial.named[by] = Naming(_kind_of(whole), _kind_of(whole) in truths)
        for family in sorted(holding):
            with patch("tensorcap.localization.ranking.diagnose", partial(diagnose, without={family})):
                again = replace(examination, search=Search())
                left = original(again, has_makers=has_makers)
                naming.without[family] = _kind_of(left) in truths
        return whole

    with patch("tensorcap.localization.ranking._diagnose", watched):
        return run()


def _tagged(family: Family) -> Family:
    """The family, whose hypotheses say that they are of it."""

    def propose(context: PairContext) -> Iterator[Hypothesis]:
        for hypothesis in family.propose(context):
            yield replace(hypothesis, facts={**hypothesis.facts, _FAMILY: family.name})

    return replace(family, propose=propose)


def _kind_of(diagnosis: Diagnosis | None) -> str | None:
    mistake = find_mistake(diagnosis)
    return zoo_kind(mistake.kind if mistake else None)


def _deciding(own_errors: Iterable[OwnError]) -> Iterator[tuple[str, bool]]:
    """Tests that a tensor failed, each with whether no other one failed on any."""
    failing = [{f.test for f in own.findings if f.status in _FAILING} for own in own_errors if own.is_bad]
    for test in set().union(*failing):
        yield test, not any(tests - {test} for tests in failing)


def policy_rows(trials: Sequence[Trial]) -> Iterator[tuple[object, ...]]:
    """By setting and test: mistakes that fail it, red and named by it alone; the same of correct ports."""
    for level in SETTINGS:
        for test in POLICY_TESTS:
            failed = red = named = unnamed = port_failed = port_red = 0
            for trial in trials:
                if (level, test) not in trial.without:
                    continue
                whole, less = trial.compared[level], trial.without[level, test]
                is_red_alone = whole.is_red and not less.is_red
                if trial.is_mistake:
                    failed += 1
                    red += is_red_alone
                    named += whole.module in trial.guilty and less.module not in trial.guilty
                    unnamed += whole.module not in trial.guilty and less.module in trial.guilty
                else:
                    port_failed += 1
                    port_red += is_red_alone
            is_shared = sum(name == test[1] for _, name in POLICY_TESTS) > 1
            label = f"{test[1]} of {test[0]}" if is_shared else test[1]
            yield level, label, failed, red, named, unnamed, port_failed, port_red


def mechanism_rows(trials: Sequence[Trial]) -> Iterator[tuple[object, ...]]:
    """By setting and mechanism: what becomes of mistakes and of correct ports without it."""
    for level in SETTINGS:
        for name in MECHANISMS:
            changed = [
                (t, t.compared[level], t.without[level, name]) for t in trials if (level, name) in t.without
            ]
            mistakes = [(t.guilty, whole, less) for t, whole, less in changed if t.is_mistake]
            yield (
                level,
                name,
                sum(whole.is_red and not less.is_red for _, whole, less in mistakes),
                sum(whole.module in g and less.module not in g for g, whole, less in mistakes),
                sum(whole.module not in g and less.module in g for g, whole, less in mistakes),
                sum(less.is_red and not whole.is_red for t, whole, less in changed if not t.is_mistake),
                sum(whole.is_red and not less.is_red for t, whole, less in changed if not t.is_mistake),
            )


def replay_rows(trials: Sequence[Trial]) -> Iterator[tuple[object, ...]]:
    """By test of a replay: mistakes whose module fails it, by it alone; correct ports accused, likewise."""
    for test in REPLAY_TESTS:
        mistakes = [t.replayed[test] for t in trials if t.is_mistake and test in t.replayed]
        ports = [t.replayed[test] for t in trials if not t.is_mistake and test in t.replayed]
        yield test, len(mistakes), sum(mistakes), len(ports), sum(ports)


def family_rows(trials: Sequence[Trial]) -> Iterator[tuple[object, ...]]:
    """By family: mistakes it explains, named right only with it, wrong because of it; kinds of the first."""
    for family in FAMILY_NAMES:
        cells: list[object] = []
        kinds: set[str] = set()
        for by in EVIDENCE:
            namings = [t.named[by] for t in trials if by in t.named and family in t.named[by].without]
            alone = [n for n in namings if n.is_right and not n.without[family]]
            wrong = [n for n in namings if not n.is_right and n.without[family]]
            kinds.update(str(n.kind) for n in alone)
            cells += [len(namings), len(alone), len(wrong)]
        yield family, *cells, ", ".join(sorted(kinds))
