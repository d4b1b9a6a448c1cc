"""Why a pair has its status: the decisions of all stages and tests, in order, and which one counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.pair import Decision, Pair, Stage, Status, worst_status
from tensorcap_formats.errors import UsageError, no_such_tensor
from tensorcap_formats.json_values import json_object


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one test of a stage, or of a stage without tests, for a pair.

    Attributes:
        stage: The stage.
        test: Name of the test; "" for a stage without one.
        value: The value that was tested; None without a test.
        limit: The largest value that is green, or the smallest of a metric of which more is better; None
            without a test.
        status: The status by this step alone; None if it left the status as it was.
        text: The step as a sentence, "" if the status says all.
        is_decisive: Whether the pair has its status by this step.
    """

    stage: Stage
    test: str
    value: float | None
    limit: float | None
    status: Status | None
    text: str
    is_decisive: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a pair has its status.

    Attributes:
        key: Key text of the pair.
        status: Its status.
        steps: Every stage and test that looked at it, in order.
    """

    key: str
    status: Status
    steps: tuple[Step, ...]

    @property
    def decided_by(self) -> Stage:
        """The stage that decided."""
        return next(step.stage for step in self.steps if step.is_decisive)

    def to_json(self) -> dict[str, Any]:
        """Return the members that `tcap compare --why KEY --json` prints."""
        return {
            "key": self.key,
            "status": self.status,
            "decided_by": self.decided_by,
            "steps": [{**json_object(step), "test": step.test or None} for step in self.steps],
        }


def explain(comparison: Comparison, key: str) -> Explanation:
    """Explain the status of one pair by its history.

    Args:
        comparison: A comparison of archives; one that was read from a file has no history.
        key: Key text of the pair.

    Raises:
        TensorNotFoundError: There is no pair of that key.
        UsageError: The comparison was read from a file.
    """
    by_key = {pair.key: pair for pair in comparison.pairs}
    if key not in by_key:
        raise no_such_tensor(str(comparison.reference.path), key, by_key)
    pair = by_key[key]
    if not pair.history:
        raise UsageError(f"{key}: a saved comparison does not say how it was judged, expected the archives")
    decisive = max(place for place, decision in enumerate(pair.history) if decision.status is not None)
    steps = [
        step
        for place, decision in enumerate(pair.history)
        for step in _steps(pair, decision, is_decisive=place == decisive)
    ]
    return Explanation(pair.key, pair.status, tuple(steps))


def _steps(pair: Pair, decision: Decision, *, is_decisive: bool) -> Iterator[Step]:
    if not decision.findings:
        text = decision.reason
        if decision.stage == "pairing" and pair.reference is not None and pair.target is not None:
            text = text or f"paired with {pair.target.key.text}"
        yield Step(decision.stage, "", None, None, decision.status, text, is_decisive)
        return
    worst = worst_status(decision.findings)
    for finding in decision.findings:
        yield Step(
            decision.stage,
            finding.test,
            finding.value,
            finding.limit,
            finding.status,
            finding.text,
            is_decisive and finding.status == worst,
        )
