"""A set of rules: names that mean the same, tensors that are fused, and what is missing for a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Final

from tensorcap.alignment.mapping import SideName
from tensorcap.alignment.names.name_patterns import NamePattern, Rename
from tensorcap_formats.errors import UsageError, abbreviate

_PASSES: Final = 32  # over all rules; two or three suffice unless rules undo each other
_LONGEST: Final = 1000  # characters that rules add


@dataclass(frozen=True, slots=True)
class Fused:
    """Tensors of one side that are one tensor of the other.

    Attributes:
        parts: The last components of their names, in the order in which they stand in it.
        whole: The last component of its name, in the same parent.
        where: Where it was written.
        axis: Along which they stand one after the other, if shapes and values leave it open; None if the
            rule does not know.
        examples: A part's and the whole's names.
    """

    parts: tuple[str, ...]
    whole: str
    where: str
    axis: int | None = None
    examples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """Modules that only one side has, which is no bug.

    Attributes:
        reason: Why not.
        where: Where it was written.
        only_in: The side that has them; None for either.
        sites: Ends of their names.
        classes: Patterns of the last component of their classes' names.
        examples: A site and a class each that it explains.
    """

    reason: str
    where: str
    only_in: SideName | None = None
    sites: tuple[NamePattern, ...] = ()
    classes: tuple[str, ...] = ()
    examples: tuple[tuple[str, str], ...] = ()

    def explains(self, site: str, module: str) -> bool:
        """Whether it is about a site, or a module of a class."""
        last = module.rpartition(".")[2]
        return any(name.fits(site) for name in self.sites) or any(fnmatchcase(last, c) for c in self.classes)


@dataclass(frozen=True)
class Rules:
    """What makes names of two ecosystems equal, and what follows for the rest.

    Attributes:
        functions: Users' functions, which are given a name before any renaming.
        renames: In the order in which they are done.
        fused: Tensors that are fused.
        expected: What only one side has.
    """

    functions: tuple[Callable[[str], str], ...] = ()
    renames: tuple[Rename, ...] = ()
    fused: tuple[Fused, ...] = ()
    expected: tuple[Expected, ...] = ()
    _known: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def canonical(self, site: str) -> str:
        """The name that sites of one meaning share; what stands behind a `:`, within a module, is kept.

        Raises:
            UsageError: A renaming has no end, or a user's function fails.
        """
        if site not in self._known:
            is_path = "/" in site  # of a graph of another runtime: `block/Relu:0` is no place within a module
            name, colon, point = (site, "", "") if is_path else site.partition(":")
            for function in self.functions:
                name = function(name)
            self._known[site] = self._renamed(name) + colon + point
        return self._known[site]

    def _renamed(self, start: str) -> str:
        name = start
        for _ in range(_PASSES):
            before = name
            for rule in self.renames:
                name = rule.applied(name)
                if len(name) > _LONGEST + len(start):
                    raise _endless(rule, start)
            if name == before:
                return name
        raise _endless(next(rule for rule in self.renames if rule.applied(name) != name), start)

    def reason(self, side: SideName, site: str, module: str) -> str:
        """Why only one side has a module, by its site or its class; empty if no rule says so."""
        for expected in self.expected:
            if expected.only_in in (None, side) and expected.explains(site, module):
                return expected.reason
        return ""

    def before(self, *others: Rules) -> Rules:
        """These rules, and then others."""
        every: Sequence[Rules] = (self, *others)
        return replace(
            self,
            functions=tuple(f for rules in every for f in rules.functions),
            renames=tuple(r for rules in every for r in rules.renames),
            fused=tuple(f for rules in every for f in rules.fused),
            expected=tuple(e for rules in every for e in rules.expected),
        )


def _endless(rule: Rename, name: str) -> UsageError:
    return UsageError(
        f"{rule.where}: {rule.pattern.text!r} to {rule.to!r}: {abbreviate(name)!r} comes not to rest, "
        f"expected names that no rule changes after {_PASSES} passes",
        hint="Does a rule undo another one, or add what it fits itself?",
    )
