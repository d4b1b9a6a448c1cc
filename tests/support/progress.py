"""A progress that keeps what it is given."""

from __future__ import annotations


class Stages:
    """Keeps the text of each stage.

    Args:
        stop_at: Count at which the call is interrupted; never if None.
    """

    def __init__(self, stop_at: int | None = None) -> None:
        self.texts: list[str] = []
        self._stop_at = stop_at

    def stage(self, text: str) -> None:
        self.texts.append(text)

    def advance(self, done: int, total: int | None) -> None:
        if done == self._stop_at:
            raise KeyboardInterrupt
