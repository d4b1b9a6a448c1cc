"""Masks of two kinds that may say the same: True and False against 0 and a sentinel or minus infinity."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.verdicts.pair import Finding, Pair
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.float_formats import MASK_SENTINELS
from tensorcap_formats.records import Record

_BLOCKED: Final = (-np.inf, *MASK_SENTINELS)


def is_blocked(value: object) -> bool:
    """Whether a number stands for minus infinity, as each dtype has its own."""
    return isinstance(value, float) and value in _BLOCKED


def judged_as_masks(reference: Archive, target: Archive, pair: Pair) -> Pair:
    """Judge a pair of a bool and a float mask by what they let attend (POL-24), and no other."""
    trusted, tested = pair.reference, pair.target
    if trusted is None or tested is None or pair.difference is None:
        return pair
    if {trusted.dtype.kind, tested.dtype.kind} != {"bool", "float"} or trusted.shape != tested.shape:
        return pair
    ours, theirs = _attends(reference, trusted), _attends(target, tested)
    if ours is None or theirs is None:
        return pair
    wrong = int((ours != theirs).sum())
    text = f"as masks, {wrong} of {ours.size} elements differ"
    if not wrong:
        return replace(pair, status="match", reason="masks of two kinds that say the same")
    return replace(
        pair, status="diverged", reason="", findings=(Finding("mask", wrong, 0, "diverged", text),)
    )


def _attends(archive: Archive, record: Record) -> Array | None:
    """Where a mask lets attend; None where it is none."""
    values = decode(archive.read(record), record.dtype).reshape(-1)
    if record.dtype.kind == "bool":
        return values.astype(np.bool_)
    attends: Array = values == 0
    return attends if (attends | np.isin(values.astype(np.float64), _BLOCKED)).all() else None
