"""Try mutations of the call that made the reference: does one make the target's values?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tensorcap.adapters import CallMutation, Replaced, Scaled
from tensorcap.diagnosis.code_mutations import (
    classify_number,
    exchange_operands,
    list_numbers,
    move_operations,
    move_operations_ahead,
    mutate_operations,
    quantise_tensors,
)
from tensorcap.diagnosis.constants import hint_for_factor, name_factor
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.golden_section import RATIO, minimize_over_logarithm
from tensorcap.diagnosis.hypothesis import LESSENED, Hypothesis
from tensorcap.diagnosis.layer_mutations import take_layers, take_tables
from tensorcap.diagnosis.mutations import (
    SMALLEST_FITTED,
    Mutation,
    classify_setting,
    find_expert_tensors,
    list_late_mutations,
    list_mutations,
    order_experts,
    round_every_step,
    round_tensors,
)
from tensorcap.diagnosis.repeated_call import RepeatedCall
from tensorcap.diagnosis.values import Values, evenly_spaced, listed, number_text

_LARGEST: Final = 1 << 26  # elements of a tensor that is put in another order
_STEPS: Final = 32  # of the golden section for a setting: 1e-6 of its logarithm
_FIRST_STEPS: Final = 8  # of them, after which one that leaves too much is given up
_NEARLY: Final = 0.5  # of the error that it may leave then
_FACTORS: Final = (*(2.0**power for power in range(-8, 9) if power), 2**-0.5, 2**0.5)
_NAME_TOLERANCE: Final = 1e-3  # by which a fitted factor is named
_ROWS_PER_EXPERT: Final = 8
_EXACT: Final = 1e-6  # what the order of operations in float32 may leave
_UNITS: Final = (  # numbers that arguments are usually scaled by: thousands, bytes, angles, signs
    *(1e-3, 1e3, 1 / 255, 255.0, 1 / 256, 256.0, 2 / 255, 127.5, 1 / 32768, 32768.0),
    *(2 * math.pi, 1 / (2 * math.pi), math.pi, 1 / math.pi, -1.0, 0.01, 100.0, 0.1, 10.0),
)
_EPSILONS: Final = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.0)
_FAINT: Final = 0.1  # share of the largest weight that an expert needs to count


def propose_mutations(context: PairContext) -> Iterator[Hypothesis]:
    """Propose mutations of experts, settings, arguments, results and tensors, each by itself.

    1. The call has to make the reference's value again; otherwise nothing is tried.
    2. What another layer has, mutations with usual values, and other tables of positions.
    3. For a narrow target, tensors rounded to its dtype.
    4. Numbers among the settings, fitted.
    """
    call = context.repeated_call
    if call is None:
        return
    mutations = [
        *take_layers(context, call.rerun),
        *list_mutations(context, call, largest=_LARGEST),
        *take_tables(context, call.rerun),
    ]
    yield from _try_mutations(context, call, mutations)
    if context.is_narrow:
        yield from _try_mutations(context, call, round_tensors(call.used_tensors, context.target.dtype.name))
    numbers = [
        (name, value)
        for name, value in call.rerun.settings.items()
        if isinstance(value, float) and abs(value) >= SMALLEST_FITTED
    ]
    for name, value in call.affordable(numbers, _STEPS):
        yield from _fit_setting(context, call, name, value)


def propose_code_mutations(context: PairContext) -> Iterator[Hypothesis]:
    """Propose low precision of every step, quantised weights, and other operations.

    Experts are in any order, have weighed inputs, or take few tokens. All these are many, and often do what a
    more specific one of `propose_mutations` does.
    """
    call = context.repeated_call
    if call is None:
        return
    if context.is_narrow:
        yield from _try_mutations(context, call, round_every_step(call.rerun, context.target.dtype.name))
    yield from _order_experts(context, call)
    yield from _weigh_inputs_of_experts(context, call)
    yield from _limit_capacity_of_experts(context, call)
    shapes = {name: shape for name, shape in call.used_tensors.items() if math.prod(shape) <= _LARGEST}
    yield from _try_mutations(context, call, [*quantise_tensors(shapes)], stops_if_exact=True)
    yield from _try_mutations(context, call, mutate_operations(call.operations), stops_if_exact=True)


def propose_other_tensors(context: PairContext) -> Iterator[Hypothesis]:
    """Propose tensors of other modules, other parts of tensors, and further orders of them."""
    call = context.repeated_call
    if call is not None:
        late = list_late_mutations(context, call, largest=_LARGEST)
        yield from _try_mutations(context, call, late, stops_if_exact=True)


def propose_numbers_in_code(context: PairContext) -> Iterator[Hypothesis]:
    """Propose other numbers in the code of the module, usual and fitted ones, and scaled arguments."""
    call = context.repeated_call
    if call is None:
        return
    for key, name, number in call.affordable([*list_numbers(call.operations)], _STEPS):
        yield from _try_numbers(context, call, key, name, number)
    scaled = []
    for name, argument in call.rerun.arguments.items():
        is_no_index = not call.rerun.tensors and (argument.highest or 0) >= context.experts
        if argument.kind == "float" or (argument.kind == "int" and is_no_index):
            scaled.append((name, argument.kind == "float"))
    for name, is_fitted in call.affordable(scaled, _STEPS):
        yield from _scale_argument(context, call, name, is_fitted=is_fitted)


def propose_operations_in_another_order(context: PairContext) -> Iterator[Hypothesis]:
    """Propose operations done behind later ones, and other values of the call in the place of operands."""
    call = context.repeated_call
    if call is None:
        return
    for list_all in (move_operations, move_operations_ahead, exchange_operands):
        yield from _try_mutations(context, call, [*list_all(call.operations)], stops_if_exact=True)


def _propose(
    context: PairContext, call: RepeatedCall, kind: str, text: str, values: Values, **options: Any
) -> Hypothesis:
    """State that the target is what the module makes with something changed.

    What the call makes is rounded to the target's dtype; what is not finite has to lie in the same places.

    Args:
        context: The pair.
        call: The call.
        kind: As in `Hypothesis`.
        text: What is changed, to stand behind "the target is what MODULE makes".
        values: What the call makes with it.
        options: As for `PairContext.propose`.
    """
    baseline = call.predict(call.values) if context.is_same_shape else None
    text = f"the target is what {call.rerun.class_name} makes {text}"
    if not np.isfinite(context.target_values).all():
        text += ", with NaN and infinities in the same places"
    proposed = context.propose(kind, text, call.predict(values), baseline=baseline, **options)
    return replace(proposed, observed=call.observed)


def _try_mutations(
    context: PairContext,
    call: RepeatedCall,
    mutations: Sequence[Mutation],
    *,
    stops_if_exact: bool = False,
) -> Iterator[Hypothesis]:
    """Make the call with each mutation; of those of a kind that make the same the first is proposed.

    Where they are many, those behind one that leaves no more than a rounding are not tried, but for others of
    its place. The earlier ones are the likelier ones, by Zipf's law: the n-th of N counts as one of n log N.
    """
    exact: Mutation | None = None
    mutations = [mutation for mutation in mutations if call.has_effect(mutation.call)]
    spread = math.log1p(math.log(max(len(mutations), 1)))
    for number, mutation in enumerate(call.affordable(mutations), 1):
        if exact is not None and mutation.facts.get("place") != exact.facts.get("place"):
            return
        log_alternatives = math.log(number) + spread
        values = call.run(mutation.call)
        if values is not None and call.is_first(mutation.kind, values):
            yield _propose(
                context,
                call,
                mutation.kind,
                mutation.text,
                values,
                hint=mutation.hint,
                facts={**_find_child(mutation.call), **mutation.facts},
                log_alternatives=log_alternatives,
            )
            if stops_if_exact and call.distance(values) <= max(context.rounding, _EXACT):
                exact = exact or mutation


def _find_child(mutation: CallMutation) -> dict[str, str]:
    """Name the module within whose tensors or settings alone are changed; the target lacks a result of it."""
    children = {name.rpartition(".")[0] for name in mutation.tensors}
    children |= {name.rpartition(".")[0].removesuffix("config").rstrip(".") for name in mutation.settings}
    return {"child": children.pop()} if len(children) == 1 and "" not in children else {}


def _fit_setting(context: PairContext, call: RepeatedCall, name: str, value: float) -> Iterator[Hypothesis]:
    """Fit another number for a setting."""

    def run(number: float) -> Values | None:
        return call.run(CallMutation(settings={name: number}))

    kind, hint = classify_setting(name, call.rerun.class_name)
    facts = {"setting": name, **_find_child(CallMutation(settings={name: value}))}
    yield from _fit_number(context, call, value, run, kind, f"its setting {name}", hint, facts)


def _try_numbers(
    context: PairContext, call: RepeatedCall, key: str, name: str, value: float
) -> Iterator[Hypothesis]:
    """Propose usual numbers in the place of one of an operation, and a fitted one if none makes it."""

    def run(number: float) -> Values | None:
        return call.run(CallMutation(numbers={(key, name): number}))

    operation = call.operations[key]
    kind, hint = classify_number(operation, name, value)
    facts = {"operation": operation.name, "place": operation.place}
    facts |= {"child": operation.child} if operation.child else {}
    what = f"a number of {operation.name} in {operation.place}"
    others = _usual_numbers(value, kind)
    before = call.distance(call.values) if context.is_same_shape else 1.0
    least = before
    for other in others:
        values = run(other)
        if values is None:
            continue
        least = min(least, call.distance(values))
        yield _propose(
            context,
            call,
            kind,
            f"with {number_text(other, value)} in the place of {value:g} as {what}",
            values,
            hint=hint,
            facts={**facts, "reference": value, "target": other},
            log_alternatives=math.log(len(others) * len(call.operations)),
        )
    if isinstance(value, float) and value and least > LESSENED**2 * before:
        yield from _fit_number(context, call, value, run, kind, what, hint, facts)


def _usual_numbers(value: float, kind: str) -> list[float]:
    """Usual numbers in the place of one: next ones of a whole number; of others 0, 1, roots and inverses."""
    others: list[float]
    if isinstance(value, int):
        others = [value - 1, value + 1, value - 2, value + 2, 0, 2 * value]
    elif kind == "norm-eps":
        others = [*_EPSILONS]
    else:
        others = [0.0, 1.0, -value, 1.0 - value, value**2, math.sqrt(abs(value))]
        others += [1 / value] if value else []
    return [other for other in dict.fromkeys(others) if other != value and math.isfinite(other)]


def _scale_argument(
    context: PairContext, call: RepeatedCall, name: str, *, is_fitted: bool
) -> Iterator[Hypothesis]:
    """Multiply an argument by usual numbers, and by a fitted one."""

    def run(number: float) -> Values | None:
        return call.run(CallMutation(arguments={name: Scaled(number)}))

    short = name.removeprefix("input.")
    facts = {"argument": short}
    hint = "An argument has another unit, or is scaled on one side only."
    for factor in _UNITS:
        values = run(factor)
        if values is not None:
            text = f"with its {short} times {factor:g}"
            log_alternatives = math.log(len(_UNITS))
            yield _propose(
                context,
                call,
                "input-factor",
                text,
                values,
                hint=hint,
                facts={**facts, "factor": factor},
                log_alternatives=log_alternatives,
            )
    if is_fitted:
        what = f"the factor of its {short}"
        yield from _fit_number(context, call, 1.0, run, "input-factor", what, hint, facts)


def _fit_number(
    context: PairContext,
    call: RepeatedCall,
    value: float,
    run: Callable[[float], Values | None],
    kind: str,
    what: str,
    hint: str,
    facts: Mapping[str, Any],
) -> Iterator[Hypothesis]:
    """Fit another number in the place of one.

    1. The best of some powers of two times the number; it has to leave less than the number itself.
    2. Golden section over the logarithm between half and twice that, to some hundredths; it has to leave at
       most half of what the number itself does, of which a right one so near leaves little.
    3. Golden section between those that were next to it.
    4. It is proposed if it leaves at most a tenth of the squared error.
    """
    before = call.distance(call.values) if context.is_same_shape else 1.0

    def error(factor: float) -> float:
        values = run(value * factor)
        return math.inf if values is None else call.distance(values)

    errors = {factor: error(factor) for factor in _FACTORS}
    best = min(errors, key=lambda factor: errors[factor])
    if errors[best] >= before:
        return
    near = minimize_over_logarithm(error, math.log(best / 2), math.log(best * 2), _FIRST_STEPS)
    if min(error(near), errors[best]) > _NEARLY * before:
        return
    width = math.log(4) * RATIO**_FIRST_STEPS
    centre = math.log(near)
    fitted = minimize_over_logarithm(error, centre - width, centre + width, _STEPS - _FIRST_STEPS)
    factor = min((fitted, best), key=error)
    values = run(value * factor)
    if values is None or call.distance(values) > LESSENED * before:
        return
    names = name_factor(factor, context, _NAME_TOLERANCE)
    yield _propose(
        context,
        call,
        kind,
        f"with {number_text(value * factor, value)} in the place of {value:g} for {what}"
        + (f", which is {names[0]} times that" if names else ""),
        values,
        hint=hint or hint_for_factor(names),
        facts={**facts, "reference": value, "target": value * factor, "equals": list(names)},
        log_alternatives=math.log(_STEPS + len(_FACTORS)),
        parameters=1,
    )


def _order_experts(context: PairContext, call: RepeatedCall) -> Iterator[Hypothesis]:
    """Find the order of experts that makes the target.

    1. The call is made once for each expert, with that one in the place of all: what it makes of every row.
    2. By least squares each row of the reference and of the target is a sum of these: its weights.
    3. The experts whose weights on the two sides have the largest cosine correspond; that is the order. Sums
       alone would favour those that many rows choose.
    4. The call is made with it.
    """
    names = find_expert_tensors(context, call.rerun.tensors, call.rerun.class_name)
    r, t = context.r, context.t
    count = context.experts if names else 0
    if not 1 < count < r.shape[-1] or r.shape != t.shape or not [*call.affordable([names], count)]:
        return
    width = r.shape[-1]
    rows = r.size // width
    sampled = evenly_spaced(rows, _ROWS_PER_EXPERT * count)
    by_expert = []
    for expert in range(count):
        values = call.make(order_experts(names, np.full(count, expert)))
        if values is None or values.shape != r.shape or not np.isfinite(values).all():
            return
        by_expert.append(values.reshape(rows, width)[sampled])
    inverse = np.linalg.pinv(np.stack(by_expert, axis=-1))
    ours, theirs = ((inverse @ side.reshape(rows, width, 1)[sampled])[..., 0] for side in (r, t))
    ours, theirs = (_drop_faint(side) for side in (ours, theirs))
    ours, theirs = (side / np.maximum(np.linalg.norm(side, axis=0), 1e-300) for side in (ours, theirs))
    shares = theirs.T @ ours
    order = np.where(shares.any(axis=0), shares.argmax(axis=0), np.arange(count))
    if np.array_equal(order, np.arange(count)):
        return
    ordered = call.run(order_experts(names, order))
    if ordered is not None:
        yield _propose(
            context,
            call,
            "expert-order",
            f"with its experts in the order {listed(order, 16)}",
            ordered,
            hint="Experts are in another order.",
            facts={"parameters": list(names), "order": order.tolist()},
            log_alternatives=count * math.log(count),
        )


def _weigh_inputs_of_experts(context: PairContext, call: RepeatedCall) -> Iterator[Hypothesis]:
    """Propose that weights of experts multiply what these are given, and not what they return.

    The module is given tokens, the experts that each chose, and the weights of these. The call is made once
    for each choice, with tokens times its weight and a weight of 1 for it alone; the results are summed.
    """
    given = _find_routing(context, call)
    if given is None or not [*call.affordable([given], given.weights[1].shape[1])]:
        return
    (tokens, x), (weights, w) = given.tokens, given.weights
    total = np.zeros_like(call.values)
    for choice in range(w.shape[1]):
        alone = np.zeros_like(w)
        alone[:, choice] = 1.0
        edits = {tokens: Replaced(x * w[:, choice : choice + 1]), weights: Replaced(alone)}
        result = call.run(CallMutation(arguments=edits, makes_calls_within=True))
        if result is None:
            return
        total += result
    yield context.propose(
        "router-inputs",
        f"the target is what {call.rerun.class_name} makes if weights of experts multiply their inputs",
        total,
        hint="Weights of experts are applied before the experts on one side, and behind them on the other.",
        facts={"weights": weights},
    )


def _limit_capacity_of_experts(context: PairContext, call: RepeatedCall) -> Iterator[Hypothesis]:
    """Propose that each expert takes a number of tokens, the first or the last ones, and drops the others.

    1. Of each choice of a token its place among those of its expert is counted, by token or by choice first.
    2. A capacity is tried if the rows that lose a choice by it are those that err.
    """
    given = _find_routing(context, call)
    r, t = context.r, context.t
    if given is None or r.shape != t.shape or r.shape != given.tokens[1].shape:
        return
    (weights, w), chosen = given.weights, given.chosen[1].astype(int)
    sizes = np.linalg.norm(t - r, axis=-1)
    errs = sizes > context.tolerance() * max(float(np.linalg.norm(r, axis=-1).max()), 1e-30)
    if not errs.any() or errs.all():
        return
    for order, where in itertools.product(("token", "choice"), ("first", "last")):
        flat = chosen.reshape(-1) if order == "token" else chosen.T.reshape(-1)
        places = _count_places(flat if where == "first" else flat[::-1])
        places = places if where == "first" else places[::-1]
        place = places.reshape(chosen.shape) if order == "token" else places.reshape(chosen.T.shape).T
        for capacity in range(1, int(place.max())):
            is_kept = place <= capacity
            if not np.array_equal((~is_kept & (w != 0)).any(axis=1), errs):
                continue
            values = call.run(CallMutation(arguments={weights: Replaced(w * is_kept)}))
            if values is not None:
                yield _propose(
                    context,
                    call,
                    "expert-capacity",
                    f"if each expert takes the {where} {capacity} choices, by {order}, and drops the others",
                    values,
                    hint="Experts have a capacity on one side only; what is beyond it is dropped.",
                    facts={"capacity": capacity, "kept": where, "order": order},
                    log_alternatives=math.log(4 * place.max()),
                )


def _count_places(chosen: Values) -> Values:
    """Count for each entry how many up to it, with itself, chose the same."""
    places = np.zeros(len(chosen), int)
    for expert in np.unique(chosen):
        at = np.flatnonzero(chosen == expert)
        places[at] = np.arange(1, len(at) + 1)
    return places


@dataclass(frozen=True, slots=True)
class _Routing:
    """What a module of experts is given: slot and values of each.

    Attributes:
        tokens: `[tokens, channels]`.
        weights: `[tokens, choices]`, of the experts that each token chose.
        chosen: The same shape, their numbers.
    """

    tokens: tuple[str, Values]
    weights: tuple[str, Values]
    chosen: tuple[str, Values]


def _find_routing(context: PairContext, call: RepeatedCall) -> _Routing | None:
    """Find what a module of experts is given, by shapes and kinds; None if it is given anything else."""
    r = context.r
    values = {slot: theirs for slot, _, theirs in context.inputs if theirs.ndim}
    given = {slot: x for slot, x in values.items() if slot in call.rerun.arguments and x.ndim == 2}
    tokens = [slot for slot, x in given.items() if x.size == r.size and x.shape[-1] == r.shape[-1]]
    kinds = {slot: call.rerun.arguments[slot].kind for slot in given}
    weights = [slot for slot in given if slot not in tokens and kinds[slot] == "float"]
    chosen = [slot for slot in given if slot not in tokens and kinds[slot] != "float"]
    if [len(tokens), len(weights), len(chosen)] != [1, 1, 1]:
        return None
    routing = _Routing(*((slot, given[slot]) for slot in (tokens[0], weights[0], chosen[0])))
    (_, x), (_, w), (_, index) = routing.tokens, routing.weights, routing.chosen
    return routing if w.shape == index.shape and len(w) == len(x) else None


def _drop_faint(weights: Values) -> Values:
    """The size of the weights of each row; 0 for those that are next to nothing."""
    size = np.abs(weights)
    return np.where(size >= _FAINT * size.max(axis=1, keepdims=True), size, 0.0)
