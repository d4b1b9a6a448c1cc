"""The status of one pair, from digests where they settle it, else from one pass over the values."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tensorcap.metrics import BLOCK, Difference, DifferenceBuilder, Tolerance
from tensorcap.pairing import Pair, Status
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record

_READ_ELEMENTS: Final = 16 * BLOCK  # of either side at a time, whatever the size of a tensor


def judge(reference: Archive, target: Archive, pair: Pair, tolerance: Tolerance | None) -> Pair:
    """Find the status of a pair that has both sides.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pair: One of their pairs.
        tolerance: What is allowed, or None.

    Returns:
        The pair with its status, and its difference where values were read.
    """
    trusted, tested = pair.reference, pair.target
    if trusted is None or tested is None:
        return pair
    if trusted.shape != tested.shape or trusted.dtype.packed != tested.dtype.packed:
        return replace(pair, status="shape-mismatch", reason=_shapes(trusted, tested))
    if _has_equal_digest(reference, target, trusted, tested):
        return replace(pair, status="identical")
    if not (trusted.stored and tested.stored):
        return _judge_by_statistics(pair, trusted, tested)
    try:
        difference = measure(reference, trusted, target, tested, tolerance=tolerance)
    except OSError as error:  # one of ours, or what the system said
        return replace(pair, status="unreadable", reason=str(error))
    return replace(pair, status=_status(difference), difference=difference)


def measure(
    reference: Archive,
    reference_record: Record,
    target: Archive,
    target_record: Record,
    *,
    tolerance: Tolerance | None = None,
) -> Difference:
    """Measure how far one stored tensor lies from another of the same shape, in bounded memory.

    Raises:
        ReadError: One side cannot be read.
    """
    dtypes = reference_record.dtype, target_record.dtype
    builder = DifferenceBuilder(*dtypes, reference_record.shape, tolerance=tolerance)
    sides = zip(
        reference.blocks(reference_record, _READ_ELEMENTS * dtypes[0].itemsize),
        target.blocks(target_record, _READ_ELEMENTS * dtypes[1].itemsize),
        strict=True,
    )
    for reference_block, target_block in sides:
        builder.update(reference_block, target_block)
    return builder.result()


def _status(difference: Difference) -> Status:
    if difference.same_bits:
        return "identical"
    if difference.mask_mismatches:
        return "nonfinite"
    if not difference.unequal:  # other bits, same values: within every tolerance there is
        return "match"
    if difference.mismatches is None:
        return "unjudged"
    return "diverged" if difference.mismatches else "match"


def _judge_by_statistics(pair: Pair, trusted: Record, tested: Record) -> Pair:
    ours, theirs = trusted.statistics, tested.statistics
    if ours and theirs and (ours.nan, ours.posinf, ours.neginf) != (theirs.nan, theirs.posinf, theirs.neginf):
        reason = "counts of NaN or infinities differ; no values were kept"
        return replace(pair, status="nonfinite", reason=reason)
    return replace(pair, status="unjudged", reason="only statistics were kept: no values to judge by")


def _has_equal_digest(reference: Archive, target: Archive, trusted: Record, tested: Record) -> bool:
    return (
        trusted.digest != ""
        and trusted.digest == tested.digest
        and reference.algorithm == target.algorithm
        and trusted.dtype.name == tested.dtype.name
    )


def _shapes(trusted: Record, tested: Record) -> str:
    if trusted.shape != tested.shape:
        return f"{list(trusted.shape)} in the reference, {list(tested.shape)} in the target"
    return f"{trusted.dtype.name} and {tested.dtype.name} hold unlike many values in {list(trusted.shape)}"
