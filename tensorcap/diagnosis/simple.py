"""Values that are no result at all: zeros, one constant, NaN; and masks that use another sentinel.

What a number equals: sizes and settings of the model, their roots and inverses, and common constants.

Dropout that is active: elements of a tensor, or of what is added to one, are left out at random.

Whole numbers that count positions: from another number on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.scoring import Hypothesis, Values

_SENTINEL: Final = 1e4  # masks use numbers of at least that size; float16 goes to 65,504


def degenerates(r: Values, t: Values) -> Iterator[Hypothesis]:
    """Look at values as they are, not finite ones among them.

    Args:
        r: The reference.
        t: The target; any shape.
    """
    same = r.shape == t.shape
    finite = np.isfinite(t)
    if not t.size or not r.size:
        return
    if np.isnan(t).all() and not np.isnan(r).all():
        hint = "The target is NaN from here on: look for the first record that is."
        yield _exact("nan", "every value of the target is NaN", hint, r, same)
    elif finite.all() and not np.isfinite(r).all() and same:
        yield from _sentinels(r, t, "target", "reference")
    elif same and np.isfinite(r).all() and not finite.all():
        yield from _sentinels(t, r, "reference", "target")
    if finite.all() and t.size > 1 and (t == t.reshape(-1)[0]).all() and not (r == r.reshape(-1)[0]).all():
        value = float(t.reshape(-1)[0])
        if value == 0:
            hint = "Nothing was written here: an output never filled, a weight not loaded, a mask of zeros."
            yield _exact("zero", "every value of the target is 0", hint, r, same)
        else:
            hint = (
                "A default stands in the place of a result: a weight as initialised, a buffer never filled."
            )
            text = f"every value of the target is {value:.6g}"
            yield _exact("constant", text, hint, r, same, value)


def _exact(kind: str, text: str, hint: str, r: Values, same: bool, value: float = 0.0) -> Hypothesis:
    """A trial of values that are just what is said; NaN stands as 0, and what differs in it as 1."""
    observed = np.full(r.shape, value)
    finite = np.where(np.isfinite(r), r, 0.0)
    baseline = finite if finite.any() or value else np.ones_like(r)
    if not observed.any() and not baseline.any():
        baseline = np.ones_like(r)
    return Hypothesis(kind, text, observed, observed.copy(), baseline if same else None, 0, 0, hint)


def _sentinels(masked: Values, other: Values, side: str, with_infinity: str) -> Iterator[Hypothesis]:
    """One side has -inf where the other has one large negative number."""
    places = masked == -np.inf
    if not places.any() or not np.isfinite(masked[~places]).all():
        return
    numbers = other[places]
    if not (numbers == numbers[0]).all() or numbers[0] > -_SENTINEL:
        return
    text = f"where the {with_infinity} has -inf, the {side} has {numbers[0]:.6g}"
    hint = (
        "Masks with another sentinel: the same after a softmax, unless a whole row is masked, the mask is "
        "added twice, or it is cast to a narrower dtype."
    )
    # what is masked counts as 0 where both agree on it and as 1 where not; the rest as it is
    rest = np.where(places, 0.0, masked)
    seen = np.where(places, 0.0, other)
    baseline = np.where(places, np.sqrt(np.mean(rest**2)) or 1.0, rest)
    facts = {"sentinel": float(numbers[0]), "count": int(places.sum())}
    yield Hypothesis("mask-sentinel", text, seen, rest, baseline, 0, 0, hint, facts)


_SETTINGS: Final = {  # by the names that configurations have for them; those that only count are further down
    "embedding_multiplier": (),
    "residual_multiplier": (),
    "attention_multiplier": (),
    "logits_scaling": (),
    "logit_scale": (),
    "routed_scaling_factor": ("router_scaling_factor", "moe_routed_scaling_factor"),
    "query_pre_attn_scalar": (),
    "attention_factor": (),
    "scaling_factor": (),
    "factor": (),
}
_COUNTS: Final = {
    "hidden_size": ("d_model", "n_embd"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_selected_experts", "top_k"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "intermediate_size": ("d_ff", "ffn_dim", "n_inner"),
    "vocab_size": (),
}
_PLAIN: Final = (
    (2.0, "2"),
    (0.5, "1/2"),
    (4.0, "4"),
    (0.25, "1/4"),
    (3.0, "3"),
    (1 / 3, "1/3"),
    (8.0, "8"),
    (0.125, "1/8"),
    (math.sqrt(2), "sqrt(2)"),
    (math.sqrt(0.5), "1/sqrt(2)"),
    (math.log2(math.e), "log2(e)"),
    (math.log(2), "ln(2)"),
    (255.0, "255"),
    (1 / 255, "1/255"),
    (1.702, "1.702"),
)
HINTS: Final = {
    "sqrt(hidden_size)": "The scale of embeddings by the root of the width is applied on one side only.",
    "head_dim": "Scores of attention are scaled by another power of the size of a head.",
    "hidden_size": "Something is scaled by the width of the model on one side only.",
    "num_experts_per_tok": "Weights of experts are averaged on one side and summed on the other.",
    "num_experts": "Weights of experts are averaged on one side and summed on the other.",
    "routed_scaling_factor": "The scale of routed experts is applied on one side only.",
    "embedding_multiplier": "The multiplier of embeddings is applied on one side only.",
    "residual_multiplier": "The multiplier of residuals is applied on one side only.",
    "logits_scaling": "The scale of logits is applied on one side only.",
    "logit_scale": "The scale of logits is applied on one side only.",
    "attention_factor": "The scale of stretched rotary positions (YaRN) is applied on one side only.",
    "2": "Something is added twice, or a half is left out.",
    "1/2": "Something is added once that is added twice in the reference, or a half is put in twice.",
}


def named(value: float, exhibit: PairContext, tolerance: float) -> tuple[str, ...]:
    """Names of the constants that a factor equals, the most telling first.

    Args:
        value: The factor, positive.
        exhibit: Where the sizes of the model are known from.
        tolerance: How far it may be from them, relative.
    """
    found = [text for number, text in _known(exhibit) if abs(value / number - 1) <= tolerance]
    return tuple(dict.fromkeys(found))[:4]


def hint_of(names: tuple[str, ...]) -> str:
    """The usual mistake behind a factor of those names; "" where there is none."""
    for name in names:
        for part, hint in HINTS.items():
            if part == name or (len(part) > 3 and part in name):
                return hint
    return ""


def _known(exhibit: PairContext) -> list[tuple[float, str]]:
    known: list[tuple[float, str]] = []
    for name, others in _SETTINGS.items():
        value = exhibit.number(name, *others)
        if value is not None and value > 0 and value != 1:
            known += _powers(value, name)
    hidden, head_dim = exhibit.number("hidden_size", "d_model", "n_embd"), exhibit.head_dim
    if head_dim and head_dim > 1:
        known += _powers(head_dim, "head_dim")
        if hidden:
            ratio = math.sqrt(hidden / head_dim)
            known += [(ratio, "sqrt(hidden_size / head_dim)"), (1 / ratio, "sqrt(head_dim / hidden_size)")]
    counts = {name: exhibit.number(name, *others) for name, others in _COUNTS.items()}
    counts["num_attention_heads"] = exhibit.heads
    if exhibit.heads and exhibit.kv_heads:
        counts["heads / key heads"] = exhibit.heads / exhibit.kv_heads
    if counts["hidden_size"] is None and exhibit.r.ndim:
        counts["the number of channels"] = exhibit.r.shape[-1]
    for name, count in counts.items():
        if count and count > 1:
            known += _powers(count, name)
    known += _PLAIN
    return known


def _powers(value: float, name: str) -> list[tuple[float, str]]:
    inner = f"({name})" if " " in name else name
    root = math.sqrt(value)
    return [(value, name), (1 / value, f"1/{inner}"), (root, f"sqrt({name})"), (1 / root, f"1/sqrt({name})")]


_LEAST: Final = 8  # elements that are left out, and that are kept
_MOST: Final = 0.95  # the largest share that is left out
_TERMS: Final = 8
_SPREADS: Final = 5.0  # standard deviations that the share may be from what the scale says
_ROUNDED: Final = 0.005  # and as much for the rounding of the scale
_DROPOUT_HINT: Final = "Dropout is active: the target runs in training mode."


def dropouts(exhibit: PairContext) -> Iterator[Hypothesis]:
    """The reference with elements left out and the others scaled up, by itself or beside a residual."""
    if not exhibit.is_same_shape or exhibit.r.size < 4 * _LEAST:
        return
    yield from _of(exhibit, exhibit.r, exhibit.t, 0.0, "")
    for count, (label, ours, theirs) in enumerate(exhibit.beside(exhibit.r.shape)):
        if count >= _TERMS:
            return
        own = ours if theirs is None else theirs
        yield from _of(exhibit, exhibit.r - ours, exhibit.t - own, own, label)


def _of(exhibit: PairContext, r: Values, t: Values, term: Values | float, label: str) -> Iterator[Hypothesis]:
    seen = r != 0
    dropped = (t == 0) & seen
    kept = seen & ~dropped
    out, rest = int(dropped.sum()), int(kept.sum())
    if out < _LEAST or rest < _LEAST or out > _MOST * (out + rest):
        return
    scale = float(r[kept] @ t[kept]) / float(r[kept] @ r[kept])
    share = out / (out + rest)
    spread = math.sqrt(share * (1 - share) / (out + rest))
    if scale <= 1 or abs(1 - 1 / scale - share) > _SPREADS * spread + _ROUNDED:
        return  # zeros that are no dropout, which keeps the mean
    predicted = np.where(dropped, 0.0, r * scale) + term
    where = f" beside {label}" if label else ""
    text = (
        f"{100 * share:.3g} % of the elements{where} are left out at random and the others are scaled by "
        f"{scale:.4g}, which is 1 / (1 - {1 - 1 / scale:.3g})"
    )
    facts = {"share": share, "factor": scale, "key": label or None}
    # which elements are left out is taken as it is
    logs = (out + rest) * _entropy(share) + math.log(_TERMS)
    yield Hypothesis("dropout", text, exhibit.t, predicted, exhibit.r, 1, logs, _DROPOUT_HINT, facts)


def _entropy(share: float) -> float:
    return -share * math.log(share) - (1 - share) * math.log(1 - share)


_STEPS: Final = (1, -1, 2, -2)
_COUNTED_HINT: Final = (
    "Positions are counted from another number: from one, from behind padding, or with a cache that is one "
    "token longer or shorter."
)


def positions(exhibit: PairContext) -> Iterator[Hypothesis]:
    """All positions plus the same number."""
    r, t = exhibit.r, exhibit.t
    is_whole = exhibit.reference.dtype.kind in ("int", "uint")
    if not (is_whole and exhibit.is_same_shape and r.ndim and r.size):
        return
    is_counting = r.shape[-1] >= 4 and bool((np.diff(r, axis=-1) == 1).all())
    if not is_counting and "position" not in exhibit.reference.key.slot:
        return
    for step in _STEPS:
        sign = "plus" if step > 0 else "minus"
        text = f"positions of the target are those of the reference {sign} {abs(step)}"
        logs = math.log(len(_STEPS))
        yield Hypothesis("position-offset", text, t, r + step, r, 0, logs, _COUNTED_HINT, {"offset": step})
