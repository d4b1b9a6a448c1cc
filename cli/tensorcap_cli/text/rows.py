"""Pairs as rows of a table, and the columns that it can have."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import one_line
from tensorcap_cli.text.output import (
    DASH,
    class_text,
    cosine_text,
    cut,
    number_text,
    print_table,
    short_number,
    terminal_width,
    upper_text,
)

if TYPE_CHECKING:
    from tensorcap.comparison import Comparison, Examination, Pair
    from tensorcap.metrics import LogitDifference
    from tensorcap.reports.folded_pairs import FoldedPairs

_ROWS: Final = 20
_NARROW: Final = 160  # columns: below, a terminal gets fewer measures
UNTOLD: Final = ("identical", "excluded")  # statuses that have no row unless they are asked for
_COLORS: Final[Mapping[str, str | None]] = {
    "identical": "green",
    "match": "green",
    "within-rounding": "green",
    "unjudged": "yellow",
    "suspect": "yellow",
    "missing-in-reference": None,
    "explained": None,
    "excluded": None,
}
# Columns that may be asked for, besides every metric of a pair
LOGIT_COLUMNS: Final = ("kl", "js", "top1", "top5", "top10", "flips", "rank")
ROUTING_COLUMNS: Final = ("overlap", "share")
_HEADERS: Final = {
    "max_abs": "max abs",
    "mean_abs": "mean abs",
    "relative_frobenius": "rel frob",
    "psnr_db": "PSNR",
    "needed_rtol": "rtol",
    "mismatches": "outside",
}
_LOGIT_METRICS: Final = {"kl": "kl_mean", "js": "js_mean", "rank": "rank_mean"}
_IDENTICAL: Final = {"psnr_db": math.inf, "sqnr_db": math.inf}  # of equal digests: nothing is measured


def print_pairs(
    comparison: Comparison,
    examination: Examination,
    folded: Sequence[FoldedPairs],
    order: str,
    show_all: bool,
    metrics: Sequence[str],
    printed: Collection[str],
    statuses: Collection[str] = (),
) -> None:
    """Print a row for each tensor, and each fault, that is worth one.

    Args:
        comparison: What it came to.
        examination: What was looked at besides.
        folded: All pairs that may be worth a row, folded.
        order: `order` of execution, or `error`: the worst by the first metric, else by relative error, first.
        show_all: A row for each pair, also for identical ones.
        metrics: Columns in place of the usual ones.
        printed: Keys of pairs that were printed already, in groups.
        statuses: Only pairs of these have a row; of all that are worth one if there are none.
    """
    from tensorcap.comparison import by_error
    from tensorcap.reports.folded_pairs import FoldedPairs

    is_mapped = comparison.mapping is not None
    if show_all:
        pairs = [pair for pair in comparison.pairs if not statuses or pair.status in statuses]
        shown = [FoldedPairs(p, p.key, (p.key,), 1) for p in pairs]
    elif statuses:
        shown = [row for row in folded if row.pair.status in statuses]
    else:
        shown = [row for row in folded if _is_worth_a_row(row.pair, printed, is_mapped)]
    if order == "error" and metrics:
        shown.sort(key=lambda row: _badness(row.pair, examination, metrics[0]), reverse=True)
    elif order == "error":
        shown.sort(key=lambda row: by_error(row.pair), reverse=True)
    rows = shown if show_all else _most_telling(shown, _ROWS)
    if not rows:
        return
    width = terminal_width()
    is_narrow = width is not None and width < _NARROW
    columns = list(metrics) or _usual(comparison, is_narrow)
    cells = [
        [row.pair.status, *(_cell(row.pair, examination, name) for name in columns), _name(row)]
        + ([] if is_narrow else [_where(row)])
        for row in rows
    ]
    headers = ["status", *(_HEADERS.get(name, name) for name in columns), "key"]
    headers += [] if is_narrow else ["where"]
    key = headers.index("key")
    click.echo()
    print_table(
        headers,
        cells,
        left=(0, key, key + 1),
        flexible=(key,) if is_narrow else (key + 1, key),
        colors=[_colors(row.pair, examination, columns, comparison, len(headers)) for row in rows],
    )
    if len(rows) < len(shown):
        left_out = sum(len(row.keys) for row in shown) - sum(len(row.keys) for row in rows)
        which = "of these statuses" if statuses else "that are not identical"
        click.echo(f"… {left_out} more {which}; all with --all")
    if any(row.also for row in rows):
        click.echo("(+ N) is of N further keys that hold the same tensors; --all has a row for each key")


def _colors(
    pair: Pair, examination: Examination, columns: Sequence[str], comparison: Comparison, count: int
) -> list[str | None]:
    """Status and key by the status; each metric by itself, which is no verdict."""
    from tensorcap.comparison import shade

    of_status = _COLORS.get(pair.status, "red")
    precision = comparison.account.precision if comparison.account else ""
    shades: dict[str, str | None] = {}
    for name in columns:
        logits = examination.logits.get(pair.key)
        source = logits if name in LOGIT_COLUMNS else pair.difference
        metric = _LOGIT_METRICS.get(name, name)
        shades[name] = shade(metric, getattr(source, metric, None), precision) if source else None
    colors = [of_status, *shades.values(), of_status]
    return colors + [None] * (count - len(colors))


def _usual(comparison: Comparison, is_narrow: bool) -> list[str]:
    """The columns; `max abs` is also the smallest atol that passes, `rtol` the smallest rtol."""
    columns = ["max_abs", "relative_frobenius", "needed_rtol"]
    columns += [] if is_narrow else ["cosine", "mean_abs", "psnr_db"]
    columns += ["r"] if any(pair.baseline for pair in comparison.pairs) else []
    return columns + (["mismatches"] if comparison.tolerance else [])


def _is_worth_a_row(pair: Pair, printed: Collection[str], is_mapped: bool) -> bool:
    if is_mapped and _is_explained(pair):
        return False
    return pair.status not in UNTOLD and pair.key not in printed


def _name(row: FoldedPairs) -> str:
    return f"{row.name} (+ {row.also})" if row.also else row.name


def _is_explained(pair: Pair) -> bool:
    """Whether a mapping says why a side lacks a tensor."""
    return pair.status == "explained" or (pair.status == "missing-in-reference" and bool(pair.reason))


def _most_telling(rows: Sequence[FoldedPairs], limit: int) -> list[FoldedPairs]:
    """At most `limit` rows in their order: those that are not green first, then what fits."""
    if len(rows) <= limit:
        return list(rows)
    pairs = [row.pair for row in rows]
    ranked = sorted(range(len(pairs)), key=lambda i: (pairs[i].is_green, not pairs[i].is_required, i))
    return [rows[i] for i in sorted(ranked[:limit])]


def _badness(pair: Pair, examination: Examination, name: str) -> float:
    """How bad a pair is by a metric: larger is worse; NaN is worst, and what has none is best."""
    from tensorcap.comparison import is_better_if_higher

    value = _value(pair, examination, name)
    if value is None:
        return -math.inf
    if math.isnan(value):
        return math.inf
    metric = "top1" if name in ROUTING_COLUMNS else _LOGIT_METRICS.get(name, name)
    return -value if is_better_if_higher(metric) else value


def _value(pair: Pair, examination: Examination, name: str) -> float | None:
    """A metric of a pair; None if it has none."""
    if name in ROUTING_COLUMNS:
        routing = examination.routing.get(pair.key)
        return None if routing is None else routing.share if name == "share" else routing.mean_overlap
    if name == "r":
        return pair.baseline.r if pair.baseline else None
    source = examination.logits.get(pair.key) if name in LOGIT_COLUMNS else pair.difference
    value = getattr(source, _LOGIT_METRICS.get(name, name), None)
    return None if value is None else float(value)


def _cell(pair: Pair, examination: Examination, name: str) -> str:
    if name in LOGIT_COLUMNS:
        return _logit_cell(examination.logits.get(pair.key), name)
    if name in ROUTING_COLUMNS:
        routing = examination.routing.get(pair.key)
        value = None if routing is None else routing.share if name == "share" else routing.mean_overlap
        return number_text(value, 4)
    if name == "r":
        return number_text(pair.baseline.r if pair.baseline else None, 3)
    d = pair.difference
    if d is not None and pair.status == "match" and _is_of_two_kinds(pair):
        return DASH  # of masks that say the same
    if d is None:
        is_measure = name not in ("cosine", "pearson", "mismatches")
        return number_text(_IDENTICAL.get(name, 0), 3) if pair.status == "identical" and is_measure else DASH
    value = getattr(d, name)
    if name in ("cosine", "pearson"):
        return cosine_text(value)
    return upper_text(value, 3) if name in ("needed_rtol", "needed_atol") else number_text(value, 3)


def _is_of_two_kinds(pair: Pair) -> bool:
    """Whether one side is a bool and the other is not."""
    kinds = [record.dtype.kind for record in (pair.reference, pair.target) if record is not None]
    return (kinds[0] == "bool") != (kinds[-1] == "bool")


def _logit_cell(logits: LogitDifference | None, name: str) -> str:
    return DASH if logits is None else number_text(getattr(logits, _LOGIT_METRICS.get(name, name)), 4)


def _where(row: FoldedPairs) -> str:
    """What failed and where the largest error is; of several layers, of the one that errs most."""
    from tensorcap.comparison import describe_test

    pair, d = row.pair, row.pair.difference
    if pair.reason or d is None:
        return one_line(pair.reason)
    if d.mask_mismatches and d.mask_index is not None:
        return f"not finite alike at {list(d.mask_index)}"
    tests = [
        f"{describe_test(f.test)} {short_number(f.value)} (limit {short_number(f.limit)})"
        for f in pair.findings
        if f.status in ("suspect", "diverged") and f.test != "tolerance"
    ]
    worst = d.max_abs_index if d.mismatch_index is None else d.mismatch_index
    if worst is not None:
        tests.append(f"at {list(worst)}" + (f" of {pair.key}" if row.places > 1 else ""))
    return ", ".join(tests)


def print_modules(comparison: Comparison, examination: Examination) -> None:
    """Print the spread of the error by class of module."""
    from tensorcap.comparison import by_module

    groups = by_module(comparison.pairs, examination.classes)
    rows = [
        [
            class_text(group.class_name) or DASH,
            str(group.count),
            *(number_text(value, 3) for value in (group.minimum, group.median, group.maximum)),
            ", ".join(f"{count} {status}" for status, count in group.statuses.items()),
            group.worst if group.maximum else "",
        ]
        for group in groups
    ]
    click.echo()
    headers = ["module", "pairs", "min", "median", "max", "statuses", "worst"]
    print_table(headers, rows, left=(0, 5, 6), flexible=6)
    click.echo("min, median and max are of the relative Frobenius error")


def check_metrics(names: Sequence[str]) -> None:
    """Refuse a metric that there is not.

    Raises:
        UsageError: One of the names is unknown.
    """
    if not names:
        return
    from tensorcap_formats.errors import UsageError

    known = metric_names()
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"Did you mean {' or '.join(close)}?" if close else f"Known are: {', '.join(known)}."
            raise UsageError(f"--metric {cut(name, 60)!r}: there is no such metric", hint=hint)


def parse_statuses(text: str | None) -> tuple[str, ...]:
    """Read what `--status` takes: statuses with commas between them.

    Raises:
        UsageError: One of them is unknown.
    """
    if text is None:
        return ()
    from tensorcap.comparison import STATUSES
    from tensorcap_formats.errors import UsageError

    statuses = tuple(filter(None, (part.strip() for part in text.split(","))))
    for status in statuses or ("",):
        if status not in STATUSES:
            close = difflib.get_close_matches(status, STATUSES, n=3)
            hint = f"Did you mean {' or '.join(close)}?" if close else f"Known are: {', '.join(STATUSES)}."
            raise UsageError(f"--status {cut(status, 60)!r}: there is no such status", hint=hint)
    return statuses


def metric_names() -> list[str]:
    """What `--metric` takes."""
    from tensorcap.metrics import Difference

    known = [name for name, kind in Difference.__annotations__.items() if _is_number(str(kind))]
    return [*known, "r", *LOGIT_COLUMNS, *ROUTING_COLUMNS]


def _is_number(annotation: str) -> bool:
    return not any(word in annotation for word in ("tuple", "Nonfinite", "Number", "bool"))
