"""Recognise an attention: the core that makes the reference, and a sample by which variants are compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Core, Mask, Parts
from tensorcap.diagnosis.attention.parts import collect_sides
from tensorcap.diagnosis.attention.variants import Variant
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.hypothesis import LESSENED
from tensorcap.diagnosis.values import Values, evenly_spaced, relative_error
from tensorcap_formats.keys import module_of

_LARGEST: Final = 1 << 21  # scores that are worked out: of as many heads as that allows
_ALLOWED: Final = 1e-5  # what the order of sums may make of the reference in float32
_LIKELY: Final = 4  # cores that sinks are tried with
_FEW_HEADS: Final = 4  # by which cores and variants are compared
_FEW_QUERIES: Final = 16
_FEW_SEQUENCES: Final = 4
_HEAD_DIMS: Final = (
    "head_dim",
    "head_size",
    "key_value_proj_dim",
    "attention_head_size",
    "d_kv",
    "kv_channels",
)
_HEAD_COUNTS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class Attention:
    """An attention of which both sides are known.

    Attributes:
        usual: The core that makes the reference.
        ours: What the reference's computes with.
        theirs: What the target's does.
        reference: Its result, (batch, token, head, channel).
        target: That of the target.
        heads: Those that are worked out.
        rows: Queries that see something, (batch, token): the result of others is not defined.
    """

    usual: Core
    ours: Parts
    theirs: Parts
    reference: Values
    target: Values
    heads: Values
    rows: Values

    @property
    def is_of_reference(self) -> bool:
        """Whether nothing is known of what the target computes with, and the reference's stands for it."""
        return self.ours is self.theirs

    def compute(self, variant: Variant) -> Values:
        """Compute the result of the target if it is that variant, (row, head, channel)."""
        return np.asarray(variant.parts(variant.core, self.heads)[self.rows])


@dataclass(frozen=True)
class Sample:
    """A few sequences, queries and heads of an attention, by which variants are compared.

    Attributes:
        batches: The sequences.
        queries: The queries.
        heads: The heads.
        rows: Which of the queries see something.
        target: The target's result of these, (row, head, channel).
    """

    batches: Values
    queries: Values
    heads: Values
    rows: Values
    target: Values

    @classmethod
    def of(cls, attention: Attention) -> Sample:
        """Choose them evenly, and the query with the largest error: it may be the only wrong one."""
        batch, tokens = attention.rows.shape
        error = np.square(attention.target - attention.reference).sum((2, 3))
        worst_batch, worst_query = np.unravel_index(np.where(attention.rows, error, 0).argmax(), error.shape)
        batches = np.union1d(evenly_spaced(batch, _FEW_SEQUENCES), worst_batch)
        queries = np.union1d(evenly_spaced(tokens, _FEW_QUERIES), worst_query)
        heads = attention.heads[evenly_spaced(len(attention.heads), _FEW_HEADS)]
        rows = attention.rows[batches][:, queries]
        target = attention.target[batches][:, queries][:, :, heads][rows]
        return cls(batches, queries, heads, rows, target)

    def compute(self, variant: Variant) -> Values:
        """Compute the result of a variant, (row, head, channel)."""
        parts = variant.parts.of_batches(self.batches)
        return np.asarray(parts(variant.core, self.heads, self.queries)[self.rows])

    def error(self, variant: Variant) -> float:
        """The relative error that a variant leaves of the target."""
        error = relative_error(self.target, self.compute(variant))
        return error if math.isfinite(error) else math.inf


def recognise(context: PairContext) -> Attention | None:
    """Find the core that makes the reference, of what is recorded; None if nothing does.

    The reference is the core's result, (batch, token, channel), or what each query takes of each key,
    (batch, head, query, key).
    """
    r, t = context.r, context.t
    if not context.is_same_shape or r.ndim not in (3, 4) or context.window is not None:
        return None
    gives_shares = r.ndim == 4
    for dims in _list_head_dims(context):
        count = r.shape[1] if gives_shares else r.shape[-1] // dims
        tokens = r.shape[2] if gives_shares else r.shape[1]
        for ours, theirs in collect_sides(*context.sides, (r.shape[0], tokens, count, dims)):
            queries, keys = ours.q.shape[2], ours.k.shape[2]
            if ours.q.shape != (r.shape[0], count, tokens, dims):
                continue  # keys or values of a cross attention, which are as many as the encoder's tokens
            most_heads = _LARGEST // (r.shape[0] * queries * keys)
            if keys < 2 or not most_heads or (gives_shares and r.shape[3] != keys):
                continue
            heads = np.unique(evenly_spaced(count, most_heads))
            if gives_shares:
                reference, target = (side.transpose(0, 2, 1, 3) for side in (r, t))
            else:
                reference, target = (side.reshape(*r.shape[:2], count, dims) for side in (r, t))
            rows = np.ones((len(r), queries), np.bool_)
            rows = rows if ours.mask is None else np.asarray(ours.mask[:, 0].any(axis=-1))
            if context.uncounted is not None and not gives_shares:
                counted = ~context.uncounted.all(axis=-1)
                rows = rows & counted if (rows & counted).any() else rows
            is_one = ours is theirs
            ours = replace(ours, gives_shares=gives_shares)
            theirs = ours if is_one else replace(theirs, gives_shares=gives_shares)
            known = Attention(Core(1.0, "none"), ours, theirs, reference, target, heads, rows)
            attention = _find_core(context, known)
            if attention is not None:
                return attention
    return None


def _list_head_dims(context: PairContext) -> list[int]:
    """List how many channels a head may have: by settings of the attention, and by the configuration."""
    shape = context.r.shape
    width = shape[-1]
    site = module_of(context.reference.key.site)
    sizes: list[float | None] = []
    for path in (site.rpartition(".")[0], site):
        module = context.reference_archive.info.modules.get(path)
        settings = {} if module is None else module.settings
        sizes += [settings.get(name) for name in _HEAD_DIMS]
        counts = [settings.get(name) for name in _HEAD_COUNTS]
        sizes += [
            width // count for count in counts if isinstance(count, int) and count > 0 and len(shape) == 3
        ]
    sizes += [context.head_dim, context.config_number(*_HEAD_DIMS)]
    whole = [int(size) for size in sizes if isinstance(size, int | float) and size >= 1]
    return list(dict.fromkeys(size for size in whole if len(shape) == 4 or width % size == 0))


def _find_core(context: PairContext, known: Attention) -> Attention | None:
    """Find the core that makes the reference, and sinks if they have to be fitted; None if there is none.

    1. Usual cores are sorted by the error that each leaves of a few heads, by the reference's parts or the
       target's: under replay the reference's core was given those.
    2. The best one is taken if it leaves no more than is allowed of all heads.
    3. Otherwise, if no sinks are known, they are fitted to the likeliest cores.
    """
    ours, theirs, rows, heads = known.ours, known.theirs, known.rows, known.heads
    allowed = context.tolerance(4 * LESSENED, _ALLOWED)
    sides = (ours,) if ours is theirs else (ours, theirs)
    reference = known.reference[:, :, heads][rows]
    sample = Sample.of(replace(known, target=known.reference))

    def error(core: Core, sides: Sequence[Parts]) -> float:
        return min(relative_error(reference, parts(core, heads)[rows]) for parts in sides)

    cores = sorted(
        _list_usual_cores(context, ours),
        key=lambda core: min(sample.error(Variant("", "", parts, core)) for parts in sides),
    )
    if error(cores[0], sides) <= allowed:
        return replace(known, usual=cores[0])
    if ours.sinks is None:
        for core, parts in itertools.product(cores[:_LIKELY], sides):
            sinks = parts.fit_sinks(core, heads, reference, rows)
            with_sinks = [replace(side, sinks=sinks) for side in sides]
            if error(core, with_sinks) <= allowed:
                return replace(known, usual=core, ours=with_sinks[0], theirs=with_sinks[-1])
    return None


def _list_usual_cores(context: PairContext, parts: Parts) -> Iterator[Core]:
    """Cores that the configuration says, and common ones."""
    scales = [parts.q.shape[3] ** -0.5, 1.0]
    if scalar := context.config_number("query_pre_attn_scalar"):
        scales.append(scalar**-0.5)
    if multiplier := context.config_number("attention_multiplier"):
        scales.append(multiplier)
    caps = dict.fromkeys((0.0, context.config_number("attn_logit_softcapping") or 0.0))
    for scale in dict.fromkeys(scales):
        for rotation in ("halves", "pairs", "none") if parts.angles is not None else ("none",):
            for cap in caps:
                for mask, is_causal, window in _list_extents(context, parts):
                    yield Core(scale, rotation, is_causal, window, cap, mask=mask)


def _list_extents(context: PairContext, parts: Parts) -> list[tuple[Mask, bool, int]]:
    """List what may be visible: what the mask says, or usual extents if it only says what is padded.

    Windows of the configuration also cut off what a causal mask shows, where the attention does that itself.
    """
    extent = parts.analyse_mask()
    mask: Mask = "none" if extent is None else "padding"
    windows = list(dict.fromkeys((0, *_list_windows(context))))
    usual = [(mask, is_causal, window) for is_causal in (True, False) for window in windows]
    if extent in (None, ("padding", False, 0)):
        return usual
    return [(mask, True, window) for window in windows] if extent == ("padding", True, 0) else [extent]


def _list_windows(context: PairContext) -> Iterator[int]:
    """Yield the lengths of windows that the configuration names."""
    for name, value in context.config.items():
        if "window" in name and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value
