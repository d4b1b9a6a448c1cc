"""The result of a verification of a port."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorcap.alignment import Order
from tensorcap.comparison import Comparison
from tensorcap.comparison.preflight import Preflight
from tensorcap.localization.suspect import Localization, Suspect
from tensorcap.localization.weights import WeightComparison


@dataclass(frozen=True, slots=True)
class Verification:
    """How far a port computes what the reference does.

    Attributes:
        path: The folder.
        preflight: What differs apart from tensors.
        order: Both orders of execution; None if a side has none.
        free: The comparison of the free runs.
        injected: That of the injected run; None without one.
        why_not_injected: Why there is none, "" if there is.
        is_refused: Whether there should have been one, and the reference's tensors did not fit.
        localization: Which modules are suspected, by what, and what the errors look like.
        inheriting: Keys of what is not green in the free run, and green once the inputs are right.
        weights: The comparison of weights before the target ran, of unlike frameworks.
        control: Of each output of a compiled target, how far a run without taps is from the free run.
        notes: What could not be run or written, a sentence each.
        summary: What is wrong, as sentences.
    """

    path: Path
    preflight: Preflight
    order: Order | None
    free: Comparison
    injected: Comparison | None
    why_not_injected: str
    is_refused: bool
    localization: Localization
    inheriting: Sequence[str]
    weights: WeightComparison | None = None
    control: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    summary: Sequence[str] = ()

    @property
    def suspects(self) -> Sequence[Suspect]:
        """Modules that may be wrong themselves, the first one first."""
        return self.localization.suspects

    @property
    def exit_status(self) -> int:
        """That of the worst comparison; at least 1 for a suspect, or if injection was refused (VER-40)."""
        injected = self.injected.exit_status if self.injected else int(self.is_refused)
        weights = self.weights.exit_status if self.weights else 0
        return max(self.free.exit_status, injected, int(bool(self.suspects)), weights)

    def to_json(self) -> Any:
        """The content of `verify.json` in the folder, which `tcap verify --json` prints."""
        return json.loads((self.path / "verify.json").read_text(encoding="utf-8"))
