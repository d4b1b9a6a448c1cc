"""Judge pairs without the policy: by shapes, digests and counts, parameters, masks, values passed through.

A mask of bools and one of zeros and a sentinel (or minus infinity) may say the same (POL-24). If two records
of one step are equal in the reference, as the output of a last leaf and that of the module around it, nothing
is computed between them, so that they have to be equal in the target too (CMP-19).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from tensorcap.comparison.cut_values import RoundedArguments
from tensorcap.comparison.pair import Decision, Finding, Pair, Status, decide
from tensorcap.comparison.quantised_weights import output_steps
from tensorcap.comparison.thresholds import Thresholds
from tensorcap.metrics import Tolerance
from tensorcap.runs import (
    Contents,
    calls_of,
    contents_of,
    is_inner,
    is_parameter,
    is_result,
    is_telling,
)
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.errors import ReadError
from tensorcap_formats.float_formats import DTYPE_FORMATS, MASK_SENTINELS, UNIT_ROUNDOFFS
from tensorcap_formats.progress import Progress
from tensorcap_formats.records import Record

BY_RECORDED_DIGEST: Final = "by recorded digest"
_THREADS: Final = 2
_LEAST_BYTES: Final = 64 * 1024  # of a pair on average: smaller ones are read faster by one thread


def judge_by_metadata(reference: Archive, target: Archive, pair: Pair, *, trust_digests: bool) -> Pair:
    """Find the status of a pair that has both sides, if no values are needed for it.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pair: One of their pairs.
        trust_digests: Whether recorded digests stand for values that could be read.

    Returns:
        The pair with its status, or as it was, `unjudged`, if its values have to be measured.
    """
    trusted, tested = pair.reference, pair.target
    if pair.status != "unjudged" or trusted is None or tested is None:
        return pair
    if trusted.shape != tested.shape or trusted.dtype.packed != tested.dtype.packed:
        reason = _mismatch_text(reference, trusted, target, tested)
        return decide(pair, Decision("metadata", "shape-mismatch", reason))
    is_readable = (trusted.stored and tested.stored) or _can_verify(reference, target, pair)
    if (trust_digests or not is_readable) and has_equal_digest(reference, target, trusted, tested):
        return decide(pair, Decision("metadata", "identical", _with_reason(pair, BY_RECORDED_DIGEST)))
    return pair if is_readable else _judge_by_counts(pair, trusted, tested)


def _can_verify(reference: Archive, target: Archive, pair: Pair) -> bool:
    """Whether two records have equal digests, and those that have bytes are checked when they are read."""
    trusted, tested = pair.reference, pair.target
    return (
        trusted is not None
        and tested is not None
        and (trusted.stored or tested.stored)
        and _is_same_digest(reference, target, trusted, tested)
        and all(a.checks_digests or not r.stored for a, r in ((reference, trusted), (target, tested)))
    )


def verify_equal_digests(
    reference: Archive, target: Archive, pairs: Sequence[Pair], progress: Progress | None
) -> list[Pair]:
    """Judge the pairs of equal digests: read the bytes of both sides and compare them with the digest.

    Of two records of one content whose bytes lie in one place, one is read.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: Their pairs, judged by metadata.
        progress: Receives the bytes of the reference that are read, of pairs that have bytes of both sides,
            and those of all such pairs.

    Returns:
        All pairs in their order; those of equal digests are `identical`, or `unreadable` if a side is
        damaged.
    """
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.status == "unjudged" and pair.reference and _can_verify(reference, target, pair):
            groups.setdefault(pair.reference.digest, []).append(pair)

    def verify(group: Sequence[Pair]) -> list[Pair]:
        return [_verified(reference, target, pair) for pair in group]

    total = sum(_both_nbytes(pair) for group in groups.values() for pair in group)
    done = 0
    is_large = total >= _LEAST_BYTES * len(groups)
    verified: dict[str, Pair] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for group in threads.map(verify, groups.values()) if is_large else map(verify, groups.values()):
            verified.update((pair.key, pair) for pair in group)
            done += sum(map(_both_nbytes, group))
            if progress is not None and done:
                progress.advance(done, total)
    return [verified.get(pair.key, pair) for pair in pairs]


def require_readable(pairs: Iterable[Pair]) -> None:
    """Refuse a pair of which a side cannot be read: that is no mistake of a module.

    Raises:
        ReadError: There is one.
    """
    bad = next((pair for pair in pairs if pair.status == "unreadable"), None)
    if bad is not None:
        raise ReadError(bad.reason, hint="What else is damaged: tcap check.")


def _both_nbytes(pair: Pair) -> int:
    """The bytes of the reference's record, if both sides are read."""
    trusted, tested = pair.reference, pair.target
    return trusted.nbytes if trusted and tested and trusted.stored and tested.stored else 0


def _verified(reference: Archive, target: Archive, pair: Pair) -> Pair:
    sides = (reference, pair.reference), (target, pair.target)
    read = [(archive, record) for archive, record in sides if record is not None and record.stored]
    try:
        for archive, record in read:
            archive.verify(record)
    except OSError as error:  # one of ours, or one of the system
        return decide(pair, Decision("values", "unreadable", str(error)))
    reason = pair.reason if len(read) == len(sides) else _with_reason(pair, BY_RECORDED_DIGEST)
    return decide(pair, Decision("values", "identical", reason))


def _with_reason(pair: Pair, text: str) -> str:
    return f"{pair.reason}; {text}" if pair.reason else text


def _judge_by_counts(pair: Pair, trusted: Record, tested: Record) -> Pair:
    ours, theirs = trusted.statistics, tested.statistics
    if ours and theirs and (ours.nan, ours.posinf, ours.neginf) != (theirs.nan, theirs.posinf, theirs.neginf):
        reason = "counts of NaN or infinities differ; no values were kept"
        return decide(pair, Decision("metadata", "nonfinite", reason))
    reason = "only statistics were kept: no values to judge by"
    return decide(pair, Decision("metadata", "unjudged", reason))


def has_equal_digest(reference: Archive, target: Archive, trusted: Record, tested: Record) -> bool:
    """Whether recorded digests say that two records are equal, and no other tool edited an archive."""
    return _is_same_digest(reference, target, trusted, tested) and all(
        a.trusts_digests or not r.stored for a, r in ((reference, trusted), (target, tested))
    )


def _is_same_digest(reference: Archive, target: Archive, trusted: Record, tested: Record) -> bool:
    return (
        trusted.digest != ""
        and trusted.digest == tested.digest
        and reference.algorithm == target.algorithm
        and trusted.dtype.name == tested.dtype.name
    )


def _mismatch_text(reference: Archive, trusted: Record, target: Archive, tested: Record) -> str:
    if trusted.shape == tested.shape:
        return (
            f"{trusted.dtype.name} and {tested.dtype.name} hold unlike many values in {list(trusted.shape)}"
        )
    text = f"{list(trusted.shape)} in the reference, {list(tested.shape)} in the target"
    for name, archive in (("reference", reference), ("target", target)):
        if archive.info.scope and archive.info.scope.slices:
            text += f"; the {name} kept {', '.join(archive.info.scope.slices)}"
    return text


def parameter_rounding(ours: Record, theirs: Record) -> Tolerance | None:
    """Return the error of an element that one rounding to the coarser dtype of a parameter's records allows.

    Returns:
        None for records that are no parameters; a tolerance of zero if the dtypes are the same.
    """
    if not is_parameter(ours.key):
        return None
    coarse = coarser_dtype(ours.dtype, theirs.dtype)
    if coarse is None or ours.dtype.name == theirs.dtype.name:
        return Tolerance(0.0, 0.0)
    form = DTYPE_FORMATS[coarse.name]
    return Tolerance(form.unit_roundoff, form.smallest / 2)


def coarser_dtype(one: DType, other: DType) -> DType | None:
    """Return the one of two dtypes that rounds more; None if one of them is no format of floats."""
    if one.name not in UNIT_ROUNDOFFS or other.name not in UNIT_ROUNDOFFS:
        return None
    return max((one, other), key=lambda dtype: UNIT_ROUNDOFFS[dtype.name])


_BLOCKED: Final = (-np.inf, *MASK_SENTINELS)


def is_blocked(value: object) -> bool:
    """Whether a number stands for minus infinity, as each dtype has its own."""
    return isinstance(value, float) and value in _BLOCKED


def judge_masks(
    reference: Archive,
    target: Archive,
    pair: Pair,
    left_out: Callable[[Record], Array | None] = lambda record: None,
) -> Pair:
    """Judge a pair of a bool and a float mask by what they let attend (POL-24), and no other.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pair: Their pair.
        left_out: Which elements of a tensor are of padding, None if none is: what that sees does not count.
    """
    trusted, tested = pair.reference, pair.target
    if trusted is None or tested is None or pair.difference is None:
        return pair
    if {trusted.dtype.kind, tested.dtype.kind} != {"bool", "float"} or trusted.shape != tested.shape:
        return pair
    ours, theirs = attends(reference, trusted), attends(target, tested)
    if ours is None or theirs is None:
        return pair
    differs = ours != theirs
    reason = "masks of two kinds that say the same"
    if differs.any() and (padding := left_out(trusted)) is not None:
        differs &= ~padding.reshape(-1)
        reason += " of tokens that are no padding"
    wrong = int(differs.sum())
    text = f"as masks, {wrong} of {ours.size} elements differ"
    if not wrong:
        return decide(pair, Decision("masks", "match", reason))
    return decide(pair, Decision("masks", "diverged", "", (Finding("mask", wrong, 0, "diverged", text),)))


def attends(archive: Archive, record: Record) -> Array | None:
    """Return which elements of a mask let attend, flat; None if it is no mask."""
    values = archive.load(record).reshape(-1)
    if record.dtype.kind == "bool":
        return values.astype(np.bool_)
    attends: Array = values == 0
    return attends if (attends | np.isin(values.astype(np.float64), _BLOCKED)).all() else None


_LEAST: Final = 16  # elements: fewer are equal by chance
_ROUNDED: Final = ("quantisation", "weight_rounding")  # tests of what is not as in the reference, on purpose
_HALF: Final = 0.501  # of a step, and what float32 adds
_MASKED: Final = -1e4  # and lower, beside zeros: a mask that is added
_OPEN: Final[tuple[Status, ...]] = ("within-rounding", "unjudged", "suspect", "diverged")
# Experts are given the same rows wherever the same tokens chose them
_BY_CHANCE: Final = re.compile(r"mask|experts?\.\d", re.IGNORECASE)


def judge_pass_through(
    reference: Archive,
    target: Archive,
    pairs: Sequence[Pair],
    thresholds: Thresholds,
    left_out: Callable[[Record], Array | None] = lambda record: None,
    sums: Collection[str] = (),
) -> list[Pair]:
    """Judge the pairs that have to repeat an earlier one.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: Their pairs, judged by the policy.
        thresholds: What a user gave; pairs that it is about are left as they are.
        left_out: Which elements of a tensor are of padding, that need not be repeated; None if none is.
        sums: Keys of the target's tensors that were added up when ranks were merged: the model itself may
            have added in another order.

    Returns:
        All pairs in their order; those that repeat an earlier one in the reference alone are `diverged`, and
        `explained` are those that what is given them rounds to an earlier one.
    """
    broken: dict[str, Pair] = {}
    steps, arguments = _rounded_steps(target), RoundedArguments(target)
    earlier: dict[tuple[object, ...], list[Pair]] = {}
    counts = Counter(pair.reference.digest for pair in pairs if pair.reference is not None)
    repeated = [p for p in pairs if p.reference is not None and counts[p.reference.digest] > 1]
    for pair, record in _in_order(reference, repeated):
        contents = record.key.rank, record.key.step, record.digest, record.dtype.name, record.shape
        same = earlier.setdefault(contents, [])
        is_open = pair.status in _OPEN and not is_inner(record.key) and not thresholds.limits_for(pair.key)
        if pair.target is not None and pair.target.key.text in sums:
            continue
        is_open &= not any(finding.test in _ROUNDED for finding in pair.findings)  # it rounds on purpose
        agreeing = [other for other in same if other.is_green]  # else it may be another tensor in the target
        if agreeing and is_open and not _is_repeated(target, pair, agreeing, left_out, steps, arguments):
            text = f"equal to {agreeing[-1].key} in the reference, not in the target"
            finding = Finding("pass_through", 1, 0, "diverged", text)
            findings = (finding, *pair.findings)
            broken[pair.key] = decide(pair, Decision("pass-through", "diverged", pair.reason, findings))
        elif pair.status in ("suspect", "diverged") and pair.target is not None:
            made = [other for other in agreeing if arguments.are(pair.target, target, _target_of(other))]
            if made:
                reason = f"what is given it rounds it to what {made[-1].key} holds, which agrees"
                broken[pair.key] = decide(pair, Decision("pass-through", "explained", reason, pair.findings))
        same.append(pair)
    again = _computed_again(reference) if broken else ()
    return [pair if pair.key in again else broken.get(pair.key, pair) for pair in pairs]


def _target_of(pair: Pair) -> Record:
    assert pair.target is not None  # it is green
    return pair.target


def _in_order(reference: Archive, pairs: Sequence[Pair]) -> list[tuple[Pair, Record]]:
    """List the pairs whose record in the reference may be repeated, in execution order."""
    entries = [
        (p, p.reference) for p in pairs if p.reference is not None and _is_unique(reference, p.reference)
    ]
    return sorted(entries, key=lambda entry: entry[1].order)


def _is_unique(reference: Archive, record: Record) -> bool:
    """Whether another record is equal to a record only if it is the same tensor, and not by chance."""
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


def _computed_again(reference: Archive) -> frozenset[str]:
    """Key texts of what calls make that are given what a call of the step was given that had ended before.

    It is equal because the same was computed twice, and need not be where that is done another way each time,
    as of a tensor with gaps and of one without; what such a call hands on is no result of that. Nor is what a
    module hands on that one within it has made of the same.
    """
    ends: dict[object, dict[Contents, int]] = {}  # by what was given, when what was first made of it
    again: set[str] = set()
    calls = calls_of(reference)
    for call in calls.calls:
        given = tuple(contents_of(record) for record in call.inputs if record.dtype.is_inexact)
        if not given or not any(map(is_telling, call.inputs)):
            continue
        made = {contents_of(record) for record in call.outputs if is_telling(record)} - set(given)
        earlier = ends.setdefault((*call.place[:2], given), {})
        is_again = any(earlier.get(contents, call.start) < call.start for contents in made)
        for contents in made:
            earlier[contents] = min(call.end, earlier.get(contents, call.end))
        for one in (call, *calls.within(call)) if is_again else ():
            records = (*one.outputs, *(one.inputs if one is not call else ()))
            again |= {record.key.text for record in records if contents_of(record) not in given}
    return frozenset(again)


def _is_repeated(
    target: Archive,
    pair: Pair,
    earlier: Sequence[Pair],
    left_out: Callable[[Record], Array | None],
    steps: Mapping[str, float],
    arguments: RoundedArguments,
) -> bool:
    """Whether a target's record is equal to an earlier one, as far as that is known."""
    tested = pair.target
    others = [other.target for other in earlier if other.target is not None]
    if tested is None or any((o.dtype, o.shape) != (tested.dtype, tested.shape) for o in others):
        return True  # a cast lies between them
    if not others or any(has_equal_digest(target, target, tested, other) for other in others):
        return True
    padding = left_out(pair.reference) if pair.reference is not None else None
    return any(
        _has_equal_values(target, tested, other, padding)
        or _is_rounded(target, tested, other, steps)
        or arguments.are(tested, target, other)
        or arguments.are(other, target, tested)
        for other in reversed(others)
    )


def _rounded_steps(target: Archive) -> dict[str, float]:
    """The step of each tensor that a module rounded to whole steps, by digest."""
    steps = output_steps(target.info)
    records = [r for r in target.records if r.digest and r.key.site in steps] if steps else []
    return {r.digest: steps[r.key.site] for r in records if is_result(r.key)}


def _is_rounded(target: Archive, one: Record, other: Record, steps: Mapping[str, float]) -> bool:
    """Whether one of two tensors is the other, rounded to whole steps by the module that made it."""
    step = max(steps.get(one.digest, 0.0), steps.get(other.digest, 0.0))
    if not step or not (one.stored and other.stored) or one.shape != other.shape:
        return False
    try:
        apart = np.abs(target.load(one).astype(np.float64) - target.load(other).astype(np.float64))
    except OSError:  # the pair is unreadable
        return False
    return bool((apart <= step * _HALF).all())


def _has_equal_values(target: Archive, one: Record, other: Record, padding: Array | None) -> bool:
    """Whether values are equal though digests are not: -0.0 is 0.0, and some records have no digest.

    Elements of padding are not looked at.
    """
    if not (one.stored and other.stored):  # digests are all that is known
        return one.digest == "" or other.digest in ("", one.digest)
    try:
        if padding is not None:
            kept = ~padding
            return np.array_equal(target.load(one)[kept], target.load(other)[kept], equal_nan=True)
        return all(
            np.array_equal(decode(x, one.dtype), decode(y, one.dtype), equal_nan=True)
            for x, y in zip(target.blocks(one), target.blocks(other), strict=True)
        )
    except OSError:  # the pair is unreadable
        return True
