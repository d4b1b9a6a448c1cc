"""The source pane of a row: the frames of its call, and which of them is shown of which side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.viewer.rows import Row, shortened
from tensorcap.viewer.source_texts import Excerpt, SourceTexts
from tensorcap.viewer.subject import Subject

SIDES: Final = ("reference", "target")


@dataclass(frozen=True, slots=True)
class Frame:
    """One place of the stack of calls that a row was made in.

    Attributes:
        level: -1 of the op that made it, 0 of the row's own module, 1 of the module around that, and so on.
        name: Of the op, or the last part of the module's path.
        class_name: The qualified name of the module's class, "" if unknown or of an op.
        excerpt: The text; None without one.
        is_call: Whether the line that is marked calls the module inside.
    """

    level: int
    name: str
    class_name: str
    excerpt: Excerpt | None
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class SourcePanel:
    """What the source pane shows.

    Attributes:
        side: The side that it is of.
        sides: Those that there are.
        frames: From the model itself inwards.
        shown: The one that is shown.
        is_same: Whether the other side has the same text there; None if one of them has none.
        why: Why there is no text.
    """

    side: str
    sides: tuple[str, ...]
    frames: tuple[Frame, ...]
    shown: Frame
    is_same: bool | None
    why: str


def source_panel(subject: Subject, row: Row, *, side: str, level: int | None) -> SourcePanel:
    """Find the text to show.

    1. Of an op, or a module whose result an op made, it is the line that ran the op.
    2. Of a module whose class is of another package than the nearest one around it that calls it, as a
       library's linear layer is, it is the line of that call.
    3. Of any other module it is its own class, and if that has no text the nearest one around it that has.

    Args:
        subject: What is looked at.
        row: The row.
        side: The side that is wanted; "" for the reference, or the one that has the row.
        level: The frame that is wanted, the nearest that there is; None for the one of the rules above.
    """
    sides = SIDES[: len(subject.archives)] or SIDES[:1]
    number = int((side or subject.owner(row)) == "target" and len(sides) > 1)
    frames = _frames(subject, row, number)
    shown = _first(frames) if level is None else min(frames, key=lambda frame: abs(frame.level - level))
    is_same = None
    if len(sides) > 1 and shown.excerpt is not None:
        beyond = [f.excerpt for f in _frames(subject, row, 1 - number) if f.level == shown.level]
        is_same = beyond[0].source.text == shown.excerpt.source.text if beyond and beyond[0] else None
    why = "" if shown.excerpt else _why_none(subject, number, shown)
    return SourcePanel(
        SIDES[number], SIDES[: len(subject.archives)], tuple(reversed(frames)), shown, is_same, why
    )


def _frames(subject: Subject, row: Row, side: int) -> list[Frame]:
    """The op that made a row, if its line is known, its module, and the modules around that."""
    module = subject.module_of(row, side)
    classes = subject.class_names[side] if subject.class_names else {}
    texts = subject.texts[side] if subject.texts else SourceTexts({})
    node, point = subject.flows[side].node(row), subject.points.get(row.key)
    file, line = (node.file, node.line) if node else (point.file, point.line) if point else ("", None)
    of_op = texts.of_line(file, line)
    name = node.name.removeprefix("aten.") if node else "op"
    frames = [Frame(-1, shortened(name, 60), "", of_op)] if of_op else []
    parts = module.split(".") if module else []
    for level in range(len(parts) + 1):
        path, child = ".".join(parts[: len(parts) - level]), ".".join(parts[len(parts) - level :])
        class_name = classes.get(path, "")
        call = texts.call_of(child, class_name) if child else None
        name = shortened(path.rpartition(".")[2], 60) or "model"
        frames.append(Frame(level, name, class_name, call or texts.of_class(class_name), call is not None))
    return frames


def _first(frames: Sequence[Frame]) -> Frame:
    """The frame that is shown if none is wanted, of those from the inside outwards."""
    own = frames[0]
    if own.level < 0:
        return own
    caller = next((frame for frame in frames if frame.is_call), None)
    if caller is not None and _package(caller) != _package(own):
        return caller
    return next((frame for frame in frames if frame.excerpt), own)


def _package(frame: Frame) -> str:
    return frame.class_name.partition(".")[0]


def _why_none(subject: Subject, side: int, frame: Frame) -> str:
    if not subject.texts:
        return "A saved comparison has no source text. Open both archives to see it."
    if not subject.texts[side].by_name:
        return "The archive has no source text: its run's code was not at hand."
    return f"The archive has no source text of {shortened(frame.class_name) or 'this module'}."
