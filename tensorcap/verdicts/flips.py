"""Experts that a run chose unlike its reference, and whether the error of the scores explains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from tensorcap.metrics.routing import is_routing
from tensorcap.verdicts.calls import Call, Calls
from tensorcap.verdicts.ops import Ops
from tensorcap.verdicts.pair import Finding, Pair, Status
from tensorcap.verdicts.policy import Policy
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.records import Record

_MOST_EXPERTS: Final = 4096
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


def routers(calls: Calls, ops: Ops, pairs: Mapping[str, Pair]) -> list[Router]:
    """Every router of the reference, modules in execution order and then ops."""
    found = [router for call in calls.calls if (router := _router(call)) is not None]
    return found + [router for pair in pairs.values() if (router := _router_op(pair, ops, pairs)) is not None]


def find_flips(
    reference: Archive,
    target: Archive,
    found_routers: Sequence[Router],
    pairs: Mapping[str, Pair],
    *,
    policy: Policy,
    noise: Callable[[Pair], float],
) -> list[Flips]:
    """Look at every router whose scores and choices were captured and whose choices differ.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        found_routers: Those of the reference.
        pairs: Pairs by key text.
        policy: Where the margin stands.
        noise: What rounding does to a row of a pair, relative.
    """
    found = []
    flipped: set[tuple[int, int]] = set()  # ranks and steps in which an earlier router chose other experts
    for router in found_routers:
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


def scores_by_choices(found_routers: Sequence[Router], pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """The pair of the scores by the key text of the choices, of each router that has both."""
    return {r.chosen: pairs[r.scores] for r in found_routers if r.scores is not None and r.scores in pairs}


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
