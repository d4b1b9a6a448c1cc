"""Fit what a target's attention does otherwise: scales, angles, indices of heads, and what is visible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Core, Parts
from tensorcap.diagnosis.attention.recognition import Attention, Sample
from tensorcap.diagnosis.attention.rotary import make_tables
from tensorcap.diagnosis.attention.variants import Variant
from tensorcap.diagnosis.attention.visibility import find_rules
from tensorcap.diagnosis.constants import name_factor
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.golden_section import RATIO
from tensorcap.diagnosis.values import Values, number_text

_STEPS: Final = 32  # of a golden section: 2e-7 of the range
_STEPS_EACH: Final = 20  # of one that is for each head
_NAME_TOLERANCE: Final = 0.01  # by which a fitted scale is named
_GRID: Final = 24  # numbers of a table that are tried before one is refined
_SHOWN: Final = 16  # heads that a text has


def fit_scale(context: PairContext, attention: Attention, sample: Sample) -> Variant:
    """Fit another scale of the scores."""
    usual = attention.usual

    def scaled(logarithm: float) -> Variant:
        factor = math.exp(logarithm)
        names = name_factor(factor, context, _NAME_TOLERANCE)
        text = f"scores of the target are scaled by {number_text(factor, 1.0)} times what the reference has"
        text += f", which is {names[0]}" if names else ""
        core = replace(usual, scale=usual.scale * factor)
        facts = {"factor": factor, "equals": list(names)}
        return Variant("attention-scale", text, attention.theirs, core, parameters=1, facts=facts)

    return scaled(_minimise(-math.log(64), math.log(64), lambda at: sample.error(scaled(at))))


def _minimise(low: float, high: float, error: Callable[[float], float]) -> float:
    """Find the number of the least error by golden section; one attention each step."""
    inner, outer = high - RATIO * (high - low), low + RATIO * (high - low)
    errors = error(inner), error(outer)
    for _ in range(_STEPS):
        if errors[0] < errors[1]:
            high, outer, inner = outer, inner, outer - RATIO * (outer - low)
            errors = error(inner), errors[0]
        else:
            low, inner, outer = inner, outer, inner + RATIO * (high - inner)
            errors = errors[1], error(outer)
    return (low + high) / 2


def fit_angles(attention: Attention, sample: Sample) -> Iterator[Variant]:
    """Fit another base of the angles, and a number that positions are divided by.

    The error has many minima: of numbers that are even in their logarithm the best one is refined.
    """
    usual, parts = attention.usual, attention.theirs
    if parts.angles is None or usual.rotation == "none":
        return
    for what, make, low, high in make_tables(parts.angles):

        def turned(logarithm: float, what: str = what, make: Callable[[float], Values] = make) -> Variant:
            number = math.exp(logarithm)
            other = replace(parts, tables={what: make(number)})
            text = f"the target rotates by {what.format(f'{number:.5g}')}"
            return Variant("attention-rotation", text, other, replace(usual, table=what), parameters=1)

        grid = np.linspace(math.log(low), math.log(high), _GRID).tolist()
        step = grid[1] - grid[0]
        best = min(grid, key=lambda logarithm: sample.error(turned(logarithm)))
        yield turned(_minimise(best - step, best + step, lambda at: sample.error(turned(at))))


def fit_each_head(attention: Attention, sample: Sample) -> Iterator[Variant]:
    """Fit, for each head, which head of keys, values, biases or sinks it has, and a factor of its bias.

    Each candidate is tried in all heads at once; a head takes the one that leaves least of it.
    """
    usual, parts = attention.usual, attention.theirs
    count = parts.q.shape[1]
    if len(attention.heads) < count:
        return
    every = replace(sample, heads=attention.heads)
    rows = attention.target[sample.batches][:, sample.queries][sample.rows]

    def best(variants: Sequence[Variant]) -> tuple[int, ...]:
        errors = [((every.compute(variant) - rows) ** 2).sum(axis=(0, 2)) for variant in variants]
        return tuple(np.argmin(errors, axis=0).tolist())

    keys = parts.k.shape[1]
    if keys > 1:
        same = tuple(head // (count // keys) for head in range(count))
        for what, of_keys, of_values in (("keys and values", 1, 1), ("keys", 1, 0), ("values", 0, 1)):

            def looking(heads: tuple[int, ...], of_keys: int = of_keys, of_values: int = of_values) -> Core:
                return replace(
                    usual,
                    key_heads=heads if of_keys else usual.key_heads,
                    value_heads=heads if of_values else usual.value_heads,
                )

            chosen = best([Variant("", "", parts, looking((one,) * count)) for one in range(keys)])
            if chosen != same:
                heads = ", ".join(map(str, chosen[:_SHOWN]))
                text = f"heads of the target look at heads {heads} of {what}"
                yield Variant("attention-heads", text, parts, looking(chosen), parameters=count)
    if parts.bias is not None and parts.bias.shape[1] == count > 1:
        others = [replace(parts, bias=parts.bias[:, [one] * count]) for one in range(count)]
        chosen = best([Variant("", "", other, usual) for other in others])
        if chosen != tuple(range(count)):
            text = f"heads of the target have the biases of heads {', '.join(map(str, chosen[:_SHOWN]))}"
            other = replace(parts, bias=parts.bias[:, list(chosen)])
            yield Variant("attention-bias", text, other, usual, parameters=count)
        factors = _minimise_each(every, rows, parts, usual)
        text = "the bias of each head of the target is that of the reference times a number, "
        text += f"{factors.min():.4g} to {factors.max():.4g}"
        other = replace(parts, bias=parts.bias * factors[:, None, None])
        yield Variant("attention-bias", text, other, usual, parameters=count)
    if parts.sinks is not None:
        target = attention.target[:, :, attention.heads][attention.rows]
        sinks = parts.fit_sinks(replace(usual, has_sinks=False), attention.heads, target, attention.rows)
        text = "sinks of the target are other ones"
        yield Variant("attention-sinks", text, replace(parts, sinks=sinks), usual, parameters=count)


def _minimise_each(sample: Sample, rows: Values, parts: Parts, usual: Core) -> Values:
    """Find the factor of each head's bias that leaves least, by golden section over its logarithm."""
    assert parts.bias is not None
    bias, count = parts.bias, parts.q.shape[1]

    def errors(logarithms: Values) -> Values:
        other = replace(parts, bias=bias * np.exp(logarithms)[:, None, None])
        return np.asarray(((sample.compute(Variant("", "", other, usual)) - rows) ** 2).sum(axis=(0, 2)))

    low, high = np.full(count, -math.log(64)), np.full(count, math.log(64))
    for _ in range(_STEPS_EACH):
        inner, outer = high - RATIO * (high - low), low + RATIO * (high - low)
        is_inner = errors(inner) < errors(outer)
        low, high = np.where(is_inner, low, inner), np.where(is_inner, outer, high)
    return np.asarray(np.exp((low + high) / 2))


def see_by_rule(attention: Attention) -> Iterator[Variant]:
    """Propose rules of what is seen that agree with the target, of one sequence and then of all."""
    if attention.theirs.gives_shares:
        return
    first = np.array([0])
    theirs, usual = attention.theirs, attention.usual
    result = attention.target[first][:, :, attention.heads]
    visible = theirs.visible_keys(usual)
    core = replace(usual, mask="whole", is_causal=False, window=0, ahead=0)
    for rule in find_rules(usual, theirs.of_batches(first), attention.heads, result):
        seen = rule.apply(visible)
        mask = np.broadcast_to(seen, (len(attention.target), *seen.shape[1:]))
        alternatives = rule.choices * math.log(2)
        yield Variant("attention-mask", rule.text, replace(theirs, mask=mask), core, 0, alternatives)
