"""Compare two archives, pair by pair; what each status means is normative in `specs/comparison.md`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorcap.divergence import Divergence, first_divergence
from tensorcap.judging import judge
from tensorcap.metrics import Tolerance
from tensorcap.pairing import STATUSES, Pair, Selection, Status, pair_records
from tensorcap_formats.archive import Archive

Source = Archive | str | os.PathLike[str]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Side:
    """What a comparison says of one of its two archives.

    Attributes:
        path: The file or folder.
        container: As `Archive.container`.
        records: Count of its records.
        model: Class of the model, "" where unknown.
        dtype: Precision of its weights, "" where unknown.
        compute_dtype: Precision in which it computed, "" where unknown.
        is_ordered: Whether its execution order is known.
        is_complete: Whether the run ended as it should.
        error: What the run ended by, "" for nothing known.
    """

    path: Path
    container: str
    records: int
    model: str
    dtype: str
    compute_dtype: str
    is_ordered: bool
    is_complete: bool
    error: str

    @classmethod
    def of(cls, archive: Archive) -> Side:
        """Describe an archive."""
        run = archive.run
        model, error = run.get("model"), run.get("error")
        if isinstance(error, Mapping):
            error = ": ".join(str(error[part]) for part in ("type", "message") if error.get(part))
        return cls(
            path=archive.path,
            container=archive.container,
            records=len(archive),
            model=str(model.get("class") or "") if isinstance(model, Mapping) else "",
            dtype=str(run.get("dtype") or ""),
            compute_dtype=str(run.get("compute_dtype") or ""),
            is_ordered=archive.is_ordered,
            is_complete=archive.is_complete,
            error=str(error or ""),
        )


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """An argument or a result that is no tensor and differs; only noted, never judged.

    Attributes:
        key: Its key text.
        reference: JSON value of the reference, None also where it has none.
        target: JSON value of the target, None also where it has none.
    """

    key: str
    reference: Any
    target: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two archives compared.

    Attributes:
        reference: The trusted archive.
        target: The archive under test.
        tolerance: What was allowed, or None.
        pairs: All pairs: in execution order of the reference, then records that only the target has.
        divergence: The first pair that is not green, and its module; None if all are.
        value_differences: Arguments and results that are no tensors and differ.
        warnings: What a reader has to know first, a sentence each.
        is_of_archives: False if two records were named, so that it matters to nobody what else there is.
    """

    reference: Side
    target: Side
    tolerance: Tolerance | None
    pairs: Sequence[Pair]
    divergence: Divergence | None
    value_differences: Sequence[ValueDifference]
    warnings: Sequence[str]
    is_of_archives: bool = True

    @property
    def counts(self) -> dict[Status, int]:
        """How many pairs have each status that occurs, in the order of the specification."""
        found = Counter(pair.status for pair in self.pairs)
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def records(self) -> int:
        """Count of all reference records: the denominator."""
        return sum(pair.reference is not None for pair in self.pairs)

    @property
    def compared(self) -> int:
        """Count of reference records whose values, or digests, were held against the target's."""
        return sum(pair.is_compared for pair in self.pairs)

    @property
    def is_green(self) -> bool:
        """Whether something was compared, nothing required is missing, and every required pair is green."""
        return (
            self.compared > 0
            and (not self.is_of_archives or (self.reference.is_complete and self.target.is_complete))
            and all(pair.is_green for pair in self.pairs if pair.is_required)
        )

    @property
    def exit_status(self) -> int:
        """3 if a pair could not be read, else 0 if green and 1 if not (CMP-51)."""
        if any(pair.status == "unreadable" for pair in self.pairs):
            return 3
        return 0 if self.is_green else 1


def compare(
    reference: Source,
    target: Source,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Compare two archives, each record with the one of the same key.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path.
        rtol: Allowed error relative to `|reference|`, no unit; if only `atol` is given, 0.
        atol: Allowed absolute error, in the tensors' own unit; if only `rtol` is given, 0.
        only: Globs; compare only keys that fit one of them.
        exclude: Globs; leave out keys that fit one of them.
        progress: Told the bytes of the reference done so far, and all that will be.

    Returns:
        Every pair with its status; without a tolerance those that are not identical stay `unjudged`.

    Raises:
        UsageError: A tolerance is negative or not finite.
        TensorNotFoundError: A pattern in `only` fits nothing.
        ReadError: One of the archives cannot be opened.
    """
    tolerance = Tolerance.given(rtol, atol)
    selection = Selection(tuple(only), tuple(exclude))
    with _opened(reference) as trusted, _opened(target) as tested:
        pairs = pair_records(trusted, tested, selection)
        return _comparison(trusted, tested, pairs, selection, tolerance, progress)


def compare_records(
    reference: Source,
    reference_key: str,
    target: Source,
    target_key: str,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare one record with another, whatever their keys.

    Args:
        reference: The trusted archive, open or a path.
        reference_key: Key of the trusted record, or a shorter text as `Archive.get` takes it.
        target: The archive under test, open or a path; may be the same one.
        target_key: Key of the record under test.
        rtol: As for `compare`.
        atol: As for `compare`.
        progress: As for `compare`.

    Returns:
        A comparison of one pair, under the reference's key.

    Raises:
        UsageError: A tolerance is negative or not finite.
        TensorNotFoundError: A key fits no record, or several.
        ReadError: One of the archives cannot be opened.
    """
    tolerance = Tolerance.given(rtol, atol)
    with _opened(reference) as trusted, _opened(target) as tested:
        record, partner = trusted.get(reference_key), tested.get(target_key)
        pairs = [Pair(record.key.text, "unjudged", record, partner)]
        return _comparison(trusted, tested, pairs, None, tolerance, progress)


@contextmanager
def _opened(source: Source) -> Iterator[Archive]:
    if isinstance(source, Archive):
        yield source
        return
    from tensorcap_formats.opening import open_archive

    with open_archive(source) as archive:
        yield archive


def _comparison(
    reference: Archive,
    target: Archive,
    pairs: Sequence[Pair],
    selection: Selection | None,
    tolerance: Tolerance | None,
    progress: Progress | None,
) -> Comparison:
    judged = tuple(_judged_in_turn(reference, target, pairs, tolerance, progress))
    return Comparison(
        reference=Side.of(reference),
        target=Side.of(target),
        tolerance=tolerance,
        pairs=judged,
        divergence=first_divergence(reference, judged) if selection else None,
        value_differences=tuple(_value_differences(reference, target, selection)) if selection else (),
        warnings=tuple(_warnings(reference, target)),
        is_of_archives=selection is not None,
    )


def _judged_in_turn(
    reference: Archive,
    target: Archive,
    pairs: Sequence[Pair],
    tolerance: Tolerance | None,
    progress: Progress | None,
) -> Iterator[Pair]:
    sizes = [p.reference.nbytes if p.status == "unjudged" and p.reference else 0 for p in pairs]
    done, total = 0, sum(sizes)
    for pair, size in zip(pairs, sizes, strict=True):
        yield judge(reference, target, pair, tolerance) if pair.status == "unjudged" else pair
        done += size
        if progress is not None and size:
            progress(done, total)


def _value_differences(
    reference: Archive, target: Archive, selection: Selection
) -> Iterator[ValueDifference]:
    for key in {**reference.values, **target.values}:
        ours, theirs = reference.values.get(key), target.values.get(key)
        if (ours != theirs or type(ours) is not type(theirs)) and not selection.why_not(key):
            yield ValueDifference(key, ours, theirs)


def _warnings(reference: Archive, target: Archive) -> Iterator[str]:
    for name, archive in (("reference", reference), ("target", target)):
        if not archive.is_complete:
            error = Side.of(archive).error
            yield f"The {name} is incomplete: its run ended early{f' ({error})' if error else ''}."
    if not reference.is_ordered:
        yield "The reference has no execution order: natural order of names is used instead."
    unlike = _unlike_inputs(reference.run.get("inputs"), target.run.get("inputs"))
    if unlike:
        yield f"The two runs were fed different inputs: {', '.join(unlike)}."


def _unlike_inputs(ours: object, theirs: object) -> list[str]:
    """Inputs of both runs whose hashes differ."""
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return []
    unlike = []
    for key, found in ours.items():
        one, other = _sha256(found), _sha256(theirs.get(key))
        if one and other and one != other:
            unlike.append(str(key))
    return unlike


def _sha256(described: object) -> object:
    return described.get("sha256") if isinstance(described, Mapping) else None
