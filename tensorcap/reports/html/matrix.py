"""Several targets against one reference, or one target over time: a column each, a row for each result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from tensorcap.comparison import Pair
from tensorcap.drawing import Cell, draw_cells
from tensorcap.reports.html.page import Page, gather_page
from tensorcap.reports.html.sources import ReportSource
from tensorcap.reports.html.tensor_rows import drawn_error, is_bad, results_of
from tensorcap.reports.next_step import NextStep
from tensorcap.wording import conjugated, counted, shortened, some

ROWS: Final = 300  # results at most: those that are not green somewhere, then those that err most
_WIDEST_VERSION: Final = 40  # characters
_TO_SECONDS: Final = len("2026-01-31T12:30:59")  # of a time


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """One target of a matrix.

    Attributes:
        name: Its path, as it was given.
        model: Class of its model with its precision, "" if unknown.
        started: When its run began, "" if unknown.
        versions: Versions of packages that other targets have otherwise.
        is_green: Whether nothing is wrong.
        verdict: As the page of it alone has it.
        culprit: Who is guilty of what, "" if nothing is wrong.
        suspects: Names of all suspects.
        first: Key text of the first divergence, "" without.
        next: What to do next.
        counts: How many pairs have each status.
        changes: What is otherwise than in the column before, as a sentence; "" of the first one.
        exit_status: What the command that judged ended with.
    """

    name: str
    model: str
    started: str
    versions: str
    is_green: bool
    verdict: str
    culprit: str
    suspects: tuple[str, ...]
    first: str
    next: NextStep
    counts: tuple[tuple[str, int, bool], ...]
    changes: str
    exit_status: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """All that a report of several targets says.

    Attributes:
        title: What was compared.
        reference: Path of the reference, or several.
        is_green: Whether all targets are.
        verdict: How many are, as a sentence.
        targets: The columns, in the order that was given.
        rows: Key text of each result, in execution order, with a cell for each target; None where the target
            was not compared there.
        left_out: Count of results that have no row.
    """

    title: str
    reference: str
    is_green: bool
    verdict: str
    targets: tuple[TargetColumn, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    left_out: int

    @property
    def exit_status(self) -> int:
        """The worst of all targets."""
        return max(target.exit_status for target in self.targets)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is kept of one target once its archive is closed."""

    page: Page
    reference: str
    target: str
    model: str
    started: str
    packages: Mapping[str, str]
    first: str
    errors: Mapping[str, tuple[float | None, bool]]
    orders: Mapping[str, int]


def gather_matrix(sources: Sequence[AbstractContextManager[ReportSource]]) -> Matrix:
    """Compare each target in its turn, one open at a time, and lay their results side by side.

    Args:
        sources: Of each target; opened here.
    """
    runs = []
    for source in sources:
        with source as opened:
            runs.append(_run(opened))
    columns = tuple(_column(run, before, runs) for run, before in zip(runs, [None, *runs], strict=False))
    green = sum(column.is_green for column in columns)
    references = tuple(dict.fromkeys(run.reference for run in runs))
    rows, left_out = _rows(runs)
    against = shortened(references[0], 80) if len(references) == 1 else f"{len(references)} references"
    return Matrix(
        title=f"{len(runs)} targets against {against}",
        reference=some([shortened(path) for path in references]),
        is_green=green == len(runs),
        verdict=_verdict(columns, green),
        targets=columns,
        rows=rows,
        left_out=left_out,
    )


def _run(source: ReportSource) -> _Run:
    comparison = source.comparison
    archive = source.archives[1] if source.archives else None
    side = comparison.target
    results = results_of(comparison) or list(comparison.pairs)  # of archives with names alone
    pairs = [p for p in results if p.reference is not None and (p.is_compared or is_bad(p))]
    model = f"{side.model.rpartition('.')[2]} {side.compute_dtype or side.dtype}".strip()
    first = comparison.divergence
    return _Run(
        page=gather_page(source, panels=0),
        reference=source.paths[0],
        target=source.paths[1],
        model=model,
        started="" if archive is None else str(archive.run.get("started") or "")[:_TO_SECONDS],
        packages={}
        if archive is None
        else {k: shortened(v, _WIDEST_VERSION) for k, v in archive.info.packages.items()},
        first=first.pair.key if first else "",
        errors={pair.key: (drawn_error(pair), not is_bad(pair)) for pair in pairs},
        orders={pair.key: _order(pair) for pair in pairs},
    )


def _order(pair: Pair) -> int:
    return pair.reference.order if pair.reference else 0


def _column(run: _Run, before: _Run | None, runs: Sequence[_Run]) -> TargetColumn:
    page = run.page
    names = sorted({name for one in runs for name in one.packages})
    differing = [name for name in names if len({one.packages.get(name) for one in runs}) > 1]
    return TargetColumn(
        name=shortened(run.target, 80),
        model=run.model,
        started=run.started,
        versions=", ".join(f"{name} {run.packages[name]}" for name in differing if name in run.packages),
        is_green=page.is_green,
        verdict=page.verdict,
        culprit=page.culprit,
        suspects=tuple(suspect.name for suspect in page.suspects),
        first=shortened(run.first),
        next=page.next,
        counts=page.counts,
        changes="" if before is None else _changes(before, run),
        exit_status=page.exit_status,
    )


def _changes(before: _Run, run: _Run) -> str:
    """Which results turned red, and which turned green, since the run before."""
    shared = [key for key in run.errors if key in before.errors]
    broken = [key for key in shared if before.errors[key][1] and not run.errors[key][1]]
    mended = [key for key in shared if not before.errors[key][1] and run.errors[key][1]]
    parts = [
        f"{counted(len(keys), 'result', 'are')} no longer {what} ({shortened(keys[0])} first)"
        for keys, what in ((broken, "green"), (mended, "wrong"))
        if keys
    ]
    return f"Since the run before: {'; '.join(parts)}." if parts else "As the run before."


def _verdict(columns: Sequence[TargetColumn], green: int) -> str:
    if green == len(columns):
        return f"All {len(columns)} targets compute what the reference does."
    broken = next((at for at, column in enumerate(columns) if not column.is_green), 0)
    which = f"the first that does not is {columns[broken].name}"
    targets = f"{green} of {counted(len(columns), 'target')} {conjugated(green, 'compute')}"
    return f"{targets} what the reference does; {which}."


def _rows(runs: Sequence[_Run]) -> tuple[tuple[tuple[str, tuple[Cell | None, ...]], ...], int]:
    """Rows in execution order: results that are not green somewhere, then those that err most."""
    orders = {key: order for run in reversed(runs) for key, order in run.orders.items()}

    def rank(key: str) -> tuple[bool, float]:
        cells = [run.errors[key] for run in runs if key in run.errors]
        return all(is_green for _, is_green in cells), -max((error or 0.0 for error, _ in cells), default=0.0)

    chosen = sorted(sorted(orders, key=rank)[:ROWS], key=lambda key: orders[key])
    cells = draw_cells([[run.errors.get(key) for run in runs] for key in chosen])
    rows = tuple((shortened(key), row) for key, row in zip(chosen, cells, strict=True))
    return rows, len(orders) - len(rows)
