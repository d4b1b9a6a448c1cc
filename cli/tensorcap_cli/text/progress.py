"""How far a long task is: on stderr, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import TaskID


class Bar:
    """Shows the stages of a task and how far each is, as `tensorcap_formats.progress.Progress` asks for."""

    def __init__(self, display: Display, task: TaskID) -> None:
        self._display = display
        self._task = task

    def stage(self, text: str) -> None:
        """Begin a new stage."""
        self._display.update(self._task, description=text, completed=0, total=None)

    def advance(self, done: int, total: int | None) -> None:
        """Show how far the current stage is."""
        self._display.update(self._task, completed=done, total=total)


@contextmanager
def spinner(stage: str) -> Iterator[Bar | None]:
    """Show that a task goes on, and for how long by now.

    Args:
        stage: What is being done, until another stage begins.

    Yields:
        What takes the stages; None if nothing is shown.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with _shown(
        stage, SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    ) as bar:
        yield bar


@contextmanager
def byte_bar(stage: str) -> Iterator[Bar | None]:
    """Show how many bytes of a task are done.

    Args:
        stage: What is being done, until another stage begins.

    Yields:
        What takes the stages, and the bytes done and those in all; None if nothing is shown.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    with _shown(stage, *columns, TimeRemainingColumn()) as bar:
        yield bar


@contextmanager
def _shown(stage: str, *columns: Any) -> Iterator[Bar]:
    from rich.console import Console
    from rich.progress import Progress as Display

    with Display(*columns, console=Console(stderr=True), transient=True) as display:
        yield Bar(display, display.add_task(stage, total=None))
