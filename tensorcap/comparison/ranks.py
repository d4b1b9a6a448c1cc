"""Pairs of a run of several ranks: the rank that an error lies with, and what ranks hold unlike (RNK-30)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.comparison.callers import called_sites, caller_of
from tensorcap.comparison.pair import SEVERITY, Decision, Finding, Pair, decide
from tensorcap.metrics import error_along
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.ranks import MeshRule, RuleBook
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RankProblem, TensorRule

RANK_TESTS: Final = ("unequal_copies", "unequal_since", "unmerged", "rank_part")
_RED: Final = ("suspect", "diverged", "nonfinite")
_LOOKED_AT: Final = 32  # pairs, the first in execution order: those after them have inherited their errors
_MOST: Final = 0.9  # of the squared error, that a rank's part holds which is named
_SAME: Final = 0.01  # relative error below which a part is another rank's: unlike ones are 1 apart and more
_ALL: Final = 0.999  # and more is all of it: what is left is rounding, squared


def judge_ranks(
    reference: Archive, target: Archive, pairs: Sequence[Pair], *, is_of_own_values: bool = True
) -> list[Pair]:
    """Judge what the ranks of the target hold unlike, and find the ranks that errors lie with.

    1. Ranks that should hold the same and do not: `diverged`, whatever the first of them holds. The first
       such tensor is evidence against its module; those after it may be computed of it.
    2. A tensor of one rank that no rule joins is not the whole one: not green.
    3. Of the first red pairs, the share of the squared error in each rank's part. If one part has nearly all
       of it, and is not nearly all of the tensor, the rank is named.

    Args:
        reference: The trusted archive.
        target: The archive under test, perhaps under the reference's keys.
        pairs: Their pairs, judged.
        is_of_own_values: Whether both are runs of their own values. If not, one made its tensors of what the
            first rank has, and what others have is no difference from it.

    Returns:
        All pairs in their order.
    """
    info = target.info.ranks
    if info is None or not info.is_merged:
        return list(pairs)
    problems: dict[str, list[RankProblem]] = {}
    for problem in info.problems:
        problems.setdefault(problem.key, []).append(problem)
    book, left, since = RuleBook(info), _LOOKED_AT, ""
    judged = []
    for pair in pairs:
        source = _source(target, pair.target)
        if source is not None and pair.reference and pair.status != "excluded":
            if is_of_own_values:
                pair = _with_problems(pair, problems.get(source.key.text, ()), since)
                is_first = not since and any(f.test == "unequal_copies" for f in pair.findings)
                since = pair.key if is_first else since
            if left and _is_red(pair, source):
                pair, left = _with_rank_part(reference, target, pair, book.find(source.key)), left - 1
        judged.append(pair)
    return judged


def given_unlike_on_ranks(reference: Archive, target: Archive) -> frozenset[str]:
    """Modules, in the reference's names, that computed with tensors that ranks hold unlike and should not.

    1. Those that ranks gave unlike arguments, and those whose code called a module of unlike results.
    2. Of an argument that no rule joins it is known by its last axis, if that is as long as the reference's:
       then each rank has all of it, and none has a part.
    """
    info = target.info.ranks
    problems = {p.key: p.kind for p in info.problems if p.kind in ("unequal", "unmerged")} if info else {}
    if not problems:
        return frozenset()
    merged = target.source if isinstance(target, MappedArchive) else target
    widths: dict[str, set[int]] = {}
    for record in reference.records:
        if record.key.slot.startswith("input") and record.shape:
            widths.setdefault(record.key.site, set()).add(record.shape[-1])
    unlike: dict[str, set[int]] = {}
    for record in merged.records:
        kind = problems.get(record.key.text)
        if kind is not None and record.key.slot.startswith("input"):
            width = record.shape[-1] if record.shape and kind == "unmerged" else -1
            unlike.setdefault(record.key.site, set()).add(width)
    given = set()
    called = called_sites(reference)
    for record in target.records:
        behind = target.sources.get(record.key.text, ()) if isinstance(target, MappedArchive) else (record,)
        for source in behind:
            own = unlike.get(source.key.site, set())
            if -1 in own or own & widths.get(record.key.site, set()):
                given.add(record.key.site)
            if record.key.slot.startswith("output") and problems.get(source.key.text) == "unequal":
                given.add(caller_of(record.key.site, called))
    return frozenset(given)


def sums_of_ranks(target: Archive) -> frozenset[str]:
    """Keys of a target's tensors that are sums of what ranks hold, in its names as compared."""
    info = target.info.ranks
    book = RuleBook(info) if info is not None and info.is_merged else None
    if book is None or not any(_adds(entry) for entry in book.entries):
        return frozenset()
    keys = ((record.key.text, _source(target, record)) for record in target.records)
    return frozenset(
        text for text, source in keys if source and (rule := book.find(source.key)) and _adds(rule)
    )


def rule_of_ranks(target: Archive, record: Record) -> TensorRule | None:
    """By which rule the tensor behind a target's record was put together; None if by none, or several.

    Args:
        target: The target, perhaps under the reference's keys and in its layout.
        record: One of its records.
    """
    info = target.info.ranks
    if info is None or not info.is_merged:
        return None
    behind = target.sources.get(record.key.text, ()) if isinstance(target, MappedArchive) else (record,)
    book = RuleBook(info)
    entries = [book.find(source.key) for source in behind]
    return entries[0] if entries and all(entry == entries[0] for entry in entries) else None


def ranks_that_add(target: Archive) -> Mapping[str, int]:
    """How many ranks' terms each result is the sum of, by key in the target's names as compared.

    They are known by rules alone: ranks hold parts of what the call was given along its last axis, which a
    product sums over, and all hold the result, or a term of it each.
    """
    info = target.info.ranks
    if info is None or not info.is_merged:
        return {}
    book = RuleBook(info)
    counts: dict[str, int] = {}
    merged = target.source if isinstance(target, MappedArchive) else target
    for record in merged.records:
        entry = book.find(record.key) if record.key.slot.startswith("input") and record.shape else None
        count = 0 if entry is None else _parts_of_last_axis(entry, len(record.shape), info.count)
        if count > 1:
            counts[record.key.where] = max(count, counts.get(record.key.where, 0))
    adding = {}
    for record in target.records if counts else ():
        source = _source(target, record)
        entry = None if source is None else book.find(source.key)
        if source is None or entry is None or source.key.where not in counts:
            continue
        if source.key.slot.startswith("output") and (_adds(entry) or "concat" not in entry.rule):
            adding[record.key.text] = counts[source.key.where]
    return adding


def _parts_of_last_axis(entry: TensorRule, ndim: int, ranks: int | None) -> int:
    """How many parts of the last axis of a tensor ranks hold; 1 if they hold all of it."""
    try:
        rule = MeshRule.parse(entry.rule, entry.mesh or None).over(ranks or 1)
        sizes = zip(rule.rules, rule.sizes, strict=True)
        along = [(one, n) for one, n in sizes if one.kind == "concat" and one.at(ndim) == ndim - 1]
        return math.prod(len(one.distinct(n)) for one, n in along)
    except (UsageError, ValueError, TypeError):  # metadata that contradict the tensor
        return 1


def _adds(entry: TensorRule) -> bool:
    return any(word in ("sum", "avg") for word in entry.rule.replace(";", " ").split())


def rank_text(findings: Sequence[Finding]) -> str:
    """What findings say of ranks, "" if nothing."""
    return "; ".join(finding.text for finding in findings if finding.test in RANK_TESTS)


def _source(target: Archive, record: Record | None) -> Record | None:
    """The record of the merged archive that a target's record is, in its own layout."""
    if record is None or not isinstance(target, MappedArchive):
        return record
    link = target.links.get(record.key.text)
    sources = target.sources.get(record.key.text, ())
    if len(sources) != 1 or (link is not None and not link.is_renaming):
        return None
    return sources[0]


def _with_problems(pair: Pair, problems: Sequence[RankProblem], since: str) -> Pair:
    """A pair with the problems of its tensor; `since` is the key of the first that ranks hold unlike."""
    for problem in problems:
        if problem.kind == "shape":
            reason = "; ".join(filter(None, (pair.reason, problem.text)))
            is_told = pair.status in (*_RED, "shape-mismatch", "unreadable")
            status = pair.status if is_told else "suspect" if pair.is_compared else "shape-mismatch"
            pair = decide(pair, Decision("ranks", status, reason, pair.findings))
            continue
        is_unequal = problem.kind == "unequal"
        test = "unmerged" if not is_unequal else "unequal_since" if since else "unequal_copies"
        text = f"{problem.text}; so since {since}" if is_unequal and since else problem.text
        finding = Finding(test, 1, 0, "diverged" if is_unequal else "suspect", text)
        status = max(pair.status, finding.status, key=SEVERITY.index)
        pair = decide(pair, Decision("ranks", status, pair.reason, (finding, *pair.findings)))
    return pair


def _is_red(pair: Pair, source: Record) -> bool:
    """Whether a pair differs in values, and the target's own tensor has the reference's shape."""
    has_shape = pair.reference is not None and source.shape == pair.reference.shape
    return has_shape and pair.status in _RED and pair.difference is not None


def _with_rank_part(reference: Archive, target: Archive, pair: Pair, entry: TensorRule | None) -> Pair:
    """A pair with the rank whose part holds nearly all of its error, if there is one."""
    if entry is None or pair.reference is None or pair.target is None:
        return pair
    part = _rank_part(
        (reference, pair.reference), (target, pair.target), entry, masks=pair.status == "nonfinite"
    )
    if part is None:
        return pair
    looked_at = decide(pair, Decision("ranks", None, "", (part,)))
    return replace(looked_at, findings=(*pair.findings, part))


def _rank_with_the_part(
    reference: tuple[Archive, Record], target: tuple[Archive, Record], axis: int, owners: Array, held: int
) -> int | None:
    """The rank, by number in the mesh, whose part of the reference another rank of the target holds."""
    if reference[1].shape != target[1].shape or not (reference[1].stored and target[1].stored):
        return None
    ours, theirs = (archive.load(record) for archive, record in (reference, target))
    if ours.dtype.kind != "f" or theirs.dtype.kind != "f":
        return None
    part = theirs.compress(owners == held, axis).astype(np.float64)
    for other in np.unique(owners):
        own = ours.compress(owners == other, axis).astype(np.float64)
        if other != held and own.shape == part.shape:
            size = float(np.linalg.norm(own))
            if 0 < size < math.inf and float(np.linalg.norm(part - own)) < _SAME * size:
                return int(other)
    return None


def _rank_part(
    reference: tuple[Archive, Record], target: tuple[Archive, Record], entry: TensorRule, *, masks: bool
) -> Finding | None:
    """The share of the error that lies in one rank's part; None if no part has nearly all of it."""
    ndim = len(reference[1].shape)
    for name, sizes in entry.sizes.items():
        try:
            axis = int(name)
            if not all(0 <= size <= 2 * reference[1].shape[axis] for size in sizes):
                continue
            rule = MeshRule.parse(entry.rule, entry.mesh or None).over(len(sizes))
            owners = rule.owners(axis, ndim, sizes)
            sums = error_along(reference, target, axis, masks=masks)
        except (
            UsageError,
            LookupError,
            ValueError,
            TypeError,
            OSError,
        ):  # metadata that contradict the tensor
            continue
        total = 0.0 if sums is None else float(sums.sum())
        if sums is None or len(sums) != len(owners) or not 0 < total < math.inf:
            continue
        shares = np.bincount(owners, sums / total, len(sizes))
        most = int(shares.argmax())
        if shares[most] < _MOST or np.count_nonzero(owners == most) > _MOST * len(owners):
            continue
        rank = rule.ranks[most] if rule.ranks else most
        share = "all of it" if shares[most] > _ALL else f"{100 * shares[most]:.3g} % of it"
        what = f"{share} in rank {rank}'s part: {_ranges(np.flatnonzero(owners == most))} of axis {axis}"
        other = _rank_with_the_part(reference, target, axis, owners, most)
        if other is not None:
            what += f", which is the reference's part of rank {rule.ranks[other] if rule.ranks else other}"
        return Finding("rank_part", float(shares[most]), _MOST, "unjudged", what)
    return None


def _ranges(indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """Runs of indices as a text: `indices 0 to 31 and 64 to 95`."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{'index' if len(indices) == 1 else 'indices'} {' and '.join(texts)}"
