"""Where an error of two free runs begins, and which errors lead to nothing: by what is computed of what.

What is computed of what follows from the reference alone: an argument that holds what an earlier tensor
holds was handed on; any other one, and the result of a call with calls within it, was made by the code of a
call, of the arguments of that call and of results of calls in it; the result of a leaf was made of its
arguments; if none were recorded, of the last result beside it. A tensor is *known* if it, or one that
holds the same in the reference, was compared.

The *origin* of an error is found from the first tensor that has it, backwards through all tensors that are
not known, down to those that are: the module is the smallest one around all code that lies between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Final

import numpy as np

from tensorcap.comparison import (
    POLICY,
    Finding,
    GivenValues,
    Givers,
    Limits,
    Pair,
    Precision,
    called_sites,
    caller_of,
    error_of,
    sample,
)
from tensorcap.runs import Call, calls_of, enclosing_sites, is_state, is_telling
from tensorcap.wording import number_and_limit
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_FEWEST_ROWS: Final = 16  # below, a median of rows may be that of tokens with other experts
_HEALED: Final = 8.0  # times smaller an error is that does not come of another one, as in CMP-55
_DEPENDS: Final = 0.3  # correlation of two tensors of many elements of which one is made of the other
_OF_SCORES: Final = 4.0  # exponentials of scores of up to 25 have 25 times their relative error
_NEXT: Final = 16  # tensors behind the first that differs that may come of the same mistake, as q, k and v
_SAMPLE: Final = 1 << 16  # elements that a correlation is taken over


@dataclass(slots=True)
class Gap:
    """All that lies between a tensor and what is known of what it is made of.

    Attributes:
        modules: Sites of the modules whose code, or whose leaf, lies in it.
        operands: Pairs of the known tensors at its beginning.
        depth: Count of results that are not known, one made of the other, along its longest way.
    """

    modules: dict[str, None] = field(default_factory=dict)
    operands: dict[str, Pair] = field(default_factory=dict)
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Jump:
    """An error that does not come of what is known before it.

    Attributes:
        pair: The tensor that has it.
        gap: What lies between.
        finding: Both errors, and the limit.
    """

    pair: Pair
    gap: Gap
    finding: Finding


class ErrorOrigins:
    """What errors of two free runs begin with, and which lead to nothing.

    Args:
        reference: The trusted archive, as it was compared; its order of execution counts.
        target: The target under the same keys.
        pairs: All pairs of both.
    """

    def __init__(self, reference: Archive, target: Archive, pairs: Sequence[Pair]) -> None:
        self._reference, self._target = reference, target
        self._calls = calls_of(reference)
        self._is_of_results = bool(reference.info.modules) and not has_arguments(reference)
        self._precision = POLICY.precision_of_runs(reference.info, target.info)
        self._values = GivenValues(reference, target)
        self._pairs = {pair.key: pair for pair in pairs if pair.reference is not None}
        self._call_of = {
            r.key.text: call for call in self._calls.calls for r in (*call.inputs, *call.outputs)
        }
        self._sites = {call.site for call in self._calls.calls}
        self._called = called_sites(reference)
        self._givers = Givers.of_pairs(reference, pairs)
        self._parents, self._children = self._calls.callers, self._calls.called_by
        self._alike: dict[tuple[object, ...], list[Record]] = {}
        for record in sorted(self._records(), key=lambda record: record.order):
            if is_telling(record):
                self._alike.setdefault(_contents(record), []).append(record)
        self._undone: dict[str, bool] = {}
        self._find_undone(pairs)

    def _records(self) -> Iterator[Record]:
        return (record for call in self._calls.calls for record in (*call.inputs, *call.outputs))

    # errors that lead to nothing

    def is_undone(self, pair: Pair) -> bool:
        """Whether a tensor differs, and what is computed of it does not."""
        return self._undone.get(pair.key, False)

    def _find_undone(self, pairs: Sequence[Pair]) -> None:
        differing = [p for p in pairs if p.key in self._call_of and p.is_compared and not p.is_green]
        for pair in differing:
            self._undone[pair.key] = self._leads_to_nothing(pair)

    def _leads_to_nothing(self, pair: Pair) -> bool:
        record, error = pair.reference, error_of(pair)
        if record is None or not error or not self._reference.is_ordered or is_state(record.key):
            return False
        call = self._call_of[record.key.text]
        scope = call if record in call.inputs else self._parents[call.place]
        if scope is None:
            return False
        followers = [r for r in self._made_within(scope) if r.order > record.order and r.dtype.is_inexact]
        own = _contents(record)
        alike = [self._pairs.get(r.key.text) for r in followers if _contents(r) == own]
        if any(other is not None and other.is_compared and self._agrees(pair, other) for other in alike):
            return True
        results = {r.key.text for r in scope.outputs}
        handed_out = (p for p in alike if p is not None and p.key in results and p.is_compared)
        for other in handed_out:  # states are for the model alone
            is_known = other.is_green or (other.reference is not None and is_state(other.reference.key))
            if not is_known and not self._leads_to_nothing(other):
                return False
        earlier = {_contents(r) for r in self._made_within(scope) if r.order <= record.order}
        made = [r for r in followers if _contents(r) != own and _contents(r) not in earlier]
        known = [(r, p) for r in made if (p := self._known(r)) is not None]
        if any(r.key.text in results for r, _ in known) and all(self._agrees(pair, p) for _, p in known):
            return True
        nearest = next(((r, p) for r, p in known if r.size == record.size), None)
        return (
            record in call.outputs
            and nearest is not None
            and self._agrees(pair, nearest[1])
            and nearest[0] is made[0]
            and self._correlation(record, nearest[0]) >= _DEPENDS
        )

    def _made_within(self, scope: Call) -> list[Record]:
        """Tensors that the code of a call makes: arguments of calls in it, and its results, in order."""
        records = [r for child in self._children.get(scope.place, ()) for r in child.inputs]
        return sorted([*records, *scope.outputs], key=lambda record: record.order)

    def _agrees(self, pair: Pair, follower: Pair) -> bool:
        """Whether a tensor that comes after another one is so much less wrong that it does not come of it."""
        before, after = error_of(pair), error_of(follower)
        if before is None or after is None or not follower.is_green:
            return False
        size, next_size = _rms(pair.reference), _rms(follower.reference)
        if after * _HEALED > before:
            return False
        return size is None or next_size is None or after * next_size * _HEALED <= before * size

    def _correlation(self, one: Record, other: Record) -> float:
        """The size of the cosine of two tensors of as many elements, of a part of them."""
        if one.size != other.size or not (one.stored and other.stored):
            return 0.0
        if one.size > _SAMPLE and one.shape != other.shape:
            return 0.0
        x, y = (sample(self._reference, record, _SAMPLE) for record in (one, other))
        norm = math.sqrt(float(x @ x) * float(y @ y))
        return abs(float(x @ y)) / norm if norm and math.isfinite(norm) else 0.0

    # where an error begins

    def first_jump(self, pairs: Iterable[Pair]) -> Jump | None:
        """The first tensor of low precision whose error does not come of what is known of its operands.

        The error is above the limit of `code_gain` times those of all operands and of one rounding of each
        tensor in between, once for each block that lies in between.

        Returns:
            None if there is none.
        """
        for pair in pairs:
            record, error = pair.reference, _row_error(pair)
            if (
                record is None
                or pair.target is None
                or error is None
                or pair.is_green
                or not pair.is_required
            ):
                continue
            if not pair.is_compared or pair.key not in self._call_of or is_state(record.key):
                continue
            if not record.dtype.is_inexact or self.is_undone(pair) or self._is_told_otherwise(pair):
                continue
            precision = POLICY.precision_of_pair(self._precision, record, pair.target)
            if precision.is_wide:
                continue
            gap = self.gap(pair)
            inputs = self._error_before(pair, gap)
            if not gap.modules or inputs is None:
                continue
            is_router = any(map(self._calls.is_router, gap.modules))
            finding = _judge(pair, gap, error, inputs, precision, is_router=is_router)
            if finding.status == "diverged":
                return Jump(pair, gap, finding)
        return None

    def _is_told_otherwise(self, pair: Pair) -> bool:
        """Whether a result is of a call that is given no tensors, and other values than the reference's."""
        if pair.reference is None or pair.target is None:
            return False
        call = self._call_of[pair.key]
        return not call.inputs and not self._values.are_equal(pair.reference.key, pair.target.key)

    def _error_before(self, pair: Pair, gap: Gap) -> float | None:
        """The largest error of the operands of a gap, in units of the tensor behind it; None if not known.

        So is that of all earlier steps, of which caches hold something. It is not known where routers may
        have chosen other experts for one of few tokens.
        """
        record = pair.reference
        assert record is not None
        if any(map(self._may_choose, gap.modules)) and record.size < _FEWEST_ROWS * record.shape[-1]:
            return None
        errors = [0.0]
        for operand in gap.operands.values():
            error = _row_error(operand)
            if error is None:
                return None
            errors.append(error)
            if operand.reference is not None and operand.reference.shape == record.shape:
                errors.append(self._handed_on(operand, pair))
        if record.key.step:
            errors += [
                error
                for other in self._pairs.values()
                if other.reference is not None
                and other.reference.key.step < record.key.step
                and other.is_compared
                and other.key in self._call_of
                and not self.is_undone(other)
                and (error := _row_error(other)) is not None
            ]
        return max(errors)

    def _handed_on(self, operand: Pair, result: Pair) -> float:
        """How much of a result's error is that of a term of it, in units of the result.

        What cancels makes a relative error larger; the result's error lies then along the term's, and is no
        larger than it.
        """
        own, other = self._errors(result), self._errors(operand)
        size = _rms(result.reference)
        if own is None or other is None or not size or not other.any():
            return 0.0
        norm = math.sqrt(float(other @ other))
        return min(abs(float(own @ other)) / norm, norm) / math.sqrt(len(own)) / size

    def _errors(self, pair: Pair) -> Array | None:
        """What a target's tensor differs by, of a part of its elements; None if that is not known."""
        ours, theirs = pair.reference, pair.target
        if (
            ours is None
            or theirs is None
            or not (ours.stored and theirs.stored)
            or ours.shape != theirs.shape
        ):
            return None
        errors = sample(self._target, theirs, _SAMPLE) - sample(self._reference, ours, _SAMPLE)
        return errors if np.isfinite(errors).all() else None

    def _may_choose(self, site: str) -> bool:
        return "expert" in site.lower() or self._calls.is_router(site)

    def module_of(self, pair: Pair, pairs: Sequence[Pair]) -> str:
        """The smallest module that is called around all that an error may have been made in; "" if unknown.

        That is what lies before the tensor, as far as it lies before the next ones, too, that differ though
        all that is known before them is right: one mistake is behind all of them.

        Args:
            pair: The tensor that has the error.
            pairs: All pairs, in order of execution.
        """
        modules = dict(self.gap(pair).modules)
        call = self._call_of.get(pair.key)
        if call is not None and call.site in modules and self._are_known(call.inputs):
            modules = {
                site: None for site in modules if site == call.site or site.startswith(f"{call.site}.")
            }
        differing = [p for p in pairs if p.key in self._call_of and p.is_compared and not p.is_green]
        at = next((at for at, other in enumerate(differing) if other.key == pair.key), len(differing))
        for other in differing[at + 1 : at + 1 + _NEXT] if len(modules) > 1 else ():
            gap = self.gap(other)
            if all(operand.is_equal for operand in gap.operands.values()):
                modules = {site: None for site in modules if site in gap.modules} or modules
        site = _common(list(modules))
        while site and site != ROOT_SITE and site not in self._sites:
            site = site.rpartition(".")[0] or ROOT_SITE
        return site

    def gap(self, pair: Pair) -> Gap:
        """What lies between a tensor and what is known of what it is made of."""
        gap = Gap()
        record = pair.reference
        if record is not None and record.key.text in self._call_of and self._reference.is_ordered:
            self._go_back(record, gap, set(), depth=0)
        return gap

    def _go_back(self, record: Record, gap: Gap, seen: set[str], *, depth: int) -> None:
        """Follow a tensor that is not known, or the one that the gap ends with, to what it is made of."""
        if record.key.text in seen:
            return
        seen.add(record.key.text)
        gap.depth = max(gap.depth, depth)
        call = self._call_of[record.key.text]
        is_argument = record in call.inputs
        earlier = [r for r in self._alike.get(_contents(record), ()) if r.order < record.order]
        earlier = [r for r in earlier if r.key.rank == record.key.rank]
        if earlier:
            known = [pair for r in earlier if (pair := self._pair_known(r)) is not None]
            if known:  # handed on by whoever hands on another one
                gap.modules[self._givers.of(record) if is_argument else call.site] = None
                gap.operands[known[0].key] = known[0]
            else:
                self._go_back(earlier[0], gap, seen, depth=depth)
            return
        maker = self._parents[call.place] if is_argument else call
        if maker is None:
            return
        own = self._pairs.get(record.key.text)
        is_left_out = own is not None and own.status == "never-called" and self._parents[maker.place]
        gap.modules[is_left_out.site if is_left_out else maker.site] = None
        if self._is_of_results and not is_argument:
            self._go_around(call, gap)
        before = [r for child in self._children.get(maker.place, ()) for r in child.outputs]
        before = [r for r in before if r.order < record.order and not self._is_proven(r, maker)]
        arguments = [r for r in maker.inputs if r.order < record.order and r.dtype.is_inexact]
        if any(self._known(r) is not None for r in arguments):
            arguments = [r for r in arguments if self._known(r) is not None]
        elif not is_argument and (beside := self._made_beside(record, call)):  # what it was given is right
            gap.operands.update((pair.key, pair) for pair in beside)
            return
        for operand in (*before, *arguments):
            pair = self._known(operand)
            if pair is not None:
                gap.operands[pair.key] = pair
            elif operand.dtype.is_inexact:
                self._go_back(operand, gap, seen, depth=depth + 1)

    def _made_beside(self, record: Record, call: Call) -> list[Pair]:
        """What a call makes besides one of its results, in floats, if all that is known of it is equal.

        What it hands on, or chooses in whole numbers, says nothing of its arguments.
        """
        pairs = [
            pair
            for other in call.outputs
            if other.dtype.is_inexact
            and other.key != record.key
            and not any(r.order < call.start for r in self._alike.get(_contents(other), ()))
            and (pair := self._known(other)) is not None
        ]
        return pairs if all(pair.is_equal for pair in pairs) else []

    def _go_around(self, call: Call, gap: Gap) -> None:
        """Add the code around a call whose arguments were not recorded, out to what holds a known result.

        Nothing is added if it holds one itself.
        """
        around = call.site
        while True:
            for other in reversed(self._within.get((*call.place[:2], around), ())):
                known = self._known(other.outputs[-1]) if other.end < call.end and other.outputs else None
                if known is not None:
                    gap.operands[known.key] = known
                    if caller_of(other.site, self._called) != around:
                        gap.modules[around] = None
                    return
            gap.modules[around] = None
            if around == ROOT_SITE:
                return
            around = caller_of(around, self._called)

    @cached_property
    def _within(self) -> Mapping[tuple[int, int, str], Sequence[Call]]:
        """Calls in execution order, by rank, step, and site of each module around theirs."""
        calls: dict[tuple[int, int, str], list[Call]] = {}
        for call in self._calls.calls:
            for outer in enclosing_sites(call.site):
                calls.setdefault((*call.place[:2], outer), []).append(call)
        return calls

    def _are_known(self, arguments: Sequence[Record]) -> bool:
        """Whether all floating arguments of a call are known, and there are some."""
        floats = [record for record in arguments if record.dtype.is_inexact]
        return bool(floats) and all(self._known(record) is not None for record in floats)

    def _is_proven(self, record: Record, scope: Call) -> bool:
        """Whether a tensor that is not known is given to calls whose results are known, and equal."""
        if self._known(record) is not None:
            return False
        calls = [
            self._call_of[r.key.text]
            for r in self._alike.get(_contents(record), ())
            if r.order > record.order and r in self._call_of[r.key.text].inputs
        ]
        pairs = [self._known(r) for call in calls for r in call.outputs]
        return bool(pairs) and all(pair is not None and pair.is_equal for pair in pairs)

    def _pair_known(self, record: Record) -> Pair | None:
        """The pair of a record itself if it was compared, and does not differ without leading to anything."""
        pair = self._pairs.get(record.key.text)
        if pair is None or not pair.is_compared or self._undone.get(pair.key):
            return None
        return pair

    def _known(self, record: Record) -> Pair | None:
        """The pair of a record, or of another one that holds the same; the one that agrees best."""
        records = [record, *self._alike.get(_contents(record), ())]
        pairs = [pair for r in records if (pair := self._pair_known(r)) is not None]
        return min(pairs, key=lambda pair: error_of(pair) or 0.0) if pairs else None


def has_arguments(run: Archive) -> bool:
    """Whether arguments of any module but the model were recorded."""
    return any(call.inputs for call in calls_of(run).calls if call.site != ROOT_SITE)


def _contents(record: Record) -> tuple[object, ...]:
    """What records of one value on a rank have in common, in whichever steps: a cache is handed on."""
    return record.key.rank, record.digest, record.dtype.name, record.shape


def _judge(
    pair: Pair, gap: Gap, error: float, inputs: float, precision: Precision, *, is_router: bool
) -> Finding:
    """Judge the error behind a gap by that before it (LCL-260), which may hold the scores of a router."""
    blocks = {block for site in gap.modules if (block := _block(site))}
    limits = POLICY.sampled(POLICY.code_gain, pair.elements).scaled(max(1, len(blocks)))
    if is_router:
        limits = limits.scaled(_OF_SCORES)
    limits = Limits(limits.green, limits.green)  # the whole error is not green either
    gain = error / math.hypot(inputs, 2 * precision.rounding * math.sqrt(1 + gap.depth))
    shown, limit = number_and_limit(gain, limits.green, 3)
    text = (
        f"error at most {inputs:.2g} in all that is known of what it was made of, {error:.2g} in it: "
        f"gain {shown}, at most {limit}"
    )
    return limits.finding("code_gain", gain, text)


def _row_error(pair: Pair) -> float | None:
    """The error of the median row, or of the whole tensor if its rows are too short."""
    error = pair.row_error if pair.is_compared else None
    return error_of(pair) if error is None else error


def _rms(record: Record | None) -> float | None:
    statistics = record.statistics if record is not None else None
    if record is None or statistics is None or statistics.l2 is None:
        return None
    return statistics.l2 / math.sqrt(max(1, record.size))


def _block(site: str) -> str:
    """A site up to its first part that is a number; "" if there is none."""
    parts = site.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _common(sites: Sequence[str]) -> str:
    """The smallest module around all of some sites; "" of none.

    Example:
        >>> _common(["layers.1.mlp", "layers.1.norm"]), _common(["norm"]), _common(["norm", "@root"])
        ('layers.1', 'norm', '@root')
    """
    if not sites:
        return ""
    first, *others = [[] if site == ROOT_SITE else site.split(".") for site in sites]
    for other in others:
        shared = takewhile(lambda parts: parts[0] == parts[1], zip(first, other, strict=False))
        first = [part for part, _ in shared]
    return ".".join(first) or ROOT_SITE
