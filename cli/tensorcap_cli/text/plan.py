"""A plan of a capture on a device, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    name = one_line(first.point)
    if len(points) > 1:
        numbers = [name_numbers(point.point)[-1:] for point in points]
        listed = some([str(number[0]) for number in numbers if number], 4)
        name = f"{one_line(name_pattern(first.point))}: {counted(len(points), 'point')} ({listed})"
    other = one_line(name_pattern(first.module) if len(points) > 1 else first.module)
    what = f" = {other}" if first.status == "replaced" else ""
    what += ", its first argument" if first.is_input else ""
    click.echo(f"  {name}{what}")
    for text in (first.reason, *first.remarks):
        if text:
            click.echo(f"    {one_line(text)}")
