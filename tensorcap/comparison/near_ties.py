"""Tokens whose experts a near tie decides, of routers whose choices are no record of both runs (POL-18).

A linear layer gives the scores, and the code around it takes the largest; or one side has neither layer nor
choices. The scores of the reference say which tokens stand at a near tie, and with those of the target which
of them chose otherwise. What is made of such a token is another function of it, so that its row does not
count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from tensorcap.comparison.padding import row_metrics, values_of
from tensorcap.comparison.pair import Pair
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.routing import BY_SCORES, Flips, Router, find_routers
from tensorcap.metrics import is_routing
from tensorcap.runs import Calls, calls_of, enclosing_sites, ops_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")
_CHOSEN: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "num_selected_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k",
)
_FURTHER: Final = ("n_group", "correction_bias")  # settings and tensors by which scores alone do not decide
_ROUTER: Final = re.compile(r"(?:^|\.)(?:router|gate|gating)$", re.IGNORECASE)
_MOST: Final = 1 << 24  # elements of scores that are read


class InlineRouter(NamedTuple):
    """A router whose choices are not recorded on both sides.

    Attributes:
        scores: The reference's scores of all experts.
        chosen: How many experts a token gets.
        sources: What the scores were made of: the layer's arguments, and those of the block.
        block: Site of the module that holds the experts.
    """

    scores: Record
    chosen: int
    sources: Sequence[Record]
    block: str


class _Weights(NamedTuple):
    """What a router whose choices are recorded gives.

    Attributes:
        scores: The reference's scores of all experts.
        weights: Its weights of those that are chosen.
    """

    scores: Record
    weights: Record


@dataclass(frozen=True, slots=True)
class _Undecided:
    """Tokens of one call of a router at a near tie.

    Attributes:
        place: Rank and step.
        order: When the scores were made.
        kept: True of each token that counts.
        flips: How many certainly or possibly chose otherwise, as of another router; none if only the order
            of choices is another one.
        rows: How many tokens experts get, a token as often as it chose.
        block: Site of the module that holds the experts.
    """

    place: tuple[int, int]
    order: int
    kept: Array
    flips: Flips
    rows: int
    block: str


class NearTies:
    """The tokens at near ties of inline routers, and results without them.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the same keys.
        calls: The reference's calls.
        routers: The reference's routers whose choices are records.
        pairs: Pairs by key text.
        noise: Relative error of a row of a pair that rounding alone makes.
        divisors: What columns of tensors of the target are divided by: see `values_of`.
    """

    def __init__(
        self,
        reference: Archive,
        target: Archive,
        calls: Calls,
        routers: Sequence[Router],
        pairs: Mapping[str, Pair],
        *,
        noise: Callable[[Pair], float],
        divisors: Mapping[str, Array],
    ) -> None:
        self._archives, self._divisors = (reference, target), divisors
        self._noise = noise
        found = (self._undecided(router, pairs) for router in _find_inline(reference, calls, routers, pairs))
        weighed = (self._weighed_otherwise(weights, pairs) for weights in _find_thresholded(calls, routers))
        self._undecided_tokens = [one for one in (*found, *weighed) if one is not None]

    @classmethod
    def of(
        cls,
        reference: Archive,
        target: Archive,
        pairs: Sequence[Pair],
        *,
        noise: Callable[[Pair], float],
        divisors: Mapping[str, Array],
    ) -> NearTies:
        """Find them in two runs whose pairs are known."""
        calls, by_key = calls_of(reference), {pair.key: pair for pair in pairs}
        routers = find_routers(calls, ops_of(reference), by_key)
        return cls(reference, target, calls, routers, by_key, noise=noise, divisors=divisors)

    @property
    def flips(self) -> list[Flips]:
        """How the choices of these routers may differ, as `StepsAfterFlips` takes them."""
        return [one.flips for one in self._undecided_tokens if one.flips.flipped]

    def without(self, pair: Pair) -> Pair:
        """Return the pair with the row metrics of tokens that no near tie decided before it.

        A pair of which half of the tokens or more are undecided stays as it is.
        """
        record, difference = pair.reference, pair.difference
        if record is None or pair.target is None or difference is None or not difference.unequal:
            return pair
        if record.dtype.kind != "float" or pair.target.dtype.kind != "float" or len(record.shape) < 2:
            return pair
        kept = self._kept(record)
        if kept is None or 2 * int(kept.sum()) <= len(kept) or record.size > _MOST:
            return pair
        sides = values_of(pair.key, record, pair.target, self._archives, self._divisors)
        ours, theirs = (side.reshape(len(kept), -1)[kept] for side in sides)
        return pair.with_difference(replace(difference, **row_metrics(ours, theirs - ours)))

    def moves(self, record: Record) -> bool:
        """Whether a tensor has rows in the order of experts, which tokens chose otherwise."""
        place = record.key.rank, record.key.step
        return any(
            one.place == place
            and record.order > one.order
            and record.key.site.startswith(f"{one.block}.")
            and one.rows > len(one.kept)
            and (record.shape == (one.rows,) or _count_rows(record) == one.rows)
            for one in self._undecided_tokens
        )

    def _kept(self, record: Record) -> Array | None:
        """Which tokens of a record count; None if all do, or it has other rows than tokens."""
        place, kept = (record.key.rank, record.key.step), None
        for one in self._undecided_tokens:
            is_behind = one.flips.flipped and one.place == place and record.order > one.order
            if is_behind and _count_rows(record) == len(one.kept):
                kept = one.kept if kept is None else kept & one.kept
        return kept

    def _undecided(self, router: InlineRouter, pairs: Mapping[str, Pair]) -> _Undecided | None:
        """Find the tokens of a router at a near tie; None if there are none, or its scores are damaged.

        1. The margin of a token lies between the last score that is chosen and the first that is not.
        2. A near tie is a margin of up to `routing_margin` times the error of the scores: of their rows, or
           of the rows of their input if the target has no scores, or the noise of the precision.
        3. Of scores of both sides only those tokens count as undecided that chose otherwise, and those at a
           tie within noise, which rounding behind the scores decides.
        4. If a token's choices are the same in another order, it counts, and rows by expert may have moved.
        """
        record = router.scores
        pair = pairs.get(record.key.text)
        possible = (pair, *(pairs.get(source.key.text) for source in router.sources))
        known = next((one for one in possible if one is not None and one.is_compared), None)
        if known is None or record.size > _MOST:
            return None
        try:
            scores = self._archives[0].load(record).astype(np.float64).reshape(-1, record.shape[-1])
        except OSError:  # the pair is unreadable
            return None
        margins, choice = _margins(scores, router.chosen)
        size = np.sqrt((scores**2).mean(axis=1))
        noise, is_reordered = self._noise(known), True
        error = known.difference.row_error_p95 if known.difference is not None else 0.0
        with np.errstate(invalid="ignore"):
            is_near = margins <= POLICY.routing_margin * max(error or 0.0, noise) * size
            if pair is not None and pair.target is not None and pair.is_compared:
                theirs = self._archives[1].load(pair.target).astype(np.float64).reshape(scores.shape)
                ours, others = (_best(side, router.chosen) for side in (scores, theirs))
                is_reordered = not np.array_equal(ours, others)
                is_other = (choice != _margins(theirs, router.chosen)[1]).any(axis=1)
                is_near &= is_other | (margins <= POLICY.routing_margin * noise * size)
        if not (is_near.any() or is_reordered):
            return None
        flips = Flips(known, len(scores), int(is_near.sum()), 0)
        place, rows = (record.key.rank, record.key.step), len(scores) * router.chosen
        return _Undecided(place, record.order, ~is_near, flips, rows, router.block)

    def _weighed_otherwise(self, router: _Weights, pairs: Mapping[str, Pair]) -> _Undecided | None:
        """Find the tokens of a router with thresholds whose weights jumped; None if none did, or too many.

        1. Some weights of the reference are 1 and others are not: where all other experts lie beyond a
           threshold of the scores. At one, weights jump.
        2. Where no threshold lies between, a weight w of a softmax of scores s changes by at most
           w (1 - w) 2 max |ds|, which is max |ds| / 2. It jumped if that is exceeded four times over.
        3. Up to a tenth of the tokens may have done so, as may choose otherwise not by the scores alone.
        """
        scores, weights = pairs.get(router.scores.key.text), pairs.get(router.weights.key.text)
        if scores is None or weights is None or weights.reference is None or weights.target is None:
            return None
        if scores.target is None or not (scores.is_compared and weights.is_compared):
            return None
        rows = len(self._archives[0].load(weights.reference).reshape(-1, weights.reference.shape[-1]))
        (s, w), (theirs, other) = (
            [a.load(r).astype(np.float64).reshape(rows, -1) for r in (one, two)]
            for a, one, two in zip(
                self._archives,
                (router.scores, scores.target),
                (router.weights, weights.target),
                strict=True,
            )
        )
        is_one = w == 1
        if not is_one.any() or is_one.all():
            return None
        reach = np.abs(theirs - s).max(axis=1) / 2 + self._noise(weights)
        jumped = np.abs(other - w).max(axis=1) > POLICY.routing_margin * reach
        if not jumped.any() or jumped.mean() > POLICY.routing_flipped:
            return None
        key = router.scores.key
        flips = Flips(weights, rows, int(jumped.sum()), 0)
        return _Undecided((key.rank, key.step), router.scores.order, ~jumped, flips, 0, _around(key.site))


def _margins(scores: Array, chosen: int) -> tuple[Array, Array]:
    """By how much each row's last chosen score is larger than the first left one; and which are chosen."""
    order = np.sort(scores, axis=1)[:, ::-1]
    last = order[:, chosen - 1]
    return last - order[:, chosen], scores >= last[:, None]


def _best(scores: Array, chosen: int) -> Array:
    """The numbers of each row's best experts, the first one first."""
    best: Array = np.argsort(-scores, axis=1, kind="stable")[:, :chosen]
    return best


def _count_rows(record: Record) -> int:
    return math.prod(record.shape[:-1])


def _find_inline(
    reference: Archive, calls: Calls, routers: Sequence[Router], pairs: Mapping[str, Pair]
) -> Iterator[InlineRouter]:
    """Find the routers whose choices are not records of both sides.

    1. Of a router whose choices only the reference has, these say how many there are.
    2. Of choices that are an argument of a call, and no result of one, the scores are the result of a leaf
       beside it of which they number the largest elements, in all tokens but a few.
    3. Else a leaf's result with an element an expert, as the configuration or the module around counts them.
    """
    records = {record.key.text: record for record in reference.records}
    known: set[str] = set()
    for router in routers:
        chosen = pairs.get(router.chosen)
        site = records[router.chosen].key.site
        known.add(site)
        if router.scores is not None and (chosen is None or chosen.target is None):
            scores, count = records[router.scores], records[router.chosen].shape[-1]
            yield InlineRouter(scores, count, _sources(calls, scores), _around(scores.key.site))
    for inline in _find_handed_on(reference, calls, pairs):
        if inline.scores.key.site not in known:
            known.add(inline.scores.key.site)
            yield inline
    for call in calls.leaves:
        counts = _counts(reference, call.site) if call.site not in known else None
        for record in call.outputs if counts else ():
            assert counts is not None
            if record.dtype.kind == "float" and len(record.shape) > 1 and record.shape[-1] == counts[0]:
                yield InlineRouter(record, counts[1], _sources(calls, record), _block_of(call.site))


def _find_handed_on(reference: Archive, calls: Calls, pairs: Mapping[str, Pair]) -> Iterator[InlineRouter]:
    """Find the routers whose choices are known as an argument of a call, of the reference alone."""
    for call in calls.calls:
        for chosen in filter(is_routing, call.inputs):
            pair, block = pairs.get(chosen.key.text), _around(call.site)
            if pair is not None and pair.target is not None:
                continue
            count, rows = chosen.shape[-1], _count_rows(chosen)
            for leaf in calls.leaves:
                is_before = leaf.place[:2] == call.place[:2] and leaf.end < chosen.order
                if not is_before or block not in enclosing_sites(leaf.site):
                    continue
                for record in leaf.outputs:
                    is_wide = record.dtype.kind == "float" and len(record.shape) > 1
                    if not is_wide or _count_rows(record) != rows or record.shape[-1] <= count:
                        continue
                    if record.size <= _MOST and _are_largest(reference, record, chosen):
                        yield InlineRouter(record, count, _sources(calls, record), block)


def _are_largest(reference: Archive, scores: Record, chosen: Record) -> bool:
    """Whether whole numbers number the largest elements of nearly all rows."""
    count = chosen.shape[-1]
    numbers = np.sort(reference.load(chosen).reshape(-1, count), axis=1)
    best = np.sort(_best(reference.load(scores).astype(np.float64).reshape(len(numbers), -1), count), axis=1)
    return bool((numbers == best).all(axis=1).mean() >= BY_SCORES)


def _find_thresholded(calls: Calls, routers: Sequence[Router]) -> Iterator[_Weights]:
    """Find routers that give a weight for each choice, two or more of a token."""
    chosen = {router.chosen: router.scores for router in routers}
    for call in calls.calls:
        outputs = {record.key.text: record for record in call.outputs}
        for text in outputs.keys() & chosen.keys():
            scores, shape = outputs.get(chosen[text] or ""), outputs[text].shape
            for record in call.outputs if scores is not None and shape[-1] > 1 else ():
                if record.dtype.kind == "float" and record.shape == shape and scores is not None:
                    yield _Weights(scores, record)


def _counts(reference: Archive, site: str) -> tuple[int, int] | None:
    """How many experts there are and how many a token gets, if a leaf's scores alone decide; else None."""
    modules, around = reference.info.modules, _around(site)
    if site not in modules:
        return None
    own = [modules[name] for name in (site, around) if name in modules]
    names = [name for about in own for name in (*about.settings, *about.parameters, *about.buffers)]
    config: Mapping[str, Any] = reference.info.config
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    groups = config.get("n_group")
    if any(name.endswith(_FURTHER) for name in names) or (isinstance(groups, int) and groups > 1):
        return None
    settings = {name: value for about in own for name, value in about.settings.items()}
    experts, chosen = (_first(names, settings, config) for names in (_COUNTS, _CHOSEN))
    has_counts = bool(experts and chosen and chosen < experts)
    return (experts, chosen) if has_counts and _is_beside_experts(reference, site, experts) else None


def _block_of(site: str) -> str:
    """The module that holds the experts of a router, whose layer a site is, or that itself."""
    around = _around(site)
    return _around(around) if _ROUTER.search(around) else around


def _is_beside_experts(reference: Archive, site: str, experts: int) -> bool:
    """Whether a leaf has a weight with an axis of experts, and the module around it holds as many of them.

    The configuration alone says nothing: other results have as many elements by chance, such as the angles
    of a rotary embedding.
    """
    modules, around = reference.info.modules, _block_of(site)
    if not any(experts in (weight.shape or ()) for weight in modules[site].parameters.values()):
        return False
    prefix = "" if around == ROOT_SITE else f"{around}."
    beside = {
        name: about
        for name, about in modules.items()
        if name == around or (name != site and name.startswith(prefix))
    }
    shapes = [weight.shape or () for about in beside.values() for weight in about.parameters.values()]
    is_fused = any(len(shape) > 2 and shape[0] == experts for shape in shapes)
    return is_fused or any(name.endswith(f".{experts - 1}") for name in beside)


def _first(names: Collection[str], *places: Mapping[str, Any]) -> int:
    """The first whole number under one of some names; 0 if there is none."""
    numbers = (place[name] for place in places for name in names if name in place)
    return next((number for number in numbers if type(number) is int and number > 0), 0)


def _sources(calls: Calls, scores: Record) -> list[Record]:
    """The floating arguments of the layer that made scores, then those of the module around it."""
    key = scores.key
    return [
        record
        for site in (key.site, _around(key.site))
        for call in calls.calls
        if call.place[:3] == (key.rank, key.step, site) and call.start <= scores.order <= call.end
        for record in call.inputs
        if record.dtype.kind == "float"
    ]


def _around(site: str) -> str:
    return next(iter(enclosing_sites(site)), ROOT_SITE)
