"""Rows of padding: what a model makes of tokens that a run's mask leaves out is nobody's mistake (POL-31).

A token of padding that may attend to nothing gets zeros of one implementation of attention, and the mean of
all values of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tensorcap.comparison.pair import Pair
from tensorcap.runs import is_state
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_MASKS: Final[Mapping[str, tuple[str, ...]]] = {  # and what says how many tokens a step has
    "input.attention_mask": ("input.input_ids", "input.inputs_embeds"),
    "input.decoder_attention_mask": ("input.decoder_input_ids", "input.decoder_inputs_embeds"),
}
_Place = tuple[int, int]  # rank and step


class Padding:
    """The tokens that both runs were told to leave out.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the same keys.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        self._archives = reference, target
        self._masks: dict[_Place, list[tuple[Array, int]]] = {}  # of all tokens so far; how many are new
        given = {r.key: r for r in reference.records if r.key.site == ROOT_SITE and r.key.slot in _MASKS}
        for key, record in given.items():
            mask = self._mask(record)
            if mask is None or mask.all():
                continue
            for slot in _MASKS[key.slot]:
                text = replace(key, slot=slot).text
                shape = reference.get(text).shape if text in reference else ()
                if len(shape) > 1 and shape[0] == mask.shape[0] and shape[1] <= mask.shape[1]:
                    self._masks.setdefault((key.rank, key.step), []).append((mask, shape[1]))
                    break

    def without(self, pair: Pair) -> Pair:
        """The pair with the row metrics of the other tokens, if it has tokens of padding and differs."""
        record, difference = pair.reference, pair.difference
        if record is None or pair.target is None or difference is None or not difference.unequal:
            return pair
        if record.dtype.kind != "float" or pair.target.dtype.kind != "float" or not self._masks:
            return pair
        valid = self._valid_of(record)
        if valid is None or valid.all():
            return pair
        ours, theirs = (
            decode(archive.read(side), side.dtype).astype(np.float64)
            for archive, side in zip(self._archives, (record, pair.target), strict=True)
        )
        kept = np.broadcast_to(valid.reshape(valid.shape + (1,) * (ours.ndim - valid.ndim)), ours.shape)
        columns = ours.shape[-1]
        rows = kept.reshape(-1, columns).all(axis=1)
        x, d = (a.reshape(-1, columns)[rows] for a in (ours, theirs - ours))
        ok = np.isfinite(x) & np.isfinite(d)
        x, d = np.where(ok, x, 0), np.where(ok, d, 0)
        return replace(pair, difference=replace(difference, **_rows(x, d)))

    def _mask(self, record: Record) -> Array | None:
        """Which tokens a mask of the run's inputs keeps, if it is one of tokens and both runs have it."""
        reference, target = self._archives
        text = record.key.text
        if len(record.shape) != 2 or not record.stored or text not in target:
            return None
        other = target.get(text)
        if other.shape != record.shape or not other.stored:
            return None
        ours, theirs = (decode(a.read(r), r.dtype) for a, r in ((reference, record), (target, other)))
        is_mask = np.array_equal(ours, theirs) and bool(np.isin(ours, (0, 1)).all())
        return ours.astype(bool) if is_mask else None

    def _valid_of(self, record: Record) -> Array | None:
        """Which rows of a tensor are of tokens that count, by its leading axes; None if it has no tokens."""
        found: list[Array] = []
        shape = record.shape
        for mask, new in self._masks.get((record.key.rank, record.key.step), ()):
            rows, tokens = mask.shape
            valid = mask[:, tokens - new :]
            if is_state(record.key):
                if len(shape) == 4 and shape[0] == rows and shape[2] in (tokens, tokens - new):
                    found.append(_for_heads(mask[:, : shape[2]], shape[1]))
            elif shape[:2] == (rows, new) and len(shape) > 2:
                found.append(valid)
            elif len(shape) == 4 and (shape[0], shape[2]) == (rows, new):
                found.append(_for_heads(valid, shape[1]))
            elif len(shape) == 2 and shape[0] == rows * new:
                found.append(valid.reshape(-1))
        is_sure = found and all(np.array_equal(found[0], other) for other in found)
        return found[0] if is_sure else None


def _for_heads(valid: Array, heads: int) -> Array:
    """The tokens of each head, which come before them in a tensor."""
    return np.broadcast_to(valid[:, None], (valid.shape[0], heads, valid.shape[1]))


def _rows(reference: Array, error: Array) -> dict[str, Any]:
    """Row metrics (MET-10 to MET-12) along the last axis."""
    sizes, errors = (np.sqrt((side**2).sum(axis=1)) for side in (reference, error))
    there = sizes > 0
    ratios = np.sort(errors[there] / sizes[there])
    rms = (sizes / np.sqrt(reference.shape[1]))[there, None]
    outliers = np.abs(error[there]) / (np.abs(reference[there]) + rms)
    count = len(ratios)
    if not count:
        is_exact = not errors.any()
        none = 0.0 if is_exact else None
        return {"row_error_median": none, "row_error_p95": none, "outlier": none, "zero_rows": 0}
    return {
        "row_error_median": float(ratios[-(-count // 2) - 1]),
        "row_error_p95": float(ratios[-(-95 * count // 100) - 1]),
        "outlier": float(outliers.max()),
        "zero_rows": int((errors[~there] > 0).sum()),
    }
