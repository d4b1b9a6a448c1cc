"""Qwen3-MoE, and what becomes of it in other hands."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.rewrites.catalogue import INT8, Family, Run, random_model, tokens
from tests.rewrites.layers import (
    Int8Linear,
    RootMeanSquare,
    Weights,
    Wrapper,
    attention,
    causal_mask,
    embedding_of,
    join_heads,
    linear,
    linear_of,
    replace,
    rotary_tables,
    rotate_halves,
    split_heads,
)

LAYERS, HEADS, KV_HEADS, HEAD, SIZE, VOCABULARY = 2, 4, 2, 16, 48, 101
EXPERTS, CHOSEN, WIDE, BASE = 6, 2, 40, 10000.0
IDS: Final = tokens(2, 10, VOCABULARY)
ORDER: Final = [3, 0, 5, 1, 4, 2]


def model(implementation: str = "sdpa", experts: str = "eager") -> Any:
    return random_model(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=WIDE,
        norm_topk_prob=True,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=implementation,
        experts_implementation=experts,
    )


def run_of(port: Any) -> Run:
    return Run(port, {"input_ids": IDS, "use_cache": False})


def reference() -> Run:
    return run_of(model())


FAMILY: Final = Family("qwen3-moe", reference)


@FAMILY.correct("eager attention in the place of sdpa")
def eager_attention() -> Run:
    return run_of(model("eager"))


@FAMILY.correct("experts as one batched product")
def batched_experts() -> Run:
    return run_of(model(experts="batched_mm"))


@FAMILY.correct("an outer module with another argument that returns bare logits")
def wrapped() -> Run:
    return Run(Wrapper(model()), (IDS,))


@FAMILY.correct("experts in another order, the router's rows in the same")
def permuted_experts() -> Run:
    port = model()
    with torch.no_grad():
        for layer in port.model.layers:
            for parameter in (
                layer.mlp.gate.weight,
                layer.mlp.experts.gate_up_proj,
                layer.mlp.experts.down_proj,
            ):
                parameter.copy_(parameter[ORDER])
    return run_of(port)


class Expert(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate_proj, self.up_proj, self.down_proj = linear(gate), linear(up), linear(down)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ListOfExperts(nn.Module):
    """Mixture as transformers 4 had it: a module an expert, each given its own tokens."""

    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.gate = linear(w[f"{at}.gate.weight"])
        pairs = zip(w[f"{at}.experts.gate_up_proj"], w[f"{at}.experts.down_proj"], strict=True)
        self.experts = nn.ModuleList(Expert(gate_up, down) for gate_up, down in pairs)
        self.chosen, self.renormalises = CHOSEN, True

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.flatten(0, 1)
        weights, indices = self.gate(x).float().softmax(-1).topk(self.chosen, -1)
        if self.renormalises:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, ranks = (indices == number).nonzero(as_tuple=True)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, ranks, None].to(x.dtype))
        return out.view_as(hidden)


def with_mixture(kind: type[nn.Module]) -> Any:
    port = model()
    weights = port.state_dict()
    for i, layer in enumerate(port.model.layers):
        layer.mlp = kind(weights, f"model.layers.{i}.mlp")
    return port.eval()


@FAMILY.correct("a module for each expert, in the place of stacked weights")
def list_of_experts() -> Run:
    return run_of(with_mixture(ListOfExperts))


@FAMILY.correct("a module for each expert, all in int8", tolerance=INT8)
def int8_experts() -> Run:
    port = with_mixture(ListOfExperts)
    for layer in port.model.layers:
        replace(layer.mlp.experts, nn.Linear, Int8Linear)
    return run_of(port)


class DenseMixture(nn.Module):
    """Every expert computes every token, as on hardware that has no gather; softmax over the chosen alone."""

    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.router = linear(w[f"{at}.gate.weight"])
        self.w13, self.w2 = (
            nn.Parameter(w[f"{at}.experts.{name}_proj"].clone()) for name in ("gate_up", "down")
        )

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        best, indices = logits.topk(CHOSEN, -1)
        weights = torch.zeros_like(logits).scatter(-1, indices, best.softmax(-1))
        gate, up = torch.einsum("btd,efd->btef", x, self.w13).chunk(2, -1)
        return torch.einsum("btef,edf,bte->btd", F.silu(gate) * up, self.w2, weights)


@FAMILY.correct("every expert computes every token, the softmax is taken over the chosen alone")
def dense_mixture() -> Run:
    return run_of(with_mixture(DenseMixture))


class QKNormAttention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.qkv, self.o = (
            linear_of(w, *(f"{at}.{name}_proj" for name in "qkv")),
            linear_of(w, f"{at}.o_proj"),
        )
        self.q_gain = RootMeanSquare(w[f"{at}.q_norm.weight"], 1e-6)
        self.k_gain = RootMeanSquare(w[f"{at}.k_norm.weight"], 1e-6)
        self.rotates_first = False

    def forward(self, x: Tensor) -> Tensor:
        tables = rotary_tables(x.shape[1], HEAD, BASE)
        q, k, v = self.qkv(x).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
        q, k, v = split_heads(q, HEADS), split_heads(k, KV_HEADS), split_heads(v, KV_HEADS)
        if self.rotates_first:
            q, k = self.q_gain(rotate_halves(q, *tables)), self.k_gain(rotate_halves(k, *tables))
        else:
            q, k = rotate_halves(self.q_gain(q), *tables), rotate_halves(self.k_gain(k), *tables)
        out: Tensor = self.o(join_heads(attention(q, k, v, causal_mask(x.shape[1]))))
        return out


class SparseBlock(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.norm_a = RootMeanSquare(w[f"{at}.input_layernorm.weight"], 1e-6)
        self.mix = QKNormAttention(w, f"{at}.self_attn")
        self.norm_m = RootMeanSquare(w[f"{at}.post_attention_layernorm.weight"], 1e-6)
        self.moe = ListOfExperts(w, f"{at}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm_a(x))
        out: Tensor = x + self.moe(self.norm_m(x))
        return out


class Rewritten(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embedding = embedding_of(w, "model.embed_tokens")
        self.trunk = nn.ModuleList(SparseBlock(w, f"model.layers.{i}") for i in range(LAYERS))
        self.norm, self.unembedding = RootMeanSquare(w["model.norm.weight"], 1e-6), linear_of(w, "lm_head")

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.trunk:
            x = block(x)
        logits: Tensor = self.unembedding(self.norm(x))
        return logits


def rewrite() -> Any:
    return Rewritten(model().state_dict()).eval()


@FAMILY.correct("written anew with names of its own, a module for each expert")
def rewritten() -> Run:
    return Run(rewrite(), (IDS,))


@FAMILY.mistake(
    "weights of the chosen experts that are not normalised",
    guilty="model.layers.0.mlp.gate",
    beside=rewritten,
)
def not_renormalised() -> Run:
    port = rewrite()
    for block in port.trunk:
        block.moe.renormalises = False
    return Run(port, (IDS,))


@FAMILY.mistake("one expert a token too few", guilty="model.layers.1.mlp.gate", beside=list_of_experts)
def one_expert_too_few() -> Run:
    port = with_mixture(ListOfExperts)
    port.model.layers[1].mlp.chosen = 1
    return run_of(port)


@FAMILY.mistake(
    "experts in another order than the router's rows",
    guilty="model.layers.0.mlp.experts",
    beside=permuted_experts,
)
def experts_without_their_router() -> Run:
    port = model()
    with torch.no_grad():
        for layer in port.model.layers:
            for parameter in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                parameter.copy_(parameter[ORDER])
    return run_of(port)


@FAMILY.mistake(
    "norms of queries and keys behind the rotation",
    guilty="model.layers.1.self_attn.q_norm",
    beside=rewritten,
)
def rotation_before_norm() -> Run:
    port = rewrite()
    port.trunk[1].mix.rotates_first = True
    return Run(port, (IDS,))


@FAMILY.mistake(
    "gate and up of one expert swapped", guilty="model.layers.1.mlp.experts", beside=list_of_experts
)
def one_expert_swapped() -> Run:
    port = with_mixture(ListOfExperts)
    expert = port.model.layers[1].mlp.experts[2]
    expert.gate_proj, expert.up_proj = expert.up_proj, expert.gate_proj
    return run_of(port)


@FAMILY.mistake("the router of another layer", guilty="model.layers.1.mlp.gate", beside=dense_mixture)
def router_of_another_layer() -> Run:
    port = with_mixture(DenseMixture)
    port.model.layers[1].mlp.router = port.model.layers[0].mlp.router
    return run_of(port)


@FAMILY.mistake(
    "the second matrices of the experts in the old order",
    guilty="model.layers.0.mlp.experts",
    beside=permuted_experts,
)
def second_matrices_not_permuted() -> Run:
    port = permuted_experts().model
    experts = port.model.layers[0].mlp.experts
    experts.load_state_dict({"down_proj": model().model.layers[0].mlp.experts.down_proj}, strict=False)
    return run_of(port)


@FAMILY.mistake(
    "one expert not loaded, in a batched product", guilty="model.layers.0.mlp.experts", beside=batched_experts
)
def expert_not_loaded() -> Run:
    port = model(experts="batched_mm")
    with torch.no_grad():
        port.model.layers[0].mlp.experts.down_proj[1] = 0
    return run_of(port)
