"""What a verification found, as sentences.

What a localisation found besides suspects, as sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tensorcap.alignment.order import Order
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.pair import ABSENT, Pair
from tensorcap.comparison.preflight.item import item_text
from tensorcap.localization.curves import ChangePoint
from tensorcap.localization.nonfinite import NonfiniteOrigin
from tensorcap.localization.suspect import Localization, Suspect
from tensorcap.reports.layer_report import Layer, depth_of
from tensorcap.reports.ranking import error_of
from tensorcap.wording import FEW, counted, some

if TYPE_CHECKING:
    from tensorcap.localization.verification import Verification
    from tensorcap.localization.weights import WeightComparison


_SUSPECTS: Final = 5


def order_text(order: Order | None) -> str:
    """What is to be said of the execution order."""
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


def summary_of(found: Verification, layers: Sequence[Layer]) -> tuple[str, ...]:
    """What is wrong, what only inherits it, and what could not be compared."""
    return tuple(_sentences(found, layers))


def _sentences(found: Verification, layers: Sequence[Layer]) -> Iterator[str]:
    if found.weights is not None:
        yield _weights_text(found.weights)
    yield from _verdict(found)
    for number, suspect in enumerate(found.suspects[:_SUSPECTS], 1):
        yield _accusation(number, suspect)
    if len(found.suspects) > _SUSPECTS:
        yield f"{counted(len(found.suspects) - _SUSPECTS, 'more module')} accused: verify.json lists all."
    if found.inheriting:
        yield (
            f"{counted(len(found.inheriting), 'tensor')} of the free run not green only inherit an error: "
            f"given the reference's tensors, they are green ({some(found.inheriting)})."
        )
    yield from around_texts(found.localization)
    for item in found.preflight.explaining[:FEW]:
        yield f"Before any tensor: {item_text(item)}"
    if found.why_not_injected:
        how = "told apart by replay alone" if found.localization.by == "replay" else "not told apart"
        yield f"Without injection: {found.why_not_injected.rstrip('.')}. Own and inherited errors are {how}."
    if found.control:
        yield _control_text(found.control)
    yield order_text(found.order)
    depth = depth_of(layers).text
    yield f"Free-running: {depth[0].lower()}{depth[1:]}"
    yield from _not_compared(found.free)
    yield from found.localization.notes
    yield from found.notes


def _weights_text(found: WeightComparison) -> str:
    compared = found.comparison.compared
    said = f"Weights: {compared} of {counted(found.comparison.records, 'parameter')} compared"
    if not found.unlike:
        return f"{said}, all of them the same numbers." if compared else f"{said}."
    worst = found.unlike[0]
    text = (
        f"{said}, {len(found.unlike)} of them not the same numbers ({some([p.key for p in found.unlike])}); "
        f"the worst is off by {error_of(worst):.2e} of its norm."
    )
    kind = found.diagnosis.explanations if found.diagnosis else ()
    return f"{text} {_ended(kind[0].text)}" if kind else text


def _verdict(found: Verification) -> Iterator[str]:
    yield _count_text("Free-running", found.free)
    if found.injected is not None:
        yield _count_text("With the reference's inputs", found.injected)
    if found.exit_status == 0:
        yield "Nothing is wrong that these runs show."
    elif not found.suspects:
        yield "The port is not verified, and no module is accused."
        first = found.free.divergence
        if first is not None:
            yield f"What is not green first is {first.pair.key} ({first.pair.status}). {first.explanation}"


def _count_text(what: str, comparison: Comparison) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in comparison.counts.items())
    verdict = "green" if comparison.is_green else "not green"
    records = counted(comparison.records, "record")
    return f"{what}: {verdict}; {comparison.compared} of {records} compared ({counts})."


def _control_text(control: Sequence[Mapping[str, Any]]) -> str:
    """What a run without taps says of the taps."""
    if all(one.get("identical") for one in control):
        return "The target gives the same bits without taps."
    unlike = [one for one in control if not one.get("identical")]
    told = ", ".join(
        f"{one.get('slot')} by up to {one['max_abs']:.3g} of values up to {one.get('largest', 0.0):.3g}"
        if isinstance(one.get("max_abs"), float)
        else f"{one.get('slot')} (not compared)"
        for one in unlike[:FEW]
    )
    return f"Taps end the fusion of kernels: without them the target's own outputs differ, {told}."


def _accusation(number: int, suspect: Suspect) -> str:
    name = f"{suspect.module} ({suspect.class_name})" if suspect.class_name else suspect.module
    said = f"{number}. {name} is wrong: {_error(suspect)} at {suspect.key}. {_ended(suspect.reason)}"
    best, examined = suspect.diagnosis, suspect.examined
    if best is not None:
        return f"{said} {_ended(best.text)}{' ' + _ended(best.hint) if best.hint else ''}"
    if examined is not None and examined.status == "unexplained":
        said += " No hypothesis explains its values."
    return f"{said} Root cause: {suspect.cause}." if suspect.cause else said


def _error(suspect: Suspect) -> str:
    if suspect.own is not None:
        return f"its own error is {suspect.own:.2e}, relative"
    if suspect.is_own:
        return f"its own error is {suspect.status}"
    return (
        f"the error is {suspect.status}"
        if suspect.total is None
        else f"the error is {suspect.total:.2e}, relative"
    )


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


def _ended(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def around_texts(found: Localization) -> Iterator[str]:
    """What stands around the suspects: composites, where values stop being finite, where errors begin."""
    if found.explained:
        modules = [f"{module} by {child}" for module, child in found.explained]
        yield f"Explained by what is within: {some(modules)}."
    if found.nonfinite is not None:
        yield _nonfinite_text(found.nonfinite)
    yield from _change_texts(found.changes)


def _nonfinite_text(found: NonfiniteOrigin) -> str:
    """Where values stop being finite, and what went in, as a sentence."""
    what = found.tensor
    bad = [one.key for one in found.operands if not one.is_finite]
    largest = max((one.largest or 0.0 for one in found.operands), default=0.0)
    if not found.operands:
        given = "what went into it was not captured"
    elif bad:
        given = f"of {counted(len(found.operands), 'operand')} not finite: {some(bad)}"
    else:
        operands = counted(len(found.operands), "operand")
        given = f"its {operands} all finite, up to {largest:.3g}: {some([one.key for one in found.operands])}"
    return (
        f"Values stop being finite at {found.key}, made by {found.module}: of {what.elements} elements "
        f"{what.nan} are NaN and {what.inf} infinite; {given}."
    )


def _change_texts(changes: Sequence[ChangePoint]) -> Iterator[str]:
    """Where each curve changes, the earliest step first, a sentence for each of the first few."""
    for curve in dict.fromkeys(change.curve for change in changes):
        mine = [change for change in changes if change.curve == curve]
        told = "; ".join(map(_change_text, mine[:FEW]))
        more = f"; and {len(mine) - FEW} more" if len(mine) > FEW else ""
        yield f"{curve.capitalize()} error in execution order: {told}{more}."


def _change_text(change: ChangePoint) -> str:
    before = f" on top of {change.before:.2g}" if change.before else ""
    results = counted(change.length, "result")
    is_all = change.curve == "total" and change.kind == "step"
    how = f"{results} wrong from there on" if is_all else f"{results} long"
    return f"a {change.kind} at {change.key} to {change.value:.2g}{before}, {how}"
