"""What a report says of an experiment of the Equivalence workflow, as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

from tensorcap.reports.equivalence import Fault
from tensorcap.reports.next_step import NextStep


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of the method.

    Attributes:
        number: The method's number of it.
        name: Its command.
        title: What it does, in few words.
        state: `passed`, `failed`, `done` (it has no gate) or `to do`.
        words: What it came to, as sentences.
        edited: Files of it that a person has edited.
    """

    number: int
    name: str
    title: str
    state: str
    words: tuple[str, ...]
    edited: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """The test of a component.

    Attributes:
        name: Its site in the source.
        kind: What kind of component it is, "" if unknown.
        ratio: R; None if there is none.
        limit: What R has to be below; None if unknown.
        patched: R of the patched port; None if no patch was tested, or it has none.
        passed: Whether it passed.
        text: What R says, or what went wrong.
    """

    name: str
    kind: str
    ratio: float | None
    limit: float | None
    patched: float | None
    passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class ExperimentPage:
    """All that a report of an experiment says.

    Attributes:
        title: What is ported to what.
        is_green: Whether no gate failed and no stage is to be run.
        verdict: The verdict as a sentence, with its denominator.
        culprit: The first fault, as a sentence; "" without any.
        next: What to do next.
        stages: All stages, in the order of the method.
        faults: The faults among components, the primary one first.
        components: Tests of components, in the order of execution as far as it is known.
        settings: Settings that are not empty, by table and name.
        exit_status: What `tcap equivalence status` ends with.
    """

    title: str
    is_green: bool
    verdict: str
    culprit: str
    next: NextStep
    stages: tuple[StageRow, ...]
    faults: tuple[Fault, ...]
    components: tuple[ComponentRow, ...]
    settings: tuple[tuple[str, str], ...]
    exit_status: int

    @property
    def suspects(self) -> tuple[str, ...]:
        """Names of components with a fault."""
        return tuple(fault.component for fault in self.faults)
