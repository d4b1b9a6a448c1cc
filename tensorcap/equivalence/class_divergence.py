"""Stage 0: the classes and the code of the port that a CPU runs and the device does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tensorcap.equivalence import captures
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.models import MODEL_SETTINGS
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.source_analysis import divergence
from tensorcap.wording import counted
from tensorcap_formats.open import open_archive
from tensorcap_formats.progress import Progress

FILE: Final = "class_divergence_report.json"
_FRAMEWORKS: Final = ("torch", "transformers", "tensorcap")  # whose classes a port uses as they are


def write_divergences(experiment: Experiment, progress: Progress) -> StageResult:
    """Read the port's sources, and write where a CPU, or one rank, goes another way than the device."""
    progress.stage("reading the port's sources")
    files = port_sources(experiment)
    if not files:
        content: dict[str, Any] = {"file": "", "divergence_count": 0, "divergences": []}
        experiment.write_json(FILE, content)
        return StageResult("none", ("The port has no sources of its own.",), (FILE,))
    result = divergence(files)
    by_file = result.to_json()["files"]
    entries = [{**entry, "file": one["file"]} for one in by_file for entry in one["divergences"]]
    content = {
        "file": by_file[0]["file"],
        "divergence_count": len(entries),
        "divergences": entries,
        "tensorcap": {"files": by_file, "between": result.to_json()["between"]},
    }
    experiment.write_json(FILE, content)
    words = [
        f"In {counted(len(files), 'file')} {counted(len(entries), 'place')} that choose another class on the "
        f"device than on a CPU, {counted(len(result.paths), 'place')} that choose other code."
    ]
    words += [
        f"{one['component']}: {one['cpu_class']} on a CPU, {one['device_class']} on the device "
        f"({one['source_location']}): stage 2 on a CPU says nothing of the latter."
        for one in entries
    ]
    return StageResult("none", tuple(words), (FILE,), figures={"divergence_count": len(entries)})


def port_sources(experiment: Experiment) -> tuple[Path, ...]:
    """Files of the port's code: that of the settings, and those of the classes of its modules."""
    named = Path(experiment.resolve(experiment.settings.parameters.target_modeling_file))
    files = [named] if named.suffix == ".py" else []
    with open_archive(experiment.folder / captures.TARGET) as archive:
        for name, source in (archive.run.get("sources") or {}).items():
            if name.partition(".")[0] not in _FRAMEWORKS:
                files.append(Path(source["file"]).expanduser())
    return tuple(dict.fromkeys(file.resolve() for file in files if file.is_file()))


STAGE: Final = Stage(
    0,
    "class-divergence",
    "code that only a device runs",
    write_divergences,
    (FILE,),
    needs=(captures.STAGE,),
    settings=MODEL_SETTINGS,
)
