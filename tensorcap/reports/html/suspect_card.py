"""Suspects as cards: one for one mistake, in however many layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tensorcap.comparison import Pair
from tensorcap.localization import joined_modules
from tensorcap.reports.html.sources import ReportSource
from tensorcap.reports.html.tensor_panel import Panel, tensor_panel
from tensorcap.wording import shortened, three_digits


@dataclass(frozen=True, slots=True)
class SuspectCard:
    """One mistake, in however many layers.

    Attributes:
        name: The module, with the numbers of all layers.
        class_name: Its class, "" if unknown.
        is_own: Whether the error is known to be its own.
        mistake: What kind of mistake explains its values, as a sentence; "" if none does.
        hint: What that mistake usually is, "" if nothing is known.
        kind: The kind in a word; "" if unknown.
        reason: Why it is suspected.
        by: What accuses it.
        errors: Its errors by name, as text.
        modules: All modules, if they are several.
        places: The operation on each side with its line, of a compiled target; what either side alone runs,
            where both models were traced.
        panel: Its tensor; None if it is not among those that are drawn.
    """

    name: str
    class_name: str
    is_own: bool
    mistake: str
    hint: str
    kind: str
    reason: str
    by: str
    errors: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    places: tuple[str, ...]
    panel: Panel | None


def suspect_card(suspect: Mapping[str, Any], pair: Pair | None, source: ReportSource) -> SuspectCard:
    """Gather what is known of a suspect.

    Args:
        suspect: As `tcap localize --json` has it.
        pair: Its tensor, to be drawn; None if it is not.
        source: What the report is made of.
    """
    mistake, code = suspect["diagnosis"], suspect.get("code")
    errors = {
        "own": suspect["own"],
        "inherited": suspect["inherited"],
        "total": suspect["total"],
        "from run to run": suspect["noise"],
        "R": suspect["ratio"],
    }
    return SuspectCard(
        name=shortened(joined_modules(suspect["modules"])),
        class_name=(suspect["class"] or "").rpartition(".")[2],
        is_own=suspect["is_own"],
        mistake=mistake["text"] if mistake else "",
        hint=mistake["hint"] if mistake else "",
        kind=suspect["cause"] or "",
        reason=suspect["reason"],
        by=" and ".join(suspect["by"]),
        errors=tuple((name, three_digits(float(v))) for name, v in errors.items() if v is not None),
        modules=tuple(suspect["modules"]) if len(suspect["modules"]) > 1 else (),
        places=(*_places(suspect.get("operation")), *([code["text"]] if code else [])),
        panel=None if pair is None else tensor_panel(pair, source),
    )


def _places(operation: Mapping[str, Any] | None) -> Iterator[str]:
    if operation is None:
        return
    place = operation["place"]
    yield f"Reference: {place['op']} ({place['node']}){_line(place['file'], place['line'])}"
    number = "" if operation["target_op_id"] is None else f" #{operation['target_op_id']}"
    target = f"{operation['target_op']}{number}".strip() or operation["target_node"] or "has none"
    yield f"Target: {target}{_line(operation['target_file'], operation['target_line'])}"


def _line(file: str, line: int | None) -> str:
    return f" at {file}:{line}" if file and line is not None else ""
