"""Progress of long work, for whoever shows it: a bar, a log, or nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives what a long call is doing and how far it is."""

    def stage(self, text: str) -> None:
        """Begin a new stage.

        Args:
            text: What is being done, as a short phrase: `comparing`, `running the target`.
        """

    def advance(self, done: int, total: int | None) -> None:
        """Report how far the current stage is.

        Args:
            done: Units of work that are finished: tensors, bytes or runs.
            total: How many there are; None if that is not known.
        """


class Silent:
    """The progress of a call that nobody watches."""

    def stage(self, text: str) -> None:
        """Show nothing."""

    def advance(self, done: int, total: int | None) -> None:
        """Show nothing."""
