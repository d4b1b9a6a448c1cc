"""An archive as a line, and one of its records as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.output import class_text, size_text
from tensorcap_cli.text.ranks import RankTexts

if TYPE_CHECKING:
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.records import Record
    from tensorcap_formats.statistics import Statistics

_FEW: Final = 5  # things that are named


def headline(archive: Archive) -> str:
    """One line that says what an archive is and whether it is whole."""
    from tensorcap.runs import ArchiveSummary

    side, records = ArchiveSummary.of(archive), archive.records
    parts = [
        archive.container,
        counted(len(records), "tensor"),
        size_text(sum(record.nbytes for record in records)),
    ]
    if not archive.is_foreign:
        parts.append(_steps(archive))
    if records and not any(record.stored for record in records):
        parts.append("statistics only")
    if side.model:
        parts.append(f"{class_text(side.model)} {one_line(side.dtype)}".rstrip())
    if not archive.is_complete:
        parts.append(f"INCOMPLETE ({one_line(side.error) or 'its run ended early'})")
    elif not archive.is_foreign:
        parts.append("complete")
    if not archive.is_ordered:
        parts.append("execution order unknown, in natural order of names")
    return f"{archive.path}: {', '.join(parts)}"


def _steps(archive: Archive) -> str:
    """How many steps have records, and their phases if the run had several."""
    from collections import Counter

    steps = sorted({record.key.step for record in archive.records})
    phases = archive.info.phases
    kinds = Counter(phases[step] for step in steps if step < len(phases) and phases[step])
    if set(kinds) <= {"forward"}:
        return counted(len(steps), "step")
    some = ", ".join(f"{count} {one_line(kind)}" for kind, count in kinds.items())
    return f"{counted(len(steps), 'step')} ({some})"


def skipped_line(archive: Archive) -> str:
    """One line that names what a file holds beside the tensors that were read."""
    names = [one_line(name) for name in archive.skipped]
    some = ", ".join(names[:_FEW]) + (", …" if len(names) > _FEW else "")
    count = "1 thing in it was" if len(names) == 1 else f"{len(names)} things in it were"
    return f"{count} not read: {some}"


def record_json(
    archive: Archive, record: Record, statistics: Statistics | None, ranks: RankTexts
) -> dict[str, Any]:
    """What `ls` and `show` say of a record as JSON."""
    from tensorcap_formats.json_values import json_value

    return {
        "key": record.key.text,
        "dtype": record.dtype.name,
        "shape": list(record.shape),
        "bytes": record.nbytes,
        "order": record.order,
        "digest": record.digest,
        "stored": record.stored,
        "remark": archive.remark(record),
        "statistics": json_value(statistics),
        **({"rule": ranks.as_json(record)} if ranks else {}),
    }
