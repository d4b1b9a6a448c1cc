"""Pairs of a run of several ranks: which rank an error lies with, and what ranks hold unlike (RNK-30 to RNK-32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.comparison.pair import SEVERITY, Decision, Finding, Pair, decide
from tensorcap.metrics import error_along
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.ranks import MeshRule, RuleBook
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RankProblem

RANK_TESTS: Final = ("unequal_copies", "unmerged", "rank_part")
_RED: Final = ("suspect", "diverged", "nonfinite")
_LOOKED_AT: Final = 32  # pairs, the first in execution order: those after them have inherited their errors
_MOST: Final = 0.9  # of the squared error, that a rank's part holds which is named
_ALL: Final = 0.999  # and more is all of it: what is left is rounding, squared


def judge_ranks(reference: Archive, target: Archive, pairs: Sequence[Pair]) -> list[Pair]:
    """Judge what the ranks of the target hold unlike, and find the ranks that errors lie with.

    1. Ranks that should hold the same and do not: `diverged`, whatever the first of them holds.
    2. A tensor of one rank that no rule joins is not the whole one: not green.
    3. Of the first red pairs, the share of the squared error in each rank's part. If one part has nearly all
       of it, and is not nearly all of the tensor, the rank is named.

    Args:
        reference: The trusted archive.
        target: The archive under test, perhaps under the reference's keys.
        pairs: Their pairs, judged.

    Returns:
        All pairs in their order.
    """
    info = target.info.ranks
    if info is None or not info.is_merged:
        return list(pairs)
    problems: dict[str, list[RankProblem]] = {}
    for problem in info.problems:
        problems.setdefault(problem.key, []).append(problem)
    book, left = RuleBook(info), _LOOKED_AT
    judged = []
    for pair in pairs:
        source = _source(target, pair.target)
        if source is not None and pair.reference is not None and pair.status != "excluded":
            text = source.key.text
            pair = _with_problems(pair, problems.get(text, ()))
            if (
                pair.status in _RED
                and pair.difference is not None
                and left
                and source.shape == pair.reference.shape
            ):
                part = _rank_part(reference, target, pair, book, text)
                left -= 1
                if part is not None:
                    pair = decide(pair, Decision("ranks", pair.status, pair.reason, (*pair.findings, part)))
        judged.append(pair)
    return judged


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


def _with_problems(pair: Pair, problems: Sequence[RankProblem]) -> Pair:
    for problem in problems:
        if problem.kind == "shape":
            reason = "; ".join(filter(None, (pair.reason, problem.text)))
            status = "suspect" if pair.is_green else pair.status
            pair = decide(pair, Decision("ranks", status, reason, pair.findings))
            continue
        test = "unequal_copies" if problem.kind == "unequal" else "unmerged"
        finding = Finding(test, 1, 0, "diverged" if problem.kind == "unequal" else "suspect", problem.text)
        status = max(pair.status, finding.status, key=SEVERITY.index)
        pair = decide(pair, Decision("ranks", status, pair.reason, (finding, *pair.findings)))
    return pair


def _rank_part(reference: Archive, target: Archive, pair: Pair, book: RuleBook, text: str) -> Finding | None:
    """The rank whose part holds nearly all of the error; None if there is none."""
    entry = book.find(text)
    assert pair.reference is not None
    assert pair.target is not None
    if entry is None or not entry.sizes:
        return None
    ndim = len(pair.reference.shape)
    for name, sizes in entry.sizes.items():
        try:
            axis = int(name)
            rule = MeshRule.parse(entry.rule, entry.mesh or None).over(len(sizes))
            owners = rule.owners(axis, ndim, sizes)
            sums = error_along(
                (reference, pair.reference), (target, pair.target), axis, masks=pair.status == "nonfinite"
            )
        except (UsageError, ValueError, TypeError, OSError):  # metadata that contradict the tensor
            continue
        total = 0.0 if sums is None else float(sums.sum())
        if sums is None or len(sums) != len(owners) or not total > 0:
            continue
        shares = np.bincount(owners, sums / total, len(sizes))
        most = int(shares.argmax())
        if shares[most] < _MOST or np.count_nonzero(owners == most) > _MOST * len(owners):
            continue
        rank = rule.ranks[most] if rule.ranks else most
        share = "all of it" if shares[most] > _ALL else f"{100 * shares[most]:.3g} % of it"
        what = f"{share} in rank {rank}'s part: {_ranges(np.flatnonzero(owners == most))} of axis {axis}"
        return Finding("rank_part", float(shares[most]), _MOST, "unjudged", what)
    return None


def _ranges(indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """Runs of indices as a text: `indices 0 to 31 and 64 to 95`."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{'index' if len(indices) == 1 else 'indices'} {' and '.join(texts)}"
