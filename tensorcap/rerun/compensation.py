"""Compensation: what differs and is undone by what comes of it, as a norm folded into a product (RPL-50).

A replay and an injected run look at each module alone: of a convolution that a batch norm was folded into,
and of the identity in the place of that norm, each is wrong by itself, and both together are right. So the
run is made again with what differs left in place. A module that was wrong for what the other side gave it,
and is right for what this one gives itself, undoes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Protocol, TypeVar

from tensorcap.comparison import Finding, called_sites, caller_of
from tensorcap.rerun.own_errors import OwnError
from tensorcap.runs import is_inner, is_state
from tensorcap.wording import name_numbers, name_pattern
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

LEFT_OUT: Final = "left_out"  # finding of a leaf that does not undo what it is given, as others do
_HALF: Final = re.compile(r"(?<![A-Za-z0-9_])(?:encoder|decoder)(?![A-Za-z0-9_])")
_ROUNDS: Final = 3  # of runs: q, k and v, what attention makes of them, and the projection behind
_LESSENED: Final = 8.0  # times the error of what is undone, that what undoes it has without (as CMP-55)
_CHANGED: Final = 0.1  # of its error, by which that of what inherits more is another one
_WITHOUT_EFFECT: Final = 1e-4  # of its error, at most 1, or of 1 if it has another shape (as CMP-55)
_TOGETHER: Final = 4  # tensors that may make up for each other: a run for each
_TELLING: Final = 16  # elements; tensors of fewer are equal by chance
_ATTEMPTS: Final = 3  # at a set of tensors that leaves nothing else wrong


class Judged(Protocol):
    """A run whose tensors were judged."""

    @property
    def own_errors(self) -> Sequence[OwnError]:
        """One for each tensor of a module that both sides have, in execution order."""


J = TypeVar("J", bound=Judged)
Rejudge = Callable[[frozenset[str]], J]  # run again, with tensors of some key texts left in place


class Dependencies:
    """Of which tensors a tensor may have been computed, by the reference's calls.

    For what the target lacks stands what holds the same before, as a result does for the argument that hands
    it on.

    Args:
        reference: The trusted archive.
        target: The other side, under the reference's keys.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        self.target: Final = target
        self._called = called_sites(reference)
        self._records: dict[str, Record] = {}
        self._inputs: dict[tuple[int, int, str], list[Record]] = {}
        self._results_within: dict[tuple[int, int, str], list[Record]] = {}
        self._equal: dict[tuple[object, ...], list[str]] = {}
        self._of: dict[str, frozenset[str]] = {}  # once asked for
        self._through: dict[str, frozenset[str]] = {}  # likewise
        self._ancestors: dict[str, frozenset[str]] = {}  # likewise
        for record in reference.records:
            key = record.key
            kind = key.slot.partition(".")[0]
            if key.is_bare or is_inner(key) or kind not in ("input", "output"):
                continue
            self._records[key.text] = record
            if kind == "input":
                self._inputs.setdefault((key.rank, key.step, key.site), []).append(record)
            elif key.site != ROOT_SITE:
                caller = caller_of(key.site, self._called)
                self._results_within.setdefault((key.rank, key.step, caller), []).append(record)
            if contents := _contents(record):
                self._equal.setdefault(contents, []).append(key.text)

    def __contains__(self, text: str) -> bool:
        return text in self._records

    def of(self, text: str) -> frozenset[str]:
        """Key texts of what a tensor may have been computed of.

        1. A result: the arguments of its call, and results of modules that were called within it.
        2. An argument: those of the calling module, and results within that before; only those that hold
           the same, if some do.
        """
        if text not in self._of:
            self._of[text] = frozenset(self._sources(self._records[text]))
        return self._of[text]

    def _sources(self, record: Record) -> Iterator[str]:
        key = record.key
        is_argument = key.slot.startswith("input")
        site = caller_of(key.site, self._called) if is_argument else key.site
        place = key.rank, key.step, site
        earlier = [
            other
            for other in (*self._inputs.get(place, ()), *self._results_within.get(place, ()))
            if other.order < record.order
        ]
        if is_argument and (contents := _contents(record)):
            earlier = [other for other in earlier if _contents(other) == contents] or earlier
        yield from (other.key.text for other in earlier)

    def dependents(self, text: str, among: Iterable[str]) -> list[str]:
        """Of some key texts those that may be computed of a tensor, or of others that hold the same."""
        same = self.equal([text])
        return [
            other
            for other in among
            if other in self and other not in same and not same.isdisjoint(self._made_of(other))
        ]

    def equal(self, texts: Iterable[str]) -> set[str]:
        """Key texts, and those of tensors that hold the same in the reference."""
        every = set(texts)
        for text in tuple(every):
            contents = _contents(self._records[text]) if text in self._records else None
            every.update(self._equal.get(contents, ()) if contents else ())
        return every

    def is_of_leaf(self, text: str) -> bool:
        """Whether a tensor is the result of a module within which none is called."""
        key = Key.parse(text)
        is_result = key.slot.startswith("output")
        return is_result and (key.rank, key.step, key.site) not in self._results_within

    def first(self, texts: Iterable[str]) -> float:
        """The order of the first of some tensors; infinite of none."""
        return min((self._records[text].order for text in texts), default=math.inf)

    def since(self, order: float, texts: Iterable[str]) -> list[str]:
        """Those of some tensors that are not before an order of execution."""
        return sorted(text for text in texts if self._records[text].order >= order)

    def chain(self, text: str, among: Collection[str], *, through_lacking: bool = False) -> Iterator[str]:
        """What a tensor may come from, through some key texts alone; without itself.

        Args:
            text: Key text of the tensor.
            among: The key texts.
            through_lacking: Whether what the target lacks, and nothing stands for, hands on what it was made
                of.
        """
        seen, waiting = {text}, [text]
        made_of = self._made_of if through_lacking else self._of_in
        while waiting:
            for source in sorted(made_of(waiting.pop()).intersection(among)):
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
                    yield source

    def ancestors(self, text: str) -> frozenset[str]:
        """What a tensor may come from at all, as `chain` has it; without itself."""
        if text not in self._ancestors:
            seen: set[str] = set()
            waiting = [text]
            while waiting:
                fresh = self._of_in(waiting.pop()) - seen
                seen |= fresh
                waiting += fresh
            self._ancestors[text] = frozenset(seen)
        return self._ancestors[text]

    def _made_of(self, text: str) -> frozenset[str]:
        """Of what a tensor may have been computed, through what the target lacks and nothing stands for."""
        if text not in self._through:
            seen: set[str] = set()
            waiting = [text]
            while waiting:
                fresh = self._of_in(waiting.pop()) - seen
                seen |= fresh
                waiting += (one for one in fresh if one not in self.target and not self._has_stand_in(one))
            self._through[text] = frozenset(seen)
        return self._through[text]

    def _of_in(self, text: str) -> frozenset[str]:
        """Of what a tensor may have been computed, with what stands for what the target lacks."""
        sources = self.of(text)
        lacking = [one for one in sources if one not in self.target]
        if not lacking:
            return sources
        before = self._records[text].order
        return sources.union(one for one in self.equal(lacking) if self._records[one].order < before)

    def _has_stand_in(self, text: str) -> bool:
        """Whether the target has a tensor that held the same before."""
        order = self._records[text].order
        return any(self._records[one].order < order and one in self.target for one in self.equal([text]))


@dataclass(frozen=True, slots=True)
class Settled(Generic[J]):
    """A run in which what is undone was left in place.

    Attributes:
        judged: The run.
        released: Key texts of what was left in place.
        undone: What undoes a tensor, by key text: that of a result, or of an argument.
        folded: The module that does the work of another one, which hands on what it is given, by the key text
            of the other's result: both are judged as one.
        left_out: By the key text of the result of a leaf that was left out, the result of another one that
            undoes what both are given, and the leaf's own error where everything was replaced, relative.
    """

    judged: J
    released: frozenset[str] = frozenset()
    undone: Mapping[str, str] = field(default_factory=dict)
    folded: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def own_errors(self) -> tuple[OwnError, ...]:
        """Own errors, `explained` of what is undone, and of a folded module in the name of the other one."""
        return tuple(self._settled(own) for own in self.judged.own_errors)

    def _settled(self, own: OwnError) -> OwnError:
        by = self.undone.get(own.key)
        if by is not None and own.is_bad:
            site = Key.parse(by).site
            text = f"differs and is undone by {'the model' if site == ROOT_SITE else site}"
            return replace(own, status="explained", findings=(Finding("undone", 1, 0, "explained", text),))
        if own.key in self.folded and own.is_bad:
            return replace(own, module=self.folded[own.key])
        if own.key in self.left_out and own.is_bad:
            undoing, left = self.left_out[own.key]
            by = Key.parse(undoing).site
            text = f"{by} is given the same, and undoes what differs in it; this does not"
            return replace(own, findings=(*own.findings, Finding(LEFT_OUT, left, 0, own.status, text)))
        return own


def settle(
    first: J,
    rejudge: Rejudge[J],
    dependencies: Dependencies,
    *,
    explained: Collection[str] = (),
    replaced: Collection[str] = (),
    wrong_in_place: Collection[str] = (),
) -> Settled[J]:
    """Find what is undone by what is computed of it, and judge everything else with that left in place.

    1. Results of leaves that are `diverged` are left in place, with what holds the same. A tensor whose own
       error then falls to an eighth, and is not bad, undoes what it is made of.
    2. What else is wrong then may inherit it, and is left in place too, up to three rounds.
    3. Undone is what a result that undoes is made of, step by step through what was left in place, and
       further results of such a call.
    4. So is what nothing depends on, and is no result of the model: all that may be made of it is right with
       it in place and without, with an error at most 1e-4 of its own, or the comparison of the free runs
       explains it.
    5. So are tensors that make up for each other, as the gains of queries and keys do.
    6. What is undone in other layers is left in place also in a layer where what would undo it stays wrong.
       Where both of two modules stay wrong and the target's second one hands on the first one's result, they
       are a folded pair with a mistake, which is the first one's.
    7. Another run with that alone left in place has to leave nothing wrong that was right; what this may
       come from is not undone. It may leave a leaf wrong that is given what another one undoes: the leaf was
       left out of that, and is what is wrong.
    8. A mistake that was left in place may hide what is undone, by what came of it. If something is wrong by
       another error then, all is done again with the first mistake replaced, and the search counts that
       leaves less wrong.

    One tensor alone that is `diverged` is looked at if it is in place already, or the comparison explains it.

    Args:
        first: A run in which everything was replaced.
        rejudge: Runs it again.
        dependencies: Of the reference, in the target.
        explained: Key texts of what the comparison of the free runs explains.
        replaced: Key texts of what can be left in place.
        wrong_in_place: Key texts of what is known to be wrong if what is `diverged` is left in place; if some
            are given, no run is made that cannot show that anything is undone.

    Returns:
        The first run if nothing is undone.
    """
    bad = {own.key: own for own in first.own_errors if own.status == "diverged" and own.key in dependencies}
    is_in_place = bool(replaced) and dependencies.equal(bad).isdisjoint(replaced)
    if not bad or (len(bad) == 1 and not is_in_place and bad.keys().isdisjoint(explained)):
        return Settled(first)
    if wrong_in_place and not _may_be_undone(bad, first.own_errors, dependencies, replaced, wrong_in_place):
        return Settled(first)
    search = _Search(first, bad, rejudge, dependencies, explained)
    settled = search.settle()
    if mistake := search.hiding_mistake(settled.undone):
        other = _Search(first, bad, rejudge, dependencies, explained, kept=mistake).settle()
        settled = min(settled, other, key=lambda one: sum(own.is_bad for own in one.own_errors))
    return settled


def _may_be_undone(
    bad: Mapping[str, OwnError],
    own_errors: Sequence[OwnError],
    dependencies: Dependencies,
    replaced: Collection[str],
    wrong_in_place: Collection[str],
) -> bool:
    """Whether a run with something left in place may show that anything is undone.

    1. A tensor that is wrong may be right if something that it comes from is left in place: what is wrong
       itself, or comes from that.
    2. So may be all that is made of one.
    """
    wrong = dependencies.equal(bad)
    for text in bad:
        for source in dependencies.ancestors(text).intersection(replaced):
            if source in wrong or not wrong.isdisjoint(dependencies.ancestors(source)):
                return True
    first = {own.key: own for own in own_errors}
    for text in bad:
        results = [first[one] for one in dependencies.dependents(text, first)]
        is_right = results and not any(one.is_bad or one.status == "unjudged" for one in results)
        if is_right and not any(one.key in wrong_in_place for one in results):
            return True
    return False


class _Search(Generic[J]):
    """Looks for what undoes what.

    Args:
        first: A run in which everything was replaced.
        bad: Own errors of what is diverged, by key text.
        rejudge: Runs the model again.
        dependencies: Of the reference, in the target.
        explained: Key texts of what the comparison of the free runs explains.
        kept: Key texts of what is not left in place.
    """

    def __init__(
        self,
        first: J,
        bad: Mapping[str, OwnError],
        rejudge: Rejudge[J],
        dependencies: Dependencies,
        explained: Collection[str],
        *,
        kept: Collection[str] = (),
    ) -> None:
        self._first_run = first
        self._bad = bad
        self._first = {own.key: own for own in first.own_errors}
        self._rejudge = rejudge
        self._dependencies = dependencies
        self._explained = explained
        self._kept = frozenset(kept)
        self._undoing: set[str] = set()  # key texts of what undoes something
        self._firsts: dict[str, float] = {}  # order of the first tensor that one undoes
        self._unaffected: dict[str, dict[str, float]] = {}  # of each, what may be made of it and is right
        self._released: set[str] = set()  # what was left in place in any round
        self._inherits = False  # whether what is wrong may inherit an error of what was left in place

    def settle(self) -> Settled[J]:
        """What is undone, as far as a run with it left in place has nothing wrong that was right."""
        dependencies, undoing = self._dependencies, self._undoing
        undone = self._find()
        if not undone:
            return Settled(self._first_run)
        undone = {**_other_results(self._bad, undone), **undone}
        folded = _folded_pairs(self._bad, undone, undoing, dependencies)
        more = _of_other_layers(self._first_run.own_errors, self._bad, undone, undoing)
        undone = {**more, **{text: by for text, by in undone.items() if text not in more.values()}}
        undone = {**{text: by for by, text in folded.items()}, **undone}
        rejected: set[str] = set()  # what seemed to undo something, and is wrong itself
        for _ in range(_ATTEMPTS):
            released = frozenset(dependencies.equal(undone) - undoing)
            judged = self._rejudge(released)
            wrong = {own.key: own for own in judged.own_errors if own.is_bad}
            fresh = {
                text
                for text, own in wrong.items()
                if text not in released and (text in undoing or not self._was_as_bad(own))
            }
            left_out = _left_out(fresh - undoing, undone, undoing, dependencies)
            fresh -= left_out.keys()
            if not fresh:
                by_key = {text: _by(text, undone, dependencies) for text in released}
                by_key = {text: by for text, by in by_key.items() if by}
                modules = {by: Key.parse(text).site for by, text in folded.items() if text in undone}
                beside = {text: (by, self._error_before(text)) for text, by in left_out.items()}
                return Settled(judged, released, by_key, modules, beside)
            released_wrong = wrong.keys() & released
            guilty = {source for text in fresh for source in dependencies.chain(text, released_wrong)}
            left = {text: by for text, by in undone.items() if text not in guilty and by not in fresh}
            rejected |= undoing & fresh
            undoing -= fresh
            if len(left) == len(undone):  # what is wrong itself would be left in place, as it undoes nothing
                left = {text: by for text, by in undone.items() if text not in rejected}
            if not left or len(left) == len(undone):
                break
            undone = left
        return Settled(self._first_run)

    def _find(self) -> dict[str, str]:
        """What undoes a tensor, by key text."""
        undone: dict[str, str] = {}
        leaves = [text for text in self._bad if self._dependencies.is_of_leaf(text)]
        first = self._dependencies.equal(leaves or self._bad)
        released = {text for text in first if not _is_of_model(text)} - self._kept
        for _ in range(_ROUNDS):
            self._released |= released
            owns = {own.key: own for own in self._rejudge(frozenset(released)).own_errors}
            wrong = {text for text, own in owns.items() if own.is_bad}
            undoing = [text for text in self._bad if text in owns and self._is_undoing(owns[text])]
            self._undoing.update(undoing)
            self._inherits |= any(map(self._is_otherwise_wrong, owns.values()))
            for text in (one for one in self._bad if one in self._undoing):
                chain = {*self._dependencies.chain(text, wrong & released, through_lacking=True)}
                start = self._firsts.setdefault(text, self._dependencies.first(chain))
                for source in self._dependencies.since(start, chain):  # what comes before grew from a mistake
                    undone.setdefault(source, text)
            for text, by in self._without_effect(owns, undone):
                undone.setdefault(text, by)
            released -= self._dependencies.equal(self._undoing) - wrong
            stays = released | self._undoing | self._kept
            inheriting = {text for text in wrong - stays if not _is_of_model(text)}
            if not inheriting:
                break
            more = self._dependencies.equal(self._next(inheriting, wrong)) - stays
            if not undoing and not self._may_change(more, undone):
                break
            released |= more
        return {**self._made_up(undone), **undone}

    def hiding_mistake(self, undone: Collection[str]) -> set[str]:
        """Key texts of the first mistake that was left in place, if what is wrong may have inherited it.

        Args:
            undone: Key texts of what is undone, and no mistake.
        """
        mistakes = [text for text, own in self._first.items() if own.is_bad and text in self._released]
        mistake = next((text for text in mistakes if text not in undone), None)
        return self._dependencies.equal([mistake]) if mistake and self._inherits else set()

    def _was_as_bad(self, own: OwnError) -> bool:
        """Whether a tensor that is wrong was as bad in the first run."""
        before = self._first.get(own.key)
        return before is not None and (before.status == "diverged" or before.status == own.status)

    def _error_before(self, text: str) -> float:
        """The own error of a tensor in the first run; 0 if none is defined."""
        before = self._first.get(text)
        return (before.error or 0.0) if before is not None else 0.0

    def _may_change(self, released: Collection[str], undone: Collection[str]) -> bool:
        """Whether what is wrong, or is made of it, may come from some tensors that are left in place next."""
        left = [text for text in self._bad if text not in undone]
        for text in left:
            for one in (text, *self._dependencies.dependents(text, self._first)):
                if not self._dependencies.ancestors(one).isdisjoint(released):
                    return True
        return False

    def _next(self, inheriting: Collection[str], wrong: Collection[str]) -> Iterator[str]:
        """What is to be left in place next, of what inherits an error.

        What comes of a tensor that may yet be right, since what it is made of is still replaced, has to wait:
        it would carry a mistake there on to what follows.
        """
        waiting = {
            text
            for text in self._bad
            if text in wrong and not self._dependencies.of(text).isdisjoint(inheriting)
        }
        for text in (one for one in self._first if one in inheriting):
            if self._dependencies.of(text).isdisjoint(waiting):
                yield text
            else:
                waiting.add(text)

    def _without_effect(
        self, owns: Mapping[str, OwnError], undone: Collection[str]
    ) -> Iterator[tuple[str, str]]:
        """What nothing depends on, with the first tensor that may be made of it."""
        self._unaffected = {}
        for text, own in self._bad.items():
            if text in undone or text in self._undoing or text not in owns or not owns[text].is_bad:
                continue
            handed_out = set(filter(_is_handed_out, self._dependencies.equal([text]))) - {*self._explained}
            if any(run[one].is_bad for one in handed_out for run in (self._first, owns) if one in run):
                continue
            dependents = self._dependencies.dependents(text, self._first)
            results = [run[one] for run in (self._first, owns) for one in dependents if one in run]
            if not results or any(one.is_bad or one.status == "unjudged" for one in results):
                continue
            error = 1.0 if own.error is None or not own.error <= 1 else own.error
            largest = max((one.error or 0.0 for one in results), default=0.0)
            is_exact = largest <= _WITHOUT_EFFECT * error
            if is_exact or text in self._explained:
                yield text, dependents[0]
            else:
                self._unaffected[text] = dict.fromkeys(dependents, largest)

    def _made_up(self, undone: Collection[str]) -> dict[str, str]:
        """What makes up for each other, each with the first tensor that is right for all of them alone.

        All that may be made of them is right with the other side's in place and with this one's. That it
        depends on them shows where one alone is left in place: an error eight times as large is not green.
        Each shows it, whatever their order: one that does not may hide the other, and spares its group more
        runs, as does one whose own error is smaller than theirs.
        """
        groups = self._groups([text for text in self._unaffected if text not in undone])
        groups = [group for group in groups if not any(map(self._is_hidden, group))]
        proofs: dict[str, str] = {}
        for number in range(_TOGETHER):
            groups = [group for group in groups if all(one in proofs for one in group[:number])]
            alone = [group[number] for group in groups if number < len(group)]
            if not alone:
                break
            owns = {
                own.key: own for own in self._rejudge(frozenset(self._dependencies.equal(alone))).own_errors
            }
            for text in alone:
                errors = self._unaffected[text].items()
                wrong = (by for by, error in errors if by in owns and self._is_wrong_by(owns[by], error))
                if (by := next(wrong, None)) is not None:
                    proofs[text] = by
        return {
            text: proofs[text] for group in groups if all(one in proofs for one in group) for text in group
        }

    def _is_hidden(self, text: str) -> bool:
        """Whether a tensor has a smaller error than what is made of it, and is right."""
        error = self._bad[text].error
        return error is not None and error < max(self._unaffected[text].values())

    def _groups(self, texts: Sequence[str]) -> list[list[str]]:
        """Two to `_TOGETHER` tensors of which the same may be made."""
        groups: list[list[str]] = []
        for text in texts:
            with_it = [
                g for g in groups if any(self._unaffected[o].keys() & self._unaffected[text] for o in g)
            ]
            groups = [group for group in groups if group not in with_it]
            groups.append([*(one for group in with_it for one in group), text])
        return [group for group in groups if 1 < len(group) <= _TOGETHER]

    @staticmethod
    def _is_wrong_by(own: OwnError, error: float) -> bool:
        """Whether a tensor is diverged with an error far above another one."""
        return own.status == "diverged" and own.error is not None and own.error >= _LESSENED * error

    def _is_undoing(self, own: OwnError) -> bool:
        """Whether a tensor that was wrong is right now, for what is left in place."""
        is_right = not own.is_bad and own.status != "unjudged"
        return own.key not in self._undoing and is_right and self._is_less(own)

    def _is_otherwise_wrong(self, own: OwnError) -> bool:
        """Whether a tensor is still wrong, with another error: it may inherit some now."""
        before = self._bad[own.key].error if own.key in self._bad else None
        if not own.is_bad or not before or own.error is None:
            return False
        return abs(own.error - before) > _CHANGED * before

    def _is_less(self, own: OwnError) -> bool:
        """Whether a tensor that was wrong has an eighth of its error, for what is left in place."""
        before = self._bad[own.key].error
        return before is None or own.error is None or _LESSENED * own.error <= before


def _other_results(bad: Collection[str], undone: Mapping[str, str]) -> dict[str, str]:
    """Further results of calls of which one is undone, as logits beside the choice that is made of them."""
    keys = {text: Key.parse(text) for text in (*bad, *undone)}
    by_call = {keys[text].where: by for text, by in undone.items() if keys[text].slot.startswith("output")}
    return {
        text: by_call[keys[text].where]
        for text in bad
        if keys[text].where in by_call and keys[text].slot.startswith("output")
    }


def _of_other_layers(
    own_errors: Sequence[OwnError],
    bad: Collection[str],
    undone: Mapping[str, str],
    undoing: Collection[str],
) -> dict[str, str]:
    """What is undone in other layers, and in this one is not, since what would undo it has a mistake, too.

    Both are judged as one there: what differs alike in all layers is left in place, and its user is accused.
    An encoder and a decoder are two layers of a kind.
    """
    patterns = {(name_pattern(text), name_pattern(by)) for text, by in undone.items()}
    by_name = {_layer(text): text for text in bad if text not in undoing}
    more: dict[str, str] = {}
    for text in (own.key for own in own_errors if own.key not in undone and own.key not in undoing):
        name, numbers = _layer(text)
        for pattern, by in sorted(patterns):
            user = by_name.get((by, numbers))
            if name == pattern and user is not None and user != text:
                more.setdefault(text, user)
    for text, user in ((_in_other_half(text), _in_other_half(by)) for text, by in undone.items()):
        if text in bad and text not in undone and user in bad and user not in undoing and user != text:
            more.setdefault(text, user)
    return more


def _left_out(
    fresh: Collection[str], undone: Mapping[str, str], undoing: Collection[str], dependencies: Dependencies
) -> dict[str, str]:
    """Results of leaves that do not undo what they are given, with the result of one that does."""
    undoers: dict[str, str] = {}
    for text, by in undone.items():
        arguments = dependencies.equal(dependencies.of(by)) if by in undoing else set[str]()
        if text in arguments and dependencies.is_of_leaf(by):
            undoers |= dict.fromkeys(arguments, by)
    return {
        text: undoers[argument]
        for text in fresh
        if dependencies.is_of_leaf(text)
        for argument in dependencies.of(text)
        if len(dependencies.of(text)) == 1 and argument in undoers
    }


def _folded_pairs(
    bad: Mapping[str, OwnError],
    undone: Collection[str],
    undoing: Collection[str],
    dependencies: Dependencies,
) -> dict[str, str]:
    """Results of modules that hand on what they are given in the target, each with that of the one before."""
    pairs: dict[str, str] = {}
    target = dependencies.target
    left = {text for text in bad if text not in undone and text not in undoing and text in target}
    among = dependencies.equal(left).difference(undone)
    results = {text: target.get(text).digest for text in left if Key.parse(text).slot.startswith("output")}
    for text, digest in results.items():
        for source in sorted(dependencies.chain(text, among)):
            if digest and results.get(source) == digest and source not in dependencies.equal([text]):
                pairs[text] = source
    return pairs


def _by(text: str, undone: Mapping[str, str], dependencies: Dependencies) -> str:
    """What undoes a tensor, or what holds the same; "" if nothing does."""
    return next((undone[one] for one in (text, *sorted(dependencies.equal([text]))) if one in undone), "")


def _layer(text: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of a key text, and the numbers of its layer."""
    return name_pattern(text), tuple(name_numbers(text))


def _in_other_half(text: str) -> str:
    """A key text with encoder for decoder, and the other way round."""
    return _HALF.sub(lambda half: "decoder" if half[0] == "encoder" else "encoder", text)


def _is_of_model(text: str) -> bool:
    key = Key.parse(text)
    return key.site == ROOT_SITE and key.slot.startswith("output")


def _is_handed_out(text: str) -> bool:
    """Whether a tensor is a result of the model, but for states, which the model alone reads."""
    return _is_of_model(text) and not is_state(Key.parse(text))


def _contents(record: Record) -> tuple[object, ...]:
    """What a tensor holds, by its digest; empty if that says little."""
    if not record.digest or record.size < _TELLING:
        return ()
    return record.key.rank, record.key.step, record.digest, record.shape
