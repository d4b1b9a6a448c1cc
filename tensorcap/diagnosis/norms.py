"""Propose variants of a norm: which one makes the reference of its input, and which the target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal, get_args

import numpy as np

from tensorcap.diagnosis.context import BIASES, GAINS, PairContext, find_vector, values_of
from tensorcap.diagnosis.hypothesis import LESSENED, ROUNDINGS, Hypothesis, inherited_error
from tensorcap.diagnosis.values import Values, evenly_spaced, fit_factors, relative_error
from tensorcap_formats.float_formats import rounded
from tensorcap_formats.keys import module_of

Statistic = Literal["rms", "layer", "l2"]
Weighting = Literal["w", "1 + w", "1 + w, rounded", "none"]
Precision = Literal[
    "wide",
    "squares",
    "variance",
    "variance in turn",
    "variance in runs of 8",
    "variance in runs of 16",
    "variance in runs of 32",
    "variance in runs of 64",
    "moments",
    "all",
    "all in turn",
]

_LEAST_CHANNELS: Final = 4
_LEAST_ROWS: Final = 8  # to fit a weight
_SAMPLE: Final = 1 << 16  # elements by which variants are chosen
_EQUALLY_GOOD: Final = 1.05  # variants within that factor of the least error are equally good
_EQUALLY_EXACT: Final = 1e-7  # and those that leave less than that
_EPS_TOLERANCE: Final = 0.05  # relative: two eps so near are the same
_ONE_TOLERANCE: Final = 0.1  # share of the difference of two weights that they may miss one by
_EPS: Final = (1e-6, 1e-5, 1e-12, 1e-8, 1e-7, 1e-4, 1e-3, 0.0)
_GROUPS: Final = (2, 4, 8, 16, 32)  # counts that channels may be cut into
_MOST_NORMS: Final = 12  # of which weights are tried
_WIDE: Final = ("float32", "float64")
_NARROW: Final = ("bfloat16", "float16")  # in which a run in float32 may compute single steps
_UNIT: Final = 2.0**-24  # of float32
_MOMENTS: Final = (0.05, 16.0)  # units of the squared mean that a variance from moments is usually off by
_PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
_LOW: Final = {
    "squares": "rounds squares before it takes their mean",
    "variance": "computes the variance in low precision",
    "variance in turn": "adds up squares one after the other in low precision",
    **{
        f"variance in runs of {run}": f"adds up sums of {run} squares each in low precision"
        for run in (8, 16, 32, 64)
    },
    "moments": "takes the square of the mean from the mean of squares, in low precision",
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
        statistic: `rms`, `layer` (the mean is subtracted) or `l2` (the sum, not the mean, of squares).
        eps: Added to the variance, or to its root.
        weighting: What the normalised value is multiplied by.
        is_cast_first: Whether the normalised value is rounded before it is multiplied.
        low: What is rounded to the dtype of the input: squares alone, the variance too, or every step; and
            whether squares are added up in turn, or sums of runs of them, each sum rounded; `moments` is
            E[x^2] - E[x]^2.
        steps: The dtype that steps are rounded to, if that is not the one of the input.
        is_eps_outside: Whether eps is added to the root, not to what it is taken of.
    """

    statistic: Statistic
    eps: float
    weighting: Weighting
    is_cast_first: bool = False
    low: Precision = "wide"
    steps: str = ""
    is_eps_outside: bool = False

    def __call__(self, x: Values, weight: Values | None, bias: Values | None, dtype: str) -> Values:
        """The norm of each row, rounded as a run in this dtype rounds it."""
        low = self.steps or dtype
        centred = x - x.mean(axis=-1, keepdims=True) if self.statistic == "layer" else x
        variance = self._variance(x, centred, low)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.low.startswith("all"):
                inverse = rounded(1 / np.sqrt(rounded(variance + self.eps, low)), low)
                y = centred * inverse
            elif self.is_eps_outside:
                y = centred / (np.sqrt(variance) + self.eps)
            else:
                y = centred / np.sqrt(variance + self.eps)
        y = np.nan_to_num(y, posinf=0.0, neginf=0.0)
        if self.is_cast_first or self.low.startswith("all"):
            y = rounded(y, low)
        if weight is not None and self.weighting != "none":
            y = y * self.weigh(weight, low)
        return rounded(y if bias is None else y + bias, dtype)

    def _variance(self, x: Values, centred: Values, dtype: str) -> Values:
        """The mean or sum of squares that the root is taken of, without eps: a column."""
        if self.low == "moments":
            square, mean = (rounded(side.mean(axis=-1, keepdims=True), dtype) for side in (x * x, x))
            return rounded(square - rounded(mean * mean, dtype), dtype)
        squares = centred * centred
        if self.low != "wide":
            squares = rounded(squares, dtype)
        run = self._run
        if run:
            total = np.zeros_like(squares[..., :1])
            for at in range(0, squares.shape[-1], run):
                part = squares[..., at : at + run].sum(axis=-1, keepdims=True)
                total = rounded(total + rounded(part, dtype), dtype)
        else:
            total = squares.sum(axis=-1, keepdims=True)
        variance = total if self.statistic == "l2" else total / squares.shape[-1]
        return variance if self.low in ("wide", "squares") else rounded(variance, dtype)

    @property
    def _run(self) -> int:
        """How many squares are summed before the sum is rounded; 0 for all."""
        if self.low.endswith("in turn"):
            return 1
        runs = self.low.rpartition("in runs of ")
        return int(runs[2]) if runs[1] else 0

    def weigh(self, weight: Values, dtype: str) -> Values:
        """What the normalised value is multiplied by."""
        if self.weighting == "w":
            return weight
        return rounded(1 + weight, dtype) if self.weighting == "1 + w, rounded" else 1 + weight


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some rows of a norm's input, and what it made of them.

    Attributes:
        x: Inputs, (row, channel) float64.
        outputs: The same shape.
        weight: One number for each channel.
        bias: One number for each channel.
        dtype: In which it was computed.
    """

    x: Values
    outputs: Values
    weight: Values | None
    bias: Values | None
    dtype: str

    def error(self, variant: NormVariant) -> float:
        """Relative error that a variant leaves; infinite if its values are no numbers."""
        error = relative_error(self.outputs, variant(self.x, self.weight, self.bias, self.dtype))
        return math.inf if math.isnan(error) else error


def propose_norms(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that the target is another variant of a norm than the reference, each of its own input.

    1. The module has one input of the pair's shape; its weight and bias are read.
    2. The variant that makes the reference is found; a weight that is in no archive is fitted.
    3. The variant that makes the target is found; that of the reference stays unless another one leaves far
       less. If only the target is narrow, either order of rounding and weight counts as the reference's.
    4. Proposed are an inherited error, another weight, and the other variant.
    5. If there is none, the variant of the reference is proposed with other statistics and other weights.
    """
    if not context.is_same_shape or context.r.ndim < 2 or context.r.shape[-1] < _LEAST_CHANNELS:
        return
    width = context.r.shape[-1]
    inputs = [(slot, x, y) for slot, x, y in context.inputs if x.shape == context.r.shape]
    if len(inputs) != 1:
        return
    (slot, ours, theirs) = inputs[0]
    parameters = context.read_parameters()
    weight, own_weight = find_vector(parameters, GAINS, width)
    bias, own_bias = find_vector(parameters, BIASES, width)
    rows = _sample_rows(ours.reshape(-1, width))
    dtype = context.reference.dtype.name
    x, outputs = ours.reshape(-1, width)[rows], context.r.reshape(-1, width)[rows]
    usual = _find_variant(_Sample(x, outputs, weight, bias, dtype), context)
    if usual is None:
        fit = None if weight is not None else _fit_weight(x, outputs, dtype, context)
        if fit is None:
            return
        usual, weight, bias = fit
    is_fitted = not parameters  # to the reference alone, so that no number is fitted to what the target has
    is_wide = dtype in _WIDE
    dtype = context.target.dtype.name
    same = [None if side is None else rounded(side, dtype) for side in (weight, bias)]
    own_weight = same[0] if own_weight is None else own_weight
    own_bias = same[1] if own_bias is None else own_bias
    sample = _Sample(
        theirs.reshape(-1, width)[rows], context.t.reshape(-1, width)[rows], own_weight, own_bias, dtype
    )
    expected = _narrow(usual, sample) if is_wide and dtype not in _WIDE else usual
    yield inherited_error(context.t, expected(theirs, same[0], same[1], dtype), context.r)
    other = _find_variant(sample, context, near=expected)
    if other is None or other == expected:
        yield from _propose_other_groups(context, expected, theirs, (same[0], same[1]), slot)
        if is_fitted and weight is not None:
            yield from _propose_other_weights(context, expected, theirs, (weight, same[1]))
    if other is None:
        return
    if expected.statistic == "layer" and dtype in _WIDE:
        yield from _propose_moments(context, expected, theirs, (own_weight, own_bias), dtype)
    if weight is not None and own_weight is not None and not is_fitted:
        yield from _propose_own_weight(context, other, theirs, (weight, own_weight), own_bias)
    if other == expected:
        return
    predicted, baseline = (v(theirs, own_weight, own_bias, dtype) for v in (other, expected))
    text, kind, hint = _describe_difference(expected, other, slot)
    yield context.propose(
        kind,
        text,
        predicted,
        baseline=baseline,
        log_alternatives=math.log(3 * 4 * 2 * len(_PRECISIONS) * (len(_EPS) + 2) * 2),
        hint=hint,
        facts={"reference": asdict(usual), "target": asdict(other)},
    )


def _propose_moments(
    context: PairContext,
    expected: NormVariant,
    x: Values,
    parameters: tuple[Values | None, Values | None],
    dtype: str,
) -> Iterator[Hypothesis]:
    """Propose that the variance of each row is off by as much as E[x^2] - E[x]^2 in float32 leaves.

    That is a unit or so of E[x]^2, whose sign and size hang on the order of sums: the variance of each row is
    fitted, and is proposed if it misses the right one by that.
    """
    weight, bias = parameters
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    plain = (x - mean) * (1.0 if weight is None else weight)
    unbiased = context.t if bias is None else context.t - bias
    factor = (unbiased * plain).sum(axis=-1, keepdims=True) / (plain * plain).sum(axis=-1, keepdims=True)
    missed = np.abs(1 / (factor * factor) - expected.eps - variance)
    units = missed / (_UNIT * (mean * mean + variance))
    if not np.isfinite(units).all() or not _MOMENTS[0] <= float(np.median(units)) <= _MOMENTS[1]:
        return
    size = float(np.median(np.abs(mean) / np.sqrt(variance)))
    yield Hypothesis(
        "norm-variance-precision",
        f"the variance of rows is off by up to {float((missed / variance).max()):.2g}, as far as E[x^2] - "
        "E[x]^2 in float32 leaves it",
        context.t,
        plain * factor + (0.0 if bias is None else bias),
        expected(x, weight, bias, dtype),
        parameters=factor.size,
        hint="The mean of squares less the square of the mean: they cancel if the mean is large.",
        facts={"largest_units": float(units.max())},
        roundings=ROUNDINGS * max(1.0, size),  # the mean, which is subtracted, is rounded too
    )


def _propose_own_weight(
    context: PairContext, variant: NormVariant, x: Values, weights: tuple[Values, Values], bias: Values | None
) -> Iterator[Hypothesis]:
    """Propose that the target is right for its own weight, which is another one, perhaps by one."""
    dtype = context.target.dtype.name
    weight, own = weights
    if np.array_equal(rounded(weight, dtype), own):
        return
    kind, text = "other-weights", "the target is right for its own weight, which is not that of the reference"
    hint = "Weights differ: look at how they are loaded."
    for shift, name in ((-1, "norm-without-one-plus"), (1, "norm-with-one-plus")):
        if np.linalg.norm(own - weight - shift) < _ONE_TOLERANCE * np.linalg.norm(own - weight):
            kind = name
            text = f"the weight of the target is that of the reference {'plus' if shift > 0 else 'minus'} one"
            hint = "One plus the weight is meant on one side and the weight alone on the other."
    predicted, baseline = variant(x, own, bias, dtype), variant(x, rounded(weight, dtype), bias, dtype)
    yield context.propose(kind, text, predicted, baseline=baseline, hint=hint)


def _propose_other_groups(
    context: PairContext,
    usual: NormVariant,
    x: Values,
    parameters: tuple[Values | None, Values | None],
    slot: str,
) -> Iterator[Hypothesis]:
    """Propose that statistics are those of groups of channels, or of heads together, and of other axes."""
    weight, bias = parameters
    width, dtype = x.shape[-1], context.target.dtype.name
    baseline = usual(x, weight, bias, dtype)
    counts = [context.heads or 1, context.kv_heads or 1, *_GROUPS]
    shapes = {
        f"each of {count} groups of channels": (*x.shape[:-1], count, width // count)
        for count in dict.fromkeys(counts)
        if 1 < count < width and width % count == 0
    }
    ways: list[tuple[str, str, Values]] = []
    for name, shape in shapes.items():
        ways.append(("groups-differ", name, usual(x.reshape(shape), None, None, "float64").reshape(x.shape)))
        turned = np.swapaxes(x.reshape(*x.shape[:-1], shape[-1], shape[-2]), -1, -2)
        normed = np.swapaxes(usual(turned, None, None, "float64"), -1, -2).reshape(x.shape)
        ways.append(("groups-differ", f"{name} that lie that many apart", normed))
    for first in range(1, x.ndim - 1):
        whole = x.reshape(*x.shape[:first], -1)
        name = f"axes {first} to {x.ndim - 1} together"
        ways.append(("axes-differ", name, usual(whole, None, None, "float64").reshape(x.shape)))
    for axis in range(1, x.ndim - 1):
        turned = np.swapaxes(x, axis, -1)
        normed = np.swapaxes(usual(turned, None, None, "float64"), axis, -1)
        ways.append(("axes-differ", f"axis {axis}", normed))
    for kind, name, normed in ways:
        factor = 1.0 if weight is None or usual.weighting == "none" else usual.weigh(weight, dtype)
        predicted = rounded(normed * factor + (0.0 if bias is None else bias), dtype)
        yield context.propose(
            kind,
            f"the target takes the statistics of its {slot} of {name}, the reference of its last axis",
            predicted,
            baseline=baseline,
            log_alternatives=math.log(len(ways)),
            hint="Statistics are those of each head, or of all of them: whose channels a norm is of.",
        )


def _propose_other_weights(
    context: PairContext, usual: NormVariant, x: Values, parameters: tuple[Values, Values | None]
) -> Iterator[Hypothesis]:
    """Propose other weights in the place of the one that is fitted to the reference: by one, or of others.

    Those of other norms are fitted to what these were given and made in the reference.
    """
    weight, bias = parameters
    dtype = context.target.dtype.name
    ways: list[tuple[str, str, Values, str]] = [
        (
            "norm-without-one-plus",
            "the target multiplies by one less than the reference's weight",
            weight - 1,
            "",
        ),
        (
            "norm-with-one-plus",
            "the target multiplies by one more than the reference's weight",
            weight + 1,
            "",
        ),
        ("weight-twice", "the target multiplies by the weight twice", weight**2, ""),
    ]
    for site, other in _fit_sibling_weights(context, len(weight)):
        text = f"the target multiplies by the weight of {site}"
        ways.append(("other-weights", text, other, site))
    hints = {
        "other-weights": "The weight of another norm is used: names of the checkpoint, an index of layers.",
        "weight-twice": "The weight is applied twice: folded into what follows, and left where it was.",
    }
    usual_hint = "One plus the weight is meant on one side and the weight alone on the other."
    baseline = usual(x, weight, bias, dtype)
    for kind, text, other, site in ways:
        yield context.propose(
            kind,
            text,
            usual(x, other, bias, dtype),
            baseline=baseline,
            log_alternatives=math.log(len(ways)),
            hint=hints.get(kind, usual_hint),
            facts={"module": site} if site else {},
        )


def _fit_sibling_weights(context: PairContext, width: int) -> Iterator[tuple[str, Values]]:
    """Fit weights of other norms of the reference, the nearest ones first: site and weight."""
    archive, own = context.reference_archive, context.reference
    classes = {site: module.class_name for site, module in archive.info.modules.items()}
    site = module_of(own.key.site)
    results = [
        r
        for r in archive.records
        if r.key.slot == "output"
        and classes.get(module_of(r.key.site), "") == classes.get(site) != ""
        and module_of(r.key.site) != site
        and (r.key.step, r.key.rank) == (own.key.step, own.key.rank)
        and r.shape[-1:] == (width,)
    ]
    sites = {module_of(r.key.site): r for r in sorted(results, key=lambda r: -abs(r.order - own.order))}
    for other, result in itertools.islice(reversed(sites.items()), _MOST_NORMS):
        inputs = [
            r for r in archive.records if r.key.where == result.key.where and r.key.slot.startswith("input.")
        ]
        fitting = [r for r in inputs if r.shape == result.shape and r.stored]
        if len(fitting) != 1 or not result.stored:
            continue
        x, y = (values_of(archive, r).reshape(-1, width) for r in (fitting[0], result))
        rows = _sample_rows(x)
        fit = _fit_weight(x[rows], y[rows], result.dtype.name, context)
        if fit is not None:
            yield other, fit[1]


def _sample_rows(x: Values) -> Values:
    """Choose rows that distinguish variants: spread over all, and those of the smallest variance."""
    count = max(4, _SAMPLE // x.shape[1])
    spread = evenly_spaced(len(x), count)
    small = np.argsort((x * x).mean(axis=1), kind="stable")[: max(2, count // 8)]
    return np.unique(np.concatenate([spread, small]))


def _list_variants(
    has_weight: bool, is_low: bool, eps: tuple[float, ...], steps: tuple[str, ...] = ("",)
) -> Iterator[NormVariant]:
    """All variants with some eps; those that differ in rounding only if steps are in low precision."""
    weightings: tuple[Weighting, ...] = ("w", "1 + w", "none") if has_weight else ("none",)
    if has_weight and is_low:
        weightings = (*weightings, "1 + w, rounded")
    switches = (False, True) if is_low else (False,)
    precisions = _PRECISIONS if is_low else _PRECISIONS[:1]
    statistics: tuple[Statistic, ...] = ("rms", "layer", "l2")
    for statistic, one_eps, weighting in itertools.product(statistics, eps, weightings):
        for is_cast_first, low, dtype in itertools.product(switches, precisions, steps):
            if low != "moments" or statistic == "layer":
                yield NormVariant(statistic, one_eps, weighting, is_cast_first, low, dtype)


def _find_variant(
    sample: _Sample, context: PairContext, near: NormVariant | None = None
) -> NormVariant | None:
    """Find the variant that makes outputs of inputs.

    1. Variants without low precision, with usual eps, that of the configuration, and one fitted to each; it
       is added to the variance or to its root.
    2. In a narrow dtype, the best of them again with every way of rounding; so in float32, if the best one
       leaves more than rounding, with the eps that is expected and steps in a narrow dtype.
    3. Without `near` the least error has to be a few roundings; with it, `near` stays unless another one
       leaves a tenth of the squared error.
    4. Of those that leave about the least, the one with the fewest differences from `near`, or from the
       plainest.

    Args:
        sample: Inputs and outputs.
        context: For the precision and the configuration.
        near: The variant that is expected; None if none is.
    """
    is_low = sample.dtype not in _WIDE
    has_weight = sample.weight is not None
    known = context.config_number(
        "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"
    )
    eps = tuple(dict.fromkeys(e for e in (known, near.eps if near else None, *_EPS) if e is not None))
    plain = list(_list_variants(has_weight, False, eps))
    outside = [replace(v, is_eps_outside=True) for v in plain if v.eps]
    fitted = {replace(v, eps=_fit_eps(v, sample)) for v in (*plain, *outside) if v.eps == eps[0]}
    errors = {
        v: sample.error(v) for v in (*plain, *outside, *sorted(fitted.difference(plain, outside), key=repr))
    }
    best = min(errors, key=lambda v: (errors[v], _distance(near, v)))
    if is_low or (near is not None and errors[best] > LESSENED * context.tolerance()):
        near_eps = (*eps, best.eps) if is_low or near is None else (near.eps,)
        for v in _list_variants(has_weight, True, near_eps, ("",) if is_low else _NARROW):
            if v.statistic == best.statistic and v.weighting.startswith(best.weighting) and v not in errors:
                errors[v] = sample.error(v)
    least = min(errors.values())
    if near is not None:
        if least >= LESSENED * sample.error(near):
            return near
    elif least > context.tolerance():
        return None
    good = [v for v, left in errors.items() if left <= max(_EQUALLY_GOOD * least, _EQUALLY_EXACT)]
    return min(good, key=lambda v: _distance(near, v))


def _distance(near: NormVariant | None, variant: NormVariant) -> int:
    """Weigh in how much a variant differs from another one, or from the plainest: statistics count most."""
    usual = near or NormVariant("rms", variant.eps, variant.weighting)
    differences = (
        8 * (variant.statistic != usual.statistic),
        4 * (variant.weighting != usual.weighting),
        variant.eps != usual.eps,
        2 * (variant.low != usual.low),
        variant.steps != usual.steps,
        variant.is_cast_first != usual.is_cast_first,
        variant.is_eps_outside != usual.is_eps_outside,
    )
    return sum(map(int, differences))


def _narrow(usual: NormVariant, sample: _Sample) -> NormVariant:
    """The variant of a wide reference in a narrow dtype: either order of rounding and weight is right."""
    orders = [replace(usual, is_cast_first=first) for first in (usual.is_cast_first, not usual.is_cast_first)]
    return min(orders, key=sample.error)


def _fit_eps(variant: NormVariant, sample: _Sample) -> float:
    """Fit eps to the row of the smallest variance, or take the usual one that is near."""
    x, outputs = sample.x, sample.outputs
    y = replace(variant, eps=0.0, is_eps_outside=False)(x, sample.weight, None, "float64")
    unbiased = outputs if sample.bias is None else outputs - sample.bias
    factor = fit_factors((unbiased * y).sum(axis=1), (y * y).sum(axis=1))
    centred = x - x.mean(axis=1, keepdims=True) if variant.statistic == "layer" else x
    variance = (centred * centred).mean(axis=1) if variant.statistic != "l2" else (centred**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(variance)
        eps = root / factor - root if variant.is_eps_outside else variance / factor**2 - variance
    row = int(np.argmin(np.where(variance > 0, variance, np.inf)))
    fitted = float(eps[row])
    if not math.isfinite(fitted) or fitted <= 0:
        return 0.0
    return next((e for e in _EPS if e and abs(fitted / e - 1) < _EPS_TOLERANCE), float(f"{fitted:.3g}"))


def _fit_weight(
    x: Values, outputs: Values, dtype: str, context: PairContext
) -> tuple[NormVariant, Values, Values | None] | None:
    """Fit weight and bias of a norm that are in no archive: by least squares in each channel."""
    if len(x) < _LEAST_ROWS:
        return None
    statistics: tuple[Statistic, ...] = ("rms", "layer")
    for statistic in statistics:
        for eps in dict.fromkeys((context.config_number("rms_norm_eps", "layer_norm_eps") or 1e-6, *_EPS)):
            variant = NormVariant(statistic, eps, "w")
            y = variant(x, None, None, "float64")
            for has_bias in (False, True):
                mean_y, mean = (y.mean(axis=0), outputs.mean(axis=0)) if has_bias else (0.0, 0.0)
                square = ((y - mean_y) ** 2).sum(axis=0)
                weight = fit_factors(((y - mean_y) * outputs).sum(axis=0), square)
                bias = mean - weight * mean_y if has_bias else None
                if _Sample(x, outputs, weight, bias, dtype).error(variant) <= context.tolerance():
                    return variant, weight, bias
    return None


def _describe_difference(one: NormVariant, other: NormVariant, slot: str) -> tuple[str, str, str]:
    """Describe how two variants differ, in the first of these that does: text, kind and hint."""
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
    if one.is_eps_outside != other.is_eps_outside:
        places = {False: "the variance", True: "the root of the variance"}
        theirs, ours = places[other.is_eps_outside], places[one.is_eps_outside]
        text = f"the target adds eps {other.eps:.3g} to {theirs}, the reference {one.eps:.3g} to {ours}"
        return (
            text,
            "norm-eps",
            "Eps stands outside of the root on one side; it shows in rows of small values.",
        )
    if abs(one.eps - other.eps) > _EPS_TOLERANCE * max(one.eps, other.eps):
        text = f"the target adds eps {other.eps:.3g} to the variance, the reference {one.eps:.3g}"
        return text, "norm-eps", "Another eps; it shows in rows of small values only."
    if one.low != other.low:
        side, low = ("target", other.low) if other.low != "wide" else ("reference", one.low)
        text = f"the {side} {_LOW[low]}" + (f", {other.steps}" if other.steps else "")
        return text, "norm-variance-precision", "The variance is accumulated in low precision on one side."
    side = ("target" if other.is_cast_first else "reference") + " rounds"
    text = f"the {side}{f' to {other.steps}' if other.steps else ''} before it multiplies by the weight"
    hint = "The normalised value is cast before or after the weight; the difference is of the last bit."
    return text, "norm-cast-order", hint
