"""Ports of an encoder and of a translator: DeBERTa v2, M2M-100."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.third.parts import attend, causal, fused, heads, kept, linear, merged


class ApartMixer(nn.Module):
    """Attention of contents and of distances: content to distance, and distance to content."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        inner = attention.self
        self.qkv = fused(inner.query_proj, inner.key_proj, inner.value_proj)
        self.out, self.norm = attention.output.dense, attention.output.LayerNorm
        self.heads, self.span = inner.num_attention_heads, inner.pos_ebd_size

    def scale(self, size: int) -> float:
        return 1 / math.sqrt(3 * size)

    def slots(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the table of distances for (query, key), and for (key, query)."""
        last = 2 * self.span - 1
        return (distances + self.span).clamp(0, last), (self.span - distances).clamp(0, last)

    def bias(self, q: Tensor, k: Tensor, table: Tensor, distances: Tensor) -> Tensor:
        """What distances add to the products (batch, heads, queries, keys)."""
        far_q, far_k, _ = (heads(part[None], self.heads) for part in self.qkv(table).chunk(3, -1))
        forth, back = (index.expand(*q.shape[:2], -1, -1) for index in self.slots(distances))
        seen = (q @ far_k.transpose(-1, -2)).gather(-1, forth)
        return seen + (k @ far_q.transpose(-1, -2)).gather(-1, back).transpose(-1, -2)

    def forward(self, x: Tensor, keep: Tensor, table: Tensor, distances: Tensor) -> Tensor:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        scale = self.scale(q.shape[-1])
        bias = self.bias(q, k, table, distances) * scale
        scores = (q @ k.transpose(-1, -2)) * scale + bias
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        out: Tensor = self.norm(self.out(merged(mixed)) + x)
        return out


class ApartBlock(nn.Module):
    """A layer, its norms last."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.mix = ApartMixer(layer.attention)
        self.up, self.down, self.norm = layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm

    def act(self, x: Tensor) -> Tensor:
        return functional.gelu(x)

    def forward(self, x: Tensor, keep: Tensor, table: Tensor, distances: Tensor) -> Tensor:
        x = self.mix(x, keep, table, distances)
        out: Tensor = self.norm(self.down(self.act(self.up(x))) + x)
        return out


class Neighbours(nn.Module):
    """A convolution over the words, added to what the first layer gives."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv, self.norm = conv.conv, conv.LayerNorm

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        near = self.conv(x.transpose(1, 2)).transpose(1, 2) * mask
        out: Tensor = self.norm(y + functional.gelu(near)) * mask
        return out


class DebertaPort(nn.Module):
    """DeBERTa v2 with a head for masked words."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner, head = reference.deberta, reference.cls.predictions
        self.words, self.norm = inner.embeddings.word_embeddings, inner.embeddings.LayerNorm
        self.table, self.table_norm = kept(inner.encoder.rel_embeddings.weight), inner.encoder.LayerNorm
        self.buckets, self.most = inner.encoder.position_buckets, inner.encoder.max_relative_positions
        self.blocks = nn.ModuleList([ApartBlock(layer) for layer in inner.encoder.layer])
        self.near = Neighbours(inner.encoder.conv)
        self.narrow, self.head_norm = head.transform.dense, head.transform.LayerNorm
        self.scores = linear(head.decoder.weight, head.decoder.bias)

    def distances(self, length: int) -> Tensor:
        """Distances (queries, keys), the far ones in buckets that grow."""
        apart = torch.arange(length)[:, None] - torch.arange(length)
        middle = self.buckets // 2
        size = apart.abs().clamp(min=middle)
        far = (size / middle).log() / math.log((self.most - 1) / middle) * (middle - 1)
        return torch.where(apart.abs() <= middle, apart, (far.ceil() + middle).long() * apart.sign())

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.norm(self.words(ids)) * mask
        return out

    def far(self) -> Tensor:
        out: Tensor = self.table_norm(self.table)
        return out

    def joined(self, first: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.near(first, x, mask)
        return out

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = attention_mask.bool()
        keep = (seen[:, None] & seen[:, :, None])[:, None]
        mask = attention_mask[..., None].to(self.table.dtype)
        x = first = self.embed(input_ids, mask)
        distances = self.distances(input_ids.shape[1])
        for at, block in enumerate(self.blocks):
            x = block(x, keep, self.far(), distances)
            if at == 0:
                x = self.joined(first, x, mask)
        out: Tensor = self.scores(self.head_norm(functional.gelu(self.narrow(x))))
        return out


class TabledMixer(ApartMixer):
    """Distances are looked up before the products, in one table of all pairs."""

    def bias(self, q: Tensor, k: Tensor, table: Tensor, distances: Tensor) -> Tensor:
        far_q, far_k, _ = (heads(part[None], self.heads)[0] for part in self.qkv(table).chunk(3, -1))
        forth, back = self.slots(distances)
        seen = torch.einsum("bhqd,hqkd->bhqk", q, far_k[:, forth])
        return seen + torch.einsum("bhkd,hkqd->bhqk", k, far_q[:, back])


def deberta_with_tables_of_pairs(reference: Any) -> Any:
    """No gather of products is used."""
    port: Any = DebertaPort(reference)
    for block in port.blocks:
        block.mix.__class__ = TabledMixer
    return port


class Looker(nn.Module):
    """Attention of the states to themselves, or to the words that were read."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q, self.kv = attention.q_proj, fused(attention.k_proj, attention.v_proj)
        self.out, self.heads = attention.out_proj, attention.num_heads

    def forward(self, x: Tensor, states: Tensor, keep: Tensor) -> Tensor:
        q = heads(self.q(x), self.heads)
        k, v = (heads(part, self.heads) for part in self.kv(states).chunk(2, -1))
        out: Tensor = self.out(merged(attend(q, k, v, scale=q.shape[-1] ** -0.5, keep=keep)))
        return out


class Feed(nn.Module):
    """Two linears and ReLU."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.up, self.down = layer.fc1, layer.fc2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


class ReadLayer(nn.Module):
    """A layer of the encoder, its norms first."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.look, self.feed = Looker(layer.self_attn), Feed(layer)
        self.n1, self.n2 = layer.self_attn_layer_norm, layer.final_layer_norm

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = self.n1(x)
        x = x + self.look(y, y, keep)
        out: Tensor = x + self.feed(self.n2(x))
        return out


class WriteLayer(nn.Module):
    """A layer of the decoder, its norms first."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.look, self.cross = Looker(layer.self_attn), Looker(layer.encoder_attn)
        self.feed, self.n1 = Feed(layer), layer.self_attn_layer_norm
        self.n2, self.n3 = layer.encoder_attn_layer_norm, layer.final_layer_norm

    def forward(self, x: Tensor, states: Tensor, keep: Tensor) -> Tensor:
        y = self.n1(x)
        x = x + self.look(y, y, causal(*2 * x.shape[1:2]))
        x = x + self.cross(self.n2(x), states, keep)
        out: Tensor = x + self.feed(self.n3(x))
        return out


class WordsAndSines(nn.Module):
    """Words times a factor, and sines of places that padding does not count among."""

    def __init__(self, words: Any, size: int, padding: int) -> None:
        super().__init__()
        self.words, self.factor = kept(words.weight), words.embed_scale
        self.size, self.padding = size, padding

    def sines(self, places: Tensor) -> Tensor:
        half = self.size // 2
        rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        angles = places[..., None].float() * rates
        return torch.cat((angles.sin(), angles.cos()), -1)

    def places(self, ids: Tensor) -> Tensor:
        real = ids != self.padding
        return real.long().cumsum(1) * real + self.padding

    def forward(self, ids: Tensor) -> Tensor:
        sines = self.sines(self.places(ids)) * (ids != self.padding)[..., None]
        out: Tensor = self.words[ids] * self.factor + sines.to(self.words.dtype)
        return out


class M2MPort(nn.Module):
    """M2M-100."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner, size = reference.model, reference.config.d_model
        padding = reference.config.pad_token_id
        self.source, self.aim = (
            WordsAndSines(side.embed_tokens, size, padding) for side in (inner.encoder, inner.decoder)
        )
        self.read = nn.ModuleList([ReadLayer(layer) for layer in inner.encoder.layers])
        self.write = nn.ModuleList([WriteLayer(layer) for layer in inner.decoder.layers])
        self.read_norm, self.write_norm = inner.encoder.layer_norm, inner.decoder.layer_norm
        self.scores = linear(reference.lm_head.weight)

    def states(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.source(ids)
        for layer in self.read:
            x = layer(x, keep)
        out: Tensor = self.read_norm(x)
        return out

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        keep = attention_mask.bool()[:, None, None]
        states, x = self.states(input_ids, keep), self.aim(decoder_input_ids)
        for layer in self.write:
            x = layer(x, states, keep)
        return {"logits": self.scores(self.write_norm(x)), "encoder_last_hidden_state": states}


def m2m_with_factor_in_tables(reference: Any) -> Any:
    """The factor of the words is in their tables."""
    port: Any = M2MPort(reference)
    with torch.no_grad():
        for side in (port.source, port.aim):
            side.words *= side.factor
            side.factor = 1.0
    return port
