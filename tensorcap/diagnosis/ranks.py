"""Propose mistakes of several ranks that run one model: sums taken again, and parts that ranks share wrongly.

How many ranks there are, and how each tensor is put together, is known by the rules of the target's archive
(`specs/ranks.md`). Nothing is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Final

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.comparison import rule_of_ranks
from tensorcap.diagnosis.context import BIASES, LARGEST, PairContext, find_vector, read_pair, values_of
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.values import Values, relative_error
from tensorcap_formats.errors import UsageError
from tensorcap_formats.ranks import MeshRule, Rule
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import TensorRule

_TERMS: Final = 8  # records beside the pair that may be a term which each rank adds
_INTERLEAVED: Final = (2, 3)  # parts of a fused weight: gate and up; queries, keys and values
_MOST_RANKS: Final = 512


@dataclass(frozen=True)
class _Sharding:
    """How ranks hold the tensor of a pair.

    Attributes:
        context: The pair.
        rule: The rule of the mesh axis along which ranks hold parts.
        ranks: How many ranks that axis has.
        axis: The axis of the pair's tensors that they hold parts of.
    """

    context: PairContext
    rule: Rule
    ranks: int
    axis: int

    @cached_property
    def wholes(self) -> tuple[Sequence[Values], Sequence[Values], int] | None:
        """What of both sides one tensor of the target holds, in its order, and which of them the pair is.

        None if not all of it can be read.
        """
        context = self.context
        target, own = context.target_archive, context.reference.key.text
        link = target.links.get(own) if isinstance(target, MappedArchive) else None
        texts = [own] if link is None else [record.key.text for record in link.reference]
        if texts == [own]:
            return [context.r], [context.t], 0
        sides: list[list[Values]] = []
        for archive in (context.reference_archive, target):
            records = [archive.get(text) for text in texts if text in archive]
            if len(records) < len(texts) or not all(r.stored and r.size <= LARGEST for r in records):
                return None
            sides.append([values_of(archive, record) for record in records])
        return sides[0], sides[1], texts.index(own)

    def predict(self, other: Rule) -> Values | None:
        """What the target is if ranks hold the reference's tensor by another rule; None if they can't."""
        wholes = self.wholes
        if wholes is None:
            return None
        ours, _, own = wholes
        starts = np.cumsum([part.shape[self.axis] for part in ours])
        try:
            pieces = replace(other, axis=self.axis).split(np.concatenate(ours, self.axis), self.ranks)
            held = [pieces[members[0]] for members in self.rule.distinct(self.ranks)]
            joined = replace(self.rule, axis=self.axis).join(held)
        except (UsageError, ValueError):  # it does not divide, or parts do not fit each other
            return None
        predicted = np.split(joined, starts[:-1], self.axis)[own]
        return predicted if predicted.shape == self.context.t.shape else None


def propose_rank_mistakes(context: PairContext) -> Iterator[Hypothesis]:
    """Propose what ranks of the target did wrongly together, if its archive is of several.

    1. A sum over ranks is taken of what was a sum already, or its mean; a bias or another term is in it once
       for each rank.
    2. Ranks hold parts of the reference's tensor that another rule gives, or one another's.
    """
    rule = rule_of_ranks(context.target_archive, context.target)
    info = context.target_archive.info.ranks
    if rule is None or info is None or not context.is_same_shape or context.window is not None:
        return
    count = info.count or 0
    if not 1 < count <= _MOST_RANKS or context.r.size < 4:
        return
    if not context.is_parameter and context.reference.dtype.is_inexact:
        yield from _propose_sums(context, rule, count)
    sharding = _sharding_of(context, rule, count)
    if sharding is not None:
        yield from _propose_parts(sharding)


def find_weight_mistake(context: PairContext, reference: Record, target: Record) -> Hypothesis | None:
    """The mistake of ranks that makes the target's weight of the reference's; None if none does.

    Args:
        context: A pair that is made of the weight.
        reference: The weight, of the reference's archive.
        target: That of the target's.
    """
    sides = (context.reference_archive, reference), (context.target_archive, target)
    weights = read_pair(*sides, limit=LARGEST)
    mistakes = propose_rank_mistakes(weights) if weights.is_same_shape else ()
    left = weights.tolerance()
    return next((one for one in mistakes if relative_error(one.observed, one.predicted) <= left), None)


def _propose_sums(context: PairContext, rule: TensorRule, count: int) -> Iterator[Hypothesis]:
    """Propose sums over all ranks, or groups, taken again, averaged, or with a term of each rank."""
    channels = context.r.shape[-1] if context.r.ndim else 0
    bias, _ = find_vector(context.read_parameters(), BIASES, channels)
    yield from _propose_missing_sum(context, rule, bias, count)
    groups = [n for n in range(2, count + 1) if count % n == 0]
    chance = math.log(4 * len(groups))
    is_sum = any(word in ("sum", "avg") for word in rule.rule.replace(";", " ").split())
    for n in groups:
        yield from _propose_sums_of(context, bias, n, chance)
        if bias is not None:
            yield _propose_bias_on_ranks(context, bias, n, chance, is_sum=is_sum)
    for label, term, own in islice(context.read_neighbours(context.r.shape), _TERMS):
        for n in groups:
            yield context.propose(
                "term-on-ranks",
                f"the target is the reference plus {label} {n - 1} times: each of {n} ranks has added it",
                context.r + (n - 1) * (term if own is None else own),
                log_alternatives=chance + math.log(_TERMS),
                hint="A residual is added on each rank before the all-reduce.",
                facts={"ranks": n, "key": label},
            )


def _propose_sums_of(
    context: PairContext, bias: Values | None, n: int, chance: float
) -> Iterator[Hypothesis]:
    """Propose that n ranks are summed once more, or averaged, with the bias in the sum and without."""
    for shift, aside in ((bias, ", its bias aside"), (np.zeros(1), "")):
        if shift is None:
            continue
        product = context.r - shift
        yield context.propose(
            "reduced-again",
            f"the target is the reference times {n}{aside}: {n} ranks add up what each holds whole",
            n * product + shift,
            log_alternatives=chance,
            hint="An all-reduce is done twice, or of what no rank has a term of alone.",
            facts={"ranks": n},
        )
        yield context.propose(
            "reduced-mean",
            f"the target is the reference divided by {n}{aside}: the terms of {n} ranks are averaged",
            product / n + shift,
            log_alternatives=chance,
            hint="The mean over ranks is taken in the place of the sum, or terms are divided beforehand.",
            facts={"ranks": n},
        )


def _propose_bias_on_ranks(
    context: PairContext, bias: Values, n: int, chance: float, *, is_sum: bool
) -> Hypothesis:
    """Propose that each of n ranks adds the bias: to its term of a sum, or where a sum is missing."""
    what = f"the bias is added on each of {n} ranks"
    hint = "The bias belongs to the sum: one rank adds it, or all do so after the all-reduce."
    if is_sum:
        what = f"each of {n} ranks has added the bias to its term"
        hint = "The all-reduce that the bias comes after is missing: ranks hold terms here."
    return context.propose(
        "bias-on-ranks",
        f"the target is the reference plus the bias {n - 1} times: {what}",
        context.r + (n - 1) * bias,
        log_alternatives=chance,
        hint=hint,
        facts={"ranks": n},
    )


def _propose_missing_sum(
    context: PairContext, rule: TensorRule, bias: Values | None, count: int
) -> Iterator[Hypothesis]:
    """Propose that ranks hold terms of what each of them should hold the sum of."""
    if "replicated" not in rule.rule or "concat" in rule.rule:
        return
    runs = [context.target_archive.of_rank(rank) for rank in range(count)]
    terms = [values_of(run, context.target) for run in runs if run is not None]
    is_whole = len(terms) == count and all(np.isfinite(term).all() for term in terms)
    if not is_whole or all(np.array_equal(term, terms[0]) for term in terms):
        return
    total = np.sum(terms, axis=0)
    for further, aside in ((0.0, ""), (bias, "; each has the bias")):
        if further is not None:
            yield Hypothesis(
                "reduce-missing",
                f"{count} ranks hold terms that add up to the reference, and should each hold the sum{aside}",
                total,
                context.r + (count - 1) * further,
                count * context.r,
                log_alternatives=math.log(2),
                hint="An all-reduce is missing.",
                facts={"ranks": count},
            )


def _sharding_of(context: PairContext, entry: TensorRule, count: int) -> _Sharding | None:
    """How ranks hold parts of the tensor of a pair; None if they hold none, or along several axes."""
    ndim = context.r.ndim
    try:
        mesh = MeshRule.parse(entry.rule, entry.mesh or None).over(count)
    except UsageError:  # metadata that make no sense
        return None
    parts = [(rule, n) for rule, n in zip(mesh.rules, mesh.sizes, strict=True) if rule.kind == "concat"]
    if len(parts) != 1 or any(rule.kind not in ("concat", "replicated") for rule in mesh.rules):
        return None
    rule, ranks = parts[0]
    sizes = {int(axis): size for axis, size in entry.sizes.items() if axis.isdigit()}
    behind = [axis - len(context.target.shape) for axis in sizes] if rule.axis >= 0 else [rule.axis]
    if ranks < 2 or rule.cut is not None or len(behind) != 1 or not -ndim <= behind[0] < ndim:
        return None
    return _Sharding(context, rule, ranks, behind[0] % ndim)


def _propose_parts(sharding: _Sharding) -> Iterator[Hypothesis]:
    """Propose that ranks hold other parts of the tensor: by another rule, or one another's."""
    context, rule, count = sharding.context, sharding.rule, sharding.ranks
    tried: list[Values] = []
    for other, kind, text, hint in _other_rules(rule, count):
        predicted = sharding.predict(other)
        if predicted is not None and not np.array_equal(predicted, context.r):
            tried.append(predicted)
            yield context.propose(
                kind, text, predicted, log_alternatives=math.log(4), hint=hint, facts={"rule": other.text}
            )
    exchanged = _exchanged_parts(sharding)
    if exchanged is not None and not any(np.array_equal(exchanged.predicted, one) for one in tried):
        yield exchanged


def _other_rules(rule: Rule, count: int) -> Iterator[tuple[Rule, str, str, str]]:
    """Rules by which ranks may hold parts in the place of the right one, with kind, text and hint of each."""
    copied = rule.copies * rule.rounds
    if rule.parts != (1,):
        each = len(rule.parts) if len(rule.parts) > 1 else rule.parts[0]
        yield (
            replace(rule, parts=(1,), part_copies=()),
            "fused-cut",
            f"each of {count} ranks was given one piece of a tensor of {each} parts, and takes it for its "
            "piece of each part",
            "A fused weight, as of gate and up, is cut as one: each rank needs its piece of each part.",
        )
    else:
        for each in _INTERLEAVED:
            yield (
                replace(rule, parts=(each,)),
                "fused-cut",
                f"each of {count} ranks was given its piece of each of {each} parts of the tensor, and takes "
                "them for one piece of the whole",
                "A weight is laid out as a fused one, the parts of which each rank has a piece of.",
            )
    if copied > 1:
        other = replace(rule, copies=rule.rounds, rounds=rule.copies)
        held = count // copied
        is_succession = rule.copies > 1
        orders = ["each in succession", "all of them again and again"]
        yield (
            other,
            "repeats-order",
            f"the {held} parts, of which there are {copied} copies on {count} ranks, are repeated "
            f"{orders[is_succession]} and used as {orders[not is_succession]}",
            "Heads of keys are repeated as a whole and used each in succession, or the other way round.",
        )


def _exchanged_parts(sharding: _Sharding) -> Hypothesis | None:
    """State that ranks hold one another's parts: for each of the target the nearest of the reference."""
    context, rule, count = sharding.context, sharding.rule, sharding.ranks
    wholes = sharding.wholes
    if wholes is None:
        return None
    own_rule = replace(rule, axis=sharding.axis)
    try:
        ours, theirs = (own_rule.split(np.concatenate(side, sharding.axis), count) for side in wholes[:2])
    except (UsageError, ValueError):
        return None
    members = [ranks[0] for ranks in rule.distinct(count)]
    sources = [
        _nearest(theirs[own], ours, members, own)
        for own in members
        if all(ours[rank].shape == theirs[own].shape for rank in members)
    ]
    if len(sources) < len(members) or sources == members:
        return None
    joined = own_rule.join([ours[rank] for rank in sources])
    starts = np.cumsum([part.shape[sharding.axis] for part in wholes[0]])[:-1]
    wrong = [(own, rank) for own, rank in zip(members, sources, strict=True) if own != rank]
    shown = ", ".join(f"rank {own} has that of rank {rank}" for own, rank in wrong[:_TERMS])
    return context.propose(
        "rank-parts",
        f"ranks have other parts than their own: {shown}{', …' if len(wrong) > _TERMS else ''}",
        np.split(joined, starts, sharding.axis)[wholes[2]],
        log_alternatives=len(wrong) * math.log(len(members)),
        hint="A rank loads another one's shard: its number, or the order of ranks in a group.",
        facts={"parts": [list(pair) for pair in wrong[:_TERMS]]},
    )


def _nearest(piece: Values, pieces: Sequence[Values], ranks: Sequence[int], own: int) -> int:
    """The rank whose piece of the reference is nearest to another piece; of equally near ones its own."""
    return min(ranks, key=lambda rank: (relative_error(piece, pieces[rank]), rank != own))
