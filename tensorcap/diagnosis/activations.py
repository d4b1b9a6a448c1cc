"""Activation functions, and which of them makes the reference and which the target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.scoring import LESSENED, Hypothesis, Scorer, Values, inherited, relative_error
from tensorcap_formats.float_formats import rounded

_SAMPLE: Final = 1 << 14
_PARTNERS: Final = 12  # values beside the pair that may be what gates it
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
_USUAL: Final = {
    frozenset(
        ("gelu erf", "gelu tanh")
    ): "GELU by tanh on one side and by erf on the other: frameworks differ in what `gelu` means.",
    frozenset(("gelu erf", "quick gelu")): "The quick GELU, x * sigmoid(1.702 x), on one side.",
    frozenset(("gelu tanh", "quick gelu")): "The quick GELU, x * sigmoid(1.702 x), on one side.",
}


def activations(exhibit: PairContext, scales: Scorer) -> Iterator[Hypothesis]:
    """What the module was given, put through other functions; the values themselves put through one."""
    yield from _of_values(exhibit)
    if not exhibit.is_same_shape:
        return
    shape = exhibit.r.shape
    own = [(slot, x, y) for slot, x, y in exhibit.inputs if x.shape == shape]
    for slot, ours, theirs in own:
        yield from _of_input(exhibit, scales, slot, ours, theirs)
    yield from _gated(exhibit, scales)


def _of_values(exhibit: PairContext) -> Iterator[Hypothesis]:
    """One side is the other put through a function: an activation too many, or too few."""
    if not exhibit.is_same_shape or exhibit.r.size < 16:
        return
    r, t = exhibit.r, exhibit.t
    for name, function in ACTIVATIONS.items():
        if name == "identity":
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            more, less = function(r), function(t)
        hint = f"The activation ({name}) is missing in the target."
        text = f"the reference is {name} of the target"
        yield Hypothesis("activation-missing", text, r, less, t, 0, 0, hint, {"activation": name})
        hint = f"An activation ({name}) too many in the target."
        text = f"the target is {name} of the reference"
        yield Hypothesis("activation-added", text, t, more, r, 0, 0, hint, {"activation": name})


def _of_input(
    exhibit: PairContext, scales: Scorer, slot: str, ours: Values, theirs: Values
) -> Iterator[Hypothesis]:
    name = _maker(exhibit.r, ours, exhibit.reference.dtype.name, scales)
    if name is None:
        return
    dtype = exhibit.target.dtype.name
    usual = rounded(ACTIVATIONS[name](theirs), dtype)
    yield inherited(exhibit.t, usual, exhibit.r)
    for other, function in ACTIVATIONS.items():
        if other == name:
            continue
        predicted = rounded(function(theirs), dtype)
        text = f"the target is {other} of its {slot}, the reference {name} of its own"
        yield Hypothesis(
            "activation",
            text,
            exhibit.t,
            predicted,
            usual,
            0,
            math.log(len(ACTIVATIONS)),
            hint_of(name, other),
            {"reference": name, "target": other},
        )


def _maker(made: Values, x: Values, dtype: str, scales: Scorer) -> str | None:
    """The function that makes values of others; None where none does, or several do equally."""
    errors = sorted((relative_error(made, rounded(f(x), dtype)), name) for name, f in ACTIVATIONS.items())
    (best, name), (second, _) = errors[:2]
    allowed = max(4 * scales.rounding, 1e-6)
    return name if best <= allowed and best < LESSENED * second else None


def _gated(exhibit: PairContext, scales: Scorer) -> Iterator[Hypothesis]:
    """A product of an activation and a gate, as gated MLPs have it; both are recorded before."""
    r, t = exhibit.r, exhibit.t
    parts = list(itertools.islice(_parts(exhibit), _PARTNERS))
    if len(parts) < 2:
        return
    picked = np.linspace(0, r.size - 1, min(r.size, _SAMPLE)).astype(np.int64)
    few = [(label, ours.reshape(-1)[picked], ours, theirs) for label, ours, theirs in parts]
    sample = r.reshape(-1)[picked]
    allowed = max(8 * scales.rounding, 1e-6)
    for name, function in ACTIVATIONS.items():
        for (x_label, x, _, x_theirs), (u_label, u, _, u_theirs) in itertools.permutations(few, 2):
            if relative_error(sample, function(x) * u) > allowed:
                continue
            usual = function(x_theirs) * u_theirs
            yield inherited(t, usual, r)
            logs = math.log(len(ACTIVATIONS))
            for other, changed in ACTIVATIONS.items():
                if other != name:
                    text = f"the target is {other} of {x_label} times {u_label}, the reference has {name}"
                    facts = {"reference": name, "target": other}
                    value = changed(x_theirs) * u_theirs
                    yield Hypothesis(
                        "activation", text, t, value, usual, 0, logs, hint_of(name, other), facts
                    )
            hint = "Gate and up projections are swapped."
            text = f"the target puts {u_label} through {name} in the place of {x_label}"
            yield Hypothesis("gate-swapped", text, t, function(u_theirs) * x_theirs, usual, 0, logs, hint)
            text = f"the target is {name} of {x_label}, without {u_label}"
            hint = "The multiplication by the gate is missing."
            yield Hypothesis("gate-missing", text, t, function(x_theirs), usual, 0, logs, hint)
            return


def _parts(exhibit: PairContext) -> Iterator[tuple[str, Values, Values]]:
    """Values of the pair's shape beside it, and the halves of what has twice as many channels."""
    shape = exhibit.r.shape
    for label, ours, theirs in exhibit.beside():
        if theirs is None:
            continue
        if ours.shape == shape:
            yield label, ours, theirs
        elif ours.ndim and shape and ours.shape == (*shape[:-1], 2 * shape[-1]):
            half = shape[-1]
            yield f"the first half of {label}", ours[..., :half], theirs[..., :half]
            yield f"the second half of {label}", ours[..., half:], theirs[..., half:]


def hint_of(one: str, other: str) -> str:
    """The usual mistake behind two functions."""
    return _USUAL.get(frozenset((one, other)), f"Another activation: {other} where the reference has {one}.")
