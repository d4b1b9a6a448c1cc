"""What an attention makes of its queries, keys and values: the formula that makes a run's own result.

softmax(scale Q K^T + mask) V, with Q and K rotated by tables of cosines and sines, if the module was given
some, and heads of keys and values repeated for their neighbours (Vaswani 2017, Su 2021, Ainslie 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from tensorcap_formats.dtypes import Array

_LARGEST: Final = 1 << 22  # scores that are computed at once
_QUERIES: Final = 256  # of which they are computed, at most
_FEW: Final = (2, 16)  # heads and queries by which formulas are told apart
_UNSEEN: Final = -1e30
_HIDDEN: Final = -1e4  # what a mask adds where nothing is seen, or less
_SIZES: Final = (8, 256)  # channels of a head, at least and at most, if no setting says them
_ROUND: Final = 1e-2  # by which squares of a cosine and a sine may be off 1

Rotation = Literal["none", "halves", "pairs"]
Mask = Literal["given", "causal", "none"]


@dataclass(frozen=True, slots=True)
class AttentionValues:
    """What a call of an attention computes with, float64.

    Attributes:
        sources: Queries, keys and values in the order of the run, `[batch, token, channel]` or by heads.
        tables: Cosines and sines, `[batch or 1, token, channel]`; empty if it was given none.
        mask: Added to the scores, `[batch or 1, head or 1, query or 1, key]`; None if it was given none.
    """

    sources: Sequence[Array]
    tables: Sequence[Array]
    mask: Array | None


@dataclass(frozen=True, slots=True)
class AttentionFormula:
    """One way to compute an attention.

    Attributes:
        order: Places of queries, keys and values among the sources.
        channels: Of a head.
        scale: Of the scores.
        rotation: Which channels are rotated together: those of both halves, neighbours, or none.
        mask: What each query sees.
    """

    order: tuple[int, int, int]
    channels: int
    scale: float
    rotation: Rotation
    mask: Mask

    def __call__(self, values: AttentionValues, heads: Array, queries: Array) -> Array | None:
        """Compute some heads and queries, `[batch, query, head, channel]`; None if shapes do not fit."""
        if len(values.sources) != len(self.order):
            return None
        tokens = max(side.shape[1] for side in values.sources)
        split = [_by_heads(values.sources[place], self.channels, tokens) for place in self.order]
        if any(side is None for side in split):
            return None
        q, k, v = (side for side in split if side is not None)
        if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[2] % k.shape[2]:
            return None
        count = q.shape[2]
        shared = heads // (count // k.shape[2])
        q, k, v = q[:, :, heads], k[:, :, shared], v[:, :, shared]
        if self.rotation != "none":
            q, k = (_rotated(side, values.tables, self.rotation) for side in (q, k))
        scores = np.einsum("bqhd,bkhd->bhqk", q[:, queries], k) * self.scale
        if self.mask == "causal":
            scores = np.where(np.arange(tokens) <= queries[:, None], scores, _UNSEEN)
        elif self.mask == "given" and values.mask is not None:
            if values.mask.shape[1] not in (1, count):
                return None
            mask = values.mask if values.mask.shape[1] == 1 else values.mask[:, heads]
            scores = scores + np.maximum(mask[:, :, queries] if mask.shape[2] > 1 else mask, _UNSEEN)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        made: Array = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(axis=-1, keepdims=True), v)
        return made


def heads_of(result: Array, channels: int) -> Array:
    """Split the last axis of a result into heads, `[batch, token, head, channel]`."""
    return result.reshape(*result.shape[:2], -1, channels)


def find_attention_formula(
    values: AttentionValues,
    result: Array,
    settings: Mapping[str, Any],
    allowed: float,
    likely: Sequence[AttentionFormula] = (),
) -> AttentionFormula | None:
    """Find the formula that makes a result.

    Args:
        values: What it is made of.
        result: `[batch, token, channel]`, of all heads.
        settings: The module's, which say how many channels a head has and what the scale is.
        allowed: Relative error of the result that a formula may leave.
        likely: Formulas that are tried first, as that of the layer before.
    """
    for formula in itertools.chain(likely, _formulas(values, result.shape[-1], settings)):
        count = result.shape[-1] // formula.channels
        heads, queries = (
            evenly_spaced(n, few) for n, few in zip((count, result.shape[1]), _FEW, strict=True)
        )
        if result.shape[-1] % formula.channels or not count:
            continue
        made = formula(values, heads, queries)
        if made is None:
            continue
        wanted = heads_of(result, formula.channels)[:, queries][:, :, heads]
        if np.linalg.norm(made - wanted) <= allowed * np.linalg.norm(wanted):
            return formula
    return None


def choose_part(result: Array, channels: int) -> tuple[Array, Array]:
    """Choose heads and queries of a result, as many as may be computed at once."""
    batch, tokens = result.shape[:2]
    queries = evenly_spaced(tokens, _QUERIES)
    most = max(1, _LARGEST // max(1, batch * queries.size * tokens))
    return evenly_spaced(result.shape[-1] // channels, most), queries


def sees_something(mask: Array, queries: Array) -> Array:
    """Which of some queries see something by a mask, `[batch or 1, query]`."""
    rows = mask[:, :, queries] if mask.shape[2] > 1 else mask
    return np.asarray((rows > _HIDDEN).any(axis=(1, 3)))


def split_sources(sources: Sequence[Array], width: int) -> Sequence[Array]:
    """Split the result of one projection into queries, as wide as the result, keys and values."""
    if len(sources) != 1 or sources[0].ndim != 3:
        return sources
    rest = sources[0].shape[-1] - width
    return (
        np.split(sources[0], (width, width + rest // 2), axis=-1) if rest > 0 and rest % 2 == 0 else sources
    )


def evenly_spaced(count: int, most: int) -> Array:
    """Choose places of `count`, as many as there are, or `most` at equal distances."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def are_tables(one: Array, other: Array) -> bool:
    """Whether two tensors are cosines and sines of the same angles."""
    return one.shape == other.shape and bool((np.abs(one**2 + other**2 - 1) < _ROUND).all())


def _formulas(values: AttentionValues, width: int, settings: Mapping[str, Any]) -> Iterator[AttentionFormula]:
    """Yield usual formulas, those that settings say first."""
    least, most = _SIZES
    numbers = [n for n in settings.values() if isinstance(n, int) and not isinstance(n, bool) and n > 0]
    told = [*numbers, *(width // n for n in numbers), *(table.shape[-1] for table in values.tables)]
    usual = range(most, least - 1, -1)
    scales = [n for name, n in settings.items() if "scal" in name and isinstance(n, float)]
    rotations: tuple[Rotation, ...] = ("halves", "pairs", "none") if values.tables else ("none",)
    masks: tuple[Mask, ...] = ("causal", "none") if values.mask is None else ("given",)
    for channels in dict.fromkeys(n for n in (*told, *usual) if n >= least and width % n == 0):
        for scale in dict.fromkeys((*scales, channels**-0.5, 1.0)):
            for rotation, mask, order in itertools.product(
                rotations, masks, itertools.permutations(range(3))
            ):
                yield AttentionFormula((order[0], order[1], order[2]), channels, scale, rotation, mask)


def _by_heads(values: Array, channels: int, tokens: int) -> Array | None:
    """Split a source into heads, `[batch, token, head, channel]`; None if it does not have such."""
    if values.ndim == 4:
        values = values if values.shape[1] == tokens else values.transpose(0, 2, 1, 3)
        return values if values.shape[-1] == channels else None
    return None if values.shape[-1] % channels else heads_of(values, channels)


def _rotated(x: Array, tables: Sequence[Array], rotation: Rotation) -> Array:
    """Turn pairs of channels by angles; channels beyond the tables' are left as they are."""
    cosines, sines = (table[:, :, None] for table in tables)
    count = min(cosines.shape[-1], x.shape[-1])
    turned, rest = x[..., :count], x[..., count:]
    across = np.empty_like(turned)
    if rotation == "halves":
        half = count // 2
        across[..., :half], across[..., half:] = -turned[..., half:], turned[..., :half]
    else:
        across[..., ::2], across[..., 1::2] = -turned[..., 1::2], turned[..., ::2]
    return np.concatenate([turned * cosines[..., :count] + across * sines[..., :count], rest], axis=-1)
