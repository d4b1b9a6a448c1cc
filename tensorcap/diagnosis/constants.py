"""Name the constant that a factor equals: sizes and settings of the model, their roots, common numbers."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap_formats.float_formats import rounded

_MOST_NAMES: Final = 4  # names that are given to one factor
_DEVIATIONS: Final = 4.0  # standard errors that a factor may be from the constant that it is
_NARROW: Final = ("bfloat16", "float16")
_LEAST_PART: Final = (
    4  # letters of a name that is looked for within others, such as `hidden_size` in its root
)
_SETTINGS: Final = {  # numbers of the configuration, and other names for each
    "embedding_multiplier": (),
    "residual_multiplier": (),
    "attention_multiplier": (),
    "logits_scaling": (),
    "logit_scale": (),
    "routed_scaling_factor": ("router_scaling_factor", "moe_routed_scaling_factor"),
    "query_pre_attn_scalar": (),
    "attention_factor": (),
    "scaling_factor": (),
    "factor": (),
}
_COUNTS: Final = {  # sizes of the configuration, and other names for each; they come behind the settings
    "hidden_size": ("d_model", "n_embd"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_selected_experts", "top_k"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "intermediate_size": ("d_ff", "ffn_dim", "n_inner"),
    "vocab_size": (),
}
_NO_SCALES: Final = ("vocab_size", "intermediate_size", "num_")  # sizes that no model multiplies values by
_PLAIN: Final = (  # constants that do not depend on the model; they come last
    (2.0, "2"),
    (0.5, "1/2"),
    (4.0, "4"),
    (0.25, "1/4"),
    (3.0, "3"),
    (1 / 3, "1/3"),
    (8.0, "8"),
    (0.125, "1/8"),
    (math.sqrt(2), "sqrt(2)"),
    (math.sqrt(0.5), "1/sqrt(2)"),
    (math.log2(math.e), "log2(e)"),
    (math.log(2), "ln(2)"),
    (255.0, "255"),
    (1 / 255, "1/255"),
    (1.702, "1.702"),
)
_HINTS: Final = {
    "sqrt(hidden_size)": "The scale of embeddings by the root of the width is applied on one side only.",
    "head_dim": "Scores of attention are scaled by another power of the size of a head.",
    "hidden_size": "Something is scaled by the width of the model on one side only.",
    "num_experts_per_tok": "Weights of experts are averaged on one side and summed on the other.",
    "num_experts": "Weights of experts are averaged on one side and summed on the other.",
    "routed_scaling_factor": "The scale of routed experts is applied on one side only.",
    "embedding_multiplier": "The multiplier of embeddings is applied on one side only.",
    "residual_multiplier": "The multiplier of residuals is applied on one side only.",
    "logits_scaling": "The scale of logits is applied on one side only.",
    "logit_scale": "The scale of logits is applied on one side only.",
    "attention_factor": "The scale of stretched rotary positions (YaRN) is applied on one side only.",
    "2": "Something is added twice, or a half is left out.",
    "1/2": "Something is added once that is added twice in the reference, or a half is put in twice.",
}


def name_factor(value: float, context: PairContext, tolerance: float) -> tuple[str, ...]:
    """Find the constants that a factor equals.

    Args:
        value: The factor, positive, no unit.
        context: For the sizes and settings of the model.
        tolerance: How far it may be from them, relative.

    Returns:
        Names such as `1/sqrt(head_dim)`, the most specific first, at most four.
    """
    names = [text for number, text in _known_constants(context) if abs(value / number - 1) <= tolerance]
    return tuple(dict.fromkeys(names))[:_MOST_NAMES]


def name_rounded_constant(factor: float, context: PairContext, error: float) -> tuple[str, ...]:
    """Find settings and sizes, and roots of them, that one side alone rounds, if models scale by such.

    Args:
        factor: The target's values over the reference's, no unit.
        context: For the sizes and settings of the model.
        error: Standard error of the factor.

    Returns:
        Names such as `that of sqrt(hidden_size) in bfloat16 over sqrt(hidden_size)`, at most four.
    """
    names = []
    for number, text in (*_settings(context), *_sizes(context)):
        if any(count in text for count in _NO_SCALES):
            continue
        for dtype in _NARROW:
            low = float(rounded(np.array(number), dtype))
            for ratio, name in (
                (low / number, f"that of {text} in {dtype} over {text}"),
                (number / low, f"that of {text} over {text} in {dtype}"),
            ):
                if ratio != 1 and abs(factor - ratio) <= _DEVIATIONS * error:
                    names.append(name)
    return tuple(dict.fromkeys(names))[:_MOST_NAMES]


def hint_for_factor(names: tuple[str, ...]) -> str:
    """Look up the usual mistake behind a factor of those names; "" if there is none."""
    for name in names:
        for part, hint in _HINTS.items():
            if part == name or (len(part) >= _LEAST_PART and part in name):
                return hint
    return ""


def _known_constants(context: PairContext) -> list[tuple[float, str]]:
    """List constants with their names: settings, sizes of heads, other sizes, plain numbers."""
    return [*_settings(context), *_sizes(context), *_PLAIN]


def _settings(context: PairContext) -> list[tuple[float, str]]:
    """List settings of the configuration, and powers of them, with their names."""
    known: list[tuple[float, str]] = []
    for name, others in _SETTINGS.items():
        value = context.config_number(name, *others)
        if value is not None and value > 0 and value != 1:
            known += _powers(value, name)
    return known


def _sizes(context: PairContext) -> list[tuple[float, str]]:
    """List sizes of heads, other sizes, and powers of them, with their names."""
    known: list[tuple[float, str]] = []
    hidden, head_dim = context.config_number("hidden_size", "d_model", "n_embd"), context.head_dim
    if head_dim and head_dim > 1:
        known += _powers(head_dim, "head_dim")
        if hidden:
            ratio = math.sqrt(hidden / head_dim)
            known += [(ratio, "sqrt(hidden_size / head_dim)"), (1 / ratio, "sqrt(head_dim / hidden_size)")]
    counts = {name: context.config_number(name, *others) for name, others in _COUNTS.items()}
    counts["num_attention_heads"] = context.heads
    if context.heads and context.kv_heads:
        counts["heads / key heads"] = context.heads / context.kv_heads
    if counts["hidden_size"] is None and context.r.ndim:
        counts["the number of channels"] = context.r.shape[-1]
    for name, count in counts.items():
        if count and count > 1:
            known += _powers(count, name)
    return known


def _powers(value: float, name: str) -> list[tuple[float, str]]:
    """A number, its inverse, its root and the inverse of that, each with its name."""
    inner = f"({name})" if " " in name else name
    root = math.sqrt(value)
    return [(value, name), (1 / value, f"1/{inner}"), (root, f"sqrt({name})"), (1 / root, f"1/sqrt({name})")]
