"""Propose other attention cores: of queries, keys and values beside, with one thing done otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from tensorcap.diagnosis.attention.fits import fit_angles, fit_each_head, fit_scale, see_by_rule
from tensorcap.diagnosis.attention.recognition import Sample, recognise
from tensorcap.diagnosis.attention.variants import Variant, list_variants
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.hypothesis import LESSENED, Hypothesis, inherited_error
from tensorcap.diagnosis.values import Values, relative_error

_ROUNDINGS: Final = 12.0  # that it may leave: scores, their softmax and the result are rounded
_HOPEFUL: Final = (
    1.5 * LESSENED
)  # share of the error that a variant may leave of few, to be worked out of all
_MOST_HOPEFUL: Final = 6
_CLEAR: Final = 0.05  # share of the error; if each variant leaves more, something else is fitted
_HINTS: Final = {
    "attention-scale": "The scale of scores: 1/sqrt(head_dim), one of the configuration, or applied twice.",
    "attention-mask": "The mask: causal or not, the length of the window, or off by one; padding.",
    "layer-schedule": "Which layers do what is a schedule: shifted, or this layer is taken for another.",
    "attention-bias": "The bias of positions: left out in this layer, times a factor, of other heads.",
    "attention-sinks": "Sinks do not take part in the softmax, or are other ones.",
    "attention-softcap": "The soft cap of scores is missing, or another one.",
    "attention-heads": "Heads of keys are repeated in another order: each by itself, or all in turn.",
    "attention-rotation": "Rotary positions: layout (halves, pairs), sign of sines, which channels.",
    "attention-positions": "Queries and keys count positions from other numbers: a cache, padding.",
    "attention-norm": "The norms of queries and keys: left out, or on the other side of the rotation.",
    "attention-layout": "How a fused result is split, or how channels are split into heads.",
    "token-shift": "Tokens are one off: padding, a cache, a convolution.",
    "bias-dropped": "The bias of a projection was dropped.",
}


def propose_attention_cores(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that the target's core differs in one thing from the reference's, each of its own values.

    1. Queries, keys, values, masks and biases of both sides are collected; the target's that are not recorded
       are those of the reference.
    2. The core that makes the reference is found; if none does, sinks are fitted.
    3. Proposed of the target's values are the same core (an inherited error), variants that differ in one
       thing, and another scale of the scores, fitted. Variants are compared by a few heads and queries first.
    4. If none of these holds, numbers and indices of each head are fitted, and what is visible is solved.

    As many heads are worked out as are affordable; rows that see nothing do not count.
    """
    attention = recognise(context)
    if attention is None:
        return
    reference, target = (
        side[:, :, attention.heads][attention.rows] for side in (attention.reference, attention.target)
    )
    usual = Variant("", "", attention.theirs, attention.usual)
    baseline = attention.compute(usual)
    if not attention.is_of_reference:
        yield inherited_error(target, baseline, reference)
    sample = Sample.of(attention)
    few = sample.compute(usual)
    before = relative_error(sample.target, few)
    variants = list(list_variants(attention.usual, attention.theirs, attention.ours, context))

    def propose(variant: Variant, predicted: Values, *, tried: int, is_whole: bool) -> Hypothesis:
        return Hypothesis(
            variant.kind,
            variant.text,
            target if is_whole else sample.target,
            predicted,
            baseline if is_whole else few,
            parameters=variant.parameters,
            log_alternatives=math.log(max(tried, 1)) + variant.log_alternatives,
            hint=_HINTS[variant.kind],
            facts={"reference": asdict(attention.usual), "target": asdict(variant.core), **variant.facts},
            roundings=_ROUNDINGS,
        )

    results = [sample.compute(variant) for variant in variants]
    errors = [relative_error(sample.target, result) for result in results]
    order = sorted(range(len(variants)), key=lambda at: (not math.isfinite(errors[at]), errors[at]))
    hopeful = [at for at in order if errors[at] <= _HOPEFUL * before][:_MOST_HOPEFUL]
    for at, variant in enumerate(variants):
        is_whole = at in hopeful
        predicted = attention.compute(variant) if is_whole else results[at]
        yield propose(variant, predicted, tried=len(variants), is_whole=is_whole)
    fitted = [fit_scale(context, attention, sample)]
    least = min([*(errors[at] for at in hopeful), sample.error(fitted[0])])
    if least > max(_ROUNDINGS * context.rounding, _CLEAR * before):
        fits = fit_angles(attention, sample), fit_each_head(attention, sample), see_by_rule(attention)
        fitted += itertools.chain.from_iterable(fits)
    for variant in fitted:
        tried = len(variants) + len(fitted)
        yield propose(variant, attention.compute(variant), tried=tried, is_whole=True)
