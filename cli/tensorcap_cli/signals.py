"""Signals that end a command in order: SIGTERM, and SIGHUP of a terminal that is closed, as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

OF_SHELLS: Final = 128  # and the number of the signal: the exit status, as shells say it
_NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
_UNFINISHED_CALLS: Final = "tensorcap.adapters.native_call"  # a module that is loaded where one is made


class EndedBySignal(KeyboardInterrupt):
    """A signal ends the command; caught where an interrupt by the keyboard is."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def signal_of(error: KeyboardInterrupt) -> int:
    """The number of the signal that an interrupt stands for."""
    return error.number if isinstance(error, EndedBySignal) else signal.SIGINT


def exit_status_of(error: KeyboardInterrupt) -> int:
    """The exit status of a command that an interrupt ends."""
    return OF_SHELLS + signal_of(error)


@contextmanager
def signals_raised() -> Iterator[None]:
    """Have the first signal that ends a process raise an error in the block, so that it is left in order.

    What the block does then is not disturbed by a second one, except by a second Ctrl-C. A signal that this
    process was started to ignore, as `nohup` does, is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    ours = [n for n, h in before.items() if h in (signal.SIG_DFL, signal.default_int_handler)]

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for other in ours:
            signal.signal(other, signal.default_int_handler if other == signal.SIGINT else signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else EndedBySignal(number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def leave_unfinished_calls(status: int) -> None:
    """End the process at once if a native call is left that nothing can end, such as a compilation."""
    calls = sys.modules.get(_UNFINISHED_CALLS)
    if calls is not None and calls.is_any_left():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
