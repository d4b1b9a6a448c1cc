"""Stage 0: the trees of modules of both sides: full, compressed, as flat paths, and for people to read."""

from __future__ import annotations

import json
from typing import Final

from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.models import MODEL_SETTINGS, Side, SideName, call_on_ranks, model_files, rank
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.runs import Tree, compressed, full, paths, tree_lines
from tensorcap.wording import counted
from tensorcap_formats.errors import UsageError
from tensorcap_formats.progress import Progress
from tensorcap_formats.run_info import RunInfo

FOLDER: Final = "model_tree"
_KINDS: Final = (".json", "_full.json", "_paths.txt", ".txt")


def write_trees(experiment: Experiment, progress: Progress) -> StageResult:
    """Build both models, and write their trees; of a port on ranks that of rank 0."""
    write_tree(experiment, "source")
    progress.stage("building the target")
    call_on_ranks(experiment, f"{__name__}:write_tree", side="target")
    names = {side: _names(side) for side in ("source", "target")}
    counts = {
        side: len((experiment.folder / listed[2]).read_text(encoding="utf-8").splitlines())
        for side, listed in names.items()
    }
    source, target = (counted(count, "module") for count in counts.values())
    words = f"The source has {source}, the target {target}."
    return StageResult("none", (words,), (*names["source"], *names["target"]), figures=counts)


def write_tree(experiment: Experiment, side: SideName) -> None:
    """Build a side, and write its trees.

    Args:
        experiment: The experiment.
        side: Which one.

    Raises:
        UsageError: The model has no modules.
    """
    recipe = Side(experiment, side).recipe
    tree = Tree.of_run(recipe.path, RunInfo.of(recipe.described()))
    if tree is None:
        raise UsageError(f"{recipe.path}: has no modules")
    if rank() != 0:
        return
    contents = (
        json.dumps(compressed(tree.root), indent=2, ensure_ascii=False),
        json.dumps(full(tree.root), indent=2, ensure_ascii=False),
        "\n".join(paths(tree.root)),
        "\n".join(tree_lines(tree.root)),
    )
    for name, text in zip(_names(side), contents, strict=True):
        experiment.write_text(name, f"{text}\n")


def _names(side: str) -> tuple[str, ...]:
    return tuple(f"{FOLDER}/model_tree_{side}{kind}" for kind in _KINDS)


STAGE: Final = Stage(
    0,
    "tree",
    "the modules of both sides",
    write_trees,
    (f"{FOLDER}/*",),
    settings=(*MODEL_SETTINGS, "run.tp"),
    sources=model_files,
)
