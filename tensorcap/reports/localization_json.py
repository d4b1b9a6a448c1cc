"""What a localisation found, as JSON values (LCL-20)."""

from __future__ import annotations

from typing import Any

from tensorcap.localization.suspect import Localization, Suspect
from tensorcap.reports.result_json import json_value


def localization_value(found: Localization) -> dict[str, Any]:
    """Everything but what each module made, and the errors between two runs of the target by key."""
    return {
        "by": found.by,
        "suspects": [suspect_value(one) for one in found.suspects],
        "explained": [{"module": module, "child": child} for module, child in found.explained],
        "changes": json_value(found.changes),
        "nonfinite": None
        if found.nonfinite is None
        else {
            "key": found.nonfinite.key,
            "module": found.nonfinite.module,
            "tensor": json_value(found.nonfinite.tensor),
            "operands": [{**json_value(o), "is_finite": o.is_finite} for o in found.nonfinite.operands],
        },
        "over_precise": [
            {"module": one.module, "class": one.class_name or None, "ratio": json_value(one.ratio)}
            for one in found.over_precise
        ],
        "noise": None
        if found.noise is None
        else {
            "largest": json_value(found.noise.largest),
            "first": found.noise.first or None,
            "module": found.noise.module or None,
        },
        "open": list(found.open),
        "notes": list(found.notes),
    }


def suspect_value(one: Suspect) -> dict[str, Any]:
    """A suspect: its numbers, its reason, what explains it, and all that diagnosing it said."""
    said = one.diagnosis
    return {
        "module": one.module,
        "class": one.class_name or None,
        "key": one.key,
        "by": list(one.by),
        "is_own": one.is_own,
        "status": one.status,
        "findings": json_value(one.findings),
        "own": json_value(one.own),
        "inherited": json_value(one.inherited),
        "total": json_value(one.total),
        "ratio": json_value(one.ratio),
        "noise": json_value(one.noise),
        "cause": one.cause or None,
        "reason": one.reason,
        "diagnosis": None
        if said is None
        else {
            "kind": said.kind,
            "text": said.text,
            "hint": said.hint,
            "before": json_value(said.before),
            "after": json_value(said.after),
        },
        "examined": None if one.examined is None else json_value(one.examined.to_json()),
    }
