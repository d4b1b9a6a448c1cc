"""Angles of rotary embeddings: tables of cosines and sines read, moved, and made of other frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.values import Values
from tensorcap_formats.float_formats import rounded

_REMADE: Final = 2e-3  # absolute, by which angles may miss a table that is made of them again
_BASE_TOLERANCE: Final = 1e-3  # of the steps between logarithms of frequencies
_BASES: Final = (1e4, 1e5, 1e6, 5e5, 1.5e5, 1e7)
_FACTORS: Final = (2.0, 4.0, 8.0, 16.0, 32.0)  # by which positions are stretched linearly
_LIKELY_BASES: Final = (10.0, 1e9)
_LIKELY_FACTORS: Final = (1 / 64, 64.0)
_LOW: Final = ("bfloat16", "float16")
_PARTS: Final = (2, 4)  # of a head, the part of the channels that is rotated is one of


def read_angles(cosines: Values, sines: Values) -> Values:
    """Join cosines and sines, (batch, token, channel), to complex numbers, one for each pair of channels.

    A table that has each frequency twice, side by side or alternately, is read once.
    """
    angles = cosines + 1j * sines
    half = angles.shape[-1] // 2
    if half and angles.shape[-1] == 2 * half:
        if np.array_equal(angles[..., :half], angles[..., half:]):
            return np.asarray(angles[..., :half])
        if np.array_equal(angles[..., ::2], angles[..., 1::2]):
            return np.asarray(angles[..., ::2])
    return np.asarray(angles)


def turn_pairs(x: Values, angles: Values, layout: str, start: int = 0) -> Values:
    """Multiply pairs of channels, as complex numbers, by angles.

    Args:
        x: (batch, head, token, channel).
        angles: (batch, 1, token, pair).
        layout: `halves`: channel n and the one half of the rotated part behind it; `pairs`: neighbours.
        start: The first channel of the rotated part.
    """
    half = angles.shape[-1]
    if start + 2 * half > x.shape[-1]:
        return x
    first, second = slice(start, start + half), slice(start + half, start + 2 * half)
    if layout == "pairs":
        first, second = slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
    turned, cosines, sines = np.array(x), np.array(angles.real), np.array(angles.imag)
    turned[..., first] = x[..., first] * cosines - x[..., second] * sines
    turned[..., second] = x[..., second] * cosines + x[..., first] * sines
    return turned


def move(angles: Values, positions: int) -> Values:
    """Turn angles by a number of positions, by what the last token is ahead of the one before it."""
    return np.asarray(angles * np.exp(1j * positions * _steps(angles)))


def list_tables(angles: Values, channels: int) -> Iterator[tuple[str, Values, int]]:
    """List angles that a target may have instead: what they are, the angles, the first channel they rotate.

    1. Of a part of the channels, the first or the last one, with the first of the frequencies or every other.
    2. If the frequencies are powers of one base: of another base, of stretched positions, for all channels of
       a head of which a part is rotated, of frequencies that count all its channels, and computed in low
       precision.

    Args:
        angles: Of the reference, (batch, token, pair).
        channels: Of a head.
    """
    count = angles.shape[-1]
    if 2 * count < channels:
        yield f"the last {2 * count} of {channels} channels", angles, channels - 2 * count
    for part in _PARTS:
        if count % part:
            continue
        some = {
            "the first frequencies": angles[..., : count // part],
            "every other frequency": angles[..., ::part],
        }
        for which, table in some.items():
            width = 2 * table.shape[-1]
            yield f"the first {width} of {channels} channels, by {which}", table, 0
            yield f"the last {width} of {channels} channels, by {which}", table, channels - width
    made = _find_maker(angles)
    if made is None:
        return
    base, make = made
    if 2 * count < channels:
        yield f"all {channels} channels", make(base, 1.0, channels // 2), 0
    for other in _BASES:
        if abs(other / base - 1) > _BASE_TOLERANCE:
            yield f"angles of base {other:g} for {base:.6g}", make(other, 1.0, count), 0
    positions = _read_positions(angles, base)
    assert positions is not None
    size, own = float(np.abs(angles).mean()), base ** (-np.arange(count) / count)
    for dtype in _LOW:
        at, frequencies = rounded(positions, dtype)[..., None], rounded(own, dtype)
        for what, radians in (
            ("frequencies rounded to", positions[..., None] * frequencies),
            ("positions and frequencies in", at * frequencies),
            ("angles rounded to", rounded(positions[..., None] * own, dtype)),
            ("positions, frequencies and angles in", rounded(at * frequencies, dtype)),
        ):
            yield f"{what} {dtype}", np.asarray(size * np.exp(1j * radians)), 0
        table = rounded(angles.real, dtype) + 1j * rounded(angles.imag, dtype)
        yield f"cosines and sines rounded to {dtype}", np.asarray(table), 0
    for factor in _FACTORS:
        yield f"positions divided by {factor:g}", make(base, factor, count), 0
        yield f"positions times {factor:g}", make(base, 1 / factor, count), 0


def make_tables(angles: Values) -> Iterator[tuple[str, Callable[[float], Values], float, float]]:
    """List families of angles that a number makes: what they are, with {} for it, how, its least and largest.

    Args:
        angles: Of the reference, (batch, token, pair).
    """
    made = _find_maker(angles)
    if made is None:
        return
    base, make = made
    count = angles.shape[-1]
    yield f"angles of base {{}} for {base:.6g}", lambda number: make(number, 1.0, count), *_LIKELY_BASES
    yield "positions divided by {}", lambda number: make(base, number, count), *_LIKELY_FACTORS


def _find_maker(angles: Values) -> tuple[float, Callable[[float, float, int], Values]] | None:
    """Find the base of angles, and what makes others of a base, divisor of positions, and count of pairs."""
    base = _find_base(angles)
    positions = None if base is None else _read_positions(angles, base)
    if base is None or positions is None:
        return None
    size, at = float(np.abs(angles).mean()), positions[..., None]

    def make(base: float, divisor: float, pairs: int) -> Values:
        return np.asarray(size * np.exp(1j * at / divisor * base ** (-np.arange(pairs) / pairs)))

    return base, make


def _steps(angles: Values) -> Values:
    """Radians per position by batch and pair, (batch, 1, pair)."""
    return np.asarray(np.angle(angles[:, -1:] * angles[:, -2:-1].conj()))


def _find_base(angles: Values) -> float | None:
    """Find the number whose powers the frequencies are; None if they are not, or one token shows none."""
    if angles.shape[1] < 2:
        return None
    frequencies = _steps(angles)[0, 0]
    if len(frequencies) < 2 or not (frequencies > 0).all():
        return None
    logarithms = np.log(frequencies)
    step = float(logarithms[0] - logarithms[-1]) / (len(frequencies) - 1)
    even = -step * np.arange(len(frequencies))
    if step <= 0 or np.abs(logarithms - even).max() > _BASE_TOLERANCE * (1 + abs(float(even[-1]))):
        return None
    base = math.exp(min(step * len(frequencies), 700.0))
    return float(f"{base:.3g}") if abs(float(f"{base:.3g}") / base - 1) < _BASE_TOLERANCE else base


def _read_positions(angles: Values, base: float) -> Values | None:
    """Read the position of each token off the slowest angle; None if the other angles are not of it."""
    pairs = angles.shape[-1]
    frequencies = base ** (-np.arange(pairs) / pairs)
    positions = np.round(np.angle(angles[..., -1]) / frequencies[-1])
    remade = np.exp(1j * positions[..., None] * frequencies)
    is_remade = np.abs(remade - angles / np.abs(angles)).max() <= _REMADE if np.abs(angles).min() else False
    return positions if is_remade else None
