"""The summary of a verification, as sentences: `summary.txt`, and what `tcap verify` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tensorcap.alignment import Order
from tensorcap.comparison import ABSENT, Comparison, Pair, error_of
from tensorcap.comparison.preflight import item_text
from tensorcap.reports.layer_report import Layer, depth_of, shape_texts
from tensorcap.reports.suspects import context_lines, suspect_lines
from tensorcap.runs import ArchiveSummary
from tensorcap.wording import FEW, conjugated, counted, one_line, some
from tensorcap_formats.keys import Key

if TYPE_CHECKING:
    from tensorcap.localization import Localization, Suspect, Verification, WeightComparison


_SUSPECTS: Final = 5  # that are described
_INDENT: Final = "   "
_WIDTH: Final = 120  # columns of a line


def order_text(order: Order | None) -> str:
    """Whether both sides have the same execution order, as a sentence."""
    if order is None:
        return "The execution order could not be compared: a side does not know its own."
    if order.is_same:
        return f"The execution order is the same: {counted(order.results, 'result')} compared."
    moved = "; ".join(
        f"{move.key} comes after {move.target_after or 'nothing'} in the target, after "
        f"{move.after or 'nothing'} in the reference"
        for move in order.moves[:FEW]
    )
    return f"The execution order differs: {order.moved} of {counted(order.results, 'result')} moved: {moved}."


def summarize_verification(
    verification: Verification, layers: Sequence[Layer], files: Sequence[str]
) -> tuple[str, ...]:
    """Say what is wrong, what only inherits it, and what could not be compared.

    Args:
        verification: All but its summary.
        layers: Those of the free runs.
        files: The file that each side's model stands in, "" if unknown.

    Returns:
        A sentence or two a line, each once.
    """
    sides = verification.free.reference, verification.free.target
    heads = [
        f"{name}: {_side_text(side, file)}."
        for name, side, file in zip(("Reference", "Target"), sides, files, strict=True)
    ]
    lines: list[str] = []
    for line in (*heads, *_lines(verification, layers)):
        if line.startswith(_INDENT) or line not in lines:
            lines.append(line)
    return tuple(lines)


def summary_lines(summary: Iterable[str]) -> Iterator[str]:
    """The lines of `summary.txt`: those of a summary, in 120 columns, for a terminal."""
    for line in summary:
        indent = " " * (len(line) - len(line.lstrip(" ")))
        yield from textwrap.wrap(
            one_line(line),
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
        )


def layer_of(key: str, module: str, layers: Iterable[Layer]) -> Layer | None:
    """The layer of a key, else the first one of its module; None if the module has no results."""
    of_module = [layer for layer in layers if Key.parse(layer.key).site == module]
    return next((layer for layer in of_module if layer.key == key), next(iter(of_module), None))


def _side_text(side: ArchiveSummary, file: str) -> str:
    model = side.model.rpartition(".")[2] or "a run"
    text = f"{model} of {file}" if file else model
    precision = side.compute_dtype or side.dtype
    return f"{text}, {precision}" if precision else text


def _lines(verification: Verification, layers: Sequence[Layer]) -> Iterator[str]:
    if verification.weights is not None:
        yield weights_text(verification.weights)
        yield from _weights_not_compared(verification.weights)
    yield from _verdict(verification)
    for number, suspect in enumerate(verification.suspects[:_SUSPECTS], 1):
        heading, *details = suspect_lines(number, suspect)
        yield f"{heading} is wrong"
        yield from (f"{_INDENT}{detail}" for detail in (*details, *_both_sides(suspect, layers)))
    if len(verification.suspects) > _SUSPECTS:
        more = counted(len(verification.suspects) - _SUSPECTS, "more module")
        yield f"{more} accused: verify.json lists all."
    if verification.inheriting:
        count = len(verification.inheriting)
        yield (
            f"{counted(count, 'tensor')} of the free run not green only {conjugated(count, 'inherit')} an "
            f"error, and {conjugated(count, 'are')} green given the reference's tensors "
            f"({some(verification.inheriting)})."
        )
    yield from context_lines(_without_listed(verification.localization))
    yield from _preflight_lines(verification)
    if verification.why_not_injected:
        is_replayed = verification.localization.by == "replay"
        how = "told apart by replay alone" if is_replayed else "not told apart"
        why = verification.why_not_injected.rstrip(".")
        yield f"Without injection: {why}. Own and inherited errors are {how}."
    if verification.control:
        yield _control_text(verification.control)
    yield order_text(verification.order)
    depth = depth_of(layers).text
    yield f"Free-running: {depth[0].lower()}{depth[1:]}"
    yield from _not_compared(verification.free)
    yield from verification.localization.notes
    yield from verification.notes


def _both_sides(suspect: Suspect, layers: Sequence[Layer]) -> Iterator[str]:
    """The shapes of what goes into a suspect and of what comes out, and which module it is in the target."""
    layer = layer_of(suspect.key, suspect.module, layers)
    if layer is None:
        return
    ours = f"{shape_texts(layer.inputs)} to {shape_texts([layer.outputs[0]])}"
    target = layer.target
    if target is None:
        yield f"{ours} in the reference; the target has none"
        return
    output = "several" if target.output is None else shape_texts([target.output])
    theirs = f"{shape_texts(target.inputs)} to {output}"
    sites = " + ".join(dict.fromkeys(Key.parse(key).site for key in target.keys))
    is_same_code = (target.class_name, target.place) == (layer.class_name, layer.place)
    place = "" if is_same_code else target.place
    code = " at ".join(filter(None, (target.class_name, place)))
    module = f"{sites} ({code})" if code else sites
    if is_same_code and (sites, theirs) == (suspect.module, ours):
        yield f"{ours} on both sides"
    else:
        yield f"{ours} in the reference; in the target {module}: {'the same' if theirs == ours else theirs}"


def _without_listed(localization: Localization) -> Localization:
    """A localization without changes of own errors at suspects, which have lines of their own."""
    listed = {suspect.key for suspect in localization.suspects[:_SUSPECTS]}
    changes = tuple(c for c in localization.changes if c.curve != "own" or c.key not in listed)
    return replace(localization, changes=changes)


def _preflight_lines(verification: Verification) -> Iterator[str]:
    """What can explain a divergence; if there is none, that it differs all the same."""
    explaining = verification.preflight.explaining
    text = "Before any tensor" if verification.exit_status else "Differs, though all that was compared agrees"
    for item in explaining[:FEW]:
        yield f"{text}: {item_text(item)}"
    if len(explaining) > FEW:
        yield f"{text}: {len(explaining) - FEW} more, see verify.json."


def weights_text(weights: WeightComparison) -> str:
    """What came of the weights, as sentences: how many are the same numbers, and under which names."""
    compared = weights.comparison.compared
    text = f"Weights: {compared} of {counted(weights.comparison.records, 'parameter')} compared"
    exchanged = f", though not by name: {weights.exchanged_text}" if weights.exchanged else ""
    if not weights.unlike:
        rounded = weights.comparison.counts.get("within-rounding", 0)
        but_for = f", {rounded} of them but for rounding, as to few bits" if rounded else ""
        return f"{text}, all of them the same numbers{but_for}{exchanged}." if compared else f"{text}."
    text += (
        f", {len(weights.unlike)} of them not the same numbers ({some([p.key for p in weights.unlike])}); "
        f"the worst is off by {error_of(weights.unlike[0]):.2e} of its norm."
    )
    explanations = weights.diagnosis.explanations if weights.diagnosis else ()
    if explanations:
        mistake = explanations[0].text
        text += f" {mistake[:1].upper()}{mistake[1:].rstrip('.')}."
    return f"{text} Not by name: {weights.exchanged_text}." if exchanged else text


def _weights_not_compared(weights: WeightComparison) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for key, reason in weights.not_compared.items():
        by_reason.setdefault(reason, []).append(key)
    for reason, keys in by_reason.items():
        yield f"Weights not compared: {counted(len(keys), 'parameter')} ({some(keys)}): {reason}."


def _verdict(verification: Verification) -> Iterator[str]:
    yield _count_text("Free-running", verification.free)
    for part in verification.free.mapping.tokens if verification.free.mapping else ():
        yield f"What was compared: {part}."
    if verification.injected is not None:
        yield _count_text("With the reference's inputs", verification.injected)
    if verification.exit_status == 0:
        yield "Nothing is wrong that these runs show."
    elif not verification.suspects:
        is_told = bool(verification.localization.open)  # its note says that no module is accused
        yield "The port is not verified." if is_told else "The port is not verified; no module is accused."
        first = verification.free.divergence
        if first is not None:
            text = f"What is not green first is {first.pair.key} ({first.pair.status})."
            is_told = any(item.kind == "inputs" for item in verification.preflight.explaining)
            yield text if is_told and first.is_run_input else f"{text} {first.explanation}"


def _count_text(what: str, comparison: Comparison) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in comparison.counts.items())
    verdict = "green" if comparison.is_green else "not green"
    records = counted(comparison.records, "record")
    return f"{what}: {verdict}; {comparison.compared} of {records} compared ({counts})."


def _control_text(control: Sequence[Mapping[str, Any]]) -> str:
    """How far taps change what the target computes, by a run without any."""
    unlike = [output for output in control if not output.get("identical")]
    if not unlike:
        return "The target gives the same bits without taps."
    outputs = ", ".join(map(_control_output_text, unlike[:FEW]))
    return f"Taps end the fusion of kernels: without them the target's own outputs differ, {outputs}."


def _control_output_text(output: Mapping[str, Any]) -> str:
    slot, largest = output.get("slot"), output.get("largest", 0.0)
    if not isinstance(output.get("max_abs"), float):
        return f"{slot} (not compared)"
    return f"{slot} by up to {output['max_abs']:.3g} of values up to {largest:.3g}"


def _not_compared(comparison: Comparison) -> Iterator[str]:
    absent = [pair for pair in comparison.pairs if _is_absent(pair)]
    for status in dict.fromkeys(pair.status for pair in absent):
        keys = [pair.key for pair in absent if pair.status == status]
        yield f"Not compared: {counted(len(keys), 'tensor')} of the reference {status} ({some(keys)})."
    more = [pair.key for pair in comparison.pairs if pair.status == "missing-in-reference"]
    if more:
        yield f"Only the target has {counted(len(more), 'tensor')} ({some(more)})."


def _is_absent(pair: Pair) -> bool:
    return pair.status in ABSENT or pair.status in ("unreadable", "unjudged", "shape-mismatch")
