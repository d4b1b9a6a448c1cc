"""Ports that are right: other implementations, layouts, fusions, partitions and precisions of the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.nn import functional

from tests.zoo.architecture import VOCABULARY
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.entry import Correct
from tests.zoo.other_ways import (
    LAYERS,
    Wrapped,
    compiled_activation,
    compiled_norms,
    convolution_by_taps,
    every_expert,
    fused_gate_up,
    fused_norm,
    fused_queries_keys_values,
    gates_in_blocks,
    linear_for_conv1d,
    one_plus_stored,
    padded_vocabulary,
    pairs_side_by_side,
    patches_by_linear,
    precise_attention,
    scale_stored,
    scores_scaled_later,
    sinks_afterwards,
    softmax_of_the_chosen,
    tensor_parallel,
    written_norm,
)
from tests.zoo.planting import (
    Plant,
    activated,
    attending,
    computing,
    module_at,
    rebound,
)


def everywhere(*plants: Plant) -> Callable[[Any], Any]:
    """A change of several modules."""

    def change(model: Any) -> Any:
        for plant in plants:
            plant(model)
        return model

    return change


def in_each(pattern: str, plant: Callable[[str], Plant], layers: range = LAYERS) -> Callable[[Any], Any]:
    """The same change in each layer; `{}` in the pattern is its number."""
    return everywhere(*(plant(pattern.format(layer)) for layer in layers))


def attention_by(name: str) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        model.set_attn_implementation(name)
        return model

    return change


AS_IT_IS: Final = tuple(Correct(f"{name}_as_it_is", name, lambda model: model) for name in ARCHITECTURES)

OTHERWISE: Final = (
    Correct("llama_eager", "llama", attention_by("eager")),
    Correct("llama_fused_gate_up", "llama", fused_gate_up),
    Correct(
        "llama_fused_qkv",
        "llama",
        in_each(
            "model.layers.{}.self_attn",
            lambda site: lambda model: fused_queries_keys_values(module_at(model, site)),
        ),
    ),
    Correct(
        "llama_rope_side_by_side",
        "llama",
        pairs_side_by_side,
        mapping="""
[[pair]]
reference = "model.layers.{i}.self_attn.q_proj/output"
target = "model.layers.{i}.self_attn.q_proj/output"
i = "0-2"
steps = ["rope_halves 16"]

[[pair]]
reference = "model.layers.{i}.self_attn.k_proj/output"
target = "model.layers.{i}.self_attn.k_proj/output"
i = "0-2"
steps = ["rope_halves 16"]
""",
        relaid=("q_proj", "k_proj"),
    ),
    Correct(
        "llama_padded_vocabulary",
        "llama",
        padded_vocabulary,
        mapping=f"""
[[pair]]
reference = "lm_head/output"
target = "lm_head/output"
steps = ["cut_vocab {VOCABULARY}"]

[[pair]]
reference = "@root/output.logits"
target = "@root/output.logits"
steps = ["cut_vocab {VOCABULARY}"]
""",
        relaid=("lm_head", "@root"),
    ),
    Correct("llama_tensor_parallel", "llama", tensor_parallel),
    Correct(
        "llama_fused_norm",
        "llama",
        in_each("model.layers.{}.input_layernorm", lambda site: computing(site, fused_norm)),
    ),
    Correct("llama_compiled_activation", "llama", compiled_activation),
    Correct("llama_compiled_norms", "llama", compiled_norms),
    Correct("llama_wrapped", "llama", Wrapped),
    Correct("qwen3_eager", "qwen3", attention_by("eager")),
    Correct("qwen3_fused_gate_up", "qwen3", fused_gate_up),
    Correct("gemma2_one_plus_stored", "gemma2", one_plus_stored),
    Correct("gemma2_scale_stored", "gemma2", scale_stored),
    Correct("gemma3_eager", "gemma3", attention_by("eager")),
    Correct("gpt2_linear", "gpt2", linear_for_conv1d),
    Correct(
        "gpt2_gelu",
        "gpt2",
        in_each(
            "transformer.h.{}.mlp.act",
            lambda site: activated(site, lambda x: functional.gelu(x, approximate="tanh")),
        ),
    ),
    Correct("gpt2_eager", "gpt2", attention_by("eager")),
    Correct(
        "mixtral_softmax_of_the_chosen",
        "mixtral",
        in_each("model.layers.{}.mlp.gate", lambda site: computing(site, softmax_of_the_chosen)),
    ),
    Correct(
        "mixtral_every_expert",
        "mixtral",
        in_each("model.layers.{}.mlp.experts", lambda site: computing(site, every_expert)),
    ),
    Correct(
        "qwen3_moe_softmax_of_the_chosen",
        "qwen3_moe",
        in_each("model.layers.{}.mlp.gate", lambda site: computing(site, softmax_of_the_chosen)),
    ),
    Correct("qwen3_moe_eager", "qwen3_moe", attention_by("eager")),
    Correct("gpt_oss_gates_in_blocks", "gpt_oss", gates_in_blocks),
    Correct(
        "gpt_oss_sinks_afterwards",
        "gpt_oss",
        in_each("model.layers.{}.self_attn", lambda site: attending(site, sinks_afterwards)),
    ),
    Correct("t5_eager", "t5", attention_by("eager")),
    Correct("whisper_eager", "whisper", attention_by("eager")),
    Correct(
        "whisper_scores_scaled",
        "whisper",
        in_each(
            "model.encoder.layers.{}.self_attn", lambda site: attending(site, scores_scaled_later), range(2)
        ),
    ),
    Correct(
        "bert_precise_attention",
        "bert",
        in_each("bert.encoder.layer.{}.attention.self", lambda site: attending(site, precise_attention)),
    ),
    Correct(
        "bert_written_norm",
        "bert",
        in_each("bert.encoder.layer.{}.output.LayerNorm", lambda site: computing(site, written_norm)),
    ),
    Correct(
        "vit_patches_by_linear",
        "vit",
        everywhere(computing("vit.embeddings.patch_embeddings.projection", patches_by_linear)),
    ),
    Correct("vit_eager", "vit", attention_by("eager")),
    Correct(
        "mamba_convolution_by_taps",
        "mamba",
        in_each("backbone.layers.{}.mixer", lambda s: rebound(s, causal_conv1d_fn=convolution_by_taps)),
    ),
)


CORRECT: Final = (*AS_IT_IS, *OTHERWISE)
