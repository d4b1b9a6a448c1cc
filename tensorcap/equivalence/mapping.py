"""Stage 0: which modules belong together, as `component_mapping.json` with variables and reasons."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from tensorcap.alignment import align, component_mapping
from tensorcap.equivalence import captures
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.wording import counted, some
from tensorcap_formats.progress import Progress

FILE: Final = "component_mapping.json"


def write_mapping(experiment: Experiment, progress: Progress) -> StageResult:
    """Align the runs of both sides, and write the mapping; one that a person has edited stays."""
    is_edited = experiment.is_edited(FILE)
    progress.stage("aligning")
    source, target = (experiment.folder / name for name in (captures.SOURCE, captures.TARGET))
    aligned = align(source, target, mapping=experiment.folder / FILE if is_edited else None)
    summary = aligned.summary
    alignment = replace(aligned.alignment, tokens=None)  # for which the file has no place
    content = component_mapping(alignment, reference="ref", target="port").content
    experiment.write_editable(FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    words = [
        f"{summary.reference.mapped} of {counted(summary.reference.records, 'tensor')} of the source have a "
        f"counterpart, {summary.reference.explained} have none for a reason."
    ]
    for side, coverage in (("source", summary.reference), ("target", summary.target)):
        if coverage.unexplained:
            count = counted(len(coverage.unexplained), "tensor")
            words.append(
                f"Without a counterpart or a reason in the {side}: {count}: {some(coverage.unexplained)}."
            )
    next_steps = () if not aligned.exit_status else (f"Look through {FILE}, and edit it where it is wrong.",)
    figures = {"entries": len(aligned.alignment.entries), "unexplained": len(summary.reference.unexplained)}
    return StageResult("none", tuple(words), (FILE,), next_steps, figures)


STAGE: Final = Stage(
    0,
    "map",
    "which modules belong together",
    write_mapping,
    (FILE,),
    needs=(captures.STAGE,),
    edited_files=(FILE,),
)
