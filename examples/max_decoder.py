"""A small decoder written with `max.nn`, and the Hugging Face model that it is a port of.

    tcap verify examples/max_decoder.py:llama -o report/
    tcap verify examples/max_decoder.py:llama -o half/ --dtype bfloat16

Verifying a port to Modular MAX takes four things: a model to trust (`reference`), the same in `max.nn`
(`Decoder`), the weights of the one under the names of the other (`adapted`), and inputs for both. MAX has no
batch axis: what is `(1, token, feature)` in torch is `(token, feature)` here.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn import MLP, Embedding, LayerList, Linear, RMSNorm
from max.nn.layer import Module
from transformers import LlamaConfig, LlamaForCausalLM

import tensorcap

TOKENS = (3, 17, 5, 60, 9)
CPU = DeviceRef.CPU()


class Attention(Module):
    """Causal attention with rotary positions; no cache."""

    def __init__(self, config: LlamaConfig, dtype: DType) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        size = config.hidden_size
        self.q_proj = Linear(size, size, dtype, CPU)
        self.k_proj = Linear(size, size, dtype, CPU)
        self.v_proj = Linear(size, size, dtype, CPU)
        self.o_proj = Linear(size, size, dtype, CPU)

    def __call__(self, x: TensorValue, cos: TensorValue, sin: TensorValue, mask: TensorValue) -> TensorValue:
        """Mix the tokens of `x`, (token, feature)."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        scores = q @ ops.transpose(k, 1, 2) * (1 / math.sqrt(int(q.shape[2]))) + mask
        mixed = ops.transpose(ops.softmax(scores) @ v, 0, 1)
        return self.o_proj(ops.reshape(mixed, x.shape))

    def _heads(self, x: TensorValue) -> TensorValue:
        """(token, feature) as (head, token, feature)."""
        return ops.transpose(ops.reshape(x, [x.shape[0], self.heads, -1]), 0, 1)


class Block(Module):
    """Attention and MLP, each added to what comes in."""

    def __init__(self, config: LlamaConfig, dtype: DType) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, dtype, eps)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(size, dtype, eps)
        self.mlp = MLP(dtype, None, size, config.intermediate_size, [CPU])

    def __call__(self, x: TensorValue, cos: TensorValue, sin: TensorValue, mask: TensorValue) -> TensorValue:
        """Transform `x`, (token, feature)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(Module):
    """Token ids to logits."""

    def __init__(self, config: LlamaConfig, dtype: DType = DType.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        size, vocabulary = config.hidden_size, config.vocab_size
        self.embed_tokens = Embedding(vocabulary, size, dtype, CPU)
        self.layers = LayerList([Block(config, dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(size, dtype, config.rms_norm_eps)
        self.lm_head = Linear(size, vocabulary, dtype, CPU)

    def __call__(self, tokens: TensorValue) -> TensorValue:
        """The logits of tokens, (token, word)."""
        count = int(tokens.shape[0])
        tables = [ops.constant(table, self.dtype, CPU) for table in position_tables(self.config, count)]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, *tables)
        return self.lm_head(self.norm(x))


def position_tables(config: LlamaConfig, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cosines and sines of rotary positions, (token, half of a head), and the causal mask, (token, token)."""
    half = config.hidden_size // config.num_attention_heads // 2
    base = config.rope_parameters["rope_theta"]
    angles = np.outer(np.arange(count), base ** (-np.arange(half) / half)).astype(np.float32)
    mask = np.triu(np.full((count, count), -1e9, np.float32), 1)
    return np.cos(angles), np.sin(angles), mask


def rotated(x: TensorValue, cos: TensorValue, sin: TensorValue) -> TensorValue:
    """`x`, (head, token, feature), turned by position: the first half of the features with the second."""
    half = int(x.shape[2]) // 2
    a, b = x[:, :, :half], x[:, :, half:]
    return ops.concat([a * cos - b * sin, b * cos + a * sin], -1)


def adapted(weights: Mapping[str, torch.Tensor], dtype: DType) -> dict[str, torch.Tensor]:
    """The weight adapter: Hugging Face's names and tensors as those of `Decoder`."""
    own = getattr(torch, dtype.name)
    return {name.removeprefix("model."): weight.to(own) for name, weight in weights.items()}


def original(num_hidden_layers: int = 2) -> LlamaForCausalLM:
    """The model to trust, with random weights."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def ported(model: LlamaForCausalLM, dtype: DType = DType.float32) -> Decoder:
    """The port of a model, with its weights."""
    decoder = Decoder(model.config, dtype)
    weights = adapted(model.state_dict(), dtype)
    decoder.load_state_dict(weights, weight_alignment=1)  # wherever they lie in memory
    return decoder


def reference(num_hidden_layers: int = 2) -> tensorcap.Workload:
    """The model to trust, and what it is fed."""
    inputs = {"input_ids": torch.tensor([TOKENS]), "use_cache": False}
    return tensorcap.Workload(original(num_hidden_layers), inputs)


def port(num_hidden_layers: int = 2, dtype: DType = DType.float32) -> tensorcap.Workload:
    """The port, on the same tokens."""
    return tensorcap.Workload(ported(original(num_hidden_layers), dtype), {"tokens": np.array(TOKENS)})


def wrong(num_hidden_layers: int = 2, dtype: DType = DType.float32) -> tensorcap.Workload:
    """The same with a mistake: a weight of layer 0 was converted with a scale too much."""
    model = original(num_hidden_layers)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(1.5)
    return tensorcap.Workload(ported(model, dtype), {"tokens": np.array(TOKENS)})


llama = tensorcap.Port(reference, port)
