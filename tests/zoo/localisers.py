"""What is asked for the guilty module; `tests.zoo.run` measures each by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorcap.comparing import compare
from tensorcap.verdicts.pairing import ABSENT
from tensorcap.workload import Workload


@dataclass(frozen=True)
class Suspect:
    """A module that is accused.

    Attributes:
        module: Its site, `@root` for the model itself.
        hypothesis: What is said to be wrong with it, a kind of the zoo; None if nothing is said.
    """

    module: str
    hypothesis: str | None = None


# Archives of the reference and of the target, both workloads, and a map file where the author has to give
# one; the suspects, the first one first, none if nothing is wrong.
Localiser = Callable[[Path, Path, Workload, Workload, Path | None], Sequence[Suspect]]


def first_divergence(
    reference: Path, target: Path, _: Workload, __: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """The module of the first divergence that `compare` finds; what is only missing accuses nobody."""
    found = compare(reference, target, mapping=mapping).divergence
    return [] if found is None or found.pair.status in ABSENT else [Suspect(found.module)]


def first_blame(
    reference: Path, target: Path, _: Workload, __: Workload, mapping: Path | None
) -> Sequence[Suspect]:
    """As `first_divergence`, but nobody where `compare` says that errors only grew past what is expected."""
    found = compare(reference, target, mapping=mapping).divergence
    is_blamed = found is not None and not found.is_growth and found.pair.status not in ABSENT
    return [Suspect(found.module)] if found is not None and is_blamed else []


LOCALISERS: Final[Mapping[str, Localiser]] = {
    "first-divergence": first_divergence,
    "first-blame": first_blame,
}
