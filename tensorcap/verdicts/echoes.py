"""Tensors that the reference hands on as they are and the target does not (CMP-19).

Where two records of one step are equal in the reference, as the output of a last leaf and that of the module
around it, nothing is computed between them; rounding cannot tell them apart in a correct target either.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.verdicts.pair import Finding, Pair, Status
from tensorcap.verdicts.places import is_inner
from tensorcap.verdicts.settling import has_equal_digest
from tensorcap.verdicts.thresholds import Thresholds
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import decode
from tensorcap_formats.records import Record

_LEAST: Final = 16  # elements: fewer are equal by chance
_MASKED: Final = -1e4  # and lower, beside zeros: a mask that is added
_OPEN: Final[tuple[Status, ...]] = ("within-rounding", "unjudged", "suspect", "diverged")
# Experts are given the same rows wherever the same tokens chose them
_BY_CHANCE: Final = re.compile(r"mask|experts?\.\d", re.IGNORECASE)


def with_echoes(reference: Archive, target: Archive, pairs: Sequence[Pair], given: Thresholds) -> list[Pair]:
    """Judge the pairs that have to repeat an earlier one.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: Their pairs, judged by the policy.
        given: What a user gave; pairs that it is about are left as they are.

    Returns:
        All pairs in their order; those that are no echo in the target, though in the reference, `diverged`.
    """
    broken: dict[str, Pair] = {}
    earlier: dict[tuple[object, ...], list[Pair]] = {}
    for pair, record in _in_order(reference, pairs):
        contents = record.key.rank, record.key.step, record.digest, record.dtype.name, record.shape
        same = earlier.setdefault(contents, [])
        is_tested = pair.status in _OPEN and not is_inner(record.key) and not given.of(pair.key)
        if same and is_tested and not _is_echo(target, pair, same):
            text = f"equal to {same[-1].key} in the reference, not in the target"
            finding = Finding("echo", 1, 0, "diverged", text)
            broken[pair.key] = replace(pair, status="diverged", findings=(finding, *pair.findings))
        same.append(pair)
    return [broken.get(pair.key, pair) for pair in pairs]


def _in_order(reference: Archive, pairs: Sequence[Pair]) -> list[tuple[Pair, Record]]:
    """Pairs whose record in the reference may have echoes, as they were made."""
    found = [(p, p.reference) for p in pairs if p.reference is not None and _tells(reference, p.reference)]
    return sorted(found, key=lambda entry: entry[1].order)


def _tells(reference: Archive, record: Record) -> bool:
    """Whether that a record is equal to another one is no chance."""
    s = record.statistics
    return (
        record.digest != ""
        and (reference.trusts_digests or not record.stored)
        and not record.key.is_bare
        and record.dtype.is_inexact
        and record.size >= _LEAST
        and not _BY_CHANCE.search(f"{record.key.site}/{record.key.slot}")
        and s is not None
        and s.minimum is not None
        and s.maximum is not None
        and s.minimum != s.maximum
        and not (s.maximum == 0 and s.minimum <= _MASKED)
    )


def _is_echo(target: Archive, pair: Pair, earlier: Sequence[Pair]) -> bool:
    """Whether a target's record is equal to an earlier one, as far as it can be told."""
    tested = pair.target
    others = [other.target for other in earlier if other.target is not None]
    if tested is None or any((o.dtype, o.shape) != (tested.dtype, tested.shape) for o in others):
        return True  # a cast lies between them
    if not others or any(has_equal_digest(target, target, tested, other) for other in others):
        return True
    return any(_has_equal_values(target, tested, other) for other in reversed(others))


def _has_equal_values(target: Archive, one: Record, other: Record) -> bool:
    """Whether values are equal, of which digests did not say so: -0.0 is 0.0, and some have none."""
    if not (one.stored and other.stored):  # digests are all that is known
        return one.digest == "" or other.digest in ("", one.digest)
    try:
        return all(
            np.array_equal(decode(x, one.dtype), decode(y, one.dtype), equal_nan=True)
            for x, y in zip(target.blocks(one), target.blocks(other), strict=True)
        )
    except OSError:  # the pair says so
        return True
