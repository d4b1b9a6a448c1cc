"""What Core AI's runtime writes to the standard error stream itself, past Python, held back while it runs."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from typing import Final

_STDERR: Final = 2
_LINE: Final = re.compile(rb"ODIE \[\w+\]: [^\n]*\n")
_BEGINNING: Final = b"ODIE ["
_ONE_AT_A_TIME: Final = threading.Lock()  # there is one file descriptor


@contextlib.contextmanager
def without_runtime_log() -> Iterator[None]:
    """Leave the lines of the runtime (`ODIE [default]: Loading function 'main'`) out of the error stream.

    The descriptor leads to a pipe in the block. A thread passes on at once all else that is written to it,
    by whatever thread, Python's or not.
    """
    with _ONE_AT_A_TIME:
        try:
            saved = os.dup(_STDERR)
        except OSError:  # the process has no such stream
            yield
            return
        reader, writer = os.pipe()
        os.dup2(writer, _STDERR)
        os.close(writer)
        passing = threading.Thread(target=_pass_on, args=(reader, saved), daemon=True)
        passing.start()
        try:
            yield
        finally:
            os.dup2(saved, _STDERR)  # closes the pipe's last end, which ends the thread
            passing.join()
            os.close(reader)
            os.close(saved)


def _pass_on(reader: int, stream: int) -> None:
    """Copy what comes, but for lines of the runtime; what may be the beginning of one waits for its rest."""
    waiting = b""
    while chunk := os.read(reader, 1 << 16):
        waiting = _LINE.sub(b"", waiting + chunk)
        ready = _end_of_others(waiting)
        _write(stream, waiting[:ready])
        waiting = waiting[ready:]
    _write(stream, waiting)


def _end_of_others(text: bytes) -> int:
    """Where a line of the runtime may begin that is not over yet; the length of the text if none does."""
    begun = text.rfind(_BEGINNING)
    if begun >= 0 and b"\n" not in text[begun:]:
        return begun
    part = next((n for n in range(len(_BEGINNING) - 1, 0, -1) if text.endswith(_BEGINNING[:n])), 0)
    return len(text) - part


def _write(stream: int, text: bytes) -> None:
    while text:
        text = text[os.write(stream, text) :]
