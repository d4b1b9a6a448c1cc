"""Mutations of the operations that a module's own code does, and of its weights as quantised ones.

They are many, and are tried where nothing else explains a pair: first other options of one operation, then
other operands, and operations in another order.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Mapping
from typing import Final

from tensorcap.adapters import MASK_EXTENTS, CallMutation, Operation, Quantised
from tensorcap.diagnosis.mutations import EXTENT_TEXTS, Mutation

_CODE_HINT: Final = "Look at that line, and at what the target has for it."
_SKIPPED_KINDS: Final[Mapping[str, str]] = {  # kind if an operation is not done, by words of its name
    "clamp clip": "clip-missing",
    "masked where": "attention-mask",
    "silu gelu relu sigmoid tanh softplus exp": "activation-missing",
    "neg": "sign",
    "add sub": "term-missing",
    "mul div": "product-missing",
    "roll": "axis-shift",
    "permute transpose swap move view reshape flip": "layout-differs",
}
_TWICE_KINDS: Final[Mapping[str, str]] = {  # kind if an operation is done twice, by its name
    "mul div truediv true_divide": "product-twice",
    "add sub": "term-twice",
    "silu gelu relu sigmoid tanh softplus exp softmax": "activation",
}
_OPTIONS: Final = (  # by the words for an option of an operation: kind, hint; the first that fits counts
    (
        "heads of * repeated in turn*",
        "attention-heads",
        "Heads of keys are repeated in another order: each by itself, or all in turn.",
    ),
    (
        "part * of its inputs summed",
        "partial-sum",
        "Not all inputs are summed: those of another device, or of the other tiles, are missing.",
    ),
    (
        "one less *",
        "gate-complement",
        "A gate keeps where it has to take: what the one side multiplies by it, the other one by the rest.",
    ),
    (
        "done twice",
        "operation-twice",
        "A step is done twice: in two places, or once on load and once in code.",
    ),
    (
        "taps * apart",
        "dilation-differs",
        "Taps of a convolution are nearer together, or further apart.",
    ),
    ("the smallest ones chosen", "router-differs", "The smallest ones are chosen, and not the largest."),
    ("the other order of choice", "router-differs", "Sorted the other way round."),
    ("[<>=!]* for *", "attention-mask", "A comparison is another one: what is equal counts, or does not."),
    ("`*` of its masks", "attention-mask", "Two masks are joined otherwise."),
    ("* of its numbers", "sign", "Distances, or places, have the opposite sign."),
    ("* of its places exchanged", "index-order", "Places are those of the other axis: rows for columns."),
    ("its places counted *", "position-offset", "Places are counted for all alike, whatever is padded."),
    ("its places reversed *", "index-order", "Places are counted from the other end."),
    (
        "axes * of operand * exchanged",
        "layout-differs",
        "An operand of a product is transposed on one side only.",
    ),
    ("its inputs *", "layout-differs", "Channels of the input lie in another order."),
    ("ax[ei]s * of its *", "layout-differs", "Axes are exchanged before the elements are laid out anew."),
    ("* repeated*", "layout-differs", "Repeated as a whole on one side, each in its place on the other."),
    (
        "parts *",
        "parts-order",
        "Parts lie in another order: blocks on one side, alternate ones on the other.",
    ),
    ("the ones b* taken", "slice-shift", "A slice begins one index too early or too late."),
    (
        "one * at the * taken",
        "slice-extent",
        "A slice is one longer or shorter: a special token, or the newest one, counts on one side only.",
    ),
    ("all of them * taken", "slice-extent", "All are taken where the reference takes a part."),
    (
        "* along axis * taken",
        "slice-order",
        "Another part is taken: the first, the last, a block, alternate ones.",
    ),
    (
        "operand * rolled by *",
        "operand-shift",
        "A term, as a table, is read from one place before or behind.",
    ),
    ("the * of its operands", "operation-differs", _CODE_HINT),
    ("the * the other way round", "operands-order", "Two operands stand in each other's place."),
    ("sums *", "sums-order", "A running sum goes the other way, or leaves the place itself out."),
    (
        "the variance of *",
        "statistics-differ",
        "The variance of a sample on one side, of the whole on the other.",
    ),
    (
        "the standard deviation of *",
        "statistics-differ",
        "The deviation of a sample on one side, of the whole on the other.",
    ),
    ("the * of its operand", "pooling-differs", "Reduced otherwise: the mean, the largest, the sum."),
    ("* of its operand", "function-differs", _CODE_HINT),
    ("softmax along *", "axes-differ", "The softmax runs along another axis."),
    ("* rounded to *float16", "operation-precision", "What goes into an operation is kept in low precision."),
    ("* in *float16", "operation-precision", "One operation is done in low precision on one side only."),
    ("attention that *", "attention-mask", "What is seen: a mask that is left out, causal or both ways."),
    ("ax[ei]s *", "axes-differ", "Statistics, or sums, are taken over other axes."),
    ("* group*", "groups-differ", "Statistics are taken of other groups: per head, per group, or of all."),
    (
        "division by the variance*",
        "statistics-differ",
        "A norm divides by the variance, as where it is folded into the weights before it.",
    ),
    ("multiplication by the deviation", "statistics-differ", "A norm multiplies where it has to divide."),
    ("no division by *", "statistics-differ", "A norm does not divide by the deviation."),
    ("the mean left in", "statistics-differ", "A norm of the root mean square on one side only."),
    ("the mean taken off *", "statistics-differ", "The mean is subtracted in another place."),
    ("eps added to the deviation", "norm-eps", "eps is added behind the root on one side only."),
    ("no weight of the norm", "weight-missing", "The weight of the norm is not looked at."),
    ("one more than the weight *", "norm-with-one-plus", "The norm multiplies by one more than its weight."),
    ("no bias of the norm", "bias-dropped", "The bias of the norm is not looked at."),
    ("statistics of the batch", "batch-statistics", "The norm runs as in training, by what the batch has."),
    ("*taps *", "taps-order", "The kernel lies the other way: convolution or correlation, rows or columns."),
    (
        "padding *",
        "padding-differs",
        'Padding lies on another side, as that of "SAME" does, or has another mode.',
    ),
    (
        "* interpolation*",
        "interpolation-differs",
        "Another mode, or corners that are aligned on one side only.",
    ),
    ("the other way", "axis-shift", "The direction of a roll is turned."),
    (
        "* along axis *",
        "pooling-differs",
        "Pooled otherwise: the first or the last one, the mean or the largest.",
    ),
    ("largest ones", "pooling-differs", "The largest ones are taken, and not their mean."),
    (
        "its operand's last term added to its result",
        "operations-order",
        "A term, as a bias, is added before the function, or behind it.",
    ),
    ("the newest *", "cache-not-written", "The slot of the newest token is not written, or read too early."),
    ("* for *", "factor", "A number in the code is another one."),
)

_LATE: Final = (  # these are many, and come last
    *("layout-differs", "partial-sum", "slice-order", "slice-shift", "operand-shift", "operation-differs"),
    *("activation", "function-differs", "slice-extent", "index-order", "positions-differ"),
)
_OF_CHOICES: Final = ("attention-mask", "router-differs", "position-offset")
_POSITIONS: Final = ("pos", "distance", "bucket", "relative", "rotary", "freq")  # in lines that make places
_ROLES: Final = (  # by a word of the line that is left out: kind, hint; the first that fits counts
    ("state", "state-missing", "A state is not carried on: from chunk to chunk, or from step to step."),
    ("bias", "bias-dropped", "A bias was dropped."),
)
_GATES: Final = ("sigmoid", "softplus", "relu", "silu", "gelu", "tanh", "exp")
_GROUPS: Final = (16, 32, 64, 128)  # weights of a row that share a scale
_LARGEST_EPS: Final = 1e-2
_NUMBERS: Final = (  # by names of operations and of numbers: kind, hint; the first that fits counts
    ("clamp clip minimum maximum hardtanh min max", "clip-differs", "The limit of values is another one."),
    (
        "masked_fill where value fill_value",
        "attention-mask",
        "What stands for masked scores is another number.",
    ),
    ("triu tril diagonal lt le gt ge", "attention-mask", "The mask, or a window, is off by some places."),
    ("topk", "router-differs", "Another count is chosen."),
    ("roll", "axis-shift", "Rolled by another number of places."),
    ("arange", "position-offset", "Positions are counted from another number, or in other steps."),
    ("scaled_dot_product_attention", "attention-scale", "The scale of scores is another one."),
    ("leaky_relu elu celu softplus", "activation-differs", "The activation has another slope or limit."),
    ("add sub radd rsub", "offset", "A number that is added is another one."),
)


def mutate_operations(operations: Mapping[str, Operation]) -> list[Mutation]:
    """Let each operation of the module's own code do one of its alternatives; exchange axes of two.

    Layouts come last, since many of them make the same; where several operations of one name have an
    alternative, it is also done by all of them, as in two lines of which one is copied from the other.
    """
    mutations = []
    alike: dict[tuple[str, str], list[str]] = {}
    for key, operation in operations.items():
        for alternative in operation.alternatives:
            mutations.append(_mutate_operation([key], alternative, operations))
            alike.setdefault((operation.name, alternative), []).append(key)
    for (_, alternative), keys in alike.items():
        if len(keys) > 1:
            mutations.append(_mutate_operation(keys, alternative, operations))
    for (one, first), (other, second) in itertools.combinations(operations.items(), 2):
        if first.own_axes in second.alternatives and second.own_axes in first.alternatives:
            call = CallMutation(operations={one: second.own_axes, other: first.own_axes})
            text = f"with {second.own_axes} in {first.name} and {first.own_axes} in {second.name}"
            names = {"operations": [first.name, second.name], "place": first.place}
            hint = "Statistics, or sums, are taken over other axes."
            mutations.append(Mutation("axes-differ", f"{text}, in {first.place}", hint, call, names))
    return sorted(mutations, key=lambda mutation: mutation.kind in _LATE)


def move_operations(operations: Mapping[str, Operation]) -> Iterator[Mutation]:
    """Do each operation behind a later one, on the result of that, and not in its place."""
    for key, operation in operations.items():
        for at, behind in operation.behind:
            other = operations.get(behind)
            where = f"the call of {behind}" if other is None else f"{other.name} of {other.place}"
            text = f"with {operation.name} of {operation.place} done behind {where}"
            hint = (
                "Two operations are done the other way round: a norm, an activation, a sum, a factor, a gate."
            )
            facts = {"operation": operation.name, "place": operation.place, "behind": where}
            child = _enclosing(operation.child, behind if other is None else other.child)
            facts |= {"child": child} if child else {}
            yield Mutation("operations-order", text, hint, CallMutation(moved={key: (at, behind)}), facts)


def _enclosing(one: str, other: str) -> str:
    """The module that two modules lie within, or that one is; "" if that is the one that was called."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def move_operations_ahead(operations: Mapping[str, Operation]) -> Iterator[Mutation]:
    """Do each operation on an earlier value, with what else it was given, and not in its place."""
    for key, operation in operations.items():
        for at, earlier in operation.ahead:
            shown = _shown_value(earlier, operations)
            text = f"with {operation.name} of {operation.place} done on {shown}"
            hint = "Two steps are done the other way round: a gate, a factor or a sum before a norm."
            facts = {"operation": operation.name, "place": operation.place, "ahead": shown}
            call = CallMutation(moved_ahead={key: (at, earlier)})
            yield Mutation("operations-order", text, hint, call, facts)


def exchange_operands(operations: Mapping[str, Operation]) -> Iterator[Mutation]:
    """Give each operation another value of that shape in the place of an operand."""
    for key, operation in operations.items():
        for at, names in operation.operands.items():
            for name in names:
                shown = _shown_value(name, operations)
                text = f"with {shown} as operand {at + 1} of {operation.name} in {operation.place}"
                hint = "Another tensor is used: from before a step, from behind it, or of another branch."
                facts = {"operation": operation.name, "place": operation.place, "operand": shown}
                call = CallMutation(operands={(key, at): name})
                yield Mutation("operand-exchanged", text, hint, call, facts)


def list_numbers(operations: Mapping[str, Operation]) -> Iterator[tuple[str, str, float]]:
    """List numbers in the code: the operation's key, the number's name, the number."""
    for key, operation in operations.items():
        for name, number in operation.numbers.items():
            yield key, name, number


def classify_number(operation: Operation, name: str, number: float) -> tuple[str, str]:
    """Find the kind of mistake that another number of an operation is, and its hint."""
    is_small = (
        operation.name in ("add", "sub", "clamp", "clip", "maximum") and 0 < abs(number) <= _LARGEST_EPS
    )
    if is_small or name == "eps":
        return "norm-eps", "Another eps; it shows in rows of small values only."
    places = "positions-differ", "Places are counted from another number, or in other steps."
    for words, kind, hint in _NUMBERS:
        if operation.name in words.split() or name in words.split():
            return places if kind == "offset" and _makes_places(operation) else (kind, hint)
    if _makes_places(operation):
        return places
    return "factor", "A number in the code is another one."


def _makes_places(operation: Operation) -> bool:
    """Whether an operation makes whole numbers in a line that speaks of positions or of distances."""
    return operation.is_whole and any(word in operation.line.lower() for word in _POSITIONS)


def _shown_value(name: str, operations: Mapping[str, Operation]) -> str:
    """The name of a value as a text says it: of an operation its place."""
    operation = operations.get(name)
    if operation is not None:
        return f"the result of {operation.name} in {operation.place}"
    return f"its {name.removeprefix('input.')}" if name.startswith("input.") else name.partition(" (")[0]


def _mutate_operation(keys: list[str], alternative: str, operations: Mapping[str, Operation]) -> Mutation:
    operation = operations[keys[0]]
    kind, text = _classify_alternative(operation, alternative, operations)
    if _makes_places(operation) and kind not in _OF_CHOICES:
        kind = "positions-differ"
    option = _find_option(alternative)
    facts = {"operation": operation.name, "place": operation.place, "way": alternative}
    children = {operations[key].child for key in keys}
    if len(children) == 1 and operation.child:
        facts["child"] = operation.child
    text += f", in {operation.place}"
    if len(keys) > 1:
        text += f" and {len(keys) - 1} more of that name"
    call = CallMutation(operations=dict.fromkeys(keys, alternative))
    return Mutation(kind, text, option[1] if option else _CODE_HINT, call, facts)


def quantise_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Mutation]:
    """Quantise each matrix to 8 or 4 bits, with a scale of all, of each row or column, or of groups of a row.

    Scales are given back as they are, as those beside, and those of groups with rows and groups exchanged.
    """
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        for bits, axis, by in itertools.product((8, 4), (0, 1, None), (0, 1, -1)):
            if axis is None and by:
                continue
            scales = "one scale" if axis is None else f"a scale of each {'row' if axis == 0 else 'column'}"
            beside = f", that of the one {'before' if by > 0 else 'behind'} it" if by else ""
            yield _quantise(name, Quantised(bits, axis, by), f"{bits} bits and {scales}{beside}")
        for bits, group in itertools.product((8, 4), _GROUPS):
            if shape[1] % group or shape[1] == group:
                continue
            scales = f"{bits} bits and a scale of each {group} weights of a row"
            yield _quantise(name, Quantised(bits, 0, 0, group), scales)
            yield _quantise(name, Quantised(bits, 0, 1, group), f"{scales}, that of those before them")
            yield _quantise(name, Quantised(bits, 0, -1, group), f"{scales}, that of those behind them")
            exchanged = f"{scales}, given back as if rows and groups were exchanged"
            yield _quantise(name, Quantised(bits, 0, 0, group, is_transposed=True), exchanged)


def _quantise(name: str, edit: Quantised, how: str) -> Mutation:
    hint = "The weight is quantised on one side only."
    if edit.by or edit.is_transposed:
        hint = "Scales of a quantised weight are read one off, in another order, or padded on the wrong side."
    kind = "quantisation-scales" if edit.by or edit.is_transposed else "quantised"
    facts = {"parameter": name, "bits": edit.bits, "axis": edit.axis, "shift": edit.by, "group": edit.group}
    return Mutation(kind, f"with {name} in {how}", hint, CallMutation({name: edit}), facts)


def _role_of_line(line: str) -> tuple[str, str] | None:
    """Find what a term is by the words of its line; None where these don't say it."""
    return next(((kind, hint) for word, kind, hint in _ROLES if word in line.lower()), None)


def _find_option(alternative: str) -> tuple[str, str] | None:
    """Find kind and hint of an option of an operation; None for other alternatives."""
    return next(
        ((kind, hint) for glob, kind, hint in _OPTIONS if fnmatch.fnmatchcase(alternative, glob)), None
    )


def _classify_alternative(
    operation: Operation, alternative: str, operations: Mapping[str, Operation]
) -> tuple[str, str]:
    """Find the kind of mistake that an alternative is, and its text.

    1. Another extent is a mistake of the mask.
    2. An operand in the place of the result means that the operation is missing; its name says what that is.
    3. Exchanged parts, terms added twice and other signs say it themselves.
    4. Of an option its words say it.
    5. Any other alternative is another function: a mean for a sum, an activation.
    """
    name = operation.name
    if alternative in MASK_EXTENTS:
        return "attention-mask", f"where attention has {EXTENT_TEXTS[alternative]}"
    if alternative in ("first", "second"):
        text = f"with the {alternative} operand in the place of the result of {name}"
        dropped = operation.given.get(0 if alternative == "second" else 1, "")
        if "add" in name and dropped in operations:
            role = _role_of_line(operations[dropped].line)
            text += f", without `{operations[dropped].line}`"
            if role is not None:
                return role[0], text
        for words, kind in _SKIPPED_KINDS.items():
            if any(word in name for word in words.split()):
                return ("offset" if kind == "term-missing" and operation.has_number else kind), text
        return "operation-missing", text
    option = _find_option(alternative)
    if option is not None:
        kind = "activation" if option[0] == "axes-differ" and name in _GATES else option[0]
        if kind == "operation-twice":
            kind = next((k for words, k in _TWICE_KINDS.items() if name.strip("_") in words.split()), kind)
        return kind, f"with {alternative} in {name}"
    if " and " in alternative:
        return "parts-order", f"with parts {alternative} of {name}, from 0, exchanged"
    if alternative == "twice":
        return "term-twice", f"with the second operand of {name} added twice"
    if alternative == "opposite":
        return "sign", f"with the opposite sign of the second operand of {name}"
    kind = "factor" if name in ("mean", "sum") else "activation"
    return kind, f"with {alternative} in the place of {name}"
