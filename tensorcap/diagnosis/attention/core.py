"""Attention cores: the result of queries, keys and values under a mask, a scale, a rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from tensorcap.diagnosis.attention.rotary import move, turn_pairs
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
        rotation: `halves`, `pairs`, `turned` (the sine with its sign turned), `q alone`, `k alone`, `values
            too` or `none`.
        is_causal: Whether a token sees none behind it.
        window: How many tokens a token sees, itself included; 0 for all.
        softcap: Of the scores, 0 for none.
        is_capped_first: Whether they are capped before they are scaled.
        key_heads: The head of keys that each head looks at; empty if each is repeated for its neighbours.
        value_heads: The head of values, likewise.
        ahead: How many tokens behind it a causal token sees nevertheless.
        mask: The part of the mask that counts: `whole`, `padding` (keys that no token sees), or `none`.
        has_bias: Whether the bias of positions is added to the scores.
        has_sinks: Whether the sinks take part in the softmax.
        table: The name of the angles in `Parts.tables`; "" for its own.
        positions: How many positions queries are rotated ahead of what their angles say.
        first_channel: The first channel of a head that is rotated.
        key_tokens: How many tokens keys stand behind where they have to, after the rotation.
    """

    scale: float
    rotation: str
    is_causal: bool = True
    window: int = 0
    softcap: float = 0.0
    key_heads: tuple[int, ...] = ()
    value_heads: tuple[int, ...] = ()
    ahead: int = 0
    mask: Mask = "none"
    has_bias: bool = True
    has_sinks: bool = True
    table: str = ""
    positions: int = 0
    first_channel: int = 0
    key_tokens: int = 0
    is_capped_first: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors that an attention computes with.

    Attributes:
        q: Queries, (batch, head, token, channel).
        k: Keys, those of earlier steps first.
        v: Values, as keys.
        angles: cos + i sin by batch, token and pair of channels, of as many tokens as keys; queries are the
            last of them. Their size is 1, or the scale of stretched positions.
        mask: Which keys are visible to each query, (batch, 1, query, key); None if there is no mask.
        bias: Added to the scores, (batch, head, query, key).
        sinks: The score of a sink for each head.
        tables: Other angles, by what they are.
        others: What other layers see, as `mask`, and their angles, None if these are the own ones; by the
            sites that have both.
        gains: Factors of `q` and `k` after the rotation, in their shapes.
        bare: `q` and `k` as they were before their norm.
        added: Biases of the projections of `q`, `k` and `v`, by name, in shapes that fit these.
        layout: How they lie in a result that has all three, a key of `readings.LAYOUTS`; "" if in none.
        gives_shares: Whether the result is what each query takes of each key, (batch, token, head, key).
    """

    q: Values
    k: Values
    v: Values
    angles: Values | None
    mask: Values | None = None
    bias: Values | None = None
    sinks: Values | None = None
    tables: Mapping[str, Values] = field(default_factory=dict)
    others: Mapping[tuple[str, ...], tuple[Values, Values | None]] = field(default_factory=dict)
    gains: Mapping[str, Values] = field(default_factory=dict)
    bare: Mapping[str, Values] = field(default_factory=dict)
    added: Mapping[str, Values] = field(default_factory=dict)
    layout: str = ""
    gives_shares: bool = False

    def __call__(self, core: Core, heads: Values, queries: Values | None = None) -> Values:
        """Compute the result of some heads, (batch, token, head, channel), of all queries or some of them."""
        if queries is None:
            queries = np.arange(self.q.shape[2])
        scores = self._scores(core, heads, queries)
        if self.sinks is not None and core.has_sinks:
            sinks = np.broadcast_to(self.sinks[heads][None, :, None, None], (*scores.shape[:-1], 1))
            shares = softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
        else:
            shares = softmax(scores)
        if self.gives_shares:
            return np.asarray(shares.transpose(0, 2, 1, 3))
        v = self.v[:, self._heads_of(core.value_heads, self.v, heads)]
        if core.rotation == "values too":
            v = self._rotated(v, core)
        return np.asarray((shares @ v).transpose(0, 2, 1, 3))

    def fit_sinks(self, core: Core, heads: Values, result: Values, rows: Values) -> Values:
        """Fit sinks that make a result of that of a core without: one for each head, -inf for other heads.

        A sink multiplies the result of a token by 1 / (1 + exp(sink - s)), s being the logarithm of the sum
        of the exponentials of its scores.
        """
        scores = self._scores(core, heads, np.arange(self.q.shape[2]))
        top = scores.max(axis=-1)
        total = (top + np.log(np.exp(scores - top[..., None]).sum(axis=-1))).transpose(0, 2, 1)[rows]
        plain = self(replace(core, has_sinks=False), heads)[rows]
        size = np.maximum((plain * plain).sum(axis=-1), 1e-300)
        share = np.clip((result * plain).sum(axis=-1) / size, _FAINT, 1 - _FAINT)
        sinks = np.full(self.q.shape[1], -np.inf)
        sinks[heads] = np.median(total + np.log(1 / share - 1), axis=0)
        return sinks

    def weigh_values(self, core: Core, heads: Values, queries: Values) -> tuple[Values, Values]:
        """Compute what each key weighs if all are visible, (batch, head, query, key), and the values.

        Weights are not divided by their sum; the largest that is visible is 1.
        """
        visible = self.visible_keys(core, queries)
        scores = self._scores(core, heads, queries, is_masked=False)
        top = np.where(visible, scores, _NONE).max(axis=-1, keepdims=True)
        return np.exp(np.minimum(scores - top, 50.0)), self.v[
            :, self._heads_of(core.value_heads, self.v, heads)
        ]

    def of_batches(self, batches: Values) -> Parts:
        """Keep some of the sequences."""
        if len(batches) == len(self.q):
            return self

        def kept(values: Values | None) -> Values | None:
            return values if values is None or len(values) != len(self.q) else values[batches]

        return replace(
            self,
            q=self.q[batches],
            k=self.k[batches],
            v=self.v[batches],
            angles=kept(self.angles),
            mask=kept(self.mask),
            bias=kept(self.bias),
            tables={name: table[batches] for name, table in self.tables.items()},
            others={},
            gains={name: gain[batches] for name, gain in self.gains.items()},
            bare={name: bare[batches] for name, bare in self.bare.items()},
        )

    def visible_keys(self, core: Core, queries: Values | None = None) -> Values:
        """Which keys each query sees, (batch or 1, 1, query, key)."""
        behind = self.distances if queries is None else self.distances[queries]
        visible = behind >= -core.ahead if core.is_causal else np.ones(behind.shape, np.bool_)
        if core.window:
            visible = visible & (behind < core.window)
        visible = visible[None, None]
        if self.mask is not None and core.mask != "none":
            whole = self.mask if queries is None else self.mask[:, :, queries]
            visible = visible & (whole if core.mask == "whole" else self.mask.any(axis=-2, keepdims=True))
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

    def _heads_of(self, chosen: tuple[int, ...], tensor: Values, heads: Values) -> Values:
        """Which head of keys, or of values, each head looks at."""
        if chosen:
            return np.asarray(chosen)[heads]
        return np.asarray(heads // (self.q.shape[1] // tensor.shape[1]))

    def _scores(self, core: Core, heads: Values, queries: Values, *, is_masked: bool = True) -> Values:
        """The scores of some heads, (batch, head, query, key)."""
        q = self.q[:, heads][:, :, queries]
        if core.rotation != "k alone":
            q = self._rotated(q, core, queries)
        if "q" in self.gains:
            q = q * self.gains["q"][:, heads][:, :, queries]
        of_keys, each = np.unique(self._heads_of(core.key_heads, self.k, heads), return_inverse=True)
        k = self.k[:, of_keys]
        if core.rotation != "q alone":
            k = self._rotated(k, core)
        if "k" in self.gains:
            k = k * self.gains["k"][:, of_keys]
        k = np.roll(k, core.key_tokens, 2) if core.key_tokens else k
        first, last = (1.0, core.scale) if core.is_capped_first else (core.scale, 1.0)
        scores = q @ np.swapaxes(k, -1, -2)[:, each] * first
        if core.softcap:
            scores = core.softcap * np.tanh(scores / core.softcap)
        scores = scores * last
        if self.bias is not None and core.has_bias:
            bias = self.bias if self.bias.shape[1] == 1 else self.bias[:, heads]
            scores = scores + bias[:, :, queries]
        return np.where(self.visible_keys(core, queries), scores, _NONE) if is_masked else scores

    def _rotated(self, x: Values, core: Core, queries: Values | None = None) -> Values:
        """Rotate keys, or some queries, which stand at the end of the angles."""
        angles = self.tables[core.table] if core.table else self.angles
        if core.rotation == "none" or angles is None:
            return x
        if queries is not None:
            angles = move(angles, core.positions) if core.positions else angles
            angles = angles[:, -self.q.shape[2] :][:, queries]
        angles = angles.conj() if core.rotation == "turned" else angles
        layout = "pairs" if core.rotation == "pairs" else "halves"
        return turn_pairs(x, angles[:, None], layout, core.first_channel)
