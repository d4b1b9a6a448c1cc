"""The source pane of a row: which text is shown of which side, and the modules around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tensorcap.viewer.rows import Row, shortened
from tensorcap.viewer.source_texts import Excerpt
from tensorcap.viewer.subject import Subject

SIDES: Final = ("reference", "target")


@dataclass(frozen=True, slots=True)
class SourcePanel:
    """What the source pane shows.

    Attributes:
        side: The side that it is of.
        sides: Those that there are.
        crumbs: The modules around the row's own and itself: path, last name, class.
        shown: Path of the module that the text is of.
        excerpt: The text; None without one.
        why: Why there is none.
    """

    side: str
    sides: tuple[str, ...]
    crumbs: tuple[tuple[str, str, str], ...]
    shown: str
    excerpt: Excerpt | None
    why: str


def source_panel(subject: Subject, row: Row, *, side: str, wanted: str | None) -> SourcePanel:
    """Find the text to show.

    1. Of an op it is the function that ran it, if nothing else is wanted.
    2. Else it is the class of the module that is wanted, or of the row's own.
    3. If that has no text and none was wanted, it is the nearest module around it that has, where it calls.

    Args:
        subject: What is looked at.
        row: The row.
        side: The side that is wanted; "" for the reference, or the one that has the row.
        wanted: Path of a module around the row's own; None for the row's op or module itself.
    """
    sides = SIDES[: len(subject.archives)]
    number = int((side or subject.owner(row)) == "target" and len(sides) > 1)
    module = subject.module_of(row, number)
    classes = subject.class_names[number] if subject.class_names else {}
    excerpt, shown, why = _excerpt(subject, row, number, module, wanted)
    return SourcePanel(SIDES[number], sides, _crumbs(module, classes), shown, excerpt, why)


def _excerpt(
    subject: Subject, row: Row, side: int, module: str, wanted: str | None
) -> tuple[Excerpt | None, str, str]:
    """The text to show, the module that it is of, and why there is none."""
    if not subject.texts:
        return None, module, "A saved comparison has no source text. Open both archives to see it."
    texts, classes = subject.texts[side], subject.class_names[side]
    node, point = subject.flows[side].node(row), subject.points.get(row.key)
    file, line = (node.file, node.line) if node else (point.file, point.line) if point else ("", None)
    of_op = texts.of_line(file, line) if wanted is None else None
    if of_op is not None:
        return of_op, module, ""
    around = [module]
    while around[-1]:
        around.append(around[-1].rpartition(".")[0])
    for shown in around if wanted is None else [wanted]:
        is_around = shown != module and (not shown or module.startswith(f"{shown}."))
        child = module[len(shown) :].lstrip(".") if is_around else ""
        excerpt = texts.of_module(classes.get(shown, ""), child)
        if excerpt is not None:
            return excerpt, shown, ""
    if not texts.by_name:
        return None, module, "The archive has no source text: its run's code was not at hand."
    name = shortened(classes.get(wanted if wanted is not None else module, "")) or "this module"
    return None, wanted if wanted is not None else module, f"The archive has no source text of {name}."


def _crumbs(module: str, classes: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    parts = module.split(".") if module else []
    paths = ["", *(".".join(parts[: at + 1]) for at in range(len(parts)))]
    known = [(path, path.rpartition(".")[2] or "model", classes.get(path, "")) for path in paths]
    return tuple(
        (path, shortened(name, 60), shortened(cls.rpartition(".")[2], 60)) for path, name, cls in known
    )
