"""One difference of two runs apart from their tensors, and modules that both have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from tensorcap.wording import one_line
from tensorcap_formats.archive import Archive
from tensorcap_formats.run_info import ModuleInfo

Kind = Literal[
    "inputs",
    "repeat",
    "mode",
    "config",
    "modules",
    "hyperparameters",
    "parameters",
    "attention",
    "buffers",
    "settings",
    "precision",
    "versions",
]
KINDS: Final[tuple[Kind, ...]] = Kind.__args__  # type: ignore[attr-defined] # no public name for it
_LONGEST: Final = 60  # characters of a side's value in a sentence


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that differs, or that makes a comparison worthless.

    Attributes:
        kind: The kind of thing that was compared.
        name: Which one: an input, an entry of the configuration, a module, a package.
        reference: JSON value of the reference.
        target: JSON value of the target.
        explains: Whether it alone can make outputs differ by more than rounding does.
        text: What it means, as a sentence.
        rank: Those with the smallest number are listed first.
    """

    kind: Kind
    name: str
    reference: Any
    target: Any
    explains: bool
    text: str
    rank: int


class UnknownError(Exception):
    """A kind cannot be compared; the text says why."""


def make_item(
    kind: Kind, name: str, ours: Any, theirs: Any, text: str, *, explains: bool, rank: int = 0
) -> Item:
    """Make an item, with its place in the order of PRE-1."""
    return Item(kind, name, ours, theirs, explains, text, 100 * KINDS.index(kind) + rank)


def item_text(one: Item) -> str:
    """Say what differs, what each side has, and what that means, in one line.

    Example:
        >>> classes = "torch.nn.SiLU", "torch.nn.GELU"
        >>> one = make_item("modules", "1.act", *classes, "Others stayed.", explains=True)
        >>> item_text(one)
        'modules 1.act: SiLU in the reference, GELU in the target. Others stayed.'
    """
    sides = ""
    if one.kind == "hyperparameters":
        return f"{one_line(one.name)}: {one_line(one.text)}"
    if one.kind not in ("inputs", "repeat", "mode", "parameters", "buffers") or "shapes" in one.text:
        ours, theirs = side_texts(one, _LONGEST)
        sides = f": {ours} in the reference, {theirs} in the target"
    return f"{one.kind} {one_line(one.name)}{sides}. {one_line(one.text)}"


def side_texts(one: Item, limit: int) -> tuple[str, str]:
    """Return the values of both sides as texts of `limit` characters at most."""
    texts = [one_line(str(side)) for side in (one.reference, one.target)]
    if one.kind == "modules":
        short = [short_name(text) for text in texts]
        texts = short if short[0] != short[1] else texts
    ours, theirs = (text if len(text) <= limit else f"{text[: limit - 1]}…" for text in texts)
    return ours, theirs


def common_modules(reference: Archive, target: Archive) -> dict[str, tuple[ModuleInfo, ModuleInfo]]:
    """Return the modules that both runs have, by site, with what each says of them.

    Raises:
        UnknownError: There are none.
    """
    ours, theirs = reference.info.modules, target.info.modules
    common = {site: (module, theirs[site]) for site, module in ours.items() if site in theirs}
    if not common:
        raise UnknownError("the modules of the two have no name in common")
    return common


def short_name(name: str) -> str:
    """Return the name of a class without its package."""
    return name.rpartition(".")[2]
