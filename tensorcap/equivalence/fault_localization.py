"""Stage 3: which component to begin with: the earliest step, what explains others, root cause and hint.

1. Components are put in the order of execution, if the file says it, else left in its own.
2. A component that failed and has one within it that failed is explained by that, and is no fault.
3. Of the others, runs of failures are steps, alone ones spikes: steps come first, the earliest of them first;
   then spikes in execution order; the first is the primary fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tensorcap.equivalence import components
from tensorcap.equivalence.component_result import ComponentResult, read_results
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.reports.equivalence import Component, Fault, faults, stage3
from tensorcap.runs import lies_within
from tensorcap.wording import counted, some
from tensorcap_formats.progress import Progress

FILE: Final = "results/stage3.json"
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Localized:
    """The faults among components.

    Attributes:
        faults: The faults, the primary one first.
        explained: Components that failed since one within them did, each with that.
    """

    faults: tuple[Fault, ...]
    explained: tuple[tuple[str, str], ...]


def localize_faults(results: Sequence[ComponentResult]) -> Localized:
    """Find the faults among the results of component tests."""
    ordered = list(results)
    if all(one.place is not None for one in ordered):
        ordered.sort(key=lambda one: one.place or 0)
    failed = [one.component for one in ordered if not one.passed]
    explained = {
        site: next(other for other in failed if lies_within(other, site))
        for site in failed
        if any(lies_within(other, site) for other in failed)
    }
    known = [
        Component(one.component, one.ratio, one.passed, one.error)
        for one in ordered
        if one.component not in explained
    ]
    listed = list(faults(known, by_place=True))
    verdicts = {one.component: one.verdict for one in ordered}
    listed = [replace(f, description=_description(f, verdicts[f.component])) for f in listed]
    return Localized(tuple(listed), tuple(explained.items()))


def write_faults(experiment: Experiment, progress: Progress) -> StageResult:
    """Read the stage 2 file, and write `stage3.json`."""
    progress.stage("localizing")
    content = experiment.read_json(components.FILE, stage="components")
    localized = localize_faults(read_results(content, str(experiment.folder / components.FILE)))
    experiment.write_json(FILE, stage3_content(localized))
    if not localized.faults:
        return StageResult("passed", ("No component failed.",), (FILE,))
    first = localized.faults[0]
    words = [f"{counted(len(localized.faults), 'fault')}, first {first.component} ({first.pattern})."]
    words += [
        f"{f.component} ({f.pattern}): {f.root_cause}: {f.description}" for f in localized.faults[:_SHOWN]
    ]
    if localized.explained:
        names = [f"{site} by {inner}" for site, inner in localized.explained]
        words.append(f"Explained by what is within: {some(names)}.")
    figures = {"num_faults": len(localized.faults), "primary_fault": first.component}
    return StageResult("failed", tuple(words), (FILE,), figures=figures)


def stage3_content(localized: Localized) -> dict[str, Any]:
    """The content of a stage 3 file."""
    explained = [{"component": site, "by": inner} for site, inner in localized.explained]
    return {**stage3(localized.faults), "tensorcap": {"explained": explained}}


def _description(fault: Fault, verdict: str) -> str:
    """The description of a fault; what R can't say, of elements that are not finite, in its place."""
    if "finite on one side" in verdict:
        return f"{verdict}: a division by zero, an overflow, or a mask."
    return fault.description


STAGE: Final = Stage(
    3,
    "localize",
    "where faults begin, and their causes",
    write_faults,
    (FILE,),
    needs=(components.STAGE,),
    is_optional=True,
    when_failed="tcap equivalence patch writes the skeleton of a patch for the first fault.",
)
