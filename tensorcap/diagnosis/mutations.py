"""Mutations of a module that is called again, and the mistake that each is usually the sign of.

Each `mutate_…` lists mutations of one part of a call: experts, settings, arguments, results of calls within;
tensors are dropped, put in another order, and rounded.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tensorcap.adapters import (
    MASK_EXTENTS,
    Absent,
    Added,
    Argument,
    CallMutation,
    Cleared,
    Edit,
    Filled,
    Masked,
    OfModel,
    Ordered,
    Replaced,
    Rerun,
    Rounded,
    Shifted,
    Transposed,
)
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.repeated_call import RepeatedCall
from tensorcap.diagnosis.values import Values, listed

SMALLEST_FITTED: Final = 1e-2  # a setting below it is an eps, of which only usual values are tried
_EPS: Final = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.0)
_USUAL_NUMBERS: Final = (1.0, 0.0, 1e9)  # of any other setting: not scaled, off, without a limit
_MINUS_INFINITY: Final = -1e30  # stands for it in the dtype of a tensor
_EXPERT_HINT: Final = "Experts are in another order, or one stands in the place of another."
_ORDER_HINT: Final = (
    "Parts of a weight lie in another order: gate and up, queries and keys, heads, pairs and halves."
)
_LARGEST_EXCHANGED: Final = 1 << 22  # elements of a tensor that another one stands for
_MOST_EXCHANGED: Final = 64  # pairs of tensors of one shape that are exchanged
_MOST_ALIKE: Final = 64  # modules of the same class whose tensors are tried
_PARTS: Final = (2, 3, 4, 8)  # equal ones of a tensor, as ranks or shards hold them
_MANY_PARTS: Final = 8  # of so many only neighbours stand for one another
_MOST_BLOCKS: Final = 64  # of an axis
_PERMUTED: Final = 4  # blocks that are put into all orders
_RECURRENT: Final = re.compile(r"(?:weight|bias)_([ih]h)((?:_l\d+)?(?:_reverse)?)$")  # of torch's cells
_GATES: Final = (4, 3)  # of an LSTM, of a GRU
_FURTHEST: Final = 4  # doublings of a distance, either way, that are tried
_NEIGHBOURS: Final = 2  # results are exchanged with those of so many calls of the same shape behind
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
    "interleave": (
        "rotary-layout",
        "The layout of rotary embeddings: halves on one side, interleaved pairs on the other.",
    ),
    "rope": ("rotary-layout", "Rotary positions: applied on one side alone, or otherwise."),
    "reset_after": (
        "operations-order",
        "The reset gate multiplies the state before the product with the weights, or what comes of it.",
    ),
    "residual_connection": ("term-exchanged", "The residual is taken from before or behind the norm."),
    "parallel": ("term-exchanged", "Parts stand beside each other on one side, and in a row on the other."),
    "heads": ("attention-heads", "Another count of heads."),
    "freq": ("frequencies-differ", "Frequencies are made otherwise."),
    "theta": ("frequencies-differ", "Frequencies have another base."),
    "position": ("position-offset", "Positions are counted, or told apart, otherwise."),
    "distance": ("position-offset", "Positions are counted, or told apart, otherwise."),
    "shift": ("frequencies-differ", "Frequencies are made otherwise."),
    "group": ("groups-differ", "Another count of groups."),
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
EXTENT_TEXTS: Final = {  # by the extents of `MASK_EXTENTS`
    "one further": "every token see the next one too",
    "one fewer": "no token see itself",
    "longer window": "a window of one token more",
    "shorter window": "a window of one token less",
}
_OF_EXTENT: Final = "Look at where the mask ends: which tokens each one sees."


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mutation of a call, and the mistake that it stands for.

    Attributes:
        kind: As in `Hypothesis`.
        text: What is different, to stand behind "the target is what MODULE makes".
        hint: As in `Hypothesis`.
        call: What is different, for `Rerun.run`.
        facts: As in `Hypothesis`.
    """

    kind: str
    text: str
    hint: str
    call: CallMutation
    facts: Mapping[str, Any]


def list_mutations(context: PairContext, call: RepeatedCall, *, largest: int) -> list[Mutation]:
    """List the mutations of all but operations, the most specific first.

    Args:
        context: The pair.
        call: The call.
        largest: Elements of a tensor that is put in another order, at most.
    """
    rerun, used = call.rerun, call.used_tensors
    shapes = {name: shape for name, shape in rerun.tensors.items() if math.prod(shape) <= largest}
    used_shapes = {name: shape for name, shape in shapes.items() if name in used}
    return [
        *take_settings_of_target(context, rerun),
        *mutate_experts(context, shapes, rerun.class_name),
        *mutate_settings(rerun),
        *mutate_arguments(context, rerun),
        *exchange_arguments(rerun),
        *mutate_results(rerun),
        *(mutation for name in used for mutation in drop_tensor(name)),
        *drop_biases_of_cells(used),
        *reorder_gates(used_shapes),
        *take_other_tensors(rerun, shapes, used),
        *(
            mutation
            for name, shape in used_shapes.items()
            for mutation in reorder_tensor(context, name, shape)
        ),
        *reorder_tensors_together(context, used_shapes),
    ]


def list_late_mutations(context: PairContext, call: RepeatedCall, *, largest: int) -> list[Mutation]:
    """List mutations that are many: tensors of other modules, parts of tensors, further orders of them.

    Args:
        context: The pair.
        call: The call.
        largest: Elements of a tensor that is cut or put in another order, at most.
    """
    shapes = {name: shape for name, shape in call.used_tensors.items() if math.prod(shape) <= largest}
    return [
        *take_tensors_of_alike(call.rerun, call.used_tensors),
        *(mutation for name, shape in shapes.items() for mutation in cut_tensor(context, name, shape)),
        *(mutation for name, shape in shapes.items() for mutation in reorder_blocks(name, shape)),
    ]


def round_tensors(names: Iterable[str], dtype: str) -> list[Mutation]:
    """Round each tensor of a module to a dtype, by itself."""
    return [
        Mutation(
            "rounded",
            f"with {name} rounded to {dtype}",
            f"{name} is cast to {dtype} with the rest of the model; it has to stay as it is.",
            CallMutation({name: Rounded(dtype)}),
            {"parameter": name, "dtype": dtype},
        )
        for name in names
    ]


def round_every_step(rerun: Rerun, dtype: str) -> list[Mutation]:
    """Round all tensors of the module and every step of its code to a dtype."""
    mutations = []
    tensors: dict[str, Edit] = dict.fromkeys(rerun.tensors, Rounded(dtype))
    for is_in_turn in (False, True):
        text = f"with every step rounded to {dtype}"
        text += ", and sums taken one after the other" if is_in_turn else ""
        hint = "It has to compute in float32, or to sum in float32, and does not."
        call = CallMutation(tensors, steps=dtype, is_in_turn=is_in_turn)
        facts = {"dtype": dtype, "is_in_turn": is_in_turn}
        mutations.append(Mutation("code-precision", text, hint, call, facts))
    return mutations


def find_expert_tensors(
    context: PairContext, shapes: Mapping[str, tuple[int, ...]], class_name: str = ""
) -> Mapping[str, int]:
    """Find the tensors that have a slice for each expert, or several rows one after the other: how many.

    Args:
        context: For the count of experts.
        shapes: Of the tensors.
        class_name: Of their module: rows are those of experts only if it, or the tensor, is called so.
    """
    count = context.experts
    rows = {name: shape[0] // count for name, shape in shapes.items() if count and len(shape) > 1}
    is_named = "expert" in class_name.lower()
    return {
        name: size
        for name, size in rows.items()
        if size and shapes[name][0] == size * count and (size == 1 or is_named or "expert" in name.lower())
    }


def order_experts(tensors: Mapping[str, int], order: Values) -> CallMutation:
    """Put the experts of some tensors in another order.

    Args:
        tensors: As `find_expert_tensors` gives them.
        order: Which expert stands in the place of each.
    """
    edits: dict[str, Edit] = {}
    for name, rows in tensors.items():
        edits[name] = Ordered(0, (order[:, None] * rows + np.arange(rows)).reshape(-1))
    return CallMutation(edits)


def classify_setting(name: str, class_name: str) -> tuple[str, str]:
    """Find the kind of mistake that another value of a setting is, and its hint.

    Args:
        name: Of the setting, behind that of a module within that has it.
        class_name: Of the module.
    """
    owner, _, name = name.rpartition(".")
    role = f"{class_name} {owner}".lower().replace("attn", "attention")
    kinds = {**_SETTINGS, **_OF_ATTENTION} if "attention" in role else _SETTINGS
    if "position" in role and "offset" in name:
        return "position-offset", "Positions are counted from another number."
    plain = name.lower().replace("soft_cap", "softcap")
    entry = next((entry for part, entry in kinds.items() if part in plain), None)
    return entry or ("setting-differs", f"The setting {name} is another one, or is not looked at.")


def mutate_experts(
    context: PairContext, shapes: Mapping[str, tuple[int, ...]], class_name: str
) -> Iterator[Mutation]:
    """Put all tensors that have a slice for each expert in another order of experts."""
    tensors = find_expert_tensors(context, shapes, class_name)
    if tensors:
        for how, edit in _usual_orders(context, 0, context.experts):
            facts = {"parameters": list(tensors), "order": how}
            text = f"with the experts of {' and '.join(tensors)} {how}"
            call = order_experts(tensors, edit.order)
            yield Mutation("expert-order", text, _EXPERT_HINT, call, facts)


def drop_tensor(name: str) -> Iterator[Mutation]:
    """Replace a tensor by what makes it do nothing: zeros, ones, minus infinity."""
    last = name.rpartition(".")[2]
    if "bias" in last:
        text, hint = f"without {name}", f"The {name} was dropped."
        yield Mutation("bias-dropped", text, hint, CallMutation({name: Filled(0.0)}), {"parameter": name})
        return
    for value, kind, role in (
        (0.0, "parameter-missing", "What is added by it"),
        (1.0, "weight-missing", "The multiplication by it"),
        (_MINUS_INFINITY, "parameter-missing", "What takes part in a softmax by it"),
    ):
        shown = "minus infinity" if value < 0 else f"{value:g}"
        text, hint = f"with {shown} in the place of {name}", f"{role} is missing: {name}."
        facts = {"parameter": name, "value": value}
        yield Mutation(kind, text, hint, CallMutation({name: Filled(value)}), facts)


def drop_biases_of_cells(names: Iterable[str]) -> Iterator[Mutation]:
    """Leave out one of the two biases of all recurrent cells, which libraries add up or have but one of."""
    found = [(name, match) for name in names if (match := _RECURRENT.search(name)) and "bias" in match[0]]
    for kind in ("ih", "hh"):
        of_kind = [name for name, match in found if match[1] == kind]
        if len(of_kind) > 1:
            text, hint = f"without bias_{kind} of all cells", "Of the two biases of a cell one was dropped."
            call = CallMutation(dict.fromkeys(of_kind, Filled(0.0)))
            yield Mutation("bias-dropped", text, hint, call, {"parameters": of_kind})


def reorder_gates(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Mutation]:
    """Put the gates of recurrent cells in any order, of all cells and of each."""
    cells: dict[str, list[str]] = {}
    for name in shapes:
        if match := _RECURRENT.search(name):
            cells.setdefault(name[: match.start()] + match[2], []).append(name)
    every = [name for names in cells.values() for name in names]
    for names in [every, *cells.values()] if len(cells) > 1 else cells.values():
        sizes = {shapes[name][0] for name in names}
        for count in (n for n in _GATES if len(sizes) == 1 and not max(sizes) % n):
            blocks = np.arange(max(sizes)).reshape(count, -1)
            for order in [*itertools.permutations(range(count))][1:]:
                flat = np.ascontiguousarray(blocks[list(order)].reshape(-1))
                tensors: dict[str, Edit] = {name: Ordered(0, flat) for name in names}
                which = "all cells" if names is every else " and ".join(names)
                text = f"with the {count} gates of {which} in the order {listed(order, count)}"
                hint = (
                    "Gates of a cell lie in another order: i, f, g, o in one library, i, g, f, o in another."
                )
                facts = {"parameters": names, "order": list(order)}
                yield Mutation("parameter-order", text, hint, CallMutation(tensors), facts)


def take_other_tensors(
    rerun: Rerun, shapes: Mapping[str, tuple[int, ...]], used: Container[str]
) -> Iterator[Mutation]:
    """Take another tensor of the module of the same shape in the place of one, or exchange the two.

    One of them has to be used until the tensor in question is made. One whose numbers all lie between 0 and 1
    is also replaced by what it lacks to 1, as a share of two terms.
    """
    hint = "The weights of another layer are used: queries' for keys', one head's for all, one norm's twice."
    names_by_shape: dict[tuple[int, ...], list[str]] = {}
    values: dict[str, Values] = {}
    shapes = {name: shape for name, shape in shapes.items() if 1 < math.prod(shape) <= _LARGEST_EXCHANGED}
    for name, shape in shapes.items():
        names_by_shape.setdefault(shape, []).append(name)
    for names in names_by_shape.values():
        pairs_of_used = (pair for pair in itertools.combinations(names, 2) if any(n in used for n in pair))
        for one, other in itertools.islice(pairs_of_used, _MOST_EXCHANGED):
            for name in (one, other):
                if name not in values:
                    values[name] = rerun.read_tensor(name)
            if np.array_equal(values[one], values[other]):
                continue
            pairs = {one: values[other]}, {other: values[one]}, {one: values[other], other: values[one]}
            for pair in pairs:
                tensors: dict[str, Edit] = {name: Replaced(value) for name, value in pair.items()}
                (its, *rest), another = pair, other if one in pair else one
                text = (
                    f"with {one} and {other} exchanged" if rest else f"with {another} in the place of {its}"
                )
                facts = {"parameters": [its, another]}
                yield Mutation("other-weights", text, hint, CallMutation(tensors), facts)
    for name in (name for name in shapes if name in used):
        share = values.get(name)
        share = rerun.read_tensor(name) if share is None else share
        if share.size > 1 and share.min() >= 0 and share.max() <= 1 and np.unique(share).size > 1:
            text = f"with 1 - {name} in the place of {name}"
            hint = "Two terms are mixed the other way round: what is a share of one is taken of the other."
            call = CallMutation({name: Replaced(1 - share)})
            yield Mutation("term-exchanged", text, hint, call, {"parameter": name})


def take_tensors_of_alike(rerun: Rerun, used: Container[str]) -> Iterator[Mutation]:
    """Take the tensors of another module of the same class: all of them, or one that is used alone."""
    alike = [names for names in rerun.alike if any(name in used for name in names)]
    for names in alike[:_MOST_ALIKE]:
        groups = [names, *({own: other} for own, other in names.items() if len(names) > 1 and own in used)]
        for group in groups:
            tensors: dict[str, Edit] = {own: OfModel(other) for own, other in group.items()}
            text = f"with {' and '.join(group.values())} in the place of its {' and '.join(group)}"
            hint = "The weights of another layer, or of another module of this one, were loaded or are used."
            facts = {"parameters": list(group), "of": list(group.values())}
            yield Mutation("other-weights", text, hint, CallMutation(tensors), facts)


def cut_tensor(context: PairContext, name: str, shape: tuple[int, ...]) -> Iterator[Mutation]:
    """Leave out a part of a tensor along one of its first two axes, or take another part in its place.

    Parts are 2, 3, 4 or 8 equal ones, and queries, keys and values of all heads one after the other.
    """
    for axis, size in enumerate(shape[:2]):
        cuts = [[at * size // n for at in range(n + 1)] for n in _PARTS if size % n == 0 and size > n]
        query = (context.heads or 0) * (context.head_dim or 0)
        key = (size - query) // 2
        if 0 < query < size and size == query + 2 * key and key != query:
            cuts.append([0, query, query + key, size])
        for cut in cuts:
            parts = list(itertools.pairwise(cut))
            for start, stop in parts:
                where = f"{start} to {stop - 1} of axis {axis} of {name}"
                is_bias = "bias" in name.rpartition(".")[2]
                kind = "bias-dropped" if is_bias else "partial-sum" if axis else "parameter-missing"
                hint = f"A part of {name} was not loaded, or not looked at."
                facts = {"parameter": name, "axis": axis, "start": start, "stop": stop}
                call = CallMutation({name: Cleared(axis, start, stop)})
                yield Mutation(kind, f"without {where}", hint, call, facts)
                for other, end in parts:
                    is_near = len(parts) < _MANY_PARTS or abs(other - start) == stop - start
                    if other != start and end - other == stop - start and is_near:
                        order = np.arange(size)
                        order[start:stop] = np.arange(other, end)
                        text = f"with {other} to {end - 1} in the place of {where}"
                        hint = (
                            f"One part of {name} was loaded twice, as one rank's or one shard's for another."
                        )
                        call = CallMutation({name: Ordered(axis, order)})
                        yield Mutation("other-weights", text, hint, call, {**facts, "other": other})


def reorder_blocks(name: str, shape: tuple[int, ...]) -> Iterator[Mutation]:
    """Put an axis of a tensor in an order of equal blocks: taken in turn, reversed, 3 or 4 in any order."""
    for axis, size in enumerate(shape):
        same = np.arange(size)
        for count in (n for n in range(3, min(size // 2, _MOST_BLOCKS) + 1) if size % n == 0):
            blocks = same.reshape(count, -1)
            orders = {
                f"taken in turn from {count} blocks": blocks.T,
                f"reversed within {count} blocks": blocks[:, ::-1],
                f"with its {count} blocks reversed": blocks[::-1],
            }
            if count <= _PERMUTED:
                for order in itertools.permutations(range(count)):
                    orders[f"with its {count} blocks in the order {', '.join(map(str, order))}"] = blocks[
                        list(order)
                    ]
            for how, order_of_all in orders.items():
                flat = np.ascontiguousarray(order_of_all.reshape(-1))
                if not np.array_equal(flat, same):
                    yield _reorder({name: Ordered(axis, flat)}, how)


def reorder_tensor(context: PairContext, name: str, shape: tuple[int, ...]) -> Iterator[Mutation]:
    """Put an axis of a tensor in another order; exchange two axes of it."""
    for axis, size in enumerate(shape):
        is_of_experts = not axis and find_expert_tensors(context, {name: shape}).get(name) == 1
        for how, edit in _usual_orders(context, axis, size):
            mutation = _reorder({name: edit}, how)
            yield replace(mutation, kind="expert-order", hint=_EXPERT_HINT) if is_of_experts else mutation
    for first, second in itertools.combinations(range(len(shape)), 2):
        if shape[first] == shape[second] > 1:
            text = f"with {name} transposed"
            hint = "A square weight lies the other way in the checkpoint, or in the layer."
            call = CallMutation({name: Transposed((first, second))})
            yield Mutation("weight-transposed", text, hint, call, {"parameter": name})


def reorder_tensors_together(
    context: PairContext, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Mutation]:
    """Put an axis in the same order in all tensors that have it, such as a weight and its bias."""
    axes_by_size: dict[int, dict[str, int]] = {}
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            axes_by_size.setdefault(size, {}).setdefault(name, axis)
    for size, axes in axes_by_size.items():
        if len(axes) > 1:
            for how, edit in _usual_orders(context, 0, size):
                yield _reorder({name: Ordered(axis, edit.order) for name, axis in axes.items()}, how)


def _reorder(edits: Mapping[str, Ordered], how: str) -> Mutation:
    kind, hint = "parameter-order", _ORDER_HINT
    if how.startswith("rolled"):
        kind, hint = "parameter-shift", "A table, or a weight, is read from another place."
    axes = ", ".join(f"axis {edit.axis} of {name}" for name, edit in edits.items())
    tensors: dict[str, Edit] = dict(edits)
    facts = {"parameters": list(edits), "order": how}
    return Mutation(kind, f"with {axes} {how}", hint, CallMutation(tensors), facts)


def _usual_orders(context: PairContext, axis: int, size: int) -> Iterator[tuple[str, Ordered]]:
    """Usual orders of an axis that are not its own, each once, with a text."""
    same = np.arange(size)
    orders = {
        "reversed": same[::-1],
        "rolled by one": np.roll(same, 1),
        "rolled by one back": np.roll(same, -1),
    }
    if size % 2 == 0:
        orders |= {
            "in exchanged halves": np.roll(same, size // 2),
            "with its halves put alternately": same.reshape(2, -1).T.reshape(-1),
            "with alternate ones put into halves": same.reshape(-1, 2).T.reshape(-1),
        }
    heads, head_dim = context.heads, context.head_dim
    if heads and head_dim and size % (heads * head_dim) == 0:
        by_head, by_block = same.reshape(-1, heads, head_dim), same.reshape(heads, -1, head_dim)
        orders |= {
            "in reversed order of heads": by_head[:, ::-1].reshape(-1),
            "with its blocks put into heads": by_head.transpose(1, 0, 2).reshape(-1),
            "with its heads put into blocks": by_block.transpose(1, 0, 2).reshape(-1),
        }
    known: list[Values] = [same]
    for name, order in orders.items():
        if not any(np.array_equal(order, other) for other in known):
            known.append(order)
            yield name, Ordered(axis, np.ascontiguousarray(order))


def take_settings_of_target(context: PairContext, rerun: Rerun) -> Iterator[Mutation]:
    """Take the settings of the target's module that its archive has and the reference's has otherwise."""
    sides = (context.reference_archive, context.target_archive)
    ours, theirs = (archive.info.modules.get(rerun.site) for archive in sides)
    if ours is None or theirs is None:
        return
    for name, value in ours.settings.items():
        other = theirs.settings.get(name, value)
        if other == value or not _is_exchangeable(value, other):
            continue
        kind, hint = classify_setting(name, rerun.class_name)
        if kind == "setting-differs" and isinstance(value, float):
            kind = "factor"
        text = f"with {other!r} in the place of {value!r} for its setting {name}, as the target has it"
        facts = {"setting": name, "reference": value, "target": other}
        yield Mutation(kind, text, hint, CallMutation(settings={name: other}), facts)


def _is_exchangeable(value: Any, other: Any) -> bool:
    """Whether a setting can have another value: both are numbers, switches, words, or nothing."""
    return all(one is None or isinstance(one, (bool, int, float, str)) for one in (value, other))


def mutate_settings(rerun: Rerun) -> Iterator[Mutation]:
    """Give each setting another usual value."""
    for name, value in rerun.settings.items():
        kind, hint = classify_setting(name, rerun.class_name)
        for other in (*_other_values(value), *_other_distances(kind, value)):
            shown = "nothing" if other is None else f"{other:g}" if isinstance(other, float) else repr(other)
            text = f"with {shown} in the place of {value!r} for its setting {name}"
            facts = {"setting": name, "reference": value, "target": other}
            yield Mutation(kind, text, hint, CallMutation(settings={name: other}), facts)


def _other_values(value: Any) -> Iterator[Any]:
    """Other values of a setting that are usual; None is no value at all."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from dict.fromkeys((value - 1, value + 1, *([0] if value else []), None))
    elif isinstance(value, float):
        yield None
        usual = _EPS if abs(value) < SMALLEST_FITTED else (*_USUAL_NUMBERS, -value)
        yield from (other for other in usual if other != value)
    elif isinstance(value, (list, tuple)):
        for word in dict.fromkeys(value):
            yield type(value)([word] * len(value))


def _other_distances(kind: str, value: Any) -> Iterator[int]:
    """Doublings and halvings of how far positions are told apart, or seen, beside the next numbers."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if kind not in ("position-offset", "attention-mask") or not is_number:
        return
    for doublings in range(1, _FURTHEST + 1):
        halved = [value >> doublings] if value % (1 << doublings) == 0 else []
        yield from (other for other in (value << doublings, *halved) if abs(other - value) > 1)


def mutate_arguments(context: PairContext, rerun: Rerun) -> Iterator[Mutation]:
    """Leave out each tensor that the module is given, or change it.

    1. Any is left out, and moved by one along an axis.
    2. A mask sees another extent; it is zeros if it is of floats, else ones.
    3. Other floats are zeros.
    4. Other whole numbers are one more or less; indices only if they stay in the range of their table.
    5. Of positions and masks the first slice of an axis stands for all, or the axis is turned round; of a
       row that begins with 0, as where packed sequences begin, the ends alone are left.
    6. One stands in the place of another of its kind and shape, or both are exchanged.
    """
    for name, argument in rerun.arguments.items():
        short = name.removeprefix("input.")
        role, kind, hint = next(entry for entry in _ARGUMENTS if entry[0] in short)
        edits: list[tuple[str, str, Edit]] = [(kind, f"without its {short}", Absent())]
        if role == "mask" and argument.kind != "int" and len(argument.shape) > 1:
            edits += [
                (kind, f"where its {short} has {EXTENT_TEXTS[extent]}", Masked(extent))
                for extent in MASK_EXTENTS
            ]
        if argument.kind == "float":
            edits.append((kind, f"with zeros for its {short}", Filled(0.0)))
        elif role == "mask":
            edits.append((kind, f"with ones for its {short}", Filled(1.0)))
        elif argument.kind == "int":
            edits += [
                (kind if role else "index-differs", f"with its {short} {step:+d}", Added(step))
                for step in (1, -1)
                if role or _is_in_range(context, rerun, argument, step)
            ]
        edits += [
            (shift_kind, f"with its {short} {text}", edit)
            for shift_kind, text, edit in _shifts(argument.shape)
        ]
        if role and (argument.kind == "int" or role == "mask"):
            edits += _orders_of_places(argument, short, kind)
        if argument.kind == "int" and len(argument.shape) == 1 < argument.shape[0] - 1:
            ends = Ordered(0, np.array([0, argument.shape[0] - 1]))
            if not argument.lowest:
                text = f"with the first and the last of its {short} alone, as of one sequence"
                edits.append(("attention-mask", text, ends))
        for edit_kind, text, edit in edits:
            call = CallMutation(arguments={name: edit})
            facts = {"argument": short}
            if isinstance(edit, Absent) and _is_not_handed_on(context, rerun, name):
                facts["not_given_to"] = rerun.site
            yield Mutation(edit_kind, text, _OF_EXTENT if isinstance(edit, Masked) else hint, call, facts)


def exchange_arguments(rerun: Rerun) -> Iterator[Mutation]:
    """Give the module one argument in the place of another of its kind and shape, or exchange both."""
    arguments = list(rerun.arguments.items())
    for (one, first), (other, second) in itertools.islice(
        itertools.combinations(arguments, 2), _MOST_EXCHANGED
    ):
        if (first.kind, first.shape) != (second.kind, second.shape):
            continue
        hint = "Arguments stand in each other's place, or one is given twice."
        names = one.removeprefix("input."), other.removeprefix("input.")
        for calls, text in (
            ({one: other}, f"with its {names[1]} in the place of {names[0]}"),
            ({other: one}, f"with its {names[0]} in the place of {names[1]}"),
            ({one: other, other: one}, f"with its {names[0]} and {names[1]} exchanged"),
        ):
            call = CallMutation(arguments=calls)
            yield Mutation("operand-exchanged", text, hint, call, {"arguments": list(names)})


def _orders_of_places(argument: Argument, short: str, kind: str) -> Iterator[tuple[str, str, Edit]]:
    """Other orders of whole numbers or of a mask: kind, text, edit."""
    for axis, size in enumerate(argument.shape):
        if size < 2:
            continue
        if axis < len(argument.shape) - 1:
            text = f"with the first slice of its {short} for all on axis {axis}"
            yield kind, text, Ordered(axis, np.zeros(size, int))
        yield kind, f"with its {short} reversed on axis {axis}", Ordered(axis, np.arange(size)[::-1].copy())


def _is_not_handed_on(context: PairContext, rerun: Rerun, name: str) -> bool:
    """Whether the target's module is given something, but not this argument, as the reference's is.

    In a graph nobody hands anything on: a module takes what its own nodes do.
    """
    if "graph" in context.target_archive.run:
        return False
    key = replace(context.reference.key, site=rerun.site, slot=name, call=0)
    others = [r for r in context.target_archive.records if r.key.site == rerun.site]
    is_given = any(record.key.slot.startswith("input.") for record in others)
    return is_given and key.text in context.reference_archive and key.text not in context.target_archive


def _is_in_range(context: PairContext, rerun: Rerun, argument: Argument, step: int) -> bool:
    """Whether indices plus a number are still indices of the table that they are looked up in.

    Kernels that do not check them read memory that nobody has written. The table is the smallest one that
    has all of them: a tensor of the module, by its first axis, or the experts of the configuration.
    """
    if argument.lowest is None or argument.highest is None:
        return False
    sizes = [shape[0] for shape in rerun.tensors.values() if shape]
    sizes.append(context.experts)
    size = min((size for size in sizes if size > argument.highest), default=0)
    return argument.lowest + step >= 0 and argument.highest + step < size


def mutate_results(rerun: Rerun) -> Iterator[Mutation]:
    """Replace the result of each call within by zeros, move it by one, or exchange it with another one."""
    names_by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, shape in rerun.results.items():
        names_by_shape.setdefault(shape, []).append(name)
        hint = f"What {name} returns is not added, or not looked at."
        call = CallMutation(results={name: Filled(0.0)})
        yield Mutation("term-missing", f"with zeros for the result of {name}", hint, call, {"call": name})
        for kind, shift, edit in _shifts(shape):
            text = f"with the result of {name} {shift}"
            hint = "Tokens are one off: padding, a cache, a convolution."
            yield Mutation(kind, text, hint, CallMutation(results={name: edit}), {"call": name})
    for names in names_by_shape.values():
        for number, one in enumerate(names):
            for other in names[number + 1 : number + 1 + _NEIGHBOURS]:
                for its, another in ((one, other), (other, one)):
                    text = f"with the result of {another} in the place of that of {its}"
                    hint = f"The result of {another} is used where that of {its} has to be."
                    call = CallMutation(results={its: another})
                    yield Mutation("operand-exchanged", text, hint, call, {"calls": [its, another]})
                text = f"with the results of {one} and {other} exchanged"
                hint = f"{one} and {other} stand in each other's place."
                call = CallMutation(results={one: other, other: one})
                yield Mutation("results-order", text, hint, call, {"calls": [one, other]})


def _shifts(shape: tuple[int, ...]) -> Iterator[tuple[str, str, Edit]]:
    """Moves by one index along each axis but the last: kind, text, edit."""
    for axis, size in enumerate(shape[:-1]):
        if size > 2:
            kind = "token-shift" if axis == len(shape) - 2 else "axis-shift"
            for by in (1, -1):
                where = f"one index {'behind' if by > 0 else 'ahead'} on axis {axis}"
                yield kind, where, Shifted(axis, by)
                yield kind, f"{where}, the other end coming in", Ordered(axis, np.roll(np.arange(size), by))
