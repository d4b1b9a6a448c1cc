"""What the reference's own module would make with something about it changed: weights, orders, settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap.diagnosis.constants import hint_of, named
from tensorcap.diagnosis.exhibit import Exhibit
from tensorcap.diagnosis.weighing import (
    LESSENED,
    ROUNDINGS,
    SHARE,
    Scales,
    Trial,
    Values,
    relative_error,
)
from tensorcap.variation import (
    Absent,
    Added,
    Change,
    Edit,
    Filled,
    Operation,
    Ordered,
    Rerun,
    Shifted,
    Transposed,
)

_REPEATS: Final = 1e-5  # what a call that is made again may leave of what it made the first time
_LARGEST: Final = 1 << 26  # elements of a tensor that is put in another order
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_EPS: Final = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.0)
_SMALL: Final = 1e-2  # a setting below it is an eps, of which only usual values are tried
_STEPS: Final = 32
_NEIGHBOURS: Final = 2  # results of calls are exchanged with those of so many that come next
_FACTORS: Final = tuple(2.0**power for power in range(-8, 9))
_KINDS: Final[Mapping[str, tuple[str, str]]] = {  # of settings, by a part of their names
    "eps": ("norm-eps", "Another eps; it shows in rows of small values only."),
    "softcap": ("softcap-differs", "The soft cap is missing, or another one."),
    "limit": ("clip-differs", "The limit of values is missing, or another one."),
    "clip": ("clip-differs", "The limit of values is missing, or another one."),
    "clamp": ("clip-differs", "The limit of values is missing, or another one."),
    "window": ("window-differs", "The window is missing, or its length is off by one."),
    "layer_types": ("window-differs", "Layers see a window where they have to see all, or the other way round."),
    "causal": ("mask-differs", "The mask: causal or not."),
    "alpha": ("activation-differs", "The activation has another slope."),
    "slope": ("activation-differs", "The activation has another slope."),
    "topk": ("router-differs", "Weights of experts are renormalised on one side only."),
    "top_k": ("router-differs", "Another count of experts is chosen."),
    "experts_per_tok": ("router-differs", "Another count of experts is chosen."),
    "decoder": ("position-differs", "A decoder looks back only, an encoder both ways; their tables differ."),
    "bucket": ("position-differs", "The table of relative positions is divided otherwise."),
    "scal": ("factor", ""),
    "factor": ("factor", ""),
    "multiplier": ("factor", ""),
}


_LEFT_OUT: Final[Mapping[str, str]] = {  # what an operation is when it is not done, by words of its name
    "clamp clip": "clip-missing",
    "masked where": "mask-missing",
    "silu gelu relu sigmoid tanh softplus exp": "activation-missing",
    "neg": "sign",
    "add sub": "term-missing",
    "mul div": "product-missing",
    "softmax": "softmax-missing",
    "rsqrt norm": "norm-missing",
    "roll": "token-shift",
}


@dataclass(frozen=True, slots=True)
class _Variant:
    kind: str
    text: str
    hint: str
    change: Change
    facts: Mapping[str, Any]


def variants(exhibit: Exhibit, scales: Scales, rerun: Rerun | None) -> Iterator[Trial]:
    """The target by the reference's own module, with one thing about it changed.

    Operations of its code are altered only where nothing so far explains the pair.
    """
    if rerun is None or not exhibit.is_same_shape or exhibit.window is not None:
        return
    usual = rerun.made(Change())
    if usual is None or usual.shape != exhibit.r.shape or relative_error(usual, exhibit.r) > _REPEATS:
        return
    operations = rerun.operations
    changes = [
        *_of_tensors(exhibit, rerun),
        *_of_settings(rerun),
        *_of_arguments(rerun),
        *_of_results(rerun),
    ]
    yield from _trials(exhibit, rerun, changes, usual)
    for name, value in rerun.settings.items():
        if isinstance(value, float) and abs(value) >= _SMALL:
            yield from _fitted(exhibit, rerun, name, value, usual)
    before = relative_error(exhibit.t, exhibit.r)
    if before and min(scales.tried.values(), default=1.0) > max(SHARE, ROUNDINGS * scales.rounding / before):
        yield from _trials(exhibit, rerun, [*_of_operations(operations)], usual)


def _trials(exhibit: Exhibit, rerun: Rerun, changes: list[_Variant], usual: Values) -> Iterator[Trial]:
    logs = math.log(max(len(changes), 1))
    for one in changes:
        made = _made(rerun, one.change, usual)
        if made is not None:
            text = f"the target is what {rerun.class_name} makes {one.text}"
            yield Trial(one.kind, text, exhibit.t, made, exhibit.r, 0, logs, one.hint, one.facts)


def _made(rerun: Rerun, change: Change, usual: Values) -> Values | None:
    """What a change makes; None where it makes nothing, or no difference."""
    made = rerun.made(change)
    if made is None or made.shape != usual.shape or not np.isfinite(made).all():
        return None
    return None if np.array_equal(made, usual) else made


def _of_tensors(exhibit: Exhibit, rerun: Rerun) -> Iterator[_Variant]:
    shapes = rerun.tensors
    for name, shape in shapes.items():
        yield from _absent(name)
        if math.prod(shape) <= _LARGEST:
            for axis, size in enumerate(shape):
                for order, edit in _orders(exhibit, axis, size):
                    yield _ordered(exhibit, {name: edit}, name, order, size)
            for first in range(len(shape)):
                for second in range(first + 1, len(shape)):
                    if shape[first] == shape[second] > 1:
                        text = f"with {name} transposed"
                        hint = "A square weight lies the other way in the checkpoint, or in the layer."
                        change = Change({name: Transposed((first, second))})
                        yield _Variant("weight-transposed", text, hint, change, {"parameter": name})
    yield from _together(exhibit, shapes)


def _absent(name: str) -> Iterator[_Variant]:
    last = name.rpartition(".")[2]
    if "bias" in last:
        text, hint = f"without {name}", f"The {name} was dropped."
        yield _Variant("bias-dropped", text, hint, Change({name: Filled(0.0)}), {"parameter": name})
        return
    for value, kind, what in (
        (0.0, "parameter-missing", "What is added by it"),
        (1.0, "weight-missing", "The multiplication by it"),
        (-1e30, "parameter-missing", "What takes part in a softmax by it"),
    ):
        shown = "minus infinity" if value < 0 else f"{value:g}"
        text, hint = f"with {shown} in the place of {name}", f"{what} is missing: {name}."
        facts = {"parameter": name, "value": value}
        yield _Variant(kind, text, hint, Change({name: Filled(value)}), facts)


def _together(exhibit: Exhibit, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Variant]:
    """An axis that several tensors have, put in the same order in all of them."""
    places: dict[tuple[int, bool], dict[str, int]] = {}
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            if size > 1 and math.prod(shape) <= _LARGEST:
                places.setdefault((size, axis == 0), {}).setdefault(name, axis)
    for (size, _), axes in places.items():
        if len(axes) > 1:
            for order, edit in _orders(exhibit, 0, size):
                edits = {name: Ordered(axis, edit.order) for name, axis in axes.items()}
                yield _ordered(exhibit, edits, " and ".join(axes), order, size)


def _ordered(
    exhibit: Exhibit, edits: Mapping[str, Ordered], names: str, order: str, size: int
) -> _Variant:
    axis = next(iter(edits.values())).axis
    is_of_experts = size == exhibit.number(*_EXPERTS) and all(e.axis == 0 for e in edits.values())
    kind = "parameter-shift" if order.startswith("rolled") else "parameter-order"
    hint = "A table, or a weight, is read from another place."
    if kind == "parameter-order":
        hint = "Parts of a weight lie in another order: gate and up, queries and keys, heads, pairs and halves."
    if is_of_experts:
        kind, hint = "expert-order", "Experts are in another order."
    facts = {"parameters": list(edits), "axis": axis, "order": order}
    tensors: dict[str, Edit] = dict(edits)
    return _Variant(kind, f"with axis {axis} of {names} {order}", hint, Change(tensors), facts)


def _orders(exhibit: Exhibit, axis: int, size: int) -> Iterator[tuple[str, Ordered]]:
    if size < 2:
        return
    at = np.arange(size)
    orders = {"reversed": at[::-1]}
    if size > 2:
        orders |= {"rolled by one": np.roll(at, 1), "rolled by one back": np.roll(at, -1)}
    if size % 2 == 0 and size > 2:
        orders |= {
            "with its halves exchanged": np.roll(at, size // 2),
            "with its halves put alternately": at.reshape(2, -1).T.reshape(-1),
            "with alternate ones put into halves": at.reshape(-1, 2).T.reshape(-1),
        }
    heads, each = exhibit.heads, exhibit.head_dim
    if heads and each and heads > 1 and size % (heads * each) == 0:
        blocks = size // (heads * each)
        by_head = at.reshape(-1, each)
        orders["with its heads reversed"] = by_head.reshape(blocks, heads, each)[:, ::-1].reshape(-1)
        if blocks > 1:
            inward = by_head.reshape(blocks, heads, each).transpose(1, 0, 2).reshape(-1)
            orders["with its blocks put into heads"] = inward
            orders["with its heads put into blocks"] = (
                by_head.reshape(heads, blocks, each).transpose(1, 0, 2).reshape(-1)
            )
    seen: list[Values] = []
    for name, order in orders.items():
        if not any(np.array_equal(order, other) for other in seen):
            seen.append(order)
            yield name, Ordered(axis, np.ascontiguousarray(order))


def _of_settings(rerun: Rerun) -> Iterator[_Variant]:
    for name, value in rerun.settings.items():
        for other in _values(value):
            kind, hint = _kind(name)
            shown = "nothing" if other is None else f"{other:g}" if isinstance(other, float) else repr(other)
            text = f"with {shown} in the place of {value!r} for its setting {name}"
            facts = {"setting": name, "reference": value, "target": other}
            yield _Variant(kind, text, hint, Change(settings={name: other}), facts)


def _of_arguments(rerun: Rerun) -> Iterator[_Variant]:
    for name, (kind, shape) in rerun.arguments.items():
        short = name.removeprefix("input.")
        what = next((w for w in ("mask", "position") if w in short), "term")
        hints = {
            "mask": "The mask is not looked at.",
            "position": "Positions are not looked at, or counted from another number.",
            "term": "A residual, or another term, is missing.",
        }
        edits: list[tuple[str, str, Edit]] = [(f"{what}-missing", f"without its {short}", Absent())]
        if kind == "float":
            edits.append((f"{what}-missing", f"with zeros for its {short}", Filled(0.0)))
        if kind == "int":
            for step in (1, -1):
                text = f"with its {short} {'plus' if step > 0 else 'minus'} one"
                edits.append(("position-differs" if what == "position" else "index-differs", text, Added(step)))
        edits += [(k, f"with its {short} {text}", edit) for k, text, edit in _shifts(shape)]
        for found, text, edit in edits:
            change = Change(arguments={name: edit})
            yield _Variant(found, text, hints[what], change, {"argument": short})


def _of_results(rerun: Rerun) -> Iterator[_Variant]:
    shapes = rerun.results
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
        hint = f"What {name} returns is not added, or not looked at."
        change = Change(results={name: Filled(0.0)})
        yield _Variant("term-missing", f"with zeros for the result of {name}", hint, change, {"call": name})
        for kind, how, edit in _shifts(shape):
            text, hint = f"with the result of {name} {how}", "Tokens are one off: padding, a cache, a convolution."
            yield _Variant(kind, text, hint, Change(results={name: edit}), {"call": name})
    for names in by_shape.values():
        for at, one in enumerate(names):
            for other in names[at + 1 : at + 1 + _NEIGHBOURS]:
                text = f"with the results of {one} and {other} exchanged"
                hint = f"{one} and {other} stand in each other's place."
                change = Change(results={one: other, other: one})
                yield _Variant("results-exchanged", text, hint, change, {"calls": [one, other]})


def _of_operations(operations: Mapping[str, Operation]) -> Iterator[_Variant]:
    for known, one in operations.items():
        for way in one.ways:
            kind, what = _kind_of_way(one, way)
            text, hint = f"{what} in {one.place}", "Look at that line, and at what the target has for it."
            facts = {"operation": one.name, "place": one.place, "way": way}
            yield _Variant(kind, text, hint, Change(operations={known: way}), facts)


def _kind_of_way(one: Operation, way: str) -> tuple[str, str]:
    """The kind of an altered operation, and what became of it."""
    if way in ("first", "second"):
        rest = {"first": "first", "second": "second"}[way]
        what = f"with the {rest} operand in the place of the result of {one.name}"
        for names, kind in _LEFT_OUT.items():
            if any(name in one.name for name in names.split()):
                return ("offset" if kind == "term-missing" and one.has_number else kind), what
        return "operation-missing", what
    if way == "reversed":
        return "parts-order", f"with the parts of {one.name} in reversed order"
    if way == "twice":
        return "term-twice", f"with the second operand of {one.name} added twice"
    if way == "opposite":
        return "sign", f"with the opposite sign of the second operand of {one.name}"
    if one.name in ("mean", "sum"):
        return "factor", f"with the {way} in the place of the {one.name}"
    return "activation", f"with {way} in the place of {one.name}"


def _shifts(shape: tuple[int, ...]) -> Iterator[tuple[str, str, Edit]]:
    """One index further and one back along each axis but the last."""
    for axis, size in enumerate(shape[:-1]):
        if size > 2:
            kind = "token-shift" if axis == len(shape) - 2 else "axis-shift"
            for by in (1, -1):
                where = f"one index {'behind' if by > 0 else 'ahead'} on axis {axis}"
                yield kind, where, Shifted(axis, by)
                order = np.roll(np.arange(size), by)
                yield kind, f"{where}, the other end coming in", Ordered(axis, order)


def _values(value: Any) -> Iterator[Any]:
    """Other values of a setting that are usual."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value - 1, value + 1, None)
    elif isinstance(value, float):
        yield None
        if abs(value) < _SMALL:
            yield from (eps for eps in _EPS if eps != value)
        else:
            yield from (other for other in (1.0, 0.0, 1e9, -value) if other != value)
    elif isinstance(value, (list, tuple)):
        for word in dict.fromkeys(value):
            yield type(value)([word] * len(value))


def _fitted(exhibit: Exhibit, rerun: Rerun, name: str, value: float, usual: Values) -> Iterator[Trial]:
    """Another number for a setting: the best of some factors, then by golden section over its logarithm."""

    def made(factor: float) -> Values | None:
        return _made(rerun, Change(settings={name: value * factor}), usual)

    def left(factor: float) -> float:
        found = made(factor)
        return math.inf if found is None else relative_error(exhibit.t, found)

    errors = {factor: left(factor) for factor in _FACTORS if factor != 1}
    best = min(errors, key=lambda factor: errors[factor])
    if errors[best] >= relative_error(exhibit.t, exhibit.r):
        return
    low, high = math.log(best / 2), math.log(best * 2)
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(_STEPS):
        inner, outer = high - ratio * (high - low), low + ratio * (high - low)
        if left(math.exp(inner)) < left(math.exp(outer)):
            high = outer
        else:
            low = inner
    middle = math.exp((low + high) / 2)
    factor = min((middle, best), key=left)
    predicted = made(factor)
    if predicted is None or left(factor) > LESSENED * relative_error(exhibit.t, exhibit.r):
        return
    names = named(factor, exhibit, 1e-3)
    kind, hint = _kind(name)
    text = f"the target is what {rerun.class_name} makes with {value * factor:.6g} in the place of {value:g}"
    text += f" for its setting {name}" + (f", which is {names[0]} times it" if names else "")
    facts = {"setting": name, "reference": value, "target": value * factor, "equals": list(names)}
    logs = math.log(_STEPS + len(_FACTORS))
    yield Trial(kind, text, exhibit.t, predicted, exhibit.r, 1, logs, hint or hint_of(names), facts)


def _kind(name: str) -> tuple[str, str]:
    found = next((kind for part, kind in _KINDS.items() if part in name), None)
    return found or ("setting-differs", f"The setting {name} is another one, or is not looked at.")
