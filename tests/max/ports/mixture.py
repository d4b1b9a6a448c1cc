"""A Mixtral-like decoder with experts written with `max.nn`, and the Hugging Face model that it is a port of.

MAX has no batch axis: what is `(1, token, feature)` in torch is `(token, feature)` here. Each expert is run
on each token, and the router's table, zero where an expert was not chosen, says how much of it counts.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn import Embedding, LayerList, Linear, RMSNorm
from max.nn.layer import Module
from transformers import MixtralConfig, MixtralForCausalLM

import tensorcap

CPU = DeviceRef.CPU()
TOKENS = (1, 17, 45, 60, 9, 33, 51, 22)
TORCH_DTYPES = {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16}
NAMES = {
    "model.embed_tokens.": "vocabulary.",
    "model.layers.": "stages.",
    "model.norm.": "last_norm.",
    "lm_head.": "predict.",
    ".input_layernorm.": ".attention_norm.",
    ".self_attn.q_proj.": ".attention.wq.",
    ".self_attn.k_proj.": ".attention.wk.",
    ".self_attn.v_proj.": ".attention.wv.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".post_attention_layernorm.": ".moe_norm.",
    ".mlp.gate.": ".moe.router.choice.",
    ".mlp.experts.gate_up_proj": ".moe.experts.inward",
    ".mlp.experts.down_proj": ".moe.experts.outward",
}


class Rotary(Module):
    """Rotary positions, the first half of a head's features with the second."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.base: float = config.rope_parameters["rope_theta"]  # type: ignore[index, assignment]  # it is there
        self.half = config.hidden_size // config.num_attention_heads // 2

    def __call__(self, x: TensorValue) -> TensorValue:
        """Turn `x`, (head, token, feature), by the positions of its tokens."""
        steps = self.base ** (-np.arange(self.half) / self.half)
        angles = np.outer(np.arange(int(x.shape[1])), steps).astype(np.float32)
        cos, sin = (ops.cast(ops.constant(f(angles), DType.float32, CPU), x.dtype) for f in (np.cos, np.sin))
        a, b = x[:, :, : self.half], x[:, :, self.half :]
        return ops.concat([a * cos - b * sin, b * cos + a * sin], -1)


class GroupedAttention(Module):
    """Causal attention in which several heads share keys and values; no cache."""

    def __init__(self, config: MixtralConfig, dtype: DType) -> None:
        super().__init__()
        self.heads, self.shared_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = config.hidden_size // self.heads
        size, shared_size = config.hidden_size, self.shared_heads * self.head_size
        self.wq = Linear(size, size, dtype, CPU)
        self.wk = Linear(size, shared_size, dtype, CPU)
        self.wv = Linear(size, shared_size, dtype, CPU)
        self.wo = Linear(size, size, dtype, CPU)
        self.rotary = Rotary(config)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Mix the tokens of `x`, (token, feature)."""
        count = int(x.shape[0])
        q = self.rotary(self._split(self.wq(x), self.heads))
        k = self._spread(self.rotary(self._split(self.wk(x), self.shared_heads)))
        v = self._spread(self._split(self.wv(x), self.shared_heads))
        scores = ops.cast(q @ ops.transpose(k, 1, 2), DType.float32) * (1 / math.sqrt(self.head_size))
        future = np.triu(np.full((count, count), -1e9, np.float32), 1)
        weights = ops.softmax(scores + ops.constant(future, DType.float32, CPU))
        mixed = ops.transpose(ops.cast(weights, x.dtype) @ v, 0, 1)
        return self.wo(ops.reshape(mixed, x.shape))

    def _split(self, x: TensorValue, heads: int) -> TensorValue:
        """(token, feature) as (head, token, feature)."""
        return ops.transpose(ops.reshape(x, [x.shape[0], heads, self.head_size]), 0, 1)

    def _spread(self, x: TensorValue) -> TensorValue:
        """Repeat each head of `x`, (head, token, feature), for the heads that share it."""
        heads, count, size = x.shape
        copies = self.heads // self.shared_heads
        x = ops.broadcast_to(ops.unsqueeze(x, 1), [heads, copies, count, size])
        return ops.reshape(x, [self.heads, count, size])


class Router(Module):
    """Which experts a token is given to."""

    def __init__(self, config: MixtralConfig, dtype: DType) -> None:
        super().__init__()
        self.chosen, self.experts = config.num_experts_per_tok, config.num_local_experts
        self.choice = Linear(config.hidden_size, self.experts, dtype, CPU)

    def __call__(self, x: TensorValue) -> TensorValue:
        """How much each expert counts for each token of `x`, (token, expert), in float32."""
        share, index = ops.top_k(ops.softmax(ops.cast(self.choice(x), DType.float32)), self.chosen)
        share = share / ops.sum(share, -1)
        numbers = ops.constant(np.arange(self.experts), DType.int64, CPU)
        is_chosen = ops.cast(ops.equal(ops.unsqueeze(index, -1), numbers), DType.float32)
        return ops.squeeze(ops.sum(is_chosen * ops.unsqueeze(share, -1), 1), 1)


class Experts(Module):
    """All experts of a layer, their weights in one tensor."""

    def __init__(self, config: MixtralConfig, dtype: DType) -> None:
        super().__init__()
        count, size, self.inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.inward = Weight("inward", dtype, [count, 2 * self.inner, size], CPU)
        self.outward = Weight("outward", dtype, [count, size, self.inner], CPU)

    def __call__(self, x: TensorValue, table: TensorValue) -> TensorValue:
        """What the experts make of `x`, (token, feature), weighed by `table`, (token, expert)."""
        both = self._product(ops.unsqueeze(x, 0), self.inward)
        inner = ops.silu(both[:, :, : self.inner]) * both[:, :, self.inner :]
        each = ops.cast(self._product(inner, self.outward), DType.float32)
        weighed = each * ops.unsqueeze(ops.transpose(table, 0, 1), -1)
        return ops.cast(ops.squeeze(ops.sum(weighed, 0), 0), x.dtype)

    def _product(self, x: TensorValue, weight: Weight) -> TensorValue:
        """`x` times each expert's matrix, in float32: MAX adds bfloat16 terms up in bfloat16 on a CPU."""
        wide = ops.cast(x, DType.float32) @ ops.cast(ops.transpose(weight, 1, 2), DType.float32)
        return ops.cast(wide, x.dtype)


class SparseLayer(Module):
    """A router and its experts."""

    def __init__(self, config: MixtralConfig, dtype: DType) -> None:
        super().__init__()
        self.router = Router(config, dtype)
        self.experts = Experts(config, dtype)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Transform `x`, (token, feature)."""
        return self.experts(x, self.router(x))


class Stage(Module):
    """Attention and experts, each added to what comes in."""

    def __init__(self, config: MixtralConfig, dtype: DType) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, dtype, config.rms_norm_eps)
        self.attention = GroupedAttention(config, dtype)
        self.moe_norm = RMSNorm(config.hidden_size, dtype, config.rms_norm_eps)
        self.moe = SparseLayer(config, dtype)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Transform `x`, (token, feature)."""
        x = x + self.attention(self.attention_norm(x))
        normed = self.moe_norm(x)
        return x + self.moe(normed)


class Mixture(Module):
    """Token ids to logits."""

    def __init__(self, config: MixtralConfig, dtype: DType) -> None:
        super().__init__()
        self.vocabulary = Embedding(config.vocab_size, config.hidden_size, dtype, CPU)
        self.stages = LayerList([Stage(config, dtype) for _ in range(config.num_hidden_layers)])
        self.last_norm = RMSNorm(config.hidden_size, dtype, config.rms_norm_eps)
        self.predict = Linear(config.hidden_size, config.vocab_size, dtype, CPU)

    def __call__(self, tokens: TensorValue) -> TensorValue:
        """The logits of tokens, (token, word)."""
        x = self.vocabulary(tokens)
        for stage in self.stages:
            x = stage(x)
        return self.predict(self.last_norm(x))


def adapted(weights: Mapping[str, torch.Tensor], dtype: DType) -> dict[str, torch.Tensor]:
    """The weight adapter: Hugging Face's names and tensors as those of `Mixture`."""
    result = {}
    for name, weight in weights.items():
        for before, after in NAMES.items():
            name = name.replace(before, after)
        result[name] = weight.to(TORCH_DTYPES[dtype]).contiguous()
    return result


def original() -> MixtralForCausalLM:
    """The model to trust: random weights of the sizes that trained ones have, norms too."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    model = MixtralForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]  # transformers annotates no more
    draw = torch.Generator().manual_seed(56)  # no router is near a tie: bfloat16 chooses the same experts
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if "norm" in name:
                weight.copy_(1 + 0.1 * noise)
            else:
                weight.copy_((0.01 if "embed_tokens" in name else 0.2) * noise)
    return model


def reference() -> tensorcap.Workload:
    """The model to trust, and what it is fed."""
    return tensorcap.Workload(original(), {"input_ids": torch.tensor([TOKENS]), "use_cache": False})


def port(dtype: DType = DType.float32) -> tensorcap.Workload:
    """The port, on the same tokens."""
    model = original()
    mixture = Mixture(model.config, dtype)
    mixture.load_state_dict(adapted(model.state_dict(), dtype), weight_alignment=1)
    once = tensorcap.MaxModel(mixture, control=False)  # a second graph takes as long to compile
    return tensorcap.Workload(once, {"tokens": np.array(TOKENS)})
