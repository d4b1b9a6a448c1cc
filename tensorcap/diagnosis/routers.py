"""Weights of experts from the scores of a router, and in which order softmax and choice were done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from tensorcap.diagnosis.activations import sigmoid
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.scoring import LESSENED, Hypothesis, Scorer, Values, inherited, relative_error
from tensorcap_formats.float_formats import rounded

_MOST_EXPERTS: Final = 1024
_NARROW: Final = ("bfloat16", "float16")
_HINT: Final = "The order of softmax and top-k in the router, or whether the chosen weights are renormalised."


def softmax(z: Values) -> Values:
    """The softmax of each row."""
    with np.errstate(invalid="ignore"):
        e = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _top(values: Values, count: int) -> Values:
    return np.asarray(-np.sort(-values, axis=-1, kind="stable")[..., :count])


def _normal(values: Values) -> Values:
    total = values.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(values, total, out=np.zeros_like(values), where=total != 0))


CHOICES: Final[Mapping[str, Callable[[Values, int], Values]]] = {
    "softmax, top-k, renormalised": lambda z, k: _normal(_top(softmax(z), k)),
    "softmax, top-k, not renormalised": lambda z, k: _top(softmax(z), k),
    "top-k of raw scores": lambda z, k: _top(z, k),
    "sigmoid, top-k, not renormalised": lambda z, k: _top(sigmoid(z), k),
    "sigmoid, top-k, renormalised": lambda z, k: _normal(_top(sigmoid(z), k)),
    "softmax of absolute scores, top-k": lambda z, k: _top(softmax(np.abs(z)), k),
}
_PROBABILITIES: Final[Mapping[str, Callable[[Values], Values]]] = {  # of what is renormalised
    "softmax, top-k, renormalised": softmax,
    "sigmoid, top-k, renormalised": sigmoid,
}
WHOLE: Final[Mapping[str, Callable[[Values], Values]]] = {
    "raw scores": lambda z: z,
    "softmax": softmax,
    "sigmoid": sigmoid,
    "log softmax": lambda z: np.log(np.maximum(softmax(z), 1e-300)),
}


def routings(exhibit: PairContext, scales: Scorer) -> Iterator[Hypothesis]:
    """Weights, probabilities and results of experts."""
    r = exhibit.r
    if not exhibit.is_same_shape or r.ndim < 2:
        return
    rows, width = r.size // r.shape[-1], r.shape[-1]
    for label, ours, theirs in exhibit.beside():
        experts = ours.shape[-1] if ours.ndim else 0
        if theirs is None or ours.ndim < 2 or experts > _MOST_EXPERTS or ours.size != rows * experts:
            continue
        z, own = ours.reshape(rows, experts), theirs.reshape(rows, experts)
        if 1 <= width < experts:
            yield from _weights(exhibit, scales, label, z, own)
        if width == experts:
            yield from _probabilities(exhibit, scales, label, z, own)
        chosen = exhibit.number("num_experts_per_tok", "num_selected_experts", "top_k")
        if chosen and 1 <= chosen < experts == _experts(exhibit) and width not in (chosen, experts):
            yield from _scaled_by_weights(exhibit, label, own, int(chosen))


def _weights(
    exhibit: PairContext, scales: Scorer, label: str, z: Values, own: Values
) -> Iterator[Hypothesis]:
    """Weights of the chosen: each side sorted, since ties and orders of the chosen may differ."""
    count = exhibit.r.shape[-1]
    r, t = (_top(side.reshape(len(z), count), count) for side in (exhibit.r, exhibit.t))
    factor = (
        exhibit.number("routed_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor") or 1.0
    )
    factors = tuple(dict.fromkeys((1.0, factor)))
    allowed = max(4 * scales.rounding, 1e-6)
    makers = {
        (name, f): relative_error(r, rounded(f * choice(z, count), exhibit.reference.dtype.name))
        for name, choice in CHOICES.items()
        for f in factors
    }
    (usual, usual_factor), left = min(makers.items(), key=lambda item: item[1])
    if left > allowed:
        return
    dtype = exhibit.target.dtype.name
    baseline = rounded(usual_factor * CHOICES[usual](own, count), dtype)
    yield inherited(t, baseline, r)
    for name, choice in CHOICES.items():
        for f in factors:
            if (name, f) == (usual, usual_factor):
                continue
            predicted = rounded(f * choice(own, count), dtype)
            scaled = "" if len(factors) == 1 else f", times {f:g}"
            text = f"weights of the target are {name}{scaled} of {label}, those of the reference {usual}"
            hint = _HINT if name != usual else "The scale of routed experts is applied on one side only."
            facts = {"reference": usual, "target": name, "factor": f}
            kind = "router-order" if name != usual else "routed-scaling"
            logs = math.log(len(CHOICES) * len(factors))
            yield Hypothesis(kind, text, t, predicted, baseline, 0, logs, hint, facts)
    yield from _fewer(baseline, t, label)
    if dtype in _NARROW and usual in _PROBABILITIES:
        chosen = _top(rounded(_PROBABILITIES[usual](own), dtype), count)
        total = rounded(chosen.sum(axis=-1, keepdims=True), dtype)
        predicted = rounded(usual_factor * rounded(chosen / total, dtype), dtype)
        text = f"the target rounds {usual} of {label} to {dtype} at every step"
        hint = "The router computes in low precision where it has to be in float32."
        yield Hypothesis("router-precision", text, t, predicted, baseline, 0, 0, hint, {"dtype": dtype})


def _fewer(usual: Values, t: Values, label: str) -> Iterator[Hypothesis]:
    """Only the first of the chosen have a weight, as it was or renormalised."""
    count = usual.shape[-1]
    logs = math.log(2 * count)
    for few in range(1, count):
        first = np.where(np.arange(count) < few, usual, 0.0)
        total = usual.sum(axis=-1, keepdims=True)
        for predicted, how in ((first, "as they were"), (_normal(first) * total, "renormalised")):
            text = f"only the first {few} of {count} weights of {label} are not 0 in the target, {how}"
            hint = "Another count of experts takes part than were chosen."
            yield Hypothesis("router-count", text, t, predicted, usual, 0, logs, hint, {"count": few})


def _probabilities(
    exhibit: PairContext, scales: Scorer, label: str, z: Values, own: Values
) -> Iterator[Hypothesis]:
    r, t = (side.reshape(z.shape) for side in (exhibit.r, exhibit.t))
    allowed = max(4 * scales.rounding, 1e-6)
    errors = sorted((relative_error(r, f(z)), name) for name, f in WHOLE.items())
    if errors[0][0] > allowed or errors[0][0] > LESSENED * errors[1][0]:
        return
    usual = errors[0][1]
    for name, function in WHOLE.items():
        if name != usual:
            text = f"the target is the {name} of {label}, the reference the {usual}"
            facts = {"reference": usual, "target": name}
            logs = math.log(len(WHOLE))
            yield Hypothesis(
                "router-scores", text, t, function(own), WHOLE[usual](own), 0, logs, _HINT, facts
            )


def _scaled_by_weights(exhibit: PairContext, label: str, own: Values, count: int) -> Iterator[Hypothesis]:
    """Results of experts, each token times the sum of its weights, which was to be one."""
    total = _top(softmax(own), count).sum(axis=-1).reshape(*exhibit.r.shape[:-1], 1)
    r, t = exhibit.r, exhibit.t
    text = f"each token of the target is that of the reference times the sum of its top {count} of {label}"
    hint = "Weights of experts are not renormalised after top-k."
    yield Hypothesis("router-not-renormalised", text, t, r * total, r, 0, 0, hint)
    text = f"each token of the target is that of the reference over the sum of its top {count} of {label}"
    hint = "Weights of experts are renormalised after top-k, which the reference does not do."
    yield Hypothesis("router-renormalised", text, t, r / total, r, 0, 0, hint)


def _experts(exhibit: PairContext) -> int:
    return int(exhibit.number("num_experts", "num_local_experts", "n_routed_experts") or 0)
