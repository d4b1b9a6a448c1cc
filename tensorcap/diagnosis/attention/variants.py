"""Attention cores that differ from the reference's in one thing: kind, text, the tensors, the core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tensorcap.diagnosis.attention.core import Core, Parts
from tensorcap.diagnosis.attention.readings import drop_biases, rearrange, reread
from tensorcap.diagnosis.attention.rotary import list_tables, turn_pairs
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.values import Values
from tensorcap.wording import joined_name

_MOST_POSITIONS: Final = 8  # by which queries and keys may stand apart, besides their number
_EVEN_GAIN: Final = 1e-2  # by which a factor of a norm may differ between tokens
_BIAS_FACTORS: Final = (-1.0, 2.0, 0.5)
_ROTATIONS: Final = ("halves", "pairs", "turned", "none", "q alone", "k alone", "values too")


@dataclass(frozen=True, slots=True)
class Variant:
    """An attention that differs in one thing.

    Attributes:
        kind: As in `Hypothesis`, as is the text.
        text: What the target does.
        parts: What it computes with.
        core: How.
        parameters: Count of numbers that were fitted.
        log_alternatives: Of choices that were made to find it, as in `Hypothesis`.
        facts: What was fitted, as in `Hypothesis`.
    """

    kind: str
    text: str
    parts: Parts
    core: Core
    parameters: int = 0
    log_alternatives: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


def list_variants(usual: Core, parts: Parts, ours: Parts, context: PairContext) -> Iterator[Variant]:
    """List all that is tried, the most usual mistakes first.

    Args:
        usual: The core that makes the reference.
        parts: What the target's attention computes with.
        ours: What the reference's does.
        context: For numbers of the configuration.
    """
    yield from _rotate_otherwise(usual, parts)
    yield from _do_as_others(usual, parts)
    yield from _see_otherwise(usual, parts, context)
    yield from _add_otherwise(usual, parts, context)
    if 1 < parts.k.shape[1] < parts.q.shape[1]:
        yield from _repeat_otherwise(usual, parts)
    yield from _norm_otherwise(usual, parts, ours)
    for which, parts_of_it in (*reread(parts), *rearrange(parts), *drop_biases(parts)):
        kind = "bias-dropped" if which.endswith("bias") else "attention-layout"
        yield Variant(kind, f"the target {which}", parts_of_it, usual)
    yield from _move_tokens(usual, parts)


def _rotate_otherwise(usual: Core, parts: Parts) -> Iterator[Variant]:
    """Vary the rotation: whether, of what, by which angles, which channels, how far queries are from keys."""
    if parts.angles is None:
        return
    for rotation in _ROTATIONS:
        if rotation != usual.rotation:
            text = f"the target rotates: {rotation}; the reference: {usual.rotation}"
            yield Variant("attention-rotation", text, parts, replace(usual, rotation=rotation))
    if usual.rotation == "none":
        return
    if parts.angles.shape[1] > 1:
        queries, keys = parts.q.shape[2], parts.k.shape[2]
        steps = [by * sign for by in range(1, _MOST_POSITIONS + 1) for sign in (1, -1)]
        for step in dict.fromkeys((*steps, queries, -queries, keys, -keys, queries - keys)):
            if step:
                where = "ahead of" if step > 0 else "behind"
                text = f"queries of the target are rotated as if {abs(step)} positions {where} where they are"
                yield Variant(
                    "attention-positions", f"{text}, by the keys", parts, replace(usual, positions=step)
                )
    tables = [(name, table, usual.first_channel) for name, table in parts.tables.items()]
    for name, table, start in (*tables, *list_tables(parts.angles, parts.q.shape[3])):
        core = replace(usual, table=name, first_channel=start)
        text = f"the target rotates {name}" if "channels" in name else f"the target rotates by {name}"
        yield Variant("attention-rotation", text, replace(parts, tables={name: table}), core)


def _do_as_others(usual: Core, parts: Parts) -> Iterator[Variant]:
    """See what another layer sees, and rotate as that does."""
    for sites, (visible, angles) in parts.others.items():
        where = joined_name(sites)
        core = replace(usual, mask="whole", is_causal=False, window=0, ahead=0)
        facts = {"as": list(sites)}
        text = f"the target sees what {where} sees"
        yield Variant("attention-mask", text, replace(parts, mask=visible), core, facts=facts)
        if angles is not None:
            other = replace(parts, mask=visible, angles=angles)
            text += ", and rotates as that does"
            yield Variant("layer-schedule", text, other, core, facts=facts)


def _see_otherwise(usual: Core, parts: Parts, context: PairContext) -> Iterator[Variant]:
    """Vary what tokens see. Cores that see the same are listed once."""
    known = [parts.visible_keys(usual)]
    for text, core in _list_extents(usual, context):
        visible = parts.visible_keys(core)
        if not any((visible == other).all() for other in known):
            known.append(visible)
            yield Variant("attention-mask", text, parts, core)


def _list_extents(usual: Core, context: PairContext) -> Iterator[tuple[str, Core]]:
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


def _add_otherwise(usual: Core, parts: Parts, context: PairContext) -> Iterator[Variant]:
    """Vary biases of positions, sinks and the soft cap."""
    bias = parts.bias
    if bias is not None:
        text = "the target adds no bias of positions to scores"
        yield Variant("attention-bias", text, parts, replace(usual, has_bias=False))
        ways = {
            f"the bias of positions of the target is that of the reference times {factor:.4g}": bias * factor
            for factor in dict.fromkeys((*_BIAS_FACTORS, usual.scale, 1 / usual.scale))
            if factor != 1
        }
        if bias.shape[2] == bias.shape[3]:
            text = "the bias of positions of the target has queries and keys exchanged"
            ways[text] = np.swapaxes(bias, 2, 3)
        if bias.shape[1] > 1:
            ways["the bias of positions of the target has its heads reversed"] = bias[:, ::-1]
        for by in (1, -1):
            where = "behind" if by > 0 else "before"
            ways[f"each key of the target has the bias of the one {where} it"] = np.roll(bias, -by, 3)
        for text, other in ways.items():
            yield Variant("attention-bias", text, replace(parts, bias=other), usual)
    if parts.sinks is not None:
        text = "the softmax of the target is without sinks"
        yield Variant("attention-sinks", text, parts, replace(usual, has_sinks=False))
        ways = {
            "sinks of the target are scaled as scores are": parts.sinks * usual.scale,
            "sinks of the target have their heads reversed": parts.sinks[::-1],
        }
        for text, sinks in ways.items():
            yield Variant("attention-sinks", text, replace(parts, sinks=sinks), usual)
    cap = 0.0 if usual.softcap else context.config_number("attn_logit_softcapping") or 0.0
    if usual.softcap and usual.scale != 1:
        text = f"the target caps scores at {usual.softcap:g} before it scales them, the reference behind that"
        yield Variant("attention-softcap", text, parts, replace(usual, is_capped_first=True))
    if cap != usual.softcap:
        text = f"the target caps scores at {cap:g}" if cap else "the target has no soft cap of scores"
        yield Variant("attention-softcap", text, parts, replace(usual, softcap=cap))


def _repeat_otherwise(usual: Core, parts: Parts) -> Iterator[Variant]:
    """Vary how heads of keys and of values are repeated."""
    count = parts.q.shape[1]
    turns = tuple(head % parts.k.shape[1] for head in range(count))
    for what, core in (
        ("heads of keys", replace(usual, key_heads=turns, value_heads=turns)),
        ("heads of keys, but not those of values,", replace(usual, key_heads=turns)),
        ("heads of values, but not those of keys,", replace(usual, value_heads=turns)),
    ):
        text = f"the target repeats all {what} in turn, the reference each of them"
        yield Variant("attention-heads", text, parts, core)


def _norm_otherwise(usual: Core, parts: Parts, ours: Parts) -> Iterator[Variant]:
    """Leave out the norms of queries and keys, or have them on the other side of the rotation."""
    if not parts.bare.keys() & ours.bare.keys():
        return
    own = {"q": ours.q, "k": ours.k}
    bare = {name: x for name, x in parts.bare.items() if name in ours.bare}
    tensors = {"q": parts.q, "k": parts.k, **bare}
    for names in dict.fromkeys((tuple(bare), *((name,) for name in bare))):
        without = {"q": parts.q, "k": parts.k, **{name: bare[name] for name in names}}
        text = f"the target is without the norm of {' and '.join(names)}"
        yield Variant("attention-norm", text, replace(parts, q=without["q"], k=without["k"]), usual)
    if parts.angles is None or ours.angles is None:
        return
    is_after = usual.rotation == "none"
    gains = {}
    for name, x in ours.bare.items():
        angles = ours.angles[:, -x.shape[2] :]
        given = turn_pairs(x, angles[:, None], "halves") if is_after else x
        weight = _fit_weight(given, own[name])
        if weight is None or name not in bare:
            return
        gains[name] = weight / np.maximum(_rms(bare[name]), 1e-300)
    if is_after:
        core = replace(usual, rotation="halves")
        before = {name: x * gains.get(name, 1.0) for name, x in tensors.items()}
        text = "the target has the norm of queries and keys before the rotation, the reference behind it"
        yield Variant("attention-norm", text, replace(parts, q=before["q"], k=before["k"]), core)
    else:
        text = "the target has the norm of queries and keys behind the rotation, the reference before it"
        other = replace(parts, q=tensors["q"], k=tensors["k"], gains=gains)
        yield Variant("attention-norm", text, other, usual)


def _fit_weight(given: Values, result: Values) -> Values | None:
    """Fit the weight of a norm that divides by the root of the mean square; None if it does another thing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = result / given * _rms(given)
    weight = np.median(np.where(np.isfinite(factors), factors, 0.0), axis=(0, 1, 2))
    remade = given / np.maximum(_rms(given), 1e-300) * weight
    is_even = np.linalg.norm(remade - result) <= _EVEN_GAIN * np.linalg.norm(result)
    return np.asarray(weight) if is_even else None


def _rms(x: Values) -> Values:
    return np.asarray(np.sqrt((x * x).mean(axis=-1, keepdims=True)))


def _move_tokens(usual: Core, parts: Parts) -> Iterator[Variant]:
    """Move keys, before or after their rotation, values, or both by a token."""
    for by, where in ((1, "before"), (-1, "behind")):
        text = f"in the place of each token the target takes {{}} of the one {where} it"
        k, v = np.roll(parts.k, by, 2), np.roll(parts.v, by, 2)
        rotated = replace(usual, key_tokens=by)
        for what, other, core in (
            ("the value", replace(parts, v=v), usual),
            ("the key", replace(parts, k=k), usual),
            ("the rotated key", parts, rotated),
            ("key and value", replace(parts, k=k, v=v), usual),
            ("rotated key and value", replace(parts, v=v), rotated),
        ):
            if "rotated" not in what or usual.rotation != "none":
                yield Variant("token-shift", text.format(what), other, core)
