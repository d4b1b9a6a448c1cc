"""One spelling for model configurations: sections, rotary settings, and names that mean the same.

Versions of a library and other code spell one setting in other ways. `normal_form` undoes what can be undone
with one configuration at hand, `align_rotary` and `synonyms` what needs both (PRE-4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Entries = dict[str, Any]
Rotary = dict[str, Entries]  # by kind of layer, "" for all

# fmt: off
# Names of one setting in configurations of unlike families
SYNONYMS: Final = (
    frozenset(("hidden_size", "n_embd", "d_model", "dim", "model_dim", "embed_dim", "emb_dim")),
    frozenset(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "hidden_dim")),
    frozenset(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers")),
    frozenset(("num_attention_heads", "n_head", "n_heads", "num_heads")),
    frozenset(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv", "num_query_groups",
               "multi_query_group_num", "n_kv_head")),
    frozenset(("head_dim", "d_kv", "kv_channels", "head_size")),
    frozenset(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
               "block_size", "seq_length")),
    frozenset(("hidden_act", "hidden_activation", "activation_function", "act_fn", "mlp_hidden_act",
               "activation")),
    frozenset(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps",
               "norm_epsilon", "eps")),
    frozenset(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "n_experts")),
    frozenset(("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "moe_top_k",
               "moe_topk", "moe_k", "top_k")),
    frozenset(("tie_word_embeddings", "tie_embeddings", "weight_tying")),
)
# Settings of sampling, training and conversion, which no forward in evaluation mode reads
UNREAD: Final = frozenset((
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "prefix",
    "finetuning_task", "task_specific_params", "tokenizer_class", "tf_legacy_loss", "use_bfloat16",
    "torchscript", "gradient_checkpointing", "router_aux_loss_coef", "router_z_loss_coef",
    "router_jitter_noise", "aux_loss_alpha", "seq_aux", "n_past", "output_past", "use_return_dict",
    "num_labels", "cache_implementation",
))
# fmt: on
_TEXT_SECTIONS: Final = ("text_config", "llm_config", "language_config", "text_model_config")
_ACTIVATIONS: Final = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_python": "gelu"}
_SCALING: Final = ("rope_scaling", "rope_parameters")  # the latter is the newer and counts, if there are both
_BASE: Final = ("rope_theta", "rotary_emb_base", "global_rope_theta")
_LOCAL_BASE: Final = ("rope_local_base_freq", "local_rope_theta")  # of layers with a sliding window
_SHARE: Final = ("partial_rotary_factor", "rotary_pct")
_ROPE_TYPES: Final = {"su": "longrope", "mrope": "default"}
# Which layers see all tokens, by entries with a number: every so many, the last or the first of them
_PATTERNS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "sliding_window_pattern": lambda at, every: (at + 1) % every == 0,
    "_sliding_window_pattern": lambda at, every: (at + 1) % every == 0,
    "global_attn_every_n_layers": lambda at, every: at % every == 0,
}
_SAMPLED: Final = 50  # top_k of every configuration of transformers 4, with experts or without
_DEFAULT_ROPE: Final = (
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
)
_ORIGINAL: Final = "original_max_position_embeddings"


def synonyms(name: str) -> frozenset[str]:
    """Return the other names of an entry, within its section.

    Example:
        >>> sorted(synonyms("text_config.num_experts"))[:2]
        ['text_config.moe_num_experts', 'text_config.n_experts']
    """
    section, dot, last = name.rpartition(".")
    return frozenset(
        f"{section}{dot}{other}" for names in SYNONYMS if last in names for other in names if other != last
    )


def normal_form(config: Mapping[str, Any], *, is_text: bool) -> tuple[dict[str, Entries], dict[str, Rotary]]:
    """Spell a configuration as all are spelt.

    1. Nested configurations become sections: their entries have the section's name before their own.
    2. In each, activations have one name, sizes that follow from others are filled in, the layers with a
       sliding window are listed, and what no forward reads is left out.
    3. Rotary settings, wherever they stand, are gathered by kind of layer.

    Args:
        config: As the run recorded it.
        is_text: Whether the entries of the text model of several are moved to the top, since the other
            side's configuration is that of a text model alone.

    Returns:
        The entries of each section, without rotary ones; and the rotary settings of each.
    """
    entries: dict[str, Entries] = {}
    rotary: dict[str, Rotary] = {}
    for section, own in _sections(_merge_text(config) if is_text else config, ""):
        others, rotary[section] = _split_rotary(own)
        entries[section] = _complete(others)
    return entries, rotary


def has_text_section(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of several models, one of them of text."""
    return _find_text(config) is not None


def align_rotary(
    reference: dict[str, Rotary], target: dict[str, Rotary]
) -> tuple[dict[str, Entries], dict[str, Entries]]:
    """Name rotary settings alike in each section: if one side has them by kind of layer, so has the other."""
    ours: dict[str, Entries] = {}
    theirs: dict[str, Entries] = {}
    for section in reference.keys() & target.keys():
        sides = [_by_kind(side[section]) for side in (reference, target)]
        kinds = [*dict.fromkeys(kind for side in sides for kind in side if kind)]
        for named, side in zip((ours, theirs), sides, strict=True):
            if kinds and "" in side:
                side = dict.fromkeys(kinds, side[""])
            named[section] = {
                f"{kind}.{name}" if kind else name: value
                for kind, settings in side.items()
                for name, value in settings.items()
            }
    return ours, theirs


def _by_kind(rotary: Rotary) -> Rotary:
    """Settings by kind of layer; under "" if they are the same for all kinds."""
    first, *others = list(rotary.values()) or [{}]
    return {"": first} if all(other == first for other in others) else dict(rotary)


def _find_text(config: Mapping[str, Any]) -> str | None:
    return next((name for name in _TEXT_SECTIONS if isinstance(config.get(name), Mapping)), None)


def _merge_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    name = _find_text(config)
    if name is None:
        return config
    whole = {key: value for key, value in config.items() if not _is_section(key, value)}
    tied = {key: value for key, value in whole.items() if key == "tie_word_embeddings"}
    return {**whole, **config[name], **tied}  # the whole model ties its own head


def _is_section(name: str, value: object) -> bool:
    return isinstance(value, Mapping) and name.endswith("_config") and name != "quantization_config"


def _sections(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Entries]]:
    """Yield each section's name, with a dot, and its own entries."""
    yield prefix, {name: value for name, value in config.items() if not _is_section(name, value)}
    for name, value in config.items():
        if _is_section(name, value):
            known = _TEXT_SECTIONS[0] if name in _TEXT_SECTIONS else name
            yield from _sections(value, f"{prefix}{known}.")


def _complete(own: Entries) -> Entries:
    """Spell the entries of a section, and fill in what follows from others."""
    has_experts = any("expert" in name for name in own)
    has_choice = any(name in own for name in synonyms("top_k"))  # then top_k is that of sampling
    entries: Entries = {}
    for name, value in _flat(own, ""):
        is_choice = name == "top_k" and has_experts and not has_choice and value != _SAMPLED
        if name in UNREAD and not is_choice:
            continue
        if isinstance(value, str) and "act" in name:
            value = _ACTIVATIONS.get(value, value)
        entries[name] = value
    heads, size = _known(entries, "num_attention_heads"), _known(entries, "hidden_size")
    if heads:
        if _known(entries, "num_key_value_heads") is None:
            entries["num_key_value_heads"] = heads
        if size and _known(entries, "head_dim") is None:
            entries["head_dim"] = size // heads
    _complete_windows(entries)
    return entries


def _complete_windows(entries: Entries) -> None:
    """List the kind of each layer, and leave out what says nothing without a window."""
    layers = _known(entries, "num_hidden_layers") or 0
    for name, is_full in _PATTERNS.items():
        every = entries.get(name)
        if isinstance(every, int) and every > 0 and layers:
            kinds = ["full_attention" if is_full(at, every) else "sliding_attention" for at in range(layers)]
            entries.setdefault("layer_types", kinds)
            del entries[name]
    if entries.get("use_sliding_window") is False:
        entries.pop("sliding_window", None)
    if entries.get("sliding_window") is None:
        entries.pop("max_window_layers", None)
    if set(entries.get("layer_types") or ()) == {"full_attention"}:
        del entries["layer_types"]


def _known(entries: Entries, name: str) -> int | None:
    """A size under any of its names."""
    sizes = (entries.get(other) for other in (name, *sorted(synonyms(name))))
    return next((size for size in sizes if isinstance(size, int) and size), None)


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _split_rotary(own: Entries) -> tuple[Entries, Rotary]:
    """Take the rotary settings out of the entries of a section, by kind of layer."""
    own = dict(own)
    tables = [own.pop(name) for name in _SCALING if name in own]
    table = next((table for table in reversed(tables) if isinstance(table, Mapping)), {})
    base, local_base, share = (
        next((v for v in [own.pop(name, None) for name in names] if v is not None), None)
        for names in (_BASE, _LOCAL_BASE, _SHARE)
    )
    original = own.pop(_ORIGINAL, None)
    limit = own.get("max_position_embeddings")
    shared = {"rope_theta": base, "partial_rotary_factor": share, _ORIGINAL: original}
    is_rotary = bool(tables) or base is not None
    nested = {str(kind): value for kind, value in table.items() if isinstance(value, Mapping)}
    if nested:
        return own, {kind: _settings({**shared, **value}, limit) for kind, value in nested.items()}
    if local_base is not None:
        local = {"rope_theta": local_base, "partial_rotary_factor": share}
        kinds = {"full_attention": {**shared, **table}, "sliding_attention": local}
        return own, {kind: _settings(value, limit) for kind, value in kinds.items()}
    is_plain = is_rotary and not table
    return own, {"": _settings({**({"rope_type": "default"} if is_plain else {}), **shared, **table}, limit)}


def _settings(table: Mapping[str, Any], limit: object) -> Entries:
    """Rotary settings of one kind of layer, without those that are the default or that are not read."""
    settings = {str(name): value for name, value in table.items() if value is not None}
    rope_type = settings.pop("type", None)
    rope_type = settings.get("rope_type", rope_type)
    if rope_type is None and "rope_theta" in settings and not settings.keys() - set(_DEFAULT_ROPE):
        rope_type = "default"
    if rope_type is not None:
        settings["rope_type"] = (
            _ROPE_TYPES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
        )
    if settings.get("rope_type") == "default":
        settings = {name: value for name, value in settings.items() if name in _DEFAULT_ROPE}
    if settings.get(_ORIGINAL) == limit:
        settings.pop(_ORIGINAL, None)
    if settings.get("partial_rotary_factor") == 1:
        del settings["partial_rotary_factor"]
    return settings
