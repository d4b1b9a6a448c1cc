"""Entries of two model configurations that differ, those that explain a divergence first."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

ABSENT: Final = "absent"


class Cause(NamedTuple):
    """The effect of entries of one kind.

    Attributes:
        names: Globs over the last part of an entry's name.
        why: The effect of a difference.
    """

    names: tuple[str, ...]
    why: str


# fmt: off
# From what changes most to what changes least (PRE-4); an entry that fits none may be harmless.
CAUSES: Final = (
    Cause(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "num_hidden_layers",
            "n_layer",
            "num_attention_heads",
            "n_head",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "num_*experts*",
            "n_routed_experts",
            "n_shared_experts",
            "layer_types",
            "moe_intermediate_size",
        ),
        "the two are not the same architecture",
    ),
    Cause(("quantization_config*", "quant_method", "bits", "group_size"), "weights are not the same numbers"),
    Cause(
        (
            "rope_*",
            "rotary_*",
            "partial_rotary_factor",
            "factor",
            "*_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale*",
            "long_factor",
            "short_factor",
            "original_max_position_embeddings",
            "mrope_section",
            "position_embedding_type",
            "alibi*",
        ),
        "every position is rotated by other angles",
    ),
    Cause(("hidden_act*", "activation_function", "act_fn", "mlp_hidden_act"), "another activation function"),
    Cause(
        (
            "attn_scale",
            "query_pre_attn_scalar",
            "attention_multiplier",
            "*softcap*",
            "sliding_window*",
            "use_sliding_window",
            "max_window_layers",
            "attention_chunk_size",
            "use_qk_norm",
            "qk_norm*",
            "scale_attn*",
            "no_rope_layers",
            "attention_sinks",
            "is_causal",
        ),
        "attention weighs or sees other tokens",
    ),
    Cause(("*norm*eps*", "layer_norm_epsilon", "*_epsilon", "eps"), "norms divide by another number"),
    Cause(
        (
            "norm_topk_prob",
            "routed_scaling_factor",
            "scoring_func",
            "topk_method",
            "n_group",
            "topk_group",
            "router_*",
            "num_experts_per_tok*",
            "num_selected_experts",
            "top_k",
        ),
        "tokens go to other experts, or with other weights",
    ),
    Cause(
        ("embedding_multiplier", "residual_multiplier", "logits_scal*", "scale_*", "*_multiplier", "*_scale"),
        "a constant factor differs",
    ),
    Cause(("tie_word_embeddings",), "the output projection has other weights"),
    Cause(("*bias", "*_bias"), "a bias is there on one side only"),
    Cause(("*dropout*", "*_pdrop", "layerdrop"), "matters only in training mode"),
    Cause(("max_position_embeddings", "n_positions"), "tables of positions end elsewhere"),
    Cause(("*_token_id", "*_token_ids", "*_token_index"), "matters where the model looks for that token"),
)
_HARMLESS: Final = (
    "_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "dtype", "id2label*",
    "label2id*",
    "initializer_*", "is_encoder_decoder", "model_type", "output_*", "pretraining_tp", "problem_type",
    "return_dict*", "torch_dtype", "transformers_version", "use_cache", "_attn_implementation*",
    "attn_implementation",
)
# fmt: on
_SAME_ACTIVATION: Final = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_python": "gelu"}
_ROTARY: Final = ("rope_parameters.", "rope_scaling.")


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """One entry that differs.

    Attributes:
        name: Name of the entry; that of a nested one is joined by dots.
        reference: JSON value of the reference, "absent" if it has none.
        target: The same of the target.
        rank: Place of its cause in `CAUSES`, or the count of these.
        why: The effect of the difference, "" if it is not known.
    """

    name: str
    reference: Any
    target: Any
    rank: int
    why: str


def config_differences(reference: Mapping[str, Any], target: Mapping[str, Any]) -> list[ConfigDifference]:
    """List entries whose values differ, those that explain a divergence first.

    What differs in spelling alone is equal: rotary settings at the top and in `rope_parameters`, two names
    of one activation, a size that is left out and follows from others.

    Example:
        >>> [(d.name, d.why) for d in config_differences({"use_cache": 1, "eps": 1e-5}, {"eps": 1e-6})]
        [('eps', 'norms divide by another number')]
    """
    ours, theirs = _flat(reference), _flat(target)
    differences = []
    for name in {**ours, **theirs}:
        rank, why = _cause(name)
        one, other = ours.get(name, ABSENT), theirs.get(name, ABSENT)
        if (one, other) in ((None, ABSENT), (ABSENT, None)):
            continue
        if rank == len(CAUSES) and ABSENT in (one, other):
            continue  # another version of the same configuration class has other entries
        if not _is_equal(one, other) and not _fits(name, _HARMLESS):
            differences.append(ConfigDifference(name, one, other, rank, why))
    return sorted(differences, key=lambda d: d.rank)


def _cause(name: str) -> tuple[int, str]:
    for rank, cause in enumerate(CAUSES):
        if _fits(name, cause.names):
            return rank, cause.why
    return len(CAUSES), ""


def _fits(name: str, globs: tuple[str, ...]) -> bool:
    last = name.rpartition(".")[2]
    return any(fnmatch.fnmatchcase(last, glob) or fnmatch.fnmatchcase(name, glob) for glob in globs)


def _is_equal(one: object, other: object) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    entries = dict(_entries(config, ""))
    heads, hidden = entries.get("num_attention_heads"), entries.get("hidden_size")
    if isinstance(heads, int) and heads:
        if entries.get("num_key_value_heads") is None:
            entries["num_key_value_heads"] = heads
        if isinstance(hidden, int) and entries.get("head_dim") is None:
            entries["head_dim"] = hidden // heads
    return entries


def _entries(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = prefix + str(key)
        if isinstance(value, Mapping):
            yield from _entries(value, f"{name}.")
            continue
        for rotary in _ROTARY:
            if name.startswith(rotary):
                name = name.removeprefix(rotary)
                name = "rope_type" if name == "type" else name
        if name in ("rope_scaling", "rope_parameters") and value is None:
            name, value = "rope_type", "default"
        if isinstance(value, str) and "act" in name:
            value = _SAME_ACTIVATION.get(value, value)
        yield name, value
