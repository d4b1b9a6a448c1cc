"""What all folders of Neuron become: tensors of ranks and steps, and what was not captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.errors import NotAnArchiveError, UsageError
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.keys import Key, check_length

PHASES: Final[Mapping[str, str]] = {"cte": "prefill", "ctx": "prefill", "tkg": "decode"}
"""Context encoding and token generation, as names of NxDI's files have them."""


class NeuronArchive(ForeignArchive):
    """The tensors of a folder of Neuron.

    Attributes:
        uncaptured: Why a point has no tensor though the device handed out one, by key text.
        ranks: The ranks that have tensors, ascending.
    """

    def __init__(
        self,
        *args: Any,
        uncaptured: Mapping[str, str],
        contents: NeuronContents,
        **options: Any,
    ) -> None:
        """Make records of the tensors; arguments are those of `ForeignArchive`, and the attributes."""
        super().__init__(*args, **options)
        self.uncaptured = dict(uncaptured)
        self.ranks = contents.ranks
        self._contents = contents

    def of_rank(self, rank: int) -> NeuronArchive:
        """The tensors of one rank, under keys without a rank, as an archive of that rank has them."""
        if rank not in self.ranks:
            raise UsageError(
                f"{self.path}: has no rank {rank}, expected one of {', '.join(map(str, self.ranks))}"
            )
        return self._contents.archive(rank)


@dataclass(slots=True)
class NeuronContents:
    """The contents of a folder of Neuron, as far as they are read.

    Attributes:
        path: Of the folder.
        container: The kind of folder, as `Archive.container` has it.
        framework: What wrote it: `neuron`, or `torch` of a capture of Hugging Face's model.
        tensors: The tensors by key.
        problems: Why tensors could not be read, by the name of the file.
        others: Why other things are not read, by name.
        uncaptured: Why a point has no tensor, by key.
        notes: Remarks for the user, a sentence each.
        phases: Of each step `prefill` or `decode`, "" if unknown.
        is_ordered: Whether the tensors come in the order of execution.
    """

    path: Path
    container: str
    framework: str = "neuron"
    tensors: dict[Key, ForeignTensor] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    uncaptured: dict[Key, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    is_ordered: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have tensors, ascending."""
        return tuple(sorted({key.rank for key in self.tensors}))

    def shown(self, path: Path) -> str:
        """A file's path in the folder."""
        return path.relative_to(self.path).as_posix()

    def add(self, key: Key, tensor: ForeignTensor, shown: str) -> None:
        """Add a tensor, or a problem if its key is too long or is another's too.

        Args:
            key: Its key.
            tensor: The tensor; its name does not count.
            shown: The name of its file.
        """
        try:
            check_length(key.text)
        except UsageError as error:
            self.problems[shown] = str(error)
            return
        if key in self.tensors:
            self.problems[shown] = f"means {key.text}, and so does another"
            return
        self.tensors[key] = replace(tensor, name=key.text)

    def set_phase(self, step: int, phase: str) -> None:
        """Say of which phase a step is."""
        self.phases += [""] * (step + 1 - len(self.phases))
        self.phases[step] = phase

    def archive(self, rank: int | None = None) -> NeuronArchive:
        """The archive of all ranks, or of one.

        Raises:
            NotAnArchiveError: There is no tensor.
        """
        if not self.tensors and not self.problems:
            raise NotAnArchiveError(f"{self.path}: holds no tensor that was captured")
        tensors: Sequence[ForeignTensor] = list(self.tensors.values())
        run: dict[str, Any] = {"framework": {"name": self.framework}}
        if rank is not None:
            tensors = [
                replace(tensor, name=replace(key, rank=0).text)
                for key, tensor in self.tensors.items()
                if key.rank == rank
            ]
            run["ranks"] = {"rank": rank, "count": self.ranks[-1] + 1}
        if self.phases:
            run |= {"steps": len(self.phases), "phases": self.phases}
        if self.notes:
            run["notes"] = self.notes
        if self.uncaptured:
            run["points"] = self._points()
        return NeuronArchive(
            self.path,
            self.container,
            tensors,
            skipped=self.others,
            problems=self.problems,
            run=run,
            is_ordered=self.is_ordered,
            uncaptured={key.text: reason for key, reason in self.uncaptured.items()},
            contents=self,
        )

    def _points(self) -> list[dict[str, Any]]:
        """An entry for each site without a tensor, and of others the slots that lack one (ARC-71)."""
        captured = {key.site for key in self.tensors}
        points: dict[str, dict[str, Any]] = {
            site: {"site": site, "status": "captured", "calls": sum(k.site == site for k in self.tensors)}
            for site in sorted(captured)
        }
        slots: dict[str, dict[str, str]] = {}
        for key, reason in self.uncaptured.items():
            slots.setdefault(key.site, {})[key.slot] = reason
        lost = []
        for site, reasons in slots.items():
            entry = {"site": site, "status": "not-capturable", "reason": next(iter(reasons.values()))}
            if site in captured:
                entry["slots"] = list(reasons)  # type: ignore[assignment]  # a list among texts
            lost.append(entry)
        return [*points.values(), *lost]
