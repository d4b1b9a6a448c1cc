"""A comparison as a JSON object, the schema of which is in `specs/comparison.md` (CMP-60 to CMP-62)."""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from typing import Any

from tensorcap.comparison import Comparison, Side
from tensorcap.pairing import Pair
from tensorcap_formats.records import Record


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Everything that a comparison found, as values that `json.dumps` takes with `allow_nan=False`."""
    tolerance, divergence = comparison.tolerance, comparison.divergence
    return {
        "format": "tensorcap-comparison",
        "version": 1,
        "reference": _side(comparison.reference),
        "target": _side(comparison.target),
        "rtol": tolerance.rtol if tolerance else None,
        "atol": tolerance.atol if tolerance else None,
        "compared": comparison.compared,
        "records": comparison.records,
        "counts": comparison.counts,
        "exit_status": comparison.exit_status,
        "warnings": list(comparison.warnings),
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
        "value_differences": json_value(comparison.value_differences),
        "pairs": [_pair(pair) for pair in comparison.pairs],
    }


def json_value(value: object) -> Any:
    """A value with dataclasses as objects, and with the numbers that JSON has not as strings or lists.

    Example:
        >>> json_value({"psnr": float("inf"), "at": (1, 2), "value": 1 - 2j})
        {'psnr': 'inf', 'at': [1, 2], 'value': [1.0, -2.0]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return [json_value(value.real), json_value(value.imag)]
    if is_dataclass(value):
        return {name: json_value(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


def _side(side: Side) -> dict[str, Any]:
    return {**json_value(side), "path": str(side.path)}


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "key": pair.key,
        "status": pair.status,
        "reason": pair.reason,
        "reference": _record(pair.reference),
        "target": _record(pair.target),
        "difference": json_value(pair.difference),
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
        "statistics": json_value(record.statistics),
    }
