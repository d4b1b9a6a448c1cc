"""What a number equals: sizes and settings of the model, their roots and inverses, and common constants."""

from __future__ import annotations

import math
from typing import Final

from tensorcap.diagnosis.exhibit import Exhibit

_SETTINGS: Final = {  # by the names that configurations have for them; those that only count are further down
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
_COUNTS: Final = {
    "hidden_size": ("d_model", "n_embd"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_selected_experts", "top_k"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "intermediate_size": ("d_ff", "ffn_dim", "n_inner"),
    "vocab_size": (),
}
_PLAIN: Final = (
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
HINTS: Final = {
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


def named(value: float, exhibit: Exhibit, tolerance: float) -> tuple[str, ...]:
    """Names of the constants that a factor equals, the most telling first.

    Args:
        value: The factor, positive.
        exhibit: Where the sizes of the model are known from.
        tolerance: How far it may be from them, relative.
    """
    found = [text for number, text in _known(exhibit) if abs(value / number - 1) <= tolerance]
    return tuple(dict.fromkeys(found))[:4]


def hint_of(names: tuple[str, ...]) -> str:
    """The usual mistake behind a factor of those names; "" where there is none."""
    for name in names:
        for part, hint in HINTS.items():
            if part == name or (len(part) > 3 and part in name):
                return hint
    return ""


def _known(exhibit: Exhibit) -> list[tuple[float, str]]:
    known: list[tuple[float, str]] = []
    for name, others in _SETTINGS.items():
        value = exhibit.number(name, *others)
        if value is not None and value > 0 and value != 1:
            known += _powers(value, name)
    hidden, head_dim = exhibit.number("hidden_size", "d_model", "n_embd"), exhibit.head_dim
    if head_dim and head_dim > 1:
        known += _powers(head_dim, "head_dim")
        if hidden:
            ratio = math.sqrt(hidden / head_dim)
            known += [(ratio, "sqrt(hidden_size / head_dim)"), (1 / ratio, "sqrt(head_dim / hidden_size)")]
    counts = {name: exhibit.number(name, *others) for name, others in _COUNTS.items()}
    counts["num_attention_heads"] = exhibit.heads
    if exhibit.heads and exhibit.kv_heads:
        counts["heads / key heads"] = exhibit.heads / exhibit.kv_heads
    if counts["hidden_size"] is None and exhibit.r.ndim:
        counts["the number of channels"] = exhibit.r.shape[-1]
    for name, count in counts.items():
        if count and count > 1:
            known += _powers(count, name)
    known += _PLAIN
    return known


def _powers(value: float, name: str) -> list[tuple[float, str]]:
    inner = f"({name})" if " " in name else name
    root = math.sqrt(value)
    return [(value, name), (1 / value, f"1/{inner}"), (root, f"sqrt({name})"), (1 / root, f"1/sqrt({name})")]
