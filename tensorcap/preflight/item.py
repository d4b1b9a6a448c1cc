"""One thing that two runs differ in, and what their metadata say of modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap_formats.archive import Archive
from tensorcap_formats.run_info import ModuleInfo

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


def common_modules(reference: Archive, target: Archive) -> dict[str, tuple[ModuleInfo, ModuleInfo]]:
    """Modules that both runs have, by site, with what each says of them.

    Raises:
        UnknownError: There are none.
    """
    ours, theirs = reference.info.modules, target.info.modules
    common = {site: (module, theirs[site]) for site, module in ours.items() if site in theirs}
    if not common:
        raise UnknownError("the modules of the two have no name in common")
    return common


def class_of(archive: Archive, site: str) -> str:
    """The class of a module without its package, "" where it is not known."""
    module = archive.info.modules.get(site)
    return module.short_class if module else ""


def short(name: str) -> str:
    """The name of a class without its package."""
    return name.rpartition(".")[2]


def some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
