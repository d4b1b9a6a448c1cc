"""Experts that a run chose unlike its reference, and whether the error of the scores explains it.

Rows that a run has in another order than its reference, since experts flipped: which belongs to which.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from tensorcap.comparison.pair import Finding, Pair, Status
from tensorcap.comparison.policy import Policy
from tensorcap.metrics import is_routing
from tensorcap.runs import Call, Calls, Ops, is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_MOST_EXPERTS: Final = 4096
_NEVER: Final = 1 << 62  # beyond every order and step
_BY_SCORES: Final = 0.99  # of the reference's rows hold the largest scores: ties and padding may not


@dataclass(frozen=True, slots=True)
class Flips:
    """What became of the choices of one call of a router.

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

    def finding(self, policy: Policy) -> Finding:
        """The verdict on the router's choices."""
        if not self.is_by_scores:
            return self._finding_by_count(policy)
        share = self.unexplained / self.rows
        status: Status = "within-rounding" if not self.unexplained else "suspect"
        if share > policy.routing_unexplained:
            status = "diverged"
        text = f"{self.flipped} of {self.rows} rows chose other experts, {self.unexplained} not by a near tie"
        return Finding("routing", share, policy.routing_unexplained, status, text)

    def _finding_by_count(self, policy: Policy) -> Finding:
        """Where groups of experts or biases have a say, nobody knows how near a tie was."""
        share = self.flipped / self.rows
        status: Status = "within-rounding" if share <= policy.routing_flipped else "suspect"
        text = f"{self.flipped} of {self.rows} rows chose other experts, not by the scores alone"
        return Finding("routing", share, policy.routing_flipped, status, text)


class Router(NamedTuple):
    """What chooses experts: a module that gives out scores and choices, or an op.

    Attributes:
        place: Rank and step.
        scores: Key text of the scores of all experts, None where they were not captured.
        chosen: Key text of the numbers of the chosen ones.
    """

    place: tuple[int, int]
    scores: str | None
    chosen: str


def find_routers(calls: Calls, ops: Ops, pairs: Mapping[str, Pair]) -> list[Router]:
    """Every router of the reference, modules in execution order and then ops."""
    of_calls = [router for call in calls.calls if (router := _router(call)) is not None]
    of_ops = [router for pair in pairs.values() if (router := _router_op(pair, ops, pairs)) is not None]
    return of_calls + of_ops


def find_flips(
    reference: Archive,
    target: Archive,
    routers: Sequence[Router],
    pairs: Mapping[str, Pair],
    *,
    policy: Policy,
    noise: Callable[[Pair], float],
) -> list[Flips]:
    """Look at every router whose scores and choices were captured and whose choices differ.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        routers: Those of the reference.
        pairs: Pairs by key text.
        policy: Where the margin stands.
        noise: What rounding does to a row of a pair, relative.
    """
    found = []
    flipped: set[tuple[int, int]] = set()  # ranks and steps in which an earlier router chose other experts
    for router in routers:
        by, of = pairs.get(router.scores or ""), pairs.get(router.chosen)
        if by is None or of is None or of.status == "identical" or of.difference is None:
            continue
        if by.difference is None and by.status != "identical":
            continue
        is_behind = router.place in flipped
        flips = _flips(
            reference,
            target,
            by,
            of,
            margin=policy.routing_margin,
            noise=noise(by),
            is_behind=is_behind,
        )
        if flips is not None:
            found.append(flips)
            if flips.flipped:
                flipped.add(router.place)
    return found


def scores_by_choices(routers: Sequence[Router], pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """The pair of the scores by the key text of the choices, of each router that has both."""
    return {r.chosen: pairs[r.scores] for r in routers if r.scores is not None and r.scores in pairs}


@dataclass(frozen=True, slots=True)
class AfterFlips:
    """After which routers that chose other experts a tensor was made.

    Attributes:
        of_step: After some of the same step.
        of_earlier: After some of an earlier step, whose results caches hold.
        of_most_rows: After some of the same step that flipped so many rows that the median row is another.
    """

    of_step: bool
    of_earlier: bool
    of_most_rows: bool


class StepsAfterFlips:
    """Tells which tensors were made after routers that chose other experts.

    Args:
        flipped: The routers that did.
        typical: The share of rows above which the median row is not what it was.
    """

    def __init__(self, flipped: Sequence[Flips], typical: float) -> None:
        self._in_step = _first_orders([flip.pair for flip in flipped])
        self._of_most = _first_orders([flip.pair for flip in flipped if flip.flipped > typical * flip.rows])
        self._first_steps: dict[int, int] = {}  # by rank
        for rank, step in self._in_step:
            self._first_steps[rank] = min(self._first_steps.get(rank, step), step)

    def is_in_step(self, record: Record) -> bool:
        """Whether a record was made after experts flipped, in the same step."""
        return _is_after(record, self._in_step)

    def of(self, record: Record, *, is_shuffled: bool) -> AfterFlips:
        """Tell after which routers a record was made; the rows of a shuffled one are those of its step's."""
        of_earlier = record.key.step > self._first_steps.get(record.key.rank, _NEVER)
        of_step = is_shuffled or self.is_in_step(record)
        return AfterFlips(of_step, of_earlier, _is_after(record, self._of_most))


def _first_orders(flipped: Sequence[Pair]) -> dict[tuple[int, int], int]:
    """Return the order of the first record of flipped choices by rank and step."""
    first: dict[tuple[int, int], int] = {}
    for pair in flipped:
        if pair.reference is not None:
            place = pair.reference.key.rank, pair.reference.key.step
            first[place] = min(first.get(place, pair.reference.order), pair.reference.order)
    return first


def _is_after(record: Record, first: Mapping[tuple[int, int], int]) -> bool:
    return record.order >= first.get((record.key.rank, record.key.step), _NEVER)


def _router_op(pair: Pair, ops: Ops, pairs: Mapping[str, Pair]) -> Router | None:
    """The router that a record of choices, made by an op, is of."""
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
    """The router that a call is of, by its outputs."""
    for chosen in call.outputs:
        if not is_routing(chosen):
            continue
        fitting = [s for s in call.outputs if s.dtype.kind == "float" and _are_scores(s, chosen)]
        return Router(call.place[:2], fitting[0].key.text if fitting else None, chosen.key.text)
    return None


def _flips(
    reference: Archive,
    target: Archive,
    scores: Pair,
    chosen: Pair,
    *,
    margin: float,
    noise: float,
    is_behind: bool,
) -> Flips | None:
    ours, theirs = _values(reference, chosen, 0), _values(target, chosen, 1)
    r = _values(reference, scores, 0).astype(np.float64)
    experts = r.shape[1]
    if not all(((side >= 0) & (side < experts)).all() for side in (ours, theirs)):
        return None
    masks = [_mask(side, experts) for side in (ours, theirs)]
    least_chosen = np.where(masks[0], r, np.inf).min(axis=1)
    best_left = np.where(masks[0], -np.inf, r).max(axis=1)
    is_by_scores = float((least_chosen >= best_left).mean()) >= _BY_SCORES
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
        unexplained = flipped & (best - worst > margin * reach)
    return Flips(chosen, rows, int(flipped.sum()), int(unexplained.sum()), is_by_scores)


def _values(archive: Archive, pair: Pair, side: int) -> Array:
    record = (pair.reference, pair.target)[side]
    assert record is not None
    return decode(archive.read(record), record.dtype).reshape(-1, record.shape[-1])


def _mask(chosen: Array, experts: int) -> Array:
    mask = np.zeros((len(chosen), experts), np.bool_)
    np.put_along_axis(mask, chosen.astype(np.int64), True, axis=1)
    return mask


def copies_of(pairs: Sequence[Pair], chosen: Sequence[Pair]) -> dict[str, Pair]:
    """Pairs that hold the very choices of a router again, as arguments of others, by key text."""
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


_ROWS: Final = 256  # of the reference are looked for
_NEAR: Final = 4096
_ELEMENTS: Final = 1 << 22  # of one side are read; a longer tensor is not aligned


@dataclass(frozen=True, slots=True)
class AlignedLeaf:
    """A leaf inside experts whose rows were brought together.

    Attributes:
        source: The pair of its input.
        result: The pair of its output; None where it could not be aligned.
        input_error: Median over rows of the relative error of the input.
        output_error: The same of the output.
    """

    source: Pair
    result: Pair | None
    input_error: float
    output_error: float | None


def shuffled_calls(calls: Calls, flips: Sequence[Flips], copies: Mapping[str, Pair]) -> dict[str, Flips]:
    """Key texts of records whose rows are ordered by expert, where experts flipped, with the flips.

    They are the records of calls below a module that got the choices as an argument, within its call.
    """
    found: dict[str, Flips] = {}
    for call, chosen in _given_choices(calls, flips, copies):
        for below in calls.within(call):
            for record in (*below.inputs, *below.outputs):
                found[record.key.text] = chosen
    return found


def moved_ops(
    calls: Calls, reference: Archive, flips: Sequence[Flips], copies: Mapping[str, Pair]
) -> set[str]:
    """Key texts of records of places within the code of modules that got other choices, and of modules below.

    Args:
        calls: The reference's calls.
        reference: The trusted archive.
        flips: What became of the choices.
        copies: Pairs that hold choices again.
    """
    found: set[str] = set()
    inner: dict[tuple[int, int], list[Record]] = {}
    for call, _ in _given_choices(calls, flips, copies):
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
                found.add(record.key.text)
    return found


def _given_choices(
    calls: Calls, flips: Sequence[Flips], copies: Mapping[str, Pair]
) -> Iterator[tuple[Call, Flips]]:
    """Calls that got the choices of a router as an argument, with what became of these."""
    by_key = {flip.pair.key: flip for flip in flips}
    for call in calls.calls:
        keys = [record.key.text for record in call.inputs]
        chosen = [by_key[copies[key].key] for key in keys if key in copies and copies[key].key in by_key]
        if chosen:
            yield call, chosen[0]


def aligned_leaves(
    reference: Archive,
    target: Archive,
    calls: Calls,
    pairs: Mapping[str, Pair],
    shuffled: Mapping[str, Flips],
) -> Iterator[AlignedLeaf]:
    """Bring the rows of leaves inside experts together by what the leaves were given."""
    for leaf in calls.leaves:
        source = _pair_of(leaf.inputs, pairs, shuffled)
        if source is None or source.reference is None:
            continue
        sides = [_rows(archive, record) for archive, record in _sides(reference, target, source)]
        if any(side is None for side in sides):
            continue
        x, y = sides
        assert x is not None
        assert y is not None
        order, partner = _partners(x, y, _reach(shuffled[source.key]))
        result = _pair_of(leaf.outputs, pairs, shuffled)
        output_error = None
        if result is not None:
            made = [_rows(archive, record) for archive, record in _sides(reference, target, result)]
            if all(side is not None and len(side) == len(x) for side in made):
                output_error = _error(made[0], made[1], order, partner)
        input_error = _error(x, y, order, partner)
        yield AlignedLeaf(source, result if output_error is not None else None, input_error, output_error)


def _pair_of(
    records: Sequence[Record], pairs: Mapping[str, Pair], shuffled: Mapping[str, Flips]
) -> Pair | None:
    for record in records:
        pair = pairs.get(record.key.text)
        is_shuffled = record.key.text in shuffled and record.dtype.kind == "float" and len(record.shape) >= 2
        if pair is not None and is_shuffled and pair.difference is not None:
            return pair
    return None


def _sides(reference: Archive, target: Archive, pair: Pair) -> list[tuple[Archive, Record]]:
    assert pair.reference is not None
    assert pair.target is not None
    return [(reference, pair.reference), (target, pair.target)]


def _rows(archive: Archive, record: Record) -> Array | None:
    if not 0 < record.size <= _ELEMENTS or not record.stored:
        return None
    values = decode(archive.read(record), record.dtype).reshape(-1, record.shape[-1]).astype(np.float64)
    return np.where(np.isfinite(values), values, 0.0)


def _reach(flips: Flips) -> int:
    """How many places away a row may be: each flip moves others, and sorting by expert need not be stable."""
    record = flips.pair.reference
    return max(_NEAR, 2 * flips.flipped * (record.shape[-1] if record is not None else 1))


def _partners(x: Array, y: Array, reach: int) -> tuple[Array, Array]:
    """Some rows of the reference and, for each, the nearest of the target's at most `reach` places away."""
    order = np.unique(np.linspace(0, len(x) - 1, min(len(x), _ROWS)).astype(np.int64))
    sizes = (y**2).sum(axis=1)
    partner = np.empty_like(order)
    for i, row in enumerate(order):
        low, high = max(0, row - reach), min(len(y), row + reach + 1)
        distance = sizes[low:high] - 2 * (y[low:high] @ x[row])
        partner[i] = low + int(distance.argmin())
    return order, partner


def _error(x: Array | None, y: Array | None, order: Array, partner: Array) -> float:
    assert x is not None
    assert y is not None
    d, r = y[partner] - x[order], x[order]
    sizes = (r**2).sum(axis=1)
    errors = (d**2).sum(axis=1)[sizes > 0] / sizes[sizes > 0]
    return float(np.sqrt(np.median(errors))) if errors.size else 0.0


def calls_that_align(aligned: Sequence[AlignedLeaf]) -> dict[str, float]:
    """Row errors by key text, as they are once rows were brought together."""
    errors = {}
    for found in aligned:
        errors[found.source.key] = found.input_error
        if found.result is not None and found.output_error is not None:
            errors[found.result.key] = found.output_error
    return errors
