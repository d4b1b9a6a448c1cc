"""What is known of a pair before its values are read: shapes, digests, statistics."""

from __future__ import annotations

from dataclasses import replace

from tensorcap.verdicts.pair import Pair
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record


def settle(reference: Archive, target: Archive, pair: Pair) -> Pair:
    """Find the status of a pair that has both sides, if no values are needed for it.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pair: One of their pairs.

    Returns:
        The pair with its status, or as it was, `unjudged`, if its values have to be measured.
    """
    trusted, tested = pair.reference, pair.target
    if pair.status != "unjudged" or trusted is None or tested is None:
        return pair
    if trusted.shape != tested.shape or trusted.dtype.packed != tested.dtype.packed:
        return replace(pair, status="shape-mismatch", reason=_shapes(reference, trusted, target, tested))
    if has_equal_digest(reference, target, trusted, tested):
        return replace(pair, status="identical")
    if not (trusted.stored and tested.stored):
        return _settle_by_counts(pair, trusted, tested)
    return pair


def _settle_by_counts(pair: Pair, trusted: Record, tested: Record) -> Pair:
    ours, theirs = trusted.statistics, tested.statistics
    if ours and theirs and (ours.nan, ours.posinf, ours.neginf) != (theirs.nan, theirs.posinf, theirs.neginf):
        reason = "counts of NaN or infinities differ; no values were kept"
        return replace(pair, status="nonfinite", reason=reason)
    return replace(pair, reason="only statistics were kept: no values to judge by")


def has_equal_digest(reference: Archive, target: Archive, trusted: Record, tested: Record) -> bool:
    """Whether digests prove two records equal, unless another tool edited an archive (CMP-2)."""
    return (
        trusted.digest != ""
        and trusted.digest == tested.digest
        and reference.algorithm == target.algorithm
        and trusted.dtype.name == tested.dtype.name
        and all(a.trusts_digests or not r.stored for a, r in ((reference, trusted), (target, tested)))
    )


def _shapes(reference: Archive, trusted: Record, target: Archive, tested: Record) -> str:
    if trusted.shape != tested.shape:
        unlike = f"{list(trusted.shape)} in the reference, {list(tested.shape)} in the target"
        kept = [
            f"; the {n} kept {s}"
            for n, a in (("reference", reference), ("target", target))
            if (s := _slices(a))
        ]
        return unlike + "".join(kept)
    return f"{trusted.dtype.name} and {tested.dtype.name} hold unlike many values in {list(trusted.shape)}"


def _slices(archive: Archive) -> str:
    """What parts of tensors a capture was told to keep, "" for all."""
    scope = archive.info.scope
    return ", ".join(scope.slices) if scope else ""
