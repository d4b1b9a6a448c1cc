"""Which reference record belongs to which target record, and why some have no partner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap.metrics import Difference
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import no_such_tensor
from tensorcap_formats.keys import escape, matches
from tensorcap_formats.records import Record

Status = Literal[
    "identical",
    "match",
    "unjudged",
    "diverged",
    "nonfinite",
    "shape-mismatch",
    "missing-in-target",
    "never-called",
    "not-capturable",
    "unreadable",
    "excluded",
    "missing-in-reference",
]
STATUSES: Final[tuple[Status, ...]] = Status.__args__  # type: ignore[attr-defined] # no public name for it
GREEN: Final[frozenset[Status]] = frozenset({"identical", "match"})


@dataclass(frozen=True, slots=True)
class Pair:
    """One comparison and what became of it.

    Attributes:
        key: Key text of the reference record, or of the target's where there is no other.
        status: See `specs/comparison.md`.
        reference: The trusted record; None where only the target has one.
        target: The record under test; None where it is missing.
        difference: The errors; None where no values were read, so also for two equal digests.
        reason: Why the status is what it is, where that is not plain from it; else "".
    """

    key: str
    status: Status
    reference: Record | None
    target: Record | None
    difference: Difference | None = None
    reason: str = ""

    @property
    def is_compared(self) -> bool:
        """Whether values, or digests of values, were held against each other."""
        return self.status == "identical" or self.difference is not None

    @property
    def is_required(self) -> bool:
        """Whether a reference record stands behind it that nobody excluded."""
        return self.status not in ("excluded", "missing-in-reference")

    @property
    def is_green(self) -> bool:
        """Whether it is identical or a match."""
        return self.status in GREEN


@dataclass(frozen=True, slots=True)
class Selection:
    """What a user narrowed a comparison to, as globs over key texts.

    Attributes:
        only: Compare what fits one of these; everything where it is empty.
        exclude: Leave out what fits one of these.
    """

    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def why_not(self, text: str) -> str:
        """Why a key is left out, or "" if it is not."""
        if self.only and not any(matches(text, pattern) for pattern in self.only):
            return "not among those asked for by --only"
        for pattern in self.exclude:
            if matches(text, pattern):
                return f"by --exclude {pattern}"
        return ""

    def require_hits(self, reference: Archive, target: Archive) -> None:
        """Refuse a pattern in `only` that fits no key of either archive: it is a slip.

        Raises:
            TensorNotFoundError: There is one.
        """
        if not self.only:
            return
        texts = {record.key.text for archive in (reference, target) for record in archive.records}
        for pattern in self.only:
            if not any(matches(text, pattern) for text in texts):
                raise no_such_tensor(str(reference.path), pattern, texts)


def pair_records(reference: Archive, target: Archive, selection: Selection) -> list[Pair]:
    """Pair the records of two archives by equal key text (CMP-1).

    Returns:
        One pair for each reference record, in the reference's order; then those of the target that have
        no partner. Pairs with two sides are `unjudged` as yet.

    Raises:
        TensorNotFoundError: A pattern in `selection.only` fits no key of either archive.
    """
    selection.require_hits(reference, target)
    targets = {record.key.text: record for record in target.records}
    explain = _Absences(target.run)
    pairs = []
    for record in reference.records:
        text = record.key.text
        partner = targets.pop(text, None)
        reason = selection.why_not(text)
        status: Status
        if reason:
            status = "excluded"
        elif partner is not None:
            status = "unjudged"
        else:
            status, reason = explain(record)
        pairs.append(Pair(text, status, record, partner, reason=reason))
    pairs += [
        Pair(text, "missing-in-reference", None, record)
        for text, record in targets.items()
        if not selection.why_not(text)
    ]
    return pairs


class _Absences:
    """What the target says of a record that it does not have (CMP-6)."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        self._points: dict[str, Mapping[str, Any]] = {}
        self._slots: dict[tuple[str, str], Mapping[str, Any]] = {}
        for point in points_of(run):
            for site in spellings(point["site"]):
                if "slots" in point:  # of a site that otherwise was captured
                    self._slots.update(((site, slot), point) for slot in point["slots"])
                else:
                    self._points[site] = point

    def __call__(self, record: Record) -> tuple[Status, str]:
        key = record.key
        point = self._slots.get((key.site, key.slot)) or self._points.get(key.site)
        if point is None:
            return "missing-in-target", ""
        said = str(point.get("reason") or "")
        if point.get("status") == "never-called":
            return "never-called", said or "the target never called this module"
        if point.get("status") == "not-capturable":
            return "not-capturable", said
        if point.get("status") == "excluded":
            return "missing-in-target", said or "the target's capture left it out"
        return "missing-in-target", said


def points_of(run: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The capture points that a run lists, those of a damaged list left out."""
    points = run.get("points")
    for point in points if isinstance(points, list) else ():
        if isinstance(point, Mapping) and isinstance(point.get("site"), str):
            yield point


def spellings(site: str) -> tuple[str, ...]:
    """A site as it is, and as a key spells it."""
    return (site, escape(site))
