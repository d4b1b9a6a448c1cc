"""Attention cores: the result of queries, keys and values under a mask, a scale, a rotation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from tensorcap.diagnosis.routers import softmax
from tensorcap.diagnosis.values import Values

Mask = Literal["whole", "padding", "none"]

_NONE: Final = -1e30  # a score that is not visible; of a token that sees nothing all are equal
_FAINT: Final = 1e-6  # shares of a sink that are not told apart from none, or from all


@dataclass(frozen=True, slots=True)
class Core:
    """One kind of attention core.

    Attributes:
        scale: Of the scores.
        rotation: `halves`, `pairs`, `turned` (the sine with its sign turned), `q alone`, `k alone` or `none`.
        is_causal: Whether a token sees none behind it.
        window: How many tokens a token sees, itself included; 0 for all.
        softcap: Of the scores, 0 for none.
        is_tiled: Whether heads of keys are repeated all in turn.
        ahead: How many tokens behind it a causal token sees nevertheless.
        mask: The part of the mask that counts: `whole`, `padding` (keys that no token sees), or `none`.
        has_bias: Whether the bias of positions is added to the scores.
        has_sinks: Whether the sinks take part in the softmax.
    """

    scale: float
    rotation: str
    is_causal: bool = True
    window: int = 0
    softcap: float = 0.0
    is_tiled: bool = False
    ahead: int = 0
    mask: Mask = "none"
    has_bias: bool = True
    has_sinks: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors that an attention computes with.

    Attributes:
        q: Queries, (batch, head, token, channel).
        k: Keys, those of earlier steps first.
        v: Values, as keys.
        cos: Cosines by batch, token and channel, of as many tokens as keys; queries are the last of them.
        sin: Sines.
        mask: Which keys are visible to each query, (batch, 1, query, key); None if there is no mask.
        bias: Added to the scores, (batch, head, query, key).
        sinks: The score of a sink for each head.
    """

    q: Values
    k: Values
    v: Values
    cos: Values | None
    sin: Values | None
    mask: Values | None = None
    bias: Values | None = None
    sinks: Values | None = None

    def __call__(self, core: Core, heads: Values) -> Values:
        """Compute the result of some heads, (batch, token, head, channel)."""
        scores = self._scores(core, heads)
        if self.sinks is not None and core.has_sinks:
            sinks = np.broadcast_to(self.sinks[heads][None, :, None, None], (*scores.shape[:-1], 1))
            shares = softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
        else:
            shares = softmax(scores)
        return np.asarray((shares @ self.v[:, self._keys(core, heads)]).transpose(0, 2, 1, 3))

    def fit_sinks(self, core: Core, heads: Values, result: Values, rows: Values) -> Values:
        """Fit sinks that make a result of that of a core without: one for each head, -inf for other heads.

        A sink multiplies the result of a token by 1 / (1 + exp(sink - s)), s being the logarithm of the sum
        of the exponentials of its scores.
        """
        scores = self._scores(core, heads)
        top = scores.max(axis=-1)
        total = (top + np.log(np.exp(scores - top[..., None]).sum(axis=-1))).transpose(0, 2, 1)[rows]
        plain = self(replace(core, has_sinks=False), heads)[rows]
        size = np.maximum((plain * plain).sum(axis=-1), 1e-300)
        share = np.clip((result * plain).sum(axis=-1) / size, _FAINT, 1 - _FAINT)
        sinks = np.full(self.q.shape[1], -np.inf)
        sinks[heads] = np.median(total + np.log(1 / share - 1), axis=0)
        return sinks

    def _keys(self, core: Core, heads: Values) -> Values:
        """Which head of keys each head looks at."""
        count = self.k.shape[1]
        return np.asarray(heads % count if core.is_tiled else heads // (self.q.shape[1] // count))

    def _scores(self, core: Core, heads: Values) -> Values:
        """The scores of some heads, (batch, head, query, key)."""
        q = self._rotated(self.q[:, heads], core.rotation if core.rotation != "k alone" else "none")
        k = self.k[:, self._keys(core, heads)]
        k = self._rotated(k, core.rotation if core.rotation != "q alone" else "none")
        scores = q @ np.swapaxes(k, -1, -2) * core.scale
        if core.softcap:
            scores = core.softcap * np.tanh(scores / core.softcap)
        if self.bias is not None and core.has_bias:
            scores = scores + (self.bias if self.bias.shape[1] == 1 else self.bias[:, heads])
        return np.where(self.visible_keys(core), scores, _NONE)

    def visible_keys(self, core: Core) -> Values:
        """Which keys each query sees, (batch or 1, 1, query, key)."""
        behind = self.distances
        visible = behind >= -core.ahead if core.is_causal else np.ones(behind.shape, np.bool_)
        if core.window:
            visible = visible & (behind < core.window)
        visible = visible[None, None]
        if self.mask is not None and core.mask != "none":
            visible = visible & (self.mask if core.mask == "whole" else self.mask.any(axis=-2, keepdims=True))
        return np.asarray(visible)

    @property
    def distances(self) -> Values:
        """How far each key stands before each query."""
        queries, keys = self.q.shape[2], self.k.shape[2]
        return np.asarray(np.arange(keys - queries, keys)[:, None] - np.arange(keys)[None])

    def analyse_mask(self) -> tuple[Mask, bool, int] | None:
        """Describe the mask: padding or more, whether it is causal, and its window; None if there is none."""
        if self.mask is None:
            return None
        shown = np.where(self.mask, self.distances, 0)
        is_causal = bool(shown.min() >= 0)
        for window in (0, int(shown.max()) + 1):
            core = Core(1.0, "none", is_causal, window, mask="padding")
            if np.array_equal(np.broadcast_to(self.visible_keys(core), self.mask.shape), self.mask):
                return "padding", is_causal, window
        return "whole", False, 0

    def _rotated(self, x: Values, rotation: str) -> Values:
        if rotation == "none" or self.cos is None or self.sin is None:
            return x
        half, tokens = self.cos.shape[-1] // 2, x.shape[2]
        cos, sin = (side[:, None, -tokens:, :half] for side in (self.cos, self.sin))
        if 2 * half < x.shape[-1] and self.is_half_wide:
            half, cos, sin = 2 * half, *(side[:, None, -tokens:] for side in (self.cos, self.sin))
        sin = -sin if rotation == "turned" else sin
        y, rest = x[..., : 2 * half], x[..., 2 * half :]
        out = np.empty_like(y)
        first, second = slice(half), slice(half, None)
        if rotation == "pairs":
            first, second = slice(0, None, 2), slice(1, None, 2)
        out[..., first] = y[..., first] * cos - y[..., second] * sin
        out[..., second] = y[..., second] * cos + y[..., first] * sin
        return np.concatenate([out, rest], axis=-1)

    @property
    def is_half_wide(self) -> bool:
        """Whether cosines are of each frequency once, and not of both halves of the channels."""
        cos = self.cos
        if cos is None:
            return False
        half = cos.shape[-1] // 2
        return 2 * cos.shape[-1] == self.q.shape[-1] and not np.array_equal(cos[..., :half], cos[..., half:])
