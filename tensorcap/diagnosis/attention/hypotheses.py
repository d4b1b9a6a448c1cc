"""Propose other attention cores: of queries, keys and values beside, with one thing done otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Core, Mask, Parts
from tensorcap.diagnosis.attention.parts import collect_sides
from tensorcap.diagnosis.attention.variants import Variant, list_variants
from tensorcap.diagnosis.attention.visibility import find_rules
from tensorcap.diagnosis.constants import name_factor
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.golden_section import RATIO
from tensorcap.diagnosis.hypothesis import LESSENED, Hypothesis, inherited_error
from tensorcap.diagnosis.values import Values, evenly_spaced, number_text, relative_error
from tensorcap_formats.keys import module_of

_LARGEST: Final = 1 << 21  # scores that are worked out: of as many heads as that allows
_ROUNDINGS: Final = 12.0  # that it may leave: scores, their softmax and the result are rounded
_ALLOWED: Final = 1e-5  # what the order of sums may make of the reference in float32
_STEPS: Final = 24
_NAME_TOLERANCE: Final = 0.01  # by which a fitted scale is named
_LIKELY: Final = 4  # cores that sinks are tried with
_FEW_HEADS: Final = 4  # by which cores and variants are compared
_FEW_QUERIES: Final = 16
_FEW_SEQUENCES: Final = 4
_HOPEFUL: Final = (
    1.5 * LESSENED
)  # share of the error that a variant may leave of few, to be worked out of all
_MOST_HOPEFUL: Final = 6
_HINTS: Final = {
    "attention-scale": "The scale of scores: 1/sqrt(head_dim), one of the configuration, or applied twice.",
    "attention-mask": "The mask: causal or not, the length of the window, or off by one; padding.",
    "attention-bias": "The bias of positions: left out in this layer, another factor, heads, or axes exchanged.",
    "attention-sinks": "Sinks do not take part in the softmax, or are other ones.",
    "attention-softcap": "The soft cap of scores is missing, or another one.",
    "attention-heads": "Heads of keys are repeated in another order: each by itself, or all in turn.",
    "attention-rotation": "Rotary positions: layout (halves, pairs), the sign of sines, which channels, not applied.",
    "attention-positions": "Queries and keys count positions from another number: a cache, padding, or from one.",
    "attention-norm": "The norms of queries and keys: left out, or on the other side of the rotation.",
    "attention-layout": "How a fused result is split, or how channels are split into heads.",
    "token-shift": "Tokens are one off: padding, a cache, a convolution.",
    "bias-dropped": "The bias of a projection was dropped.",
}
_HEAD_DIMS: Final = (
    "head_dim",
    "head_size",
    "key_value_proj_dim",
    "attention_head_size",
    "d_kv",
    "kv_channels",
)
_HEAD_COUNTS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class _Attention:
    """An attention of which both sides are known.

    Attributes:
        usual: The core that makes the reference.
        ours: What the reference's computes with.
        theirs: What the target's does.
        reference: Its result, (batch, token, head, channel).
        target: That of the target.
        heads: Those that are worked out.
        rows: Queries that see something, (batch, token): the result of others is not defined.
    """

    usual: Core
    ours: Parts
    theirs: Parts
    reference: Values
    target: Values
    heads: Values
    rows: Values

    @property
    def is_of_reference(self) -> bool:
        """Whether nothing is known of what the target computes with, so that the reference's stands for it."""
        return self.ours is self.theirs

    def compute(self, variant: Variant) -> Values:
        """Compute the result of the target if it is that variant, (row, head, channel)."""
        return np.asarray(variant.parts(variant.core, self.heads)[self.rows])


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
    attention = _recognise(context)
    if attention is None:
        return
    reference, target = (
        side[:, :, attention.heads][attention.rows] for side in (attention.reference, attention.target)
    )
    usual = Variant("", "", attention.theirs, attention.usual)
    baseline = attention.compute(usual)
    if not attention.is_of_reference:
        yield inherited_error(target, baseline, reference)
    sample = _Sample.of(attention)
    before = sample.error(usual)
    variants = list(list_variants(attention.usual, attention.theirs, attention.ours, context))

    def propose(variant: Variant, *, tried: int, is_hopeful: bool) -> Hypothesis:
        predicted = attention.compute(variant) if is_hopeful else sample.compute(variant)
        return Hypothesis(
            variant.kind,
            variant.text,
            target if is_hopeful else sample.target,
            predicted,
            baseline if is_hopeful else sample.compute(usual),
            parameters=variant.parameters,
            log_alternatives=math.log(max(tried, 1)) + variant.log_alternatives,
            hint=_HINTS[variant.kind],
            facts={"reference": asdict(attention.usual), "target": asdict(variant.core)},
            roundings=_ROUNDINGS,
        )

    errors = {at: sample.error(variant) for at, variant in enumerate(variants)}
    hopeful = [at for at in sorted(errors, key=lambda at: errors[at]) if errors[at] <= _HOPEFUL * before]
    hopeful = hopeful[:_MOST_HOPEFUL]
    for at, variant in enumerate(variants):
        yield propose(variant, tried=len(variants), is_hopeful=at in hopeful)
    yield _fit_scale(context, attention, sample, target, baseline)
    if not hopeful:
        fitted = [*_fit_each_head(attention, sample), *_see_by_rule(attention)]
        for variant in fitted:
            yield propose(variant, tried=len(variants) + len(fitted), is_hopeful=True)


def _recognise(context: PairContext) -> _Attention | None:
    """Find the core that makes the reference, of what is recorded; None if nothing does.

    The reference is the core's result, (batch, token, channel), or what each query takes of each key,
    (batch, head, query, key).
    """
    r, t = context.r, context.t
    if not context.is_same_shape or r.ndim not in (3, 4) or context.window is not None:
        return None
    gives_shares = r.ndim == 4
    for dims in _list_head_dims(context):
        count = r.shape[1] if gives_shares else r.shape[-1] // dims
        tokens = r.shape[2] if gives_shares else r.shape[1]
        for ours, theirs in collect_sides(*context.sides, (r.shape[0], tokens, count, dims)):
            queries, keys = ours.q.shape[2], ours.k.shape[2]
            if ours.q.shape != (r.shape[0], count, tokens, dims):
                continue  # keys or values of a cross attention, which are as many as the encoder's tokens
            most_heads = _LARGEST // (r.shape[0] * queries * keys)
            if keys < 2 or not most_heads or (gives_shares and r.shape[3] != keys):
                continue
            heads = np.unique(evenly_spaced(count, most_heads))
            if gives_shares:
                reference, target = (side.transpose(0, 2, 1, 3) for side in (r, t))
            else:
                reference, target = (side.reshape(*r.shape[:2], count, dims) for side in (r, t))
            rows = np.ones((len(r), queries), np.bool_)
            rows = rows if ours.mask is None else np.asarray(ours.mask[:, 0].any(axis=-1))
            is_one = ours is theirs
            ours = replace(ours, gives_shares=gives_shares)
            theirs = ours if is_one else replace(theirs, gives_shares=gives_shares)
            known = _Attention(Core(1.0, "none"), ours, theirs, reference, target, heads, rows)
            attention = _find_core(context, known)
            if attention is not None:
                return attention
    return None


def _list_head_dims(context: PairContext) -> list[int]:
    """List how many channels a head may have: by settings of the attention, and by the configuration."""
    shape = context.r.shape
    width = shape[-1]
    site = module_of(context.reference.key.site)
    sizes: list[float | None] = []
    for path in (site.rpartition(".")[0], site):
        module = context.reference_archive.info.modules.get(path)
        settings = {} if module is None else module.settings
        sizes += [settings.get(name) for name in _HEAD_DIMS]
        counts = [settings.get(name) for name in _HEAD_COUNTS]
        sizes += [
            width // count for count in counts if isinstance(count, int) and count > 0 and len(shape) == 3
        ]
    sizes += [context.head_dim, context.config_number(*_HEAD_DIMS)]
    whole = [int(size) for size in sizes if isinstance(size, int | float) and size >= 1]
    return list(dict.fromkeys(size for size in whole if len(shape) == 4 or width % size == 0))


@dataclass(frozen=True)
class _Sample:
    """A few sequences, queries and heads of an attention, by which variants are compared.

    Attributes:
        batches: The sequences.
        queries: The queries.
        heads: The heads.
        rows: Which of the queries see something.
        target: The target's result of these, (row, head, channel).
    """

    batches: Values
    queries: Values
    heads: Values
    rows: Values
    target: Values

    @classmethod
    def of(cls, attention: _Attention) -> _Sample:
        """Choose them evenly."""
        batch, tokens = attention.rows.shape
        batches, queries = evenly_spaced(batch, _FEW_SEQUENCES), evenly_spaced(tokens, _FEW_QUERIES)
        heads = attention.heads[evenly_spaced(len(attention.heads), _FEW_HEADS)]
        rows = attention.rows[batches][:, queries]
        target = attention.target[batches][:, queries][:, :, heads][rows]
        return cls(batches, queries, heads, rows, target)

    def compute(self, variant: Variant) -> Values:
        """Compute the result of a variant, (row, head, channel)."""
        parts = variant.parts.of_batches(self.batches)
        return np.asarray(parts(variant.core, self.heads, self.queries)[self.rows])

    def error(self, variant: Variant) -> float:
        """The relative error that a variant leaves of the target."""
        error = relative_error(self.target, self.compute(variant))
        return error if math.isfinite(error) else math.inf


def _find_core(context: PairContext, known: _Attention) -> _Attention | None:
    """Find the core that makes the reference, and sinks if they have to be fitted; None if there is none.

    1. Usual cores are sorted by the error that each leaves of a few heads, by the reference's parts or the
       target's: under replay the reference's core was given those.
    2. The best one is taken if it leaves no more than is allowed of all heads.
    3. Otherwise, if no sinks are known, they are fitted to the likeliest cores.
    """
    ours, theirs, rows, heads = known.ours, known.theirs, known.rows, known.heads
    allowed = context.tolerance(4 * LESSENED, _ALLOWED)
    sides = (ours,) if ours is theirs else (ours, theirs)
    reference = known.reference[:, :, heads][rows]
    sample = _Sample.of(replace(known, target=known.reference))

    def error(core: Core, sides: Sequence[Parts]) -> float:
        return min(relative_error(reference, parts(core, heads)[rows]) for parts in sides)

    cores = sorted(
        _list_usual_cores(context, ours),
        key=lambda core: min(sample.error(Variant("", "", parts, core)) for parts in sides),
    )
    if error(cores[0], sides) <= allowed:
        return replace(known, usual=cores[0])
    if ours.sinks is None:
        for core, parts in itertools.product(cores[:_LIKELY], sides):
            sinks = parts.fit_sinks(core, heads, reference, rows)
            with_sinks = [replace(side, sinks=sinks) for side in sides]
            if error(core, with_sinks) <= allowed:
                return replace(known, usual=core, ours=with_sinks[0], theirs=with_sinks[-1])
    return None


def _list_usual_cores(context: PairContext, parts: Parts) -> Iterator[Core]:
    """Cores that the configuration says, and common ones."""
    scales = [parts.q.shape[3] ** -0.5, 1.0]
    if scalar := context.config_number("query_pre_attn_scalar"):
        scales.append(scalar**-0.5)
    if multiplier := context.config_number("attention_multiplier"):
        scales.append(multiplier)
    caps = dict.fromkeys((0.0, context.config_number("attn_logit_softcapping") or 0.0))
    for scale in dict.fromkeys(scales):
        for rotation in ("halves", "pairs", "none") if parts.angles is not None else ("none",):
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


def _fit_scale(
    context: PairContext, attention: _Attention, sample: _Sample, target: Values, baseline: Values
) -> Hypothesis:
    """Propose another scale of the scores, fitted."""
    usual = attention.usual

    def scaled(scale: float) -> Variant:
        return Variant("attention-scale", "", attention.theirs, replace(usual, scale=scale))

    scale = _minimise(usual.scale, lambda value: sample.error(scaled(value)))
    factor = scale / usual.scale
    names = name_factor(factor, context, _NAME_TOLERANCE)
    text = f"scores of the target are scaled by {number_text(factor, 1.0)} times what the reference has"
    return Hypothesis(
        "attention-scale",
        text + (f", which is {names[0]}" if names else ""),
        target,
        attention.compute(scaled(scale)),
        baseline,
        parameters=1,
        log_alternatives=math.log(_STEPS),
        hint=_HINTS["attention-scale"],
        facts={"factor": factor, "equals": list(names)},
        roundings=_ROUNDINGS,
    )


def _minimise(usual: float, error: Callable[[float], float]) -> float:
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


def _fit_each_head(attention: _Attention, sample: _Sample) -> Iterator[Variant]:
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
        for names in (("key_heads", "value_heads"), ("key_heads",), ("value_heads",)):
            chosen = best(
                [
                    Variant("", "", parts, replace(usual, **dict.fromkeys(names, (one,) * count)))
                    for one in range(keys)
                ]
            )
            if chosen != same:
                what = " and ".join(name.partition("_")[0] + "s" for name in names)
                text = f"heads of the target look at heads {', '.join(map(str, chosen[:16]))} of {what}"
                core = replace(usual, **dict.fromkeys(names, chosen))
                yield Variant("attention-heads", text, parts, core, parameters=count)
    if parts.bias is not None and parts.bias.shape[1] == count > 1:
        others = [replace(parts, bias=parts.bias[:, [one] * count]) for one in range(count)]
        chosen = best([Variant("", "", other, usual) for other in others])
        if chosen != tuple(range(count)):
            text = f"heads of the target have the biases of heads {', '.join(map(str, chosen[:16]))}"
            other = replace(parts, bias=parts.bias[:, list(chosen)])
            yield Variant("attention-bias", text, other, usual, parameters=count)
        factors = _minimise_each(every, rows, parts, usual)
        text = f"the bias of each head of the target is times a number, {factors.min():.4g} to {factors.max():.4g}"
        other = replace(parts, bias=parts.bias * factors[:, None, None])
        yield Variant("attention-bias", text, other, usual, parameters=count)
    if parts.sinks is not None:
        target = attention.target[:, :, attention.heads][attention.rows]
        sinks = parts.fit_sinks(replace(usual, has_sinks=False), attention.heads, target, attention.rows)
        text = "sinks of the target are other ones"
        yield Variant("attention-sinks", text, replace(parts, sinks=sinks), usual, parameters=count)


def _minimise_each(sample: _Sample, rows: Values, parts: Parts, usual: Core) -> Values:
    """Find the factor of each head's bias that leaves least, by golden section over its logarithm."""
    assert parts.bias is not None
    bias, count = parts.bias, parts.q.shape[1]

    def errors(logarithms: Values) -> Values:
        other = replace(parts, bias=bias * np.exp(logarithms)[:, None, None])
        return np.asarray(((sample.compute(Variant("", "", other, usual)) - rows) ** 2).sum(axis=(0, 2)))

    low, high = np.full(count, -math.log(64)), np.full(count, math.log(64))
    for _ in range(_STEPS):
        inner, outer = high - RATIO * (high - low), low + RATIO * (high - low)
        is_inner = errors(inner) < errors(outer)
        low, high = np.where(is_inner, low, inner), np.where(is_inner, outer, high)
    return np.asarray(np.exp((low + high) / 2))


def _see_by_rule(attention: _Attention) -> Iterator[Variant]:
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
