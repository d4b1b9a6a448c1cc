"""What a run waits for, for whoever shows how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Waiting:
    """Something that takes long and tells nothing, such as a compiler, or nothing.

    Example:
        >>> waiting = Waiting()
        >>> with waiting.on("compiling"):
        ...     waiting.text
        'compiling, 0 s'
        >>> waiting.text
        ''
    """

    def __init__(self) -> None:
        self._what = ""
        self._since_seconds = 0.0

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Wait for it during the block."""
        self._since_seconds = time.monotonic()
        self._what = what
        try:
            yield
        finally:
            self._what = ""

    @property
    def text(self) -> str:
        """What is waited for, and how long by now; "" if nothing is."""
        what = self._what
        return what and f"{what}, {time.monotonic() - self._since_seconds:.0f} s"
