"""Rotary embeddings: other frequencies in sines and cosines, other angles in what is rotated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.scoring import Hypothesis, Values


def rotations(exhibit: PairContext) -> Iterator[Hypothesis]:
    """All of them."""
    r = exhibit.r
    if not exhibit.is_same_shape or r.ndim < 2 or r.shape[-1] < 4 or r.shape[-1] % 2 or r.shape[-2] < 4:
        return
    yield from _frequencies(exhibit)
    yield from _angles(exhibit)


def _frequencies(exhibit: PairContext) -> Iterator[Hypothesis]:
    """Cosines or sines of position times frequency, with frequencies of their own on either side."""
    r, t = exhibit.r, exhibit.t
    if max(np.abs(r).max(), np.abs(t).max()) > 4:
        return
    count = r.shape[-2]
    for name, function in (("cosine", np.cos), ("sine", np.sin)):
        reference, target = (_fit(side.reshape(-1, *side.shape[-2:])[0], name) for side in (r, t))
        if reference is None or target is None:
            continue
        (ours, usual), (theirs, scale) = reference, target
        positions = np.arange(count)[:, None]
        wanted = function(positions * ours) * usual
        if np.abs(wanted - r).max() > 0.05:
            continue
        predicted = np.broadcast_to(scale * function(positions * theirs), t.shape)
        facts = _base(ours, theirs)
        known = f": base {facts['target_base']:.4g} for {facts['reference_base']:.4g}" if facts else ""
        text = f"the {name}s of the target are of other frequencies{known}"
        hint = "Rotary positions with another base (theta), or the scaling of positions is absent or another."
        width = len(np.unique(np.round(theirs, 12))) + 1
        yield Hypothesis("rotary-frequencies", text, t, predicted, r, width, 0, hint, facts)


def _fit(rows: Values, name: str) -> tuple[Values, float] | None:
    """Frequencies of rows that begin at position 0, refined along the positions; and their scale."""
    scale = float(rows[0].mean()) if name == "cosine" else 1.0
    if scale <= 0 or np.abs(rows[0] - (scale if name == "cosine" else 0.0)).max() > 0.01 * scale:
        return None
    function, slope = (np.cos, np.sin) if name == "cosine" else (np.sin, np.cos)
    sign = -1.0 if name == "cosine" else 1.0
    values = np.clip(rows / scale, -1, 1)
    far = (
        values < 0.7 if name == "cosine" else values > 0.7
    )  # an angle that can be read off, in the first turn
    first = np.where(far.any(axis=0), far.argmax(axis=0), len(rows) - 1)
    there = np.take_along_axis(values, first[None], axis=0)[0]
    found = (np.arccos(there) if name == "cosine" else np.arcsin(there)) / first
    stop = 2
    while stop < len(rows):  # twice as far each time, so that the angle never leaves its turn
        stop = min(len(rows), 2 * stop)
        at = np.arange(stop)[:, None]
        for _ in range(3):
            left = values[:stop] - function(at * found)
            tilt = sign * at * slope(at * found)
            step = (left * tilt).sum(axis=0) / np.maximum((tilt * tilt).sum(axis=0), 1e-12)
            found = found + np.where(stop > first, step, 0.0)
    return found, scale


def _base(ours: Values, theirs: Values) -> dict[str, Any]:
    """The bases that frequencies are powers of, where they are."""
    bases = []
    for frequencies in (ours, theirs):
        half = frequencies[: len(frequencies) // 2]
        if not (half > 0).all() or len(half) < 2:
            return {}
        steps = -np.diff(np.log(half)) * len(half)
        if np.ptp(steps) > 0.02 * abs(float(steps.mean())):
            return {}
        bases.append(math.exp(min(700.0, float(steps.mean()))))
    return {"reference_base": bases[0], "target_base": bases[1]}


def _angles(exhibit: PairContext) -> Iterator[Hypothesis]:
    """The same values rotated by other angles, one for each position and frequency, in all heads."""
    r, t = exhibit.r, exhibit.t
    width = r.shape[-1]
    head_dim = exhibit.head_dim
    if r.ndim == 4:
        axis = next((a for a in (1, 2) if exhibit.axis(a) == "head"), 1)
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
    for name, (real, imaginary) in layouts.items():
        yield from _steady(ours, theirs, name, real, imaginary)
        z = ours[..., real] + 1j * ours[..., imaginary]
        w = theirs[..., real] + 1j * theirs[..., imaginary]
        turn = (w * z.conj()).sum(axis=(0, 1))
        size = np.abs(turn)
        turn = np.divide(turn, size, out=np.ones_like(turn), where=size > 0)
        turned = z * turn
        predicted = np.empty_like(ours)
        predicted[..., real], predicted[..., imaginary] = turned.real, turned.imag
        text = f"every head is rotated by other angles, in {name}: one for each position and frequency"
        hint = "Rotary positions: base or scaling of frequencies, positions off by some, or not applied."
        facts = {"layout": name}
        yield Hypothesis("rotary-angles", text, theirs, predicted, ours, turn.size, math.log(2), hint, facts)


def _steady(ours: Values, theirs: Values, name: str, real: slice, imaginary: slice) -> Iterator[Hypothesis]:
    """Angles that grow evenly with the position: other frequencies, or positions off by a number."""
    z = ours[..., real] + 1j * ours[..., imaginary]
    turn = ((theirs[..., real] + 1j * theirs[..., imaginary]) * z.conj()).sum(axis=(0, 1))
    at = np.arange(len(turn))[:, None]
    step = np.angle((turn[1:] * turn[:-1].conj()).sum(axis=0))
    start = np.zeros_like(step)
    weight = np.abs(turn)
    total = np.maximum(weight.sum(axis=0), 1e-300)
    for _ in range(3):
        still = turn * np.exp(-1j * (start + step * at))
        start = start + np.angle(still.sum(axis=0))
        left = np.angle(turn * np.exp(-1j * (start + step * at)))
        middle = (weight * at).sum(axis=0) / total
        spread = np.maximum((weight * (at - middle) ** 2).sum(axis=0), 1e-300)
        step = step + (weight * (at - middle) * left).sum(axis=0) / spread
    turned = z * np.exp(1j * (start + step * at))
    predicted = np.empty_like(ours)
    predicted[..., real], predicted[..., imaginary] = turned.real, turned.imag
    is_shift = bool(np.abs(step).max() < 1e-3)
    text = (
        f"every head is rotated, in {name}, by angles that {'stay' if is_shift else 'grow'} with the position"
    )
    hint = (
        "Positions are off by a number: another start, padding, or a cache."
        if is_shift
        else "Rotary positions with another base (theta), or the scaling of positions is absent or another."
    )
    kind = "rotary-shift" if is_shift else "rotary-frequencies"
    facts = {"layout": name, "per_position": step.tolist(), "at_start": start.tolist()}
    yield Hypothesis(kind, text, theirs, predicted, ours, 2 * len(step), math.log(2), hint, facts)
