"""Propose other rotary embeddings: frequencies of sines and cosines, angles of what is rotated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.values import Values
from tensorcap_formats.float_formats import rounded

_LARGEST_SCALE: Final = 4  # of cosines that are stretched (YaRN)
_READABLE: Final = 0.7  # a cosine below it, or a sine above it, gives an angle of the first turn
_NEWTON_STEPS: Final = 3
_FIT_TOLERANCE: Final = 0.05  # absolute, of a table that fitted frequencies make again
_BASE_TOLERANCE: Final = 0.02  # relative spread of the steps between logarithms of frequencies
_NARROW: Final = ("bfloat16", "float16")
_SAME_FREQUENCIES: Final = 1e-3  # relative: frequencies that fitted ones stand for
_STILL: Final = 1e-3  # radians per position: angles that stay
_FREQUENCY_HINT: Final = (
    "Rotary positions with another base (theta), or the scaling of positions is absent or another."
)
_ONE_SIDE_HINT: Final = (
    "The rotation of positions is applied on one side only at this place: it is missing, done twice, or "
    "comes before another step on one side and behind it on the other."
)


def propose_rotations(context: PairContext) -> Iterator[Hypothesis]:
    """Propose other frequencies of a table of sines or cosines, and other angles of rotated heads."""
    r, t = context.r, context.t
    if r.ndim < 2 or r.shape[-1] < 4 or r.shape[-1] % 2 or r.shape[-2] < 4:
        return
    if not context.is_same_shape:
        if r.shape[:-1] == t.shape[:-1]:
            yield from _propose_more_frequencies(context)
        return
    yield from _propose_frequencies(context)
    yield from _propose_angles(context)


def _propose_frequencies(context: PairContext) -> Iterator[Hypothesis]:
    """Propose other frequencies in cosines or sines of position times frequency.

    1. Frequencies and scale of each side are fitted.
    2. Those of the reference have to make it again.
    3. The target is proposed to be made by its own; bases are named if the frequencies are powers of one.
    4. It is proposed to be made by those of the reference with steps in low precision.
    """
    r, t = context.r, context.t
    if max(np.abs(r).max(), np.abs(t).max()) > _LARGEST_SCALE:
        return
    count = r.shape[-2]
    for name, function in (("cosine", np.cos), ("sine", np.sin)):
        reference, target = (_fit_frequencies(side.reshape(-1, *side.shape[-2:])[0], name) for side in (r, t))
        if reference is None:
            continue
        ours, usual = reference
        positions = np.arange(count)[:, None]
        expected = function(positions * ours) * usual
        if np.abs(expected - r).max() > _FIT_TOLERANCE:
            continue
        yield from _propose_low_tables(context, name, ours, usual)
        if target is None:
            continue
        theirs, scale = target
        predicted = np.broadcast_to(scale * function(positions * theirs), t.shape)
        facts = _find_bases(ours, theirs)
        known = f": base {facts['target_base']:.4g} for {facts['reference_base']:.4g}" if facts else ""
        yield context.propose(
            "rotary-frequencies",
            f"the {name}s of the target are of other frequencies{known}",
            predicted,
            parameters=len(np.unique(np.round(theirs, 12))) + 1,
            hint=_FREQUENCY_HINT,
            facts=facts,
        )


def _propose_more_frequencies(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that the target's table of cosines or sines is one of more or fewer frequencies."""
    r, t = context.r, context.t
    for name, function in (("cosine", np.cos), ("sine", np.sin)):
        fits = [_fit_frequencies(side.reshape(-1, *side.shape[-2:])[0], name) for side in (r, t)]
        tables = []
        for side, fit in zip((r, t), fits, strict=True):
            if fit is not None:
                table = fit[1] * function(np.arange(side.shape[-2])[:, None] * fit[0])
                tables.append(np.broadcast_to(table, side.shape))
        if fits[1] is not None and len(tables) == 2 and np.abs(tables[0] - r).max() <= _FIT_TOLERANCE:
            yield Hypothesis(
                "rotary-frequencies",
                f"the {name}s of the target are of {t.shape[-1]} frequencies, those of the reference of "
                f"{r.shape[-1]}",
                t,
                tables[1],
                None,
                parameters=len(np.unique(np.round(fits[1][0], 12))) + 1,
                hint="Another part of the channels is rotated, or frequencies are of another size of heads.",
            )


def _propose_low_tables(
    context: PairContext, name: str, frequencies: Values, scale: float
) -> Iterator[Hypothesis]:
    """Propose that frequencies, positions, their products or all of it are rounded before the function.

    Frequencies are those of a buffer of the module, or the powers of a base that is a whole number, if these
    are the fitted ones: the product with a position may lie half way between two values of low precision.
    Powers of a base may also be computed step by step in low precision.
    """
    function = np.cos if name == "cosine" else np.sin
    half = len(frequencies) // 2
    buffers = [ours for ours, _ in context.read_parameters().values() if ours is not None]
    base = _find_bases(frequencies, frequencies).get("reference_base")
    if base is not None:
        buffers.append(round(base) ** (-np.arange(half) / half))
    for known in buffers:
        if known.shape in ((half,), (len(frequencies),)):
            repeated = np.tile(known, len(frequencies) // len(known))
            if np.allclose(repeated, frequencies, rtol=_SAME_FREQUENCIES, atol=0.0):
                frequencies = repeated
                break
    positions = np.arange(context.r.shape[-2], dtype=np.float64)[:, None]
    for dtype in _NARROW:
        low = partial(rounded, name=dtype)
        angles = {
            "frequencies": positions * low(frequencies),
            "positions": low(positions) * frequencies,
            "angles": low(positions * frequencies),
            "frequencies, positions and angles": low(low(positions) * low(frequencies)),
        }
        if base is not None:
            powers = low(1 / low(round(base) ** low(np.arange(half) / half)))
            powers = np.tile(powers, 2)[: len(frequencies)]
            angles["powers of the base"] = positions * powers
            angles["powers of the base, and angles,"] = low(low(positions) * powers)
        for what, values in angles.items():
            yield context.propose(
                "rotary-precision",
                f"the {name}s of the target are those of {what} rounded to {dtype}",
                np.broadcast_to(scale * function(values), context.t.shape),
                log_alternatives=math.log(len(angles) * len(_NARROW)),
                hint="A rotary table is computed in low precision, or its frequencies were cast.",
                facts={"dtype": dtype, "rounded": what},
            )


def _fit_frequencies(rows: Values, name: str) -> tuple[Values, float] | None:
    """Fit frequencies and a scale to rows of cosines or sines.

    1. Row 0 is position 0: it gives the scale of cosines.
    2. The first row whose angle can be read off gives each frequency.
    3. Newton steps on twice as many positions each time refine it, so that no angle leaves its turn.

    Returns:
        Frequencies, radians per position, and the scale; None if row 0 is not position 0.
    """
    scale = float(rows[0].mean()) if name == "cosine" else 1.0
    if scale <= 0 or np.abs(rows[0] - (scale if name == "cosine" else 0.0)).max() > 0.01 * scale:
        return None
    function, slope = (np.cos, np.sin) if name == "cosine" else (np.sin, np.cos)
    sign = -1.0 if name == "cosine" else 1.0
    values = np.clip(rows / scale, -1, 1)
    is_readable = values < _READABLE if name == "cosine" else values > _READABLE
    first = np.where(is_readable.any(axis=0), is_readable.argmax(axis=0), len(rows) - 1)
    there = np.take_along_axis(values, first[None], axis=0)[0]
    frequencies = (np.arccos(there) if name == "cosine" else np.arcsin(there)) / first
    stop = 2
    while stop < len(rows):
        stop = min(len(rows), 2 * stop)
        at = np.arange(stop)[:, None]
        for _ in range(_NEWTON_STEPS):
            residual = values[:stop] - function(at * frequencies)
            tilt = sign * at * slope(at * frequencies)
            step = (residual * tilt).sum(axis=0) / np.maximum((tilt * tilt).sum(axis=0), 1e-12)
            frequencies = frequencies + np.where(stop > first, step, 0.0)
    return frequencies, scale


def _find_bases(ours: Values, theirs: Values) -> dict[str, Any]:
    """Find the bases that the frequencies of both sides are powers of; empty if they are not."""
    bases = []
    for frequencies in (ours, theirs):
        half = frequencies[: len(frequencies) // 2]
        if not (half > 0).all() or len(half) < 2:
            return {}
        steps = -np.diff(np.log(half)) * len(half)
        if np.ptp(steps) > _BASE_TOLERANCE * abs(float(steps.mean())):
            return {}
        bases.append(math.exp(min(700.0, float(steps.mean()))))
    return {"reference_base": bases[0], "target_base": bases[1]}


def _propose_angles(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that all heads are rotated by other angles, one for each position and frequency.

    Pairs of channels are complex numbers, in halves or interleaved; the angle is that of the sum of
    target times conjugate reference over sequences and heads.
    """
    r, t = context.r, context.t
    width = r.shape[-1]
    head_dim = context.head_dim
    if r.ndim == 4:
        axis = next((a for a in (1, 2) if context.axis_name(a) == "head"), 1)
        ours, theirs = (np.moveaxis(side, axis, 1) for side in (r, t))
    elif r.ndim == 3 and head_dim and width % head_dim == 0 and head_dim % 2 == 0:
        shape = (*r.shape[:2], width // head_dim, head_dim)
        ours, theirs = (side.reshape(shape).transpose(0, 2, 1, 3) for side in (r, t))
    else:
        return
    half = ours.shape[-1] // 2
    layouts = {
        "halves": (slice(0, half), slice(half, 2 * half)),
        "pairs": (slice(0, None, 2), slice(1, None, 2)),
    }
    for name, layout in layouts.items():
        turn = (_as_complex(theirs, layout) * _as_complex(ours, layout).conj()).sum(axis=(0, 1))
        start, step = _fit_even_angles(turn)
        is_shift = bool(np.abs(step).max() < _STILL)
        growth = "stay" if is_shift else "grow"
        yield Hypothesis(
            "rotary-shift" if is_shift else "rotary-frequencies",
            f"every head is rotated, in {name}, by angles that {growth} with the position",
            theirs,
            _rotate(ours, layout, np.exp(1j * (start + step * np.arange(len(turn))[:, None]))),
            ours,
            parameters=2 * len(step),
            log_alternatives=math.log(2),
            hint="Positions are off by a number: another start, padding, or a cache."
            if is_shift
            else _ONE_SIDE_HINT
            if _is_whole_rotation(step)
            else _FREQUENCY_HINT,
            facts={"layout": name, "per_position": step.tolist(), "at_start": start.tolist()},
        )
        size = np.abs(turn)
        yield Hypothesis(
            "rotary-angles",
            f"every head is rotated by other angles, in {name}: one for each position and frequency",
            theirs,
            _rotate(ours, layout, np.divide(turn, size, out=np.ones_like(turn), where=size > 0)),
            ours,
            parameters=turn.size,
            log_alternatives=math.log(2),
            hint="Rotary positions: base or scaling of frequencies, positions off by some, or not applied.",
            facts={"layout": name},
        )


def _is_whole_rotation(step: Values) -> bool:
    """Whether angles per position are those of a rotation itself: powers of a base, the first one radian."""
    angles = np.abs(step)
    return abs(float(angles[0]) - 1) < _SAME_FREQUENCIES and bool(_find_bases(*[np.tile(angles, 2)] * 2))


def _as_complex(values: Values, layout: tuple[slice, slice]) -> Values:
    """Pairs of channels as complex numbers."""
    real, imaginary = layout
    return np.asarray(values[..., real] + 1j * values[..., imaginary])


def _rotate(values: Values, layout: tuple[slice, slice], turn: Values) -> Values:
    """Multiply pairs of channels, as complex numbers, by others, (position, frequency)."""
    turned = _as_complex(values, layout) * turn
    rotated = np.empty_like(values)
    rotated[..., layout[0]], rotated[..., layout[1]] = turned.real, turned.imag
    return rotated


def _fit_even_angles(turn: Values) -> tuple[Values, Values]:
    """Fit angles that grow evenly with the position, weighted by their size.

    Args:
        turn: Complex numbers (position, frequency), whose angles these are.

    Returns:
        Start and step of each frequency, radians; a step of nearly nothing is a shift of all positions.
    """
    at = np.arange(len(turn))[:, None]
    step = np.angle((turn[1:] * turn[:-1].conj()).sum(axis=0))
    start = np.zeros_like(step)
    weight = np.abs(turn)
    total = np.maximum(weight.sum(axis=0), 1e-300)
    for _ in range(_NEWTON_STEPS):
        still = turn * np.exp(-1j * (start + step * at))
        start = start + np.angle(still.sum(axis=0))
        rest = np.angle(turn * np.exp(-1j * (start + step * at)))
        middle = (weight * at).sum(axis=0) / total
        spread = np.maximum((weight * (at - middle) ** 2).sum(axis=0), 1e-300)
        step = step + (weight * (at - middle) * rest).sum(axis=0) / spread
    return start, step
