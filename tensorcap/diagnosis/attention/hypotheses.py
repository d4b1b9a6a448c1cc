"""Propose other attention cores: of queries, keys and values beside, with one thing done otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Core, Mask, Parts
from tensorcap.diagnosis.attention.parts import collect_parts
from tensorcap.diagnosis.constants import name_factor
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.golden_section import RATIO
from tensorcap.diagnosis.hypothesis import LESSENED, Hypothesis, inherited_error
from tensorcap.diagnosis.values import Values, evenly_spaced, number_text, relative_error

_LARGEST: Final = 1 << 21  # scores that are worked out: of as many heads as that allows
_ROUNDINGS: Final = 12.0  # that it may leave: scores, their softmax and the result are rounded
_ALLOWED: Final = 1e-5  # what the order of sums may make of the reference in float32
_STEPS: Final = 24
_NAME_TOLERANCE: Final = 0.01  # by which a fitted scale is named
_LOG_CHANGES: Final = math.log(32)  # how many cores differ in one thing, about
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
    """Propose that the target's core differs in one thing from the reference's, each of its own values.

    1. Queries, keys, values, masks and biases of both sides are collected; the target's that are not recorded
       are those of the reference.
    2. The core that makes the reference is found; if none does, sinks are fitted.
    3. Proposed of the target's values are the same core (an inherited error), cores that differ in one thing,
       and another scale of the scores, fitted.

    As many heads are worked out as are affordable; rows that see nothing do not count.
    """
    r, t, head_dim = context.r, context.t, context.head_dim
    is_core = context.is_same_shape and r.ndim == 3 and head_dim and context.window is None
    if not is_core or not head_dim or r.shape[-1] % head_dim:
        return
    count = r.shape[-1] // head_dim
    ours, theirs = (
        collect_parts(archive, record, count, head_dim, r.shape) for archive, record in context.sides
    )
    if ours is None or theirs is None or ours.k.shape != theirs.k.shape or ours.k.shape[2] < 2:
        return
    if not ours.q.shape == theirs.q.shape == (r.shape[0], count, r.shape[1], head_dim):
        return  # keys or values of a cross attention, which are as many as the encoder's tokens
    theirs = _complete(theirs, ours)
    most_heads = _LARGEST // (r.shape[0] * r.shape[1] * ours.k.shape[2])
    if not most_heads:
        return
    heads = np.unique(evenly_spaced(count, most_heads))
    # The result of a token that sees nothing is not defined.
    rows = np.asarray(np.ones(r.shape[:2], np.bool_) if ours.mask is None else ours.mask[:, 0].any(axis=-1))

    reference, target = (side.reshape(*r.shape[:2], count, head_dim)[:, :, heads][rows] for side in (r, t))
    allowed = context.tolerance(4 * LESSENED, _ALLOWED)
    core_and_parts = _find_core(context, ours, theirs, reference, heads, rows, allowed)
    if core_and_parts is None:
        return
    usual, theirs = core_and_parts

    def result(core: Core, some: Values = heads) -> Values:
        return np.asarray(theirs(core, some)[rows])

    baseline = result(usual)
    yield inherited_error(target, baseline, reference)
    for kind, text, core in _mutate_core(usual, context, theirs):
        yield Hypothesis(
            kind,
            text,
            target,
            result(core),
            baseline,
            log_alternatives=_LOG_CHANGES,
            hint=_HINTS[kind],
            facts={"reference": asdict(usual), "target": asdict(core)},
            roundings=_ROUNDINGS,
        )
    few = _sample_heads(heads)
    sample = target[:, np.isin(heads, few)]
    scale = _fit_scale(
        usual.scale, lambda value: relative_error(sample, result(replace(usual, scale=value), few))
    )
    factor = scale / usual.scale
    names = name_factor(factor, context, _NAME_TOLERANCE)
    text = f"scores of the target are scaled by {number_text(factor, 1.0)} times what the reference has"
    yield Hypothesis(
        "attention-scale",
        text + (f", which is {names[0]}" if names else ""),
        target,
        result(replace(usual, scale=scale)),
        baseline,
        parameters=1,
        log_alternatives=math.log(_STEPS),
        hint=_HINTS["attention-scale"],
        facts={"factor": factor, "equals": list(names)},
        roundings=_ROUNDINGS,
    )


def _find_core(
    context: PairContext,
    ours: Parts,
    theirs: Parts,
    reference: Values,
    heads: Values,
    rows: Values,
    allowed: float,
) -> tuple[Core, Parts] | None:
    """Find the core that makes the reference, and the target's parts, with sinks if they had to be fitted.

    1. Usual cores are sorted by the error that each leaves of a few heads, by the reference's parts or the
       target's: under replay the reference's core was given those.
    2. The best one is taken if it leaves no more than is allowed of all heads.
    3. Otherwise, if no sinks are known, they are fitted to the likeliest cores.
    """
    few = _sample_heads(heads)
    sample = reference[:, np.isin(heads, few)]

    def error(core: Core, sides: Sequence[Parts], values: Values, some: Values) -> float:
        return min(relative_error(values, parts(core, some)[rows]) for parts in sides)

    cores = sorted(
        _list_usual_cores(context, ours), key=lambda core: error(core, (ours, theirs), sample, few)
    )
    if error(cores[0], (ours, theirs), reference, heads) <= allowed:
        return cores[0], theirs
    if ours.sinks is None:
        for core, parts in itertools.product(cores[:_LIKELY], (ours, theirs)):
            sinks = parts.fit_sinks(core, heads, reference, rows)
            sides = replace(ours, sinks=sinks), replace(theirs, sinks=sinks)
            if error(core, sides, reference, heads) <= allowed:
                return core, sides[1]
    return None


def _sample_heads(heads: Values) -> Values:
    """Choose a few heads to compare cores by."""
    return heads[:: max(1, len(heads) // 4)]


def _complete(theirs: Parts, ours: Parts) -> Parts:
    """Add the reference's mask and bias if the target has none of its own, and its sinks, a parameter."""
    return replace(
        theirs,
        mask=ours.mask if theirs.mask is None else theirs.mask,
        bias=ours.bias if theirs.bias is None else theirs.bias,
        sinks=ours.sinks,
    )


def _list_usual_cores(context: PairContext, parts: Parts) -> Iterator[Core]:
    """Cores that the configuration says, and common ones."""
    dims = context.head_dim or 1
    scales = [dims**-0.5, 1.0]
    if scalar := context.config_number("query_pre_attn_scalar"):
        scales.append(scalar**-0.5)
    if multiplier := context.config_number("attention_multiplier"):
        scales.append(multiplier)
    caps = dict.fromkeys((0.0, context.config_number("attn_logit_softcapping") or 0.0))
    for scale in dict.fromkeys(scales):
        for rotation in ("halves", "pairs") if parts.cos is not None else ("none",):
            for cap in caps:
                for mask, is_causal, window in _list_extents(context, parts):
                    yield Core(scale, rotation, is_causal, window, cap, mask=mask)


def _list_extents(context: PairContext, parts: Parts) -> list[tuple[Mask, bool, int]]:
    """List what may be visible: what the mask says, or usual extents if it only says what is padded."""
    extent = parts.analyse_mask()
    mask: Mask = "none" if extent is None else "padding"
    windows = dict.fromkeys((0, int(context.config_number("sliding_window") or 0)))
    usual = [(mask, is_causal, window) for is_causal in (True, False) for window in windows]
    return usual if extent in (None, ("padding", False, 0)) else [extent] if extent else []


def _mutate_core(usual: Core, context: PairContext, parts: Parts) -> Iterator[tuple[str, str, Core]]:
    """Cores that differ in one thing: kind, text, core. Those that see the same are listed once."""
    if parts.cos is not None:
        for rotation in ("halves", "pairs", "turned", "none", "q alone", "k alone"):
            if rotation != usual.rotation:
                text = f"the target rotates: {rotation}; the reference: {usual.rotation}"
                yield "attention-rotation", text, replace(usual, rotation=rotation)
    known = [parts.visible_keys(usual)]
    for text, core in _mutate_visible_keys(usual, context):
        visible = parts.visible_keys(core)
        if not any((visible == other).all() for other in known):
            known.append(visible)
            yield "attention-mask", text, core
    if parts.bias is not None:
        text = "the target adds no bias of positions to scores"
        yield "attention-bias", text, replace(usual, has_bias=False)
    if parts.sinks is not None:
        text = "the softmax of the target is without sinks"
        yield "attention-sinks", text, replace(usual, has_sinks=False)
    cap = 0.0 if usual.softcap else context.config_number("attn_logit_softcapping") or 0.0
    if cap != usual.softcap:
        text = f"the target caps scores at {cap:g}" if cap else "the target has no soft cap of scores"
        yield "attention-softcap", text, replace(usual, softcap=cap)
    if 1 < parts.k.shape[1] < parts.q.shape[1]:
        text = "the target repeats all heads of keys in turn, the reference each of them"
        yield "attention-heads", text, replace(usual, is_tiled=not usual.is_tiled)


def _mutate_visible_keys(usual: Core, context: PairContext) -> Iterator[tuple[str, Core]]:
    """Cores that see other tokens, with a text: the mask not looked at, one token off, another window."""
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


def _fit_scale(usual: float, error: Callable[[float], float]) -> float:
    """Find the scale of the least error by golden section over its logarithm; one attention each step."""
    low, high = math.log(usual / 64), math.log(usual * 64)
    inner, outer = high - RATIO * (high - low), low + RATIO * (high - low)
    errors = error(math.exp(inner)), error(math.exp(outer))
    for _ in range(2 * _STEPS):
        if errors[0] < errors[1]:
            high, outer, inner = outer, inner, outer - RATIO * (outer - low)
            errors = error(math.exp(inner)), errors[0]
        else:
            low, inner, outer = inner, outer, inner + RATIO * (high - inner)
            errors = errors[1], error(math.exp(outer))
    return math.exp((low + high) / 2)
