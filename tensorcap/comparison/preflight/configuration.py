"""Entries of two model configurations that differ, those that explain a divergence first."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tensorcap.comparison.preflight.config_spelling import (
    align_rotary,
    has_text_section,
    normal_form,
    synonyms,
)

ABSENT: Final = "absent"


class Cause(NamedTuple):
    """The effect of entries of one kind.

    Attributes:
        names: Globs over the last part of an entry's name.
        why: The effect of a difference.
        explains: Whether a difference alone can make outputs differ by more than rounding does.
        neutral: Values that mean the same as a configuration without the entry, besides null; None if a
            configuration without it says nothing of it.
    """

    names: tuple[str, ...]
    why: str
    explains: bool = True
    neutral: tuple[object, ...] | None = None


_ROTARY: Final = "every position is rotated by other angles"
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
            "num_*experts",
            "n_routed_experts",
            "n_shared_experts",
            "layer_types",
            "moe_intermediate_size",
        ),
        "the two are not the same architecture",
    ),
    Cause(
        ("quantization_config*", "quant_method", "bits", "group_size"),
        "weights are not the same numbers",
        neutral=(),
    ),
    Cause(("rope_theta",), _ROTARY),
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
        _ROTARY,
        neutral=("default", "absolute", False),
    ),
    Cause(("hidden_act*", "activation_function", "act_fn", "mlp_hidden_act"), "another activation function"),
    Cause(
        ("*softcap*", "sliding_window", "attention_chunk_size", "use_qk_norm", "qk_norm*", "attention_sinks"),
        "attention weighs or sees other tokens",
        neutral=(False,),
    ),
    Cause(
        (
            "attn_scale",
            "query_pre_attn_scalar",
            "attention_multiplier",
            "sliding_window*",
            "_sliding_window*",
            "use_sliding_window",
            "max_window_layers",
            "scale_attn*",
            "no_rope_layers",
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
    Cause(
        ("tie_word_embeddings",),
        "the output projection has other weights",
        neutral=(True, False),  # its class has a default; the weights themselves say it
    ),
    Cause(("*bias", "*_bias"), "a bias is there on one side only"),
    Cause(("*dropout*", "*_pdrop", "layerdrop"), "matters only in training mode", explains=False),
    Cause(
        ("max_position_embeddings", "n_positions"), "tables of positions end elsewhere", explains=False
    ),
    Cause(
        ("*_token_id", "*_token_ids", "*_token_index"),
        "matters where the model looks for that token",
        explains=False,
    ),
)
_HARMLESS: Final = (
    "_name_or_path", "_commit_hash", "architectures", "auto_map", "chunk_size_feed_forward", "dtype",
    "id2label", "label2id", "initializer_*", "is_encoder_decoder", "model_type", "output_*", "pretraining_tp",
    "problem_type", "return_dict*", "torch_dtype", "transformers_version", "use_cache",
    "_attn_implementation*", "attn_implementation",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """One entry that differs.

    Attributes:
        name: Name of the entry; that of a nested one is joined by dots.
        reference: JSON value of the reference, "absent" if it has none.
        target: The same of the target.
        rank: Place of its cause in `CAUSES`, or the count of these.
        why: The effect of the difference, "" if it is not known.
        explains: Whether it alone can make outputs differ by more than rounding does.
    """

    name: str
    reference: Any
    target: Any
    rank: int
    why: str
    explains: bool


def config_differences(reference: Mapping[str, Any], target: Mapping[str, Any]) -> list[ConfigDifference]:
    """List entries whose values differ in meaning, those that explain a divergence first.

    1. Both are brought into one spelling (`config_spelling`); bookkeeping is left out.
    2. Entries of one name are compared. Those that one side alone has are compared with entries of the other
       that mean the same.
    3. What one side still lacks is no difference if the value is as good as none, or if its effect is not
       known. It explains nothing if a configuration without the entry says nothing of it.

    Example:
        >>> [(d.name, d.why) for d in config_differences({"use_cache": 1, "eps": 1e-5}, {"eps": 1e-6})]
        [('eps', 'norms divide by another number')]
    """
    ours, theirs = _entries(reference, target)
    names = (name for name in {**ours, **theirs} if not _is_harmless(name))
    differences = filter(None, (_difference(name, ours, theirs) for name in names))
    return sorted(differences, key=lambda d: d.rank)


def _difference(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> ConfigDifference | None:
    """How an entry differs; None if it does not, or if that is said under its other name."""
    one, other = ours.get(name), theirs.get(name)
    if _is_equal(one, other):
        return None
    if one is not None and other is not None:
        rank, cause = _cause(name)
        return ConfigDifference(name, one, other, rank, cause.why if cause else "", _explains(cause))
    lacking, having = (ours, theirs) if one is None else (theirs, ours)
    value = having[name]
    names = [n for n in sorted(synonyms(name)) if lacking.get(n) is not None]
    if any(_is_equal(value, lacking[n]) for n in names):
        return None
    renamed = next((n for n in names if n not in having), None)
    if renamed is not None and one is None:
        return None  # it is compared under the reference's name
    rank, cause = _cause(name)
    why = cause.why if cause else ""
    if renamed is not None:
        return ConfigDifference(name, one, lacking[renamed], rank, why, _explains(cause))
    if (not _explains(cause) and name not in lacking) or (cause and value in (cause.neutral or ())):
        return None  # an entry that another version of the class does not have, or one as good as none
    is_silent = (
        cause is None or cause.neutral is None or (cause.why == _ROTARY and not _has_base(name, lacking))
    )
    sides = (value, lacking.get(name, ABSENT)) if other is None else (lacking.get(name, ABSENT), value)
    return ConfigDifference(name, *sides, rank, why, _explains(cause) and not is_silent)


def _explains(cause: Cause | None) -> bool:
    return cause is not None and cause.explains


def _has_base(name: str, entries: Mapping[str, Any]) -> bool:
    """Whether the section of a rotary setting says anything of rotary tables."""
    section, dot, _ = name.rpartition(".")
    return f"{section}{dot}rope_theta" in entries


def _entries(
    reference: Mapping[str, Any], target: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of both, spelt alike."""
    has_text = has_text_section(reference), has_text_section(target)
    is_text = has_text[0] != has_text[1]
    ours, our_rotary = normal_form(reference, is_text=is_text)
    theirs, their_rotary = normal_form(target, is_text=is_text)
    rotary = align_rotary(our_rotary, their_rotary)
    sections = our_rotary.keys() & their_rotary.keys()  # what one side has no model for cannot be compared
    one, other = (
        {
            f"{section}{name}": value
            for section in sections
            for name, value in {**entries[section], **settings[section]}.items()
        }
        for entries, settings in zip((ours, theirs), rotary, strict=True)
    )
    return one, other


def _cause(name: str) -> tuple[int, Cause | None]:
    last = name.rpartition(".")[2]
    for rank, cause in enumerate(CAUSES):
        if any(fnmatch.fnmatchcase(last, glob) or fnmatch.fnmatchcase(name, glob) for glob in cause.names):
            return rank, cause
    return len(CAUSES), None


def _is_harmless(name: str) -> bool:
    return any(fnmatch.fnmatchcase(part, glob) for part in name.split(".") for glob in _HARMLESS)


def _is_equal(one: object, other: object) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other
