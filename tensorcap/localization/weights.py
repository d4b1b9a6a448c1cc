"""The weights of two models compared with each other, before either is run on anything."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap.adapters import adapter_for
from tensorcap.alignment import Entry, Link, align, place_of
from tensorcap.alignment.names import Rules
from tensorcap.comparison import ABSENT, Comparison, Pair, compare
from tensorcap.diagnosis import Diagnosis, diagnose
from tensorcap.localization.expert_weights import expert_entries
from tensorcap.runs import PartialArchive, is_parameter
from tensorcap.session import capture
from tensorcap.wording import name_numbers, name_pattern
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.records import Record

_NOT_FOUND: Final = "the target has none of that name, shape or values"
_ONLY_TARGET: Final = "only the target has it"
_PARAMETERS: Final = "*/param.*"
_LONE: Final = "the only ones of their shape that are left; values agree"
_PARTNERS: Final = "of one name and shape, in modules whose other parameters belong together"
_CLOSE: Final = 2.0**-6  # of bfloat16's rounding and some more
_DIAGNOSED: Final = 3  # names: diagnosing takes longer than all else


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """The parameters of two models, compared.

    Attributes:
        comparison: Of the parameters alone, by a mapping of their own.
        unlike: Those that were compared and are not the same numbers, the worst first.
        diagnoses: Which kind of mistake the worst one of each name is, numbers of layers aside, by key; and
            what explains parameters that alone have no counterpart in their layer.
    """

    comparison: Comparison
    unlike: tuple[Pair, ...]
    diagnoses: Mapping[str, Diagnosis]

    @property
    def diagnosis(self) -> Diagnosis | None:
        """That of the worst one; None without one, or if its values do not show it."""
        return self.diagnoses.get(self.unlike[0].key) if self.unlike else None

    def explain(self, module: str) -> Diagnosis | None:
        """The diagnosis of parameters of a module, whose texts name the parameter; None without one.

        Args:
            module: Its site.
        """
        wrong = {*self.diagnoses, *(pair.key for pair in self.unlike)}
        own = {name_pattern(key) for key in wrong if Key.parse(key).site == module}
        for key, diagnosis in self.diagnoses.items():
            if name_pattern(key) in own and diagnosis.explanations:
                where = f"in its parameter {Key.parse(key).slot.partition('.')[2]} "
                named = tuple(replace(e, text=where + e.text) for e in diagnosis.explanations)
                return replace(diagnosis, explanations=named)
        return None

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
        named = list(_pairs_of_partners(*free, links))
        entries = tuple(Entry((place_of(o),), (place_of(t),), {}, (), "name", _PARTNERS) for o, t in named)
        taken = {record.key for pair in named for record in pair}
        free = _without_keys(free[0], taken), _without_keys(free[1], taken)
        entries += tuple(expert_entries(ours, theirs, free=free))
        lone = list(_lone_pairs(*free))
        equal = [(one, other) for one, other in lone if _is_close(ours.load(one), theirs.load(other))]
        entries += tuple(Entry((place_of(o),), (place_of(t),), {}, (), "values", _LONE) for o, t in equal)
        if entries:
            aligned = align(ours, theirs, mapping=replace(known, entries=(*known.entries, *entries)))
        comparison = compare(aligned.reference, aligned.target, mapping="none")
        unlike = [pair for pair in comparison.pairs if pair.is_compared and not pair.is_green]
        unlike.sort(key=_error, reverse=True)
        diagnoses: dict[str, Diagnosis] = {}
        for pair in _worst_of_each_name(unlike):
            if pair.target is not None:
                _diagnose(diagnoses, aligned.reference, aligned.target, pair.key, pair.target.key.text)
        for one, other in lone:
            if (one, other) not in equal:
                _diagnose(diagnoses, ours, theirs, one.key.text, other.key.text)
        return WeightComparison(comparison, tuple(unlike), diagnoses)


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


def _without_keys(records: Iterable[Record], keys: Collection[Key]) -> list[Record]:
    return [record for record in records if record.key not in keys]


def _pairs_of_partners(
    ours: Iterable[Record], theirs: Iterable[Record], links: Collection[Link]
) -> Iterator[tuple[Record, Record]]:
    """Pair parameters of one name and shape in modules all of whose linked parameters are each other's."""
    partners: list[dict[str, set[str]]] = [{}, {}]
    for link in links:
        sites = {r.key.site for r in link.reference}, {r.key.site for r in link.target}
        for side in (0, 1):
            for site in sites[side]:
                partners[side].setdefault(site, set()).update(sites[1 - side])
    left = {(record.key.site, record.key.slot): record for record in theirs}
    for record in ours:
        others = partners[0].get(record.key.site, set())
        other = next((left.get((site, record.key.slot)) for site in others), None)
        if len(others) != 1 or other is None or other.shape != record.shape:
            continue
        if partners[1].get(other.key.site) == {record.key.site}:
            yield record, other


def _error(pair: Pair) -> float:
    error = pair.difference.relative_frobenius if pair.difference else None
    return float("inf") if error is None else error


def _worst_of_each_name(unlike: Iterable[Pair]) -> list[Pair]:
    """The first of the parameters that differ in numbers of their names alone, as of layers; a few."""
    first: dict[str, Pair] = {}
    for pair in unlike:
        first.setdefault(name_pattern(pair.key), pair)
    return [*first.values()][:_DIAGNOSED]


def _lone_pairs(ours: Iterable[Record], theirs: Iterable[Record]) -> Iterator[tuple[Record, Record]]:
    """Pair parameters that are the only ones left of their shape on both sides, in layers of one number."""
    sides: list[dict[tuple[object, ...], list[Record]]] = [{}, {}]
    for by_place, records in zip(sides, (ours, theirs), strict=True):
        for record in records:
            by_place.setdefault((*name_numbers(record.key.text), record.shape), []).append(record)
    for place, records in sides[0].items():
        others = sides[1].get(place, ())
        if len(records) == len(others) == 1:
            yield records[0], others[0]


def _is_close(one: Array, other: Array) -> bool:
    """Whether values are the same to the rounding of bfloat16."""
    wide = one.astype(np.float32)
    return bool(np.linalg.norm(wide - other.astype(np.float32)) <= _CLOSE * np.linalg.norm(wide))


def _diagnose(
    diagnoses: dict[str, Diagnosis], reference: Archive, target: Archive, key: str, target_key: str
) -> None:
    """Add the diagnosis of a parameter, if there is one."""
    with suppress(UsageError, ReadError):  # complex values, or statistics alone
        diagnoses[key] = diagnose(reference, target, key, target_key=target_key)
