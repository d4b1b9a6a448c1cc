"""Mutations of the operations that a module's own code does, and of its weights as quantised ones.

They are many, and are tried where nothing else explains a pair.
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
}
_OPTIONS: Final = (  # by the words for an option of an operation: kind, hint; the first that fits counts
    ("* in *float16", "operation-precision", "One operation is done in low precision on one side only."),
    ("ax[ei]s *", "axes-differ", "Statistics, or sums, are taken over other axes."),
    ("* group*", "groups-differ", "Statistics are taken of other groups: per head, per group, or of all."),
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


def mutate_operations(operations: Mapping[str, Operation]) -> list[Mutation]:
    """Let each operation of the module's own code do one of its alternatives; exchange axes of two."""
    mutations = []
    for key, operation in operations.items():
        for alternative in operation.alternatives:
            kind, text = _classify_alternative(operation, alternative)
            call = CallMutation(operations={key: alternative})
            facts = {"operation": operation.name, "place": operation.place, "way": alternative}
            option = _find_option(alternative)
            hint = option[1] if option else _CODE_HINT
            mutations.append(Mutation(kind, f"{text}, in {operation.place}", hint, call, facts))
    for (one, first), (other, second) in itertools.combinations(operations.items(), 2):
        if first.own_axes in second.alternatives and second.own_axes in first.alternatives:
            call = CallMutation(operations={one: second.own_axes, other: first.own_axes})
            text = f"with {second.own_axes} in {first.name} and {first.own_axes} in {second.name}"
            names = {"operations": [first.name, second.name], "place": first.place}
            mutations.append(
                Mutation("axes-differ", f"{text}, in {first.place}", _OPTIONS[0][2], call, names)
            )
    return mutations


def quantise_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Mutation]:
    """Quantise each matrix to 8 or 4 bits, with a scale of all, of each row or column, or of that beside."""
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        for bits, axis, by in itertools.product((8, 4), (0, 1, None), (0, 1, -1)):
            if axis is None and by:
                continue
            scales = "one scale" if axis is None else f"a scale of each {'row' if axis == 0 else 'column'}"
            text = f"with {name} in {bits} bits and {scales}"
            hint = "The weight is quantised on one side only."
            if by:
                text += f", that of the one {'before' if by > 0 else 'behind'} it"
                hint = "Scales of a quantised weight are read one off, or padded on the wrong side."
            facts = {"parameter": name, "bits": bits, "axis": axis, "shift": by}
            call = CallMutation({name: Quantised(bits, axis, by)})
            yield Mutation("quantisation-scales" if by else "quantised", text, hint, call, facts)


def _find_option(alternative: str) -> tuple[str, str] | None:
    """Find kind and hint of an option of an operation; None for other alternatives."""
    return next(
        ((kind, hint) for glob, kind, hint in _OPTIONS if fnmatch.fnmatchcase(alternative, glob)), None
    )


def _classify_alternative(operation: Operation, alternative: str) -> tuple[str, str]:
    """Find the kind of mistake that an alternative is, and its text.

    1. Another extent is a mistake of the mask.
    2. An operand in the place of the result means that the operation is missing; its name says what that is.
    3. Exchanged parts, terms added twice and other signs say it themselves.
    4. Of an option its words say it.
    5. Any other alternative is another operation: a sum for a product, a mean for a sum, an activation.
    """
    name = operation.name
    if alternative in MASK_EXTENTS:
        return "attention-mask", f"where attention has {EXTENT_TEXTS[alternative]}"
    if alternative in ("first", "second"):
        text = f"with the {alternative} operand in the place of the result of {name}"
        for words, kind in _SKIPPED_KINDS.items():
            if any(word in name for word in words.split()):
                return ("offset" if kind == "term-missing" and operation.has_number else kind), text
        return "operation-missing", text
    option = _find_option(alternative)
    if option is not None:
        return option[0], f"with {alternative} in {name}"
    if " and " in alternative:
        return "parts-order", f"with parts {alternative} of {name}, from 0, exchanged"
    if alternative == "twice":
        return "term-twice", f"with the second operand of {name} added twice"
    if alternative == "opposite":
        return "sign", f"with the opposite sign of the second operand of {name}"
    if "mul" in name:
        return "operation-differs", f"with a sum in the place of the product by {name}"
    kind = "factor" if name in ("mean", "sum") else "activation"
    return kind, f"with {alternative} in the place of {name}"
