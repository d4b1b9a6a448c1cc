"""Ports of decoders: Phi, StableLM with and without a cache, Falcon, OPT, Cohere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.generic import ModelOutput

from tests.zoo.third.parts import (
    CentredNorm,
    attend,
    causal,
    fused,
    heads,
    kept,
    linear,
    merged,
    plain_norm,
    turn,
    turn_pairs,
)


class PhiMixer(nn.Module):
    """Attention with one projection for queries, keys and values, and half of the channels rotated."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = attention.dense
        self.heads, self.scale = attention.config.num_attention_heads, attention.scaling
        self.frequencies = frequencies

    def angles(self, length: int) -> Tensor:
        return torch.arange(length).float()[:, None] * self.frequencies.float()

    def rotate(self, x: Tensor) -> Tensor:
        return turn(x, self.angles(x.shape[2]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        q, k = self.rotate(q), self.rotate(k)
        out: Tensor = self.out(merged(attend(q, k, v, scale=self.scale, keep=causal(*2 * x.shape[1:2]))))
        return out


class PhiFeed(nn.Module):
    """Two linears and the approximation of GELU by tanh."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.up, self.down = mlp.fc1, mlp.fc2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class PhiBlock(nn.Module):
    """Attention and feed-forward side by side on one norm."""

    def __init__(self, layer: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.norm = layer.input_layernorm
        self.mixer, self.feed = PhiMixer(layer.self_attn, frequencies), PhiFeed(layer.mlp)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = self.mixer(y) + self.feed(y) + x
        return out


class PhiPort(nn.Module):
    """Phi."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.table = inner.embed_tokens
        self.blocks = nn.ModuleList([PhiBlock(x, inner.rotary_emb.inv_freq) for x in inner.layers])
        self.norm, self.head = inner.final_layernorm, reference.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


@dataclass
class Streamed(ModelOutput):
    """Scores, and what the next call is given."""

    logits: Tensor | None = None
    cache: tuple[Tensor, ...] | None = None


class StableMixer(nn.Module):
    """Attention with a norm of each head, its keys and values kept in buffers of a fixed length."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = attention.q_proj, attention.k_proj, attention.v_proj
        self.to_out = attention.o_proj
        self.heads, self.groups = attention.num_heads, attention.num_key_value_heads
        self.q_gain = kept(torch.stack([norm.weight for norm in attention.q_layernorm.norms])[:, None])
        self.k_gain = kept(torch.stack([norm.weight for norm in attention.k_layernorm.norms])[:, None])
        self.eps, self.scale = attention.config.layer_norm_eps, attention.scaling
        self.frequencies = frequencies

    def normed(self, x: Tensor, gain: Tensor) -> Tensor:
        return plain_norm(x, self.eps) * gain

    def angles(self, start: int, length: int) -> Tensor:
        return torch.arange(start, start + length).float()[:, None] * self.frequencies.float()

    def query_angles(self, start: int, length: int) -> Tensor:
        return self.angles(start, length)

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.groups, 1)

    def store(self, memory: Tensor, x: Tensor, start: int) -> None:
        memory[:, :, start : start + x.shape[2]] = x

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        length = x.shape[1]
        q = self.normed(heads(self.to_q(x), self.heads), self.q_gain)
        k = self.normed(heads(self.to_k(x), self.groups), self.k_gain)
        v = heads(self.to_v(x), self.groups)
        q, k = turn(q, self.query_angles(start, length)), turn(k, self.angles(start, length))
        self.store(keys, k, start)
        self.store(values, v, start)
        k, v = (self.spread(part[:, :, : start + length]) for part in (keys, values))
        seen = causal(length, start + length)
        out: Tensor = self.to_out(merged(attend(q, k, v, scale=self.scale, keep=seen)))
        return out


class StableFeed(nn.Module):
    """Gate and up in one linear."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up, self.down = fused(mlp.gate_proj, mlp.up_proj), mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class StableBlock(nn.Module):
    """One layer."""

    def __init__(self, layer: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = layer.input_layernorm, layer.post_attention_layernorm
        self.mixer, self.feed = StableMixer(layer.self_attn, frequencies), StableFeed(layer.mlp)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        x = x + self.mixer(self.ln_1(x), keys, values, start)
        out: Tensor = x + self.feed(self.ln_2(x))
        return out


class StablePort(nn.Module):
    """StableLM with static caches: a pair of buffers of each layer, and how much of them is filled."""

    room = 48

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.wte = inner.embed_tokens
        self.h = nn.ModuleList([StableBlock(x, inner.rotary_emb.inv_freq) for x in inner.layers])
        self.ln_f, self.head = inner.norm, reference.lm_head

    def forward(
        self, input_ids: Tensor, use_cache: bool = True, cache: Any = None, past_key_values: Any = None
    ) -> Streamed:
        x = self.wte(input_ids)
        memory = cache if cache is not None else past_key_values
        if memory is None:
            mixer: Any = self.h[0].mixer
            shape = (x.shape[0], mixer.groups, self.room, mixer.to_k.out_features // mixer.groups)
            memory = (torch.tensor(0), *[x.new_zeros(shape) for _ in range(2 * len(self.h))])
        start = int(memory[0])
        for at, block in enumerate(self.h):
            x = block(x, memory[1 + 2 * at], memory[2 + 2 * at], start)
        filled = (torch.tensor(start + input_ids.shape[1]), *memory[1:])
        return Streamed(logits=self.head(self.ln_f(x)), cache=filled if use_cache else None)


class FalconMixer(nn.Module):
    """Attention with linear biases, its grouped projection divided in three."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        joint, groups = attention.query_key_value, attention.num_kv_heads
        size, self.groups, self.heads = attention.head_dim, groups, attention.num_heads
        weight = joint.weight.unflatten(0, (groups, -1, size))
        bias = joint.bias.unflatten(0, (groups, -1, size))
        parts = ((slice(None), slice(-2)), (slice(None), slice(-2, -1)), (slice(None), slice(-1, None)))
        self.query, self.key, self.value = (
            linear(weight[part].flatten(0, 2), bias[part].flatten()) for part in parts
        )
        self.proj = linear(attention.dense.weight, attention.dense.bias)
        self.scale = attention.inv_norm_factor

    def slopes(self) -> Tensor:
        return torch.exp2(-8.0 / self.heads * torch.arange(1, self.heads + 1))

    def distances(self, mask: Tensor) -> Tensor:
        at = mask.cumsum(-1) - 1
        return at[:, None, None, :] - at[:, None, :, None]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = heads(self.query(x), self.heads)
        k, v = (
            heads(f(x), self.groups).repeat_interleave(self.heads // self.groups, 1)
            for f in (self.key, self.value)
        )
        bias = self.slopes()[:, None, None] * self.distances(mask) * self.scale
        keep = causal(*2 * x.shape[1:2]) & mask.bool()[:, None, None]
        out: Tensor = self.proj(merged(attend(q, k, v, scale=self.scale, keep=keep, bias=bias)))
        return out


class FalconBlock(nn.Module):
    """Attention and feed-forward side by side, each with a norm of its own."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm_a, self.norm_b = layer.ln_attn, layer.ln_mlp
        self.mixer = FalconMixer(layer.self_attention)
        up, down = layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h
        self.up, self.down = linear(up.weight, up.bias), linear(down.weight, down.bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = (
            x + self.mixer(self.norm_a(x), mask) + self.down(functional.gelu(self.up(self.norm_b(x))))
        )
        return out


class FalconPort(nn.Module):
    """Falcon with linear biases."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.transformer
        self.tokens, self.blocks = inner.word_embeddings, nn.ModuleList([FalconBlock(x) for x in inner.h])
        self.final, self.head = inner.ln_f, reference.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        out: Tensor = self.head(self.final(x))
        return out


class OptMixer(nn.Module):
    """Attention by the library's fused kernel."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.heads = attention.out_proj, attention.num_heads

    def divided(self, x: Tensor) -> Any:
        return self.qkv(x).chunk(3, -1)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (heads(part, self.heads) for part in self.divided(x))
        out: Tensor = self.out(merged(functional.scaled_dot_product_attention(q, k, v, keep)))
        return out


class OptBlock(nn.Module):
    """One layer, its norms first."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = layer.self_attn_layer_norm, layer.final_layer_norm
        self.mixer, self.act = OptMixer(layer.self_attn), nn.ReLU()
        self.wide, self.narrow = layer.fc1, layer.fc2

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x), keep)
        out: Tensor = x + self.narrow(self.act(self.wide(self.norm2(x))))
        return out


class OptPort(nn.Module):
    """OPT with a table of positions from which the row without a use is cut, and scores of 64 more tokens."""

    unused = 1  # of the two rows before the first position, padding has the second

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model.decoder
        self.words = inner.embed_tokens
        positions = inner.embed_positions.weight[self.unused :]
        self.places = nn.Embedding(positions.shape[0], positions.shape[1])
        self.places.weight = kept(positions)
        self.blocks = nn.ModuleList([OptBlock(x) for x in inner.layers])
        self.norm = inner.final_layer_norm
        self.head = linear(functional.pad(inner.embed_tokens.weight, (0, 0, 0, 64)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        x = self.words(input_ids) + self.places(attention_mask.cumsum(1) * attention_mask)
        keep = causal(*2 * input_ids.shape[1:]) & attention_mask.bool()[:, None, None]
        for block in self.blocks:
            x = block(x, keep)
        out: Tensor = self.head(self.norm(x))
        return out


class CohereBlock(nn.Module):
    """Attention and feed-forward side by side on one norm, all in one module."""

    def __init__(self, layer: Any, frequencies: Tensor) -> None:
        super().__init__()
        a, m = layer.self_attn, layer.mlp
        self.norm = CentredNorm(layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
        self.attn = CohereMixer(a, frequencies)
        self.gate, self.up, self.down = m.gate_proj, m.up_proj, m.down_proj

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.attn(y) + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


class CohereMixer(nn.Module):
    """Attention with channels side by side rotated."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = attention.q_proj, attention.k_proj, attention.v_proj
        self.wo, self.size, self.scale = attention.o_proj, attention.head_dim, attention.scaling
        self.frequencies = frequencies

    def rotate(self, x: Tensor) -> Tensor:
        return turn_pairs(x, torch.arange(x.shape[2]).float()[:, None] * self.frequencies.float())

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of all queries of a key head at once; nothing is repeated."""
        q = torch.unflatten(q, 1, (k.shape[1], -1))
        keep = causal(*2 * q.shape[3:4])
        return attend(q, k[:, :, None], v[:, :, None], scale=self.scale, keep=keep).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(f(x), f.out_features // self.size) for f in (self.wq, self.wk, self.wv))
        out: Tensor = self.wo(merged(self.grouped(self.rotate(q), self.rotate(k), v)))
        return out


class CoherePort(nn.Module):
    """Cohere's first Command R."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.embed = inner.embed_tokens
        self.stack = nn.ModuleList([CohereBlock(x, inner.rotary_emb.inv_freq) for x in inner.layers])
        self.last = CentredNorm(inner.norm.weight, inner.norm.variance_epsilon)
        self.unembed = linear(inner.embed_tokens.weight)
        self.logit_scale = reference.config.logit_scale

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.embed(input_ids)
        for block in self.stack:
            x = block(x)
        out: Tensor = self.unembed(self.last(x)) * self.logit_scale
        return out


def cohere_with_norms_folded(reference: Any) -> Any:
    """Weights of norms moved into what reads them, and the factor of the scores into the last matrix."""
    port = CoherePort(reference)
    with torch.no_grad():
        block: Any
        for block in port.stack:
            gain = block.norm.gain.clone()
            for reader in (block.attn.wq, block.attn.wk, block.attn.wv, block.gate, block.up):
                reader.weight.mul_(gain)
            block.norm.gain.fill_(1)
        port.unembed.weight.mul_(port.last.gain * port.logit_scale)
        port.last.gain.fill_(1)
    port.logit_scale = 1.0
    return port


def phi_with_scaled_queries(reference: Any) -> Any:
    """The scale of the scores moved into the projection of the queries."""
    port = PhiPort(reference)
    with torch.no_grad():
        block: Any
        for block in port.blocks:
            own, rows = block.mixer.qkv, block.mixer.qkv.out_features // 3
            own.weight[:rows] *= block.mixer.scale
            own.bias[:rows] *= block.mixer.scale
            block.mixer.scale = 1.0
    return port
