"""A call into native code, such as a compiler's, that a signal can end: it runs in a thread of its own.

Python handles signals in the main thread, between two of its instructions. A native call in that thread
holds them up until it returns, which a compiler does after minutes.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

_Result = TypeVar("_Result")

_POLL_SECONDS: Final = 0.2
REPORT_SECONDS: Final = 5.0  # native code holds Python up for some seconds more


class _NativeCall(threading.Thread):
    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(name="native call", daemon=True)
        self.result: object = None
        self.error: BaseException | None = None
        self._function = function
        self._context = contextvars.copy_context()

    def run(self) -> None:
        try:
            self.result = self._context.run(self._function)
        except BaseException as error:
            self.error = error


def call_natively(function: Callable[[], _Result], report: Callable[[float], None]) -> _Result:
    """Call a function, and wait for it so that a signal ends the wait.

    Args:
        function: Makes the call.
        report: Called every few seconds with those that went by.

    Returns:
        What the function returns; what it raises is raised.
    """
    began = reported = time.monotonic()
    call = _NativeCall(function)
    call.start()
    while call.is_alive():
        call.join(_POLL_SECONDS)
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS:
            reported = now
            report(now - began)
    if call.error is not None:
        raise call.error
    return call.result  # type: ignore[return-value] # what the function returned


def is_any_left() -> bool:
    """Whether a call is under way that nobody waits for any more."""
    return any(isinstance(thread, _NativeCall) for thread in threading.enumerate())
