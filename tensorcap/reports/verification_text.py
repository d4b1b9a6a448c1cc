"""The summary of a verification, as sentences: `summary.txt`, and what `tcap verify` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tensorcap.alignment import Order
from tensorcap.comparison import ABSENT, Comparison, Pair, error_of
from tensorcap.comparison.preflight import item_text
from tensorcap.reports.layer_report import Layer, depth_of
from tensorcap.reports.suspects import context_lines, suspect_lines
from tensorcap.wording import FEW, counted, some

if TYPE_CHECKING:
    from tensorcap.localization import Verification, WeightComparison


_SUSPECTS: Final = 5  # that are described
_INDENT: Final = "   "


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


def summarize_verification(verification: Verification, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Say what is wrong, what only inherits it, and what could not be compared.

    Args:
        verification: All but its summary.
        layers: Those of the free runs.

    Returns:
        A sentence or two a line.
    """
    return tuple(_lines(verification, layers))


def _lines(verification: Verification, layers: Sequence[Layer]) -> Iterator[str]:
    if verification.weights is not None:
        yield _weights_text(verification.weights)
    yield from _verdict(verification)
    for number, suspect in enumerate(verification.suspects[:_SUSPECTS], 1):
        heading, *details = suspect_lines(number, suspect)
        yield f"{heading} is wrong"
        yield from (f"{_INDENT}{detail}" for detail in details)
    if len(verification.suspects) > _SUSPECTS:
        count = counted(len(verification.suspects) - _SUSPECTS, "more module")
        yield f"{count} accused: verify.json lists all."
    if verification.inheriting:
        yield (
            f"{counted(len(verification.inheriting), 'tensor')} of the free run not green only inherit an "
            f"error: given the reference's tensors, they are green ({some(verification.inheriting)})."
        )
    yield from context_lines(verification.localization)
    for item in verification.preflight.explaining[:FEW]:
        yield f"Before any tensor: {item_text(item)}"
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


def _weights_text(weights: WeightComparison) -> str:
    compared = weights.comparison.compared
    text = f"Weights: {compared} of {counted(weights.comparison.records, 'parameter')} compared"
    if not weights.unlike:
        return f"{text}, all of them the same numbers." if compared else f"{text}."
    text += (
        f", {len(weights.unlike)} of them not the same numbers ({some([p.key for p in weights.unlike])}); "
        f"the worst is off by {error_of(weights.unlike[0]):.2e} of its norm."
    )
    explanations = weights.diagnosis.explanations if weights.diagnosis else ()
    if not explanations:
        return text
    mistake = explanations[0].text
    return f"{text} {mistake[:1].upper()}{mistake[1:].rstrip('.')}."


def _verdict(verification: Verification) -> Iterator[str]:
    yield _count_text("Free-running", verification.free)
    if verification.injected is not None:
        yield _count_text("With the reference's inputs", verification.injected)
    if verification.exit_status == 0:
        yield "Nothing is wrong that these runs show."
    elif not verification.suspects:
        yield "The port is not verified, and no module is accused."
        first = verification.free.divergence
        if first is not None:
            yield f"What is not green first is {first.pair.key} ({first.pair.status}). {first.explanation}"


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
