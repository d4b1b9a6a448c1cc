"""How far a long task is: on stderr, on a terminal only."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tensorcap.wording import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Display
    from rich.progress import TaskID

    from tensorcap_formats.progress import Progress


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


class _LogLines(logging.Handler):
    """Prints what the library logs, a line each on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        above_display = "\r\x1b[K" if sys.stderr.isatty() else ""  # which draws itself again below
        click.echo(f"{above_display}{record.getMessage()}", err=True)


@contextmanager
def log_printed() -> Iterator[None]:
    """Print what the library logs in the block, such as for how long a compiler has been at work."""
    logger, handler = logging.getLogger("tensorcap"), _LogLines()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class StageLines:
    """Prints each stage of a task once, as a line on stderr: also in a pipe."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def stage(self, text: str) -> None:
        """Print what begins, unless it was printed before."""
        if text not in self._printed:
            self._printed.add(text)
            self._print(text)

    def advance(self, done: int, total: int | None) -> None:
        """Show nothing: a log is made of lines."""

    def _print(self, text: str) -> None:
        click.echo(text, err=True)


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


class _LiveStages(StageLines):
    """The same, and below the lines how far the stage is, with the time since it began."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._stage = ""
        self._begin_seconds = time.monotonic()
        self._count = 0

    def stage(self, text: str) -> None:
        super().stage(text)
        self._stage, self._begin_seconds = text.partition(" ")[0], time.monotonic()

    def advance(self, done: int, total: int | None) -> None:
        self._count = done

    def text(self) -> str:
        """How far it is."""
        seconds = time.monotonic() - self._begin_seconds
        return f"{self._stage}: {counted(self._count, 'tensor')}, {seconds:.0f} s" if self._stage else ""

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def capture_progress(*, is_live: bool = True) -> Iterator[Progress]:
    """Print the stages of captures; on a terminal, show how far each is.

    Args:
        is_live: Whether that may be shown; a log on the terminal already shows it.
    """
    if not is_live or not sys.stderr.isatty():
        yield StageLines()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    stages = _LiveStages(console)
    with Live(
        get_renderable=lambda: Text(stages.text()),
        console=console,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield stages
