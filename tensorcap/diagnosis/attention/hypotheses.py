"""The core of an attention, from queries, keys and values beside, and what the target does otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Core, Mask, Parts
from tensorcap.diagnosis.attention.parts import parts_of
from tensorcap.diagnosis.constants import name_factor
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.scoring import LESSENED, Hypothesis, Values, inherited_error, relative_error

_LARGEST: Final = 1 << 21  # scores that are worked out: of as many heads as that allows
_ROUNDINGS: Final = 12.0  # that it may leave: scores, their softmax and the result are rounded
_ALLOWED: Final = 1e-5  # what the order of sums may make of the reference in float32
_STEPS: Final = 24
_LIKELY: Final = 4  # cores that sinks are tried with
_HINTS: Final = {
    "attention-scale": "The scale of scores: 1/sqrt(head_dim), one of the configuration, or applied twice.",
    "attention-mask": "The mask: causal or not, the length of the window, or off by one; padding.",
    "attention-bias": "The bias of relative positions is missing in this layer.",
    "attention-sinks": "Sinks do not take part in the softmax.",
    "attention-softcap": "The soft cap of scores is missing, or another one.",
    "attention-heads": "Heads of keys are repeated in another order: each by itself, or all in turn.",
    "attention-rotation": "Rotary positions: layout (halves, pairs), the sign of sines, or not applied.",
}


def propose_attention_cores(context: PairContext) -> Iterator[Hypothesis]:
    """The target by a core that differs in one thing from the reference's, each of its own values."""
    r, t, head_dim = context.r, context.t, context.head_dim
    is_core = context.is_same_shape and r.ndim == 3 and head_dim and context.window is None
    if not is_core or not head_dim or r.shape[-1] % head_dim:
        return
    count = r.shape[-1] // head_dim
    ours, theirs = (
        parts_of(archive, record, count, head_dim, r.shape)
        for archive, record in (
            (context.reference_archive, context.reference),
            (context.target_archive, context.target),
        )
    )
    if ours is None or theirs is None or ours.k.shape != theirs.k.shape or ours.k.shape[2] < 2:
        return
    theirs = _completed(theirs, ours)
    fitting = _LARGEST // (r.shape[0] * r.shape[1] * ours.k.shape[2])
    if not fitting:
        return
    heads = np.unique(np.linspace(0, count - 1, min(count, fitting)).astype(np.int64))
    # What a token that sees nothing is given, is not defined.
    rows = np.asarray(np.ones(r.shape[:2], np.bool_) if ours.seen is None else ours.seen[:, 0].any(axis=-1))

    made, shown = (side.reshape(*r.shape[:2], count, head_dim)[:, :, heads][rows] for side in (r, t))
    allowed = max(4 * context.rounding * LESSENED, _ALLOWED)
    known = _known(context, ours, theirs, made, heads, rows, allowed)
    if known is None:
        return
    usual, theirs = known

    def result(core: Core, some: Values = heads) -> Values:
        return np.asarray(theirs(core, some)[rows])

    baseline = result(usual)
    yield inherited_error(shown, baseline, made)
    for kind, text, core in _changes(usual, context, theirs):
        facts = {"reference": _facts(usual), "target": _facts(core)}
        predicted = result(core)
        yield Hypothesis(
            kind,
            text,
            shown,
            predicted,
            baseline,
            log_alternatives=math.log(32),
            hint=_HINTS[kind],
            facts=facts,
            roundings=_ROUNDINGS,
        )
    few = _few(heads)
    sample = shown[:, np.isin(heads, few)]
    scale = _fitted_scale(
        usual.scale, lambda value: relative_error(sample, result(replace(usual, scale=value), few))
    )
    factor = scale / usual.scale
    names = name_factor(factor, context, 0.01)
    text = f"scores of the target are scaled by {factor:.4g} times what the reference has"
    text += f", which is {names[0]}" if names else ""
    core = replace(usual, scale=scale)
    told: dict[str, object] = {"factor": factor, "equals": list(names)}
    log_alternatives = math.log(_STEPS)
    kind, predicted = "attention-scale", result(core)
    yield Hypothesis(
        kind,
        text,
        shown,
        predicted,
        baseline,
        parameters=1,
        log_alternatives=log_alternatives,
        hint=_HINTS[kind],
        facts=told,
        roundings=_ROUNDINGS,
    )


def _known(
    context: PairContext,
    ours: Parts,
    theirs: Parts,
    made: Values,
    heads: Values,
    rows: Values,
    allowed: float,
) -> tuple[Core, Parts] | None:
    """The core that makes the reference, and the target's parts, with sinks where they had to be fitted.

    Under replay the reference's core was given the target's queries, keys and values.
    """
    few = _few(heads)
    sample = made[:, np.isin(heads, few)]

    def left(core: Core, sides: Sequence[Parts], shown: Values, some: Values) -> float:
        return min(relative_error(shown, parts(core, some)[rows]) for parts in sides)

    cores = sorted(_usual(context, ours), key=lambda core: left(core, (ours, theirs), sample, few))
    if left(cores[0], (ours, theirs), made, heads) <= allowed:
        return cores[0], theirs
    if ours.sinks is None:
        for core, parts in itertools.product(cores[:_LIKELY], (ours, theirs)):
            sinks = parts.sinks_of(core, heads, made, rows)
            sides = replace(ours, sinks=sinks), replace(theirs, sinks=sinks)
            if left(core, sides, made, heads) <= allowed:
                return core, sides[1]
    return None


def _few(heads: Values) -> Values:
    """A few heads, which are enough to choose by."""
    return heads[:: max(1, len(heads) // 4)]


def _completed(theirs: Parts, ours: Parts) -> Parts:
    """With the reference's mask and bias where the target has none of its own, and its sinks, a parameter."""
    return replace(
        theirs,
        seen=ours.seen if theirs.seen is None else theirs.seen,
        bias=ours.bias if theirs.bias is None else theirs.bias,
        sinks=ours.sinks,
    )


def _usual(context: PairContext, parts: Parts) -> Iterator[Core]:
    """What the configuration says, and what is common."""
    dims = context.head_dim or 1
    scalar, multiplier = (
        context.config_number("query_pre_attn_scalar"),
        context.config_number("attention_multiplier"),
    )
    scales = [dims**-0.5, 1.0, *([scalar**-0.5] if scalar else []), *([multiplier] if multiplier else [])]
    caps = dict.fromkeys((0.0, context.config_number("attn_logit_softcapping") or 0.0))
    for scale in dict.fromkeys(scales):
        for rotation in ("halves", "pairs") if parts.cos is not None else ("none",):
            for cap in caps:
                for mask, is_causal, window in _sights(context, parts):
                    yield Core(scale, rotation, is_causal, window, cap, mask=mask)


def _sights(context: PairContext, parts: Parts) -> list[tuple[Mask, bool, int]]:
    """What is seen: what the mask says, and where it only says which tokens are padded, what is usual."""
    told = parts.of_mask()
    mask: Mask = "none" if told is None else "padding"
    windows = dict.fromkeys((0, int(context.config_number("sliding_window") or 0)))
    usual = [(mask, is_causal, window) for is_causal in (True, False) for window in windows]
    return usual if told in (None, ("padding", False, 0)) else [told] if told else []


def _changes(usual: Core, context: PairContext, parts: Parts) -> Iterator[tuple[str, str, Core]]:
    """Cores that differ in one thing."""
    if parts.cos is not None:
        for rotation in ("halves", "pairs", "turned", "none", "q alone", "k alone"):
            if rotation != usual.rotation:
                text = f"the target rotates: {rotation}; the reference: {usual.rotation}"
                yield "attention-rotation", text, replace(usual, rotation=rotation)
    known = [parts.sight(usual)]
    for text, core in _other_sights(usual, context):
        sight = parts.sight(core)
        if not any(_is_same(sight, other) for other in known):
            known.append(sight)
            yield "attention-mask", text, core
    if parts.bias is not None:
        text = "the target adds no bias of positions to scores"
        yield "attention-bias", text, replace(usual, has_bias=False)
    if parts.sinks is not None:
        text = "the softmax of the target is without sinks"
        yield "attention-sinks", text, replace(usual, has_sinks=False)
    cap = 0.0 if usual.softcap else context.config_number("attn_logit_softcapping") or 0.0
    if cap != usual.softcap:
        text = (
            "the target has no soft cap of scores" if usual.softcap else f"the target caps scores at {cap:g}"
        )
        yield "attention-softcap", text, replace(usual, softcap=cap)
    if 1 < parts.k.shape[1] < parts.q.shape[1]:
        text = "the target repeats all heads of keys in turn, the reference each of them"
        yield "attention-heads", text, replace(usual, is_tiled=not usual.is_tiled)


def _other_sights(usual: Core, context: PairContext) -> Iterator[tuple[str, Core]]:
    """Cores that see other tokens."""
    if usual.mask == "whole":
        yield "the target does not look at the mask", replace(usual, mask="none")
        yield "the target sees all tokens that are not padded", replace(usual, mask="padding")
        text = "the target is causal and looks at nothing else of the mask"
        yield text, replace(usual, mask="none", is_causal=True)
        return
    text = "the target is not causal" if usual.is_causal else "the target is causal, the reference is not"
    yield text, replace(usual, is_causal=not usual.is_causal)
    if usual.mask == "padding":
        yield "tokens of the target see padded ones", replace(usual, mask="none")
        if usual.is_causal or usual.window:
            text = "the target does not look at the mask"
            yield text, replace(usual, mask="none", is_causal=False, window=0)
    if usual.is_causal:
        yield "tokens of the target see the next one, too", replace(usual, ahead=1)
        yield "tokens of the target do not see themselves", replace(usual, ahead=-1)
    window = usual.window or int(context.config_number("sliding_window") or 0)
    for other in dict.fromkeys((0, window - 1, window, window + 1)):
        if other >= 0 and other != usual.window:
            sees = [f"a window of {w} tokens" if w else "all tokens" for w in (other, usual.window)]
            text = f"the target sees {sees[0]}, the reference {sees[1]}"
            yield text, replace(usual, window=other)


def _is_same(one: Values, other: Values) -> bool:
    return bool((one == other).all())


def _fitted_scale(usual: float, left: Callable[[float], float]) -> float:
    """The scale that leaves least, by golden section over its logarithm."""
    low, high = math.log(usual / 64), math.log(usual * 64)
    ratio = (math.sqrt(5) - 1) / 2
    inner, outer = high - ratio * (high - low), low + ratio * (high - low)
    errors = left(math.exp(inner)), left(math.exp(outer))
    for _ in range(2 * _STEPS):
        if errors[0] < errors[1]:
            high, outer, inner = outer, inner, outer - ratio * (outer - low)
            errors = left(math.exp(inner)), errors[0]
        else:
            low, inner, outer = inner, outer, inner + ratio * (high - inner)
            errors = errors[1], left(math.exp(outer))
    return math.exp((low + high) / 2)


def _facts(core: Core) -> dict[str, object]:
    return {name: getattr(core, name) for name in core.__dataclass_fields__}
