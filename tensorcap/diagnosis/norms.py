"""Norms worked out from inputs and weights, and which variant makes the reference and which the target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.scoring import LESSENED, Hypothesis, Values, inherited_error, relative_error
from tensorcap_formats.float_formats import rounded

Statistic = Literal["rms", "layer", "l2"]
Weighting = Literal["w", "1 + w", "1 + w, rounded", "none"]
Precision = Literal["wide", "squares", "variance", "variance in turn", "all", "all in turn"]

_SAMPLE: Final = 1 << 16
_EPS: Final = (1e-6, 1e-5, 1e-12, 1e-8, 1e-7, 1e-4, 1e-3, 0.0)
_WIDE: Final = ("float32", "float64")
_PRECISIONS: Final[tuple[Precision, ...]] = (
    "wide",
    "squares",
    "variance",
    "variance in turn",
    "all",
    "all in turn",
)
_LOW: Final = {
    "squares": "rounds squares before it takes their mean",
    "variance": "computes the variance in low precision",
    "variance in turn": "adds up squares one after the other in low precision",
    "all": "computes all of it in low precision",
    "all in turn": "computes all of it in low precision and adds up squares one after the other",
}
_TITLES: Final = {
    "rms": "divides by the root mean square",
    "layer": "subtracts the mean and divides by the deviation",
    "l2": "divides by the norm",
}


@dataclass(frozen=True, slots=True)
class NormVariant:
    """One way to compute a norm.

    Attributes:
        statistic: What is divided by.
        eps: Added to the variance.
        weighting: What the normalised value is multiplied by.
        is_cast_first: Whether the normalised value is rounded before it is multiplied.
        low: What is rounded to the dtype of the input: squares alone, the variance too, or every step; and
            whether squares are added up in turn, each sum rounded.
    """

    statistic: Statistic
    eps: float
    weighting: Weighting
    is_cast_first: bool = False
    low: Precision = "wide"

    def __call__(self, x: Values, weight: Values | None, bias: Values | None, dtype: str) -> Values:
        """The norm of each row, rounded as a run in this dtype rounds it."""
        centred = x - x.mean(axis=-1, keepdims=True) if self.statistic == "layer" else x
        variance = self._variance(centred, dtype)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.low.startswith("all"):
                inverse = rounded(1 / np.sqrt(rounded(variance + self.eps, dtype)), dtype)
                y = centred * inverse
            else:
                y = centred / np.sqrt(variance + self.eps)
        y = np.nan_to_num(y, posinf=0.0, neginf=0.0)
        if self.is_cast_first or self.low.startswith("all"):
            y = rounded(y, dtype)
        if weight is not None and self.weighting != "none":
            y = y * self._factor(weight, dtype)
        return rounded(y if bias is None else y + bias, dtype)

    def _variance(self, centred: Values, dtype: str) -> Values:
        """What the root is taken of, eps apart: a column."""
        squares = centred * centred
        if self.low != "wide":
            squares = rounded(squares, dtype)
        if self.low.endswith("in turn"):
            total = squares[..., 0]
            for at in range(1, squares.shape[-1]):
                total = rounded(total + squares[..., at], dtype)
            total = total[..., None]
        else:
            total = squares.sum(axis=-1, keepdims=True)
        variance = total if self.statistic == "l2" else total / squares.shape[-1]
        return variance if self.low in ("wide", "squares") else rounded(variance, dtype)

    def _factor(self, weight: Values, dtype: str) -> Values:
        if self.weighting == "w":
            return weight
        return rounded(1 + weight, dtype) if self.weighting == "1 + w, rounded" else 1 + weight


def propose_norms(context: PairContext) -> Iterator[Hypothesis]:
    """The target by another variant than the reference, each on its own inputs."""
    if not context.is_same_shape or context.r.ndim < 2 or context.r.shape[-1] < 4:
        return
    width = context.r.shape[-1]
    given = [(slot, x, y) for slot, x, y in context.inputs if x.shape == context.r.shape]
    if len(given) != 1:
        return
    (slot, ours, theirs) = given[0]
    parameters = context.read_parameters()
    weight, own_weight = _vector(parameters, ("weight", "scale", "gamma"), width)
    bias, own_bias = _vector(parameters, ("bias", "beta"), width)
    rows = _rows(ours.reshape(-1, width))
    dtype = context.reference.dtype.name
    x, made = ours.reshape(-1, width)[rows], context.r.reshape(-1, width)[rows]
    fitted = 0
    usual = _best(x, made, weight, bias, dtype, context)
    if usual is None and weight is None:
        found = _with_fitted_weight(x, made, dtype, context)
        if found is None:
            return
        usual, weight, bias = found
        fitted = width * (1 if bias is None else 2)
    if usual is None:
        return
    is_wide = dtype in _WIDE
    dtype = context.target.dtype.name
    own_weight = rounded(weight, dtype) if own_weight is None and weight is not None else own_weight
    own_bias = rounded(bias, dtype) if own_bias is None and bias is not None else own_bias
    x, made = theirs.reshape(-1, width)[rows], context.t.reshape(-1, width)[rows]
    is_narrowed = is_wide and dtype not in _WIDE
    expected = _as_usual(usual, x, made, own_weight, own_bias, dtype) if is_narrowed else usual
    other = _best(x, made, own_weight, own_bias, dtype, context, near=expected)
    if other is None:
        return
    same = [None if side is None else rounded(side, dtype) for side in (weight, bias)]
    yield inherited_error(context.t, expected(theirs, same[0], same[1], dtype), context.r)
    if weight is not None and own_weight is not None and not fitted:
        yield from _own_weight(context, other, theirs, (weight, own_weight), own_bias)
    if other == expected:
        return
    predicted, baseline = (v(theirs, own_weight, own_bias, dtype) for v in (other, expected))
    text, kind, hint = _difference(expected, other, slot)
    log_alternatives = math.log(3 * 4 * 2 * len(_PRECISIONS) * (len(_EPS) + 2))
    facts = {"reference": _facts(usual), "target": _facts(other)}
    yield Hypothesis(
        kind,
        text,
        context.t,
        predicted,
        baseline,
        parameters=fitted,
        log_alternatives=log_alternatives,
        hint=hint,
        facts=facts,
    )


def _own_weight(
    context: PairContext, variant: NormVariant, x: Values, weights: tuple[Values, Values], bias: Values | None
) -> Iterator[Hypothesis]:
    """The target by the same norm, right for its own weight, which is another one."""
    dtype = context.target.dtype.name
    weight, own = weights
    if np.array_equal(rounded(weight, dtype), own):
        return
    kind, text = "other-weights", "the target is right for its own weight, which is not that of the reference"
    hint = "Weights differ: look at how they are loaded."
    for shift, name in ((-1, "norm-without-one-plus"), (1, "norm-with-one-plus")):
        if np.linalg.norm(own - weight - shift) < 0.1 * np.linalg.norm(own - weight):
            kind = name
            text = f"the weight of the target is that of the reference {'plus' if shift > 0 else 'minus'} one"
            hint = "One plus the weight is meant on one side and the weight alone on the other."
    predicted, baseline = variant(x, own, bias, dtype), variant(x, rounded(weight, dtype), bias, dtype)
    yield Hypothesis(kind, text, context.t, predicted, baseline, hint=hint)


def _vector(
    parameters: dict[str, tuple[Values | None, Values | None]], names: tuple[str, ...], width: int
) -> tuple[Values | None, Values | None]:
    for name, (ours, theirs) in parameters.items():
        if name.rpartition(".")[2] in names and ours is not None and ours.shape == (width,):
            return ours, theirs if theirs is not None and theirs.shape == (width,) else None
    return None, None


def _rows(x: Values) -> Values:
    """Rows that tell variants apart: spread over all, and those of the smallest variance."""
    count = max(4, _SAMPLE // x.shape[1])
    spread = np.linspace(0, len(x) - 1, min(len(x), count)).astype(np.int64)
    small = np.argsort((x * x).mean(axis=1), kind="stable")[: max(2, count // 8)]
    return np.unique(np.concatenate([spread, small]))


def _variants(has_weight: bool, is_low: bool, eps: tuple[float, ...]) -> Iterator[NormVariant]:
    weightings: tuple[Weighting, ...] = ("w", "1 + w", "none") if has_weight else ("none",)
    if has_weight and is_low:
        weightings = (*weightings, "1 + w, rounded")
    switches = (False, True) if is_low else (False,)
    precisions = _PRECISIONS if is_low else _PRECISIONS[:1]
    statistics: tuple[Statistic, ...] = ("rms", "layer", "l2")
    for statistic, each, weighting in itertools.product(statistics, eps, weightings):
        for first, low in itertools.product(switches, precisions):
            yield NormVariant(statistic, each, weighting, first, low)


def _best(
    x: Values,
    made: Values,
    weight: Values | None,
    bias: Values | None,
    dtype: str,
    context: PairContext,
    near: NormVariant | None = None,
) -> NormVariant | None:
    """The variant that leaves least; the one that is `near` stays unless another leaves far less."""
    is_low = dtype not in _WIDE
    known = context.config_number(
        "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"
    )
    eps = tuple(dict.fromkeys(e for e in (known, near.eps if near else None, *_EPS) if e is not None))

    def left(variant: NormVariant) -> float:
        return relative_error(made, variant(x, weight, bias, dtype))

    plain = list(_variants(weight is not None, False, eps))
    fitted = {replace(v, eps=_fitted_eps(v, x, made, weight, bias)) for v in plain if v.eps == eps[0]}
    errors = {v: left(v) for v in (*plain, *sorted(fitted - set(plain), key=repr))}
    best = min(errors, key=lambda v: (errors[v], _changes(near, v)))
    if is_low:
        alike = [v for v in _variants(weight is not None, True, (*eps, best.eps)) if _is_alike(v, best)]
        errors |= {v: left(v) for v in alike if v not in errors}
    least = min(errors.values())
    if near is not None:
        usual = left(near)
        if least >= LESSENED * usual:
            return near
    elif least > max(4 * context.rounding, 1e-6):
        return None
    good = [v for v, error in errors.items() if error <= max(1.05 * least, 1e-7)]
    return min(good, key=lambda v: _changes(near, v))


def _is_alike(one: NormVariant, other: NormVariant) -> bool:
    return one.statistic == other.statistic and one.weighting.startswith(other.weighting)


def _changes(near: NormVariant | None, variant: NormVariant) -> int:
    """How much a variant differs from another, or from the plainest one."""
    usual = near or NormVariant("rms", variant.eps, variant.weighting)
    changes = (
        8 * (variant.statistic != usual.statistic),
        4 * (variant.weighting != usual.weighting),
        variant.eps != usual.eps,
        2 * (variant.low != usual.low),
        variant.is_cast_first != usual.is_cast_first,
    )
    return sum(map(int, changes))


def _as_usual(
    usual: NormVariant, x: Values, made: Values, weight: Values | None, bias: Values | None, dtype: str
) -> NormVariant:
    """What a wide reference is in a narrow dtype: either order of rounding and weight is right."""
    orders = [replace(usual, is_cast_first=first) for first in (usual.is_cast_first, not usual.is_cast_first)]
    return min(orders, key=lambda v: relative_error(made, v(x, weight, bias, dtype)))


def _fitted_eps(
    variant: NormVariant, x: Values, made: Values, weight: Values | None, bias: Values | None
) -> float:
    """The eps that rows of small variance say, snapped to a usual one within 5 %."""
    y = replace(variant, eps=0.0)(x, weight, None, "float64")
    shown = made if bias is None else made - bias
    square = (y * y).sum(axis=1)
    factor = np.divide((shown * y).sum(axis=1), square, out=np.ones(len(x)), where=square > 0)
    centred = x - x.mean(axis=1, keepdims=True) if variant.statistic == "layer" else x
    variance = (centred * centred).mean(axis=1) if variant.statistic != "l2" else (centred**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        eps = variance / factor**2 - variance
    row = int(np.argmin(np.where(variance > 0, variance, np.inf)))
    found = float(eps[row])
    if not math.isfinite(found) or found <= 0:
        return 0.0
    return next((e for e in _EPS if e and abs(found / e - 1) < 0.05), float(f"{found:.3g}"))


def _with_fitted_weight(
    x: Values, made: Values, dtype: str, context: PairContext
) -> tuple[NormVariant, Values, Values | None] | None:
    """A norm whose weight is in no archive, but follows from what it made."""
    if len(x) < 8:
        return None
    statistics: tuple[Statistic, ...] = ("rms", "layer")
    for statistic in statistics:
        for eps in dict.fromkeys((context.config_number("rms_norm_eps", "layer_norm_eps") or 1e-6, *_EPS)):
            variant = NormVariant(statistic, eps, "w")
            y = variant(x, None, None, "float64")
            for has_bias in (False, True):
                mean_y, mean = (y.mean(axis=0), made.mean(axis=0)) if has_bias else (0.0, 0.0)
                square = ((y - mean_y) ** 2).sum(axis=0)
                product = ((y - mean_y) * made).sum(axis=0)
                weight = np.divide(product, square, out=np.ones_like(square), where=square > 0)
                bias = mean - weight * mean_y if has_bias else None
                if relative_error(made, variant(x, weight, bias, dtype)) <= max(4 * context.rounding, 1e-6):
                    return variant, weight, bias
    return None


def _difference(one: NormVariant, other: NormVariant, slot: str) -> tuple[str, str, str]:
    """What tells two variants apart: text, kind and hint."""
    if one.statistic != other.statistic:
        text = f"the target {_TITLES[other.statistic]} of its {slot}, the reference {_TITLES[one.statistic]}"
        return text, "norm-statistic", "Another kind of norm: with and without subtracting the mean, or L2."
    if one.weighting.startswith("1 +") and other.weighting == "w":
        text = "the target multiplies by the weight, the reference by one plus the weight"
        return text, "norm-without-one-plus", "The weight is used where 1 + weight is meant."
    if one.weighting == "w" and other.weighting.startswith("1 +"):
        text = "the target multiplies by one plus the weight, the reference by the weight"
        return text, "norm-with-one-plus", "1 + weight is used where the weight is meant."
    if other.weighting == "none" != one.weighting:
        return "the target does not multiply by the weight", "weight-missing", "The weight is not applied."
    if one.weighting != other.weighting:
        text = f"the target multiplies by {other.weighting}, the reference by {one.weighting}"
        return text, "norm-weight-rounded", "1 + weight is added in low precision on one side."
    if one.eps != other.eps and not _is_near(one.eps, other.eps):
        text = f"the target adds eps {other.eps:.3g} to the variance, the reference {one.eps:.3g}"
        return text, "norm-eps", "Another eps; it shows in rows of small values only."
    if one.low != other.low:
        side, low = ("target", other.low) if other.low != "wide" else ("reference", one.low)
        text = f"the {side} {_LOW[low]}"
        return text, "norm-variance-precision", "The variance is accumulated in low precision on one side."
    text = f"the {'target' if other.is_cast_first else 'reference'} rounds before it multiplies by the weight"
    hint = "The normalised value is cast before or after the weight; the difference is of the last bit."
    return text, "norm-cast-order", hint


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= 0.05 * max(one, other)


def _facts(variant: NormVariant) -> dict[str, Any]:
    return {
        "statistic": variant.statistic,
        "eps": variant.eps,
        "weighting": variant.weighting,
        "is_cast_first": variant.is_cast_first,
        "low": variant.low,
    }
