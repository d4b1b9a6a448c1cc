"""The stages of the method in their order, and how they are run one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap.equivalence import (
    captures,
    class_divergence,
    component_files,
    components,
    downstream_stage,
    fault_localization,
    mapping,
    patches,
    token_stages,
    trees,
)
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap_formats.json_values import json_value
from tensorcap_formats.progress import Progress, Silent

STAGES: Final[tuple[Stage, ...]] = (  # in the order in which `tcap equivalence run` runs them
    captures.STAGE,
    trees.STAGE,
    mapping.STAGE,
    class_divergence.STAGE,
    token_stages.SMOKE,
    component_files.STAGE,
    components.STAGE,
    fault_localization.STAGE,
    patches.STAGE,
    token_stages.FORCED,
    downstream_stage.STAGE,
)
State = Literal["passed", "failed", "done", "to do"]


@dataclass(frozen=True, slots=True)
class StageState:
    """How far a stage of an experiment is.

    Attributes:
        stage: The stage.
        result: What it came to; None if it is to be run, for the first time or again.
        edited: Files of it that a person has edited.
    """

    stage: Stage
    result: StageResult | None
    edited: tuple[str, ...] = ()

    @property
    def state(self) -> State:
        """In a word."""
        if self.result is None:
            return "to do"
        return "done" if self.result.gate == "none" else self.result.gate

    @property
    def exit_status(self) -> int:
        """That of its command."""
        return 0 if self.result is None else self.result.exit_status

    @property
    def next(self) -> tuple[str, ...]:
        """What to do next, as sentences."""
        if self.result is None:
            return ()
        general = (self.stage.when_failed,) if self.result.gate == "failed" and self.stage.when_failed else ()
        return (*self.result.next, *general)

    def to_json(self) -> dict[str, Any]:
        """The members that the stage's command prints with `--json`, as JSON values."""
        result = self.result
        return {
            "stage": self.stage.number,
            "name": self.stage.name,
            "state": self.state,
            "words": [] if result is None else list(result.words),
            "files": [] if result is None else list(result.files),
            "edited": list(self.edited),
            "next": list(self.next),
            "figures": {} if result is None else json_value(dict(result.figures)),
            "exit_status": self.exit_status,
        }


def stage_named(name: str) -> Stage:
    """The stage of a command."""
    return next(stage for stage in STAGES if stage.name == name)


def states(experiment: Experiment) -> tuple[StageState, ...]:
    """How far each stage of an experiment is."""
    return tuple(StageState(stage, stage.result(experiment), stage.edited(experiment)) for stage in STAGES)


def steps_after(listed: Sequence[StageState]) -> tuple[str, ...]:
    """What to do next, as sentences: of the gate that failed first what says why; nothing if none did."""
    failed = next((state for state in listed if state.state == "failed"), None)
    if failed is None:
        return ()
    why = [state for state in listed if state.stage.name in failed.stage.then and state.result is not None]
    return (why or [failed])[-1].next


def run_stage(
    experiment: Experiment, stage: Stage, *, again: bool = False, progress: Progress | None = None
) -> StageState:
    """Run a stage, after those that it needs; what is done already is not done again.

    Args:
        experiment: The experiment.
        stage: The stage.
        again: Whether it is run even if it is done.
        progress: Shows what is being done.

    Raises:
        TensorcapError: A stage that it needs, or it itself, could not be run.
    """
    progress = progress or Silent()
    result = None if again else stage.result(experiment)
    if result is None:
        for needed in stage.needs:
            run_stage(experiment, needed, progress=progress)
        result = None if again else stage.result(experiment)  # if what it needs came to the same as before
    if result is None:
        progress.stage(f"stage {stage.number}, {stage.name}: {stage.title}")
        result = stage.run_recorded(experiment, progress)
    return StageState(stage, result, stage.edited(experiment))


def run_stages(experiment: Experiment, *, progress: Progress | None = None) -> Iterator[StageState]:
    """Run all stages but optional ones, in order, until a gate fails; each as it is over.

    If a gate fails, the stages that say why run too; if the last of them passes, as with a patch, it goes on.
    """
    for stage in STAGES:
        if stage.is_optional:
            continue
        state = run_stage(experiment, stage, progress=progress)
        yield state
        for name in stage.then if state.state == "failed" else ():
            state = run_stage(experiment, stage_named(name), progress=progress)
            yield state
        if state.state == "failed":
            return
