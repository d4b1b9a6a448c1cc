"""Results in which a port has folded a factor or an operation; what is made of them next agrees (CMP-260).

A port may have a scale in the weights of a product that the reference has behind it, or hand on what an
activation makes, which the reference applies in each of its users. Whether that is so follows from the
reference alone and from the first tensors behind: no other mistake of the port hides it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from tensorcap.comparison.pair import Pair
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.policy_tests import judge_total_error
from tensorcap.comparison.ranking import error_of
from tensorcap.comparison.robust_errors import sample
from tensorcap.runs import Call, Contents, calls_of, contents_of, is_inner, is_state, is_telling, rms_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_CLEARLY: Final = 8.0  # times smaller than the error itself is what it leaves behind, as in CMP-55
_MUCH: Final = 4.0  # times smaller is what remains of a difference once both sides have the same factor
_VARIED: Final = 0.05  # the least share of squares that is not that of channels' means
_RESIZED: Final = 1.1  # the ratio of the sizes of two tensors of which one has another factor
_ROUNDINGS: Final = 16.0  # of the values that are added, by which a sum of two tensors may be off
_NEXT: Final = 8  # tensors that code makes after one, which may be made of it
_TERMS: Final = 6  # tensors before one that may be added to another
_FEWEST: Final = 4  # elements that a factor of one channel is taken from
_MOST_SCORES: Final = 1 << 22  # of a router, that are read as a whole
_SAMPLE: Final = 1 << 14  # elements of each tensor that are read

_Place = tuple[int, int, str, int]  # rank, step, site, call


@dataclass(frozen=True, slots=True)
class _Use:
    """A tensor that is another one times a factor for the whole or for each channel, plus a term.

    Attributes:
        term: What is added; None if nothing is.
        own: Values of the other one in the reference, or a part of them.
        share: These times their factors.
        shape: By which they are of channels.
        norm: Of what is made.
    """

    term: Record | None
    own: Array
    share: Array
    shape: tuple[int, ...]
    norm: float

    def left_by(self, other: Array) -> float:
        """The norm of what other values, with the same factors, would change in what is made."""
        factors = _factors(self.own.reshape(self.shape), self.share.reshape(self.shape))
        return (
            0.0
            if factors is None
            else float(np.linalg.norm(factors * (other - self.own).reshape(self.shape)))
        )

    def is_right(self, known: Pair, other: Array) -> bool:
        """Whether what is made is equal, with an error far below what other values would leave in it."""
        error = error_of(known)
        return known.is_equal and error is not None and _CLEARLY * error * self.norm <= self.left_by(other)


class FoldedResults:
    """Finds tensors that differ by what a port has folded into them.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the same keys.
        pairs: All pairs, judged.
    """

    def __init__(self, reference: Archive, target: Archive, pairs: Sequence[Pair]) -> None:
        self._reference, self._target = reference, target
        self._calls = calls_of(reference)
        self._pairs = {pair.key: pair for pair in pairs if pair.reference is not None}
        self._made: dict[_Place, list[Record]] = {}  # by the code of a call, once asked for

    def why_folded(self, pair: Pair) -> str:
        """Why a tensor that differs is no mistake, whatever else is wrong; "" if nothing says so.

        1. The target holds the weights of chosen experts, scattered over all, which the call returns besides.
        2. The reference gives it to leaves alone that the target does not call, and the target holds what one
           of them makes of it, with values that are equal where they are known.
        3. Of what the reference's code makes after it, a tensor is that one, times a factor for the whole or
           for each channel, plus another tensor or none. All such tensors that were compared are equal, and
           their error is at most an eighth of what the difference would leave in them; or the target's is
           made likewise with other factors, and these leave at most a quarter of the difference.
        """
        record, tested = pair.reference, pair.target
        if record is None or tested is None or not self._may_be_folded(pair, record, tested):
            return ""
        try:
            return (
                self._why_scattered(record, tested)
                or self._why_called_in_it(pair, record, tested)
                or self._why_undone(record, tested)
            )
        except ReadError:
            return ""

    def is_folded(self, key: str) -> bool:
        """Whether the target's tensor is the reference's but for what a port may fold into it.

        That is a factor for the whole or for each channel, what a leaf that the reference gives it to makes
        of it, or chosen experts' weights in the place of the scores of all. By itself it may be a mistake.

        Args:
            key: Key text of the tensor, in both.
        """
        if key not in self._reference or key not in self._target:
            return False
        record, tested = self._reference.get(key), self._target.get(key)
        if not (_are_alike(record, tested) and record.stored and tested.stored):
            return False
        try:
            if self._why_scattered(record, tested):
                return True
            made = self._read(self._target, tested)
            unit = _ROUNDINGS * _coarser_unit(record, tested)
            results = [r for call in self._takers(record) for r in call.outputs if r.shape == record.shape]
            if any(_distance(made, self._read(self._reference, r)) <= unit for r in results if r.stored):
                return True
            own = self._read(self._reference, record)
            return any(
                (factors := _factors(own.reshape(shape), made.reshape(shape))) is not None
                and _distance((factors * own.reshape(shape)).reshape(-1), made) <= unit
                for shape in _by_channels(record, own.size)
            )
        except ReadError:
            return False

    def changes_of_next(self, key: str) -> dict[str, float]:
        """By how much the target's tensor would change what the reference's code makes of it next (CMP-260).

        That is what is made of it by a factor for the whole or for each channel, plus another tensor or none.

        Args:
            key: Key text of the tensor, in both.

        Returns:
            Relative changes, no unit, by key text of what is made.
        """
        if key not in self._reference or key not in self._target:
            return {}
        record, tested = self._reference.get(key), self._target.get(key)
        if not (_are_alike(record, tested) and record.stored and tested.stored and is_telling(record)):
            return {}
        try:
            own, other = self._read(self._reference, record), self._read(self._target, tested)
            if not (np.isfinite(own).all() and np.isfinite(other).all()):
                return {}
            uses = {
                made.key.text: self._use(made, call, record, own) for call, made in self._made_next(record)
            }
            return {text: use.left_by(other) / use.norm for text, use in uses.items() if use is not None}
        except ReadError:
            return {}

    def _may_be_folded(self, pair: Pair, record: Record, tested: Record) -> bool:
        key = record.key
        return (
            self._reference.is_ordered
            and self._reference.trusts_digests
            and pair.is_compared
            and not (key.is_bare or is_inner(key) or is_state(key))
            and key.slot.partition(".")[0] in ("input", "output")
            and _are_alike(record, tested)
            and record.stored
            and tested.stored
            and is_telling(record)
        )

    def _why_scattered(self, record: Record, tested: Record) -> str:
        """By which results of its call a tensor holds chosen experts' weights alone; "" if by none."""
        call = self._call_of.get(record.key.text)
        precision = POLICY.precision_of_runs(self._reference.info, self._target.info)
        if call is None or precision is None or record.size > _MOST_SCORES or len(record.shape) < 2:
            return ""
        rows, experts = record.size // record.shape[-1], record.shape[-1]
        for chosen in (r for r in call.outputs if r.dtype.is_whole and r.stored):
            for weights in (r for r in call.outputs if r.shape == chosen.shape and r.dtype.kind == "float"):
                if not weights.stored or chosen.size % rows or not rows < chosen.size < record.size:
                    continue
                choices = self._reference.load(chosen).reshape(rows, -1).astype(np.int64)
                if choices.min() < 0 or choices.max() >= experts:
                    continue
                scattered = np.zeros((rows, experts))
                np.put_along_axis(
                    scattered, choices, self._reference.load(weights).reshape(rows, -1).astype(np.float64), 1
                )
                values = self._target.load(tested).astype(np.float64).reshape(-1)
                error = _distance(values, scattered.reshape(-1))
                finding = judge_total_error(
                    error, self._calls.depth(record), precision, elements=record.size, times=POLICY.rough
                )
                if finding.status == "within-rounding":
                    name = weights.key.text
                    return f"it has the weights of {name}, each in its expert's place, and else zeros"
        return ""

    @cached_property
    def _call_of(self) -> dict[str, Call]:
        return {record.key.text: call for call in self._calls.calls for record in call.outputs}

    def _why_called_in_it(self, pair: Pair, record: Record, tested: Record) -> str:
        """By which leaf that the target does not call a tensor holds more than the reference's."""
        leaves = [call for call in self._takers(record) if not self._calls.called_by.get(call.place)]
        if not leaves or any(self._is_compared(r) for leaf in leaves for r in (*leaf.inputs, *leaf.outputs)):
            return ""
        error = error_of(pair) or 0.0
        for leaf in leaves:
            for result in leaf.outputs:
                known = self._known(result)
                if result.shape != record.shape or known is None or not known.is_equal:
                    continue
                least = _ROUNDINGS * _coarser_unit(record, tested)
                apart = _distance(self._read(self._target, tested), self._read(self._reference, result))
                if apart <= max(least, 2 * (error_of(known) or 0.0)) and apart * _CLEARLY <= error:
                    return f"it holds what {leaf.site} makes of it, which the target does not call"
        return ""

    def _why_undone(self, record: Record, tested: Record) -> str:
        """By which tensors that code makes of it next a difference is undone."""
        nexts = [
            (call, made, known)
            for call, made in self._made_next(record)
            if (known := self._known(made)) is not None
        ]
        if not any(known.is_equal for _, _, known in nexts) and not (nexts and _is_resized(record, tested)):
            return ""
        own, other = self._read(self._reference, record), self._read(self._target, tested)
        if not (np.isfinite(own).all() and np.isfinite(other).all()):
            return ""
        why = ""
        for call, made, known in nexts:
            use = self._use(made, call, record, own)
            if use is None:
                continue
            if not (use.is_right(known, other) or self._has_other_factor(use, known, record, other)):
                return ""
            name = "the model" if call.site == ROOT_SITE else call.site
            what = "agrees" if known.is_equal else "is made with another factor"
            why = why or f"it differs, and {known.key}, which the code of {name} makes of it, {what}"
        return why

    def _use(self, made: Record, call: Call, record: Record, own: Array) -> _Use | None:
        """How a tensor is made of another one; None if it is not.

        Args:
            made: What may be made of it, as many elements.
            call: Whose code makes it.
            record: The tensor.
            own: The reference's values of it, or a part of them.
        """
        if made.size > _SAMPLE and made.shape != record.shape:
            return None
        values = self._read(self._reference, made)
        norm = float(np.linalg.norm(values))
        if not (norm and np.isfinite(values).all()):
            return None
        for term in self._terms(made, call, record):
            added = None if term is None else self._read(self._reference, term)
            for shape in _by_channels(record, own.size):
                share = _share(own, values, added, shape, made)
                if share is not None:
                    return _Use(term, own, share, shape, norm)
        return None

    def _has_other_factor(self, use: _Use, known: Pair, record: Record, other: Array) -> bool:
        """Whether the target makes what is made of a tensor with another factor, and nearly the same share.

        That differs by no more than comes of what the call was given that made the tensor.

        Args:
            use: How the reference makes it.
            known: The pair of what is made.
            record: The tensor.
            other: The target's values of it.
        """
        made, added = known.target, None
        if made is None or not made.stored or made.dtype.kind != "float":
            return False
        if use.term is not None:
            term = self._known(use.term)
            if term is None or term.target is None or not term.target.stored:
                return False
            added = self._read(self._target, term.target)
        values = self._read(self._target, made)
        if len(values) != len(other) or (added is not None and len(added) != len(other)):
            return False
        share = _share(other, values, added, use.shape, made)
        if share is None:
            return False
        call = self._call_of.get(record.key.text)
        given = [self._known(one) for one in call.inputs] if call is not None else []
        inherited = max((error_of(pair) or 0.0 for pair in given if pair is not None), default=0.0)
        apart = float(np.linalg.norm(share - use.share))
        is_inherited = apart <= _MUCH * inherited * float(np.linalg.norm(use.share))
        return is_inherited and _MUCH * apart <= use.left_by(other)

    def _terms(self, made: Record, call: Call, record: Record) -> Iterator[Record | None]:
        """Tensors that may be added to one in what is made of it, the last before that first; or none."""
        yield None
        known = [*call.inputs]
        for child in self._calls.called_by.get(call.place, ()):
            known += [*child.inputs, *child.outputs]
        own, terms = contents_of(record), dict[Contents, Record]()
        for other in sorted(known, key=lambda r: -r.order):
            is_before = other.order < made.order and other.shape == made.shape and other.stored
            is_other = contents_of(other) not in (own, contents_of(made))
            if is_before and is_other and other.dtype.kind == "float":
                terms.setdefault(contents_of(other), other)
        yield from itertools.islice(terms.values(), _TERMS)

    def _takers(self, record: Record) -> list[Call]:
        """Calls that are given a tensor."""
        return [call for call, is_given in self._holders(record) if is_given]

    def _holders(self, record: Record) -> list[tuple[Call, bool]]:
        """Calls that are given a tensor, or return it, from it on, and which of both."""
        return [
            (call, is_given)
            for call, is_given, order in self._by_contents.get(contents_of(record), ())
            if order >= record.order
        ]

    @cached_property
    def _by_contents(self) -> dict[Contents, list[tuple[Call, bool, int]]]:
        by_contents: dict[Contents, list[tuple[Call, bool, int]]] = {}
        for call in self._calls.calls:
            for is_given, records in ((True, call.inputs), (False, call.outputs)):
                for record in records:
                    if record.digest:
                        holder = call, is_given, record.order
                        by_contents.setdefault(contents_of(record), []).append(holder)
        return by_contents

    def _made_next(self, record: Record) -> list[tuple[Call, Record]]:
        """What code that has a tensor makes after it, with as many elements: by each call, the first few."""
        scopes: dict[_Place, Call] = {}
        for call, is_given in self._holders(record):
            around = self._calls.callers[call.place]
            for scope in (call, around) if is_given else (around,):
                if scope is not None:
                    scopes.setdefault(scope.place, scope)
        nexts: list[tuple[Call, Record]] = []
        for scope in scopes.values():
            made = (r for r in self._made_by(scope) if r.order > record.order and r.size == record.size)
            own = contents_of(record)
            nexts += [(scope, r) for r in itertools.islice((r for r in made if contents_of(r) != own), _NEXT)]
        return nexts

    def _made_by(self, scope: Call) -> list[Record]:
        """Tensors that the code of a call makes itself: what it neither is given nor gets from a call."""
        if scope.place not in self._made:
            children = self._calls.called_by.get(scope.place, ())
            given = {contents_of(r) for r in (*scope.inputs, *(r for c in children for r in c.outputs))}
            made: dict[Contents, Record] = {}
            for record in sorted(
                [*(r for child in children for r in child.inputs), *scope.outputs], key=lambda r: r.order
            ):
                if record.dtype.kind == "float" and record.stored and is_telling(record):
                    made.setdefault(contents_of(record), record)
            left = [record for contents, record in made.items() if contents not in given]
            self._made[scope.place] = left if children else []
        return self._made[scope.place]

    def _known(self, record: Record) -> Pair | None:
        """The pair of a tensor, or of what holds the same, that was compared; the one that agrees best."""
        pairs = [
            pair
            for call, _, _ in self._by_contents.get(contents_of(record), ())
            for other in (*call.inputs, *call.outputs)
            if contents_of(other) == contents_of(record)
            and (pair := self._pairs.get(other.key.text)) is not None
            and pair.is_compared
        ]
        return min(pairs, key=lambda pair: (not pair.is_equal, error_of(pair) or 0.0), default=None)

    def _is_compared(self, record: Record) -> bool:
        pair = self._pairs.get(record.key.text)
        return pair is not None and pair.is_compared

    def _read(self, archive: Archive, record: Record) -> Array:
        return sample(archive, record, _SAMPLE)


def _are_alike(record: Record, tested: Record) -> bool:
    """Whether two tensors are of floats, and of one shape."""
    return record.shape == tested.shape and record.dtype.kind == tested.dtype.kind == "float"


def _is_resized(record: Record, tested: Record) -> bool:
    """Whether two tensors are of clearly unlike sizes, as what a mistake hands on hardly is."""
    sizes = rms_of(record), rms_of(tested)
    return min(sizes) > 0 and max(sizes) > _RESIZED * min(sizes)


def _coarser_unit(record: Record, tested: Record) -> float:
    """The larger unit roundoff of two tensors; 0 if it is not known."""
    return max(UNIT_ROUNDOFFS.get(one.dtype.name, 0.0) for one in (record, tested))


def _by_channels(record: Record, size: int) -> Iterator[tuple[int, ...]]:
    """Shapes of a part of a tensor's elements: all in one, by the last axis, by the second one of images.

    Axes of a shape but for the last but one count elements of one factor.
    """
    yield 1, size, 1, 1
    if not record.shape:
        return
    columns = record.shape[-1]
    if size % columns == 0 and size >= _FEWEST * columns:
        yield 1, size // columns, columns, 1
    if len(record.shape) == 4 and size == record.size:
        batch, channels, *area = record.shape
        if batch * math.prod(area) >= _FEWEST:
            yield batch, 1, channels, math.prod(area)


def _share(
    own: Array, values: Array, added: Array | None, shape: tuple[int, ...], made: Record
) -> Array | None:
    """A tensor times its factors if that, and what is added, make another one but for rounding; else None."""
    rest = values if added is None else values - added
    factors = _factors(own.reshape(shape), rest.reshape(shape))
    if factors is None or not np.isfinite(rest).all():
        return None
    share: Array = (factors * own.reshape(shape)).reshape(-1)
    size = max(float(np.linalg.norm(each)) for each in (values, *(() if added is None else (added,))))
    left = float(np.linalg.norm(rest - share))
    unit = _ROUNDINGS * UNIT_ROUNDOFFS.get(made.dtype.name, math.inf)
    return share if left <= unit * size and _CLEARLY * left <= float(np.linalg.norm(share)) else None


def _factors(own: Array, made: Array) -> Array | None:
    """By what a tensor has to be multiplied to be another one, for each channel.

    None if it is zero in a channel, or nearly the same number all over it, which any other one fits.
    """
    axes = (0, 1, 3)
    squares = np.sum(own * own, axis=axes, keepdims=True)
    varied = np.sum(np.square(own - own.mean(axis=axes, keepdims=True)), axis=axes)
    if not np.all(squares) or varied.sum() < _VARIED * squares.sum():
        return None
    factors: Array = np.sum(own * made, axis=axes, keepdims=True) / squares
    return factors


def _distance(values: Array, others: Array) -> float:
    """The norm of a difference over that of the others, no unit; infinite if they are not finite."""
    norm = float(np.linalg.norm(others))
    apart = float(np.linalg.norm(values - others)) / norm if norm and len(values) == len(others) else math.inf
    return apart if math.isfinite(apart) else math.inf
