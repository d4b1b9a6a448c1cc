"""Ports of decoders: GPT-Neo with and without a cache, GLM-4, OLMoE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.fourth.parts import Experts, Gated, Rms, Router, Scores
from tests.zoo.third.parts import attend, causal, fused, heads, kept, linear, merged, turn, turn_pairs


class NeoMixer(nn.Module):
    """Attention whose scores are not divided, to all before or to the last few."""

    def __init__(self, attention: Any, window: int) -> None:
        super().__init__()
        inner = attention.attention
        self.qkv, self.out = fused(inner.q_proj, inner.k_proj, inner.v_proj), inner.out_proj
        self.heads, self.scale = inner.num_heads, 1.0
        self.window = window if attention.attention_type == "local" else None

    def seen(self, queries: int, keys: int) -> Tensor:
        back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        return (back >= 0) & (back < (self.window or keys))

    def remembered(self, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))

    def forward(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        k, v = self.remembered(past, k, v)
        keep = self.seen(q.shape[2], k.shape[2])
        out: Tensor = self.out(merged(attend(q, k, v, scale=self.scale, keep=keep)))
        return out, (k, v)


class NeoFeed(nn.Module):
    """Two linears and the approximation of GELU."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.grow, self.shrink = mlp.c_fc, mlp.c_proj

    def act(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shrink(self.act(self.grow(x)))
        return out


class NeoBlock(nn.Module):
    """A layer."""

    def __init__(self, layer: Any, window: int) -> None:
        super().__init__()
        self.pre_mix, self.pre_feed = layer.ln_1, layer.ln_2
        self.mix, self.feed = NeoMixer(layer.attn, window), NeoFeed(layer.mlp)

    def forward(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        mixed, kept_states = self.mix(self.pre_mix(x), past)
        x = x + mixed
        return x + self.feed(self.pre_feed(x)), kept_states


class NeoEmbedder(nn.Module):
    """Words and places."""

    def __init__(self, words: Any, places: Any) -> None:
        super().__init__()
        self.words, self.places = kept(words.weight), kept(places.weight)

    def forward(self, ids: Tensor, start: int) -> Tensor:
        return self.words[ids] + self.places[start : start + ids.shape[1]]


class NeoPort(nn.Module):
    """GPT-Neo."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.transformer
        self.embed = NeoEmbedder(inner.wte, inner.wpe)
        self.blocks = nn.ModuleList([NeoBlock(x, reference.config.window_size) for x in inner.h])
        self.norm, self.head = inner.ln_f, linear(reference.lm_head.weight)

    def start(self, cache: Any) -> int:
        return 0 if cache is None else int(cache[0][0].shape[2])

    def forward(self, input_ids: Tensor, use_cache: bool = True, cache: Any = None) -> Scores:
        x = self.embed(input_ids, self.start(cache))
        pasts = cache or [None] * len(self.blocks)
        states = []
        for block, past in zip(self.blocks, pasts, strict=True):
            x, state = block(x, past)
            states.append(state)
        return Scores(logits=self.head(self.norm(x)), cache=tuple(states) if use_cache else None)


class NeoSdpaMixer(NeoMixer):
    """Attention by the library's function, which divides; queries are made longer by as much."""

    def __init__(self, attention: Any, window: int) -> None:
        super().__init__(attention, window)
        width = self.qkv.in_features
        with torch.no_grad():
            self.qkv.weight[:width] *= (width // self.heads) ** 0.5

    def forward(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        k, v = self.remembered(past, k, v)
        mask = self.seen(q.shape[2], k.shape[2])
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(merged(mixed))
        return out, (k, v)


def neo_with_scaled_queries(reference: Any) -> Any:
    """The factor that attention does not have, in the weights."""
    port = NeoPort(reference)
    for block, layer in zip(port.blocks, reference.transformer.h, strict=True):
        block.mix = NeoSdpaMixer(layer.attn, reference.config.window_size)
    return port


class GlmMixer(nn.Module):
    """Attention with pairs of the first half of the channels rotated."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.size = attention.o_proj, attention.head_dim
        self.queries = attention.q_proj.out_features // self.size
        self.groups = attention.k_proj.out_features // self.size
        self.frequencies = frequencies

    def angles(self, length: int) -> Tensor:
        return torch.arange(length).float()[:, None] * self.frequencies.float()

    def rotate(self, x: Tensor) -> Tensor:
        angles = self.angles(x.shape[2])
        size = 2 * angles.shape[-1]
        return torch.cat((turn_pairs(x[..., :size], angles), x[..., size:]), -1)

    def divided(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        every = heads(self.qkv(x), self.queries + 2 * self.groups)
        q, k, v = torch.split(every, [self.queries, self.groups, self.groups], 1)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.divided(x)
        q, k = self.rotate(q), self.rotate(k)
        k, v = (part.repeat_interleave(self.queries // self.groups, 1) for part in (k, v))
        mixed = attend(q, k, v, scale=self.size**-0.5, keep=causal(*2 * x.shape[1:2]))
        out: Tensor = self.out(merged(mixed))
        return out


class GlmBlock(nn.Module):
    """A layer with norms before and after its parts."""

    def __init__(self, layer: Any, frequencies: Tensor) -> None:
        super().__init__()
        norms = (
            layer.input_layernorm,
            layer.post_self_attn_layernorm,
            layer.post_attention_layernorm,
            layer.post_mlp_layernorm,
        )
        self.n1, self.n2, self.n3, self.n4 = (Rms(n.weight, n.variance_epsilon) for n in norms)
        self.mix = GlmMixer(layer.self_attn, frequencies)
        gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
        self.feed = Gated(gate, up, layer.mlp.down_proj.weight)

    def mixed(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.n2(self.mix(self.n1(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(x)
        out: Tensor = x + self.n4(self.feed(self.n3(x)))
        return out


class GlmPort(nn.Module):
    """GLM-4."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        frequencies = inner.rotary_emb.inv_freq
        self.words = inner.embed_tokens
        self.blocks = nn.ModuleList([GlmBlock(layer, frequencies) for layer in inner.layers])
        self.norm = Rms(inner.norm.weight, inner.norm.variance_epsilon)
        self.head = reference.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


class GlmHalvesMixer(GlmMixer):
    """Attention on rows of weights in the order that lets halves be rotated."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__(attention, frequencies)
        turned = 2 * len(frequencies)
        order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, self.size)]
        count = self.queries + self.groups
        rows = torch.tensor([head * self.size + at for head in range(count) for at in order])
        with torch.no_grad():
            self.qkv.weight[: len(rows)] = self.qkv.weight[rows].clone()
            self.qkv.bias[: len(rows)] = self.qkv.bias[rows].clone()

    def rotate(self, x: Tensor) -> Tensor:
        return turn(x, self.angles(x.shape[2]))


def glm_with_rows_reordered(reference: Any) -> Any:
    """Halves are rotated rather than pairs, as most runtimes do."""
    port = GlmPort(reference)
    for block, layer in zip(port.blocks, reference.model.layers, strict=True):
        block.mix = GlmHalvesMixer(layer.self_attn, reference.model.rotary_emb.inv_freq)
    return port


@torch.compile(backend="eager", dynamic=True)
def compiled_gate(gate: Tensor, up: Tensor) -> Tensor:
    """The part of a feed-forward between its products."""
    return functional.silu(gate) * up


class CompiledGated(Gated):
    """A gated feed-forward, a part of which is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(compiled_gate(*self.parts(x)))
        return out


def glm_with_gains_folded(reference: Any) -> Any:
    """The gains of the norms before projections are in the projections; the feed-forward is compiled."""
    port: Any = GlmPort(reference)
    with torch.no_grad():
        for block in port.blocks:
            for norm, layer in ((block.n1, block.mix.qkv), (block.n3, block.feed.wide)):
                layer.weight *= norm.gain
                norm.gain.fill_(1)
            block.feed.__class__ = CompiledGated
    return port


class OlmoMixer(nn.Module):
    """Attention with norms over all heads, and bounds of what comes out of projections."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = attention.q_proj, attention.k_proj, attention.v_proj
        self.norm_q, self.norm_k = (
            Rms(norm.weight, norm.variance_epsilon) for norm in (attention.q_norm, attention.k_norm)
        )
        self.out, self.size, self.bound = attention.o_proj, attention.head_dim, attention.config.clip_qkv
        self.frequencies = frequencies

    def bounded(self, x: Tensor) -> Tensor:
        return x.clamp(-self.bound, self.bound)

    def value(self, x: Tensor) -> Tensor:
        return self.bounded(self.to_v(x))

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            self.bounded(self.norm_q(self.to_q(x))),
            self.bounded(self.norm_k(self.to_k(x))),
            self.value(x),
        )
        q, k, v = (heads(part, part.shape[-1] // self.size) for part in parts)
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies.float()
        q, k = turn(q, angles), turn(k, angles)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        mixed = attend(q, k, v, scale=self.size**-0.5, keep=causal(*2 * x.shape[1:2]))
        out: Tensor = self.out(merged(mixed))
        return out


class OlmoBlock(nn.Module):
    """A layer with experts."""

    def __init__(self, layer: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.n1, self.n2 = (
            Rms(norm.weight, norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.mix = OlmoMixer(layer.self_attn, frequencies)
        self.router, self.experts = Router(layer.mlp.gate), Experts(layer.mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.n1(x))
        y = self.n2(x)
        out: Tensor = x + self.experts(y, self.router(y))
        return out


class OlmoPort(nn.Module):
    """OLMoE with experts that are computed densely."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.words = inner.embed_tokens
        self.blocks = nn.ModuleList([OlmoBlock(x, inner.rotary_emb.inv_freq) for x in inner.layers])
        self.norm = Rms(inner.norm.weight, inner.norm.variance_epsilon)
        self.head = reference.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


class ChosenExperts(nn.Module):
    """The weights of chosen experts are gathered for each token, as for a batch of one."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        gate, up = moe.experts.gate_up_proj.chunk(2, 1)
        self.gate, self.up, self.down = kept(gate), kept(up), kept(moe.experts.down_proj)
        self.count = moe.gate.top_k

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        best = weights.topk(self.count, -1)
        gate, up, down = (every[best.indices] for every in (self.gate, self.up, self.down))
        inner = functional.silu(torch.einsum("btkfd,btd->btkf", gate, x))
        inner = inner * torch.einsum("btkfd,btd->btkf", up, x)
        return torch.einsum("btkdf,btkf,btk->btd", down, inner, best.values)


def olmoe_with_gathered_experts(reference: Any) -> Any:
    """Only the experts that were chosen are computed."""
    port = OlmoPort(reference)
    for block, layer in zip(port.blocks, reference.model.layers, strict=True):
        block.experts = ChosenExperts(layer.mlp)
    return port
