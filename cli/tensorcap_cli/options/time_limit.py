"""A command in a process of its own, ended if it takes too long: a compiler cannot be interrupted."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from tensorcap_cli.options.sections import run_option
from tensorcap_cli.signals import OF_SHELLS, exit_status_of, signal_of

_Function = TypeVar("_Function", bound=Callable[..., Any])

_GRACE_SECONDS: Final = 20.0  # to keep what was recorded, and to clean up; a compiler holds it up for some
_POLL_SECONDS: Final = 0.05
_STDERR: Final = 2


def time_limit_option(function: _Function) -> _Function:
    """Give a command `--timeout`; its `output`, if it has one, says where the log lies."""

    @run_option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Run in a process of its own, and end it after this time; its log is kept.",
    )
    @functools.wraps(function)
    def command(*args: Any, timeout: float | None, **kwargs: Any) -> Any:
        if timeout is not None:
            output = kwargs.get("output")
            log = None if output is None else Path(f"{Path(output)}.log")  # beside a folder, not in it
            continue_in_child(timeout, log)
        return function(*args, **kwargs)

    return command  # type: ignore[return-value] # it takes what the function takes


def continue_in_child(seconds: float, log: Path | None) -> None:
    """Return in a new process, and end this one as that one ends.

    What is written to the standard error past Python, as compilers do, goes to the log, and so does what the
    process was at when it had to be ended. The log is kept if it says something and the process did not end
    with 0.

    Args:
        seconds: How long the new process may take.
        log: Where the log lies; a temporary file if None.

    Raises:
        CaptureError: It took longer, or a signal ended it.
    """
    if not hasattr(os, "fork"):
        raise click.UsageError("--timeout: this system cannot fork a process.")
    log, file = _open_log(log)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()  # nothing with threads is loaded yet
    if child == 0:
        _redirect_errors(file)
        return
    os.close(file)
    status = _wait_for(child, seconds)
    if status is not None and status >= 0:
        if status == 0 or not log.stat().st_size:
            log.unlink()
        else:
            click.echo(f"log: {log}", err=True)
        click.get_current_context().exit(status)
    from tensorcap_formats.errors import CaptureError

    how = f"took more than {seconds:g} s" if status is None else f"died of {signal.Signals(-status).name}"
    raise CaptureError(
        f"the run {how}; its log is {log}",
        hint="A first compile takes minutes; what was compiled once is taken from the compiler's cache.",
    )


def _open_log(path: Path | None) -> tuple[Path, int]:
    from tensorcap_formats.output_path import open_log

    if path is None:
        file, name = tempfile.mkstemp(prefix="tcap-", suffix=".log")
        return Path(name), file
    try:
        return open_log(path)
    except OSError as error:
        raise click.UsageError(
            f"--timeout: {path}: {error.strerror}, expected a place for the log."
        ) from None


def _redirect_errors(log: int) -> None:
    """In the new process: have all but Python write its errors to the log."""
    sys.stderr = os.fdopen(os.dup(_STDERR), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    os.dup2(log, _STDERR)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)


def _wait_for(child: int, seconds: float) -> int | None:
    """Wait for a process.

    Returns:
        Its exit status, of a signal its negative number; None if it had to be ended.
    """
    try:
        status = _poll(child, seconds)
    except KeyboardInterrupt as error:  # by a terminal the child was sent the signal, too
        number = signal_of(error)
        # one that was interrupted goes on with ending whatever else it is sent but a second interrupt
        status = _end(child, signal.SIGTERM if number == signal.SIGINT else number)
        if status is None:
            raise
        return status if 0 <= status < OF_SHELLS else exit_status_of(error)
    if status is None:
        # to say where it is; to end in order, also if it was started to ignore an interrupt
        for number in (signal.SIGUSR1, signal.SIGINT):
            os.kill(child, number)
            time.sleep(_POLL_SECONDS)
        _end(child, signal.SIGTERM)
    return status


def _end(child: int, number: int) -> int | None:
    """Have a process end in order by a signal, or kill it if it does not.

    Returns:
        Its exit status; None if it had to be killed.
    """
    os.kill(child, number)
    if (status := _poll(child, _GRACE_SECONDS)) is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status


def _poll(child: int, seconds: float) -> int | None:
    """The exit status of a process if it ends in time."""
    last = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > last:
            return None
        time.sleep(_POLL_SECONDS)
