"""Pairs whose target is another value of the graph, or has other mask constants (SYN-10 to SYN-13).

A compiler keeps a table of which operation holds the value of which node. Where it fused operations, the one
that it names may hold the value of a later node: the product of gate and up projection in the place of the
gate, a batch norm's result in that of the convolution. Such a pair differs, and nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.alignment import placement_of
from tensorcap.alignment.node_sequences import without_ones
from tensorcap.comparison.node_flow import NodeFlow
from tensorcap.comparison.pair import Decision, Finding, Pair, Status, decide
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.policy_tests import judge_total_error
from tensorcap.runs import Value, calls_of, is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError, TensorNotFoundError
from tensorcap_formats.float_formats import MASK_SENTINELS
from tensorcap_formats.keys import Key, unescape
from tensorcap_formats.records import Record

HELD: Final = "another_value"  # name of the finding
MASKED: Final = "mask_constants"
_DIFFERENT: Final[tuple[Status, ...]] = ("suspect", "diverged", "nonfinite", "shape-mismatch")
_LEAST: Final = 16  # elements; fewer are equal by chance
_CLEARLY: Final = 8.0  # how much nearer another value has to be than the pair's own
_EXACT: Final = 4.0  # roundings by which two operations of one run may differ that hold one value
_REACH: Final = 4  # computations between a node and those that are looked at: a fused product is two away
_ANY: Final = 1 << 30  # computations
_MOST_ELEMENTS: Final = 1 << 24  # of a tensor that is read for it
_MASKED: Final = -1e4  # and lower, where the other side has a mask constant
_OPEN: Final = -1e3  # what is not masked is above it: no value lies between, so that none is taken for a mask


def explain_held_values(
    reference: Archive, target: Archive, pairs: Sequence[Pair], precision: Precision | None
) -> list[Pair]:
    """Make `explained` what differs because the target's operation holds another node's value.

    1. Of a pair that differs, nodes near it in the reference's graph whose values have the target's shape are
       looked at: up to 4 computations away, and those in its module and in the module around it.
    2. The target holds the value of one of them if it agrees with the reference's value of it within what the
       policy allows of the whole error, and is at least 8 times nearer to it than to its own; or if it agrees
       with the target's own value of it but for rounding, and the reference's two values differ.
    3. A value that is computed from the node is held by no mistake. Of any other one (an argument, as if the
       operation were skipped; a neighbour, as if two were exchanged), all that is computed from the node has
       to agree, too.

    Mask constants that both sides have at the same places (-inf, -65504, -3.4e38) count as equal.

    Args:
        reference: The trusted archive.
        target: The archive under test, of a compiled program; nothing is explained of others.
        pairs: Their pairs, judged.
        precision: What both runs computed in; nothing is explained if it is not known.
    """
    if not target.info.operation_map or precision is None:
        return list(pairs)
    pairs = [_with_masks_apart(reference, target, pair, precision) for pair in pairs]
    search = _Search(reference, target, precision, NodeFlow(reference, target, pairs))
    holders = {pair.key: held for pair in pairs if _is_different(pair) and (held := search.held(pair))}
    return [_explained(pair, holders.get(pair.key), search, holders) for pair in pairs]


def is_held(pair: Pair) -> bool:
    """Whether the target holds the value of another node in the place of a pair."""
    return any(finding.test == HELD for finding in pair.findings)


@dataclass(frozen=True, slots=True)
class _Held:
    """Which node's value the target holds, and how far it is from it."""

    place: str
    error: float
    is_later: bool
    text: str


def _explained(pair: Pair, held: _Held | None, search: _Search, holders: dict[str, _Held]) -> Pair:
    if held is None or not (held.is_later or search.is_agreed_after(pair, holders)):
        return pair
    finding = Finding(HELD, held.error, 0.0, "explained", held.text)
    return decide(pair, Decision("agreement", "explained", held.text, (finding,)))


def _is_different(pair: Pair) -> bool:
    return (
        pair.status in _DIFFERENT
        and pair.reference is not None
        and pair.target is not None
        and is_inner(pair.reference.key)
        and pair.target.stored
        and _LEAST <= pair.target.size <= _MOST_ELEMENTS
    )


@dataclass(frozen=True)
class _Search:
    """Looks for the value that an operation of the target holds."""

    reference: Archive
    target: Archive
    precision: Precision
    flow: NodeFlow

    def held(self, pair: Pair) -> _Held | None:
        """Find the nearest node whose value the target holds in a pair's place; None if it is none."""
        assert pair.reference is not None
        assert pair.target is not None
        place = pair.reference.key.where
        if place not in self.flow.nodes:
            return None
        values = self._load(self.target, pair.target)
        if values is None or np.ptp(values) == 0:
            return None
        own = self._load(self.reference, pair.reference) if pair.reference.size == values.size else None
        own_error = math.inf if own is None else distance(values, own)
        shape = self._shape(pair)
        norm = float(np.linalg.norm(values[np.isfinite(values)]))
        for candidate in self._candidates(place):
            name = unescape(Key.parse(f"{candidate}/op").site.partition(":")[2])
            for text, value in self._outputs(candidate, shape):
                other = self._read(value, norm)
                error = math.inf if other is None else distance(values, other)
                if error * _CLEARLY < own_error and self._is_rounding(error, pair):
                    return self._holding(place, candidate, error, f"the target holds the value of {name}")
                theirs = self._own_value(text, shape)
                if theirs is None or distance(values, theirs) > _EXACT * self.precision.unit:
                    continue
                other = self._read(value)
                if own is None or other is None or distance(own, other) > _CLEARLY * self.precision.unit:
                    text = f"the target holds its own value of {name}, which is judged there"
                    return self._holding(place, candidate, error, text)
        return None

    def _holding(self, place: str, candidate: str, error: float, text: str) -> _Held:
        is_later = candidate in self.flow.within(place, _ANY, self.flow.users)
        return _Held(candidate, error, is_later, text)

    def is_agreed_after(self, pair: Pair, holders: dict[str, _Held]) -> bool:
        """Whether there are nodes computed from a pair's with compared values, and all of them are equal."""
        assert pair.reference is not None
        place = pair.reference.key.where

        def is_known(other: str) -> bool:
            return any(p.is_compared and p.key not in holders for p in self.flow.pairs(other))

        users = self.flow.nearest_users(place, is_known)
        compared = [p for user in users for p in self.flow.pairs(user) if p.is_compared]
        return bool(compared) and all(p.is_equal for p in compared)

    def _candidates(self, place: str) -> Iterator[str]:
        """Nodes near one: those computed from it and those it is computed from, the nearest first; others."""
        near = self.flow.within(place, _REACH, self.flow.inputs)
        near |= self.flow.within(place, _REACH, self.flow.users)
        yield from sorted(near, key=lambda other: near[other])
        module = self.flow.nodes[place].module
        parent, _, last = module.rpartition(".")
        is_of_list = last.isdigit() or not parent  # a list of layers is no module around one
        around = module if is_of_list else parent
        for other in self.flow.nodes.values():
            is_within = f"{other.module}.".startswith(f"{around}.")
            if is_within and other.where not in near and other.where != place:
                yield other.where

    def _outputs(self, place: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Value]]:
        """Outputs of a node that have a shape, but for axes of length 1, with their key texts."""
        for value in self.flow.nodes[place].outputs:
            if not self.flow.is_of_reference:
                text = f"{place}/{value.name}"
                value = Value(value.name, text if text in self.reference else None)
            own = value.view.shape if value.view is not None else None
            if own is None and value.key is not None and value.key in self.reference:
                own = self.reference.get(value.key).shape
            if own is not None and without_ones(own) == shape:
                yield f"{place}/{value.name}", value

    def _read(self, value: Value, norm: float | None = None) -> Array | None:
        """A value of floats of the reference, flat, in float64; None if it cannot be read.

        Args:
            value: An output of a node.
            norm: Norm of another tensor; of one that is farther from it than by half, nothing is read: a
                difference of norms is the least that the norm of a difference can be.
        """
        assert self.flow.graph is not None
        record = self.reference.get(value.key) if value.key in self.reference and value.key else None
        known = None if record is None else record.statistics
        is_whole = value.view is None or (record is not None and record.size == math.prod(value.view.shape))
        if norm is not None and is_whole and known is not None and known.l2 is not None:
            is_finite = not (known.nan or known.posinf or known.neginf)
            if is_finite and abs(known.l2 - norm) > known.l2 / 2:
                return None
        try:
            whole = self.reference.load(record) if record is not None and value.view is None else None
            array = np.asarray(self.flow.graph.read(value) if whole is None else whole)
        except (ReadError, TensorNotFoundError):
            return None
        return array.reshape(-1).astype(np.float64) if array.dtype.kind == "f" else None

    def _own_value(self, text: str, shape: tuple[int, ...]) -> Array | None:
        """The target's own value of a node of the reference."""
        if text not in self.target:
            return None
        record = self.target.get(text)
        is_alike = record.stored and without_ones(self._shape_of(record)) == shape
        return self._load(self.target, record) if is_alike else None

    def _shape(self, pair: Pair) -> tuple[int, ...]:
        assert pair.target is not None
        return without_ones(self._shape_of(pair.target))

    def _shape_of(self, record: Record) -> tuple[int, ...]:
        """The shape that the target's operation gave a tensor, before it was placed beside another."""
        placed = placement_of(self.target, record.key.text)
        return record.shape if placed is None else placed[1].shape

    def _is_rounding(self, error: float, pair: Pair) -> bool:
        assert pair.reference is not None
        depth = calls_of(self.reference).depth(pair.reference)
        size = pair.reference.size
        finding = judge_total_error(error, depth, self.precision, elements=size, times=POLICY.rough)
        return finding.status == "within-rounding"

    def _load(self, archive: Archive, record: Record) -> Array | None:
        """A tensor of floats, flat, in float64; None if it is none, or cannot be read."""
        if record.dtype.kind != "float" or not record.stored:
            return None
        try:
            values: Array = archive.load(record).reshape(-1).astype(np.float64)
        except ReadError:
            return None
        return values


def distance(values: Array, others: Array) -> float:
    """Norm of the difference over the norm of the others, no unit; infinite if they are not finite alike.

    Args:
        values: float64, any shape.
        others: float64, the same shape.

    Example:
        >>> distance(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
        0.1
    """
    finite = np.isfinite(values)
    if not np.array_equal(finite, np.isfinite(others)):
        return math.inf
    norm = float(np.linalg.norm(others[finite]))
    error = float(np.linalg.norm(values[finite] - others[finite]))
    return error / norm if norm else (math.inf if error else 0.0)


def _with_masks_apart(reference: Archive, target: Archive, pair: Pair, precision: Precision) -> Pair:
    """Judge a pair without the elements that are a mask constant on one side and as low on the other."""
    ours, theirs = pair.reference, pair.target
    if pair.status not in _DIFFERENT or ours is None or theirs is None or ours.shape != theirs.shape:
        return pair
    if {ours.dtype.kind, theirs.dtype.kind} != {"float"} or not _has_constant(ours, theirs):
        return pair
    try:
        trusted, tested = (
            archive.load(record).reshape(-1).astype(np.float64)
            for archive, record in ((reference, ours), (target, theirs))
        )
    except ReadError:
        return pair
    masked = _masked(trusted, tested)
    if masked is None:
        return pair
    error = distance(tested[~masked], trusted[~masked]) if not masked.all() else 0.0
    depth = calls_of(reference).depth(ours)
    finding = judge_total_error(error, depth, precision, elements=max(1, int((~masked).sum())))
    constants = " and ".join(
        f"{values[masked].max():.3g} in the {side}"
        for values, side in ((trusted, "reference"), (tested, "target"))
    )
    text = f"{int(masked.sum())} of {masked.size} elements are masked: {constants}"
    if finding.status != "within-rounding":
        return pair
    status: Status = "match" if error == 0 else "within-rounding"
    findings = (Finding(MASKED, error, finding.limit, status, text),)
    return decide(pair, Decision("masks", status, text, findings))


def _has_constant(ours: Record, theirs: Record) -> bool:
    """Whether both records may have mask constants, by their statistics."""
    known = [record.statistics for record in (ours, theirs) if record.statistics is not None]
    return all(s.neginf or (s.minimum is not None and s.minimum <= _MASKED) for s in known)


def _masked(trusted: Array, tested: Array) -> Array | None:
    """Which elements are masked on both sides; None if none are, or if it is not plain which."""
    masks = []
    is_constant = False
    for values in (trusted, tested):
        low = values <= _MASKED
        if not low.any() or not (values[~low] > _OPEN).all():
            return None
        masks.append(low)
        is_constant |= bool(np.isin(values[low], (-np.inf, *MASK_SENTINELS)).all())
    return masks[0] if is_constant and np.array_equal(masks[0], masks[1]) else None
