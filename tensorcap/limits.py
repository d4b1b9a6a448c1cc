"""How much of what is wanted is recorded: which steps, how many calls, how many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user narrowed a capture to, beside globs.

    Attributes:
        steps: Only these, as ranges; all where it is empty.
        sample: At most the first so many calls of each site, over all steps; all where it is None.
        max_bytes: Record no tensor that would make the archive hold more than this; None for no limit.
    """

    steps: Sequence[range] = ()
    sample: int | None = None
    max_bytes: int | None = None

    @property
    def are_none(self) -> bool:
        """Whether everything is recorded."""
        return not self.steps and self.sample is None

    def allow(self, step: int, ordinal: int) -> bool:
        """Whether a call is recorded.

        Args:
            step: Number of its step.
            ordinal: How many calls of the site came before it in the run.
        """
        if self.steps and not any(step in span for span in self.steps):
            return False
        return self.sample is None or ordinal < self.sample

    def describe(self) -> dict[str, Any]:
        """The limits that were given, as the run's metadata keep them."""
        found: dict[str, Any] = {}
        if self.steps:
            found["steps"] = [[span.start, span.stop] for span in self.steps]
        if self.sample is not None:
            found["sample"] = self.sample
        if self.max_bytes is not None:
            found["max_bytes"] = self.max_bytes
        return found
