"""Find where two archives part by reading few of their tensors: a binary search in execution order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap.alignment import NO_MAPPING, MappingSource, sides
from tensorcap.comparison import (
    ABSENT,
    Comparison,
    Divergence,
    Pair,
    Selection,
    compare,
    judge_by_metadata,
    paired,
)
from tensorcap.runs import is_result
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.open import Source, opened_both
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.records import Record

How = Literal["search", "scan", "index"]

_SPOT_CHECKS: Final = 2  # results that are read besides, of those that should be green and of the others


@dataclass(frozen=True, slots=True)
class Bisection:
    """Where two archives part, and what was read to know it.

    Attributes:
        results: Count of results that both sides have, in execution order: what was searched.
        first: The first result that is not green; None if all that were read are.
        last_green: The result before it; None if there is none.
        divergence: The first divergence of the module that made it, with its inputs; None if nothing of it
            is red.
        how: `search` for a binary search that held; `scan` if results do not stay bad once they are, so
            that all of them up to the first bad one were read; `index` if recorded digests settled it.
        read: Key texts of the results and inputs that were read, in that order.
        against: The first result that the search took for good or bad and is not; "" if there is none.
        lacking: Key texts of results of the reference that the target lacks, which nothing explains.
        incomplete: Which of `reference` and `target` is a run that ended early.
    """

    results: int
    first: Pair | None
    last_green: Pair | None
    divergence: Divergence | None
    how: How
    read: tuple[str, ...]
    against: str
    lacking: tuple[str, ...]
    incomplete: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """0 if all results that were read are green, none is lacking, and both runs are whole (BIS-5)."""
        return int(self.first is not None or bool(self.lacking or self.incomplete))

    def to_json(self) -> dict[str, Any]:
        """The members that `tcap bisect --json` prints, as JSON values."""
        first, divergence = self.first, self.divergence
        return {
            "format": "tensorcap-bisection",
            "version": 1,
            "results": self.results,
            "first": first.key if first else None,
            "status": first.status if first else None,
            "last_green": self.last_green.key if self.last_green else None,
            "module": divergence.module if divergence else None,
            "class": divergence.class_name if divergence else None,
            "how": self.how,
            "against": self.against or None,
            "read": list(self.read),
            "lacking": list(self.lacking),
            "incomplete": list(self.incomplete),
            "exit_status": self.exit_status,
        }


def bisect_archives(
    reference: Source,
    target: Source,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    compute_dtype: str | None = None,
    mapping: MappingSource | None = None,
    progress: Progress | None = None,
) -> Bisection:
    """Find the first result of a module that is not green, reading about log2(n) tensors of each side.

    Results whose recorded digests are equal count as identical without being read. Of the others, each that
    is looked at is judged as `compare` judges it alone, without its inputs: by the tolerance given, else by
    how large an error can be at its place (specs/bisection.md).

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path.
        rtol: As for `compare`.
        atol: As for `compare`.
        compute_dtype: As for `compare`.
        mapping: As for `compare`.
        progress: Shows which result is read, and how many were.

    Raises:
        UsageError: There is no order of execution, or no result that both sides have.
        ReadError: An archive, or a tensor, cannot be read.
    """
    with opened_both(reference, target) as (original, own):
        trusted, tested = sides(original, own, mapping)
        if not trusted.is_ordered:
            raise UsageError(
                f"{trusted.path}: has no order of execution, expected a captured run",
                hint="Compare all tensors instead: tcap compare.",
            )
        options: dict[str, Any] = {"rtol": rtol, "atol": atol, "compute_dtype": compute_dtype}
        return _Search(trusted, tested, options, progress or Silent()).run()


class _Search:
    """One search under way.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        options: Arguments of `compare`.
        progress: Shows which result is read, and how many were.
    """

    def __init__(
        self, reference: Archive, target: Archive, options: Mapping[str, Any], progress: Progress
    ) -> None:
        self._reference = reference
        self._target = target
        self._options = options
        self._progress = progress
        self._read: list[str] = []
        self._known: dict[int, Pair] = {}
        pairs = paired(reference, target, Selection())
        results = [p for p in pairs if p.reference and p.target and _is_result(p.reference)]
        if not results:
            raise UsageError(
                f"{reference.path} and {target.path}: have no results of modules in common",
                hint="tcap align tells what belongs together.",
            )
        self._lacking = tuple(
            p.key
            for p in pairs
            if p.reference and p.is_required and p.status in ABSENT and _is_result(p.reference)
        )
        self._pairs = sorted(results, key=lambda p: p.reference.order if p.reference else 0)
        for i, pair in enumerate(self._pairs):
            settled = judge_by_metadata(reference, target, pair, trust_digests=True)
            if settled.status != "unjudged":
                self._known[i] = settled

    def run(self) -> Bisection:
        """Find the first bad result.

        1. Results whose digests are equal are green without being read.
        2. A binary search between the first unknown result and the last finds where bad ones begin, if
           results stay bad once they are.
        3. Two results on each side of that place are read to check it. If one speaks against it, all results
           are read in order up to the first bad one.
        4. The module that made the first bad result is compared as a whole.
        """
        last = len(self._pairs) - 1
        unknown = [i for i in range(len(self._pairs)) if not self._is_settled_green(i)]
        if not unknown:
            return self._result(None, "index")
        low, high = (unknown[0] - 1, last) if self._is_bad(last) else (last, last + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_bad(middle) else (middle, high)
        against = self._find_contradiction(low, high, last)
        if against:
            high = next((i for i in range(unknown[0], last + 1) if self._is_bad(i)), last + 1)
        how: How = "index" if not self._read else "scan" if against else "search"
        return self._result(high if high <= last else None, how, against)

    def _result(self, at: int | None, how: How, against: str = "") -> Bisection:
        """Compare the call that made the first bad result, if there is one, and sum up."""
        first = None if at is None else self._known[at]
        return Bisection(
            results=len(self._pairs),
            first=first,
            last_green=self._known.get(at - 1) if at else None,
            divergence=None if first is None else self._compare_call(first),
            how=how,
            read=tuple(self._read),
            against=against,
            lacking=self._lacking,
            incomplete=tuple(
                side
                for side, archive in (("reference", self._reference), ("target", self._target))
                if not archive.is_complete
            ),
        )

    def _find_contradiction(self, low: int, high: int, last: int) -> str:
        """Find a result that should be green or bad by the search, and is not; "" if none of a few is."""
        for i in _between(0, low, _SPOT_CHECKS):
            if self._is_bad(i):
                return self._pairs[i].key
        for i in _between(high, last, _SPOT_CHECKS):
            if not self._is_bad(i):
                return self._pairs[i].key
        return ""

    def _is_settled_green(self, i: int) -> bool:
        return i in self._known and self._known[i].is_green

    def _is_bad(self, i: int) -> bool:
        if i not in self._known:
            key = self._pairs[i].key
            self._note(key)
            pairs = self._compare_only(key).pairs
            self._known[i] = next(pair for pair in pairs if pair.key == key)
            if self._known[i].status == "unreadable":
                raise ReadError(self._known[i].reason)
        return not self._known[i].is_green

    def _note(self, key: str) -> None:
        """Keep account of a tensor that is read."""
        self._read.append(key)
        self._progress.stage(f"reading {key}")
        self._progress.advance(len(self._read), None)

    def _compare_call(self, first: Pair) -> Divergence | None:
        """Compare the arguments and results of the call that made a result."""
        assert first.reference is not None
        call = first.reference.key.where
        keys = [
            record.key.text
            for record in self._reference.records
            if record.key.where == call and record.key.slot.partition(".")[0] in ("input", "output")
        ]
        for key in keys:
            if key not in self._read:
                self._note(key)
        return self._compare_only(*keys).divergence

    def _compare_only(self, *keys: str) -> Comparison:
        only = tuple(map(_literal, keys))
        return compare(self._reference, self._target, only=only, mapping=NO_MAPPING, **self._options)


def _is_result(record: Record) -> bool:
    return record.key.is_bare or (is_result(record.key) and record.dtype.kind != "bool")


def _literal(key: str) -> str:
    """A glob that fits one key."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in key)


def _between(start: int, stop: int, count: int) -> Iterator[int]:
    """A few numbers evenly spread between two others, without these."""
    inner = (start + (stop - start) * (i + 1) // (count + 1) for i in range(count))
    yield from dict.fromkeys(i for i in inner if start < i < stop)
