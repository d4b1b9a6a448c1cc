"""The weights of two models compared with each other, before either is run on anything."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap.adapters import adapter_for
from tensorcap.alignment import Entry, Link, align, place_of
from tensorcap.alignment.names import Rules, are_exchanged
from tensorcap.comparison import ABSENT, Comparison, Pair, compare
from tensorcap.diagnosis import FAMILIES, Diagnosis, diagnose
from tensorcap.diagnosis.diagnosis import LIMIT
from tensorcap.localization.expert_weights import expert_entries
from tensorcap.runs import PartialArchive, is_parameter
from tensorcap.session import capture
from tensorcap.wording import name_numbers, name_pattern, some
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.keys import Key, unescape
from tensorcap_formats.open import open_archive
from tensorcap_formats.records import Record

_NOT_FOUND: Final = "the target has none of that name, shape or values"
_ONLY_TARGET: Final = "only the target has it"
_PARAMETERS: Final = "*/param.*"
_LONE: Final = "the only ones of their shape that are left; values agree"
_PARTNERS: Final = "of one name and shape, in modules whose other parameters belong together"
_CLOSE: Final = 2.0**-6  # of bfloat16's rounding and some more
_DIAGNOSED: Final = 3  # names: diagnosing takes longer than all else
_MOST: Final = 1 << 27  # elements of others of these names, by the few hypotheses that explain the worst


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """The parameters of two models, compared.

    Attributes:
        comparison: Of the parameters alone, by a mapping of their own.
        unlike: Those that were compared and are not the same numbers, the worst first.
        diagnoses: What explains them, and parameters that alone have no counterpart in their layer, by key:
            of a few names, and of so many as a bound on the work allows.
        exchanged: The module of the target whose parameters are those of a module of the reference, by its
            site, though their names call one the query, key or value and the other another of these.
    """

    comparison: Comparison
    unlike: tuple[Pair, ...]
    diagnoses: Mapping[str, Diagnosis]
    exchanged: Mapping[str, str] = field(default_factory=dict)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """That of the worst one; None without one, or if its values do not show it."""
        return self.diagnoses.get(self.unlike[0].key) if self.unlike else None

    def explain(self, module: str) -> Diagnosis | None:
        """The diagnosis of a parameter of a module, whose texts name the parameter; None without one.

        Args:
            module: Its site.
        """
        for key, diagnosis in self.diagnoses.items():
            if Key.parse(key).site == module and diagnosis.explanations:
                where = f"in its parameter {unescape(Key.parse(key).slot.partition('.')[2])} "
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
    def exchanged_text(self) -> str:
        """Which modules of the target have the weights of one that is called otherwise; "" if none have."""
        return some([f"{theirs} has those of {ours}" for ours, theirs in self.exchanged.items()])

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
            "exchanged": dict(self.exchanged),
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
        lone = [(_distance(ours.load(o), theirs.load(t)), o, t) for o, t in _lone_pairs(*free)]
        equal = [(one, other) for error, one, other in lone if error <= _CLOSE]
        entries += tuple(Entry((place_of(o),), (place_of(t),), {}, (), "values", _LONE) for o, t in equal)
        if entries:
            aligned = align(ours, theirs, mapping=replace(known, entries=(*known.entries, *entries)))
        comparison = compare(aligned.reference, aligned.target, mapping="none")
        unlike = [pair for pair in comparison.pairs if pair.is_compared and not pair.is_green]
        unlike.sort(key=_error, reverse=True)
        differing = [(pair.reference, pair.target) for pair in unlike if pair.reference and pair.target]
        lone.sort(key=lambda entry: entry[0], reverse=True)
        others = [(one, other) for error, one, other in lone if error > _CLOSE]
        diagnoses = {
            **_diagnose_names(aligned.reference, aligned.target, differing),
            **_diagnose_names(ours, theirs, others),
        }
        return WeightComparison(comparison, tuple(unlike), diagnoses, _exchanged(links))


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


def _exchanged(links: Iterable[Link]) -> dict[str, str]:
    """Projections of the target, by those of the reference that have their weights, whose names differ."""
    single = [link for link in links if len(link.reference) == len(link.target) == 1]
    sites = [(link.reference[0].key.site, link.target[0].key.site) for link in single]
    return {ours: theirs for ours, theirs in sites if are_exchanged(ours, theirs)}


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
    return math.inf if error is None else error


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


def _distance(one: Array, other: Array) -> float:
    """The relative Frobenius error of one tensor against another, no unit; infinite if it is not known."""
    wide = one.astype(np.float32)
    size, apart = float(np.linalg.norm(wide)), float(np.linalg.norm(wide - other.astype(np.float32)))
    error = apart / size if size else apart and math.inf
    return math.inf if math.isnan(error) else error


def _diagnose_names(
    reference: Archive, target: Archive, pairs: Iterable[tuple[Record, Record]]
) -> dict[str, Diagnosis]:
    """Diagnose parameters, the worst first, by key.

    1. Names are the same but for numbers, as of layers. Of the first few the worst parameter is diagnosed by
       all hypotheses.
    2. The others of a name are diagnosed by hypotheses of the families that explain the worst one: what holds
       of one layer need not of another.
    3. No more is diagnosed when so many elements were looked at.
    """
    of_name: dict[str, list[tuple[Record, Record]]] = {}
    for one, other in pairs:
        of_name.setdefault(name_pattern(one.key.text), []).append((one, other))
    few = [*of_name.values()][:_DIAGNOSED]
    found = {alike[0][0].key.text: _diagnose(reference, target, *alike[0]) for alike in few}
    elements = 0
    for worst, *rest in few:
        diagnosis = found[worst[0].key.text]
        families = set() if diagnosis is None else set(diagnosis.families)
        for one, other in rest if families else ():
            elements += min(one.size, LIMIT)
            if elements > _MOST:
                break
            without = frozenset(family.name for family in FAMILIES if family.name not in families)
            found[one.key.text] = _diagnose(reference, target, one, other, without=without)
    return {key: diagnosis for key, diagnosis in found.items() if diagnosis is not None}


def _diagnose(
    reference: Archive, target: Archive, one: Record, other: Record, *, without: frozenset[str] = frozenset()
) -> Diagnosis | None:
    """Diagnose a parameter; None of complex values, and of statistics alone."""
    with suppress(UsageError, ReadError):
        return diagnose(reference, target, one.key.text, target_key=other.key.text, without=without)
    return None
