"""Collect queries, keys, values, angles and masks of an attention from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.diagnosis.attention.core import Parts
from tensorcap.diagnosis.context import values_of
from tensorcap.diagnosis.values import Values
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_NAMES: Final = {
    "q": ("q_norm", "q_proj", "query", "wq", "q_lin", "q"),
    "k": ("k_norm", "k_proj", "key", "wk", "k_lin", "k"),
    "v": ("v_norm", "v_proj", "value", "wv", "v_lin", "v"),
    "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv"),
}
_MASKS: Final = ("attention_mask", "mask", "attn_mask", "encoder_attention_mask")
_HIDDEN: Final = -1e4  # what is added to scores that are not visible is below
_CACHES: Final = ("cache", "past")


@dataclass(frozen=True, slots=True)
class _Site:
    """An attention module, and the record of its core's result.

    Attributes:
        archive: The archive.
        record: The result of the core.
        parent: The attention's site.
        shape: (batch, token, channel) of the core's result.
        count: How many heads it has.
        dims: Channels of a head.
    """

    archive: Archive
    record: Record
    parent: str
    shape: tuple[int, ...]
    count: int
    dims: int

    def records_of(self, step: int | None) -> list[Record]:
        """Records of a step up to the core's result."""
        key = self.record.key
        return [
            r
            for r in self.archive.records
            if (r.key.step, r.key.call, r.key.rank) == (step, key.call, key.rank)
            and r.stored
            and r.order <= self.record.order
        ]

    def arguments(self, records: Sequence[Record]) -> dict[str, Record]:
        """Arguments of the attention itself, by name."""
        return {
            r.key.slot.removeprefix("input."): r
            for r in records
            if r.key.site == self.parent and r.key.slot.startswith("input.")
        }

    def results(self, records: Sequence[Record]) -> dict[str, Record]:
        """Results of modules within it, by their names."""
        return {
            name: r
            for r in records
            for parent, _, name in [r.key.site.rpartition(".")]
            if parent == self.parent and r.key.slot == "output"
        }


def collect_parts(
    archive: Archive, record: Record, count: int, dims: int, shape: tuple[int, ...]
) -> Parts | None:
    """Collect the tensors that the attention of a core's result computed with; None if they are not recorded.

    Args:
        archive: Where it is recorded.
        record: The result of the core.
        count: How many heads it has.
        dims: Channels of a head.
        shape: Of the result, (batch, token, channel).
    """
    site = module_of(record.key.site)
    for parent in (site.rpartition(".")[0], site):
        parts = _collect(_Site(archive, record, parent, shape, count, dims))
        if parts is not None:
            return parts
    return None


def _collect(site: _Site) -> Parts | None:
    """Collect the parts of an attention module.

    1. Queries, keys and values are results of modules within, by their names, or parts of a fused one.
    2. If the attention was given a cache, keys, values and angles of the steps before come first.
    3. A mask of floats, and a bias with a mask added to it, are split into what is visible and what is added.
    """
    key = site.record.key
    records = site.records_of(key.step)
    arguments, results = site.arguments(records), site.results(records)
    own = _split_projections(site, results)
    if own is None:
        return None
    q, k, v = own
    angles = _read_angles(site, arguments)
    if q.shape[2] == k.shape[2] and any(word in name for name in arguments for word in _CACHES):
        for earlier in reversed(_earlier_steps(site)):
            before = site.records_of(earlier)
            past = _split_projections(site, site.results(before))
            if past is None:
                return None
            k, v = (np.concatenate(pair, axis=2) for pair in ((past[1], k), (past[2], v)))
            angles = _join(_read_angles(site, site.arguments(before)), angles)
    cos, sin = angles if angles is not None and angles[0].shape[1] == k.shape[2] else (None, None)
    scores = (q.shape[0], site.count, q.shape[2], k.shape[2])
    mask = next((arguments[name] for name in _MASKS if name in arguments), None)
    visible, added = _read_mask(site.archive, mask, scores)
    bias = _read_bias(site.archive, arguments, results, scores)
    if bias is not None and (bias <= _HIDDEN).any():  # a mask that was added to it
        shown = (bias > _HIDDEN).any(axis=1, keepdims=True)
        shown = np.broadcast_to(shown, (scores[0], *shown.shape[1:]))
        visible = shown if visible is None else np.asarray(visible & shown)
        bias = np.where(bias > _HIDDEN, bias, 0.0)
    bias = bias if added is None else added if bias is None else bias + added
    return Parts(q, k, v, cos, sin, visible, bias, _read_sinks(site))


def _earlier_steps(site: _Site) -> list[int]:
    key = site.record.key
    if key.step is None:
        return []
    within = [r.key.step for r in site.archive.records if r.key.site.rpartition(".")[0] == site.parent]
    steps = {step for step in within if step is not None}
    return sorted(step for step in steps if step < key.step)


def _split_projections(site: _Site, results: dict[str, Record]) -> tuple[Values, Values, Values] | None:
    """Queries, keys and values of one step."""
    count = site.count
    records = {
        slot: next((results[n] for n in names if n in results), None) for slot, names in _NAMES.items()
    }
    fused = records["qkv"]
    sides = [_split_heads(site, records[slot]) for slot in ("q", "k", "v")]
    if fused is not None and any(side is None for side in sides):
        whole = _split_heads(site, fused)
        if whole is None:
            return None
        keys = (whole.shape[1] - count) // 2
        sides = [whole[:, :count], whole[:, count : count + keys], whole[:, count + keys :]]
    q, k, v = sides
    if q is None or k is None or v is None or q.shape[1] != count or not k.shape[1]:
        return None
    return (q, k, v) if count % k.shape[1] == 0 and k.shape == v.shape else None


def _split_heads(site: _Site, record: Record | None) -> Values | None:
    """A projection as (batch, head, token, channel)."""
    if record is None or len(record.shape) < 3 or record.shape[0] != site.shape[0] or not record.size:
        return None
    values = values_of(site.archive, record)
    if len(record.shape) == 4 and record.shape[-1] == site.dims:
        is_headed = record.shape[2] == site.shape[1] != record.shape[1]
        return values if is_headed else values.transpose(0, 2, 1, 3)
    if len(record.shape) != 3 or record.shape[2] % site.dims:
        return None
    return values.reshape(*record.shape[:2], -1, site.dims).transpose(0, 2, 1, 3)


def _read_angles(site: _Site, arguments: dict[str, Record]) -> tuple[Values, Values] | None:
    """Cosines and sines of one step, by batch, token and channel."""
    sides = []
    for number in (0, 1):
        record = arguments.get(f"position_embeddings.{number}")
        if record is None or record.dtype.kind != "float" or len(record.shape) != 3:
            return None
        values = values_of(site.archive, record)
        if values.shape[0] not in (1, site.shape[0]):
            return None
        sides.append(np.broadcast_to(values, (site.shape[0], *values.shape[1:])))
    return sides[0], sides[1]


def _join(
    before: tuple[Values, Values] | None, after: tuple[Values, Values] | None
) -> tuple[Values, Values] | None:
    if before is None or after is None:
        return None
    cos, sin = (np.concatenate(pair, axis=1) for pair in zip(before, after, strict=True))
    return cos, sin


def _read_mask(
    archive: Archive, record: Record | None, scores: tuple[int, ...]
) -> tuple[Values | None, Values | None]:
    """Which keys a mask shows, (batch, 1, query, key), and what it adds to scores besides."""
    if record is None or len(record.shape) not in (2, 4):
        return None, None
    values = values_of(archive, record)
    if values.ndim == 2:
        values = values[:, None, None]
    values = values[..., : scores[3]]
    if not _fits(values.shape, scores):
        return None, None
    if record.dtype.kind != "float":
        visible, added = np.asarray(values != 0), None
    else:
        visible = np.asarray(values > _HIDDEN)
        rest = np.where(visible, values, 0.0)
        added = np.broadcast_to(rest, (*rest.shape[:2], *scores[2:])) if rest.any() else None
    shown = np.broadcast_to(visible, (scores[0], *visible.shape[1:2], *scores[2:]))
    return np.asarray(shown.any(axis=1, keepdims=True)), added


def _read_bias(
    archive: Archive, arguments: dict[str, Record], results: dict[str, Record], scores: tuple[int, ...]
) -> Values | None:
    """What positions add to scores, (batch or 1, head or 1, query, key)."""
    biases = [record for name, record in results.items() if "bias" in name and len(record.shape) == 3]
    if "position_bias" in arguments and len(arguments["position_bias"].shape) == 4:
        biases.insert(0, arguments["position_bias"])
    for record in biases:
        values = values_of(archive, record)
        values = values.transpose(2, 0, 1)[None] if values.ndim == 3 else values
        if _fits(values.shape, scores):
            return np.broadcast_to(values, (*values.shape[:2], *scores[2:]))
    return None


def _fits(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    return len(shape) == 4 and all(size in (1, whole) for size, whole in zip(shape, scores, strict=True))


def _read_sinks(site: _Site) -> Values | None:
    for record in site.archive.records:
        is_there = module_of(record.key.site) == site.parent and record.key.slot == "param.sinks"
        if is_there and record.stored and record.size == site.count:
            return values_of(site.archive, record).reshape(-1)
    return None
