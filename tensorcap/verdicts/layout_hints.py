"""What would bring the two sides of a pair of unlike shapes together, tried on their values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tensorcap.alignment.fitting import fit
from tensorcap.verdicts.pair import Pair
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError

_TRIED: Final = 20  # pairs
_LEAST: Final = 8  # elements; fewer, and equal ones, prove nothing
_ROUNDING: Final = 2.0**-9  # of bfloat16, below which errors tell no layout from another


def with_hints(pairs: Iterable[Pair], reference: Archive, target: Archive) -> list[Pair]:
    """Say of pairs of unlike shapes which layout step their values agree after, of the first 20 of them."""
    told = []
    tried = 0
    for pair in pairs:
        if pair.status == "shape-mismatch" and tried < _TRIED and pair.reference and pair.target:
            tried += 1
            pair = _hinted(pair, reference, target)
        told.append(pair)
    return told


def _hinted(pair: Pair, reference: Archive, target: Archive) -> Pair:
    assert pair.reference is not None
    assert pair.target is not None
    ours, theirs = pair.reference, pair.target
    if ours.size != theirs.size or ours.dtype.packed != theirs.dtype.packed or ours.size < _LEAST:
        return pair
    try:
        known = reference.statistics(ours)
        if known.minimum == known.maximum:
            return pair
        found = fit([ours], [theirs], (reference, target), _ROUNDING)
    except (OSError, UsageError):  # its shapes are what matters
        return pair
    if found is None or not found.is_proven or not found.steps:
        return pair
    return replace(pair, reason=f"{pair.reason}; would match after {', '.join(found.steps)}")
