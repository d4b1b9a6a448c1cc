"""Configurations of one model that are spelt in other ways: by two versions of a library, or by other code.

The entries of both versions are those that `to_json_string(use_diff=False)` of transformers 4.57.6 and 5.24.0
gives for one checkpoint; what is equal in both is cut down.
"""

from __future__ import annotations

from typing import Any

import pytest

from tensorcap.comparison.preflight import config_differences

# What every configuration of version 4 holds, whatever the model
V4: dict[str, Any] = {
    "_name_or_path": "", "add_cross_attention": False, "architectures": None, "bad_words_ids": None,
    "begin_suppress_tokens": None, "bos_token_id": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0,
    "do_sample": False, "dtype": None, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0,
    "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "output_attentions": False, "output_hidden_states": False,
    "output_scores": False, "prefix": None, "problem_type": None, "pruned_heads": {},
    "remove_invalid_values": False, "repetition_penalty": 1.0, "return_dict": True,
    "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tie_word_embeddings": True, "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torchscript": False,
    "transformers_version": "4.57.6", "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
V5: dict[str, Any] = {
    "_name_or_path": "", "architectures": None, "chunk_size_feed_forward": 0, "dtype": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "output_attentions": False, "output_hidden_states": False,
    "problem_type": None, "return_dict": True, "transformers_version": "5.24.0",
}  # fmt: skip
SIZES = {
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
GEMMA3 = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
          "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}  # fmt: skip

UPGRADES = [
    pytest.param({}, {}, id="gpt2"),
    pytest.param({"position_embedding_type": "absolute"}, {}, id="bert"),
    pytest.param(
        {"rope_scaling": None, "rope_theta": 500000.0},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        id="llama",
    ),
    pytest.param(
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        id="llama-3.1",
    ),
    pytest.param(
        {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e6,
                "original_max_position_embeddings": 8192,
            }
        },
        id="yarn",
    ),
    pytest.param(
        {"num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001, "rope_theta": 1e4},
        {"num_local_experts": 128, "num_experts_per_tok": 8, "rope_parameters": {"rope_theta": 1e4}},
        id="qwen3-moe",
    ),
    pytest.param(
        {"rope_local_base_freq": 1e4, "rope_scaling": None, "rope_theta": 1e6, "_sliding_window_pattern": 2},
        {
            "rope_parameters": GEMMA3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
        id="gemma3",
    ),
    pytest.param(
        {"global_attn_every_n_layers": 3, "global_rope_theta": 16e4, "local_rope_theta": 1e4},
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_theta": 16e4, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        },
        id="modernbert",
    ),
    pytest.param(
        {"partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000, "rotary_emb_base": 10000,
         "rotary_pct": 0.25},
        {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4, "rope_type": "default"}},
        id="gpt-neox",
    ),
    pytest.param(
        {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "su", "short_factor": [1.0, 2.0],
         "long_factor": [1.0, 4.0]}, "rope_theta": 1e4, "original_max_position_embeddings": 4096},
        {"original_max_position_embeddings": 4096, "rope_parameters": {"partial_rotary_factor": 1.0,
         "rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 4.0],
         "original_max_position_embeddings": 4096}},
        id="phi3",
    ),
    pytest.param(
        {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28},
        {"use_sliding_window": False, "sliding_window": None},
        id="qwen2",
    ),
]  # fmt: skip


@pytest.mark.spec("PRE-4")
@pytest.mark.parametrize(("old", "new"), UPGRADES)
def test_one_checkpoint_is_the_same_under_two_versions(old: dict[str, Any], new: dict[str, Any]) -> None:
    ours, theirs = {**V4, **SIZES, **old}, {**V5, **SIZES, **new}
    assert config_differences(ours, theirs) == []
    assert config_differences(theirs, ours) == []


@pytest.mark.spec("PRE-4")
@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        pytest.param(
            {"rope_scaling": LLAMA3, "rope_theta": 5e5},
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "factor": 32.0}},
            ["factor"],
            id="factor",
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 5e5},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            ["rope_type", "factor"],
            id="scaling-lost",
        ),
        pytest.param(
            {"rope_local_base_freq": 1e4, "rope_scaling": None, "rope_theta": 1e6},
            {"rope_parameters": {**GEMMA3, "sliding_attention": GEMMA3["full_attention"]}},
            ["sliding_attention.rope_theta"],
            id="local-table",
        ),
        pytest.param(
            {"num_experts": 128, "num_experts_per_tok": 8},
            {"num_local_experts": 64, "num_experts_per_tok": 8},
            ["num_experts"],
            id="experts",
        ),
        pytest.param(
            {"num_experts_per_tok": 8}, {"num_experts_per_tok": 4}, ["num_experts_per_tok"], id="choice"
        ),
        pytest.param(
            {"num_experts": 8, "top_k": 2}, {"num_experts": 8, "top_k": 1}, ["top_k"], id="top-k-of-experts"
        ),
        pytest.param({"rms_norm_eps": 1e-6}, {"norm_eps": 1e-5}, ["rms_norm_eps"], id="other-name"),
        pytest.param({"sliding_window": 512}, {"sliding_window": None}, ["sliding_window"], id="window-lost"),
        pytest.param({"_sliding_window_pattern": 2}, {"layer_types": ["sliding_attention"] * 4},
                     ["layer_types"], id="pattern"),
    ],
)  # fmt: skip
def test_a_setting_that_changed_with_the_version_explains(
    old: dict[str, Any], new: dict[str, Any], names: list[str]
) -> None:
    differences = config_differences({**V4, **SIZES, **old}, {**V5, **SIZES, **new})
    assert [d.name for d in differences] == names
    assert all(d.explains for d in differences)


@pytest.mark.spec("PRE-4")
def test_the_text_model_of_several_is_compared_with_one_of_text() -> None:
    text = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    whole = {
        "text_config": {**text, "tie_word_embeddings": False},
        "vision_config": {"hidden_size": 32, "num_attention_heads": 2},
        "tie_word_embeddings": True,
        "image_token_index": 99,
    }
    assert config_differences(whole, {**text, "tie_word_embeddings": True}) == []
    (difference,) = config_differences({**text, "rms_norm_eps": 1e-5}, whole)
    assert (difference.name, difference.reference, difference.target) == ("rms_norm_eps", 1e-5, 1e-6)
    other = {**whole, "vision_config": {"hidden_size": 48, "num_attention_heads": 2}}
    assert [d.name for d in config_differences(whole, other)] == [
        "vision_config.hidden_size",
        "vision_config.head_dim",
    ]
    renamed = {"language_config": whole["text_config"], "tie_word_embeddings": True}
    assert config_differences({**renamed, "image_token_index": 99}, whole) == []


@pytest.mark.spec("PRE-4")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({"dim": 64, "n_layers": 2}, {"n_embd": 64, "n_layer": 2}, id="sizes"),
        pytest.param({"hidden_act": "swish"}, {"hidden_activation": "silu"}, id="activation"),
        pytest.param({"torch_dtype": "float16"}, {"dtype": "float32"}, id="dtype"),
        pytest.param({"final_logit_softcapping": None}, {}, id="no-softcap"),
        pytest.param({"layer_types": ["full_attention"] * 2}, {}, id="all-layers-see-all"),
        pytest.param({"rope_theta": 1e4, "partial_rotary_factor": 1.0}, {"rope_theta": 1e4}, id="whole-head"),
    ],
)
def test_other_names_and_values_that_are_as_good_as_none_are_equal(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    assert config_differences(ours, theirs) == []
    assert config_differences(theirs, ours) == []


@pytest.mark.spec("PRE-4")
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({"intermediate_size": 256}, id="size"),
        pytest.param({"rms_norm_eps": 1e-6}, id="eps"),
        pytest.param({"hidden_act": "silu"}, id="activation"),
        pytest.param({"rope_theta": 5e5}, id="rotary"),
        pytest.param({"scale_decoder_outputs": True}, id="new-switch"),
    ],
)
def test_what_one_configuration_does_not_say_explains_nothing(entry: dict[str, Any]) -> None:
    differences = config_differences(entry, {"vocab_size": 7})
    assert differences
    assert not any(d.explains for d in differences)
