"""Runs of a bisection, and the file that keeps them, so that an interrupted search goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorcap_formats.errors import UsageError


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the target.

    Attributes:
        cut: Key text of the last result that was grafted; `all`, or `none`.
        error: Relative error of the final output, no unit; None where a check judged.
        is_good: Whether the final output was good.
    """

    cut: str
    error: float | None
    is_good: bool


@dataclass(slots=True)
class State:
    """What runs came to, in a file where there is one."""

    path: Path | None
    about: Mapping[str, Any]
    found: dict[str, Run] = field(default_factory=dict)

    def load(self) -> None:
        """Read what an earlier search left.

        Raises:
            UsageError: It is of another search.
        """
        if self.path is None or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        try:
            about, *runs = map(json.loads, lines)
            self.found = {r["cut"]: Run(r["cut"], r["error"], r["is_good"]) for r in runs}
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self.path}: is no state of a bisection", hint="Name another file.") from None
        if about != self.about:
            raise UsageError(f"{self.path}: is of another search", hint="Name another file, or delete it.")

    def add(self, run: Run) -> None:
        """Keep what a run came to."""
        self.found[run.cut] = run
        if self.path is None:
            return
        is_new = not self.path.exists()
        with open(self.path, "a", encoding="utf-8") as file:
            if is_new:
                file.write(json.dumps(self.about) + "\n")
            file.write(json.dumps({"cut": run.cut, "error": run.error, "is_good": run.is_good}) + "\n")
