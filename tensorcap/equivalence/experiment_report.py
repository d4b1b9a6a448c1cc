"""An experiment as a report: its stages, the faults among its components, and all that it was run with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorcap.equivalence import components, fault_localization, patches
from tensorcap.equivalence.component_result import ComponentResult, read_results
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.stages import StageState, states, steps_after
from tensorcap.reports.equivalence import Fault, read_faults
from tensorcap.reports.html import ComponentRow, ExperimentPage, StageRow
from tensorcap.reports.next_step import NOTHING, NextStep
from tensorcap.wording import conjugated, counted
from tensorcap_formats.errors import UsageError


def gather_experiment(folder: Path) -> ExperimentPage:
    """Gather what the stages of an experiment came to; none is run, and what is not believed is to be run.

    Args:
        folder: The folder of the experiment.

    Raises:
        ReadError: The folder has no settings, or a file of a stage cannot be read.
        UsageError: A file makes no sense.
    """
    experiment = Experiment.open(folder)
    listed = states(experiment)
    done = {state.stage.name for state in listed if state.result is not None}
    results: tuple[ComponentResult, ...] = ()
    faults: tuple[Fault, ...] = ()
    if components.STAGE.name in done:
        content = experiment.read_json(components.FILE, stage=components.STAGE.name)
        results = read_results(content, str(folder / components.FILE))
        faults = fault_localization.localize_faults(results).faults
    if fault_localization.STAGE.name in done:
        faults = read_faults(folder / fault_localization.FILE)
    return ExperimentPage(
        title=_title(experiment),
        is_green=all(state.state in ("passed", "done") or state.stage.is_optional for state in listed),
        verdict=_verdict(listed, results),
        culprit=f"{faults[0].component} is at fault: {faults[0].description}" if faults else "",
        next=_next(folder, listed),
        stages=tuple(
            StageRow(
                state.stage.number,
                state.stage.name,
                state.stage.title,
                state.state,
                () if state.result is None else state.result.words,
                state.edited,
            )
            for state in listed
        ),
        faults=faults,
        components=_components(experiment, results, is_patched=patches.STAGE.name in done),
        settings=tuple(_settings(experiment)),
        exit_status=max(state.exit_status for state in listed),
    )


def _title(experiment: Experiment) -> str:
    given = experiment.settings.parameters
    target = f"{given.target_modeling_file}:{given.target_causal_class}".rstrip(":")
    return f"{target} against {given.source_model_path}"


def _verdict(listed: Sequence[StageState], results: Sequence[ComponentResult]) -> str:
    """Whether the port passes, of how many gates and components."""
    failed = [state.stage.name for state in listed if state.state == "failed"]
    passed = sum(state.state == "passed" for state in listed)
    waiting = [state for state in listed if state.state == "to do" and not state.stage.is_optional]
    gates = f"{passed} of {counted(passed + len(failed), 'gate')} passed"
    tested = (
        f", {sum(one.passed for one in results)} of {counted(len(results), 'component')}" if results else ""
    )
    left = (
        f" {counted(len(waiting), 'stage')} {conjugated(len(waiting), 'are')} to be run." if waiting else ""
    )
    if failed:
        return f"The port does not pass {', '.join(failed)}: {gates}{tested}.{left}"
    if not passed:
        return f"No gate was reached yet.{left}"
    return f"The port passes what was run: {gates}{tested}.{left}"


def _next(folder: Path, listed: Sequence[StageState]) -> NextStep:
    steps, where = steps_after(listed), shlex.quote(str(folder))
    if any(state.state == "failed" for state in listed):
        return NextStep(" ".join(steps) or "How far each stage is:", f"tcap equivalence status {where}")
    waiting = next((s for s in listed if s.state == "to do" and not s.stage.is_optional), None)
    if waiting is None:
        return NextStep(f"{NOTHING[0].upper()}{NOTHING[1:]}.")
    return NextStep(f"Stage {waiting.stage.number}, {waiting.stage.title}:", f"tcap equivalence run {where}")


def _components(
    experiment: Experiment, results: Sequence[ComponentResult], *, is_patched: bool
) -> tuple[ComponentRow, ...]:
    after: Mapping[str, Any] = {}
    if is_patched:
        with suppress(UsageError):  # the skeleton alone was written
            content = experiment.read_json(patches.FILE, stage=patches.STAGE.name)
            after = {entry["component"]: entry["r_ratio_after"] for entry in content["results"]}
    ordered = sorted(results, key=lambda one: one.place if one.place is not None else len(results))
    return tuple(
        ComponentRow(
            one.component,
            one.kind,
            one.ratio,
            one.limit,
            after.get(one.component),
            one.passed,
            one.error or one.verdict,
        )
        for one in ordered
    )


def _settings(experiment: Experiment) -> list[tuple[str, str]]:
    tables = asdict(experiment.settings)
    return [
        (f"{table}.{name}", str(value))
        for table, members in tables.items()
        for name, value in members.items()
        if value not in ("", None, (), [])
    ]
