"""Stages of an experiment, and faults among components, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import one_line
from tensorcap_cli.text.output import print_table

if TYPE_CHECKING:
    from tensorcap.equivalence import StageState
    from tensorcap.reports.equivalence import Fault

_COLORS: Final = {"passed": "green", "failed": "red", "done": None, "to do": "yellow"}


def print_states(states: Sequence[StageState]) -> None:
    """Print a table of stages, and what to do next."""
    rows, colors = [], []
    for state in states:
        words = state.result.words[0] if state.result else state.stage.title
        edited = f" (edited: {', '.join(state.edited)})" if state.edited else ""
        rows.append([str(state.stage.number), state.stage.name, state.state, one_line(words + edited)])
        colors.append([None, None, _COLORS[state.state], None])
    print_table(["stage", "name", "state", ""], rows, left=(0, 1, 2, 3), flexible=3, colors=colors)
    for line in _next(states):
        click.echo(line)


def print_state(state: StageState) -> None:
    """Print what came of a stage."""
    result = state.result
    color = _COLORS[state.state]
    click.secho(f"{state.stage.number} {state.stage.name}: {state.state}", fg=color, bold=True)
    for words in () if result is None else result.words:
        click.echo(f"   {one_line(words)}")
    for words in state.next:
        click.echo(f"   Next: {one_line(words)}")
    if result is not None and result.files:
        shown = ", ".join(result.files[:3]) + (", …" if len(result.files) > 3 else "")
        click.echo(f"   {shown}", err=True)


def print_faults(faults: Sequence[Fault]) -> None:
    """Print faults in their order."""
    if not faults:
        click.secho("No component failed.", fg="green", bold=True)
    for place, fault in enumerate(faults, 1):
        click.secho(f"{place}. {one_line(fault.component)} ({fault.pattern})", fg="red", bold=True)
        click.echo(f"   {fault.root_cause}: {one_line(fault.description)}")


def _next(states: Sequence[StageState]) -> list[str]:
    from tensorcap.equivalence import steps_after

    if any(state.state == "failed" for state in states):
        return [f"Next: {one_line(words)}" for words in steps_after(states)]
    waiting = next((s for s in states if s.state == "to do" and not s.stage.is_optional), None)
    return [] if waiting is None else [f"Next: tcap equivalence {waiting.stage.name}, or run."]
