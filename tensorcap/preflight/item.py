"""One thing that two runs differ in, and what their metadata say of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE

Kind = Literal[
    "inputs",
    "repeat",
    "mode",
    "config",
    "modules",
    "parameters",
    "attention",
    "buffers",
    "settings",
    "precision",
    "versions",
]
KINDS: Final[tuple[Kind, ...]] = Kind.__args__  # type: ignore[attr-defined] # no public name for it
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that differs, or that makes a comparison worthless.

    Attributes:
        kind: What was looked at.
        name: Which one: an input, an entry of the configuration, a module, a package.
        reference: JSON value of the reference.
        target: JSON value of the target.
        explains: Whether it alone can make outputs differ by more than rounding does.
        text: What it means, as a sentence.
        rank: Those with the smallest number are told first.
    """

    kind: Kind
    name: str
    reference: Any
    target: Any
    explains: bool
    text: str
    rank: int


class UnknownError(Exception):
    """A kind cannot be looked at; the text says why."""


def item(kind: Kind, name: str, ours: Any, theirs: Any, text: str, *, explains: bool, rank: int = 0) -> Item:
    """Make an item, with its place in the order of PRE-1."""
    return Item(kind, name, ours, theirs, explains, text, 100 * KINDS.index(kind) + rank)


def modules(archive: Archive) -> dict[str, Mapping[str, Any]]:
    """What a run says of its modules, by path; nothing for a damaged list."""
    listed = archive.run.get("modules")
    entries = listed if isinstance(listed, list) else []
    return {str(entry.get("path") or ROOT_SITE): entry for entry in entries if isinstance(entry, Mapping)}


def common_modules(
    reference: Archive, target: Archive
) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Modules that both runs have, with what each says of them.

    Raises:
        UnknownError: There are none.
    """
    ours, theirs = modules(reference), modules(target)
    common = {path: (module, theirs[path]) for path, module in ours.items() if path in theirs}
    if not common:
        raise UnknownError("the modules of the two have no name in common")
    return common


def class_of(archive: Archive, site: str) -> str:
    """The class of a module without its package, "" where it is not known."""
    return short(str(modules(archive).get(site, {}).get("class") or ""))


def short(name: str) -> str:
    """The name of a class without its package."""
    return name.rpartition(".")[2]


def mapping(value: object) -> Mapping[str, Any]:
    """A JSON object, or an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}


def some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
