"""What a localiser said of the entries of the zoo, and how much of it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tests.zoo.entry import Entry, Mistake, PortedMistake
from tests.zoo.localisers import Suspect

_FEW: Final = 3


@dataclass(frozen=True)
class Outcome:
    """What a localiser said of one entry in one dtype.

    Attributes:
        entry: The entry.
        dtype: Of the target.
        localiser: Its name.
        is_exercised: Whether the inputs show the mistake at all; False for a correct port.
        suspects: Whom it accused, the first one first.
        seconds: How long it took, captures apart.
        error: What it failed with.
    """

    entry: Entry
    dtype: str
    localiser: str
    is_exercised: bool
    suspects: Sequence[Suspect]
    seconds: float
    error: str | None = None

    @property
    def rank(self) -> int | None:
        """Place of the guilty module among the suspects, from 1; None if it is not there."""
        if not isinstance(self.entry, Mistake):
            return None
        right = {self.entry.guilty, *self.entry.also}
        places = (place for place, suspect in enumerate(self.suspects, 1) if suspect.module in right)
        return next(places, None)

    @property
    def is_explained(self) -> bool:
        """Whether the guilty module is among the first few, with a hypothesis that is true."""
        if not isinstance(self.entry, Mistake) or self.rank is None or self.rank > _FEW:
            return False
        kinds = {self.entry.kind, *self.entry.also_kinds}
        if "tied_head" in kinds:  # a head that is not tied uses other weights than it should
            kinds.add("other_weights")
        return self.suspects[self.rank - 1].hypothesis in kinds

    @property
    def is_named(self) -> bool:
        """Whether the guilty module is among the first few, with a text that has a word of the mistake."""
        if not isinstance(self.entry, PortedMistake) or self.rank is None or self.rank > _FEW:
            return False
        text = self.suspects[self.rank - 1].text.lower()
        return any(word in text for word in self.entry.words)

    def as_json(self) -> dict[str, Any]:
        """The outcome for a program."""
        entry = self.entry
        truth = (
            {"guilty": entry.guilty, "kind": entry.kind, "exercised": self.is_exercised}
            if isinstance(entry, Mistake)
            else {"guilty": None, "kind": None}
        )
        named = {"named": self.is_named} if isinstance(entry, PortedMistake) else {}
        said = {"rank": self.rank, "explained": self.is_explained, **named, "seconds": round(self.seconds, 3)}
        return {
            "name": entry.name,
            "architecture": entry.architecture,
            "dtype": self.dtype,
            "localiser": self.localiser,
            **truth,
            "suspects": [asdict(suspect) for suspect in self.suspects],
            **said,
            "error": self.error,
        }


@dataclass(frozen=True)
class Score:
    """The outcomes of one localiser in one dtype, counted.

    Attributes:
        localiser: Its name.
        dtype: Of the targets.
        outcomes: Of all entries.
    """

    localiser: str
    dtype: str
    outcomes: Sequence[Outcome]

    @property
    def counted(self) -> Sequence[Outcome]:
        """The mistakes that the inputs exercise."""
        return [o for o in self.outcomes if isinstance(o.entry, Mistake) and o.is_exercised]

    @property
    def not_exercised(self) -> Sequence[Outcome]:
        """The mistakes that the inputs do not show, where accusing nobody is right."""
        return [o for o in self.outcomes if isinstance(o.entry, Mistake) and not o.is_exercised]

    @property
    def ports(self) -> Sequence[Outcome]:
        """The correct ports."""
        return [o for o in self.outcomes if not isinstance(o.entry, Mistake)]

    def ranked(self, most: int) -> int:
        """Count of mistakes whose module is among the first so many suspects."""
        return sum(o.rank is not None and o.rank <= most for o in self.counted)

    @property
    def explained(self) -> int:
        """Count of mistakes with the right hypothesis."""
        return sum(o.is_explained for o in self.counted)

    @property
    def ported(self) -> Sequence[Outcome]:
        """Those of the counted mistakes that have words that name them."""
        return [o for o in self.counted if isinstance(o.entry, PortedMistake)]

    @property
    def named(self) -> int:
        """Count of mistakes that are named by a word, whatever the hypothesis is called."""
        return sum(o.is_named for o in self.ported)

    @property
    def named_or_explained(self) -> int:
        """Count of those mistakes that have the right hypothesis or are named by a word."""
        return sum(o.is_named or o.is_explained for o in self.ported)

    @property
    def innocent_first(self) -> int:
        """Count of mistakes of which another module than the guilty one is the first suspect."""
        return sum(bool(o.suspects) and o.rank != 1 for o in self.counted)

    @property
    def accused(self) -> Sequence[Outcome]:
        """Correct ports, and mistakes that the inputs do not show, of which a module is accused."""
        return [o for o in (*self.ports, *self.not_exercised) if o.suspects]

    def as_json(self) -> dict[str, Any]:
        """The counts for a program."""
        words = {"named": self.named, "named_or_hypothesis_right": self.named_or_explained}
        return {
            "localiser": self.localiser,
            "dtype": self.dtype,
            "mistakes": len(self.counted),
            "first": self.ranked(1),
            "first_three": self.ranked(_FEW),
            "innocent_first": self.innocent_first,
            "hypothesis_right": self.explained,
            "correct_ports": len(self.ports),
            "correct_accused": sum(bool(o.suspects) for o in self.ports),
            "not_exercised": len(self.not_exercised),
            "not_exercised_accused": sum(bool(o.suspects) for o in self.not_exercised),
            "errors": sum(o.error is not None for o in self.outcomes),
            "seconds": round(sum(o.seconds for o in self.outcomes), 1),
            **(words if self.ported else {}),
        }

    def lines(self) -> list[str]:
        """The score in words, with what went wrong by name."""
        all_of = len(self.counted)
        ports = [o.entry.name for o in self.ports if o.suspects]
        shown = [
            ("guilty module first", _share(self.ranked(1), all_of)),
            ("in the first three", _share(self.ranked(_FEW), all_of)),
            ("innocent module first", _share(self.innocent_first, all_of)),
            ("hypothesis right", _share(self.explained, all_of)),
            ("correct ports accused", f"{len(ports)} of {len(self.ports)}"),
            ("not exercised", ", ".join(o.entry.name for o in self.not_exercised) or "none"),
        ]
        if self.ported:
            shown[4:4] = [
                ("named in words", _share(self.named, len(self.ported))),
                ("either of the two", _share(self.named_or_explained, len(self.ported))),
            ]
        told = [f"{self.localiser}, {self.dtype}", *(f"  {what:<22} {value}" for what, value in shown)]
        wrong = [
            *(o for o in self.counted if o.rank != 1),
            *self.accused,
            *(o for o in self.outcomes if o.error is not None and not isinstance(o.entry, Mistake)),
        ]
        return told + [f"    {_wrong(o)}" for o in wrong]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f", {100 * part / whole:.0f} %" if whole else "")


def _wrong(outcome: Outcome) -> str:
    said = outcome.error or ", ".join(s.module for s in outcome.suspects[:_FEW]) or "nobody"
    is_mistake = isinstance(outcome.entry, Mistake) and outcome.is_exercised
    truth = outcome.entry.guilty if is_mistake and isinstance(outcome.entry, Mistake) else "nobody"
    return f"{outcome.entry.name}: {said}; right is {truth}"
