"""The weights of two models compared with each other, before either is run on anything."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tensorcap.adapters import adapter_for
from tensorcap.alignment import Link, align
from tensorcap.alignment.names import Rules
from tensorcap.comparison import ABSENT, Comparison, Pair, compare
from tensorcap.diagnosis import Diagnosis, diagnose
from tensorcap.localization.expert_weights import expert_entries
from tensorcap.runs import PartialArchive, is_parameter
from tensorcap.session import capture
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.open import open_archive
from tensorcap_formats.records import Record

_NOT_FOUND: Final = "the target has none of that name, shape or values"
_ONLY_TARGET: Final = "only the target has it"
_PARAMETERS: Final = "*/param.*"


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """The parameters of two models, compared.

    Attributes:
        comparison: Of the parameters alone, by a mapping of their own.
        unlike: Those that were compared and are not the same numbers, the worst first.
        diagnosis: Which kind of mistake the worst one is; None without one, or if its values do not show it.
    """

    comparison: Comparison
    unlike: tuple[Pair, ...]
    diagnosis: Diagnosis | None

    @property
    def not_compared(self) -> Mapping[str, str]:
        """Why a parameter was not compared, by key, of either side."""
        reasons = {}
        for pair in self.comparison.pairs:
            if pair.status in ABSENT or pair.status == "explained":
                reasons[pair.key] = _NOT_FOUND
            elif pair.status == "missing-in-reference":
                reasons[pair.key] = _ONLY_TARGET
            elif not pair.is_compared:
                reasons[pair.key] = pair.reason or pair.status
        return reasons

    @property
    def exit_status(self) -> int:
        """1 if parameters are not the same numbers; what has no counterpart is reported by the runs."""
        return int(bool(self.unlike))

    def to_json(self) -> dict[str, Any]:
        """The member `weights` of `verify.json`, as JSON values."""
        return {
            "records": self.comparison.records,
            "compared": self.comparison.compared,
            "counts": self.comparison.counts,
            "unlike": [pair.key for pair in self.unlike],
            "not_compared": dict(self.not_compared),
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
        }


def compare_weights(
    reference: Archive | Any, target: Any, *, rules: Rules | None = None
) -> WeightComparison | None:
    """Compare the parameters of two models.

    Args:
        reference: The trusted model, or an archive of a run of it.
        target: The model under test.
        rules: Rules for names, which go before those that come with tensorcap.

    Returns:
        None if a side has no parameters.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-")))
        if isinstance(reference, Archive):
            stored = [record for record in reference.records if is_parameter(record.key) and record.stored]
            ours: Archive | None = PartialArchive(reference, stored) if stored else None
        else:
            ours = _capture_parameters(reference, folder / "reference.h5", stack)
        theirs = _capture_parameters(target, folder / "target.h5", stack)
        if ours is None or theirs is None:
            return None
        aligned = align(ours, theirs, rules=rules, by="all")
        known = aligned.alignment
        links = aligned.target.links.values()
        free = _free(ours, links, 0), _free(theirs, links, 1)
        entries = tuple(expert_entries(ours, theirs, free=free))
        if entries:
            aligned = align(ours, theirs, mapping=replace(known, entries=(*known.entries, *entries)))
        comparison = compare(aligned.reference, aligned.target, mapping="none")
        unlike = [pair for pair in comparison.pairs if pair.is_compared and not pair.is_green]
        unlike.sort(key=_error, reverse=True)
        diagnosis = _diagnose(aligned.reference, aligned.target, unlike[0]) if unlike else None
        return WeightComparison(comparison, tuple(unlike), diagnosis)


def _capture_parameters(model: Any, path: Path, stack: ExitStack) -> Archive | None:
    """Write the parameters of a model to an archive; None if it has none."""
    listed = adapter_for(model).describe(model)["modules"]
    if not any(module.get("parameters") for module in listed):
        return None
    with capture(model, path, params=True, only=_PARAMETERS) as run:
        pass
    return stack.enter_context(open_archive(run.path or path))


def _free(archive: Archive, links: Iterable[Link], side: int) -> list[Record]:
    """The records that no link of a mapping takes."""
    used = {record.key for link in links for record in (link.reference, link.target)[side]}
    return [record for record in archive.records if record.key not in used]


def _error(pair: Pair) -> float:
    error = pair.difference.relative_frobenius if pair.difference else None
    return float("inf") if error is None else error


def _diagnose(reference: Archive, target: Archive, pair: Pair) -> Diagnosis | None:
    assert pair.target is not None
    try:
        return diagnose(reference, target, pair.key, target_key=pair.target.key.text)
    except (UsageError, ReadError):  # complex values, or statistics alone
        return None
