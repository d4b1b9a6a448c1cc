"""What a localization holds: suspects with their errors and reasons, and what stands around them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, Literal

from tensorcap.comparison import Finding, Status
from tensorcap.diagnosis import Diagnosis, Explanation
from tensorcap.localization.curves import ChangePoint
from tensorcap.localization.nonfinite import NonfiniteOrigin
from tensorcap.rerun import OwnError
from tensorcap.wording import FEW, name_numbers, name_pattern, product_name, shortened, some
from tensorcap_formats.json_values import json_value
from tensorcap_formats.notebook import card

By = Literal["replay", "injection", "archives", "weights"]
_MOST_OPERATIONS: Final = 5  # of a side that a sentence lists
_NUMBERS: Final = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_MAKER: Final = re.compile(r"what \w+ makes")  # the module, or the one around it, which says the same
_LONGEST: Final = 140  # characters of one of them, with its arguments


def line_text(file: str, line: int | None) -> str:
    """A file's name and a line of it, as ` at modeling_llama.py:189`; "" if one is unknown."""
    name = file.replace("\\", "/").rpartition("/")[2]
    return f" at {name}:{line}" if name and line is not None else ""


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the reference's graph.

    Attributes:
        node: Its name.
        op: What it runs, as `aten.gelu.default`.
        module: Site of the module that it lies in.
        file: The file of the user's code that runs it, "" if unknown.
        line: The line in it; None if unknown.
    """

    node: str
    op: str
    module: str
    file: str
    line: int | None

    @property
    def line_text(self) -> str:
        """Its file's name and line, as ` at modeling_llama.py:189`; "" if unknown."""
        return line_text(self.file, self.line)


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation that a suspect of a compiled target is, on both sides.

    Attributes:
        place: Of the reference.
        between: Operations before it whose values the target does not have, the first one first: a mistake
            may be theirs.
        target_op: The target's operation that holds the value, "" if none is known.
        target_op_id: Its number.
        target_node: The node that it was compiled from.
        target_file: The file of the user's code that runs this, "" if unknown.
        target_line: The line in it; None if unknown.
    """

    place: Place
    between: tuple[Place, ...]
    target_op: str
    target_op_id: int | None
    target_node: str
    target_file: str
    target_line: int | None


@dataclass(frozen=True, slots=True)
class DifferingOperations:
    """What one side runs on equal values, in a suspect's code, and the other one does not.

    Attributes:
        reference: Operations of the reference whose results the target has nowhere, in execution order.
        target: Operations of the target whose results the reference has nowhere.
        is_alike: Whether both sides run the same ones, but for names of parameters: then these are the first
            of each, whose results differ.
    """

    reference: tuple[Place, ...]
    target: tuple[Place, ...]
    is_alike: bool = False

    @property
    def text(self) -> str:
        """What both sides run, with lines, as a sentence."""
        ours, theirs = map(_listed, (self.reference, self.target))
        if self.is_alike:
            return f"operations: the same ones, whose results differ from {ours} on; in the target {theirs}"
        if not theirs:
            return f"operations: the reference runs {ours}, whose results the target has nowhere"
        if not ours:
            return f"operations: the target runs {theirs}, whose results the reference has nowhere"
        return f"operations: the reference runs {ours}; the target runs {theirs}"

    def to_json(self) -> dict[str, Any]:
        """Its sentence and both sides' operations, as JSON values (LCL-602)."""
        return {"text": self.text, "reference": json_value(self.reference), "target": json_value(self.target)}


def _listed(places: Sequence[Place]) -> str:
    """Operations with their lines, those of one line together."""
    lines = []
    for line, group in groupby(places, key=lambda place: place.line_text):
        *names, last = dict.fromkeys(shortened(place.op, _LONGEST) for place in group)
        lines += [*names, last + line]
    return some(lines, _MOST_OPERATIONS)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A module that may be wrong itself.

    Attributes:
        module: Its site, in the reference's names, `@root` for the model itself.
        class_name: Its class, "" if that is not known.
        key: Key text of the tensor that speaks most against it.
        by: Which evidence speaks against it, the most trusted first.
        status: The status of that tensor.
        findings: One for each test that looked at it.
        own: Row error that the module makes itself; None if that is not known, or none is defined.
        inherited: Largest row error of what it was given in the target's own run; None if not known.
        total: Largest row error of its results there; None if not known.
        ratio: R of its own error against a twin's on the same values; None without one.
        noise: Row error of that tensor between two runs of the target; None without a second run.
        cause: What its root cause is called: the kind of the diagnosis, else what R means; "" if unknown.
        reason: Why it is suspected, as a sentence.
        examined: The diagnosis of its tensors; None if there was none, or it was not possible.
        others: Suspects of the same place in other layers that have the same explanation.
        operation: The operation that it is, of a compiled target; None of a module.
        code: In which operations its code differs from the target's; None if that is not known.
        tried: How many possible causes of what it makes were tried by a replay.
        possible: How many were found; more than were tried if the search ended at its bound.
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
    others: tuple[Suspect, ...] = ()
    operation: Operation | None = None
    code: DifferingOperations | None = None
    tried: int = 0
    possible: int = 0

    @property
    def modules(self) -> tuple[str, ...]:
        """Its site and those of the others."""
        return (self.module, *(other.module for other in self.others))

    @property
    def name(self) -> str:
        """Its site, with the numbers of all layers: `layers.{3-5}.norm`."""
        return joined_modules(self.modules)

    @property
    def is_own(self) -> bool:
        """Whether the error is known to be the module's own."""
        return self.by[0] != "archives"

    @property
    def diagnosis(self) -> Explanation | None:
        """What explains its values as a mistake of its own; None if nothing does."""
        return find_mistake(self.examined)

    @property
    def other_mistakes(self) -> tuple[tuple[str, Explanation], ...]:
        """Modules of the others that are explained in other words, or the other way round, and by what."""
        own = self.diagnosis
        found = ((other.module, other.diagnosis) for other in self.others)
        return tuple((name, one) for name, one in found if one is not None and own and _differs(one, own))

    @property
    def schedule(self) -> str:
        """By how many layers a schedule is shifted if all its modules do what others do; "" if none is."""
        steps = [_steps_of(one) for one in (self, *self.others) if one.diagnosis is not None]
        common = set.intersection(*steps) if len(steps) > 1 else set()
        if not common:
            return ""
        by = min(common, key=lambda step: (abs(step), -step))
        where = f"{abs(by)} {'behind' if by > 0 else 'before'} it"
        return (
            f"Each of these layers does what the one {where} does in the reference: which layers do what is "
            "another schedule, as one that is shifted."
        )

    @property
    def hint(self) -> str:
        """Where to look: what its layers have in common, else as of the mistake; "" if nothing is known."""
        mistake = self.diagnosis
        return "" if mistake is None else self.schedule or mistake.hint

    def to_json(self) -> dict[str, Any]:
        """Its numbers, its reason, what explains it, and the whole diagnosis, as JSON values (LCL-20)."""
        texts = {name: one.text for name, one in self.other_mistakes}
        mistake = self.diagnosis
        return {
            "module": self.module,
            "modules": list(self.modules),
            "class": self.class_name or None,
            "key": self.key,
            "by": list(self.by),
            "is_own": self.is_own,
            "status": self.status,
            "findings": json_value(self.findings),
            "own": json_value(self.own),
            "inherited": json_value(self.inherited),
            "total": json_value(self.total),
            "ratio": json_value(self.ratio),
            "noise": json_value(self.noise),
            "cause": self.cause or None,
            "reason": self.reason,
            "diagnosis": None
            if mistake is None
            else {
                "kind": mistake.kind,
                "text": mistake.text,
                "hint": self.hint,
                "before": json_value(mistake.before),
                "after": json_value(mistake.after),
            },
            "causes": {"tried": self.tried, "possible": self.possible},
            "examined": None if self.examined is None else self.examined.to_json(),
            "others": [
                {
                    "module": other.module,
                    "key": other.key,
                    "own": json_value(other.own),
                    **({"text": texts[other.module]} if other.module in texts else {}),
                }
                for other in self.others
            ],
            **({} if self.operation is None else {"operation": json_value(self.operation)}),
            **({} if self.code is None else {"code": self.code.to_json()}),
        }


def _differs(one: Explanation, other: Explanation) -> bool:
    """Whether two explanations of one kind say something else: by words, not by numbers, or turned round."""
    sides = ("reference", "target")
    ours, theirs = ([e.facts.get(side) for side in sides] for e in (one, other))
    is_turned = ours == theirs[::-1] and ours != theirs
    is_of_others = one.facts.get("as") != other.facts.get("as")
    words = [_NUMBERS.sub("#", _MAKER.sub("", explanation.text)) for explanation in (one, other)]
    return is_turned or is_of_others or words[0] != words[1]


def _steps_of(suspect: Suspect) -> set[int]:
    """By how many layers those stand behind a module of which it does what they do."""
    mistake = suspect.diagnosis
    steps: set[int] = set()
    for site in mistake.facts.get("as", ()) if mistake is not None else ():
        own, other = name_numbers(suspect.module), name_numbers(site)
        differing = [b - a for a, b in zip(own, other, strict=False) if a != b]
        steps |= set(differing) if len(differing) == 1 else set()
    return steps


@dataclass(frozen=True, slots=True)
class Precise:
    """A module that rounds less than the reference's own code does in the target's precision; no mistake.

    Attributes:
        module: Its site.
        class_name: Its class, "" if that is not known.
        ratio: R of its own error.
    """

    module: str
    class_name: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Undone:
    """A module whose result differs, and what is computed of that does not; no mistake.

    Attributes:
        module: Its site.
        reason: What undoes it, as the end of a sentence.
    """

    module: str
    reason: str


@dataclass(frozen=True, slots=True)
class Noise:
    """How a target differs from itself from run to run.

    Attributes:
        errors: Row error between both runs by key text of the reference; infinite if none is defined.
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
    """Which modules are suspected, and what the errors look like.

    Attributes:
        suspects: The first one first; none if nothing is wrong.
        by: The evidence that is trusted most: a replay, an injection, or the archives alone.
        explained: Composites whose results are wrong too, each with the suspect within it that explains it.
        changes: Where the curves of own and of total errors change, steps before spikes.
        nonfinite: The first tensor that is finite on one side only, and what went into it; None if none.
        over_precise: Modules with an R well below 1.
        noise: How a second run of the target differs; None without one.
        own_errors: The error that each module makes itself, in execution order; none by archives.
        notes: What else a reader should know, as sentences.
        open: Key texts of what is required and not green, or not judged, and no suspect answers for; none if
            there are suspects.
        undone: Modules whose results differ and are undone by what is computed of them.
        is_incomplete: Whether a run ended early, or a replay or an injection that was asked for could not be
            made.
        settings: Settings that differ before any tensor and alone explain what is open, a sentence each; none
            if there are suspects.
    """

    suspects: tuple[Suspect, ...]
    by: By
    explained: tuple[tuple[str, str], ...]
    changes: tuple[ChangePoint, ...]
    nonfinite: NonfiniteOrigin | None
    over_precise: tuple[Precise, ...]
    noise: Noise | None
    own_errors: Sequence[OwnError]
    notes: tuple[str, ...]
    open: tuple[str, ...] = ()
    undone: tuple[Undone, ...] = ()
    is_incomplete: bool = False
    settings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = some([suspect.name for suspect in self.suspects]) or "nobody"
        return f"<Localization by {self.by}: {names} accused>"

    def _repr_html_(self) -> str:
        """Who is accused of what, or that nobody is."""
        first = self.suspects[0] if self.suspects else None
        title = (
            "Nobody is accused"
            if first is None
            else f"{first.name} is {'wrong' if first.is_own else 'suspected'}"
        )
        return card(
            title,
            {"by": self.by},
            lines=self.notes[:FEW],
            head=("suspect", "class", "own error", "total", "mistake"),
            rows=[
                (
                    suspect.name,
                    suspect.class_name.rpartition(".")[2],
                    "" if suspect.own is None else f"{suspect.own:.3g}",
                    "" if suspect.total is None else f"{suspect.total:.3g}",
                    suspect.diagnosis.text if suspect.diagnosis else suspect.cause,
                )
                for suspect in self.suspects
            ],
            tone="red" if self.exit_status else "green",
        )

    @property
    def exit_status(self) -> int:
        """1 if a module is suspected, something is wrong without one, or evidence is missing; else 0."""
        return int(bool(self.suspects or self.open or self.is_incomplete))

    def by_own_error(self) -> Localization:
        """The same with suspects in the order of their own errors, the largest first; unknown ones last."""
        order = sorted(self.suspects, key=lambda one: -1.0 if one.own is None else one.own, reverse=True)
        return replace(self, suspects=tuple(order))

    def to_json(self) -> dict[str, Any]:
        """The members that `tcap localize --json` prints, as JSON values (LCL-20).

        Own errors, and the errors between two runs of the target by key, are left out.
        """
        return {
            "format": "tensorcap-localization",
            "version": 1,
            "by": self.by,
            "suspects": [suspect.to_json() for suspect in self.suspects],
            "explained": [{"module": module, "child": child} for module, child in self.explained],
            "changes": json_value(self.changes),
            "nonfinite": None if self.nonfinite is None else self.nonfinite.to_json(),
            "over_precise": [
                {"module": one.module, "class": one.class_name or None, "ratio": json_value(one.ratio)}
                for one in self.over_precise
            ],
            "noise": None
            if self.noise is None
            else {
                "largest": json_value(self.noise.largest),
                "first": self.noise.first or None,
                "module": self.noise.module or None,
            },
            "undone": [{"module": one.module, "reason": one.reason} for one in self.undone],
            "open": list(self.open),
            "notes": list(self.notes),
            "exit_status": self.exit_status,
        }


def joined_modules(modules: Sequence[str]) -> str:
    """One name for the modules of one mistake.

    Example:
        >>> joined_modules(["layers.3.norm", "layers.4.norm"]), joined_modules(["a.0.b.0", "a.1.b.1"])
        ('layers.{3-4}.norm', 'a.0.b.0 and 1 more of a.{}.b.{}')
    """
    name = product_name(modules)
    return f"{modules[0]} and {len(modules) - 1} more of {name_pattern(modules[0])}" if name is None else name


def find_mistake(diagnosis: Diagnosis | None) -> Explanation | None:
    """Find the best explanation that is a mistake of the module: not what it inherits, nor where it errs."""
    for explanation in diagnosis.explanations if diagnosis else ():
        if explanation.kind != "inherited" and not explanation.kind.startswith("only-"):
            return explanation
    return None
