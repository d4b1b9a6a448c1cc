"""A comparison for other tools: a JUnit test report, and a table of all pairs as CSV (RES-20, RES-21)."""

from __future__ import annotations

import csv
import os
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from tensorcap.comparison import Comparison, Examination, Pair
from tensorcap.metrics import Difference
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import module_of
from tensorcap_formats.output_path import publish_text

_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FIRST_COLUMNS: Final = (
    "key",
    "class",
    "status",
    "is_required",
    "reference_dtype",
    "target_dtype",
    "shape",
    "order",
)
JUNIT_BEGINNING: Final = '<?xmlversion="1.0"encoding="UTF-8"?><testsuites'
CSV_BEGINNING: Final = ",".join(_FIRST_COLUMNS)


def write_junit(path: str | os.PathLike[str], comparison: Comparison, examination: Examination) -> None:
    """Write a JUnit report: a case for each pair, and one that fails if nothing was compared.

    Raises:
        WriteError: Something else than such a report is there, or it cannot be written.
    """
    classes = examination.classes
    cases = list(_cases(comparison))
    counts = Counter(kind for _, kind, _ in cases)
    report = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        report,
        "testsuite",
        name=_plain(f"{comparison.reference.path} {comparison.target.path}"),
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
    )
    for pair, kind, message in cases:
        site = module_of(pair.reference.key.site) if pair and pair.reference else ""
        group = _plain(classes.get(site) or site or "tensorcap")
        name = _plain(pair.key if pair else "comparison")
        case = ElementTree.SubElement(suite, "testcase", classname=group, name=name)
        if kind:
            outcome = ElementTree.SubElement(case, kind, message=_plain(message))
            outcome.text = _plain(_details(pair)) if pair else None
    ElementTree.indent(report)
    with publish_text(path, beginning=JUNIT_BEGINNING) as file:
        file.write('<?xml version="1.0" encoding="UTF-8"?>\n')
        ElementTree.ElementTree(report).write(file, encoding="unicode")
        file.write("\n")


def write_csv(path: str | os.PathLike[str], comparison: Comparison, examination: Examination) -> None:
    """Write one line for each pair, with every metric that is a number.

    Raises:
        WriteError: Something else than such a table is there, or it cannot be written.
    """
    classes = examination.classes
    metrics = [field.name for field in fields(Difference) if field.name != "errors"]
    with publish_text(path, beginning=CSV_BEGINNING) as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*_FIRST_COLUMNS, *metrics, "r", "reason", "findings"])
        for pair in comparison.pairs:
            record = pair.reference or pair.target
            d = pair.difference
            out.writerow(
                [
                    pair.key,
                    classes.get(module_of(record.key.site), "") if record else "",
                    pair.status,
                    int(pair.is_required),
                    pair.reference.dtype.name if pair.reference else "",
                    pair.target.dtype.name if pair.target else "",
                    "x".join(map(str, record.shape)) if record else "",
                    record.order if record else "",
                    *(_cell(getattr(d, name)) if d else "" for name in metrics),
                    _cell(pair.baseline.r if pair.baseline else None),
                    pair.reason,
                    "; ".join(finding.text for finding in pair.findings),
                ]
            )


def _cases(comparison: Comparison) -> Iterator[tuple[Pair | None, str | None, str]]:
    """Each pair with the JUnit element of its outcome, None for a pass, and a message."""
    for pair in comparison.pairs:
        message = f"{pair.status}: {pair.reason}" if pair.reason else pair.status
        if pair.status == "unreadable":
            yield pair, "error", message
        elif not pair.is_required:
            yield pair, "skipped", message
        else:
            yield pair, None if pair.is_green else "failure", message
    if not comparison.compared:
        yield None, "failure", "nothing was compared"
    elif comparison.exit_status == 1 and all(p.is_green for p in comparison.pairs if p.is_required):
        yield None, "failure", "; ".join(comparison.warnings) or "the comparison is not green"


def _details(pair: Pair) -> str:
    lines = [finding.text for finding in pair.findings]
    d = pair.difference
    if d is not None:
        lines.append(f"max abs {d.max_abs} at {d.max_abs_index}, relative Frobenius {d.relative_frobenius}")
        lines.append(f"would pass with rtol {d.needed_rtol} alone, or with atol {d.needed_atol} alone")
    return "\n".join(lines)


def _cell(value: Any) -> Any:
    value = json_value(value)
    if isinstance(value, dict):
        return " ".join(f"{name}={count}" for name, count in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return int(value) if isinstance(value, bool) else "" if value is None else value


def _plain(text: str) -> str:
    return _NOT_XML.sub("?", text)
