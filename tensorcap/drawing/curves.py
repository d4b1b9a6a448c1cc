"""Curves of errors by execution order, and the heat map of layers and components, as shapes of an SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.runs import component_of
from tensorcap_formats.keys import ROOT_SITE

WIDTH: Final = 900  # of a chart, in units of its own
HEIGHT: Final = 200
_LEFT, _TOP, _BOTTOM = 52, 10, 26  # room for the scale, and below it for errors of zero
_COLOURS: Final = 8  # components that have one of their own; the others share a grey
_DECADES: Final = 12  # of a scale at most: smaller errors are drawn at its foot
_BLOCKS: Final = 200  # rows of a heat map at most


@dataclass(frozen=True, slots=True)
class Point:
    """The error of one result.

    Attributes:
        site: Site of the module that made it.
        total: Relative error in the target's own run, no unit; infinite if it is not finite on one side only;
            None if nothing was measured.
        inherited: The largest of what went into its call; None if that is not known.
        own: What the module made itself; None if that is not known.
        is_green: Whether its status is.
    """

    site: str
    total: float | None
    inherited: float | None
    own: float | None
    is_green: bool


@dataclass(frozen=True, slots=True)
class Dots:
    """The results of one component on a curve.

    Attributes:
        component: Its name.
        colour: Number of its colour, from 0; the last one is the grey of the others.
        path: The points of an SVG path, each a line of no length.
    """

    component: str
    colour: int
    path: str


@dataclass(frozen=True, slots=True)
class Curve:
    """One error by execution order, on a log scale.

    Attributes:
        title: What is drawn.
        dots: Its results by component.
        line: Points of what was inherited, as a polyline; "" without.
        ticks: Labels of the scale, each with its height.
    """

    title: str
    dots: tuple[Dots, ...]
    line: str
    ticks: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A component of one layer.

    Attributes:
        error: The largest of its relative errors; None if nothing was measured.
        level: Its colour: 0 without an error, 1 to 9 from the smallest to the largest decade drawn.
        is_green: Whether all its results are.
    """

    error: float | None
    level: int
    is_green: bool


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The largest error of each component in each layer.

    Attributes:
        columns: Components, in execution order.
        rows: The name of each layer, and its cells; None where the layer has no such component.
        left_out: Count of layers that are not drawn, for they are too many.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    left_out: int


def draw_curves(points: Sequence[Point]) -> tuple[Curve, ...]:
    """Draw total errors with what was inherited, and own errors if they are known.

    Args:
        points: Results in execution order.
    """
    errors: dict[str, float] = {}
    for point in points:  # those that err most have a colour; what is made of them is among the others
        error = point.total if point.own is None else point.own
        component = component_of(point.site)
        errors[component] = max(errors.get(component, 0.0), error or 0.0)
    ranked = sorted(errors, key=lambda name: -errors[name])[:_COLOURS]
    colours = {name: number for number, name in enumerate(ranked)}
    total = _curve(
        "Total error, and the largest that went in (line)", points, [p.total for p in points], colours
    )
    curves = [total] if total else []
    if any(point.own is not None for point in points):
        own = _curve("Own error: what each module adds itself", points, [p.own for p in points], colours)
        curves += [own] if own else []
    return tuple(curves)


def _curve(
    title: str, points: Sequence[Point], values: Sequence[float | None], colours: Mapping[str, int]
) -> Curve | None:
    """Draw one value of each point; None if no point has one."""
    if all(value is None for value in values):
        return None
    inherited = [point.inherited for point in points] if title.startswith("Total") else []
    scale = _Scale.of([*values, *inherited])
    by_component: dict[str, dict[str, None]] = {}
    line: dict[int, float] = {}
    for at, (point, value) in enumerate(zip(points, values, strict=True)):
        x = place_of(at, len(points))
        if value is not None:
            component = component_of(point.site)
            name = component if component in colours else "others"
            # Two results of one component at one place of the picture are one dot.
            by_component.setdefault(name, {})[f"M{x:.0f},{scale.y(value):.0f}h0"] = None
        if inherited and point.inherited is not None:
            column = round(x)
            line[column] = min(line.get(column, math.inf), scale.y(point.inherited))
    order = {**colours, "others": _COLOURS}
    dots = [Dots(name, order[name], "".join(by_component[name])) for name in order if name in by_component]
    return Curve(title, tuple(dots), " ".join(f"{x},{y:.0f}" for x, y in line.items()), scale.ticks)


def place_of(at: int, count: int) -> float:
    """How far from the left the point of a number is, of so many points."""
    return _LEFT + at * (WIDTH - _LEFT - 10) / max(count - 1, 1)


@dataclass(frozen=True, slots=True)
class _Scale:
    """A log scale from 10**low to 10**high, with zero below it and what is not finite on top."""

    low: int
    high: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> _Scale:
        logs = [math.log10(v) for v in values if v is not None and math.isfinite(v) and v > 0]
        high = math.ceil(max(logs, default=0.0))
        low = max(math.floor(min(logs, default=-1.0)), high - _DECADES)
        return cls(min(low, high - 1), high)

    def y(self, value: float) -> float:
        """The height of a value, from above."""
        if not math.isfinite(value):
            return _TOP - 5.0
        if value <= 0:
            return HEIGHT - 8.0
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - max(share, 0.0) * (HEIGHT - _BOTTOM - _TOP)

    @property
    def ticks(self) -> tuple[tuple[str, float], ...]:
        step = max(1, (self.high - self.low) // 5)
        decades = range(self.low, self.high + 1, step)
        return (("0", HEIGHT - 8.0), *((f"1e{n}", self.y(10.0**n)) for n in decades))


def draw_heat_map(points: Sequence[Point]) -> HeatMap | None:
    """The largest total error of each component in each layer; None without numbered layers.

    Args:
        points: Results in execution order.
    """
    cells: dict[str, dict[str, list[Point]]] = {}
    columns: dict[str, None] = {}
    for point in points:
        layer = _layer_of(point.site)
        if layer:
            component = component_of(point.site)
            columns[component] = None
            cells.setdefault(layer, {}).setdefault(component, []).append(point)
    if not cells:
        return None
    scale = _Scale.of(point.total for point in points)
    rows = tuple(
        (layer, tuple(_cell(of_layer[name], scale) if name in of_layer else None for name in columns))
        for layer, of_layer in list(cells.items())[:_BLOCKS]
    )
    return HeatMap(tuple(columns), rows, max(0, len(cells) - _BLOCKS))


def draw_cells(
    rows: Sequence[Sequence[tuple[float | None, bool] | None]],
) -> list[tuple[Cell | None, ...]]:
    """Colour a table of errors by one scale.

    Args:
        rows: The relative error of each cell, and whether it is green; None for no cell.
    """
    scale = _Scale.of(cell[0] for row in rows for cell in row if cell is not None)
    return [
        tuple(None if cell is None else Cell(cell[0], _level(cell[0], scale), cell[1]) for cell in row)
        for row in rows
    ]


def _layer_of(site: str) -> str:
    """The innermost numbered module around a site, or the site itself; "" for none."""
    if site == ROOT_SITE:
        return ""
    parts = site.split(".")
    at = next((i for i in reversed(range(len(parts))) if parts[i].isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _cell(points: Sequence[Point], scale: _Scale) -> Cell:
    errors = [point.total for point in points if point.total is not None]
    error = max(errors, default=None)
    return Cell(error, _level(error, scale), all(point.is_green for point in points))


def _level(error: float | None, scale: _Scale) -> int:
    """The colour of an error: 0 without one, 1 to 9 from the smallest to the largest decade drawn."""
    if error is None or error <= 0:
        return 0
    share = 1.0
    if math.isfinite(error):
        share = (math.log10(error) - scale.low) / (scale.high - scale.low)
    return 1 + round(8 * min(max(share, 0.0), 1.0))
