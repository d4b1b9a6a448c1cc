"""Stage 0: a run of each side, whose tensors the mapping and the component tests are made of."""

from __future__ import annotations

from typing import Final

from tensorcap.adapters import adapter_for
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.models import MODEL_SETTINGS, Side, call_on_ranks, model_files, rank
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.session import capture_workload
from tensorcap.wording import counted
from tensorcap.workload import Workload
from tensorcap_formats.merge import merge
from tensorcap_formats.open import open_archive
from tensorcap_formats.progress import Progress
from tensorcap_formats.ranks import rank_path

FOLDER: Final = "captures"
SOURCE: Final = f"{FOLDER}/source.h5"
TARGET: Final = f"{FOLDER}/target.h5"
PATCHED: Final = f"{FOLDER}/patched.h5"


def write_captures(experiment: Experiment, progress: Progress) -> StageResult:
    """Capture the source in the wide precision, and the target in that under test; ranks are merged."""
    run = experiment.settings.run
    progress.stage("capturing the source")
    recipe = Side(experiment, "source").recipe
    workload = source_workload(experiment, run.reference_dtype or run.dtype)
    capture_workload(workload, experiment.path(SOURCE), run={"workload": recipe.describe()})
    progress.stage("capturing the target")
    capture_target(experiment, TARGET)
    counts = {}
    for name in (SOURCE, TARGET):
        with open_archive(experiment.folder / name) as archive:
            counts[name] = len(archive)
    source, target = (counted(count, "tensor") for count in counts.values())
    wide = run.reference_dtype or run.dtype
    words = f"{source} of the source in {wide}, {target} of the target in {run.dtype}."
    return StageResult("none", (words,), (SOURCE, TARGET))


def capture_target(experiment: Experiment, name: str, *, is_patched: bool = False) -> None:
    """Capture the target in the precision under test, on all its ranks.

    Args:
        experiment: The experiment.
        name: Of the archive in the folder.
        is_patched: Whether the patches are applied first.

    Raises:
        CaptureError: A process died, or nothing was captured.
    """
    count = experiment.settings.run.tp
    path = experiment.path(name)
    call_on_ranks(experiment, f"{__name__}:capture_rank", name=name, is_patched=is_patched)
    if count > 1:
        paths = [rank_path(path, number) for number in range(count)]
        merge(paths, path)
        for each in paths:
            each.unlink()


def capture_rank(experiment: Experiment, *, name: str, is_patched: bool) -> None:
    """Capture the target as the rank that this process is."""
    side = Side(experiment, "target", is_patched)
    path = experiment.folder / name
    if experiment.settings.run.tp > 1:
        path = rank_path(path, rank())
    workload = side.build(experiment.settings.run.dtype)
    capture_workload(workload, path, run={"workload": side.recipe.describe()})


def source_workload(experiment: Experiment, dtype: str) -> Workload:
    """The source in a precision, with an attention that computes its scores as tensors, as ports have it."""
    workload = Side(experiment, "source").build(dtype)
    return adapter_for(workload.model).with_eager_attention(workload) or workload


STAGE: Final = Stage(
    0,
    "capture",
    "a run of each side",
    write_captures,
    (f"{FOLDER}/source.h5", f"{FOLDER}/target.h5"),
    settings=(*MODEL_SETTINGS, "run.tp", "run.dtype", "run.reference_dtype"),
    sources=model_files,
)
