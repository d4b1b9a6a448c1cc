"""Comparisons kept in files, read again, and judged by another tolerance without the tensors.

What a file holds, and what can be decided from it, is normative in `specs/result.md`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

import numpy as np

from tensorcap.comparison import (
    GREEN,
    LETTERS,
    Calibration,
    Comparison,
    Divergence,
    Examination,
    ExchangedOperations,
    Finding,
    KeyThresholds,
    Pair,
    RunSummary,
    Status,
    Thresholds,
    first_divergence,
    json_pieces,
)
from tensorcap.comparison.preflight import Preflight
from tensorcap.metrics import Difference, Histogram, Location, LogitDifference, RoutingDifference, Tolerance
from tensorcap.reports.json_decoder import decode_as, json_converter
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, DType, dtype
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NewerVersionError,
    ReadError,
    TensorcapError,
)
from tensorcap_formats.keys import Key, module_of, module_path
from tensorcap_formats.output_path import publish_text
from tensorcap_formats.records import Record

_NOT_KEPT: Final = ("history", "is_excused")  # of pairs: what stages of a comparison tell each other
VERSION: Final = 1
RESULT_BEGINNING: Final = '{"format":"tensorcap-comparison"'
_HINTS: Final = get_type_hints(Comparison)
_AS_THEY_ARE: Final = (  # members of a comparison that JSON has under the same names
    "reference",
    "target",
    "value_differences",
    "warnings",
    "is_of_archives",
    "thresholds",
    "calibration",
    "baseline",
    "mapping",
)
_WORST_FIRST: Final[tuple[Status, ...]] = ("diverged", "unjudged", "match")
_NAMES: Final = {letter: name for name, letter in LETTERS.items()}


@dataclass(frozen=True, slots=True)
class Result:
    """A comparison that was kept.

    Attributes:
        comparison: The comparison.
        examination: What was examined besides.
    """

    comparison: Comparison
    examination: Examination


def save_result(
    path: str | os.PathLike[str], comparison: Comparison, examination: Examination | None = None
) -> None:
    """Write a comparison to a file; one that was there is replaced once the new one is whole.

    Raises:
        WriteError: Something else than a comparison is there, or it cannot be written.
    """
    with publish_text(path, beginning=RESULT_BEGINNING) as file:
        file.writelines(json_pieces(comparison, examination))


def load_result(path: str | os.PathLike[str]) -> Result:
    """Read a comparison that was saved, or printed by `tcap compare --json`.

    Raises:
        ReadError: There is no such file, or it is no saved comparison.
    """
    path = Path(path)
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        raise CorruptArchiveError(f"{path}: is no JSON, expected a saved comparison (RES-1)") from None
    if not isinstance(document, dict) or document.get("format") != "tensorcap-comparison":
        raise CorruptArchiveError(f"{path}: is no saved comparison (RES-1)")
    if not isinstance(document.get("version"), int) or document["version"] > VERSION:
        raise NewerVersionError(
            f"{path}: has version {document.get('version')!r}, expected at most {VERSION}"
        )
    try:
        return _result(document)
    except (KeyError, TypeError, ValueError, AttributeError, TensorcapError) as error:
        raise CorruptArchiveError(
            f"{path}: contradicts the schema of a saved comparison: {error} (RES-2)"
        ) from None


def judge_again(result: Result, thresholds: Thresholds) -> Comparison:
    """Judge a saved comparison by other thresholds (RES-10 to RES-14).

    Args:
        result: What was saved.
        thresholds: What is allowed now; a pair for which nothing is given keeps its status.

    Returns:
        The comparison; pairs of which the saved metrics do not tell are `unjudged`, with a reason.

    Raises:
        UsageError: A threshold matches no key.
    """
    comparison = result.comparison
    thresholds.require_hits(pair.key for pair in comparison.pairs)
    logits = result.examination.logits
    pairs = tuple(
        _judge_pair(pair, thresholds.limits_for(pair.key), logits.get(pair.key)) for pair in comparison.pairs
    )
    divergence = None
    if comparison.is_of_archives:
        divergence = first_divergence(_Remembered(comparison, result.examination), pairs)
    values = tuple(v.judged(thresholds.limits_for(v.key).tolerance) for v in comparison.value_differences)
    is_new = thresholds.default is not None or thresholds.path is not None
    return replace(
        comparison,
        tolerance=comparison.tolerance if thresholds.default is None else thresholds.default,
        thresholds=thresholds.path if is_new else comparison.thresholds,
        pairs=pairs,
        divergence=divergence,
        value_differences=values,
    )


def _judge_pair(pair: Pair, limits: KeyThresholds, logits: LogitDifference | None) -> Pair:
    """Judge the saved metrics of a pair by the limits of its key, if there are any."""
    d = pair.difference
    if not limits or d is None or d.same_bits or d.mask_mismatches or pair.status == "excluded":
        return pair
    if any(finding.test == "remark" for finding in pair.findings):  # whatever the tolerance (CMP-17)
        return pair
    if not d.unequal:
        return replace(pair, status="match", reason="", findings=())
    findings = limits.judge_metrics(d, logits)
    if limits.tolerance is not None:
        findings.insert(0, _by_tolerance(d, limits.tolerance))
    status = next(s for s in _WORST_FIRST if any(f.status == s for f in findings))
    if pair.status == "explained" and status not in GREEN:
        return pair  # what explains it does, or is red itself
    return replace(
        pair,
        status=status,
        reason="the saved metrics do not tell" if status == "unjudged" else "",
        difference=replace(d, mismatches=_outside(findings), mismatch_index=None),
        findings=tuple(findings),
    )


def _outside(findings: Sequence[Finding]) -> int | None:
    """How many elements are outside the tolerance; None if that is not known."""
    for finding in findings:
        if finding.test == "tolerance" and finding.value == finding.value:
            return int(finding.value)
    return None


def _by_tolerance(d: Difference, tolerance: Tolerance) -> Finding:
    """Hold the saved metrics against a tolerance: the worst errors bound all others."""
    rtol, atol = tolerance.rtol, tolerance.atol
    allowed = f"rtol {rtol:g}, atol {atol:g}"
    if (d.needed_atol is not None and d.needed_atol <= atol) or (
        d.needed_rtol is not None and d.needed_rtol <= rtol
    ):
        return Finding("tolerance", 0, 0, "match", f"0 of {d.measured} elements are outside {allowed}")
    at_worst = atol + (rtol * abs(d.max_abs_reference or 0) if rtol else 0.0)
    if not rtol or not atol or (d.max_abs is not None and d.max_abs > at_worst):
        least, most = _bounds(d, tolerance)
        count = str(least) if least == most else f"{least} to {most}"
        text = f"{count} of {d.measured} elements are outside {allowed}"
        return Finding("tolerance", least if least == most else math.nan, 0, "diverged", text)
    text = (
        f"whether {allowed} passes cannot be told without the tensors: rtol {_text(d.needed_rtol)} alone, or "
        f"atol {_text(d.needed_atol)} alone, would"
    )
    return Finding("tolerance", math.nan, 0, "unjudged", text)


def _bounds(d: Difference, tolerance: Tolerance) -> tuple[int, int]:
    """The least and the most elements outside, as the histogram of errors tells (MET-28)."""
    if tolerance.rtol:  # an element may be larger than any bound that is known
        above = _above(d, tolerance.atol, at_least=False)
        return 1, max(1, min(d.unequal, above))
    return max(1, _above(d, tolerance.atol, at_least=True)), _above(d, tolerance.atol, at_least=False)


def _above(d: Difference, atol: float, *, at_least: bool) -> int:
    """Errors in bins that begin above an error, or in those that end above it."""
    return sum(count for number, count in d.errors if number and _edge(number + (not at_least)) > atol)


def _histogram(entries: Any) -> Histogram:
    pairs = decode_as(tuple[tuple[int, int], ...], entries)
    if not all(0 <= number < 2**16 and 0 <= count < 2**63 for number, count in pairs):
        raise ValueError("a histogram has a bin beyond 65,535, or a count beyond 2**63")
    return Histogram([number for number, _ in pairs], [count for _, count in pairs])


def _edge(number: int) -> float:
    """Where a bin of the histogram begins: its number is the bits of a float64 shifted right by 50."""
    return float(np.int64(number << 50).view(np.float64))


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


class _Remembered(Archive):
    """What a saved comparison knows of its reference: keys in order and classes of modules, no values."""

    def __init__(self, comparison: Comparison, examination: Examination) -> None:
        side = comparison.reference
        super().__init__(
            side.path,
            side.container,
            [pair.reference for pair in comparison.pairs if pair.reference is not None],
            is_ordered=side.is_ordered,
            is_complete=side.is_complete,
            run={"modules": [{"path": module_path(s), "class": c} for s, c in examination.classes.items()]},
        )

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        raise ReadError(f"{self.path}: {record.key.text}: a saved comparison has no values")

    def close(self) -> None:
        """There is nothing to close."""


def _result(document: Mapping[str, Any]) -> Result:
    converter = json_converter()
    converter.register_structure_hook(Key, lambda text, _: Key.parse(text))
    converter.register_structure_hook(DType, lambda name, _: dtype(name))
    converter.register_structure_hook(Calibration, lambda members, _: _calibration(members))
    converter.register_structure_hook(Finding, lambda members, _: _finding(members))
    converter.register_structure_hook(Histogram, lambda entries, _: _histogram(entries))
    entries: Sequence[Mapping[str, Any]] = document["pairs"]
    pairs = tuple(decode_as(Pair, _in_row(entry, row), converter) for row, entry in enumerate(entries))
    by_key = {pair.key: pair for pair in pairs}
    converter.register_structure_hook(Pair, lambda key, _: by_key[key])  # as a member of something else
    divergence, account = document["first_divergence"], document["account"]
    comparison = Comparison(
        **{name: decode_as(_HINTS[name], document[name], converter) for name in _AS_THEY_ARE},
        tolerance=None
        if document["rtol"] is None
        else Tolerance(decode_as(float, document["rtol"]), decode_as(float, document["atol"])),
        pairs=pairs,
        account=None if account is None else decode_as(RunSummary, _members(RunSummary, account), converter),
        divergence=None
        if divergence is None
        else Divergence(
            by_key[divergence["key"]],
            divergence["module"],
            divergence["class"],
            divergence["is_run_input"],
            divergence["explanation"],
        ),
    )
    classes = {
        module_of(pair.reference.key.site): decode_as(str, entry["class"])
        for pair, entry in zip(pairs, entries, strict=True)
        if pair.reference and entry["class"]
    }
    return Result(
        comparison,
        Examination(
            preflight=decode_as(Preflight | None, document["preflight"]),
            classes=classes,
            sources={entry["key"]: entry["source"] for entry in entries if entry.get("source")},
            locations=dict(_parts(entries, "location", Location)),
            logits=dict(_parts(entries, "logits", LogitDifference)),
            routing=dict(_parts(entries, "routing", RoutingDifference)),
            exchanged=decode_as(tuple[ExchangedOperations, ...], document.get("exchanged_operations", [])),
            notes=decode_as(tuple[str, ...], document["notes"]),
        ),
    )


def _in_row(entry: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The members of a pair, its records in the row of the pair."""
    members = _members(Pair, entry)
    for side in ("reference", "target"):
        if members[side] is not None:
            members[side] = {**members[side], "row": row}
    return members


def _finding(members: Mapping[str, Any]) -> Finding:
    """Read a finding under the name of its test; results of before there were names have a letter alone."""
    name = members["name"] if "name" in members else _NAMES.get(members["test"], members["test"])
    finding: Finding = decode_as(Finding, {**members, "test": name})
    return finding


def _members(kind: type[RunSummary | Pair], entry: Mapping[str, Any]) -> dict[str, Any]:
    """All members, since none may lack (RES-4), even if the dataclass has a default, but those not kept."""
    return {field.name: entry[field.name] for field in fields(kind) if field.name not in _NOT_KEPT}


def _calibration(document: Mapping[str, Any]) -> Calibration:
    path = document["path"]
    return Calibration.of(document, path=None if path is None else Path(path))


def _parts(entries: Sequence[Mapping[str, Any]], name: str, kind: Any) -> Iterator[tuple[str, Any]]:
    for entry in entries:
        if entry[name] is not None:
            yield entry["key"], decode_as(kind, entry[name])
