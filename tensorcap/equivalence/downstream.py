"""Stage 7: are the port's scores of tasks as good as the source's? Both run the same tasks by lm-eval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.equivalence.gates import Gate
from tensorcap.wording import counted
from tensorcap_formats.errors import UsageError

TOLERANCE: Final = 0.02  # 2 points of 100
_DIGITS: Final = 12  # of a difference of scores: what is behind them is rounding


@dataclass(frozen=True, slots=True)
class Score:
    """What a model reached in a task.

    Attributes:
        scenario: Of the tasks that were run alike.
        task: Name of the task.
        metric: Name of the metric, with lm-eval's filter.
        value: The score.
        rows: Rows of the task that it is of.
        is_better_if_higher: Whether more is better.
    """

    scenario: str
    task: str
    metric: str
    value: float
    rows: int
    is_better_if_higher: bool

    @property
    def place(self) -> tuple[str, str, str]:
        """What the score is of, which both sides have in common."""
        return self.scenario, self.task, self.metric

    @property
    def text(self) -> str:
        """What it is of, for people."""
        return f"{self.scenario}, {self.task}, {self.metric}"


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """A score of both sides.

    Attributes:
        source: The source's.
        target: The target's.
        tolerance: How much worse the target may be, of 1.
    """

    source: Score
    target: Score
    tolerance: float

    @property
    def delta(self) -> float:
        """Target less source."""
        return self.target.value - self.source.value

    @property
    def gate(self) -> Gate | None:
        """By how much the target is worse; None of a score that is no share of 1, such as a perplexity."""
        if not (self.source.is_better_if_higher and 0 <= self.source.value <= 1):
            return None
        # 0.60 - 0.58 is two points, though in binary it is a little more
        loss = None if math.isnan(self.delta) else round(-self.delta, _DIGITS)
        return Gate(f"loss in {self.source.text}", loss, "at most", self.tolerance)

    @property
    def text(self) -> str:
        """Both scores as a sentence."""
        words = f"{self.source.text}: source {self.source.value:.4g}, target {self.target.value:.4g}"
        gate = self.gate
        if gate is None:
            return f"{words}: no share of 1, which decides nothing."
        one = 1 / self.source.rows if self.source.rows else math.inf
        coarse = f"; of {counted(self.source.rows, 'row')} one is {one:.3g}" if one > self.tolerance else ""
        return f"{words}: {'passed' if gate.passed else 'failed'}{coarse}."


@dataclass(frozen=True, slots=True)
class DownstreamComparison:
    """The result of stage 7.

    Attributes:
        tasks: Scores of both sides; empty without a baseline.
        scores: The target's scores.
        undefined: How often the target's logits were no finite numbers.
        source_scores: The source's; None without a baseline.
        tolerance: How much worse the target may be, of 1.
    """

    tasks: tuple[TaskComparison, ...]
    scores: tuple[Score, ...]
    undefined: int
    source_scores: tuple[Score, ...] | None
    tolerance: float = TOLERANCE

    @property
    def gates(self) -> tuple[Gate, ...]:
        """What decides."""
        finite = Gate("answers whose logits are not finite", self.undefined, "at most", 0)
        return (finite, *(gate for task in self.tasks if (gate := task.gate) is not None))

    @property
    def passed(self) -> bool | None:
        """Whether all gates are passed; None if there is no score to hold the target's against."""
        if not all(gate.passed for gate in self.gates):
            return False
        return True if len(self.gates) > 1 else None

    @property
    def words(self) -> tuple[str, ...]:
        """The result as sentences, the summary first."""
        decided = self.gates[1:]
        failed = sum(not gate.passed for gate in decided)
        if self.source_scores is None:
            words = ["The source was not run, and no scores of it are kept: nothing is decided."]
            words += [f"{score.text}: target {score.value:.4g}." for score in self.scores]
        else:
            words = [
                f"{counted(len(decided), 'score')}, {failed} of them worse than the source's by more than "
                f"{self.tolerance:.3g}."
            ]
            words += [task.text for task in self.tasks]
        if self.undefined:
            words.insert(
                0, f"Of {counted(self.undefined, 'answer')} the target's logits are no finite numbers."
            )
        return tuple(words)

    def to_json(self) -> dict[str, Any]:
        """The content of `results/stage7/stage7_summary.json`."""
        return {
            "lm_eval_hf": None if self.source_scores is None else scores_json(self.source_scores),
            "lm_eval": scores_json(self.scores),
            "comparison": {
                "tasks": [
                    {
                        "scenario": task.source.scenario,
                        "task": task.source.task,
                        "metric": task.source.metric,
                        "hf": _number(task.source.value),
                        "neuron": _number(task.target.value),
                        "delta": _number(task.delta),
                        "tolerance": task.tolerance,
                        "passed": None if (gate := task.gate) is None else gate.passed,
                    }
                    for task in self.tasks
                ],
                "overall_pass": self.passed,
            },
            "num_undefined": self.undefined,
        }


def compare_scores(
    source: Sequence[Score] | None,
    target: Sequence[Score],
    *,
    undefined: int = 0,
    tolerance: float = TOLERANCE,
) -> DownstreamComparison:
    """Hold the target's scores against the source's.

    Args:
        source: The source's; None if there are none.
        target: The target's.
        undefined: How often the target's logits were no finite numbers.
        tolerance: How much worse the target may be, of 1.

    Raises:
        UsageError: The scores are of unlike tasks.
    """
    if source is None:
        return DownstreamComparison((), tuple(target), undefined, None, tolerance)
    by_place = {score.place: score for score in target}
    if by_place.keys() != {score.place for score in source}:
        raise UsageError("source and target have scores of unlike tasks", hint="Run both again: --again.")
    tasks = tuple(TaskComparison(score, by_place[score.place], tolerance) for score in source)
    return DownstreamComparison(tasks, tuple(target), undefined, tuple(source), tolerance)


def scores_json(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Scores as JSON values."""
    return [
        {
            "scenario": score.scenario,
            "task": score.task,
            "metric": score.metric,
            "value": score.value,
            "rows": score.rows,
            "higher_is_better": score.is_better_if_higher,
        }
        for score in scores
    ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def read_scores(where: str, entries: object) -> tuple[Score, ...]:
    """Read what `scores_json` gives.

    Raises:
        UsageError: It is something else.
    """
    members = {
        "scenario": str,
        "task": str,
        "metric": str,
        "value": float,
        "rows": int,
        "higher_is_better": bool,
    }
    scores = []
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, Mapping) or not all(
            isinstance(entry.get(name), kind) for name, kind in members.items()
        ):
            raise UsageError(f"{where}: holds no scores of stage 7", hint="Run it again: --again.")
        scores.append(Score(*(entry[name] for name in members)))
    return tuple(scores)
