"""A plan of a capture on a device, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import counted, name_numbers, name_pattern, one_line, some
from tensorcap_cli.text.output import print_heading

if TYPE_CHECKING:
    from tensorcap.capture_plan import CapturePlan, PlannedPoint

_HEADINGS: Final = {
    "captured": "CAPTURED",
    "replaced": "CAPTURED UNDER ANOTHER MODULE",
    "by-hand": "BY A LINE IN THE CODE",
    "not-capturable": "NOT CAPTURABLE",
}


def print_plan(plan: CapturePlan) -> None:
    """Print what becomes of the points, equal layers in one line, and the configuration."""
    click.echo(
        f"{counted(len(plan.points), 'point')} of {one_line(plan.source)}: "
        f"{counted(len(plan.modules), 'module')}, {counted(plan.extra_outputs, 'output')} more of the graph"
    )
    for status, heading in _HEADINGS.items():
        points = [point for point in plan.points if point.status == status]
        if points:
            print_heading(f"{heading}  {len(points)}", fg="red" if status == "not-capturable" else None)
            for alike in _alike(points):
                _print_points(alike)
    print_heading("IN THE neuron_config")
    click.echo(json.dumps(plan.config(), indent=2))
    for note in plan.notes:
        click.echo(f"note: {one_line(note)}", err=True)


def _alike(points: Sequence[PlannedPoint]) -> list[list[PlannedPoint]]:
    """The points of equal names but for numbers, of which the same is said."""
    groups: dict[tuple[str, ...], list[PlannedPoint]] = {}
    for point in points:
        said = (name_pattern(point.point), name_pattern(point.module), point.reason, *point.remarks)
        groups.setdefault(said, []).append(point)
    return list(groups.values())


def _print_points(points: Sequence[PlannedPoint]) -> None:
    first = points[0]
    name, listed = _common_name([point.point for point in points])
    if len(points) > 1:
        name = f"{name}: {counted(len(points), 'point')} ({some(listed, 4)})"
    other, _ = _common_name([point.module for point in points])
    what = f" = {other}" if first.status == "replaced" else ""
    what += ", its first argument" if first.is_input else ""
    click.echo(f"  {name}{what}")
    for text in (first.reason, *first.remarks):
        if text:
            click.echo(f"    {one_line(text)}")


def _common_name(names: Sequence[str]) -> tuple[str, list[str]]:
    """Names that differ in numbers alone as one, with `{}` for what differs; and these numbers of each."""
    numbers = [name_numbers(name) for name in names]
    differing = [place for place, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    words = ["{}" if place in differing else str(number) for place, number in enumerate(numbers[0])]
    pieces = name_pattern(names[0]).split("{}")
    name = "".join(part for pair in zip_longest(pieces, words, fillvalue="") for part in pair)
    return one_line(name), [".".join(str(each[place]) for place in differing) for each in numbers]
