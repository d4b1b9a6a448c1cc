"""A progress that keeps what it receives."""

from __future__ import annotations


class RecordedProgress:
    """Keeps stages and advances, as `tensorcap_formats.progress.Progress` gets them.

    Attributes:
        stages: The text of each stage.
        advances: Done and total of each advance.
    """

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.advances: list[tuple[int, int | None]] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def advance(self, done: int, total: int | None) -> None:
        self.advances.append((done, total))
