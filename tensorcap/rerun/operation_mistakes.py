"""Mistakes of an operation of a compiled target: which other argument, or input, makes the target's value.

What the target was converted from says which arguments it has; without that, usual ones are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tensorcap.diagnosis import Hypothesis
from tensorcap.diagnosis.context import PairContext
from tensorcap.rerun.operation_replay import OperationReplays
from tensorcap.rerun.operation_values import OperationValues, part_of
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key
from tensorcap_formats.run_info import ExportedNode

_NOT_COMPUTED: Final = ("dtype", "layout", "device", "pin_memory", "memory_format")
_EPSILONS: Final = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.0)
_MOST_INPUTS: Final = 64  # nodes before an operation that are tried as its input
_MOST_OPERATIONS: Final = 16  # it, those without a value before it, and those whose values it takes
_LEVELS: Final = 127  # of int8, on either side of 0

_KINDS: Final[Mapping[str, tuple[str, str]]] = {  # kind and hint by the name of an argument
    "approximate": ("activation", "GELU by tanh on one side, by erf on the other."),
    "eps": ("norm-eps", "Another eps; it shows in rows of small values only."),
    "dim": ("axes-differ", "It runs over another axis."),
    "dims": ("axes-differ", "It runs over other axes, or puts them in another order."),
    "bias": ("bias-dropped", "The bias was dropped."),
    "weight": ("weight-missing", "The weight is missing."),
    "s": ("attention-mask", "What stands for masked scores is another number."),
    "value": ("attention-mask", "What stands for masked scores is another number."),
    "fill_value": ("attention-mask", "What stands for masked scores is another number."),
}


def propose_operation_mistakes(
    context: PairContext, replays: OperationReplays, values: OperationValues, name: str, at: int
) -> Iterator[Hypothesis]:
    """Propose other arguments of an operation and of those before it that have no value, and other inputs.

    Args:
        context: The pair: what the reference's operation makes, and the target's value.
        replays: Computes operations.
        values: The target's values.
        name: The node.
        at: Which of its outputs.
    """
    candidates = [name, *replays.between(name), *replays.nearest(name)]
    for one in candidates[:_MOST_OPERATIONS]:
        node = values.nodes[one]
        changes = list(_changes(node, values.converted(one)))
        for changed in changes:
            made = part_of(replays.compute(name, {one: changed}), at)
            ((argument, value),) = changed.items()
            kind, hint = _kind_of(node, argument)
            text = _text(node, argument, value)
            yield from _hypothesis(context, kind, text, made, hint, len(changes), values.places.get(one, ""))
    if replays.is_of_weights(name):
        yield from _other_scales(context, values.nodes[name])
    yield from _other_inputs(context, replays, values, name, at)


def _changes(node: ExportedNode, theirs: ExportedNode | None) -> Iterator[dict[str, Any]]:
    """Arguments by which the target's operation differs; where these are not known, usual ones."""
    if theirs is None:
        yield from _usual_changes(node, node.arguments)
        return
    known = {**dict.fromkeys(node.weights), **node.arguments}
    for argument, other in theirs.arguments.items():
        is_dropped = argument in node.weights and other is None
        if argument in node.inputs or (argument in node.weights and not is_dropped):
            continue
        if argument not in _NOT_COMPUTED and (is_dropped or known.get(argument) != other):
            yield {argument: _number(other)}
    computed = {
        name: value for name, value in node.arguments.items() if name in {**theirs.inputs, **theirs.weights}
    }
    yield from _usual_changes(node, computed)


def _usual_changes(node: ExportedNode, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if node.base == "gelu":
        yield {"approximate": "none" if arguments.get("approximate") == "tanh" else "tanh"}
    for name in ("eps", *(["other"] if node.base == "add" else [])):
        if isinstance(arguments.get(name), float):
            yield from ({name: eps} for eps in _EPSILONS if eps != arguments[name])
    if isinstance(arguments.get("dim"), int) and node.shapes:
        axes = range(len(node.shapes[0]))
        yield from ({"dim": dim} for dim in axes if dim != arguments["dim"] % max(len(axes), 1))
    if "bias" in node.weights and arguments is node.arguments:
        yield {"bias": None}


def _kind_of(node: ExportedNode, argument: str) -> tuple[str, str]:
    if argument in _KINDS:
        return _KINDS[argument]
    if argument == "other" and node.base == "add":
        return _KINDS["eps"]
    if argument == "other" and node.base in ("mul", "div"):
        return "factor", "Another factor."
    return "setting-differs", f"The argument {argument} is another one."


def _text(node: ExportedNode, argument: str, value: Any) -> str:
    if value is None:
        how = f"without {node.weights.get(argument, argument)}"
    else:
        usual = node.arguments.get(argument, "the default")
        how = f"with {argument} {_shown(value)} in the place of {_shown(usual)}"
    return f"the target is what {node.op} of {node.module or 'the model'}:{node.node} makes {how}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _other_inputs(
    context: PairContext, replays: OperationReplays, values: OperationValues, name: str, at: int
) -> Iterator[Hypothesis]:
    """Propose that the operation takes what another one before it makes, of the same shape."""
    node = values.nodes[name]
    if len(node.inputs) != 1:
        return
    (source,) = node.inputs.values()
    own = values.nodes.get(source)
    if own is None:
        return
    order = list(values.nodes)
    before = [values.nodes[one] for one in order[: order.index(name)]][-_MOST_INPUTS:]
    others = [
        one
        for one in before
        if one.node != source and one.shapes == own.shapes and not replays.is_wrong(one.node)
    ]
    for other in others:
        made = part_of(replays.compute_with_input(name, source, other.node), at)
        text = (
            f"the target is what {node.op} of {node.module or 'the model'}:{name} makes of {other.node} in "
            f"the place of {source}"
        )
        is_half = node.base == "neg"
        hint = "In a rotation of halves: the sign is on the other half." if is_half else "Another input."
        kind = "rotary-layout" if is_half else "operations-order"
        yield from _hypothesis(context, kind, text, made, hint, len(others))


def _other_scales(context: PairContext, node: ExportedNode) -> Iterator[Hypothesis]:
    """Propose that a weight was rounded to int8 with a scale for each slice, and given back with another."""
    weight = context.reference_values.astype(np.float64)
    target = context.target_values.astype(np.float64)
    if weight.ndim < 2 or weight.shape != target.shape:
        return
    for axis in range(weight.ndim):
        others = tuple(one for one in range(weight.ndim) if one != axis)
        step = np.abs(weight).max(axis=others, keepdims=True) / _LEVELS
        if not step.all():
            continue
        rounded = np.rint(weight / step)
        scale = (rounded * target).sum(axis=others, keepdims=True) / (rounded**2).sum(
            axis=others, keepdims=True
        )
        text = f"{node.module}: the weight is in int8, and its scales along axis {axis} are others"
        hint = "The scale of the whole tensor in the place of that of each row, or scales in another order."
        count = weight.shape[axis]
        yield from _hypothesis(
            context, "quantisation-scales", text, rounded * scale, hint, 1, parameters=count
        )


def _hypothesis(
    context: PairContext,
    kind: str,
    text: str,
    made: Array | None,
    hint: str,
    alternatives: int,
    place: str = "",
    parameters: int = 0,
) -> Iterator[Hypothesis]:
    """State that the target has these values; a reference that is not finite explains none of them."""
    if made is None or made.shape != context.target_values.shape:
        return
    observed = context.target_values.astype(np.float64)
    predicted = made.astype(np.float64)
    if not np.array_equal(np.isfinite(observed), np.isfinite(predicted)):
        return
    is_finite = np.isfinite(observed)
    has_baseline = bool(np.isfinite(context.reference_values).all()) and context.is_same_shape
    yield Hypothesis(
        kind,
        text,
        np.where(is_finite, observed, 0.0),
        np.where(is_finite, predicted, 0.0),
        context.r if has_baseline else None,
        parameters=parameters,
        log_alternatives=math.log(max(alternatives, 1)),
        hint=hint,
        facts={"site": Key.parse(f"{place}/output").site} if place else {},
    )


def _number(value: Any) -> Any:
    """An argument of an archive as its operation takes it: what is not finite is stored as a text."""
    return float(value) if value in ("inf", "-inf", "nan") else value
