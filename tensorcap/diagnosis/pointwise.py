"""Functions of each value: limits, rounding, a soft cap, a temperature, logarithms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.scoring import Hypothesis, Values, relative_error
from tensorcap_formats.float_formats import FLOAT_FORMATS, rounded

_CLIPPED: Final = 3  # elements at a limit that make it one
_NARROW: Final = ("bfloat16", "float16", "tf32", "float8_e4m3fn", "float8_e5m2")
_SAMPLE: Final = 1 << 14
_STEPS: Final = 40


def pointwise(exhibit: PairContext) -> Iterator[Hypothesis]:
    """All of them."""
    if not exhibit.is_same_shape or exhibit.r.size < 8:
        return
    r, t = exhibit.r, exhibit.t
    yield from _clipped(r, t)
    yield from _roundings(r, t)
    yield from _softcaps(exhibit)
    yield from _probabilities(r, t)


def _clipped(r: Values, t: Values) -> Iterator[Hypothesis]:
    sides = (
        (
            t,
            r,
            "clipped",
            "the target is the reference limited to {} and {}",
            "Values are clamped, or saturate.",
        ),
        (
            r,
            t,
            "clip-missing",
            "the reference is the target limited to {} and {}",
            "A clamp of the reference is missing.",
        ),
    )
    for limited, whole, kind, text, hint in sides:
        low, high = float(limited.min()), float(limited.max())
        at_low = int((limited == low).sum()) >= _CLIPPED and bool((whole < low).any())
        at_high = int((limited == high).sum()) >= _CLIPPED and bool((whole > high).any())
        if low == high or not (at_low or at_high):
            continue
        predicted = np.clip(whole, low if at_low else -np.inf, high if at_high else np.inf)
        bounds = [f"{low:.6g}" if at_low else "-inf", f"{high:.6g}" if at_high else "inf"]
        facts = {"low": low if at_low else None, "high": high if at_high else None}
        yield Hypothesis(
            kind, text.format(*bounds), limited, predicted, whole, at_low + at_high, 0, hint, facts
        )


def _roundings(r: Values, t: Values) -> Iterator[Hypothesis]:
    for dtype in _NARROW:
        facts = {"dtype": dtype}
        text = f"the target is the reference rounded to {dtype}"
        hint = f"The target passes through {dtype} where the reference does not."
        yield Hypothesis("rounded", text, t, rounded(r, dtype), r, 0, 0, hint, facts)
        text = f"the reference is the target rounded to {dtype}"
        hint = f"The target keeps more precision than {dtype}, in which the reference is."
        yield Hypothesis("not-rounded", text, r, rounded(t, dtype), t, 0, 0, hint, facts)
    for dtype, largest in (("float8_e4m3fn", FLOAT_FORMATS["float8_e4m3fn"].largest), ("int8", 127.0)):
        scale = np.abs(r).max() / largest
        if scale:
            scaled = r / scale
            coarse = rounded(scaled, dtype) if dtype != "int8" else np.rint(scaled)
            text = f"the target is the reference rounded to {dtype}, scaled by its largest value"
            hint = f"The target is quantised to {dtype}."
            yield Hypothesis(
                "rounded", text, t, coarse * scale, r, 0, 0, hint, {"dtype": dtype, "is_scaled": True}
            )


def _softcaps(exhibit: PairContext) -> Iterator[Hypothesis]:
    """The function c * tanh(x / c), with c from the configuration or fitted."""
    r, t = exhibit.r, exhibit.t
    given = {
        name: float(value)
        for name, value in exhibit.config.items()
        if "softcap" in name and isinstance(value, int | float) and value
    }
    sides = (
        (r, t, "softcap-missing", "the reference is the target", "The soft cap is missing in the target."),
        (t, r, "softcap-added", "the target is the reference", "The target applies a soft cap."),
    )
    for capped, whole, kind, start, hint in sides:
        for name, cap in given.items():
            text = f"{start} soft-capped at {cap:g}, which is {name}"
            facts = {"cap": cap, "equals": name}
            yield Hypothesis(kind, text, capped, cap * np.tanh(whole / cap), whole, 0, 0, hint, facts)
        fitted = _fitted_cap(capped, whole)
        if fitted is not None:
            text = f"{start} soft-capped at {fitted:.6g}"
            predicted = fitted * np.tanh(whole / fitted)
            yield Hypothesis(kind, text, capped, predicted, whole, 1, math.log(_STEPS), hint, {"cap": fitted})


def _fitted_cap(capped: Values, whole: Values) -> float | None:
    """The cap that leaves least, by golden section over its logarithm; None where it caps nothing."""
    largest = float(np.abs(capped).max())
    if not largest or float(np.abs(whole).max()) <= largest:
        return None
    order = np.argsort(np.abs(whole).reshape(-1), kind="stable")[-_SAMPLE:]  # large ones tell most
    few, many = capped.reshape(-1)[order], whole.reshape(-1)[order]
    low, high = math.log(largest * (1 + 1e-12)), math.log(largest * 100)
    ratio = (math.sqrt(5) - 1) / 2

    def left(log_cap: float) -> float:
        cap = math.exp(log_cap)
        return relative_error(few, cap * np.tanh(many / cap))

    for _ in range(_STEPS):
        inner, outer = high - ratio * (high - low), low + ratio * (high - low)
        if left(inner) < left(outer):
            high = outer
        else:
            low = inner
    return math.exp((low + high) / 2)


def _probabilities(r: Values, t: Values) -> Iterator[Hypothesis]:
    """Rows that are probabilities: another temperature, logarithms of them."""
    if r.ndim < 1 or r.shape[-1] < 2 or not _sums_to_one(r):
        return
    log_r = np.log(np.maximum(r, 1e-300))
    text = "the target holds the logarithms of the reference"
    yield Hypothesis(
        "logarithm", text, t, log_r, r, 0, 0, "A softmax on one side, its logarithm on the other."
    )
    if not _sums_to_one(t):
        return
    seen = (r > 1e-20) & (t > 1e-20)
    log_t = np.log(np.maximum(t, 1e-300))
    count = np.maximum(seen.sum(axis=-1, keepdims=True), 1)
    x = np.where(seen, log_r - (log_r * seen).sum(axis=-1, keepdims=True) / count, 0.0)
    y = np.where(seen, log_t - (log_t * seen).sum(axis=-1, keepdims=True) / count, 0.0)
    square = float(np.vdot(x * r, x))  # small probabilities tell little
    if not square:
        return
    power = float(np.vdot(x * r, y)) / square
    powered = np.where(r > 0, np.exp(power * (log_r - log_r.max(axis=-1, keepdims=True))), 0.0)
    predicted = powered / powered.sum(axis=-1, keepdims=True)
    text = f"scores before the softmax of the target are those of the reference times {power:.5g}"
    hint = "Another scale of the scores of attention, or another temperature."
    yield Hypothesis("softmax-scale", text, t, predicted, r, 1, 0, hint, {"factor": power})


def _sums_to_one(values: Values) -> bool:
    return bool(values.min() >= 0) and bool(np.abs(values.sum(axis=-1) - 1).max() <= 0.02)
