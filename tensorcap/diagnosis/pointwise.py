"""Propose functions of each value: limits, ranges, rounding, a soft cap, a temperature, logarithms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.comparison import find_weight_grid
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.golden_section import minimize_over_logarithm
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.values import Values, number_text, relative_error
from tensorcap_formats.float_formats import FLOAT_FORMATS, UNIT_ROUNDOFFS, rounded

_LEAST_AT_LIMIT: Final = 3  # elements that share the extreme value of a tensor that is limited
_NARROW: Final = ("bfloat16", "float16", "tf32", "float8_e4m3fn", "float8_e5m2")
_LARGEST_RANGE: Final = 1e6  # of a precision whose range is left by sums; bfloat16's is that of float32
_NEAR: Final = 0.9  # of the largest value: no smaller one is cut
_BELOW_RANGE: Final = 1000.0  # so much below the largest value models of Hugging Face clamp
_SAMPLE: Final = 1 << 14  # elements that a soft cap is fitted to
_LARGEST_CAP: Final = 100  # times the largest value that is capped
_STEPS: Final = 40  # of the golden section: 4e-9 of the interval
_LEAST_PROBABILITY: Final = 1e-20  # below it a softmax in float32 is rounded to nothing
_SUM_TOLERANCE: Final = 0.02  # by which a row of probabilities in bfloat16 may miss 1


def propose_functions(context: PairContext) -> Iterator[Hypothesis]:
    """Propose limits, roundings, soft caps, and other temperatures of probabilities."""
    if not context.is_same_shape or context.r.size < 8:
        return
    yield from _propose_saturation(context)
    yield from _propose_limits(context)
    yield from _propose_roundings(context)
    yield from _propose_softcaps(context)
    yield from _propose_temperatures(context)


def _propose_saturation(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that values beyond the range of the target's precision are cut to a limit, or infinite.

    The limit is the largest finite value, or 1,000 less, to which models clamp; it is not fitted.
    """
    dtype = context.precision
    form = FLOAT_FORMATS.get(dtype)
    r, t = context.reference_values, context.target_values
    largest = float(np.abs(r, where=np.isfinite(r), out=np.zeros(r.shape)).max(initial=0.0))
    if form is None or form.largest > _LARGEST_RANGE or largest <= _NEAR * form.largest:
        return
    start, hint = f"{dtype} holds at most {form.largest:.6g}", "A result leaves the range of its precision."
    facts = {"dtype": dtype, "largest_in_reference": largest}
    for limit in (form.largest, float(rounded(np.array(form.largest - _BELOW_RANGE), dtype))):
        if np.abs(context.t).max() == limit:
            text = f"{start}, and what is larger in the reference is cut to {limit:.6g}"
            cut = rounded(np.clip(context.r, -limit, limit), dtype)
            yield context.propose("saturated", text, cut, hint=hint, facts={**facts, "limit": limit})
    is_infinite, is_finite = np.isinf(t), np.isfinite(r)
    if form.special == "ieee" and is_infinite.any() and not np.isnan(t).any() and is_finite.all():
        yield Hypothesis(
            "overflow",
            f"{start}, and what is larger in the reference is infinite",
            is_infinite.astype(np.float64),
            (form.numbers(np.abs(r)) == form.largest_number).astype(np.float64),
            np.zeros(r.shape),
            hint=hint,
            facts=facts,
        )


def _propose_limits(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that one side is the other limited to its own smallest and largest value."""
    r, t = context.r, context.t
    sides = (
        (t, r, "clipped", "the target is the reference", "Values are clamped, or saturate."),
        (r, t, "clip-missing", "the reference is the target", "A clamp of the reference is missing."),
    )
    for limited, whole, kind, start, hint in sides:
        low, high = float(limited.min()), float(limited.max())
        at_low = int((limited == low).sum()) >= _LEAST_AT_LIMIT and bool((whole < low).any())
        at_high = int((limited == high).sum()) >= _LEAST_AT_LIMIT and bool((whole > high).any())
        if low == high or not (at_low or at_high):
            continue
        bounds = low if at_low else -math.inf, high if at_high else math.inf
        limits = [f"at least {low:.6g}"] * at_low + [f"at most {high:.6g}"] * at_high
        yield Hypothesis(
            kind,
            f"{start} limited to {' and '.join(limits)}",
            limited,
            np.clip(whole, *bounds),
            whole,
            parameters=at_low + at_high,
            hint=hint,
            facts={"low": low if at_low else None, "high": high if at_high else None},
        )


def _propose_roundings(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that one side is the other rounded to a narrow dtype, or quantised by its largest value."""
    r, t = context.r, context.t
    for dtype in _NARROW:
        facts = {"dtype": dtype}
        text = f"the target is the reference rounded to {dtype}"
        hint = f"The target passes through {dtype} where the reference does not."
        yield context.propose("rounded", text, rounded(r, dtype), hint=hint, facts=facts)
        text = f"the reference is the target rounded to {dtype}"
        hint = f"The target keeps more precision than {dtype}, in which the reference is."
        yield Hypothesis("not-rounded", text, r, rounded(t, dtype), t, hint=hint, facts=facts)
    unit = UNIT_ROUNDOFFS.get(context.target.dtype.name, 0.0)
    grid = find_weight_grid(r, t, unit) if context.is_parameter else None
    if grid is not None:
        yield context.propose(
            "rounded",
            f"the target is the reference rounded to {grid.text}",
            grid.rounded,
            hint=f"The target is quantised to int{grid.bits}, and made floats again.",
            facts={"dtype": f"int{grid.bits}", "scale": grid.scope},
        )
    for dtype, largest in (("float8_e4m3fn", FLOAT_FORMATS["float8_e4m3fn"].largest), ("int8", 127.0)):
        scale = np.abs(r).max() / largest
        if scale:
            coarse = rounded(r / scale, dtype) if dtype != "int8" else np.rint(r / scale)
            yield context.propose(
                "rounded",
                f"the target is the reference rounded to {dtype}, scaled by its largest value",
                coarse * scale,
                hint=f"The target is quantised to {dtype}.",
                facts={"dtype": dtype, "is_scaled": True},
            )


def _propose_softcaps(context: PairContext) -> Iterator[Hypothesis]:
    """Propose c * tanh(x / c) on one side, with c from the configuration or fitted."""
    r, t = context.r, context.t
    caps = {
        name: float(value)
        for name, value in context.config.items()
        if "softcap" in name and isinstance(value, int | float) and value
    }
    sides = (
        (r, t, "softcap-missing", "the reference is the target", "The soft cap is missing in the target."),
        (t, r, "softcap-added", "the target is the reference", "The target applies a soft cap."),
    )
    for capped, whole, kind, start, hint in sides:
        for name, cap in caps.items():
            text = f"{start} soft-capped at {cap:g}, which is {name}"
            facts = {"cap": cap, "equals": name}
            yield Hypothesis(kind, text, capped, cap * np.tanh(whole / cap), whole, hint=hint, facts=facts)
        fitted = _fit_cap(capped, whole)
        if fitted is not None:
            yield Hypothesis(
                kind,
                f"{start} soft-capped at {fitted:.6g}",
                capped,
                fitted * np.tanh(whole / fitted),
                whole,
                parameters=1,
                log_alternatives=math.log(_STEPS),
                hint=hint,
                facts={"cap": fitted},
            )


def _fit_cap(capped: Values, whole: Values) -> float | None:
    """Find the cap that leaves least; None if the larger side is no larger."""
    largest = float(np.abs(capped).max())
    if not largest or float(np.abs(whole).max()) <= largest:
        return None
    largest_last = np.argsort(np.abs(whole).reshape(-1), kind="stable")
    sample = largest_last[-_SAMPLE:]  # a cap changes large values most
    capped_sample, whole_sample = capped.reshape(-1)[sample], whole.reshape(-1)[sample]

    def error(cap: float) -> float:
        return relative_error(capped_sample, cap * np.tanh(whole_sample / cap))

    low, high = math.log(largest * (1 + 1e-12)), math.log(largest * _LARGEST_CAP)
    return minimize_over_logarithm(error, low, high, _STEPS)


def _propose_temperatures(context: PairContext) -> Iterator[Hypothesis]:
    """Propose, of rows that are probabilities, another temperature of their softmax, or their logarithms.

    With another temperature the logarithms of a row, less their mean, are those of the reference times one
    power, which is fitted by least squares, weighted by the probabilities.
    """
    r, t = context.r, context.t
    if r.ndim < 1 or r.shape[-1] < 2 or not _sums_to_one(r):
        return
    log_r = np.log(np.maximum(r, 1e-300))
    text = "the target holds the logarithms of the reference"
    hint = "A softmax on one side, its logarithm on the other."
    yield context.propose("logarithm", text, log_r, hint=hint)
    if not _sums_to_one(t):
        return
    is_measured = (r > _LEAST_PROBABILITY) & (t > _LEAST_PROBABILITY)
    count = np.maximum(is_measured.sum(axis=-1, keepdims=True), 1)
    x, y = (
        np.where(is_measured, logs - (logs * is_measured).sum(axis=-1, keepdims=True) / count, 0.0)
        for logs in (log_r, np.log(np.maximum(t, 1e-300)))
    )
    square = float(np.vdot(x * r, x))
    if not square:
        return
    power = float(np.vdot(x * r, y)) / square
    powered = np.where(r > 0, np.exp(power * (log_r - log_r.max(axis=-1, keepdims=True))), 0.0)
    yield context.propose(
        "softmax-scale",
        f"scores before the softmax of the target are those of the reference times {number_text(power, 1.0)}",
        powered / powered.sum(axis=-1, keepdims=True),
        parameters=1,
        hint="Another scale of the scores of attention, or another temperature.",
        facts={"factor": power},
    )


def _sums_to_one(values: Values) -> bool:
    return bool(values.min() >= 0) and bool(np.abs(values.sum(axis=-1) - 1).max() <= _SUM_TOLERANCE)
