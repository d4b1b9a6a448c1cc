"""Plots of a comparison for papers, as PNG of 300 dpi; needs matplotlib, the extra `report`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensorcap.comparison import Pair, worst
from tensorcap.drawing import HeatMap, Point, draw_heat_map, quantile_pairs
from tensorcap.reports.figure import new_figure
from tensorcap.reports.html.panels import pair_values
from tensorcap.reports.html.sources import ReportSource
from tensorcap.reports.html.tensor_rows import points_of
from tensorcap.runs import component_of
from tensorcap.wording import shortened
from tensorcap_formats.content import write_errors
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import WriteError
from tensorcap_formats.output_path import build_beside, put_in_place, resolved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TENSORS: Final = 6  # with a figure of their own: those of suspects, then the worst
_WIDTH: Final = 6.75  # inches: the text width of two columns
_DPI: Final = 300
_COMPONENTS: Final = 8  # with a colour of their own
_BINS: Final = 60
_WIDEST: Final = 60  # characters of a key in a title
_UNSAFE: Final = re.compile(r"[^\w.@-]+")


def write_plots(folder: str | os.PathLike[str], source: ReportSource) -> tuple[Path, ...]:
    """Write `errors.png`, `layers.png` and a figure for each of the worst tensors into a new or empty folder.

    1. Errors of results in execution order: total, inherited, and own ones if they are known.
    2. The largest error of each component in each layer, if there are numbered layers.
    3. Of suspects, then of the worst tensors: reference, difference and target as maps, a histogram and a QQ
       plot; of those whose values are at hand.

    Returns:
        The files.

    Raises:
        MissingPackageError: matplotlib is not installed.
        WriteError: There is nothing to draw, the folder is not empty, or it cannot be written.
    """
    folder = Path(folder)
    figures: dict[str, Figure] = {}
    points = tuple(points_of(source))
    if any(point.total is not None for point in points):
        figures["errors"] = _error_figure(points)
    heat_map = draw_heat_map(points)
    if heat_map is not None:
        figures["layers"] = _layer_figure(heat_map)
    for number, (pair, values) in enumerate(_drawn(source), 1):
        name = _UNSAFE.sub("_", shortened(pair.key, _WIDEST))
        figures[f"tensor_{number}_{name}"] = _tensor_figure(pair, *values)
    if not figures:
        raise WriteError(
            f"{folder}: is not written: no result was measured, and of no tensor values are at hand, "
            "expected something to draw"
        )
    place = resolved(folder)
    with build_beside(place) as building, write_errors(folder):
        if os.path.lexists(place) and (not place.is_dir() or any(place.iterdir())):
            raise WriteError(f"{folder}: is not empty, expected a new folder")
        building.mkdir()
        for name, figure in figures.items():
            figure.savefig(building / f"{name}.png", dpi=_DPI)
        put_in_place(building, place)
    return tuple(folder / f"{name}.png" for name in figures)


def _drawn(source: ReportSource) -> list[tuple[Pair, tuple[Array, Array]]]:
    """Pairs that have a figure, with their values."""
    by_key = {pair.key: pair for pair in source.comparison.pairs}
    keys = [suspect["key"] for suspect in source.suspects]
    keys += [pair.key for pair in worst(source.comparison.pairs, 2 * TENSORS)]
    drawn = []
    for key in dict.fromkeys(keys):
        values = pair_values(by_key[key], source.archives) if key in by_key else ""
        if not isinstance(values, str):
            drawn.append((by_key[key], values))
    return drawn[:TENSORS]


def _figure(height: float) -> Any:
    return new_figure("--png", _WIDTH, height)


def _error_figure(points: Sequence[Point]) -> Any:
    """Errors by place in the execution order on a log scale; errors of zero stand at its foot."""
    has_own = any(point.own is not None for point in points)
    figure = _figure(2.4 * (1 + has_own))
    rows = figure.subplots(1 + has_own, 1, sharex=True, squeeze=False)[:, 0]
    colours = _colours(points)
    curves = [("total", [p.total for p in points])] + ([("own", [p.own for p in points])] if has_own else [])
    for axes, (name, values) in zip(rows, curves, strict=True):
        heights = [v for v in values if v is not None and math.isfinite(v) and v > 0]
        foot = 10.0 ** (math.floor(math.log10(min(heights, default=1e-8))) - 1)
        if name == "total":
            inherited = [math.nan if p.inherited is None else max(p.inherited, foot) for p in points]
            axes.plot(inherited, color="0.6", linewidth=0.8, label="inherited", zorder=1)
        for component, colour in colours.items():
            at = [
                (place, max(value, foot))
                for place, (point, value) in enumerate(zip(points, values, strict=True))
                if value is not None and math.isfinite(value) and _named(point, colours) == component
            ]
            if at:
                axes.scatter(*zip(*at, strict=True), s=9, color=colour, label=component, zorder=2)
        axes.set(yscale="log")
        axes.set_ylabel(f"{name} relative error", fontsize="small")
        axes.tick_params(labelsize="small")
        axes.grid(visible=True, alpha=0.25)
    rows[-1].set_xlabel("result, in execution order", fontsize="small")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="x-small")
    return figure


def _colours(points: Sequence[Point]) -> dict[str, str]:
    """Colours of the components that err most; the others are grey."""
    errors: dict[str, float] = {}
    for point in points:
        component = component_of(point.site)
        error = point.total if point.own is None else point.own
        errors[component] = max(errors.get(component, 0.0), error or 0.0)
    ranked = sorted(errors, key=lambda name: -errors[name])
    colours = {name: f"C{at if at < 7 else at + 1}" for at, name in enumerate(ranked[:_COMPONENTS])}
    return colours | ({"others": "0.75"} if len(ranked) > _COMPONENTS else {})


def _named(point: Point, colours: dict[str, str]) -> str:
    component = component_of(point.site)
    return component if component in colours else "others"


def _layer_figure(heat_map: HeatMap) -> Any:
    figure = _figure(min(2.6 + 0.16 * len(heat_map.rows), 8.5))
    axes = figure.subplots()
    values = np.full((len(heat_map.rows), len(heat_map.columns)), np.nan)
    for row, (_, cells) in enumerate(heat_map.rows):
        for column, cell in enumerate(cells):
            if cell is not None and cell.error:
                values[row, column] = math.log10(cell.error) if math.isfinite(cell.error) else np.inf
    finite = values[np.isfinite(values)]
    top = float(finite.max(initial=-8))
    image = axes.imshow(np.minimum(values, top), aspect="auto", cmap="OrRd", interpolation="nearest")
    axes.set_xticks(range(len(heat_map.columns)), heat_map.columns, rotation=90, fontsize="x-small")
    step = -(-len(heat_map.rows) // 40)
    names = [name for name, _ in heat_map.rows]
    axes.set_yticks(range(0, len(names), step), names[::step], fontsize="x-small")
    bar = figure.colorbar(image)
    bar.set_label("log10 of the largest relative error", fontsize="x-small")
    bar.ax.tick_params(labelsize="x-small")
    return figure


def _tensor_figure(pair: Pair, reference: Array, target: Array) -> Any:
    """Both tensors and their difference, leading axes merged into rows; a histogram and a QQ plot."""
    figure = _figure(5.2)
    above, below = figure.subfigures(2, 1)
    figure.suptitle(f"{shortened(pair.key, _WIDEST)} ({pair.status})", fontsize="small")
    with np.errstate(all="ignore"):
        difference = target - reference
    planes = {"reference": reference, "difference": difference, "target": target}
    finite = np.concatenate([reference[np.isfinite(reference)], target[np.isfinite(target)]])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    largest = float(np.abs(difference[np.isfinite(difference)]).max(initial=0.0)) or 1.0
    for axes, (name, values) in zip(above.subplots(1, 3, sharey=True), planes.items(), strict=True):
        rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
        limits = (-largest, largest) if name == "difference" else (low, high)
        colours = "RdBu_r" if name == "difference" else "viridis"
        image = axes.imshow(
            rows, aspect="auto", cmap=colours, vmin=limits[0], vmax=limits[1], interpolation="nearest"
        )
        axes.set_title(name, fontsize="small")
        axes.tick_params(labelsize="x-small")
        above.colorbar(image, ax=axes, location="bottom").ax.tick_params(labelsize="x-small")
    histogram, quantile_axes = below.subplots(1, 2)
    if finite.size:
        for name, colour in (("reference", "C0"), ("target", "C1")):
            values = planes[name][np.isfinite(planes[name])]
            histogram.hist(values, bins=_BINS, range=(low, high), histtype="step", color=colour, label=name)
        histogram.set(yscale="symlog")
        histogram.legend(fontsize="x-small")
    _label(histogram, "value", "elements")
    quantiles = quantile_pairs(reference, target)
    if quantiles is not None:
        quantile_axes.plot((low, high), (low, high), color="0.7", linewidth=0.8)
        quantile_axes.plot(*quantiles, color="C3", marker=".", markersize=3, linewidth=0.8)
    _label(quantile_axes, "quantile of the reference", "of the target")
    return figure


def _label(axes: Any, across: str, up: str) -> None:
    axes.set_xlabel(across, fontsize="small")
    axes.set_ylabel(up, fontsize="small")
    axes.tick_params(labelsize="x-small")
