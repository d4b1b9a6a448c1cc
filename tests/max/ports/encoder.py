"""A BERT-like encoder written with `max.nn`, and the Hugging Face model that it is a port of.

MAX has no batch axis: what is `(1, token, feature)` in torch is `(token, feature)` here. Modules and weights
have names of their own; `adapted` gives those of the checkpoint to them.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn import Embedding, LayerList, LayerNorm, Linear
from max.nn.layer import Module
from transformers import BertConfig, BertModel

import tensorcap

CPU = DeviceRef.CPU()
TOKENS = (2, 17, 45, 60, 9, 33, 51, 3, 0, 0)  # the last two are padding
SEGMENTS = (0, 0, 0, 0, 1, 1, 1, 1, 0, 0)
PRESENT = (1, 1, 1, 1, 1, 1, 1, 1, 0, 0)
TORCH_DTYPES = {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16}
NAMES = {
    "embeddings.word_embeddings.": "table.word.",
    "embeddings.position_embeddings.": "table.place.",
    "embeddings.token_type_embeddings.": "table.segment.",
    "embeddings.LayerNorm.": "table.scale.",
    "encoder.layer.": "blocks.",
    ".attention.self.query.": ".mixer.to_q.",
    ".attention.self.key.": ".mixer.to_k.",
    ".attention.self.value.": ".mixer.to_v.",
    ".attention.output.dense.": ".mixer.merge.",
    ".attention.output.LayerNorm.": ".mixer_norm.",
    ".intermediate.dense.": ".ffn.expand.",
    ".output.dense.": ".ffn.shrink.",
    ".output.LayerNorm.": ".ffn_norm.",
    "pooler.dense.": "summary.project.",
}


class InputTable(Module):
    """Words, places and segments, added and normalized."""

    def __init__(self, config: BertConfig, dtype: DType) -> None:
        super().__init__()
        size = config.hidden_size
        self.word = Embedding(config.vocab_size, size, dtype, CPU)
        self.place = Embedding(config.max_position_embeddings, size, dtype, CPU)
        self.segment = Embedding(config.type_vocab_size, size, dtype, CPU)
        self.scale = LayerNorm(size, [CPU], dtype, eps=config.layer_norm_eps)

    def __call__(self, tokens: TensorValue, segments: TensorValue) -> TensorValue:
        """What the blocks are given, (token, feature)."""
        places = ops.constant(np.arange(int(tokens.shape[0])), DType.int64, CPU)
        x = self.word(tokens) + self.segment(segments)
        x = x + self.place(places)
        return self.scale(x)


class Mixer(Module):
    """Attention of all tokens to those that are not padding."""

    def __init__(self, config: BertConfig, dtype: DType) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads, self.head_size = config.num_attention_heads, size // config.num_attention_heads
        self.to_q = Linear(size, size, dtype, CPU, has_bias=True)
        self.to_k = Linear(size, size, dtype, CPU, has_bias=True)
        self.to_v = Linear(size, size, dtype, CPU, has_bias=True)
        self.merge = Linear(size, size, dtype, CPU, has_bias=True)

    def __call__(self, x: TensorValue, penalty: TensorValue) -> TensorValue:
        """Mix the tokens of `x`, (token, feature); `penalty`, (token,), is added to scores."""
        q, k, v = (self._heads(part(x)) for part in (self.to_q, self.to_k, self.to_v))
        scores = q @ ops.transpose(k, 1, 2) * (1 / math.sqrt(self.head_size))
        scores = scores + penalty
        mixed = ops.transpose(ops.softmax(scores) @ v, 0, 1)
        return self.merge(ops.reshape(mixed, x.shape))

    def _heads(self, x: TensorValue) -> TensorValue:
        """(token, feature) as (head, token, feature)."""
        return ops.transpose(ops.reshape(x, [x.shape[0], self.heads, self.head_size]), 0, 1)


class FeedForward(Module):
    """Two linear layers with GELU between."""

    def __init__(self, config: BertConfig, dtype: DType) -> None:
        super().__init__()
        self.expand = Linear(config.hidden_size, config.intermediate_size, dtype, CPU, has_bias=True)
        self.shrink = Linear(config.intermediate_size, config.hidden_size, dtype, CPU, has_bias=True)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Transform `x`, (token, feature)."""
        return self.shrink(ops.gelu(self.expand(x)))


class Block(Module):
    """Attention and feed-forward, each added to what comes in and then normalized."""

    def __init__(self, config: BertConfig, dtype: DType) -> None:
        super().__init__()
        self.mixer = Mixer(config, dtype)
        self.mixer_norm = LayerNorm(config.hidden_size, [CPU], dtype, eps=config.layer_norm_eps)
        self.ffn = FeedForward(config, dtype)
        self.ffn_norm = LayerNorm(config.hidden_size, [CPU], dtype, eps=config.layer_norm_eps)

    def __call__(self, x: TensorValue, penalty: TensorValue) -> TensorValue:
        """Transform `x`, (token, feature)."""
        mixed = self.mixer_norm(x + self.mixer(x, penalty))
        return self.ffn_norm(mixed + self.ffn(mixed))


class Summary(Module):
    """One vector for the text."""

    def __init__(self, config: BertConfig, dtype: DType) -> None:
        super().__init__()
        self.project = Linear(config.hidden_size, config.hidden_size, dtype, CPU, has_bias=True)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The first token of `x`, (token, feature), as (1, feature)."""
        return ops.tanh(self.project(x[0:1, :]))


class Encoder(Module):
    """Token ids to a vector for each token and one for all."""

    def __init__(self, config: BertConfig, dtype: DType) -> None:
        super().__init__()
        self.dtype = dtype
        self.table = InputTable(config, dtype)
        self.blocks = LayerList([Block(config, dtype) for _ in range(config.num_hidden_layers)])
        self.summary = Summary(config, dtype)

    def __call__(
        self, tokens: TensorValue, segments: TensorValue, present: TensorValue
    ) -> tuple[TensorValue, TensorValue]:
        """The last hidden states, (token, feature), and the pooled ones, (1, feature)."""
        penalty = ops.cast((ops.cast(present, DType.float32) - 1.0) * 1e9, self.dtype)
        x = self.table(tokens, segments)
        for block in self.blocks:
            x = block(x, penalty)
        return x, self.summary(x)


def adapted(weights: Mapping[str, torch.Tensor], dtype: DType) -> dict[str, torch.Tensor]:
    """The weight adapter: Hugging Face's names and tensors as those of `Encoder`."""
    result = {}
    for name, weight in weights.items():
        for before, after in NAMES.items():
            name = name.replace(before, after)
        result[name] = weight.to(TORCH_DTYPES[dtype]).contiguous()
    return result


def original() -> BertModel:
    """The model to trust: random weights of the sizes that trained ones have, biases and norms too."""
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    model = BertModel(config)
    model.eval()  # type: ignore[no-untyped-call]  # transformers annotates no more
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if "LayerNorm.weight" in name:
                weight.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            else:
                weight.copy_((0.01 if "embeddings" in name else 0.2) * noise)
    return model


def reference() -> tensorcap.Workload:
    """The model to trust, and what it is fed."""
    inputs = {"input_ids": TOKENS, "token_type_ids": SEGMENTS, "attention_mask": PRESENT}
    return tensorcap.Workload(original(), {name: torch.tensor([ids]) for name, ids in inputs.items()})


def port(dtype: DType = DType.float32) -> tensorcap.Workload:
    """The port, on the same tokens."""
    model = original()
    encoder = Encoder(model.config, dtype)
    encoder.load_state_dict(adapted(model.state_dict(), dtype), weight_alignment=1)
    inputs = {"tokens": TOKENS, "segments": SEGMENTS, "present": PRESENT}
    once = tensorcap.MaxModel(encoder, control=False)  # a second graph takes as long to compile
    return tensorcap.Workload(once, {name: np.array(ids) for name, ids in inputs.items()})
