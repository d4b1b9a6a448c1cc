"""The core of an attention, from queries, keys and values beside, and what the target does otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.constants import named
from tensorcap.diagnosis.exhibit import Exhibit, values_of
from tensorcap.diagnosis.routers import softmax
from tensorcap.diagnosis.weighing import LESSENED, Scales, Trial, Values, inherited, relative_error
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_LARGEST: Final = 1 << 21  # scores that are worked out: of as many heads as that allows
_NAMES: Final = {
    "q": ("q_norm", "q_proj", "query", "wq", "q_lin", "q"),
    "k": ("k_norm", "k_proj", "key", "wk", "k_lin", "k"),
    "v": ("v_norm", "v_proj", "value", "wv", "v_lin", "v"),
    "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv"),
}
_ROUNDINGS: Final = 12.0  # that it may leave: scores, their softmax and the result are rounded
_ALLOWED: Final = 1e-5  # what the order of sums may make of the reference in float32
_STEPS: Final = 24
_HINTS: Final = {
    "attention-scale": "The scale of scores: 1/sqrt(head_dim), one of the configuration, or applied twice.",
    "attention-mask": "The mask: causal or not, the length of the window, or off by one.",
    "attention-softcap": "The soft cap of scores is missing, or another one.",
    "attention-heads": "Heads of keys are repeated in another order: each by itself, or all in turn.",
    "attention-rotation": "Rotary positions: layout (halves, pairs), the sign of sines, or not applied.",
}


@dataclass(frozen=True, slots=True)
class Core:
    """One way to attend.

    Attributes:
        scale: Of the scores.
        rotation: `halves`, `pairs`, `turned` (the sine with its sign turned), `q alone`, `k alone` or `none`.
        is_causal: Whether a token sees none behind it.
        ahead: How many behind it a token sees nevertheless.
        window: How many tokens it sees, itself included; 0 for all.
        softcap: Of the scores, 0 for none.
        is_tiled: Whether heads of keys are repeated all in turn.
    """

    scale: float
    rotation: str
    is_causal: bool = True
    window: int = 0
    softcap: float = 0.0
    is_tiled: bool = False
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """What an attention computes with: (batch, head, token, channel), cosines without heads."""

    q: Values
    k: Values
    v: Values
    cos: Values | None
    sin: Values | None

    def __call__(self, core: Core, heads: Values) -> Values:
        """The result of some heads, (batch, token, head, channel)."""
        groups, count = self.q.shape[1] // self.k.shape[1], self.k.shape[1]
        own = heads % count if core.is_tiled else heads // groups
        q = self._rotated(self.q[:, heads], core.rotation if core.rotation != "k alone" else "none")
        k = self._rotated(self.k[:, own], core.rotation if core.rotation != "q alone" else "none")
        scores = q @ np.swapaxes(k, -1, -2) * core.scale
        if core.softcap:
            scores = core.softcap * np.tanh(scores / core.softcap)
        behind = np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])[None]
        hidden = behind < -core.ahead if core.is_causal else np.zeros(behind.shape, np.bool_)
        if core.window:
            hidden = hidden | (behind >= core.window)
        scores = np.where(hidden, -np.inf, scores)
        return np.asarray((softmax(scores) @ self.v[:, own]).transpose(0, 2, 1, 3))

    def _rotated(self, x: Values, rotation: str) -> Values:
        if rotation == "none" or self.cos is None or self.sin is None:
            return x
        half = self.cos.shape[-1] // 2
        cos, sin = (side[:, None, :, :half] for side in (self.cos, self.sin))
        sin = -sin if rotation == "turned" else sin
        y, rest = x[..., : 2 * half], x[..., 2 * half :]
        out = np.empty_like(y)
        first, second = (
            (slice(0, None, 2), slice(1, None, 2))
            if rotation == "pairs"
            else (slice(half), slice(half, None))
        )
        out[..., first] = y[..., first] * cos - y[..., second] * sin
        out[..., second] = y[..., second] * cos + y[..., first] * sin
        return np.concatenate([out, rest], axis=-1)


def attentions(exhibit: Exhibit, scales: Scales) -> Iterator[Trial]:
    """The target by a core that differs in one thing from the reference's, each of its own values."""
    r, t, head_dim = exhibit.r, exhibit.t, exhibit.head_dim
    is_core = exhibit.is_same_shape and r.ndim == 3 and head_dim and exhibit.window is None
    if not is_core or not head_dim or r.shape[-1] % head_dim or r.shape[1] < 2:
        return
    count = r.shape[-1] // head_dim
    ours, theirs = (
        _parts(archive, record, count, head_dim, r.shape)
        for archive, record in ((exhibit.ours, exhibit.reference), (exhibit.theirs, exhibit.target))
    )
    fitting = _LARGEST // (r.shape[0] * r.shape[1] ** 2)
    if ours is None or theirs is None or not fitting or ours.k.shape != theirs.k.shape:
        return
    heads = np.unique(np.linspace(0, count - 1, min(count, fitting)).astype(np.int64))
    made, shown = (side.reshape(*r.shape[:2], count, head_dim)[:, :, heads] for side in (r, t))
    # Under replay the reference's core was given the target's queries, keys and values.
    errors = {
        core: min(relative_error(made, parts(core, heads)) for parts in (ours, theirs))
        for core in _usual(exhibit, ours.cos is not None)
    }
    usual = min(errors, key=lambda core: errors[core])
    if errors[usual] > max(4 * scales.rounding * LESSENED, _ALLOWED):
        return
    baseline = theirs(usual, heads)
    yield inherited(shown, baseline, made)
    for kind, text, core in _changes(usual, exhibit, theirs):
        facts = {"reference": _facts(usual), "target": _facts(core)}
        predicted = theirs(core, heads)
        yield Trial(kind, text, shown, predicted, baseline, 0, math.log(32), _HINTS[kind], facts, _ROUNDINGS)
    scale = _fitted_scale(usual, theirs, heads, shown)
    factor = scale / usual.scale
    names = named(factor, exhibit, 0.01)
    text = f"scores of the target are scaled by {factor:.4g} times what the reference has"
    text += f", which is {names[0]}" if names else ""
    core = replace(usual, scale=scale)
    told: dict[str, object] = {"factor": factor, "equals": list(names)}
    logs = math.log(_STEPS)
    kind, predicted = "attention-scale", theirs(core, heads)
    yield Trial(kind, text, shown, predicted, baseline, 1, logs, _HINTS[kind], told, _ROUNDINGS)


def _usual(exhibit: Exhibit, is_rotated: bool) -> Iterator[Core]:
    """What the configuration says, and what is common."""
    dims = exhibit.head_dim or 1
    scalar, multiplier = exhibit.number("query_pre_attn_scalar"), exhibit.number("attention_multiplier")
    scales = [dims**-0.5, 1.0, *([scalar**-0.5] if scalar else []), *([multiplier] if multiplier else [])]
    caps = dict.fromkeys((0.0, exhibit.number("attn_logit_softcapping") or 0.0))
    windows = dict.fromkeys((0, int(exhibit.number("sliding_window") or 0)))
    for scale in dict.fromkeys(scales):
        for rotation in ("halves", "pairs") if is_rotated else ("none",):
            for cap in caps:
                for window in windows:
                    for is_causal in (True, False):
                        yield Core(scale, rotation, is_causal, window, cap)


def _changes(usual: Core, exhibit: Exhibit, parts: Parts) -> Iterator[tuple[str, str, Core]]:
    """Cores that differ in one thing."""
    if parts.cos is not None:
        for rotation in ("halves", "pairs", "turned", "none", "q alone", "k alone"):
            if rotation != usual.rotation:
                text = f"the target rotates: {rotation}; the reference: {usual.rotation}"
                yield "attention-rotation", text, replace(usual, rotation=rotation)
    text = "the target is not causal" if usual.is_causal else "the target is causal, the reference is not"
    yield "attention-mask", text, replace(usual, is_causal=not usual.is_causal)
    if usual.is_causal:
        yield "attention-mask", "tokens of the target see the next one, too", replace(usual, ahead=1)
    window = usual.window or int(exhibit.number("sliding_window") or 0)
    for other in dict.fromkeys((0, window - 1, window, window + 1)):
        if other >= 0 and other != usual.window:
            sees = [f"a window of {w} tokens" if w else "all tokens" for w in (other, usual.window)]
            text = f"the target sees {sees[0]}, the reference {sees[1]}"
            yield "attention-mask", text, replace(usual, window=other)
    cap = 0.0 if usual.softcap else exhibit.number("attn_logit_softcapping") or 0.0
    if cap != usual.softcap:
        text = (
            "the target has no soft cap of scores" if usual.softcap else f"the target caps scores at {cap:g}"
        )
        yield "attention-softcap", text, replace(usual, softcap=cap)
    if 1 < parts.k.shape[1] < parts.q.shape[1]:
        text = "the target repeats all heads of keys in turn, the reference each of them"
        yield "attention-heads", text, replace(usual, is_tiled=not usual.is_tiled)


def _fitted_scale(usual: Core, parts: Parts, heads: Values, shown: Values) -> float:
    """The scale that leaves least, by golden section over its logarithm."""
    few = heads[:: max(1, len(heads) // 4)]
    at = np.isin(heads, few)
    low, high = math.log(usual.scale / 64), math.log(usual.scale * 64)
    ratio = (math.sqrt(5) - 1) / 2

    def left(scale: float) -> float:
        return relative_error(shown[:, :, at], parts(replace(usual, scale=math.exp(scale)), few))

    inner, outer = high - ratio * (high - low), low + ratio * (high - low)
    errors = left(inner), left(outer)
    for _ in range(2 * _STEPS):
        if errors[0] < errors[1]:
            high, outer, inner = outer, inner, outer - ratio * (outer - low)
            errors = left(inner), errors[0]
        else:
            low, inner, outer = inner, outer, inner + ratio * (high - inner)
            errors = errors[1], left(outer)
    return math.exp((low + high) / 2)


def _parts(archive: Archive, record: Record, count: int, dims: int, shape: tuple[int, ...]) -> Parts | None:
    """Queries, keys and values of the attention that a record is the core's result of."""
    site = module_of(record.key.site)
    parents = (site.rpartition(".")[0], site)
    for parent in parents:
        around = [
            r
            for r in archive.records
            if r.key.step == record.key.step and r.stored and r.order <= record.order
        ]
        kin = {r.key.site.rpartition(".")[2]: r for r in around if _is_child(r, parent, record)}
        found = {slot: next((kin[n] for n in names if n in kin), None) for slot, names in _NAMES.items()}
        sides = [_split(archive, found[slot], dims, shape) for slot in ("q", "k", "v")]
        fused = found["qkv"]
        if (
            any(side is None for side in sides)
            and fused is not None
            and fused.size % (shape[0] * shape[1] * dims) == 0
        ):
            whole = values_of(archive, fused).reshape(*shape[:2], -1, dims).transpose(0, 2, 1, 3)
            keys = (whole.shape[1] - count) // 2
            sides = [whole[:, :count], whole[:, count : count + keys], whole[:, count + keys :]]
        q, k, v = sides
        if q is None or k is None or v is None or q.shape[1] != count or not k.shape[1]:
            continue
        if count % k.shape[1] or k.shape != v.shape:
            continue
        cos, sin = (_angles(archive, around, parent, number, shape) for number in (0, 1))
        return Parts(q, k, v, cos, sin)
    return None


def _is_child(r: Record, parent: str, record: Record) -> bool:
    is_there = r.key.site.rpartition(".")[0] == parent and r.key.slot == "output"
    return is_there and (r.key.call, r.key.rank) == (record.key.call, record.key.rank)


def _split(archive: Archive, record: Record | None, dims: int, shape: tuple[int, ...]) -> Values | None:
    """A projection as (batch, head, token, channel)."""
    if record is None or record.size % (shape[0] * shape[1] * dims):
        return None
    values = values_of(archive, record)
    if len(record.shape) == 4 and record.shape[2] == shape[1] != record.shape[1]:
        return values
    return values.reshape(*shape[:2], -1, dims).transpose(0, 2, 1, 3)


def _angles(
    archive: Archive, around: list[Record], parent: str, number: int, shape: tuple[int, ...]
) -> Values | None:
    """Cosines or sines that the attention was given."""
    slot = f"input.position_embeddings.{number}"
    for record in around:
        is_there = record.key.site == parent and record.key.slot == slot
        if (
            is_there
            and record.dtype.kind == "float"
            and len(record.shape) == 3
            and record.shape[1] == shape[1]
        ):
            values = values_of(archive, record)
            return np.broadcast_to(values, (shape[0], *values.shape[1:]))
    return None


def _facts(core: Core) -> dict[str, object]:
    return {name: getattr(core, name) for name in core.__dataclass_fields__}
