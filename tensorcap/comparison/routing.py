"""Routers that chose other experts than in the reference, and rows that are in another order since.

A flip is explained if the error of the scores is as large as the margin between experts (POL-18). Rows inside
experts are aligned by the nearest input (POL-19).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from tensorcap.comparison.pair import Finding, Pair, Status
from tensorcap.comparison.policy import POLICY, Limits
from tensorcap.metrics import is_routing
from tensorcap.runs import Call, Calls, Ops, is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_MOST_EXPERTS: Final = 4096
_NEVER: Final = 1 << 62  # beyond every order and step
BY_SCORES: Final = 0.99  # of the reference's rows hold the largest scores: ties and padding may not


@dataclass(frozen=True, slots=True)
class Flips:
    """How the choices of one call of a router differ from the reference's.

    Attributes:
        pair: The pair of the chosen numbers.
        rows: Count of choices.
        flipped: Rows whose sets of experts differ.
        unexplained: Those among them whose scores in the reference lie further apart than errors reach.
        is_by_scores: Whether the reference chose by the scores alone, so that margins mean something.
    """

    pair: Pair
    rows: int
    flipped: int
    unexplained: int
    is_by_scores: bool = True

    def finding(self) -> Finding:
        """Judge the router's choices.

        If groups of experts or biases have a say, nobody knows how near a tie was, so that flips are counted.
        """
        if not self.is_by_scores:
            text = f"{self.flipped} of {self.rows} rows chose other experts, not by the scores alone"
            return Limits(POLICY.routing_flipped, math.inf).finding("routing", self.flipped / self.rows, text)
        share, limit = self.unexplained / self.rows, POLICY.routing_unexplained
        status: Status = "within-rounding" if not self.unexplained else "suspect"
        if share > limit:
            status = "diverged"
        text = f"{self.flipped} of {self.rows} rows chose other experts, {self.unexplained} not by a near tie"
        return Finding("routing", share, limit, status, text)


class Router(NamedTuple):
    """A call that chooses experts: of a module that returns scores and choices, or of an op.

    Attributes:
        place: Rank and step.
        scores: Key text of the scores of all experts, None if they were not captured.
        chosen: Key text of the numbers of the chosen ones.
    """

    place: tuple[int, int]
    scores: str | None
    chosen: str


def find_routers(calls: Calls, ops: Ops, pairs: Mapping[str, Pair]) -> list[Router]:
    """Find every router of the reference: modules in execution order, then ops."""
    of_calls = [router for call in calls.calls if (router := _router(call)) is not None]
    of_ops = [router for pair in pairs.values() if (router := _router_op(pair, ops, pairs)) is not None]
    return of_calls + of_ops


def find_flips(
    reference: Archive,
    target: Archive,
    routers: Sequence[Router],
    pairs: Mapping[str, Pair],
    *,
    noise: Callable[[Pair], float],
) -> list[Flips]:
    """Find how the choices of every router differ whose scores and choices were captured.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        routers: Those of the reference.
        pairs: Pairs by key text.
        noise: Relative error of a row of a pair that rounding alone makes.
    """
    all_flips = []
    flipped: set[tuple[int, int]] = set()  # ranks and steps in which an earlier router chose other experts
    for router in routers:
        scores, chosen = pairs.get(router.scores or ""), pairs.get(router.chosen)
        if scores is None or chosen is None or chosen.status == "identical" or chosen.difference is None:
            continue
        if not scores.is_compared:
            continue
        is_behind = router.place in flipped
        flips = _flips(reference, target, scores, chosen, noise=noise(scores), is_behind=is_behind)
        if flips is not None:
            all_flips.append(flips)
            if flips.flipped:
                flipped.add(router.place)
    return all_flips


def scores_by_choices(routers: Sequence[Router], pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Return the pair of the scores by the key text of the choices, of each router that has both."""
    return {r.chosen: pairs[r.scores] for r in routers if r.scores is not None and r.scores in pairs}


class StepsAfterFlips:
    """Knows which tensors were computed after routers that chose other experts.

    Args:
        flipped: The routers that did.
    """

    def __init__(self, flipped: Sequence[Flips]) -> None:
        typical = POLICY.routing_typical
        self._in_step = _first_orders([flip.pair for flip in flipped])
        self._of_most = _first_orders([flip.pair for flip in flipped if flip.flipped > typical * flip.rows])
        self._first_steps: dict[int, int] = {}  # by rank
        for rank, step in self._in_step:
            self._first_steps[rank] = min(self._first_steps.get(rank, step), step)

    def reaches(self, record: Record | None) -> bool:
        """Whether a record may hold what other experts made: after they flipped, or in a later step."""
        return record is not None and (self.is_in_step(record) or self.is_in_later_step(record))

    def is_in_step(self, record: Record) -> bool:
        """Whether a record was computed after experts flipped, in the same step."""
        return _is_after(record, self._in_step)

    def has_other_rows(self, record: Record) -> bool:
        """Whether experts flipped before it, in the same step, in so many rows that the median is another."""
        return _is_after(record, self._of_most)

    def is_in_later_step(self, record: Record) -> bool:
        """Whether experts flipped in an earlier step, whose results caches hold."""
        return record.key.step > self._first_steps.get(record.key.rank, _NEVER)


def _first_orders(flipped: Sequence[Pair]) -> dict[tuple[int, int], int]:
    """Return the order of the first record of flipped choices by rank and step."""
    first: dict[tuple[int, int], int] = {}
    for pair in flipped:
        if pair.reference is not None:
            place = pair.reference.key.rank, pair.reference.key.step
            first[place] = min(first.get(place, pair.reference.order), pair.reference.order)
    return first


def _is_after(record: Record, first: Mapping[tuple[int, int], int]) -> bool:
    return bool(first) and record.order >= first.get((record.key.rank, record.key.step), _NEVER)


def _router_op(pair: Pair, ops: Ops, pairs: Mapping[str, Pair]) -> Router | None:
    """Return the router whose choices a record holds, if an op computed it."""
    chosen = pair.reference
    if chosen is None or chosen.key.slot != "output.1" or ops.name(chosen.key.where) != "topk":
        return None
    source = pairs.get(next(iter(ops.inputs(chosen.key.where) or ()), ""))
    scores = source.reference if source is not None else None
    if scores is None or scores.dtype.kind != "float" or not _are_scores(scores, chosen):
        return None
    return Router((chosen.key.rank, chosen.key.step), scores.key.text, chosen.key.text)


def _are_scores(scores: Record, chosen: Record) -> bool:
    """Whether a record may hold the scores of all experts that another one chose from."""
    is_wider = scores.shape[:-1] == chosen.shape[:-1] and scores.shape and scores.shape[-1] > chosen.shape[-1]
    return bool(is_wider) and scores.shape[-1] <= _MOST_EXPERTS


def _router(call: Call) -> Router | None:
    """Return the router of a call, by its outputs."""
    for chosen in call.outputs:
        if not is_routing(chosen):
            continue
        fitting = [s for s in call.outputs if s.dtype.kind == "float" and _are_scores(s, chosen)]
        return Router(call.place[:2], fitting[0].key.text if fitting else None, chosen.key.text)
    return None


def _flips(
    reference: Archive, target: Archive, scores: Pair, chosen: Pair, *, noise: float, is_behind: bool
) -> Flips | None:
    ours, theirs = _values(reference, chosen, 0), _values(target, chosen, 1)
    r = _values(reference, scores, 0).astype(np.float64)
    experts = r.shape[1]
    if not all(((side >= 0) & (side < experts)).all() for side in (ours, theirs)):
        return None
    masks = [_mask(side, experts) for side in (ours, theirs)]
    least_chosen = np.where(masks[0], r, np.inf).min(axis=1)
    best_left = np.where(masks[0], -np.inf, r).max(axis=1)
    is_by_scores = float((least_chosen >= best_left).mean()) >= BY_SCORES
    lost, won = masks[0] & ~masks[1], masks[1] & ~masks[0]
    flipped = lost.any(axis=1) | won.any(axis=1)
    rows = len(r)
    if not flipped.any():
        return Flips(chosen, rows, 0, 0)
    best = np.where(lost, r, -np.inf).max(axis=1)
    worst = np.where(won, r, np.inf).min(axis=1)
    error = scores.difference.row_error_p95 if scores.difference is not None else 0.0
    reach = max(error or 0.0, noise) * np.sqrt((r**2).mean(axis=1))
    if scores.difference is None or not scores.difference.unequal:
        reach = np.zeros(rows)  # nothing but an exact tie explains other choices by equal scores
    elif is_behind:  # a token that flipped before has an error of its own
        d = _values(target, scores, 1).astype(np.float64) - r
        reach = np.maximum(reach, np.sqrt((d**2).mean(axis=1)))
    with np.errstate(invalid="ignore"):
        unexplained = flipped & (best - worst > POLICY.routing_margin * reach)
    return Flips(chosen, rows, int(flipped.sum()), int(unexplained.sum()), is_by_scores)


def _values(archive: Archive, pair: Pair, side: int) -> Array:
    record = (pair.reference, pair.target)[side]
    assert record is not None
    return archive.load(record).reshape(-1, record.shape[-1])


def _mask(chosen: Array, experts: int) -> Array:
    mask = np.zeros((len(chosen), experts), np.bool_)
    np.put_along_axis(mask, chosen.astype(np.int64), True, axis=1)
    return mask


def copies_of(pairs: Sequence[Pair], chosen: Sequence[Pair]) -> dict[str, Pair]:
    """Return pairs that hold a router's choices again, as arguments of other calls, by key text."""
    known = {
        (pair.reference.digest, pair.target.digest): pair
        for pair in chosen
        if pair.reference and pair.target and pair.reference.digest and pair.target.digest
    }
    return {
        pair.key: known[pair.reference.digest, pair.target.digest]
        for pair in pairs
        if pair.reference and pair.target and (pair.reference.digest, pair.target.digest) in known
    }


_ROWS: Final = 256  # of the reference are aligned
_NEAR: Final = 4096
_ELEMENTS: Final = 1 << 22  # of one side; a longer tensor is not aligned


def shuffled_calls(calls: Calls, flips: Sequence[Flips], copies: Mapping[str, Pair]) -> dict[str, Flips]:
    """Return the flips by key text of records whose rows are ordered by expert, if experts flipped.

    They are the records of calls below a module that got the choices as an argument, within its call.
    """
    return {
        record.key.text: chosen
        for call, chosen in _calls_with_choices(calls, flips, copies)
        for below in calls.within(call)
        for record in (*below.inputs, *below.outputs)
    }


def moved_ops(
    calls: Calls, reference: Archive, flips: Sequence[Flips], copies: Mapping[str, Pair]
) -> set[str]:
    """Return key texts of records within the code of modules that got other choices, and of modules below.

    Args:
        calls: The reference's calls.
        reference: The trusted archive.
        flips: How the choices of routers differ.
        copies: Pairs that hold choices again.
    """
    moved: set[str] = set()
    inner: dict[tuple[int, int], list[Record]] = {}
    for call, _ in _calls_with_choices(calls, flips, copies):
        if not inner:
            for record in reference.records:
                if is_inner(record.key):
                    inner.setdefault((record.key.rank, record.key.step), []).append(record)
        records = inner.get(call.place[:2], [])
        first = bisect_left(records, call.start, key=lambda record: record.order)
        for record in records[first:]:
            if record.order > call.end:
                break
            if f"{module_of(record.key.site)}.".startswith(f"{call.site}."):
                moved.add(record.key.text)
    return moved


def _calls_with_choices(
    calls: Calls, flips: Sequence[Flips], copies: Mapping[str, Pair]
) -> Iterator[tuple[Call, Flips]]:
    """Yield the calls that got the choices of a router as an argument, with its flips."""
    by_key = {flip.pair.key: flip for flip in flips}
    for call in calls.calls:
        keys = [record.key.text for record in call.inputs]
        chosen = [by_key[copies[key].key] for key in keys if key in copies and copies[key].key in by_key]
        if chosen:
            yield call, chosen[0]


def aligned_errors(
    reference: Archive,
    target: Archive,
    calls: Calls,
    pairs: Mapping[str, Pair],
    shuffled: Mapping[str, Flips],
) -> dict[str, float]:
    """Align the rows of leaves inside experts by the leaves' inputs.

    Returns:
        Row errors of aligned inputs and outputs, by key text.
    """
    errors = {}
    for leaf in calls.leaves:
        source, result = (_pair_of(records, pairs, shuffled) for records in (leaf.inputs, leaf.outputs))
        sides = _rows(reference, target, source)
        if source is None or sides is None:
            continue
        order, partner = _partners(*sides, _reach(shuffled[source.key]))
        errors[source.key] = _error(*sides, order, partner)
        outputs = _rows(reference, target, result)
        if result is not None and outputs is not None and all(len(side) == len(sides[0]) for side in outputs):
            errors[result.key] = _error(*outputs, order, partner)
    return errors


def _pair_of(
    records: Sequence[Record], pairs: Mapping[str, Pair], shuffled: Mapping[str, Flips]
) -> Pair | None:
    for record in records:
        pair = pairs.get(record.key.text)
        is_shuffled = record.key.text in shuffled and record.dtype.kind == "float" and len(record.shape) >= 2
        if pair is not None and is_shuffled and pair.difference is not None:
            return pair
    return None


def _rows(reference: Archive, target: Archive, pair: Pair | None) -> tuple[Array, Array] | None:
    """Read the rows of both sides of a pair, zeros for what is not finite; None if they cannot be read."""
    if pair is None or pair.reference is None or pair.target is None:
        return None
    sides = (reference, pair.reference), (target, pair.target)
    if not all(0 < record.size <= _ELEMENTS and record.stored for _, record in sides):
        return None
    x, y = (a.load(r).reshape(-1, r.shape[-1]).astype(np.float64) for a, r in sides)
    return np.where(np.isfinite(x), x, 0.0), np.where(np.isfinite(y), y, 0.0)


def _reach(flips: Flips) -> int:
    """Return how many rows away a row may be: each flip moves others, and sorting need not be stable."""
    record = flips.pair.reference
    return max(_NEAR, 2 * flips.flipped * (record.shape[-1] if record is not None else 1))


def _partners(x: Array, y: Array, reach: int) -> tuple[Array, Array]:
    """Choose rows of the reference, and for each the nearest of the target's at most `reach` rows away."""
    order = np.unique(np.linspace(0, len(x) - 1, min(len(x), _ROWS)).astype(np.int64))
    sizes = (y**2).sum(axis=1)
    partner = np.empty_like(order)
    for i, row in enumerate(order):
        low, high = max(0, row - reach), min(len(y), row + reach + 1)
        distance = sizes[low:high] - 2 * (y[low:high] @ x[row])
        partner[i] = low + int(distance.argmin())
    return order, partner


def _error(x: Array, y: Array, order: Array, partner: Array) -> float:
    """Compute the median over rows of the relative error."""
    d, r = y[partner] - x[order], x[order]
    sizes = (r**2).sum(axis=1)
    errors = (d**2).sum(axis=1)[sizes > 0] / sizes[sizes > 0]
    return float(np.sqrt(np.median(errors))) if errors.size else 0.0
