"""The error by execution order as a picture; needs matplotlib, the extra `report`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tensorcap.comparison import GREEN
from tensorcap.reports.figure import new_figure
from tensorcap.reports.layer_report import Layer

_COLOURS: Final = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")  # but grey, which is for the others
_MARKS: Final = "os^"  # each with all colours; more components than that share one
_OTHERS: Final = ("0.7", "D")  # grey squares
_MARKS_ALONE: Final = {"linestyle": "none", "markersize": 4.7}  # points
_NOT_GREEN: Final = {"markeredgecolor": "black", "markeredgewidth": 1.2}
_NAME: Final = 28  # characters of a component
_MARGINS: Final = {"left": 0.08, "right": 0.78, "bottom": 0.09, "top": 0.94, "hspace": 0.06}  # of the figure
_FURTHEST: Final = 1e100  # larger errors, and smaller than its inverse, are drawn there
_ZERO, _NO_NUMBER = "0", "not finite"


def plot_errors(path: str | os.PathLike[str], title: str, layers: Sequence[Layer]) -> None:
    """Draw the mean squared error of each layer by its place in the execution order, on a log scale.

    Errors of zero, and those that are no finite number, have rows of their own below the scale. Layers that
    are not green have a black edge. Each component has a colour and a mark, the same in every picture of a
    model; what was not measured is left out.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    places = [(at, one) for at, one in enumerate(layers) if one.mse is not None]
    figure = new_figure("mse_plot.png", 11, 5.5, layout=None)
    axes, rows = figure.subplots(2, 1, sharex=True, height_ratios=(9, 1), gridspec_kw=_MARGINS)
    styles = _styles(places)
    _draw(axes, places, styles, _height)
    _draw(rows, places, styles, lambda mse: None if _height(mse) is not None else float(math.isfinite(mse)))
    axes.set(yscale="log", ylabel="mean squared error", title=title, ylim=_limits(places))
    axes.yaxis.set_major_formatter("{x:.0e}")
    axes.grid(visible=True, alpha=0.25)
    rows.set(ylim=(-0.6, 1.6), xlabel="execution order", yticks=(0, 1), yticklabels=(_NO_NUMBER, _ZERO))
    rows.set_xlim(-1, max(len(layers), 1))
    rows.grid(visible=True, axis="x", alpha=0.25)
    if places:
        figure.legend(handles=_legend(axes, styles), loc="center right", fontsize="small")
    else:
        axes.text(0.5, 0.5, "no layer was measured", transform=axes.transAxes, ha="center", va="center")
    figure.savefig(path, dpi=120)


def _draw(
    axes: Any,
    places: Sequence[tuple[int, Layer]],
    styles: Mapping[str, tuple[str, str]],
    height: Callable[[float], float | None],
) -> None:
    """Draw the layers that have a height."""
    points: dict[tuple[bool, str], list[tuple[int, float]]] = {}
    for at, one in places:
        if (y := height(one.mse or 0.0)) is not None:
            points.setdefault((one.status in GREEN, one.component), []).append((at, y))
    for name, (colour, mark) in styles.items():
        for is_green in (True, False):
            if drawn := points.get((is_green, name)):
                edge = {} if is_green else _NOT_GREEN
                marks = {**_MARKS_ALONE, "color": colour, "marker": mark, "zorder": 2 if is_green else 3}
                axes.plot(*zip(*drawn, strict=True), **marks, **edge)


def _styles(places: Sequence[tuple[int, Layer]]) -> dict[str, tuple[str, str]]:
    """Colour and mark of each component, by which is executed first."""
    names = list(dict.fromkeys(one.component for _, one in places))
    known = [(colour, mark) for mark in _MARKS for colour in _COLOURS]
    return {name: known[at] if at < len(known) else _OTHERS for at, name in enumerate(names)}


def _legend(axes: Any, styles: Mapping[str, tuple[str, str]]) -> list[Any]:
    shown = [(name, style) for name, style in styles.items() if style != _OTHERS]
    shown += [("others", _OTHERS)] if len(shown) < len(styles) else []
    handles = [
        axes.plot([], [], color=colour, marker=mark, label=_short(name), **_MARKS_ALONE)[0]
        for name, (colour, mark) in shown
    ]
    edge = {"markerfacecolor": "none", **_NOT_GREEN}
    return [*handles, *axes.plot([], [], marker="o", label="black edge: not green", **_MARKS_ALONE, **edge)]


def _height(mse: float) -> float | None:
    """Where an error stands on the log scale; None if it has no place there."""
    return min(max(mse, 1 / _FURTHEST), _FURTHEST) if mse > 0 and math.isfinite(mse) else None


def _limits(places: Sequence[tuple[int, Layer]]) -> tuple[float, float]:
    """Whole decades around all errors that stand on the scale."""
    heights = [y for _, one in places if (y := _height(one.mse or 0.0)) is not None]
    least, most = min(heights, default=1.0), max(heights, default=1.0)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return 10.0 ** (low - 1), 10.0 ** (high + 1)


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
