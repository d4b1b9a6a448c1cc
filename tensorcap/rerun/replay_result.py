"""What a replay shows of each module, and what a reader should know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tensorcap.rerun.own_errors import OwnError
from tensorcap.wording import counted, shortened, some
from tensorcap_formats.json_values import json_value

Way = Literal["self", "reverse", "forward"]


@dataclass(frozen=True, slots=True)
class Replay:
    """The own error of each module, by a run on another run's values.

    Attributes:
        own_errors: One for each tensor of a module that both sides have, in execution order.
        precision: Name of the precision that errors were held against; "" if no run says one.
        replaced: Count of tensors that were put in the place of the model's own.
        natural: Key texts of arguments that the archive has no tensor for, so that they stayed natural.
        lacking: Key texts of results of the reference that the target lacks, which nothing explains.
        way: `self` if the reference's model was run on its own tensors, `reverse` if on the target's,
            `forward` if the target was run on the reference's.
        lacks_twin: Whether no twin says how much the reference's model rounds itself, though it would matter.
        unpaired: Modules that the model calls more or less often than the reference did, and which are
            left out.
        misfits: Key texts of what the model has in another shape than the reference's run, likewise.
        twin_failure: The error with which the model ended in that precision; "" if it did not.
    """

    own_errors: tuple[OwnError, ...]
    precision: str
    replaced: int
    natural: tuple[str, ...]
    lacking: tuple[str, ...]
    way: Way
    lacks_twin: bool = False
    unpaired: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    twin_failure: str = ""

    @property
    def is_self(self) -> bool:
        """Whether the model was run on its own tensors."""
        return self.way == "self"

    @property
    def bad(self) -> Sequence[OwnError]:
        """What is suspect or worse, in execution order."""
        return [own for own in self.own_errors if own.is_bad]

    @property
    def unjudged(self) -> Sequence[OwnError]:
        """What no test could judge, such as a tensor that cannot be read."""
        return [own for own in self.own_errors if own.status == "unjudged"]

    @property
    def precise(self) -> Sequence[OwnError]:
        """What was rounded less than the reference's model rounds it in that precision."""
        return [own for own in self.own_errors if own.is_precise]

    @property
    def leaf_ratios(self) -> Mapping[str, float]:
        """R of what leaves made, against the twin on the same values, by key."""
        return {own.key: own.ratio for own in self.own_errors if own.is_leaf and own.ratio is not None}

    @property
    def exit_status(self) -> int:
        """1 if something is suspect or worse or not judged, or a run does not repeat itself; else 0."""
        if self.is_self:
            return int(not self.own_errors or any(own.status != "identical" for own in self.own_errors))
        return int(bool(self.bad or self.unjudged or self.lacking) or not self.own_errors)

    @property
    def notes(self) -> tuple[str, ...]:
        """What else a reader should know, as sentences."""
        notes = []
        whose, others = ("target", "reference") if self.way == "forward" else ("reference", "target")
        first = next((own.key for own in self.own_errors if own.status != "identical"), "")
        if self.is_self and first:
            notes.append(
                f"The model does not repeat its own run ({first}): believe nothing else that it says."
            )
        if self.natural:
            count = counted(len(self.natural), "argument")
            notes.append(f"Without one in the {others}, and so left natural: {count} of the {whose}.")
        if self.unpaired:
            notes.append(
                f"The model calls {some(self.unpaired)} more or less often than the reference's run did, as "
                "another version of its code: not replayed."
            )
        if self.misfits:
            count = counted(len(self.misfits), "tensor")
            notes.append(
                f"In another shape in the model than in the reference's run, as in another version of its "
                f"code, and so left natural: {count}, first {self.misfits[0]}."
            )
        if self.lacking:
            count = counted(len(self.lacking), "result")
            notes.append(f"Not in the target, and so not judged: {count}, first {self.lacking[0]}.")
        if self.unjudged:
            count = counted(len(self.unjudged), "tensor")
            notes.append(f"Could not be judged: {count}, first {self.unjudged[0].key}.")
        if self.precise:
            modules = list(dict.fromkeys(own.module for own in self.precise))
            notes.append(
                f"{some(modules)}: rounds less than the reference's model does in {self.precision} (R "
                f"{self.precise[0].ratio:.2g}): casts elsewhere, or a fused kernel; by itself no mistake."
            )
        if self.lacks_twin:
            notes.append("The reference's model was not named: no twin says how much it rounds itself.")
        if self.twin_failure:
            notes.append(
                f"The reference's model does not run in {self.precision} on the target's values "
                f"({shortened(self.twin_failure)}): no twin says how much it rounds itself."
            )
        return tuple(notes)

    def to_json(self) -> dict[str, Any]:
        """The members that `tcap replay --json` prints, as JSON values."""
        return {
            "format": "tensorcap-replay",
            "version": 1,
            "precision": self.precision or None,
            "replaced": self.replaced,
            "natural": list(self.natural),
            "lacking": list(self.lacking),
            "is_self": self.is_self,
            "way": self.way,
            "notes": list(self.notes),
            "owns": [_own_error_json(own) for own in self.own_errors],
            "exit_status": self.exit_status,
        }


def _own_error_json(own: OwnError) -> dict[str, Any]:
    return {
        "key": own.key,
        "module": own.module,
        "made": own.made,
        "is_leaf": own.is_leaf,
        "error": json_value(own.error),
        "ratio": json_value(own.ratio),
        "is_precise": own.is_precise,
        "status": own.status,
        "findings": [
            {name: value for name, value in json_value(finding).items() if name != "text"}
            for finding in own.findings
        ],
    }
