"""What an entry is: a reference, a target in few bits, and what has to be said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensorcap.workload import Workload

Target = Callable[[Path], Workload | Path]


@dataclass(frozen=True)
class Entry:
    """A quantised target, right or with one mistake.

    Attributes:
        name: `FAMILY/NAME`.
        in_words: What the porter did.
        reference: Makes the trusted model and its inputs.
        target: Makes the target of an empty folder: a workload of torch, or the path of an ONNX file in it.
        guilty: Sites of the reference, each of which is a right first suspect; none if the target is right.
        words: Any of these, in whatever case, names the mistake.
    """

    name: str
    in_words: str
    reference: Callable[[], Workload]
    target: Target
    guilty: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return not self.guilty
