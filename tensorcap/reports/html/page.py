"""All that a report says, as dataclasses: gathered here, printed by the templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.comparison import GREEN, worst
from tensorcap.drawing import Curve, HeatMap, draw_curves, draw_heat_map
from tensorcap.reports.html.run_facts import RunFact, run_facts
from tensorcap.reports.html.sources import ReportSource
from tensorcap.reports.html.suspect_card import SuspectCard, suspect_card
from tensorcap.reports.html.tensor_panel import Panel, tensor_panel
from tensorcap.reports.html.tensor_rows import Row, points_of, tensor_rows
from tensorcap.reports.next_step import NextStep, Sides, after_suspects
from tensorcap.wording import counted, shortened

PANELS: Final = 20  # suspects, then tensors that are worst, with pictures
_BY: Final = {
    "replay": "the reference's model, run on the target's values",
    "injection": "the target, run on the reference's values",
    "archives": "both archives alone, which is weaker: own and inherited errors are not told apart",
}


@dataclass(frozen=True, slots=True)
class Page:
    """All that a report says.

    Attributes:
        title: What was compared.
        is_green: Whether nothing is wrong.
        verdict: The verdict as a sentence, with its denominator.
        culprit: Who is guilty of what, or that nobody is accused, as a sentence; "" if nothing is wrong.
        exchanged: What the target runs in the place of other operations, as sentences.
        next: What to do next.
        counts: How many pairs have each status, and whether it is a green one.
        facts: Both runs side by side.
        alike: Kinds of things that were compared and do not differ.
        unchecked: Kinds that could not be compared, and why.
        by: What accuses the suspects, as a phrase; "" without any.
        suspects: One card for one mistake.
        curves: Errors by execution order.
        heat_map: Layers and components; None without numbered layers.
        rows: One for each tensor.
        panels: The worst tensors that are no suspect's.
        warnings: What a reader has to know.
        blind_spots: What these runs cannot see.
        exit_status: What the command that judged ended with.
    """

    title: str
    is_green: bool
    verdict: str
    culprit: str
    exchanged: tuple[str, ...]
    next: NextStep
    counts: tuple[tuple[str, int, bool], ...]
    facts: tuple[RunFact, ...]
    alike: tuple[str, ...]
    unchecked: tuple[tuple[str, str], ...]
    by: str
    suspects: tuple[SuspectCard, ...]
    curves: tuple[Curve, ...]
    heat_map: HeatMap | None
    rows: tuple[Row, ...]
    panels: tuple[Panel, ...]
    warnings: tuple[str, ...]
    blind_spots: tuple[str, ...]
    exit_status: int


def gather_page(source: ReportSource, *, panels: int = PANELS) -> Page:
    """Gather all that a report says.

    Panels are those of the suspects first, then of the worst tensors that no suspect has.

    Args:
        source: What it is made of.
        panels: How many panels there are at most.
    """
    comparison = source.comparison
    pairs = {pair.key: pair for pair in comparison.pairs}
    suspects = tuple(
        suspect_card(suspect, pairs.get(suspect["key"]) if at < panels else None, source)
        for at, suspect in enumerate(source.suspects)
    )
    drawn = {suspect["key"] for suspect in source.suspects}
    others = [p for p in worst(comparison.pairs, panels) if p.key not in drawn]
    points = tuple(points_of(source))
    preflight = source.examination.preflight
    is_green = source.exit_status == 0
    return Page(
        title=_title(source),
        is_green=is_green,
        verdict=verdict_of(source),
        culprit="" if is_green else _culprit(source, suspects),
        exchanged=tuple(one.text for one in source.examination.exchanged),
        next=_next(source, suspects),
        counts=tuple((status, count, status in GREEN) for status, count in comparison.counts.items()),
        facts=tuple(run_facts(source)),
        alike=preflight.equal if preflight else (),
        unchecked=tuple(preflight.unchecked.items()) if preflight else (),
        by=_BY.get(source.by, "") if suspects else "",
        suspects=suspects,
        curves=draw_curves(points),
        heat_map=draw_heat_map(points),
        rows=tuple(tensor_rows(source)),
        panels=tuple(tensor_panel(p, source) for p in others[: max(0, panels - len(suspects))]),
        warnings=tuple(dict.fromkeys((*comparison.warnings, *source.notes, *source.examination.notes))),
        blind_spots=tuple(comparison.blind_spots),
        exit_status=source.exit_status,
    )


def _title(source: ReportSource) -> str:
    sides = source.comparison.target, source.comparison.reference
    target, reference = (shortened(side.model.rpartition(".")[2] or side.path.name, 80) for side in sides)
    precisions = [side.compute_dtype or side.dtype for side in sides]
    if target == reference and precisions[0] != precisions[1] and all(precisions):
        return f"{target} in {precisions[0]} against {precisions[1]}"
    return f"{target} against {reference}"


def verdict_of(source: ReportSource) -> str:
    """The verdict as a sentence, with its denominator."""
    comparison = source.comparison
    measured = f"{comparison.compared} of {counted(comparison.records, 'tensor')} compared"
    bad = [pair for pair in comparison.pairs if pair.is_required and not pair.is_green]
    if source.exit_status == 0:
        return f"The target computes what the reference does: {measured}, and all that is required is green."
    if not comparison.compared:
        return f"Nothing was compared: {measured}."
    if not bad:
        return f"The tensors are green, {measured}, and something else is wrong."
    first = comparison.divergence
    where = f"; first at {shortened(first.pair.key)}" if first else ""
    return f"The target does not compute what the reference does: {measured}, {len(bad)} not green{where}."


def _culprit(source: ReportSource, suspects: Sequence[SuspectCard]) -> str:
    """Who is guilty, and of what; who is suspected by archives alone is not called guilty."""
    if not suspects:
        first = source.comparison.divergence
        nobody = "No module is accused."
        return f"{nobody} {first.explanation}" if first is not None and source.by else nobody
    first_card = suspects[0]
    name = f"{first_card.name} ({first_card.class_name})" if first_card.class_name else first_card.name
    is_said = "is wrong" if first_card.is_own else "is suspected"
    mistake = first_card.mistake or "no known kind of mistake explains its values"
    more = f" {counted(len(suspects) - 1, 'more suspect')} below." if len(suspects) > 1 else ""
    return f"{name} {is_said}: {mistake.rstrip('.')}.{more}"


def _next(source: ReportSource, suspects: Sequence[SuspectCard]) -> NextStep:
    """What to do next: of a green report nothing, else the command that tells more of the first suspect."""
    first = source.comparison.divergence
    has_recipe = source.archives is not None and bool(source.archives[0].info.workload.path)
    step = after_suspects(
        source.suspects,
        source.by,
        Sides(*source.paths, source.mapping, has_recipe=has_recipe),
        exit_status=source.exit_status,
        first=first.pair.key if first else "",
    )
    if not step.command:
        return NextStep("Nothing has to be done. What these runs cannot see is listed below.")
    text = f"{step.text[0].upper()}{step.text[1:]}:"
    if suspects and suspects[0].is_own:
        hint = f" {suspects[0].hint}" if suspects[0].hint else ""
        text = f"Look at {suspects[0].name} in the port.{hint} {text}"
    return NextStep(text, step.command)
