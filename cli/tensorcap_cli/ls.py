"""`tcap ls`: what an archive holds, a line for each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap_cli.output import (
    DASH,
    class_text,
    number_text,
    one_line,
    plural,
    print_json,
    print_table,
    progress,
    size_text,
)

if TYPE_CHECKING:
    from tensorcap_formats.archive import Archive
    from tensorcap_formats.records import Record
    from tensorcap_formats.statistics import Statistics

_ORDERS = ("order", "name", "size", "max", "l2", "nonfinite")
_HEADERS = ("key", "dtype", "shape", "size", "min", "max", "mean", "l2", "nan", "inf")


@click.command("ls", short_help="List the tensors of an archive with shapes and statistics.")
@click.argument("archive", type=click.Path())
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option(
    "--sort",
    type=click.Choice(_ORDERS),
    default="order",
    help="Execution order, or natural order of names; or first the largest in bytes, in absolute value, "
    "in l2 norm, in count of NaN and infinities.",
)
@click.option("--stats", is_flag=True, help="Compute statistics that the file lacks; reads all its bytes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(archive: str, globs: tuple[str, ...], *, sort: str, stats: bool, as_json: bool) -> None:
    """List the tensors of ARCHIVE whose keys match one of the GLOBs, or all.

    A glob without a slash is held against the site, any other against the whole key STEP/SITE/SLOT. Quote
    it, or the shell may take it for file names.

    \b
        tcap ls ref.h5
        tcap ls ref.h5 '*.mlp' '0/*/input*' --sort max
        tcap ls model.safetensors --stats

    Exit status: 0 listed, 2 wrong usage or a glob that matches nothing, 3 ARCHIVE cannot be read.
    """
    from tensorcap_formats.open import open_archive

    with open_archive(archive) as opened:
        records = opened.select(globs)
        known = [record.statistics for record in records]
        if stats:
            known = _computed(opened, records, known)
        rows = _sorted(list(zip(records, known, strict=True)), sort)
        if as_json:
            print_json(_as_json(opened, rows))
            return
        click.echo(headline(opened))
        if len(records) < len(opened):
            size = size_text(sum(record.nbytes for record in records))
            click.echo(f"{len(records)} of them match, {size}")
        _print_rows(opened, rows)
        for record in records:
            if remark := opened.remark(record):
                click.echo(f"{record.key.text}: {one_line(remark)}")
        if opened.skipped:
            click.echo(skipped_line(opened))


def _print_rows(archive: Archive, rows: list[tuple[Record, Statistics | None]]) -> None:
    """Print the table; with a column for the code where there are ops."""
    from tensorcap.runs.ops import ops_of

    ops = ops_of(archive)
    places = [ops.source(record.key.where) if ops else "" for record, _ in rows]
    has_places = any(places)
    print_table(
        (*_HEADERS, "code") if has_places else _HEADERS,
        [
            (*_cells(*row), one_line(place)) if has_places else _cells(*row)
            for row, place in zip(rows, places, strict=True)
        ],
        left=(0, 1, 2, len(_HEADERS)),
    )


def headline(archive: Archive) -> str:
    """One line that says what an archive is and whether it is whole."""
    from tensorcap.runs.archive_summary import ArchiveSummary

    side, records = ArchiveSummary.of(archive), archive.records
    parts = [
        archive.container,
        plural(len(records), "tensor"),
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
    """How many steps have records, and of what they are where the run made a difference."""
    from collections import Counter

    steps = sorted({record.key.step for record in archive.records})
    phases = archive.info.phases
    kinds = Counter(phases[step] for step in steps if step < len(phases) and phases[step])
    if set(kinds) <= {"forward"}:
        return plural(len(steps), "step")
    some = ", ".join(f"{count} {one_line(kind)}" for kind, count in kinds.items())
    return f"{plural(len(steps), 'step')} ({some})"


def skipped_line(archive: Archive, limit: int = 5) -> str:
    """One line that names what a file holds beside the tensors that were read."""
    names = [one_line(name) for name in archive.skipped]
    some = ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
    count = "1 thing in it was" if len(names) == 1 else f"{len(names)} things in it were"
    return f"{count} not read: {some}"


def _computed(
    archive: Archive, records: list[Record], known: list[Statistics | None]
) -> list[Statistics | None]:
    done, total = 0, sum(r.nbytes for r, s in zip(records, known, strict=True) if s is None)
    with progress("reading") as bar:
        found: list[Statistics | None] = []
        for record in records:
            found.append(archive.statistics(record))
            done += record.nbytes if record.statistics is None else 0
            if bar:
                bar.advance(done, total)
        return found


def _sorted(
    rows: list[tuple[Record, Statistics | None]], order: str
) -> list[tuple[Record, Statistics | None]]:
    if order == "order":
        return rows
    if order == "name":
        from tensorcap_formats.keys import natural

        return sorted(rows, key=lambda row: natural(row[0].key.text))
    return sorted(rows, key=lambda row: _weight(row[0], row[1], order), reverse=True)


def _weight(record: Record, statistics: Statistics | None, order: str) -> float:
    if order == "size":
        return record.nbytes
    if statistics is None:
        return -1.0
    if order == "l2":
        return statistics.l2 or 0.0
    if order == "max":
        return max(abs(statistics.minimum or 0), abs(statistics.maximum or 0))
    return statistics.nan + statistics.posinf + statistics.neginf


def _cells(record: Record, statistics: Statistics | None) -> tuple[str, ...]:
    shape = "x".join(map(str, record.shape)) or "()"
    head = (record.key.text, record.dtype.name, shape, size_text(record.nbytes))
    if statistics is None:
        return (*head, DASH, DASH, DASH, DASH, DASH, DASH)
    s = statistics
    numbers = (s.minimum, s.maximum, s.mean, s.l2, s.nan, s.posinf + s.neginf)
    return (*head, *map(number_text, numbers))


def record_json(archive: Archive, record: Record, statistics: Statistics | None) -> dict[str, Any]:
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
    }


def _as_json(archive: Archive, rows: list[tuple[Record, Statistics | None]]) -> dict[str, Any]:
    return {
        "path": str(archive.path),
        "container": archive.container,
        "is_foreign": archive.is_foreign,
        "is_ordered": archive.is_ordered,
        "is_complete": archive.is_complete,
        "skipped": archive.skipped,
        "records": [record_json(archive, record, statistics) for record, statistics in rows],
    }
