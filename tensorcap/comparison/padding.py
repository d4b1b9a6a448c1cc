"""Rows of padding: errors at tokens that the mask of both runs leaves out do not count (POL-31).

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
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_MASKS: Final[Mapping[str, tuple[str, ...]]] = {  # and the inputs with as many tokens as a step has
    "input.attention_mask": ("input.input_ids", "input.inputs_embeds"),
    "input.decoder_attention_mask": ("input.decoder_input_ids", "input.decoder_inputs_embeds"),
}
_Place = tuple[int, int]  # rank and step


class Padding:
    """The tokens that the masks of both runs leave out.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the same keys.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        self._archives = reference, target
        self._masks: dict[_Place, list[tuple[Array, int]]] = {}  # of all tokens so far; how many are new
        masks = {r.key: r for r in reference.records if r.key.site == ROOT_SITE and r.key.slot in _MASKS}
        for key, record in masks.items():
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
        """Return the pair with the row metrics of tokens that are no padding, if it has any and differs."""
        record, difference = pair.reference, pair.difference
        if record is None or pair.target is None or difference is None or not difference.unequal:
            return pair
        if record.dtype.kind != "float" or pair.target.dtype.kind != "float" or not self._masks:
            return pair
        valid = self._valid_of(record)
        if valid is None or valid.all():
            return pair
        ours, theirs = (
            archive.load(side).astype(np.float64)
            for archive, side in zip(self._archives, (record, pair.target), strict=True)
        )
        kept = np.broadcast_to(valid.reshape(valid.shape + (1,) * (ours.ndim - valid.ndim)), ours.shape)
        columns = ours.shape[-1]
        rows = kept.reshape(-1, columns).all(axis=1)
        x, d = (a.reshape(-1, columns)[rows] for a in (ours, theirs - ours))
        return replace(pair, difference=replace(difference, **row_metrics(x, d)))

    def _mask(self, record: Record) -> Array | None:
        """Return which tokens a mask among the inputs keeps; None if it is none, or not both runs have it."""
        reference, target = self._archives
        text = record.key.text
        if len(record.shape) != 2 or not record.stored or text not in target:
            return None
        other = target.get(text)
        if other.shape != record.shape or not other.stored:
            return None
        ours, theirs = reference.load(record), target.load(other)
        is_mask = np.array_equal(ours, theirs) and bool(np.isin(ours, (0, 1)).all())
        return ours.astype(bool) if is_mask else None

    def _valid_of(self, record: Record) -> Array | None:
        """Return which rows of a tensor are of tokens that count, by leading axes; None if it has none."""
        candidates: list[Array] = []
        shape = record.shape
        for mask, new in self._masks.get((record.key.rank, record.key.step), ()):
            rows, tokens = mask.shape
            valid = mask[:, tokens - new :]
            if is_state(record.key):
                if len(shape) == 4 and shape[0] == rows and shape[2] in (tokens, tokens - new):
                    candidates.append(_for_heads(mask[:, : shape[2]], shape[1]))
            elif shape[:2] == (rows, new) and len(shape) > 2:
                candidates.append(valid)
            elif len(shape) == 4 and (shape[0], shape[2]) == (rows, new):
                candidates.append(_for_heads(valid, shape[1]))
            elif len(shape) == 2 and shape[0] == rows * new:
                candidates.append(valid.reshape(-1))
        is_sure = candidates and all(np.array_equal(candidates[0], other) for other in candidates)
        return candidates[0] if is_sure else None


def _for_heads(valid: Array, heads: int) -> Array:
    """Repeat the tokens for each head; in a tensor, heads come before tokens."""
    return np.broadcast_to(valid[:, None], (valid.shape[0], heads, valid.shape[1]))


def row_metrics(reference: Array, error: Array) -> dict[str, Any]:
    """Compute row metrics (MET-10 to MET-12) of some rows, without what is not finite.

    Args:
        reference: The rows of the reference, float64 (row, element).
        error: What the target's differ by, the same shape.
    """
    ok = np.isfinite(reference) & np.isfinite(error)
    reference, error = np.where(ok, reference, 0), np.where(ok, error, 0)
    sizes, errors = (np.sqrt((side**2).sum(axis=1)) for side in (reference, error))
    there = sizes > 0
    ratios = np.sort(errors[there] / sizes[there])
    rms = (sizes / np.sqrt(reference.shape[1]))[there, None]
    outliers = np.abs(error[there]) / (np.abs(reference[there]) + rms)
    count = len(ratios)
    if not count:
        exact = None if errors.any() else 0.0
        return {"row_error_median": exact, "row_error_p95": exact, "outlier": exact, "zero_rows": 0}
    return {
        "row_error_median": float(ratios[-(-count // 2) - 1]),
        "row_error_p95": float(ratios[-(-95 * count // 100) - 1]),
        "outlier": float(outliers.max()),
        "zero_rows": int((errors[~there] > 0).sum()),
    }
