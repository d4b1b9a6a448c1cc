"""Stage 0: the trees of modules of both sides: full, compressed, as flat paths, and for people to read."""

from __future__ import annotations

import json
from typing import Final

from tensorcap.equivalence import captures
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.runs import Tree, compressed, full, paths, tree_lines
from tensorcap.wording import counted
from tensorcap_formats.open import open_archive
from tensorcap_formats.progress import Progress

FOLDER: Final = "model_tree"
_KINDS: Final = (".json", "_full.json", "_paths.txt", ".txt")


def write_trees(experiment: Experiment, progress: Progress) -> StageResult:
    """Write the trees of both sides, as their runs have them; of a port on ranks that of one rank."""
    progress.stage("writing the trees")
    names: list[str] = []
    counts = {}
    for side, archive_name in (("source", captures.SOURCE), ("target", captures.TARGET)):
        with open_archive(experiment.folder / archive_name) as archive:
            root = Tree.of(archive).root
        contents = (
            json.dumps(compressed(root), indent=2, ensure_ascii=False),
            json.dumps(full(root), indent=2, ensure_ascii=False),
            "\n".join(paths(root)),
            "\n".join(tree_lines(root)),
        )
        for kind, text in zip(_KINDS, contents, strict=True):
            names.append(experiment.write_text(f"{FOLDER}/model_tree_{side}{kind}", f"{text}\n"))
        counts[side] = len(paths(root))
    source, target = (counted(count, "module") for count in counts.values())
    words = f"The source has {source}, the target {target}."
    return StageResult("none", (words,), tuple(names), figures=counts)


STAGE: Final = Stage(
    0,
    "tree",
    "the modules of both sides",
    write_trees,
    (f"{FOLDER}/*",),
    needs=(captures.STAGE,),
)
