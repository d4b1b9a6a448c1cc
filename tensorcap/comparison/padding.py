"""Rows of padding: what is made of tokens that the mask of both runs leaves out does not count (POL-31).

A token of padding that may attend to nothing gets zeros of one implementation of attention, the mean of all
values of another, and NaN of a third.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from tensorcap.comparison.exact import attends
from tensorcap.comparison.pair import Decision, Pair, Status, decide
from tensorcap.runs import calls_of, is_state
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_MASKS: Final[Mapping[str, tuple[str, ...]]] = {  # and the inputs with as many tokens as a step has
    "input.attention_mask": ("input.input_ids", "input.inputs_embeds"),
    "input.decoder_attention_mask": ("input.decoder_input_ids", "input.decoder_inputs_embeds"),
}
_PADDINGS: Final[Mapping[str, tuple[str, ...]]] = {  # masks that name what is left out
    "input.key_padding_mask": (),
    "input.src_key_padding_mask": ("input.src",),
    "input.tgt_key_padding_mask": ("input.tgt",),
}
_OF_ATTENTION: Final = "input.attention_mask"  # of a module: which query sees which key
_LEAST_ROW: Final = 64  # elements, if a token has as many
_MOST_MASKS: Final = 8  # of modules, each other values, that are read in a step
_LEFT_OUT: Final = "NaN and infinities differ only where the attention mask leaves out"
_Place = tuple[int, int]  # rank and step


class _Mask(NamedTuple):
    """Tokens that a mask keeps.

    Attributes:
        kept: By sequence and token, of all tokens so far.
        new: How many of them are of this step.
        is_of_queries: Whether only what tokens see is known, not by whom they are seen.
        site: The module that it was given to, and counts within; `@root` for all.
        results: Digests of that module's results, which others are given.
    """

    kept: Array
    new: int
    is_of_queries: bool = False
    site: str = ROOT_SITE
    results: frozenset[str] = frozenset()

    def counts_for(self, record: Record) -> bool:
        """Whether a tensor is of the module that the mask was given to, or what that has made."""
        site = record.key.site
        is_within = self.site in (site, ROOT_SITE) or site.startswith(f"{self.site}.")
        return is_within or (record.digest != "" and record.digest in self.results)


class Padding:
    """The tokens that the masks of both runs leave out, or let see nothing.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the same keys.
        divisors: What columns of tensors of the target are divided by: see `values_of`.
    """

    def __init__(
        self, reference: Archive, target: Archive, divisors: Mapping[str, Array] | None = None
    ) -> None:
        self._archives, self._divisors = (reference, target), divisors or {}
        self._masks: dict[_Place, list[_Mask]] = {}
        inputs = [r for r in reference.records if r.key.site == ROOT_SITE and r.key.slot.startswith("input.")]
        for record in inputs:
            key = record.key
            tokens = {**_MASKS, **_PADDINGS}.get(key.slot)
            kept = None if tokens is None else self._tokens(record)
            if kept is None or tokens is None or kept.all():
                continue
            named = (replace(key, slot=slot).text for slot in tokens)
            others = (r.key.text for r in inputs if r is not record and r.key.where == key.where)
            for text in (*named, *others):
                shape = reference.get(text).shape if text in reference else ()
                if len(shape) > 1 and shape[0] == kept.shape[0] and shape[1] <= kept.shape[1]:
                    self._masks.setdefault((key.rank, key.step), []).append(_Mask(kept, shape[1]))
                    break
        self._add_rows_that_see_nothing()
        self._add_tokens_of_modules()

    def without(self, pair: Pair) -> Pair:
        """Return the pair with the row metrics of tokens that are no padding, if it has any and differs.

        Columns that are divided are multiplied again, of a pair without padding too. If it is not finite on
        one side only, and only there, it is open again, or a match if all else is equal.
        """
        record, difference = pair.reference, pair.difference
        if record is None or pair.target is None or difference is None:
            return pair
        if not (difference.unequal or difference.mask_mismatches):
            return pair
        if record.dtype.kind != "float" or pair.target.dtype.kind != "float":
            return pair
        valid = self._valid_of(record) if self._masks else None
        if valid is None or valid.all():
            if pair.key not in self._divisors:
                return pair
            valid = np.ones((), bool)
        ours, theirs = values_of(pair.key, record, pair.target, self._archives, self._divisors)
        kept = np.broadcast_to(valid.reshape(valid.shape + (1,) * (ours.ndim - valid.ndim)), ours.shape)
        columns = _row_length(ours.shape[valid.ndim :])
        rows = kept.reshape(-1, columns).all(axis=1)
        if self._is_masked_by_module(record):  # zeros are what the mask has made of padding
            rows |= ~ours.reshape(-1, columns).any(axis=1)
        x, y = (a.reshape(-1, columns)[rows] for a in (ours, theirs))
        is_equal = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            d = y - x
        ok = np.isfinite(x) & np.isfinite(d)
        if pair.status == "nonfinite" and (ok | is_equal).all():
            difference = replace(difference, mask_mismatches=0, mask_index=None)
            status: Status = "match" if is_equal.all() else "unjudged"
            pair = decide(pair.with_difference(difference), Decision("masks", status, _LEFT_OUT))
        x, d = np.where(ok, x, 0), np.where(ok, d, 0)
        return pair.with_difference(replace(difference, **row_metrics(x, d)))

    def left_out(self, record: Record) -> Array | None:
        """Return which elements of a tensor are of tokens that are left out; None if none is."""
        valid = self._valid_of(record) if self._masks else None
        if valid is None or valid.all():
            return None
        return np.broadcast_to(
            ~valid.reshape(valid.shape + (1,) * (len(record.shape) - valid.ndim)), record.shape
        )

    def _tokens(self, record: Record) -> Array | None:
        """Return which tokens a mask among the inputs keeps; None if it is none, or not both runs have it."""
        if len(record.shape) != 2:
            return None
        values = self._common(record)
        if values is None or not np.isin(values, (0, 1)).all():
            return None
        kept = values.astype(bool)
        return ~kept if record.key.slot in _PADDINGS else kept

    def _common(self, record: Record) -> Array | None:
        """Read an input of which both runs hold the same values; None if they do not, or if it is damaged."""
        reference, target = self._archives
        text = record.key.text
        other = target.get(text) if text in target else None
        if other is None or other.shape != record.shape or not (record.stored and other.stored):
            return None
        try:
            ours, theirs = reference.load(record), target.load(other)
        except OSError:  # the pair is unreadable
            return None
        return ours if np.array_equal(ours, theirs) else None

    def _add_rows_that_see_nothing(self) -> None:
        """Leave out tokens that see nothing by any mask of four axes that both runs gave to a module."""
        reference, target = self._archives
        seen: dict[_Place, Array] = {}
        known: dict[_Place, set[str]] = {}
        for record in reference.records:
            key = record.key
            place = key.rank, key.step
            if key.slot != _OF_ATTENTION or len(record.shape) != 4 or place in self._masks:
                continue
            digests = known.setdefault(place, set())
            if record.digest in digests or len(digests) >= _MOST_MASKS or key.text not in target:
                continue
            digests.add(record.digest or key.text)
            try:
                ours, theirs = (attends(a, a.get(key)) if a.get(key).stored else None for a in self._archives)
            except OSError:  # the pair is unreadable
                ours = theirs = None
            if ours is None or theirs is None or not np.array_equal(ours, theirs):
                seen[place] = np.ones((0, 0), bool)  # not the same on both sides
                continue
            sees: Array = np.asarray(ours.reshape(record.shape).any(axis=(1, 3)))
            before = seen.get(place, sees)
            seen[place] = before | sees if before.shape == sees.shape else np.ones((0, 0), bool)
        for place, kept in seen.items():
            if kept.size and not kept.all():
                self._masks[place] = [_Mask(kept, kept.shape[1], is_of_queries=True)]

    def _add_tokens_of_modules(self) -> None:
        """Leave out tokens by masks of two axes that both runs gave to a module, such as an encoder's.

        Not where two of its arguments have as many tokens, of which one is an encoder's: the mask may be of
        either.
        """
        masks: dict[_Place, list[_Mask]] = {}
        read: dict[_Place, dict[str, Array | None]] = {}
        for call in calls_of(self._archives[0]).calls:
            for record in call.inputs:
                is_mask = len(record.shape) == 2 and record.key.slot.endswith("attention_mask")
                if call.site == ROOT_SITE or not is_mask or not record.digest:
                    continue
                place = record.key.rank, record.key.step
                known = read.setdefault(place, {})
                if record.digest not in known:
                    if len(known) >= _MOST_MASKS:
                        continue
                    known[record.digest] = self._tokens(record)
                kept = known[record.digest]
                around = [mask for mask in masks.get(place, ()) if mask.counts_for(record)]
                if kept is None or kept.all() or any(np.array_equal(kept, mask.kept) for mask in around):
                    continue
                owners = {
                    other.key.slot.partition(".")[2].startswith("encoder_")
                    for other in call.inputs
                    if other.shape[:2] == record.shape and other.dtype.is_inexact
                }
                if len(owners) == 1:
                    results = frozenset(one.digest for one in call.outputs if one.digest)
                    masks.setdefault(place, []).append(
                        _Mask(kept, record.shape[1], site=call.site, results=results)
                    )
        for place, found in masks.items():
            self._masks.setdefault(place, []).extend(found)

    def _is_masked_by_module(self, record: Record) -> bool:
        """Whether no mask but those of modules within the model says what counts of a tensor."""
        masks = self._masks.get((record.key.rank, record.key.step), ())
        return all(mask.site != ROOT_SITE for mask in masks if mask.counts_for(record))

    def _valid_of(self, record: Record) -> Array | None:
        """Return which rows of a tensor are of tokens that count, by leading axes; None if it has none."""
        candidates: list[Array] = []
        shape = record.shape
        for entry in self._masks.get((record.key.rank, record.key.step), ()):
            if not entry.counts_for(record):
                continue
            mask, new, is_of_queries = entry.kept, entry.new, entry.is_of_queries
            rows, tokens = mask.shape
            valid = mask[:, tokens - new :]
            if is_state(record.key):
                has_heads = len(shape) == 4 and shape[0] == rows and shape[2] in (tokens, tokens - new)
                if has_heads and not is_of_queries:
                    candidates.append(_for_heads(mask[:, : shape[2]], shape[1]))
            elif shape[:2] == (rows, new) and len(shape) > 2:
                candidates.append(valid)
            elif len(shape) == 4 and (shape[0], shape[2]) == (rows, new):
                candidates.append(_for_heads(valid, shape[1]))
            elif len(shape) == 2 and shape[0] == rows * new:
                candidates.append(valid.reshape(-1))
        is_sure = candidates and all(np.array_equal(candidates[0], other) for other in candidates)
        return candidates[0] if is_sure else None


def _row_length(shape: tuple[int, ...]) -> int:
    """How many elements a row of a token has: those of its last axes that make a row (MET-10)."""
    length = 1
    for count in reversed(shape):
        length *= count
        if length >= _LEAST_ROW:
            break
    return length


def _for_heads(valid: Array, heads: int) -> Array:
    """Repeat the tokens for each head; in a tensor, heads come before tokens."""
    return np.broadcast_to(valid[:, None], (valid.shape[0], heads, valid.shape[1]))


def values_of(
    key: str,
    ours: Record,
    theirs: Record,
    archives: tuple[Archive, Archive],
    divisors: Mapping[str, Array],
) -> tuple[Array, Array]:
    """Read both sides of a pair in float64, the target's with columns that are not divided.

    Args:
        key: Key text of the pair.
        ours: The reference's record.
        theirs: The target's.
        archives: The trusted one, and the one under test.
        divisors: What columns or channels of tensors of the target are divided by, which a layer undoes, by
            key text (POL-284); it broadcasts over the tensor.

    Raises:
        OSError, ReadError: One of both cannot be read.
    """
    x, y = (a.load(r).astype(np.float64) for a, r in zip(archives, (ours, theirs), strict=True))
    by = divisors.get(key)
    return x, y if by is None else y * by


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
        errors_of_rows = dict.fromkeys(("row_error_median", "row_error_p95", "row_error_max"), exact)
        return {**errors_of_rows, "outlier": exact, "zero_rows": 0}
    return {
        "row_error_median": float(ratios[-(-count // 2) - 1]),
        "row_error_p95": float(ratios[-(-95 * count // 100) - 1]),
        "row_error_max": float(ratios[-1]),
        "outlier": float(outliers.max()),
        "zero_rows": int((errors[~there] > 0).sum()),
    }
