"""Sync points as text: where failures begin, what was run, how close each point is, shares by module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.comparison import METRIC_TEXTS, ModuleShare, Shade, Sort, SyncPoint, SyncPoints
from tensorcap.wording import counted, one_line

_DOT: Final = "●"
_NONE: Final = "·"
_ROWS: Final = 40
_SOURCES: Final = 10
_MODULES: Final = 20
_LONGEST: Final = 100  # characters of a reason
_HEADERS: Final = ("  band", "verdict", "value", "operation and node", "module", "source", "why")
_TITLES: Final = {
    "psnr": "PSNR",
    "mean-abs": "mean abs",
    "mean-squared": "MSE",
    "max-abs": "max abs",
    "mean-relative": "mean rel",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the report.

    Attributes:
        text: It.
        shade: The colour of its first character; None for none.
        is_heading: Whether it is one.
    """

    text: str
    shade: Shade | None = None
    is_heading: bool = False


def sync_point_lines(result: SyncPoints, *, sort: Sort = "operation", show_all: bool = False) -> list[Line]:
    """The report, failure sources first.

    Args:
        result: The sync points.
        sort: Order of the rows: of the target's operations, or the least similar first.
        show_all: Rows for points without values too, and no limit.
    """
    return [
        *_failures(result),
        *_runs(result),
        *_table(result, sort, show_all),
        *_shares(result.modules),
        Line(""),
        Line(result.summary),
    ]


def _failures(result: SyncPoints) -> Iterator[Line]:
    sources = result.failure_sources
    if sources:
        yield Line("FAILURE SOURCES  they fail, and all that they are computed from agrees", is_heading=True)
        for point in sources[:_SOURCES]:
            yield Line(f"  {point.name}  in {_module(point.module)}")
            where = f"at {point.source}: " if point.source else ""
            yield Line(f"    {where}{one_line(point.reason)}")
        if len(sources) > _SOURCES:
            yield Line(f"  … {len(sources) - _SOURCES} more")
        yield Line("")
    elif any(point.status == "fail" for point in result.points) and not result.has_graph:
        yield Line("Where failures begin is not known: no run says what is computed from what.")
        yield Line("")


def _runs(result: SyncPoints) -> Iterator[Line]:
    yield Line(f"reference  {result.reference.path}")
    yield Line(f"target     {result.target.path}")
    yield Line("settings   of the reference / of the target")
    for name, both in result.settings.items():
        ours, theirs = ("none" if value is None else _setting(value) for value in both)
        if None in both or ours == theirs:
            continue
        yield Line(f"  {name}: {ours} / {theirs}")
    for side, text in enumerate(("reference", "target")):
        own = [
            f"{name} {_setting(both[side])}" for name, both in result.settings.items() if _is_own(both, side)
        ]
        if own:
            yield Line(f"  of the {text} alone: {', '.join(own)}")
    same = [f"{name} {_setting(a)}" for name, (a, b) in result.settings.items() if a is not None and a == b]
    if same:
        yield Line(f"  of both: {', '.join(same)}")
    yield Line(f"metric     {result.metric}: {METRIC_TEXTS[result.metric]}")
    yield Line(f"bands      {result.bands.text}")
    if result.metric != "psnr":
        yield Line(f"           {_limits_text(result)}")
    yield Line("verdict    of the policy (specs/policy.md); a band is a way to look, and decides nothing")


def _limits_text(result: SyncPoints) -> str:
    """What the bands are for a metric other than the PSNR."""
    green, red = result.bands.limits(result.metric, 1.0)
    unit = {"mean-relative": "", "mean-squared": " peak^2"}.get(result.metric, " peak")
    peak = ", peak being the largest |r|" if unit else ""
    return f"of this metric: green up to {green:.2g}{unit}, red above {red:.2g}{unit}{peak}"


def _setting(value: Any) -> str:
    return one_line(str(value))


def _is_own(both: tuple[Any, Any], side: int) -> bool:
    return both[side] is not None and both[1 - side] is None


def _table(result: SyncPoints, sort: Sort, show_all: bool) -> Iterator[Line]:
    points = [point for point in result.ordered(sort) if show_all or point.band or point.status == "fail"]
    shown = points if show_all else points[:_ROWS]
    if not shown:
        return
    headers = [_TITLES[result.metric] if name == "value" else name for name in _HEADERS]
    rows = [_row(point, result) for point in shown]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    yield Line("")
    yield Line("  ".join(cell.ljust(n) for cell, n in zip(headers, widths, strict=True)).rstrip(), None, True)
    for point, row in zip(shown, rows, strict=True):
        yield Line("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip(), point.band)
    if len(shown) < len(points):
        yield Line(f"… {len(points) - len(shown)} more with values; all with --all")


def _row(point: SyncPoint, result: SyncPoints) -> list[str]:
    value = point.metrics.get(result.metric)
    status = point.status.upper() if point.is_failure_source else point.status
    source = point.source.replace("\\", "/").rpartition("/")[2]
    reason = one_line(point.reason)
    return [
        f"{_DOT} {point.band}" if point.band else _NONE,
        status,
        _value(value, result.metric),
        point.name,
        _module(point.module),
        source,
        reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST - 1]}…",
    ]


def _value(value: float | None, metric: str) -> str:
    if value is None:
        return "-"
    if metric == "psnr":
        return "identical" if value == math.inf else f"{value:.1f} dB"
    return "identical" if value == 0 else f"{value:.3g}"


def _shares(shares: Sequence[ModuleShare]) -> Iterator[Line]:
    bad = [share for share in shares if share.failed or share.red]
    if not bad:
        return
    yield Line("")
    yield Line("MODULES  shares of points that fail, and that are red", is_heading=True)
    for share in bad[:_MODULES]:
        failed, red = (100 * count / share.compared for count in (share.failed, share.red))
        points = counted(share.compared, "compared point")
        yield Line(f"  {failed:3.0f} % fail  {red:3.0f} % red  of {points}  {_module(share.module)}")
    if len(bad) > _MODULES:
        yield Line(f"  … {len(bad) - _MODULES} more")


def _module(path: str) -> str:
    return path or "the model"
