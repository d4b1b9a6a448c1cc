"""Propose other weights of experts from a router's scores: order of softmax and top-k, renormalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.activations import sigmoid
from tensorcap.diagnosis.context import PairContext, values_of
from tensorcap.diagnosis.hypothesis import LESSENED, Hypothesis, inherited_error
from tensorcap.diagnosis.values import Values, relative_error
from tensorcap_formats.float_formats import rounded
from tensorcap_formats.keys import module_of

_MOST_EXPERTS: Final = 1024
_HINT: Final = "The order of softmax and top-k in the router, or whether the chosen weights are renormalised."


def softmax(z: Values) -> Values:
    """The softmax of each row."""
    with np.errstate(invalid="ignore"):
        e = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _largest(values: Values, count: int) -> Values:
    """The largest of each row, in descending order."""
    return np.asarray(-np.sort(-values, axis=-1, kind="stable")[..., :count])


def _renormalise(values: Values) -> Values:
    """Divide each row by its sum; rows of zeros stay."""
    total = values.sum(axis=-1, keepdims=True)
    return np.asarray(np.divide(values, total, out=np.zeros_like(values), where=total != 0))


_CHOICES: Final[Mapping[str, Callable[[Values, int], Values]]] = {
    "softmax, top-k, renormalised": lambda z, k: _renormalise(_largest(softmax(z), k)),
    "softmax, top-k, not renormalised": lambda z, k: _largest(softmax(z), k),
    "top-k of raw scores": lambda z, k: _largest(z, k),
    "sigmoid, top-k, not renormalised": lambda z, k: _largest(sigmoid(z), k),
    "sigmoid, top-k, renormalised": lambda z, k: _renormalise(_largest(sigmoid(z), k)),
    "softmax of absolute scores, top-k": lambda z, k: _largest(softmax(np.abs(z)), k),
}
# Probabilities of choices that are renormalised.
_RENORMALISED: Final[Mapping[str, Callable[[Values], Values]]] = {
    "softmax, top-k, renormalised": softmax,
    "sigmoid, top-k, renormalised": sigmoid,
}
_FUNCTIONS: Final[Mapping[str, Callable[[Values], Values]]] = {
    "raw scores": lambda z: z,
    "softmax": softmax,
    "sigmoid": sigmoid,
    "log softmax": lambda z: np.log(np.maximum(softmax(z), 1e-300)),
}


def propose_routings(context: PairContext) -> Iterator[Hypothesis]:
    """Propose weights, probabilities and results of experts, from scores that are recorded beside.

    A neighbour with as many rows as the pair may have the scores: of a pair of fewer channels the pair is
    weights of the chosen experts, of as many it is probabilities, of others results of the experts.
    """
    r = context.r
    if not context.is_same_shape or r.ndim < 2:
        return
    rows, width = r.size // r.shape[-1], r.shape[-1]
    for label, ours, theirs in context.read_neighbours():
        experts = ours.shape[-1] if ours.ndim else 0
        if theirs is None or ours.ndim < 2 or experts > _MOST_EXPERTS or ours.size != rows * experts:
            continue
        z, own = ours.reshape(rows, experts), theirs.reshape(rows, experts)
        if 1 <= width < experts:
            yield from _propose_weights(context, label, z, own)
        if width == experts:
            yield from _propose_probabilities(context, label, z, own)
        chosen = context.chosen_experts
        if 1 <= chosen < experts == context.experts and width not in (chosen, experts):
            yield from _propose_sums_of_weights(context, label, own, chosen)


def _propose_weights(context: PairContext, label: str, z: Values, own: Values) -> Iterator[Hypothesis]:
    """Propose another choice of weights.

    1. Both sides are sorted, since ties and orders of the chosen may differ.
    2. The choice, and the factor of the configuration, that make the reference of its scores are found.
    3. Proposed of the target's scores are all others, fewer experts, and every step in low precision.
    """
    count = context.r.shape[-1]
    r, t = (_largest(side.reshape(len(z), count), count) for side in (context.r, context.t))
    factor = (
        context.config_number("routed_scaling_factor", "router_scaling_factor", "moe_routed_scaling_factor")
        or 1.0
    )
    factors = tuple(dict.fromkeys((1.0, factor)))
    errors = {
        (name, f): relative_error(r, rounded(f * choice(z, count), context.reference.dtype.name))
        for name, choice in _CHOICES.items()
        for f in factors
    }
    (usual, usual_factor), left = min(errors.items(), key=lambda item: item[1])
    if left > context.tolerance():
        yield from _propose_weights_of_chosen(context, label, z, own, factors)
        return
    dtype = context.target.dtype.name
    baseline = rounded(usual_factor * _CHOICES[usual](own, count), dtype)
    yield inherited_error(t, baseline, r)
    for name, choice in _CHOICES.items():
        for f in factors:
            if (name, f) == (usual, usual_factor):
                continue
            scaled = "" if len(factors) == 1 else f", times {f:g}"
            yield Hypothesis(
                "router-order" if name != usual else "routed-scaling",
                f"weights of the target are {name}{scaled} of {label}, those of the reference {usual}",
                t,
                rounded(f * choice(own, count), dtype),
                baseline,
                log_alternatives=math.log(len(_CHOICES) * len(factors)),
                hint=_HINT if name != usual else "The scale of routed experts is applied on one side only.",
                facts={"reference": usual, "target": name, "factor": f},
            )
    yield from _propose_fewer(baseline, t, label)
    if context.is_narrow and usual in _RENORMALISED:
        chosen = _largest(rounded(_RENORMALISED[usual](own), dtype), count)
        total = rounded(chosen.sum(axis=-1, keepdims=True), dtype)
        predicted = rounded(usual_factor * rounded(chosen / total, dtype), dtype)
        text = f"the target rounds {usual} of {label} to {dtype} at every step"
        hint = "The router computes in low precision where it has to be in float32."
        yield Hypothesis("router-precision", text, t, predicted, baseline, hint=hint, facts={"dtype": dtype})


def _propose_weights_of_chosen(
    context: PairContext, label: str, z: Values, own: Values, factors: tuple[float, ...]
) -> Iterator[Hypothesis]:
    """Propose other weights of experts that were chosen by something else, as by scores with a bias.

    The indices of the chosen are recorded beside; what is not is how they were chosen, as within groups.

    1. Both sides are sorted, since orders of the chosen may differ.
    2. The function of the scores, whether weights are renormalised, the factor and the bias that make the
       reference are found.
    3. Proposed of the target's scores are others, of which one thing differs.
    """
    count = context.r.shape[-1]
    r, t = (_largest(side.reshape(len(z), count), count) for side in (context.r, context.t))
    indices = _read_indices(context, len(z), z.shape[1])
    biases: dict[str, Values] = {"": np.zeros(z.shape[1])}
    for name, (ours, _) in context.read_parameters().items():
        if ours is not None and ours.shape == z.shape[1:]:
            biases[name] = ours
    if indices is None:
        return

    def weigh(scores: Values, chosen: Values, way: tuple[str, bool, float, str]) -> Values:
        function, is_renormalised, factor, bias = way
        weights = np.take_along_axis(_FUNCTIONS[function](scores) + biases[bias], chosen, axis=1)
        weights = _renormalise(weights) if is_renormalised else weights
        return _largest(rounded(factor * weights, dtype), count)

    dtype = context.reference.dtype.name
    ways = [
        (function, is_renormalised, factor, bias)
        for function in _FUNCTIONS
        for is_renormalised in (True, False)
        for factor in factors
        for bias in biases
    ]
    errors = {way: relative_error(r, weigh(z, indices[0], way)) for way in ways}
    usual = min(errors, key=lambda way: errors[way])
    if errors[usual] > context.tolerance():
        return
    dtype = context.target.dtype.name
    baseline = weigh(own, indices[1], usual)
    yield inherited_error(t, baseline, r)
    for way in ways:
        if sum(one != other for one, other in zip(way, usual, strict=True)) != 1:
            continue
        function, is_renormalised, factor, bias = way
        text = f"weights of the target are the {function} of {label}"
        text += f" plus {bias}" if bias else ""
        text += ", renormalised" if is_renormalised else ", not renormalised"
        text += f", times {factor:g}" if len(factors) > 1 else ""
        is_of_bias = bias != usual[3]
        yield Hypothesis(
            "router-bias" if is_of_bias else "routed-scaling" if factor != usual[2] else "router-order",
            text,
            t,
            weigh(own, indices[1], way),
            baseline,
            log_alternatives=math.log(len(ways)),
            hint="The bias is for the choice of experts alone; their weights are without it."
            if is_of_bias
            else _HINT,
            facts={"reference": list(usual), "target": list(way)},
        )


def _read_indices(context: PairContext, rows: int, experts: int) -> tuple[Values, Values] | None:
    """Read which experts were chosen, (row, choice), of both sides; None if it is not recorded.

    A replay ends with the pair: what comes behind it in the same result is the target's.
    """
    size, key = rows * context.r.shape[-1], context.target.key
    for theirs in context.target_archive.records:
        is_beside = theirs.key.where == key.where and theirs.key.slot != key.slot
        if (
            not is_beside
            or theirs.dtype.kind not in ("int", "uint")
            or theirs.size != size
            or not theirs.stored
        ):
            continue
        archive, ours = context.target_archive, theirs
        at = replace(context.reference.key, slot=theirs.key.slot).text
        if at in context.reference_archive and context.reference_archive.get(at).size == size:
            archive, ours = context.reference_archive, context.reference_archive.get(at)
        sides = values_of(archive, ours), values_of(context.target_archive, theirs)
        reference, target = (side.reshape(rows, -1).astype(np.int64) for side in sides)
        if size and all(side.min() >= 0 and side.max() < experts for side in (reference, target)):
            return reference, target
    return None


def _propose_fewer(usual: Values, t: Values, label: str) -> Iterator[Hypothesis]:
    """Propose that only the first of the chosen have a weight, as it was or renormalised."""
    count = usual.shape[-1]
    for few in range(1, count):
        first = np.where(np.arange(count) < few, usual, 0.0)
        total = usual.sum(axis=-1, keepdims=True)
        for predicted, how in ((first, "as they were"), (_renormalise(first) * total, "renormalised")):
            yield Hypothesis(
                "router-count",
                f"only the first {few} of {count} weights of {label} are not 0 in the target, {how}",
                t,
                predicted,
                usual,
                log_alternatives=math.log(2 * count),
                hint="Another count of experts takes part than were chosen.",
                facts={"count": few},
            )


def _propose_probabilities(context: PairContext, label: str, z: Values, own: Values) -> Iterator[Hypothesis]:
    """Propose another function of the scores than the one that makes the reference."""
    r, t = (side.reshape(z.shape) for side in (context.r, context.t))
    errors = sorted((relative_error(r, f(z)), name) for name, f in _FUNCTIONS.items())
    (least, usual), (second, _) = errors[:2]
    if least > context.tolerance() or least > LESSENED * second:
        return
    for name, function in _FUNCTIONS.items():
        if name != usual:
            yield Hypothesis(
                "router-scores",
                f"the target is the {name} of {label}, the reference the {usual}",
                t,
                function(own),
                _FUNCTIONS[usual](own),
                log_alternatives=math.log(len(_FUNCTIONS)),
                hint=_HINT,
                facts={"reference": usual, "target": name},
            )


def _propose_sums_of_weights(
    context: PairContext, label: str, own: Values, count: int
) -> Iterator[Hypothesis]:
    """Propose that results of experts are multiplied or divided by the sum of their weights."""
    total = _largest(softmax(own), count).sum(axis=-1).reshape(*context.r.shape[:-1], 1)
    start = "each token of the target is that of the reference"
    text = f"{start} times the sum of its top {count} of {label}"
    hint = "Weights of experts are not renormalised after top-k."
    maker = _find_maker_of_weights(context, count)
    facts = {"made_by": maker} if maker else {}
    yield context.propose("router-not-renormalised", text, context.r * total, hint=hint, facts=facts)
    text = f"{start} over the sum of its top {count} of {label}"
    hint = "Weights of experts are renormalised after top-k, which the reference does not do."
    yield context.propose("router-renormalised", text, context.r / total, hint=hint, facts=facts)


def _find_maker_of_weights(context: PairContext, count: int) -> str:
    """The module whose result the weights of experts are, if the target has them nowhere; else "".

    What experts make is then right for what they are given.
    """
    for record in context.reference_archive.records:
        is_argument = record.key.where == context.maker.key.where and record.key.slot.startswith("input")
        if is_argument and record.dtype.kind == "float" and record.shape[-1:] == (count,):
            maker = context.maker_of(record)
            if context.find_partner(record) is None and maker is not record:
                return module_of(maker.key.site)
    return ""
