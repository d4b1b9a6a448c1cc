"""How far a long call is, reported to a progress bar, a log, or nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives what a long call is doing and how far it is."""

    def stage(self, text: str) -> None:
        """Begin a new stage.

        Args:
            text: A short phrase: `comparing`, `running the target`.
        """

    def advance(self, done: int, total: int | None) -> None:
        """Report how far the current stage is.

        Args:
            done: Units of work that are finished: tensors, bytes or runs.
            total: How many there are; None if that is not known.
        """


class Silent:
    """Progress that is not shown."""

    def stage(self, text: str) -> None:
        """Show nothing."""

    def advance(self, done: int, total: int | None) -> None:
        """Show nothing."""
