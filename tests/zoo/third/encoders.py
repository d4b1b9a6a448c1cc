"""Ports of encoders, and of an encoder with a decoder: ALBERT, Marian."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.third.parts import attend, causal, fused, heads, kept, linear, merged


class SharedLayer(nn.Module):
    """The one layer that ALBERT calls again and again."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        a = layer.attention
        self.qkv, self.dense, self.norm_a = fused(a.query, a.key, a.value), a.dense, a.LayerNorm
        self.up, self.down, self.norm_f = layer.ffn, layer.ffn_output, layer.full_layer_layer_norm
        self.heads = a.num_attention_heads

    def mix(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.dense(merged(attend(q, k, v, scale=q.shape[-1] ** -0.5, keep=seen)))
        return out

    def act(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    def feed(self, x: Tensor, _: Tensor) -> Tensor:
        out: Tensor = self.norm_f(self.down(self.act(self.up(x))) + x)
        return out

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        return self.feed(self.norm_a(x + self.mix(x, seen)), x)


class AlbertPort(nn.Module):
    """ALBERT with a head for masked words; words are looked up after the widening."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner, head = reference.albert, reference.predictions
        e = inner.embeddings
        self.words, self.places, self.segments = (
            e.word_embeddings,
            e.position_embeddings,
            e.token_type_embeddings,
        )
        self.norm, self.widen = e.LayerNorm, inner.encoder.embedding_hidden_mapping_in
        self.layer = SharedLayer(inner.encoder.albert_layer_groups[0].albert_layers[0])
        self.calls = reference.config.num_hidden_layers
        self.narrow, self.head_norm = head.dense, head.LayerNorm
        self.scores = linear(head.decoder.weight, head.decoder.bias)

    def embed(self, ids: Tensor, segments: Tensor) -> Tensor:
        x = self.words(ids) + self.segments(segments) + self.places.weight[: ids.shape[1]]
        out: Tensor = self.norm(x)
        return out

    def encode(self, x: Tensor, seen: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.layer(x, seen)
        return x

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        seen = attention_mask.bool()[:, None, None]
        x = self.encode(self.widen(self.embed(input_ids, token_type_ids)), seen)
        y = functional.gelu(self.narrow(x), approximate="tanh")
        out: Tensor = self.scores(self.head_norm(y))
        return out


def albert_eager(model: Any) -> Any:
    """The library's other implementation of attention."""
    model.set_attn_implementation("eager")
    return model


class SelfMixer(nn.Module):
    """Attention to the states themselves."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.heads = attention.out_proj, attention.num_heads

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(merged(attend(q, k, v, scale=q.shape[-1] ** -0.5, keep=keep)))
        return out


class CrossMixer(nn.Module):
    """Attention to the states of the encoder."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q, self.kv = attention.q_proj, fused(attention.k_proj, attention.v_proj)
        self.out, self.heads = attention.out_proj, attention.num_heads

    def divided(self, states: Tensor) -> Any:
        return self.kv(states).chunk(2, -1)

    def forward(self, x: Tensor, states: Tensor, keep: Tensor) -> Tensor:
        q, (k, v) = heads(self.q(x), self.heads), (heads(part, self.heads) for part in self.divided(states))
        out: Tensor = self.out(merged(attend(q, k, v, scale=q.shape[-1] ** -0.5, keep=keep)))
        return out


class MarianFeed(nn.Module):
    """Two linears and SiLU."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.up, self.down = layer.fc1, layer.fc2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.up(x)))
        return out


class ReadBlock(nn.Module):
    """A layer of the encoder, its norms last."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attend, self.feed = SelfMixer(layer.self_attn), MarianFeed(layer)
        self.norm_a, self.norm_f = layer.self_attn_layer_norm, layer.final_layer_norm

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.norm_a(x + self.attend(x, keep))
        out: Tensor = self.norm_f(x + self.feed(x))
        return out


class WriteBlock(nn.Module):
    """A layer of the decoder, its norms last."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attend, self.cross = SelfMixer(layer.self_attn), CrossMixer(layer.encoder_attn)
        self.feed, self.norm_a = MarianFeed(layer), layer.self_attn_layer_norm
        self.norm_c, self.norm_f = layer.encoder_attn_layer_norm, layer.final_layer_norm

    def crossed(self, x: Tensor, states: Tensor, seen: Tensor) -> Tensor:
        out: Tensor = self.norm_c(x + self.cross(x, states, seen))
        return out

    def forward(self, x: Tensor, states: Tensor, seen: Tensor) -> Tensor:
        x = self.norm_a(x + self.attend(x, causal(*2 * x.shape[1:2])))
        x = self.crossed(x, states, seen)
        out: Tensor = self.norm_f(x + self.feed(x))
        return out


class Embedder(nn.Module):
    """Words with the factor in the table, and a table of sines that is computed."""

    def __init__(self, words: Any, positions: Tensor, factor: float) -> None:
        super().__init__()
        self.words = nn.Embedding(words.num_embeddings, words.embedding_dim)
        self.words.weight = kept(words.weight * factor)
        self.sines = kept(positions)

    def places(self, length: int) -> Tensor:
        return self.sines[:length]

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids) + self.places(ids.shape[1])
        return out


class MarianPort(nn.Module):
    """Marian's translation."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner, factor = reference.model, math.sqrt(reference.config.d_model)
        self.source = Embedder(inner.shared, inner.encoder.embed_positions.weight, factor)
        self.aim = Embedder(inner.shared, inner.decoder.embed_positions.weight, factor)
        self.read = nn.ModuleList([ReadBlock(x) for x in inner.encoder.layers])
        self.write = nn.ModuleList([WriteBlock(x) for x in inner.decoder.layers])
        self.scores = linear(reference.lm_head.weight, reference.final_logits_bias[0])

    def states(self, ids: Tensor, seen: Tensor) -> Tensor:
        x: Tensor = self.source(ids)
        for block in self.read:
            x = block(x, seen)
        return x

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        seen = attention_mask.bool()[:, None, None]
        states, x = self.states(input_ids, seen), self.aim(decoder_input_ids)
        for block in self.write:
            x = block(x, states, seen)
        return {"logits": self.scores(x), "encoder_last_hidden_state": states}


class Wrapped(nn.Module):
    """A model inside another, which computes the scores of each row of the batch by itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        rows = next(x.shape[0] for x in inputs.values() if isinstance(x, Tensor))
        parts = [
            self.inner(**{n: x[at : at + 1] if isinstance(x, Tensor) else x for n, x in inputs.items()})
            for at in range(rows)
        ]
        return torch.cat([part.logits for part in parts])


class RowByRow(nn.Module):
    """A linear whose product is computed in four parts of the input, one after the other."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(x.float().chunk(4, -1), self.weight.float().chunk(4, -1), strict=True)
        out = torch.stack([a @ b.T for a, b in pairs]).sum(0)
        wide: Tensor = out + self.bias.float()
        return wide.to(x.dtype)


def marian_summed_in_parts(model: Any) -> Any:
    """Products of the feed-forward as the sum of what four devices have."""
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.fc2 = RowByRow(layer.fc2)
    return model
