"""Propose activation functions: which of them makes the reference and which the target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.hypothesis import LESSENED, Hypothesis, inherited_error
from tensorcap.diagnosis.values import Values, evenly_spaced, relative_error
from tensorcap_formats.float_formats import rounded

_SAMPLE: Final = 1 << 14  # elements by which a gated product is recognised
_PRODUCT_ROUNDINGS: Final = 8.0  # that a gated product may leave of the reference
_FACTORS: Final = 12  # values beside the pair that may be factors of a gated product
_CAP: Final = 700.0  # exp of more is beyond float64


def sigmoid(x: Values) -> Values:
    """The logistic function."""
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -_CAP, _CAP))))


def _gelu(x: Values) -> Values:
    flat = (x / math.sqrt(2)).reshape(-1).tolist()
    return np.asarray(0.5 * x * (1 + np.fromiter(map(math.erf, flat), np.float64, x.size).reshape(x.shape)))


def _gelu_tanh(x: Values) -> Values:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


ACTIVATIONS: Final[Mapping[str, Callable[[Values], Values]]] = {
    "identity": lambda x: x,
    "gelu erf": _gelu,
    "gelu tanh": _gelu_tanh,
    "quick gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0.0),
    "squared relu": lambda x: np.maximum(x, 0.0) ** 2,
    "leaky relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "hard swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0.0)),
}
_LOG_ACTIVATIONS: Final = math.log(len(ACTIVATIONS))
_GELU_HINT: Final = (
    "GELU by tanh on one side and by erf on the other: frameworks differ in what `gelu` means."
)
_QUICK_GELU_HINT: Final = "The quick GELU, x * sigmoid(1.702 x), on one side."
_USUAL_HINTS: Final = {
    frozenset(("gelu erf", "gelu tanh")): _GELU_HINT,
    frozenset(("gelu erf", "quick gelu")): _QUICK_GELU_HINT,
    frozenset(("gelu tanh", "quick gelu")): _QUICK_GELU_HINT,
}


def propose_activations(context: PairContext) -> Iterator[Hypothesis]:
    """Propose functions of the values themselves, of the module's input, and of a gated product."""
    if not context.is_same_shape:
        return
    yield from _propose_missing_or_added(context)
    for slot, ours, theirs in context.inputs:
        if ours.shape == context.r.shape:
            yield from _propose_other_function(context, slot, ours, theirs)
    yield from _propose_gated(context)


def _propose_missing_or_added(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that one side is a function of the other: an activation too many, or too few."""
    r, t = context.r, context.t
    if r.size < 16:
        return
    for name, function in ACTIVATIONS.items():
        if name == "identity":
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            more, less = function(r), function(t)
        facts = {"activation": name}
        hint = f"The activation ({name}) is missing in the target."
        text = f"the reference is {name} of the target"
        yield Hypothesis("activation-missing", text, r, less, t, hint=hint, facts=facts)
        hint = f"An activation ({name}) too many in the target."
        text = f"the target is {name} of the reference"
        yield context.propose("activation-added", text, more, hint=hint, facts=facts)


def _propose_other_function(
    context: PairContext, slot: str, ours: Values, theirs: Values
) -> Iterator[Hypothesis]:
    """Propose another function of the target's input than the one that makes the reference of its own."""
    name = _find_function(context, ours)
    if name is None:
        return
    dtype = context.target.dtype.name
    baseline = rounded(ACTIVATIONS[name](theirs), dtype)
    yield inherited_error(context.t, baseline, context.r)
    for other, function in ACTIVATIONS.items():
        if other != name:
            text = f"the target is {other} of its {slot}, the reference {name} of its own"
            yield _other_activation(context, text, rounded(function(theirs), dtype), baseline, name, other)


def _other_activation(
    context: PairContext, text: str, predicted: Values, baseline: Values, name: str, other: str
) -> Hypothesis:
    """State that the target has one activation where the reference has another one."""
    any_other = f"Another activation: {other} where the reference has {name}."
    return context.propose(
        "activation",
        text,
        predicted,
        baseline=baseline,
        log_alternatives=_LOG_ACTIVATIONS,
        hint=_USUAL_HINTS.get(frozenset((name, other)), any_other),
        facts={"reference": name, "target": other},
    )


def _find_function(context: PairContext, x: Values) -> str | None:
    """Find the function that makes the reference of its input; None if none does, or several do equally."""
    dtype = context.reference.dtype.name
    errors = sorted(
        (relative_error(context.r, rounded(function(x), dtype)), name)
        for name, function in ACTIVATIONS.items()
    )
    (best, name), (second, _) = errors[:2]
    return name if best <= context.tolerance() and best < LESSENED * second else None


def _propose_gated(context: PairContext) -> Iterator[Hypothesis]:
    """Propose another product of an activation and a gate, as gated MLPs have it.

    1. Neighbours of the pair's shape, and halves of those of twice the width, are possible factors.
    2. On a sample, the function of one factor times another one that makes the reference is looked for.
    3. Proposed are other functions, exchanged factors, and the product without its gate.
    """
    factors = list(itertools.islice(_read_factors(context), _FACTORS))
    if len(factors) < 2:
        return
    picked = evenly_spaced(context.r.size, _SAMPLE)
    sampled = [(label, ours.reshape(-1)[picked], theirs) for label, ours, theirs in factors]
    sample = context.r.reshape(-1)[picked]
    allowed = context.tolerance(_PRODUCT_ROUNDINGS)
    for name, function in ACTIVATIONS.items():
        for (x_label, x, x_theirs), (u_label, u, u_theirs) in itertools.permutations(sampled, 2):
            if relative_error(sample, function(x) * u) > allowed:
                continue
            baseline = function(x_theirs) * u_theirs
            yield inherited_error(context.t, baseline, context.r)
            for other, other_function in ACTIVATIONS.items():
                if other != name:
                    text = f"the target is {other} of {x_label} times {u_label}, the reference has {name}"
                    product = other_function(x_theirs) * u_theirs
                    yield _other_activation(context, text, product, baseline, name, other)
            yield context.propose(
                "gate-swapped",
                f"the target puts {u_label} through {name} in the place of {x_label}",
                function(u_theirs) * x_theirs,
                baseline=baseline,
                log_alternatives=_LOG_ACTIVATIONS,
                hint="Gate and up projections are swapped.",
            )
            yield context.propose(
                "gate-missing",
                f"the target is {name} of {x_label}, without {u_label}",
                function(x_theirs),
                baseline=baseline,
                log_alternatives=_LOG_ACTIVATIONS,
                hint="The multiplication by the gate is missing.",
            )
            return


def _read_factors(context: PairContext) -> Iterator[tuple[str, Values, Values]]:
    """Read neighbours of the pair's shape, and the halves of those of twice as many channels."""
    shape = context.r.shape
    for label, ours, theirs in context.read_neighbours():
        if theirs is None:
            continue
        if ours.shape == shape:
            yield label, ours, theirs
        elif ours.ndim and shape and ours.shape == (*shape[:-1], 2 * shape[-1]):
            half = shape[-1]
            yield f"the first half of {label}", ours[..., :half], theirs[..., :half]
            yield f"the second half of {label}", ours[..., half:], theirs[..., half:]
