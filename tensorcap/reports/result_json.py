"""A comparison as a JSON object, the schema of which is `specs/result.schema.json` (RES-1 to RES-6)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from tensorcap.comparison.calibration import Calibration
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.pair import Pair
from tensorcap.metrics.location import ErrorMap
from tensorcap.reports.examination import Examination
from tensorcap.reports.ranking import by_module
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record


def comparison_json(comparison: Comparison, examination: Examination | None = None) -> dict[str, Any]:
    """A comparison and its examination, as values that `json.dumps` takes with `allow_nan=False`."""
    return {**_head(comparison, examination), "pairs": list(_pairs(comparison, examination))}


def json_pieces(comparison: Comparison, examination: Examination | None = None) -> Iterator[str]:
    """The same as text, a pair at a time, so that 100,000 of them never are in memory as text."""
    head = _dumps(_head(comparison, examination))
    yield f'{head[:-1]},"pairs":['
    separator = ""
    for pair in _pairs(comparison, examination):
        yield separator + _dumps(pair)
        separator = ",\n"
    yield "]}\n"


@json_value.register
def _(value: Pair) -> Any:
    return value.key  # all pairs are members of the object itself


@json_value.register
def _(value: ErrorMap) -> Any:
    levels = base64.b64encode(value.levels).decode("ascii")
    return {"rows": value.rows, "columns": value.columns, "levels": levels}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _head(comparison: Comparison, examination: Examination | None) -> dict[str, Any]:
    tolerance, divergence = comparison.tolerance, comparison.divergence
    classes = examination.classes if examination else {}
    return {
        "format": "tensorcap-comparison",
        "version": 1,
        "reference": json_value(comparison.reference),
        "target": json_value(comparison.target),
        "is_of_archives": comparison.is_of_archives,
        "rtol": tolerance.rtol if tolerance else None,
        "atol": tolerance.atol if tolerance else None,
        "thresholds": json_value(comparison.thresholds),
        "calibration": _calibration(comparison.calibration),
        "baseline": json_value(comparison.baseline),
        "mapping": json_value(comparison.mapping),
        "compared": comparison.compared,
        "records": comparison.records,
        "counts": comparison.counts,
        "exit_status": comparison.exit_status,
        "warnings": list(comparison.warnings),
        "preflight": json_value(examination.preflight) if examination else None,
        "first_divergence": {
            "key": divergence.pair.key,
            "status": divergence.pair.status,
            "module": divergence.module,
            "class": divergence.class_name,
            "is_run_input": divergence.is_run_input,
            "explanation": divergence.explanation,
        }
        if divergence
        else None,
        "modules": json_value(by_module(comparison.pairs, classes)),
        "value_differences": json_value(comparison.value_differences),
        "account": json_value(comparison.account),
        "notes": list(examination.notes) if examination else [],
    }


def _calibration(calibration: Calibration | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    return {**calibration.document(), "path": json_value(calibration.path)}


def _pairs(comparison: Comparison, examination: Examination | None) -> Iterator[dict[str, Any]]:
    extra = examination or Examination()
    for pair in comparison.pairs:
        record = pair.reference or pair.target
        yield {
            "key": pair.key,
            "class": extra.classes.get(module_of(record.key.site), "") if record else "",
            "source": extra.sources.get(pair.key, ""),
            "status": pair.status,
            "reason": pair.reason,
            "is_optional": pair.is_optional,
            "reference": _record(pair.reference),
            "target": _record(pair.target),
            "origin": json_value(pair.origin),
            "difference": json_value(pair.difference),
            "findings": json_value(pair.findings),
            "baseline": json_value(pair.baseline),
            "location": json_value(extra.locations.get(pair.key)),
            "logits": json_value(extra.logits.get(pair.key)),
            "routing": json_value(extra.routing.get(pair.key)),
        }


def _record(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "key": record.key.text,
        "dtype": record.dtype.name,
        "shape": list(record.shape),
        "order": record.order,
        "digest": record.digest,
        "stored": record.stored,
        "statistics": json_value(record.statistics),
    }
