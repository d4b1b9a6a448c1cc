"""A stage of the Equivalence method: what it needs and writes, what came of it, and whether that holds yet.

When a stage is over its record is written, last, which says by digest what the stage read and wrote. A stage
is believed only if its record is there and all is as it says, so that nothing is done twice and nothing that
was interrupted is believed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal, get_args

from tensorcap.equivalence.experiment import RECORDS, Experiment, digest_of
from tensorcap_formats.progress import Progress

Gate = Literal["passed", "failed", "none"]
_GATES: Final = get_args(Gate)
_FORMAT: Final = "tensorcap-equivalence-stage"
_MEMBERS: Final = {"words": list, "next": list, "figures": dict, "inputs": dict, "files": dict, "gate": str}


@dataclass(frozen=True, slots=True)
class StageResult:
    """What came of a stage.

    Attributes:
        gate: Whether its gate is passed; `none` if it has none.
        words: What it came to, as sentences; the first is the summary that `status` shows.
        files: Names of the files that it wrote, in the folder of the experiment.
        next: What to do next, as sentences, before what the stage says itself.
        figures: Numbers for `--json`, by name.
    """

    gate: Gate
    words: tuple[str, ...]
    files: tuple[str, ...]
    next: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_status(self) -> int:
        """1 if the gate failed, else 0."""
        return int(self.gate == "failed")


def _no_sources(experiment: Experiment) -> tuple[Path, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, of which one object stands in `stages.STAGES`.

    Attributes:
        number: The method's number of it.
        name: Its command.
        title: What it does, in few words.
        run: Runs it; files are written by the experiment, whole or not at all.
        files: Names of the files that it writes, as globs, in the folder of the experiment.
        needs: The stages whose files it reads.
        settings: The settings that it depends on, as `run.dtype`.
        sources: Paths of files outside the folder, or of a person's in it, that it depends on.
        edited_files: Those of its files that people edit, as globs: an edited one is not written over.
        is_optional: Whether `tcap equivalence run` leaves it out.
        then: Names of stages that run next if its gate fails: the last one's gate stands for it.
        when_failed: What to do if its gate fails, as a sentence.
    """

    number: int
    name: str
    title: str
    run: Callable[[Experiment, Progress], StageResult]
    files: tuple[str, ...]
    needs: tuple[Stage, ...] = ()
    settings: tuple[str, ...] = ()
    sources: Callable[[Experiment], tuple[Path, ...]] = _no_sources
    edited_files: tuple[str, ...] = ()
    is_optional: bool = False
    then: tuple[str, ...] = ()
    when_failed: str = ""

    def files_in(self, experiment: Experiment) -> tuple[str, ...]:
        """Names of the stage's files that are in the folder of an experiment."""
        folder = experiment.folder
        paths = {path for glob in self.files for path in folder.glob(glob) if path.is_file()}
        return tuple(sorted(str(path.relative_to(folder)) for path in paths))

    def inputs(self, experiment: Experiment) -> dict[str, str]:
        """Digests of all that the stage's result depends on, by name."""
        inputs = {f"setting {name}": digest_of(experiment.setting(name)) for name in self.settings}
        for needed in self.needs:
            for name in needed.files_in(experiment):
                inputs[name] = experiment.digest(experiment.folder / name)
        for path in self.sources(experiment):
            inputs[f"source {os.path.relpath(path, experiment.folder)}"] = experiment.digest(path)
        return inputs

    def result(self, experiment: Experiment) -> StageResult | None:
        """What the stage came to, as its record says; None if there is none that can be believed.

        It is believed if those of the stages that it needs are, the stage's inputs are what they were, and
        its files are as it wrote them; files that people edit only have to be there.
        """
        if any(needed.result(experiment) is None for needed in self.needs):
            return None
        content = self._record(experiment)
        if content is None or content["inputs"] != self.inputs(experiment):
            return None
        for name, digest in content["files"].items():
            now = experiment.digest(experiment.folder / name)
            if not now or (now != digest and not self._is_edited(name)):
                return None
        return StageResult(
            content["gate"],
            tuple(content["words"]),
            tuple(content["files"]),
            tuple(content["next"]),
            content["figures"],
        )

    def edited(self, experiment: Experiment) -> tuple[str, ...]:
        """Names of files of the stage that a person has edited, or put there."""
        names = (name for name in self.files_in(experiment) if self._is_edited(name))
        return tuple(name for name in names if experiment.is_edited(name))

    def run_recorded(self, experiment: Experiment, progress: Progress) -> StageResult:
        """Run the stage, and write its record."""
        inputs = self.inputs(experiment)
        result = self.run(experiment, progress)
        content = {
            "format": _FORMAT,
            "version": 1,
            "stage": self.name,
            "gate": result.gate,
            "words": list(result.words),
            "next": list(result.next),
            "figures": dict(result.figures),
            "inputs": inputs,
            "files": {name: experiment.digest(experiment.folder / name) for name in result.files},
        }
        experiment.write_json(f"{RECORDS}/{self.name}.json", content)
        return result

    def _is_edited(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.edited_files)

    def _record(self, experiment: Experiment) -> dict[str, Any] | None:
        try:
            text = (experiment.folder / RECORDS / f"{self.name}.json").read_text(encoding="utf-8")
            content = json.loads(text)
        except (OSError, ValueError, RecursionError):
            return None
        is_ours = isinstance(content, dict) and (content.get("format"), content.get("version")) == (
            _FORMAT,
            1,
        )
        if not is_ours or any(not isinstance(content.get(name), kind) for name, kind in _MEMBERS.items()):
            return None
        return content if content["gate"] in _GATES else None
