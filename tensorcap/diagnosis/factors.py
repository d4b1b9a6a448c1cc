"""Propose factors and offsets: of the whole tensor, of channels, tokens or heads, or those of a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.constants import hint_for_factor, name_factor, name_rounded_constant
from tensorcap.diagnosis.context import BIASES, GAINS, PairContext, values_of
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.values import (
    Values,
    estimate_step,
    fit_factors,
    number_text,
    other_axes,
    relative_error,
)
from tensorcap_formats.float_formats import rounded

_NOTHING: Final = 1e-6  # a factor that leaves nothing of the reference
_LOST: Final = (
    "Nothing of the reference is left there: look at that part of the weight, and how it is loaded."
)
_LARGEST_FACTOR: Final = 1e6  # of a weight: beyond it the rounding of the other side decides
_LEAST_SEQUENCES: Final = 4  # that share an offset, to be a table of positions
_FACTOR_HINTS: Final = {
    "channel": "A weight that belongs to channels, as that of a norm, is missing or another one.",
    "token": "A norm divides each row by another number, or weights of experts are not renormalised.",
    "head": "A scale that belongs to heads is missing or another one.",
}
_OFFSET_HINTS: Final = {
    "channel": "A bias was dropped or added: the same vector is missing in every token.",
    "token": "The mean was not subtracted, or values are normalised as logarithms on one side.",
    "batch": "A table of positions is missing or another one: the same in every sequence.",
}


def propose_factors(context: PairContext) -> Iterator[Hypothesis]:
    """Propose factors and offsets of all elements, by parameters of the module, and along each axis."""
    if not context.is_same_shape or context.r.size < 4:
        return
    yield from _propose_numbers(context)
    if context.r.ndim >= 1:
        yield from _propose_parameters(context)
    yield from _propose_along_axes(context)


def _propose_numbers(context: PairContext) -> Iterator[Hypothesis]:
    """Propose one factor, one offset, or both, by least squares.

    A factor of -1 is a sign; another one is named by the constants that it equals, within what its own error
    allows.
    """
    r, t = context.r, context.t
    square = float(np.vdot(r, r))
    if not square:
        return
    factor = float(np.vdot(r, t)) / square
    if factor:
        tolerance = _factor_tolerance(relative_error(t, factor * r), r.size)
        if abs(factor + 1) <= tolerance:
            text = "the target is the reference with its sign turned"
            yield context.propose("sign", text, -r, hint="A sign is turned.")
        else:
            error = abs(factor - 1) * estimate_step(t, factor * r, r).error
            names = name_factor(abs(factor), context, tolerance)
            names = names or name_rounded_constant(factor, context, error)
            equal = f", which is {'-' if factor < 0 else ''}{names[0]}" if names else ""
            if len(names) > 1:
                equal += f" (or {', '.join(names[1:])})"
            text = f"the target is the reference times {number_text(factor, 1.0, error)}{equal}"
            facts = {"factor": factor, "standard_error": error, "equals": list(names)}
            hint = hint_for_factor(names)
            if behind := _find_factor_behind(context, factor):
                site, further = behind
                text += f"; before {site} the target multiplies it by {number_text(further, 1 / factor)}"
                text += f", where {1 / factor:.6g} would make up for that"
                hint = f"The scale is applied behind the module in the target, and as {further:.6g} there."
                facts["factor_behind"] = further
            yield context.propose("factor", text, factor * r, parameters=1, hint=hint, facts=facts)
    offset = float((t - r).mean())
    yield context.propose(
        "offset",
        f"the target is the reference plus {number_text(offset, 0.0)}",
        r + offset,
        parameters=1,
        hint="A constant is missing or added.",
        facts={"offset": offset},
    )
    centred = r - r.mean()
    spread = float(np.vdot(centred, centred))
    if spread:
        slope = float(np.vdot(centred, t)) / spread
        start = float(t.mean() - slope * r.mean())
        yield context.propose(
            "affine",
            f"the target is {slope:.6g} times the reference plus {start:.6g}",
            slope * r + start,
            parameters=2,
            hint="Values are normalised with another mean and deviation." if abs(slope) > _NOTHING else _LOST,
            facts={"factor": slope, "offset": start},
        )


def _find_factor_behind(context: PairContext, factor: float) -> tuple[str, float] | None:
    """Find what the target multiplies its own result by before the next call that is given it, and that site.

    None if the result is handed on as it is, or if it is made up for. The reference is not looked at.
    """
    t, own = context.t, context.target
    tolerance, energy = context.tolerance(), float(np.vdot(t, t))
    if context.window is not None or not own.key.slot.startswith("output") or not factor:
        return None
    if not energy or abs(factor - 1) <= tolerance:
        return None
    if relative_error(t, factor * context.r) > tolerance:
        return None
    later = [
        record
        for record in context.target_archive.records
        if record.order > own.order
        and record.key.slot.startswith("input")
        and (record.key.step, record.key.rank, record.shape) == (own.key.step, own.key.rank, own.shape)
        and record.stored
        and record.dtype.kind == "float"
    ]
    if not later:
        return None
    first = min(later, key=lambda record: record.order)
    values = values_of(context.target_archive, first)
    further = float(np.vdot(t, values)) / energy
    is_proportional = relative_error(values, further * t) <= tolerance
    is_other = min(abs(further - 1), abs(further * factor - 1)) > 2 * tolerance
    return (first.key.site, further) if is_proportional and is_other else None


def _factor_tolerance(left: float, size: int) -> float:
    """How far a fitted factor may be from the constant that it is: some standard errors, and 1e-5."""
    return min(1e-2, 8 * left / math.sqrt(size) + left / 20 + 1e-5)


def _propose_parameters(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that a weight or bias of the module is missing, or applied once more: nothing is fitted."""
    r = context.r
    for name, (ours, theirs) in context.read_parameters().items():
        last = name.rpartition(".")[2]
        facts = {"parameter": name}
        for side, vector in (("reference", ours), ("target", theirs)):
            if vector is None or vector.shape != r.shape[-1:]:
                continue
            if side == "target" and ours is not None and np.array_equal(ours, vector):
                continue
            if last in GAINS:
                yield from _propose_weight(context, name, vector)
            if last in BIASES:
                hint = f"The {last} was dropped: the same vector is missing in every token."
                text = f"the target lacks {name}: it is the reference minus {name}"
                yield context.propose("bias-dropped", text, r - vector, hint=hint, facts=facts)
                hint = f"The {last} is added once more."
                text = f"the target is the reference plus {name}"
                yield context.propose("bias-added", text, r + vector, hint=hint, facts=facts)
        if last not in BIASES or ours is None or theirs is None:
            continue
        if ours.shape == theirs.shape == r.shape[-1:] and not np.array_equal(ours, theirs):
            text = f"the target is the reference with its own {name}"
            hint = f"The two sides hold another {name}: look at how weights are loaded."
            yield context.propose("bias-differs", text, r - ours + theirs, hint=hint, facts=facts)


def _propose_weight(context: PairContext, name: str, w: Values) -> Iterator[Hypothesis]:
    """Propose that a weight of channels is missing, applied twice, or meant with one added to it."""
    without_one, with_one = "norm-without-one-plus", "norm-with-one-plus"
    plus_one_meant, weight_meant = "{} is used where 1 + {} is meant", "1 + {} is used where {} is meant"
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors = [
            (w / (1 + w), without_one, f"{name} / (1 + {name})", f"{plus_one_meant}."),
            ((1 + w) / w, with_one, f"(1 + {name}) / {name}", f"{weight_meant}."),
            (1 / w, "weight-missing", f"1 / {name}", "The multiplication by {} is missing."),
            (1 / (1 + w), "weight-missing", f"1 / (1 + {name})", "The multiplication by 1 + {} is missing."),
            (w, "weight-twice", name, "The multiplication by {} is done once more."),
        ]
        if context.is_narrow:
            dtype = context.target.dtype.name
            own = rounded(w, dtype)
            less, more = rounded(own - 1, dtype), rounded(1 + own, dtype)
            text = f"(1 + v) / (1 + {name}), v being {name} - 1 in {dtype}"
            hint = f"{plus_one_meant}, and is kept in low precision less one."
            factors.append(((1 + less) / (1 + w), without_one, text, hint))
            text = f"v / {name}, v being 1 + {name} in {dtype}"
            factors.append((more / w, with_one, text, f"{weight_meant}, and is kept in low precision."))
    for factor, kind, text, hint in factors:
        is_sane = np.isfinite(factor) & (np.abs(factor) < _LARGEST_FACTOR)
        if is_sane.all() and not np.all(factor == 1):
            sentence = f"the target is the reference times {text}, channel by channel"
            hint = hint.replace("{}", f"the {name}", 1).replace("{}", name)
            hint = hint[:1].upper() + hint[1:]
            yield context.propose(kind, sentence, context.r * factor, hint=hint, facts={"parameter": name})


def _propose_along_axes(context: PairContext) -> Iterator[Hypothesis]:
    """Propose a factor, or an offset, for each index of an axis; and for each row of all channels."""
    r, t = context.r, context.t
    groups = [(context.axis_name(axis), other_axes(r, axis)) for axis in range(r.ndim) if r.shape[axis] > 1]
    if r.ndim > 2:
        groups.append(("row", (r.ndim - 1,)))
    for name, summed in groups:
        if not summed or math.prod(r.shape[axis] for axis in summed) < 2:
            continue
        square = (r * r).sum(axis=summed, keepdims=True)
        factor = fit_factors((r * t).sum(axis=summed, keepdims=True), square)
        offset = (t - r).mean(axis=summed, keepdims=True)
        for what, numbers, predicted, how, hints in (
            ("factor", factor, r * factor, "times", _FACTOR_HINTS),
            ("offset", offset, r + offset, "plus", _OFFSET_HINTS),
        ):
            low, high = float(numbers.min()), float(numbers.max())
            neutral = float(what == "factor")
            ends = f"{number_text(low, neutral)} to {number_text(high, neutral)}"
            yield context.propose(
                f"{name.replace(' ', '-')}-{what}",
                f"each {name} of the target is that of the reference {how} a number, {ends}",
                predicted,
                parameters=numbers.size,
                hint=hints.get("token" if name == "row" else name, ""),
                facts={"lowest": low, "highest": high},
            )
    yield from _propose_by_sequence(context)


def _propose_by_sequence(context: PairContext) -> Iterator[Hypothesis]:
    """Propose the same offset in each sequence of a batch; a factor and an offset for each channel."""
    r, t = context.r, context.t
    if r.ndim >= 3 and r.shape[0] >= _LEAST_SEQUENCES:
        offset = (t - r).mean(axis=0, keepdims=True)
        text = "the difference is the same in every sequence of the batch"
        hint = _OFFSET_HINTS["batch"]
        yield context.propose("position-offset", text, r + offset, parameters=offset.size, hint=hint)
    others = tuple(range(r.ndim - 1))
    if r.ndim >= 2:
        mean_r, mean_t = r.mean(axis=others), t.mean(axis=others)
        spread = ((r - mean_r) ** 2).sum(axis=others)
        slope = fit_factors(((r - mean_r) * t).sum(axis=others), spread)
        yield context.propose(
            "channel-affine",
            "each channel of the target is that of the reference times a number plus another",
            (r - mean_r) * slope + mean_t,
            parameters=2 * r.shape[-1],
            hint="A norm of channels, or the mean and deviation of images, has other numbers.",
        )
