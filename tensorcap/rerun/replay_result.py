"""What a replay found, and what is to be known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tensorcap.rerun.own_errors import OwnError
from tensorcap.wording import counted, some

Way = Literal["self", "reverse", "forward"]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

    Attributes:
        owns: What each module made, in execution order.
        precision: Name of the precision that errors were held against; "" where no run says one.
        replaced: Count of tensors that were put in the place of the model's own.
        natural: Key texts of arguments that the archive has no tensor for, so that they stayed natural.
        lacking: Key texts of results of the reference that the target lacks, which nothing explains.
        way: Whether the reference's model was run on its own tensors, on the target's, or the target on the
            reference's.
        notes: What else a reader should know, as sentences.
    """

    owns: tuple[OwnError, ...]
    precision: str
    replaced: int
    natural: tuple[str, ...]
    lacking: tuple[str, ...]
    way: Way
    notes: tuple[str, ...] = ()

    @property
    def is_self(self) -> bool:
        """Whether the model was run on its own tensors."""
        return self.way == "self"

    @property
    def bad(self) -> Sequence[OwnError]:
        """What is suspect or worse, in execution order."""
        return [own for own in self.owns if own.is_bad]

    @property
    def unjudged(self) -> Sequence[OwnError]:
        """What nothing could judge, such as a tensor that cannot be read."""
        return [own for own in self.owns if own.status == "unjudged"]

    @property
    def precise(self) -> Sequence[OwnError]:
        """What was rounded less than the reference's model rounds it in that precision."""
        return [own for own in self.owns if own.is_precise]

    @property
    def exit_status(self) -> int:
        """1 where something is suspect or worse or not judged, or a run does not repeat itself; else 0."""
        if self.is_self:
            return int(not self.owns or any(own.status != "identical" for own in self.owns))
        return int(bool(self.bad or self.unjudged or self.lacking) or not self.owns)


def notes_of(found: Replay) -> list[str]:
    """What else a reader should know, as sentences."""
    notes = []
    whose, others = ("target", "reference") if found.way == "forward" else ("reference", "target")
    first = next((own.key for own in found.owns if own.status != "identical"), "")
    if found.is_self and first:
        notes.append(f"The model does not repeat its own run ({first}): believe nothing else that it says.")
    if found.natural:
        count = counted(len(found.natural), "argument")
        notes.append(f"Without one in the {others}, and so left natural: {count} of the {whose}.")
    if found.lacking:
        count = counted(len(found.lacking), "result")
        notes.append(f"Not in the target, and so not judged: {count}, first {found.lacking[0]}.")
    if found.unjudged:
        count = counted(len(found.unjudged), "tensor")
        notes.append(f"Could not be judged: {count}, first {found.unjudged[0].key}.")
    if found.precise:
        modules = list(dict.fromkeys(own.module for own in found.precise))
        notes.append(
            f"{some(modules)}: rounds less than the reference's model does in {found.precision} (R "
            f"{found.precise[0].ratio:.2g}): casts elsewhere, or a fused kernel; by itself no mistake."
        )
    return notes
