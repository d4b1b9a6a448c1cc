"""All that a report says, as dataclasses: gathered here, printed by the templates."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.comparison import GREEN, Comparison, Finding, Pair, contents, error_of, worst
from tensorcap.comparison.preflight import side_texts
from tensorcap.localization import joined_modules
from tensorcap.reports.html.charts import Curve, HeatMap, Point, draw_curves, draw_heat_map
from tensorcap.reports.html.panels import Pictures, draw_pair, worst_element
from tensorcap.reports.html.sources import ReportSource
from tensorcap.reports.layer_report import component_of, shape_texts
from tensorcap.runs import is_inner, is_result
from tensorcap.wording import counted
from tensorcap_formats.keys import module_of

PANELS: Final = 20  # suspects, then tensors that are worst, with pictures
_WIDEST_NAME: Final = 160  # characters of a name: the middle of a longer one is left out
_BY: Final = {
    "replay": "the reference's model, run on the target's values",
    "injection": "the target, run on the reference's values",
    "archives": "both archives alone, which is weaker: own and inherited errors are not told apart",
}


@dataclass(frozen=True, slots=True)
class Next:
    """What to do next.

    Attributes:
        text: A sentence.
        command: The command for this very case; "" if there is nothing to do.
    """

    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class RunFact:
    """One thing that is known of both runs.

    Attributes:
        name: What.
        reference: Of the reference, "-" if unknown.
        target: Of the target.
        differs: Whether to mark it.
        text: What the difference means, as a sentence; "" if that is plain.
        explains: Whether it alone can make outputs differ by more than rounding does.
    """

    name: str
    reference: str
    target: str
    differs: bool
    text: str = ""
    explains: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One tensor of both sides.

    Attributes:
        key: Its key.
        status: Of the pair.
        is_green: Whether that is a green one.
        source: The line of code that made it, "" if unknown.
        shape: Of the reference.
        dtypes: Of both sides.
        numbers: Names of metrics with their values.
        worst: Where the largest error is, as a sentence, or "".
        steps: Layout steps from the target's tensor to the reference's.
        target_keys: Records of the target that it was compared with, if they have other keys.
        findings: What the tests that looked at it say; status and text of each.
        pictures: Both tensors and their difference.
    """

    key: str
    status: str
    is_green: bool
    source: str
    shape: str
    dtypes: str
    numbers: tuple[tuple[str, str], ...]
    worst: str
    steps: tuple[str, ...]
    target_keys: tuple[str, ...]
    findings: tuple[tuple[str, str], ...]
    pictures: Pictures


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
        places: The operation on each side with its line, of a compiled target.
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


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of the table.

    Attributes:
        order: Execution order number; None if only the target has it.
        key: Key text.
        also: Count of further keys that hold the same tensor on both sides.
        component: What kind of module made it.
        class_name: Class of that module.
        status: Of the pair.
        is_green: Whether that is a green one.
        shape: Of the reference, else of the target.
        error: Relative error; None if nothing was measured.
        own: What the module made itself; None if unknown.
        max_abs: Largest absolute error; None if nothing was measured.
        psnr: In decibels; None if undefined.
        reason: Why the status is what it is, or "".
    """

    order: int | None
    key: str
    also: int
    component: str
    class_name: str
    status: str
    is_green: bool
    shape: str
    error: float | None
    own: float | None
    max_abs: float | None
    psnr: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Page:
    """All that a report says.

    Attributes:
        title: What was compared.
        is_green: Whether nothing is wrong.
        verdict: The verdict as a sentence, with its denominator.
        culprit: Who is guilty of what, or that nobody is accused, as a sentence; "" if nothing is wrong.
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
    next: Next
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


def gather_page(source: ReportSource) -> Page:
    """Gather all that a report says.

    Panels are those of the suspects first, then of the worst tensors that no suspect has, 20 in all.
    """
    comparison = source.comparison
    pairs = {pair.key: pair for pair in comparison.pairs}
    suspects = tuple(
        _card(suspect, pairs.get(suspect["key"]) if at < PANELS else None, source)
        for at, suspect in enumerate(source.suspects)
    )
    drawn = {suspect["key"] for suspect in source.suspects}
    others = [p for p in worst(comparison.pairs, PANELS) if p.key not in drawn]
    points = tuple(points_of(source))
    preflight = source.examination.preflight
    is_green = source.exit_status == 0
    return Page(
        title=_title(source),
        is_green=is_green,
        verdict=verdict_of(source),
        culprit="" if is_green else _culprit(source, suspects),
        next=_next(source, suspects),
        counts=tuple((status, count, status in GREEN) for status, count in comparison.counts.items()),
        facts=(*_run_facts(source), *_differences(source)),
        alike=preflight.equal if preflight else (),
        unchecked=tuple(preflight.unchecked.items()) if preflight else (),
        by=_BY.get(source.by, "") if suspects else "",
        suspects=suspects,
        curves=draw_curves(points),
        heat_map=draw_heat_map(points),
        rows=tuple(_rows(source)),
        panels=tuple(_panel(p, source) for p in others[: max(0, PANELS - len(suspects))]),
        warnings=tuple(dict.fromkeys((*comparison.warnings, *source.notes, *source.examination.notes))),
        blind_spots=tuple(comparison.blind_spots),
        exit_status=source.exit_status,
    )


def shortened(name: str, limit: int = _WIDEST_NAME) -> str:
    """A name of at most so many characters, without its middle.

    Example:
        >>> shortened("model.layers.0.mlp", 12)
        'model…0.mlp'
    """
    half = (limit - 1) // 2
    return name if len(name) <= limit else f"{name[:half]}…{name[-half:]}"


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


def _next(source: ReportSource, suspects: Sequence[SuspectCard]) -> Next:
    """What to do next: of a green report nothing, else the command that tells more of the first suspect."""
    if source.exit_status == 0:
        return Next("Nothing has to be done. What these runs cannot see is listed below.")
    paths = shlex.join(source.paths)
    mapping = f" --map {shlex.quote(source.mapping)}" if source.mapping else ""
    first = source.comparison.divergence
    if suspects and suspects[0].is_own:
        text = f"Look at {suspects[0].name} in the port."
        text += f" {suspects[0].hint}" if suspects[0].hint else ""
        key = shlex.quote(source.suspects[0]["key"])
        return Next(
            f"{text} All that was tried on its values:", f"tcap diagnose {paths} {key}{mapping} --all"
        )
    if source.by == "archives":
        has_model = source.archives is not None and source.archives[0].info.workload.path
        model = "" if has_model else " --reference-model FILE.py:FUNCTION"
        return Next(
            "Run the reference's model on the target's values, which tells own from inherited errors:",
            f"tcap localize {paths}{mapping}{model}",
        )
    if not source.by:
        return Next("Look for the module that is wrong:", f"tcap localize {paths}{mapping}")
    if first is not None:
        key = shlex.quote(first.pair.key)
        return Next("See how the first tensor was judged:", f"tcap compare {paths}{mapping} --why {key}")
    return Next("See what is missing:", f"tcap compare {paths}{mapping}")


def _run_facts(source: ReportSource) -> Iterator[RunFact]:
    """What the archives say of themselves, a line for each thing."""
    sides = source.comparison.reference, source.comparison.target
    for name, texts in (
        ("archive", [str(side.path) for side in sides]),
        ("model", [side.model.rpartition(".")[2] for side in sides]),
        ("weights in", [side.dtype for side in sides]),
        ("computed in", [side.compute_dtype for side in sides]),
        ("tensors", [str(side.records) for side in sides]),
        ("run ended", [side.error or ("as it should" if side.is_complete else "early") for side in sides]),
    ):
        if any(texts):
            ours, theirs = (shortened(text) or "-" for text in texts)
            yield RunFact(name, ours, theirs, ours != theirs and name not in ("archive", "tensors"))
    if source.archives is None:
        return
    infos = [archive.info for archive in source.archives]
    seeds = [str(info.workload.options.get("seed", "")) for info in infos]
    for name, texts in (
        ("framework", [info.framework for info in infos]),
        ("device", [info.device for info in infos]),
        ("seed", seeds),
        ("attention", [info.attention_implementation for info in infos]),
    ):
        if any(texts):
            ours, theirs = (shortened(text) or "-" for text in texts)
            yield RunFact(name, ours, theirs, ours != theirs)


def _differences(source: ReportSource) -> Iterator[RunFact]:
    """What differs apart from tensors: versions, configuration, inputs."""
    preflight = source.examination.preflight
    for item in preflight.items if preflight else ():
        ours, theirs = side_texts(item, _WIDEST_NAME)
        yield RunFact(f"{item.kind}: {shortened(item.name)}", ours, theirs, True, item.text, item.explains)


def _card(suspect: Mapping[str, Any], pair: Pair | None, source: ReportSource) -> SuspectCard:
    mistake, operation = suspect["diagnosis"], suspect.get("operation")
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
        errors=tuple((name, number_text(float(v))) for name, v in errors.items() if v is not None),
        modules=tuple(suspect["modules"]) if len(suspect["modules"]) > 1 else (),
        places=tuple(_places(operation)) if operation else (),
        panel=None if pair is None else _panel(pair, source),
    )


def _places(operation: Mapping[str, Any]) -> Iterator[str]:
    place = operation["place"]
    yield f"Reference: {place['op']} ({place['node']}){_line(place['file'], place['line'])}"
    number = "" if operation["target_op_id"] is None else f" #{operation['target_op_id']}"
    target = f"{operation['target_op']}{number}".strip() or operation["target_node"] or "has none"
    yield f"Target: {target}{_line(operation['target_file'], operation['target_line'])}"


def _line(file: str, line: int | None) -> str:
    return f" at {file}:{line}" if file and line is not None else ""


def _panel(pair: Pair, source: ReportSource) -> Panel:
    record, other, d = pair.reference or pair.target, pair.target, pair.difference
    assert record is not None
    dtypes = [side.dtype.name for side in (pair.reference, other) if side is not None]
    metrics = (
        {}
        if d is None
        else {
            "relative error": d.relative_frobenius,
            "row error (median)": d.row_error_median,
            "max abs": d.max_abs,
            "mean abs": d.mean_abs,
            "PSNR, dB": d.psnr_db,
            "cosine": d.cosine,
            "max ULP": d.max_ulp,
        }
    )
    origin = pair.origin
    keys = origin.target if origin else ()
    return Panel(
        key=shortened(pair.key),
        status=pair.status,
        is_green=pair.is_green,
        source=source.examination.sources.get(pair.key, ""),
        shape=shape_texts([record.shape]),
        dtypes=" → ".join(dict.fromkeys(dtypes)),
        numbers=tuple((name, number_text(v)) for name, v in metrics.items() if v is not None),
        worst=worst_element(d),
        steps=tuple(str(step) for step in origin.steps) if origin else (),
        target_keys=tuple(shortened(key) for key in keys if key != pair.key),
        findings=tuple(_finding(f) for f in pair.findings),
        pictures=draw_pair(pair, source.archives),
    )


def _finding(finding: Finding) -> tuple[str, str]:
    return finding.status, finding.text


def points_of(source: ReportSource) -> Iterator[Point]:
    """Results of modules in execution order, with what went into the call of each."""
    inherited: dict[str, float] = {}
    for pair in source.comparison.pairs:
        record, error = pair.reference, _drawn_error(pair)
        if record is None or record.key.is_bare or error is None:
            continue
        if record.key.slot.startswith("input"):
            inherited[record.key.where] = max(error, inherited.get(record.key.where, 0.0))
    for pair in results_of(source.comparison):
        assert pair.reference is not None
        key = pair.reference.key
        own = source.own_errors.get(pair.key)
        yield Point(key.site, _drawn_error(pair), inherited.get(key.where), own, not _is_bad(pair))


def results_of(comparison: Comparison) -> list[Pair]:
    """The pairs of results of modules, in execution order of the reference: the points of a curve."""
    results = [
        pair
        for pair in comparison.pairs
        if pair.reference is not None
        and not pair.reference.key.is_bare
        and is_result(pair.reference.key)
        and not is_inner(pair.reference.key)
        and not pair.reference.key.slot.startswith("input")
        and pair.status != "excluded"
    ]
    return sorted(results, key=lambda pair: pair.reference.order if pair.reference else 0)


def _is_bad(pair: Pair) -> bool:
    return pair.is_required and not pair.is_green


def _drawn_error(pair: Pair) -> float | None:
    """The relative error of a pair, infinite if elements are finite on one side only."""
    if pair.difference is not None and pair.difference.mask_mismatches:
        return math.inf
    return error_of(pair)


def _rows(source: ReportSource) -> Iterator[Row]:
    """A row for each tensor: keys with equal contents on both sides, in one status, share one."""
    also: dict[object, int] = {}
    first: dict[object, Pair] = {}
    for pair in source.comparison.pairs:
        same = contents(pair)
        tensor: object = (same, pair.status) if same else pair.key
        first.setdefault(tensor, pair)
        also[tensor] = also.get(tensor, -1) + 1
    for tensor, pair in first.items():
        yield _row(pair, also[tensor], source)


def _row(pair: Pair, also: int, source: ReportSource) -> Row:
    record, d = pair.reference or pair.target, pair.difference
    assert record is not None
    site = record.key.site
    return Row(
        order=record.order if pair.reference else None,
        key=shortened(pair.key),
        also=also,
        component="" if record.key.is_bare else shortened(component_of(module_of(site)), 40),
        class_name=source.examination.classes.get(module_of(site), "").rpartition(".")[2],
        status=pair.status,
        is_green=not _is_bad(pair),
        shape=shape_texts([record.shape]),
        error=_drawn_error(pair),
        own=source.own_errors.get(pair.key),
        max_abs=None if d is None else d.max_abs,
        psnr=None if d is None else d.psnr_db,
        reason=pair.reason,
    )


def number_text(value: float | None) -> str:
    """A number in three digits, "" for none.

    Example:
        >>> number_text(0.0810523), number_text(float("inf")), number_text(None)
        ('0.0811', 'not finite', '')
    """
    if value is None:
        return ""
    return f"{value:.3g}" if math.isfinite(value) else "not finite"
