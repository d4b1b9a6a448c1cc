"""What may be different in a module that is called again, and what each difference is usually the sign of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tensorcap.adapters.edits import (
    MASKS,
    Absent,
    Added,
    Argument,
    CallMutation,
    Edit,
    Filled,
    Masked,
    Operation,
    Ordered,
    Rerun,
    Rounded,
    Shifted,
    Transposed,
)
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.scoring import Values

SMALL: Final = 1e-2  # a setting below it is an eps, of which only usual values are tried
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_EPS: Final = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.0)
_EXPERT_HINT: Final = "Experts are in another order, or one stands in the place of another."
_NEIGHBOURS: Final = 2  # results of calls are exchanged with those of so many that come next
_SETTINGS: Final[Mapping[str, tuple[str, str]]] = {  # by a part of their names; the first that fits counts
    "eps": ("norm-eps", "Another eps; it shows in rows of small values only."),
    "softcap": ("softcap-differs", "The soft cap is missing, or another one."),
    "limit": ("clip-differs", "The limit of values is missing, or another one."),
    "clip": ("clip-differs", "The limit of values is missing, or another one."),
    "clamp": ("clip-differs", "The limit of values is missing, or another one."),
    "window": ("attention-mask", "The window is missing, or its length is off by one."),
    "layer_types": (
        "attention-mask",
        "Layers see a window where they have to see all, or the other way round.",
    ),
    "causal": ("attention-mask", "The mask: causal or not."),
    "alpha": ("activation-differs", "The activation has another slope."),
    "slope": ("activation-differs", "The activation has another slope."),
    "topk": ("router-differs", "Weights of experts are renormalised on one side only."),
    "top_k": ("router-differs", "Another count of experts is chosen."),
    "experts_per_tok": ("router-differs", "Another count of experts is chosen."),
    "decoder": ("position-offset", "A decoder looks back only, an encoder both ways; their tables differ."),
    "bucket": ("position-offset", "The table of relative positions is divided otherwise."),
    "scal": ("factor", ""),
    "factor": ("factor", ""),
    "multiplier": ("factor", ""),
}
_OF_ATTENTION: Final = {
    "softcap": ("attention-softcap", "The soft cap of scores is missing, or another one."),
    "scal": ("attention-scale", "The scale of scores is another one."),
}
_ARGUMENTS: Final = (  # by a part of their names; the first that fits counts
    ("mask", "attention-mask", "The mask is not looked at."),
    ("position", "position-offset", "Positions are not looked at, or counted from another number."),
    ("", "term-missing", "A residual, or another term, is missing."),
)
_SEEN: Final = {
    "one further": "every token see the next one too",
    "one fewer": "no token see itself",
    "longer window": "a window of one token more",
    "shorter window": "a window of one token less",
}
_LEFT_OUT: Final[Mapping[str, str]] = {  # what an operation is when it is not done, by words of its name
    "clamp clip": "clip-missing",
    "masked where": "attention-mask",
    "silu gelu relu sigmoid tanh softplus exp": "activation-missing",
    "neg": "sign",
    "add sub": "term-missing",
    "mul div": "product-missing",
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change, and what it would mean.

    Attributes:
        kind: As in `Trial`.
        text: How the module is called, to stand behind "the target is what it makes".
        hint: As in `Trial`.
        change: What is changed.
        facts: As in `Trial`.
    """

    kind: str
    text: str
    hint: str
    change: CallMutation
    facts: Mapping[str, Any]


def mutations_of(exhibit: PairContext, rerun: Rerun, largest: int) -> list[Mutation]:
    """All of them but altered operations, the most telling first.

    Args:
        exhibit: The pair.
        rerun: The call.
        largest: Elements of a tensor that is put in another order, at most.
    """
    shapes = {name: shape for name, shape in rerun.tensors.items() if math.prod(shape) <= largest}
    return [
        *_of_experts(exhibit, shapes),
        *_of_settings(rerun),
        *_of_arguments(exhibit, rerun),
        *_of_results(rerun),
        *(one for name in rerun.tensors for one in _without(name)),
        *(one for name, shape in shapes.items() for one in _in_order(exhibit, name, shape)),
        *_together(exhibit, shapes),
    ]


def rounded_tensors(rerun: Rerun, dtype: str) -> list[Mutation]:
    """Tensors of the module, each by itself rounded to a dtype."""
    return [
        Mutation(
            "rounded",
            f"with {name} rounded to {dtype}",
            f"{name} is cast to {dtype} with the rest of the model; it has to stay as it is.",
            CallMutation({name: Rounded(dtype)}),
            {"parameter": name, "dtype": dtype},
        )
        for name in rerun.tensors
    ]


def in_low_precision(rerun: Rerun, dtype: str) -> list[Mutation]:
    """All tensors of the module, and every step of its code, rounded to a dtype."""
    found = []
    tensors: dict[str, Edit] = dict.fromkeys(rerun.tensors, Rounded(dtype))
    for is_in_turn in (False, True):
        text = f"with every step rounded to {dtype}"
        text += ", and sums taken one after the other" if is_in_turn else ""
        hint = "It has to compute in float32, or to sum in float32, and does not."
        change = CallMutation(tensors, steps=dtype, is_in_turn=is_in_turn)
        facts = {"dtype": dtype, "is_in_turn": is_in_turn}
        found.append(Mutation("code-precision", text, hint, change, facts))
    return found


def of_experts(exhibit: PairContext, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Names of tensors that have a slice for each expert."""
    count = exhibit.number(*_EXPERTS)
    return tuple(name for name, shape in shapes.items() if len(shape) > 1 and shape[0] == count)


def kind_of_setting(name: str, class_name: str) -> tuple[str, str]:
    """The kind of another value for a setting of a module of a class, and its hint."""
    is_of_attention = "attention" in class_name.lower()
    known = {**_SETTINGS, **_OF_ATTENTION} if is_of_attention else _SETTINGS
    found = next((kind for part, kind in known.items() if part in name), None)
    return found or ("setting-differs", f"The setting {name} is another one, or is not looked at.")


def alterations(operations: Mapping[str, Operation]) -> list[Mutation]:
    """Operations of the module's own code that do something else."""
    hint = "Look at that line, and at what the target has for it."
    return [
        Mutation(
            kind,
            f"{what}, in {one.place}",
            hint,
            CallMutation(operations={known: way}),
            {"operation": one.name, "place": one.place, "way": way},
        )
        for known, one in operations.items()
        for way in one.ways
        for kind, what in [_altered(one, way)]
    ]


def _altered(one: Operation, way: str) -> tuple[str, str]:
    """The kind of an altered operation, and what became of it."""
    if way in MASKS:
        return "attention-mask", f"where attention has {_SEEN[way]}"
    if way in ("first", "second"):
        what = f"with the {way} operand in the place of the result of {one.name}"
        for names, kind in _LEFT_OUT.items():
            if any(name in one.name for name in names.split()):
                return ("offset" if kind == "term-missing" and one.has_number else kind), what
        return "operation-missing", what
    if " and " in way:
        return "parts-order", f"with parts {way} of {one.name}, from 0, exchanged"
    if way == "twice":
        return "term-twice", f"with the second operand of {one.name} added twice"
    if way == "opposite":
        return "sign", f"with the opposite sign of the second operand of {one.name}"
    if "mul" in one.name:
        return "operation-differs", f"with a sum in the place of the product by {one.name}"
    kind = "factor" if one.name in ("mean", "sum") else "activation"
    return kind, f"with {way} in the place of {one.name}"


def _of_experts(exhibit: PairContext, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Mutation]:
    """All that belongs to an expert, in the place of that of another."""
    names = of_experts(exhibit, shapes)
    if names:
        size = shapes[names[0]][0]
        for how, edit in _orders(exhibit, 0, size):
            facts = {"parameters": list(names), "order": how}
            text = f"with the experts of {' and '.join(names)} {how}"
            change = CallMutation(dict.fromkeys(names, edit))
            yield Mutation("expert-order", text, _EXPERT_HINT, change, facts)


def _without(name: str) -> Iterator[Mutation]:
    last = name.rpartition(".")[2]
    if "bias" in last:
        text, hint = f"without {name}", f"The {name} was dropped."
        yield Mutation("bias-dropped", text, hint, CallMutation({name: Filled(0.0)}), {"parameter": name})
        return
    for value, kind, what in (
        (0.0, "parameter-missing", "What is added by it"),
        (1.0, "weight-missing", "The multiplication by it"),
        (-1e30, "parameter-missing", "What takes part in a softmax by it"),
    ):
        shown = "minus infinity" if value < 0 else f"{value:g}"
        text, hint = f"with {shown} in the place of {name}", f"{what} is missing: {name}."
        facts = {"parameter": name, "value": value}
        yield Mutation(kind, text, hint, CallMutation({name: Filled(value)}), facts)


def _in_order(exhibit: PairContext, name: str, shape: tuple[int, ...]) -> Iterator[Mutation]:
    """One tensor, an axis of which is in another order; two axes of which are exchanged."""
    for axis, size in enumerate(shape):
        is_of_experts = not axis and name in of_experts(exhibit, {name: shape})
        for how, edit in _orders(exhibit, axis, size):
            one = _ordered({name: edit}, how)
            yield replace(one, kind="expert-order", hint=_EXPERT_HINT) if is_of_experts else one
    for first, second in itertools.combinations(range(len(shape)), 2):
        if shape[first] == shape[second] > 1:
            text = f"with {name} transposed"
            hint = "A square weight lies the other way in the checkpoint, or in the layer."
            change = CallMutation({name: Transposed((first, second))})
            yield Mutation("weight-transposed", text, hint, change, {"parameter": name})


def _together(exhibit: PairContext, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Mutation]:
    """An axis that several tensors have, such as a weight and its bias, in the same order in all of them."""
    sharing: dict[int, dict[str, int]] = {}
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            sharing.setdefault(size, {}).setdefault(name, axis)
    for size, axes in sharing.items():
        if len(axes) > 1:
            for how, edit in _orders(exhibit, 0, size):
                yield _ordered({name: Ordered(axis, edit.order) for name, axis in axes.items()}, how)


def _ordered(edits: Mapping[str, Ordered], how: str) -> Mutation:
    kind = "parameter-shift" if how.startswith("rolled") else "parameter-order"
    hint = "A table, or a weight, is read from another place."
    if kind == "parameter-order":
        hint = (
            "Parts of a weight lie in another order: gate and up, queries and keys, heads, pairs and halves."
        )
    axes = ", ".join(f"axis {edit.axis} of {name}" for name, edit in edits.items())
    tensors: dict[str, Edit] = dict(edits)
    facts = {"parameters": list(edits), "order": how}
    return Mutation(kind, f"with {axes} {how}", hint, CallMutation(tensors), facts)


def _orders(exhibit: PairContext, axis: int, size: int) -> Iterator[tuple[str, Ordered]]:
    """Usual orders of an axis that are not its own, each once."""
    at = np.arange(size)
    orders = {
        "reversed": at[::-1],
        "rolled by one": np.roll(at, 1),
        "rolled by one back": np.roll(at, -1),
    }
    if size % 2 == 0:
        orders |= {
            "in exchanged halves": np.roll(at, size // 2),
            "with its halves put alternately": at.reshape(2, -1).T.reshape(-1),
            "with alternate ones put into halves": at.reshape(-1, 2).T.reshape(-1),
        }
    heads, each = exhibit.heads, exhibit.head_dim
    if heads and each and size % (heads * each) == 0:
        by_head = at.reshape(-1, heads, each)
        orders |= {
            "in reversed order of heads": by_head[:, ::-1].reshape(-1),
            "with its blocks put into heads": by_head.transpose(1, 0, 2).reshape(-1),
            "with its heads put into blocks": at.reshape(heads, -1, each).transpose(1, 0, 2).reshape(-1),
        }
    seen: list[Values] = [at]
    for name, order in orders.items():
        if not any(np.array_equal(order, other) for other in seen):
            seen.append(order)
            yield name, Ordered(axis, np.ascontiguousarray(order))


def _of_settings(rerun: Rerun) -> Iterator[Mutation]:
    for name, value in rerun.settings.items():
        for other in _values(value):
            kind, hint = kind_of_setting(name, rerun.class_name)
            shown = "nothing" if other is None else f"{other:g}" if isinstance(other, float) else repr(other)
            text = f"with {shown} in the place of {value!r} for its setting {name}"
            facts = {"setting": name, "reference": value, "target": other}
            yield Mutation(kind, text, hint, CallMutation(settings={name: other}), facts)


def _values(value: Any) -> Iterator[Any]:
    """Other values of a setting that are usual."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value - 1, value + 1, None)
    elif isinstance(value, float):
        yield None
        usual = _EPS if abs(value) < SMALL else (1.0, 0.0, 1e9, -value)
        yield from (other for other in usual if other != value)
    elif isinstance(value, (list, tuple)):
        for word in dict.fromkeys(value):
            yield type(value)([word] * len(value))


def _of_arguments(exhibit: PairContext, rerun: Rerun) -> Iterator[Mutation]:
    for name, argument in rerun.arguments.items():
        kind, shape = argument.kind, argument.shape
        short = name.removeprefix("input.")
        what, missing, hint = next(entry for entry in _ARGUMENTS if entry[0] in short)
        edits: list[tuple[str, str, Edit]] = [(missing, f"without its {short}", Absent())]
        if what == "mask" and kind != "int" and len(shape) > 1:
            edits += [(missing, f"where its {short} has {_SEEN[way]}", Masked(way)) for way in MASKS]
        if kind == "float":
            edits.append((missing, f"with zeros for its {short}", Filled(0.0)))
        elif what == "mask":
            edits.append((missing, f"with ones for its {short}", Filled(1.0)))
        elif kind == "int":
            other = missing if what else "index-differs"
            edits += [
                (other, f"with its {short} {step:+d}", Added(step))
                for step in (1, -1)
                if what or _is_in_range(exhibit, rerun, argument, step)
            ]
        edits += [(found, f"with its {short} {text}", edit) for found, text, edit in _shifts(shape)]
        for found, text, edit in edits:
            yield Mutation(found, text, hint, CallMutation(arguments={name: edit}), {"argument": short})


def _is_in_range(exhibit: PairContext, rerun: Rerun, argument: Argument, step: int) -> bool:
    """Whether indices plus a number are still indices of the table that they are looked up in.

    Kernels that do not check them read memory that nobody has written. The table is the smallest one that
    has all of them: a tensor of the module, by its first axis, or the experts of the configuration.
    """
    if argument.lowest is None or argument.highest is None:
        return False
    sizes = [shape[0] for shape in rerun.tensors.values() if shape]
    sizes.append(int(exhibit.number(*_EXPERTS) or 0))
    size = min((size for size in sizes if size > argument.highest), default=0)
    return argument.lowest + step >= 0 and argument.highest + step < size


def _of_results(rerun: Rerun) -> Iterator[Mutation]:
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, shape in rerun.results.items():
        by_shape.setdefault(shape, []).append(name)
        hint = f"What {name} returns is not added, or not looked at."
        change = CallMutation(results={name: Filled(0.0)})
        yield Mutation("term-missing", f"with zeros for the result of {name}", hint, change, {"call": name})
        for kind, how, edit in _shifts(shape):
            text, hint = (
                f"with the result of {name} {how}",
                "Tokens are one off: padding, a cache, a convolution.",
            )
            yield Mutation(kind, text, hint, CallMutation(results={name: edit}), {"call": name})
    for names in by_shape.values():
        for at, one in enumerate(names):
            for other in names[at + 1 : at + 1 + _NEIGHBOURS]:
                text = f"with the results of {one} and {other} exchanged"
                hint = f"{one} and {other} stand in each other's place."
                change = CallMutation(results={one: other, other: one})
                yield Mutation("results-order", text, hint, change, {"calls": [one, other]})


def _shifts(shape: tuple[int, ...]) -> Iterator[tuple[str, str, Edit]]:
    """One index further and one back along each axis but the last."""
    for axis, size in enumerate(shape[:-1]):
        if size > 2:
            kind = "token-shift" if axis == len(shape) - 2 else "axis-shift"
            for by in (1, -1):
                where = f"one index {'behind' if by > 0 else 'ahead'} on axis {axis}"
                yield kind, where, Shifted(axis, by)
                yield kind, f"{where}, the other end coming in", Ordered(axis, np.roll(np.arange(size), by))
