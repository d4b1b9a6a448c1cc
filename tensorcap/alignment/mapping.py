"""A mapping: which sites of the reference are which of the target, written with variables for indices.

An entry has places of both sides. A place is a site, or `SITE/SLOT`; `SITE@CALL` is one call of it; `rank3/`
before it takes that rank's tensor, `rank*/` one of each rank. `{i}` stands for each value of the variable
`i`, `{i+1}` for the next index.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from tensorcap.alignment.layout import Dims, Layout
from tensorcap.alignment.tokens import TOKEN_STEPS, TokenRule
from tensorcap_formats.errors import UsageError, abbreviate
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.notebook import ROWS, card

Evidence = Literal["user", "name", "rule", "structure", "shape", "values"]
SideName = Literal["reference", "target"]
Values = tuple[str, ...]

SIDE_NAMES: Final[tuple[SideName, SideName]] = ("reference", "target")

WITH_OTHER_VALUES: Final = "with other values it may be "  # why a result of a target in few bits is lost

_VARIABLE: Final = re.compile(r"\{([A-Za-z_]\w*)([+-]\d+)?\}")
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_CALL: Final = re.compile(r"[^/]@\d+(?:/|$)")


@dataclass(frozen=True, slots=True)
class Entry:
    """Places of the reference and of the target that belong together.

    Attributes:
        reference: Places of the reference, in the order in which the steps make them.
        target: Places of the target.
        variables: Values of each variable in the places.
        steps: Layout steps from the target's tensors to the reference's, as texts; those on tokens of both
            sides are the last.
        evidence: What it is known by.
        reason: Why, for a reader.
        where: Where it was written, `map.toml:12`; empty for one that was computed.
        dims: Axes of the target's tensors and the ranks that hold them, in place of steps; see `dims`.
        reference_dims: Axes of the reference's tensor; those of the target in whole where it is empty.
    """

    reference: tuple[str, ...]
    target: tuple[str, ...]
    variables: Mapping[str, Values] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    evidence: Evidence = "user"
    reason: str = ""
    where: str = ""
    dims: str = ""
    reference_dims: str = ""

    @property
    def text(self) -> str:
        """The entry in one line."""
        return f"{' + '.join(self.reference)} = {' + '.join(self.target)}"

    @property
    def moves_equal_names(self) -> bool:
        """Whether steps move elements between two places of one name."""
        return len(self.reference) == 1 and self.reference == self.target and self.layout().moves

    def refuse(self, reason: str, hint: str | None = None) -> UsageError:
        """The error that says what is wrong with the entry, and where it stands."""
        where = f"{self.where}: " if self.where else ""
        return UsageError(f"{where}{abbreviate(self.text, 200)}: {reason}", hint=hint)

    @property
    def names_call(self) -> bool:
        """Whether a place names one call of its site."""
        return any(_CALL.search(place) for place in (*self.reference, *self.target))

    @property
    def token_steps(self) -> tuple[str, ...]:
        """The steps that are done on the tokens of both sides."""
        return tuple(step for step in self.steps if step in TOKEN_STEPS)

    def layout(self) -> Layout:
        """The steps that are done on the target's tensors.

        Raises:
            UsageError: One is not understood, or comes behind one on tokens.
        """
        count = len(self.steps) - len(self.token_steps)
        if self.steps[count:] != self.token_steps:
            raise self.refuse(f"{self.token_steps[0]!r} is done on both sides, expected it to come last")
        try:
            return Layout.parse(self.steps[:count])
        except UsageError as error:
            raise self.refuse(str(error), error.hint) from None

    def axes(self) -> tuple[Dims, Dims] | None:
        """Dims of the target's tensors and of the reference's; None if there are none.

        Raises:
            UsageError: They are not understood, or steps say it as well.
        """
        if not self.dims:
            return None
        if len(self.steps) > len(self.token_steps):
            raise self.refuse("has dims and steps, expected one of them")
        try:
            target = Dims.parse(self.dims)
            whole = replace(target, sharded={}, placements={}, sizes={})
            return target, Dims.parse(self.reference_dims) if self.reference_dims else whole
        except UsageError as error:
            raise self.refuse(str(error), error.hint) from None

    def expanded(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Places of both sides for each combination of values of the variables.

        Raises:
            UsageError: A variable has no values, or is in no place; an index would be negative.
        """
        used = {name for place in (*self.reference, *self.target) for name, _ in _VARIABLE.findall(place)}
        for name in sorted(used ^ set(self.variables)):
            lacks = "no values" if name in used else "values, and no place uses it"
            raise self.refuse(f"variable {name!r} has {lacks}")
        names = sorted(used)
        for combination in itertools.product(*(self.variables[name] for name in names)):
            values = dict(zip(names, combination, strict=True))
            yield (
                tuple(self._filled(place, values) for place in self.reference),
                tuple(self._filled(place, values) for place in self.target),
            )

    def check(self) -> None:
        """Check steps, dims and variables without archives.

        Raises:
            UsageError: One of them makes no sense.
        """
        self.layout()
        self.axes()
        next(self.expanded(), None)

    def _filled(self, place: str, values: Mapping[str, str]) -> str:
        def fill(variable: re.Match[str]) -> str:
            value, offset = values[variable[1]], variable[2]
            if offset is None:
                return value
            if not value.isdigit() or int(value) + int(offset) < 0:
                raise self.refuse(f"{variable[0]} of {variable[1]} = {value!r} is no index")
            return str(int(value) + int(offset))

        return _VARIABLE.sub(fill, place)


@dataclass(frozen=True, slots=True)
class LeftOver:
    """Places of one side that have no counterpart, and why.

    Attributes:
        side: Whose they are.
        places: Sites, or `SITE/SLOT`, with `*` for anything and `{i}` for any number.
        reason: Why.
        is_explained: Whether the reason is known, so that nobody has to look.
    """

    side: SideName
    places: tuple[str, ...]
    reason: str
    is_explained: bool = True


def layout_texts(entries: Iterable[Entry]) -> Iterator[str]:
    """Which places of equal names a rule compares after which steps, a sentence for each layout."""
    by_steps: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if entry.evidence == "rule" and entry.moves_equal_names:
            places = [place for (place,), _ in entry.expanded()]
            by_steps.setdefault(entry.steps, []).extend(places)
    for steps, places in by_steps.items():
        more = f" and {len(places) - 1} more places" if len(places) > 1 else ""
        is_of_model = all(place.partition("/")[0] == ROOT_SITE for place in places)
        where = "of the model's arguments" if is_of_model else "in all layers"
        yield f"{places[0]}{more}: compared after {', '.join(steps)}, the target's layout {where}"


def unexplained(reference: Iterable[str], target: Iterable[str], reason: str) -> list[LeftOver]:
    """Places of both sides that have no counterpart, and the reason, which somebody has to look at."""
    sides = zip(SIDE_NAMES, (reference, target), strict=True)
    return [LeftOver(side, tuple(places), reason, is_explained=False) for side, places in sides]


@dataclass(frozen=True, slots=True)
class Alignment:
    """What belongs together, and what is left over.

    Attributes:
        entries: What belongs together.
        left_over: What does not.
        tokens: How tokens are matched in all entries; None if positions are the same on both sides.
        failed: Which passes of matching could not be run because of a fault in their own code, as sentences.
    """

    entries: tuple[Entry, ...]
    left_over: tuple[LeftOver, ...] = ()
    tokens: TokenRule | None = None
    failed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Alignment: {len(self.entries)} entries, {len(self.left_over)} left over>"

    def _repr_html_(self) -> str:
        return card(
            f"Alignment: {len(self.entries)} entries, {len(self.left_over)} left over",
            head=ENTRY_COLUMNS,
            rows=[entry_row(entry) for entry in self.entries[:ROWS]],
            count=len(self.entries),
        )


ENTRY_COLUMNS: Final = ("reference", "target", "layout steps", "known by")


def entry_row(entry: Entry) -> tuple[str, str, str, str]:
    """An entry as the row of a card."""
    return " + ".join(entry.reference), " + ".join(entry.target), "; ".join(entry.steps), entry.evidence


def paired_modules(alignment: Alignment) -> dict[str, str]:
    """The target's place of each of the reference's, by entries of one place on each side.

    Raises:
        UsageError: An entry has several places on a side, or moves elements.
    """
    pairs: dict[str, str] = {}
    for entry in alignment.entries:
        if len(entry.reference) != 1 or len(entry.target) != 1 or entry.steps or entry.dims:
            raise entry.refuse("has several places or steps, expected a module of each side")
        for (reference,), (target,) in entry.expanded():
            pairs[reference] = target
    return pairs


def parse_values(text: str) -> Values:
    """Read a set of indices or names.

    Raises:
        UsageError: A range ends before it begins, or a value is empty.

    Example:
        >>> parse_values("0-2,7")
        ('0', '1', '2', '7')
    """
    values: list[str] = []
    for part in text.split(","):
        span = _RANGE.fullmatch(part.strip())
        if span is None:
            values.append(part.strip())
        elif int(span[1]) > int(span[2]):
            raise UsageError(f"values {abbreviate(text)!r}: {part.strip()!r} ends before it begins")
        else:
            values += map(str, range(int(span[1]), int(span[2]) + 1))
    if "" in values:
        raise UsageError(f"values {abbreviate(text)!r}: one is empty")
    return tuple(dict.fromkeys(values))


def values_text(values: Values) -> str:
    """Values as `parse_values` reads them, runs of indices as ranges.

    Example:
        >>> values_text(("0", "1", "2", "7", "q"))
        '0-2,7,q'
    """
    parts: list[str] = []
    run: list[int] = []

    def end_run() -> None:
        if run:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        run.clear()

    for value in values:
        is_index = value.isdigit() and str(int(value)) == value
        if run and (not is_index or int(value) != run[-1] + 1):
            end_run()
        if is_index:
            run.append(int(value))
        else:
            parts.append(value)
    end_run()
    return ",".join(parts)
