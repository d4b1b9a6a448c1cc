"""One tensor of both sides as a report shows it: numbers, findings, pictures."""

from __future__ import annotations

from dataclasses import dataclass

from tensorcap.comparison import Finding, Pair
from tensorcap.reports.html.panels import Pictures, draw_pair, worst_element
from tensorcap.reports.html.sources import ReportSource
from tensorcap.reports.layer_report import shape_texts
from tensorcap.wording import shortened, three_digits


@dataclass(frozen=True, slots=True)
class Panel:
    """One tensor of both sides.

    Attributes:
        key: Its key.
        status: Of the pair.
        is_green: Whether that is a green one.
        source: The line of code that made it, "" if unknown.
        shape: Of the reference.
        dtypes: Of both sides.
        numbers: Names of metrics with their values.
        worst: Where the largest error is, as a sentence, or "".
        steps: Layout steps from the target's tensor to the reference's.
        target_keys: Records of the target that it was compared with, if they have other keys.
        findings: What the tests that looked at it say; status and text of each.
        pictures: Both tensors and their difference.
    """

    key: str
    status: str
    is_green: bool
    source: str
    shape: str
    dtypes: str
    numbers: tuple[tuple[str, str], ...]
    worst: str
    steps: tuple[str, ...]
    target_keys: tuple[str, ...]
    findings: tuple[tuple[str, str], ...]
    pictures: Pictures


def tensor_panel(pair: Pair, source: ReportSource) -> Panel:
    """Gather what is known of a pair, and draw it."""
    record, other, d = pair.reference or pair.target, pair.target, pair.difference
    assert record is not None
    dtypes = [side.dtype.name for side in (pair.reference, other) if side is not None]
    metrics = (
        {}
        if d is None
        else {
            "relative error": d.relative_frobenius,
            "row error (median)": d.row_error_median,
            "max abs": d.max_abs,
            "mean abs": d.mean_abs,
            "PSNR, dB": d.psnr_db,
            "cosine": d.cosine,
            "max ULP": d.max_ulp,
        }
    )
    origin = pair.origin
    keys = origin.target if origin else ()
    return Panel(
        key=shortened(pair.key),
        status=pair.status,
        is_green=pair.is_green,
        source=source.examination.sources.get(pair.key, ""),
        shape=shape_texts([record.shape]),
        dtypes=" → ".join(dict.fromkeys(dtypes)),
        numbers=tuple((name, three_digits(v)) for name, v in metrics.items() if v is not None),
        worst=worst_element(d),
        steps=tuple(str(step) for step in origin.steps) if origin else (),
        target_keys=tuple(shortened(key) for key in keys if key != pair.key),
        findings=tuple(_finding(f) for f in pair.findings),
        pictures=draw_pair(pair, source.archives),
    )


def _finding(finding: Finding) -> tuple[str, str]:
    return finding.status, finding.text
