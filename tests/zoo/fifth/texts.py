"""Ports of encoders of text: ModernBERT, XLNet with its memory; changes of PEGASUS-X."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.fifth.parts import Labels, embedding
from tests.zoo.fourth.parts import Scores
from tests.zoo.third.parts import attend, having, heads, kept, linear, merged, turn


class Centred(nn.Module):
    """A layer norm with a gain alone."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.gain, self.eps = kept(norm.weight), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.gain, None, self.eps)


class ModernMixer(nn.Module):
    """Attention to all, or to those near by."""

    def __init__(self, attention: Any, radius: int | None) -> None:
        super().__init__()
        self.qkv, self.out = linear(attention.Wqkv.weight), linear(attention.Wo.weight)
        self.count, self.size, self.radius = attention.config.num_attention_heads, attention.head_dim, radius

    def near(self, length: int) -> Tensor:
        places = torch.arange(length)
        return (places[:, None] - places).abs() <= (length if self.radius is None else self.radius)

    def seen(self, real: Tensor) -> Tensor:
        return self.near(real.shape[1]) & real[:, None, None]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return attend(q, k, v, scale=self.size**-0.5, keep=self.seen(real))

    def forward(self, x: Tensor, angles: Tensor, real: Tensor) -> Tensor:
        q, k, v = (heads(part, self.count) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(merged(self.mixed(turn(q, angles), turn(k, angles), v, real)))
        return out


class NearMixer(ModernMixer):
    """Keys and values of those near by, gathered for each token."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        if self.radius is None:
            return super().mixed(q, k, v, real)
        side = self.radius
        k, v = (functional.pad(x, (0, 0, side, side)).unfold(2, 2 * side + 1, 1) for x in (k, v))
        keep = functional.pad(real, (side, side)).unfold(1, 2 * side + 1, 1)[:, None]
        scores = torch.einsum("bhld,bhldn->bhln", q, k) * self.size**-0.5
        weights = scores.masked_fill(~keep, float("-inf")).softmax(-1, dtype=torch.float32)
        return torch.einsum("bhln,bhldn->bhld", weights.to(v.dtype), v)


class ModernFeed(nn.Module):
    """A gated feed-forward with GELU."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        first, second = mlp.Wi.weight.chunk(2)
        self.gate, self.up, self.down = linear(first), linear(second), linear(mlp.Wo.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.gate(x)) * self.up(x))
        return out


class ModernBlock(nn.Module):
    """A layer."""

    def __init__(self, layer: Any, radius: int, mixer: type[ModernMixer]) -> None:
        super().__init__()
        self.is_local = layer.attention_type == "sliding_attention"
        self.mix = mixer(layer.attn, radius if self.is_local else None)
        first = isinstance(layer.attn_norm, nn.Identity)
        self.pre_mix = nn.Identity() if first else Centred(layer.attn_norm)
        self.pre_feed, self.feed = Centred(layer.mlp_norm), ModernFeed(layer.mlp)

    def forward(self, x: Tensor, angles: Tensor, real: Tensor) -> Tensor:
        x = x + self.mix(self.pre_mix(x), angles, real)
        out: Tensor = x + self.feed(self.pre_feed(x))
        return out


class ModernPort(nn.Module):
    """ModernBERT."""

    mixer: type[ModernMixer] = ModernMixer

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.words = kept(inner.embeddings.tok_embeddings.weight)
        self.norm_words = Centred(inner.embeddings.norm)
        rotary, radius = inner.rotary_emb, reference.config.sliding_window
        self.wide = rotary.full_attention_inv_freq.detach().clone()
        self.near = rotary.sliding_attention_inv_freq.detach().clone()
        self.blocks = nn.ModuleList([ModernBlock(layer, radius, self.mixer) for layer in inner.layers])
        self.norm = Centred(inner.final_norm)
        self.dense, self.norm_dense = linear(reference.head.dense.weight), Centred(reference.head.norm)
        self.scores = linear(reference.decoder.weight, reference.decoder.bias)

    def rates(self, block: Any) -> Tensor:
        out: Tensor = self.near if block.is_local else self.wide
        return out

    def told(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm_dense(functional.gelu(self.dense(x)))
        return out

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Scores:
        x, real = self.norm_words(self.words[input_ids]), attention_mask.bool()
        places = torch.arange(input_ids.shape[1]).float()[:, None]
        for block in self.blocks:
            x = block(x, places * self.rates(block).float(), real)
        return Scores(logits=self.scores(self.told(self.norm(x))))


class ModernNearBy(ModernPort):
    """With neighbours gathered."""

    mixer = NearMixer


class ModernRowByRow(nn.Module):
    """Each row of a batch by itself."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.inner = ModernPort(reference)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Scores:
        rows = [
            self.inner(ids[None], mask[None]).logits
            for ids, mask in zip(input_ids, attention_mask, strict=True)
        ]
        return Scores(logits=torch.cat(rows))


class XLMixer(nn.Module):
    """Attention by words, by distance and by segment, batch first."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    r: nn.Linear

    def __init__(self, attention: Any) -> None:
        super().__init__()
        width = attention.d_model
        for name in ("q", "k", "v", "r"):
            setattr(self, name, linear(getattr(attention, name).reshape(width, -1).T))
        self.out = linear(attention.o.reshape(width, -1))
        self.words, self.distances = kept(attention.r_w_bias), kept(attention.r_r_bias)
        self.segments, self.table = kept(attention.r_s_bias), kept(attention.seg_embed)
        self.norm = attention.layer_norm
        self.count, self.scale = attention.n_head, attention.scale

    def of_words(self, q: Tensor, k: Tensor) -> Tensor:
        return (q + self.words[:, None]) @ k.transpose(-1, -2)

    def picked(self, queries: int, keys: int) -> Tensor:
        """Which row of the distances, from `keys` down to `1 - queries`, each pair has."""
        return queries - torch.arange(queries)[:, None] + torch.arange(keys)

    def of_distances(self, q: Tensor, x: Tensor, keys: int) -> Tensor:
        far = (q + self.distances[:, None]) @ heads(self.r(x), self.count).transpose(-1, -2)
        index = self.picked(q.shape[2], keys).expand(*far.shape[:2], -1, -1)
        return far.gather(-1, index)

    def of_segments(self, q: Tensor, others: Tensor) -> Tensor:
        both = torch.einsum("bnid,snd->bnis", q + self.segments[:, None], self.table)
        return torch.where(others[:, None], both[..., 1:], both[..., :1])

    def finished(self, x: Tensor, mixed: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.out(merged(mixed)))
        return out

    def forward(self, x: Tensor, far: Tensor, others: Tensor, hidden: Tensor, past: Any) -> Tensor:
        every = x if past is None else torch.cat((past, x), 1)
        q, k, v = heads(self.q(x), self.count), heads(self.k(every), self.count), self.v(every)
        scores = self.of_words(q, k) + self.of_distances(q, far, k.shape[2]) + self.of_segments(q, others)
        scores = scores * self.scale - 1e30 * hidden[:, None]
        return self.finished(x, scores.softmax(-1) @ heads(v, self.count))


class XLKeyMixer(XLMixer):
    """What keys alone give is computed for keys alone."""

    def of_words(self, q: Tensor, k: Tensor) -> Tensor:
        alone = (k * self.words[:, None]).sum(-1)
        return q @ k.transpose(-1, -2) + alone[:, :, None]


class XLFeed(nn.Module):
    """Two linears and the norm of the sum."""

    def __init__(self, feed: Any) -> None:
        super().__init__()
        self.grow, self.shrink, self.norm = feed.layer_1, feed.layer_2, feed.layer_norm

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.norm(y + x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.added(x, self.shrink(functional.gelu(self.grow(x))))


class XLBlock(nn.Module):
    """A layer."""

    def __init__(self, layer: Any, mixer: type[XLMixer]) -> None:
        super().__init__()
        self.mix, self.feed = mixer(layer.rel_attn), XLFeed(layer.ff)

    def forward(self, x: Tensor, far: Tensor, others: Tensor, hidden: Tensor, past: Any) -> Tensor:
        out: Tensor = self.feed(self.mix(x, far, others, hidden, past))
        return out


class XLPort(nn.Module):
    """XLNet."""

    mixer: type[XLMixer] = XLMixer

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.transformer
        self.words = embedding(inner.word_embedding.weight)
        self.blocks = nn.ModuleList([XLBlock(layer, self.mixer) for layer in inner.layer])
        self.labels, self.most = reference.classifier, inner.mem_len

    def waves(self, angles: Tensor) -> Tensor:
        return torch.cat((angles.sin(), angles.cos()), -1)

    def far(self, queries: int, keys: int) -> Tensor:
        width = self.words.embedding_dim
        rates = 1 / torch.pow(10000, torch.arange(0, width, 2.0).float() / width)
        return self.waves(torch.arange(keys, -queries, -1.0).float()[:, None] * rates)

    def remembered(self, x: Tensor, y: Tensor, past: Any) -> Tensor:
        """What a layer was given, after what it was given before."""
        every = x if past is None else torch.cat((past, x), 1)
        return every[:, -self.most :]

    def hidden(self, attention_mask: Tensor, before: int) -> Tensor:
        """Padding, which is hidden from all but itself."""
        blank = functional.pad(1 - attention_mask, (before, 0))[:, None]
        length = attention_mask.shape[1]
        return (blank - functional.pad(torch.eye(length, dtype=blank.dtype), (before, 0)) > 0).to(blank)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, mems: Any, use_mems: bool
    ) -> Labels:
        x, length = self.words(input_ids), input_ids.shape[1]
        before = 0 if mems is None else mems[0].shape[1]
        others = token_type_ids[:, :, None] != functional.pad(token_type_ids, (before, 0))[:, None]
        far = self.far(length, length + before).to(x.dtype)[None]
        hidden, memory = self.hidden(attention_mask, before), []
        for at, block in enumerate(self.blocks):
            past = None if mems is None else mems[at]
            y = block(x, far, others, hidden, past)
            memory.append(self.remembered(x, y, past))
            x = y
        return Labels(logits=self.labels(x), mems=tuple(memory))


class XLByKeys(XLPort):
    """With the terms of keys apart."""

    mixer = XLKeyMixer


def blocks_as_a_mask(
    self: Any,
    global_k: Tensor,
    global_v: Tensor,
    local_q: Tensor,
    local_k: Tensor,
    local_v: Tensor,
    mask: Tensor,
    dim: Any,
) -> Any:
    """Attention of all tokens to all, with those of other blocks hidden."""
    k, v = torch.cat((global_k, local_k), 2), torch.cat((global_v, local_v), 2)
    block = torch.arange(local_q.shape[2]) // dim.block_size
    apart = functional.pad(block[:, None] != block, (dim.global_len, 0))
    scores = local_q @ k.transpose(-1, -2) + functional.pad(mask, (dim.global_len, 0))[:, None, None]
    scores = scores.masked_fill(apart, float("-inf"))
    mixed = scores.softmax(-1) @ v
    return torch.unflatten(mixed, 2, (dim.num_blocks, dim.block_size)), None


def pegasus_with_blocks_as_a_mask(reference: Any) -> Any:
    """Local attention of the encoder without blocks."""
    sites = [f"model.encoder.layers.{at}.self_attn" for at in range(3)]
    having(*sites, compute_local_attention_representations=blocks_as_a_mask)(reference)
    return reference


def pegasus_with_factor_in_tables(reference: Any) -> Any:
    """The factor of the words' vectors, 8, in the tables."""
    for side in (reference.model.encoder, reference.model.decoder):
        table = side.embed_tokens
        table.weight = nn.Parameter(table.weight.detach() * table.embed_scale)
        table.embed_scale = 1.0
    return reference


def joined(
    self: Any,
    global_q: Tensor,
    global_k: Tensor,
    global_v: Tensor,
    local_k: Tensor,
    local_v: Tensor,
    mask: Tensor,
    dim: Any,
) -> Any:
    """Global tokens' attention by the library's function, which need not divide any more."""
    k, v = torch.cat((local_k, global_k), 2), torch.cat((local_v, global_v), 2)
    bias = functional.pad(mask, (0, dim.global_len))[:, None, None]
    return functional.scaled_dot_product_attention(global_q, k, v, attn_mask=bias, scale=1.0), None


def pegasus_with_globals_last(reference: Any) -> Any:
    """Global tokens see the words first and themselves last."""
    sites = [f"model.encoder.layers.{at}.self_attn" for at in range(3)]
    having(*sites, compute_global_attention_representations=joined)(reference)
    return reference
