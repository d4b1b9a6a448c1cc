"""`tcap ls`: what an archive holds, a line for each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap.wording import one_line
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.archive import headline, record_json, skipped_line
from tensorcap_cli.text.asset import list_asset
from tensorcap_cli.text.output import DASH, number_text, print_json, print_table, size_text
from tensorcap_cli.text.progress import byte_bar
from tensorcap_cli.text.ranks import RankTexts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorcap_formats.archive import Archive
    from tensorcap_formats.records import Record
    from tensorcap_formats.statistics import Statistics

_ORDERS = ("order", "name", "size", "max", "l2", "nonfinite")
_HEADERS = ("key", "dtype", "shape", "size", "min", "max", "mean", "l2", "nan", "inf")


@click.command("ls", cls=Command, short_help="List the tensors of an archive with shapes and statistics.")
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
@json_option
def command(archive: str, globs: tuple[str, ...], *, sort: str, stats: bool, as_json: bool) -> None:
    """List the tensors of ARCHIVE whose keys match one of the GLOBs, or all.

    A glob without a slash is held against the site, any other against the whole key STEP/SITE/SLOT. Quote
    it, or the shell may take it for file names. Of a run of several ranks the last column is how each tensor
    is put together of theirs, or was: see tcap merge. Of a Core AI asset, .aimodel, the operations are
    listed, with the torch nodes whose values they hold and that they were made of, modules and lines (needs
    its packages).

    \b
        tcap ls ref.h5
        tcap ls ref.h5 '*.mlp' '0/*/input*' --sort max
        tcap ls model.safetensors --stats
        tcap ls model.aimodel

    Exit status: 0 listed, 2 wrong usage or a glob that matches nothing, 3 ARCHIVE cannot be read.
    """
    from tensorcap_formats.foreign import is_asset
    from tensorcap_formats.open import open_archive

    if is_asset(archive):
        if globs or stats or sort != "order":
            raise click.UsageError(
                "A Core AI asset has operations and no tensors: globs, --sort and --stats are of those."
            )
        list_asset(archive, as_json=as_json)
        return
    with open_archive(archive) as opened:
        records = opened.select(globs)
        known = [record.statistics for record in records]
        if stats:
            known = _compute(opened, records, known)
        rows = _sort(list(zip(records, known, strict=True)), sort)
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
    """Print the table, with a column for the code if there are ops, and one for rules if there are ranks."""
    from tensorcap.runs import ops_of

    ops, ranks = ops_of(archive), RankTexts(archive)
    further = {
        "code": [one_line(ops.source(record.key.where)) if ops else "" for record, _ in rows],
        "rule": [ranks.rule(record) if ranks else "" for record, _ in rows],
    }
    further = {name: cells for name, cells in further.items() if any(cells)}
    print_table(
        (*_HEADERS, *further),
        _Table(rows, list(further.values())),
        left=(0, 1, 2, *range(len(_HEADERS), len(_HEADERS) + len(further))),
    )


class _Table:
    """The cells of each row, made whenever they are gone through: those of 100,000 take much memory."""

    def __init__(
        self, rows: Sequence[tuple[Record, Statistics | None]], further: Sequence[Sequence[str]]
    ) -> None:
        self._rows = rows
        self._further = further

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        for row, *cells in zip(self._rows, *self._further, strict=True):
            yield (*_cells(*row), *cells)


def _compute(
    archive: Archive, records: list[Record], known: list[Statistics | None]
) -> list[Statistics | None]:
    done, total = 0, sum(r.nbytes for r, s in zip(records, known, strict=True) if s is None)
    statistics: list[Statistics | None] = []
    with byte_bar("reading") as bar:
        for record in records:
            statistics.append(archive.statistics(record))
            done += record.nbytes if record.statistics is None else 0
            if bar:
                bar.advance(done, total)
    return statistics


def _sort(rows: list[tuple[Record, Statistics | None]], order: str) -> list[tuple[Record, Statistics | None]]:
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


def _as_json(archive: Archive, rows: list[tuple[Record, Statistics | None]]) -> dict[str, Any]:
    ranks = RankTexts(archive)
    return {
        "path": str(archive.path),
        "container": archive.container,
        "is_foreign": archive.is_foreign,
        "is_ordered": archive.is_ordered,
        "is_complete": archive.is_complete,
        "skipped": archive.skipped,
        "records": [record_json(archive, record, statistics, ranks) for record, statistics in rows],
    }
