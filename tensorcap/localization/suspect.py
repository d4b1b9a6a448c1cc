"""What a localisation finds: suspects with their errors and reasons, and what stands around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tensorcap.comparison.pair import Finding, Status
from tensorcap.diagnosis.diagnosis import Diagnosis
from tensorcap.diagnosis.scoring import Explanation
from tensorcap.localization.curves import ChangePoint
from tensorcap.localization.nonfinite import NonfiniteOrigin
from tensorcap.rerun.own_errors import OwnError

By = Literal["replay", "injection", "archives"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A module that is accused.

    Attributes:
        module: Its site, in the reference's names, `@root` for the model itself.
        class_name: Its class, "" where that is not known.
        key: Key text of the tensor that speaks most against it.
        by: What accuses it, the most trusted first.
        status: What the tests make of that tensor.
        findings: What each test said of it.
        own: Row error that it makes itself; None where that is not known, or none is defined.
        inherited: Largest row error of what it was given in the target's own run; None where not known.
        total: Largest row error of its results there; None where not known.
        ratio: R of its own error against a twin's on the same values; None without one.
        noise: Row error of that tensor between two runs of the target; None where no repeat was given.
        cause: What its root cause is called: the kind of the diagnosis, else what R means; "" if unknown.
        reason: Why it is accused, as a sentence.
        examined: What diagnosing its tensors said; None where nobody looked, or could.
    """

    module: str
    class_name: str
    key: str
    by: tuple[By, ...]
    status: Status
    findings: tuple[Finding, ...]
    own: float | None
    inherited: float | None
    total: float | None
    ratio: float | None
    noise: float | None
    cause: str
    reason: str
    examined: Diagnosis | None

    @property
    def is_own(self) -> bool:
        """Whether the error is known to be the module's own."""
        return self.by[0] != "archives"

    @property
    def diagnosis(self) -> Explanation | None:
        """What explains its values as a mistake of its own; None where nothing does."""
        return mistake(self.examined)


@dataclass(frozen=True, slots=True)
class Precise:
    """A module that rounds less than the reference's own code does in the target's precision; no mistake.

    Attributes:
        module: Its site.
        class_name: Its class, "" where that is not known.
        ratio: R of its own error.
    """

    module: str
    class_name: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Noise:
    """How a target differs from itself from run to run.

    Attributes:
        errors: Row error between both runs by key text of the reference; infinite where none is defined.
        largest: The largest of them, no unit.
        first: Key text of the first tensor that differs; "" if none does.
        module: The module whose code made it.
    """

    errors: Mapping[str, float]
    largest: float
    first: str
    module: str


@dataclass(frozen=True, slots=True)
class Localization:
    """Who is accused, and what the errors look like.

    Attributes:
        suspects: The first one first; none if nothing is wrong.
        by: What is believed most: a replay, an injection, or the archives alone.
        explained: Composites whose results are wrong too, each with the suspect within it that explains it.
        changes: Where the curves of own and of total errors change, steps before spikes.
        nonfinite: The first tensor that is finite on one side only, and what went into it; None if none.
        over_precise: Modules with an R well below 1.
        noise: What a repeated run of the target says; None where none was given.
        owns: What is known of each module's own making, in execution order; none by archives.
        notes: What else a reader should know, as sentences.
        open: Key texts of what is required, not green by more than growth, and no suspect answers for; none
            where there are suspects.
    """

    suspects: tuple[Suspect, ...]
    by: By
    explained: tuple[tuple[str, str], ...]
    changes: tuple[ChangePoint, ...]
    nonfinite: NonfiniteOrigin | None
    over_precise: tuple[Precise, ...]
    noise: Noise | None
    owns: Sequence[OwnError]
    notes: tuple[str, ...]
    open: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """1 where a module is accused, or something is wrong that no module is accused of; else 0."""
        return int(bool(self.suspects or self.open))


def mistake(examined: Diagnosis | None) -> Explanation | None:
    """The best explanation that is a mistake of the module: not what it inherits, nor where it errs."""
    for one in examined.explanations if examined else ():
        if one.kind != "inherited" and not one.kind.startswith("only-"):
            return one
    return None
