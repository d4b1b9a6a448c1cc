"""Hugging Face's Llama with random weights, its port of parallel layers, and mistakes in one module each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import RowParallelLinear, rank_and_count, reduced
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM
from neuronx_distributed_inference.modules.attention.gqa import GroupQueryAttention_QKV
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import tensorcap

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
    attention_bias=True,
    mlp_bias=True,
    tie_word_embeddings=False,
    attn_implementation="eager",
)


def llama() -> LlamaForCausalLM:
    """The reference, of the same weights on each rank."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which are zeros else, and norms are ones
            parameter.data.normal_(0, 0.2)
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    return model


def inputs(padding: int = 0) -> dict[str, Tensor]:
    """Two prompts of 12 tokens, the second with so many of padding before it."""
    ids = torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def reference() -> tensorcap.Workload:
    """The model that is trusted."""
    return tensorcap.Workload(llama(), {**inputs(), "use_cache": False})


def padded_reference() -> tensorcap.Workload:
    """The model that is trusted, on prompts of unlike lengths."""
    return tensorcap.Workload(llama(), {**inputs(4), "use_cache": False})


def port(padding: int = 0, **options: Any) -> tensorcap.Workload:
    """The right port."""
    return tensorcap.Workload(
        NeuronLlamaForCausalLM(CONFIG, llama().state_dict(), **options), inputs(padding)
    )


def planted(plant: Callable[[Any], None], **options: Any) -> Callable[[], tensorcap.Workload]:
    """A function that makes the port with a mistake in its inner model."""

    def function() -> tensorcap.Workload:
        workload = port(**options)
        workload.model.to_cpu()
        plant(workload.model.context_encoding_model.model)
        return workload

    return function


def _fused(model: Any) -> None:
    """No mistake: queries, keys and values of each attention are one projection."""
    for layer in model.layers:
        layer.self_attn.qkv_proj.fuse()


def _wrong_shard(model: Any) -> None:
    rank, count = rank_and_count()
    layer = model.layers[1].self_attn.qkv_proj.q_proj
    whole = llama().state_dict()["model.layers.1.self_attn.q_proj.weight"]
    layer.weight.data.copy_(whole.chunk(count)[0 if rank == 1 else rank])


def _missing_reduce(model: Any) -> None:
    model.layers[1].mlp.down_proj.reduce_output = False


def _unreduced(model: Any) -> None:
    """An all-reduce that the class promises and does not make."""
    layer = model.layers[1].mlp.down_proj
    layer.forward = lambda input_: functional.linear(input_, layer.weight) + layer.bias


def _doubled_reduce(model: Any) -> None:
    layer = model.layers[1].self_attn.o_proj.o_proj
    layer.forward = lambda input_: reduced(reduced(functional.linear(input_, layer.weight))) + layer.bias


def _halves(model: Any) -> None:
    rank, count = rank_and_count()
    weights = llama().state_dict()
    names = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")]
    layer = model.layers[1].mlp.gate_up_proj
    for kind in ("weight", "bias"):
        whole = torch.cat([weights[f"{name}.{kind}"] for name in names])
        getattr(layer, kind).data.copy_(whole.chunk(count)[rank])


def _rounded_terms(model: Any) -> None:
    """No mistake: terms are rounded to bfloat16 and added up in it, as many libraries do."""
    for layer in model.modules():
        if isinstance(layer, RowParallelLinear):
            layer.reduce_dtype = torch.bfloat16


def _epsilon(model: Any) -> None:
    model.layers[0].input_layernorm.variance_epsilon = 1e-6


def _padding(model: Any) -> None:
    model.layers[1].self_attn.reads_padding = True


def _bias_on_every_rank(model: Any) -> None:
    layer: RowParallelLinear = model.layers[1].self_attn.o_proj.o_proj
    layer.forward = lambda input_: reduced(functional.linear(input_, layer.weight, layer.bias))


class _WrongOrder(GroupQueryAttention_QKV):
    """Heads of keys repeated as a whole, 0 1 0 1, where ranks use 0 0 1 1."""

    def repeat(self, tensor: Tensor, copies: int) -> Tensor:
        return torch.cat([tensor] * copies)


rounded_terms = planted(_rounded_terms)
fused = planted(_fused)
wrong_shard = planted(_wrong_shard)
missing_reduce = planted(_missing_reduce)
unreduced = planted(_unreduced)
doubled_reduce = planted(_doubled_reduce)
halves = planted(_halves)
epsilon = planted(_epsilon)
padding = planted(_padding, padding=4)
padded = planted(lambda model: None, padding=4)
bias_on_every_rank = planted(_bias_on_every_rank)
kv_order = planted(lambda model: None, qkv_class=_WrongOrder)


def dies() -> tensorcap.Workload:
    """A port whose second rank is without its weights."""
    if rank_and_count()[0] == 1:
        raise FileNotFoundError("weights/tp1_sharded.safetensors")
    return port()
