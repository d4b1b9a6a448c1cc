"""Ports of decoders with experts: MiniMax with linear attention, Llama 4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.fifth.parts import embedding
from tests.zoo.fourth.parts import Experts, Gated, Rms, Scores
from tests.zoo.third.parts import attend, causal, fused, heads, kept, linear, merged, turn, turn_pairs


def rms(norm: Any) -> Rms:
    return Rms(norm.weight, getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


class LightningMixer(nn.Module):
    """Linear attention by blocks, with a state that decays."""

    slope_rate: Tensor
    query_decay: Tensor
    key_decay: Tensor
    diagonal_decay: Tensor

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.gate = linear(attention.qkv_proj.weight), linear(attention.output_gate.weight)
        self.norm, self.out = rms(attention.norm), linear(attention.out_proj.weight)
        self.count, self.block = attention.num_attention_heads, attention.block_size
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
            self.register_buffer(name, getattr(attention, name).detach().clone())

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return functional.silu(heads(self.qkv(x), self.count)).chunk(3, -1)

    def fade(self, steps: int) -> Tensor:
        return torch.exp(-self.slope_rate * steps)

    def faded_keys(self, k: Tensor) -> Tensor:
        return k * self.key_decay[:, -k.shape[2] :]

    def within(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = q.shape[2]
        return ((q @ k.transpose(-1, -2)) * self.diagonal_decay[0, :, :size, :size]) @ v

    def kept_state(self, state: Tensor) -> Tensor:
        return state

    def prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=v.dtype)
        outs = []
        for part in zip(*(torch.split(x, self.block, 2) for x in (q, k, v)), strict=True):
            query, key, value = part
            size = query.shape[2]
            outs.append((query * self.query_decay[:, :size]) @ state + self.within(query, key, value))
            state = state * self.fade(size) + self.faded_keys(key).transpose(-1, -2) @ value
        return torch.cat(outs, 2), state

    def steps(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for at in range(q.shape[2]):
            one = slice(at, at + 1)
            state = self.fade(1) * state + k[:, :, one].transpose(-1, -2) @ v[:, :, one]
            outs.append(q[:, :, one] @ state)
        return torch.cat(outs, 2), state

    def gated(self, x: Tensor, mixed: Tensor) -> Tensor:
        out: Tensor = self.gate(x).sigmoid() * self.norm(mixed)
        return out

    def forward(self, x: Tensor, angles: Tensor, past: Any) -> tuple[Tensor, Any]:
        q, k, v = self.parts(x)
        mixed, state = self.prompt(q, k, v) if past is None else self.steps(q, k, v, past)
        out: Tensor = self.out(self.gated(x, merged(mixed)))
        return out, self.kept_state(state)


class MaxMixer(nn.Module):
    """Attention to all before."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.size = linear(attention.o_proj.weight), attention.head_dim
        self.queries = attention.q_proj.out_features // self.size
        self.groups = attention.k_proj.out_features // self.size

    def forward(self, x: Tensor, angles: Tensor, past: Any) -> tuple[Tensor, Any]:
        every = heads(self.qkv(x), self.queries + 2 * self.groups)
        q, k, v = torch.split(every, [self.queries, self.groups, self.groups], 1)
        q, k = turn(q, angles), turn(k, angles)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        state = (k, v)
        k, v = (part.repeat_interleave(self.queries // self.groups, 1) for part in state)
        mixed = attend(q, k, v, scale=self.size**-0.5, keep=causal(q.shape[2], k.shape[2]))
        out: Tensor = self.out(merged(mixed))
        return out, state


class MaxRouter(nn.Module):
    """Weights of all experts for each token: zero but for the best, which sum to one."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.score, self.count = linear(gate.weight), gate.top_k

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x).softmax(-1, dtype=torch.float32)
        best = weights.topk(self.count, -1)
        values = best.values / best.values.sum(-1, keepdim=True)
        return torch.zeros_like(weights).scatter(-1, best.indices, values).to(x.dtype)


class GatheredExperts(Experts):
    """The matrices of the experts of each token gathered, and multiplied by it."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        best = weights.topk(2, -1)
        gate, up = torch.einsum("btd,btkfd->btkf", x, self.gate_up[best.indices]).chunk(2, -1)
        outs = torch.einsum("btkf,btkdf->btkd", functional.silu(gate) * up, self.down[best.indices])
        return torch.einsum("btkd,btk->btd", outs, best.values)


class MaxBlock(nn.Module):
    """A layer, which adds to what is normed."""

    def __init__(self, layer: Any, experts: type[Experts]) -> None:
        super().__init__()
        linear_one = layer.block_type == "linear_attention"
        self.mix = LightningMixer(layer.self_attn) if linear_one else MaxMixer(layer.self_attn)
        self.pre_mix, self.pre_feed = rms(layer.input_layernorm), rms(layer.post_attention_layernorm)
        self.router, self.experts = MaxRouter(layer.mlp.gate), experts(layer.mlp)
        self.mix_kept, self.mix_added = layer.attn_alpha_factor, layer.attn_beta_factor
        self.feed_kept, self.feed_added = layer.mlp_alpha_factor, layer.mlp_beta_factor

    def forward(self, x: Tensor, angles: Tensor, past: Any) -> tuple[Tensor, Any]:
        x = self.pre_mix(x)
        mixed, state = self.mix(x, angles, past)
        x = self.pre_feed(x * self.mix_kept + mixed * self.mix_added)
        fed = self.experts(x, self.router(x))
        return x * self.feed_kept + fed * self.feed_added, state


class MaxPort(nn.Module):
    """MiniMax."""

    experts: type[Experts] = Experts

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.words = kept(inner.embed_tokens.weight)
        self.frequencies = inner.rotary_emb.inv_freq.detach().clone()
        self.blocks = nn.ModuleList([MaxBlock(layer, self.experts) for layer in inner.layers])
        self.norm, self.head = rms(inner.norm), linear(reference.lm_head.weight)

    def forward(self, input_ids: Tensor, use_cache: bool = True, cache: Any = None) -> Scores:
        x = self.words[input_ids]
        start, pasts = (0, [None] * len(self.blocks)) if cache is None else (cache[0], cache[1])
        end, states = start + input_ids.shape[1], []
        angles = torch.arange(start, end).float()[:, None] * self.frequencies.float()
        for block, past in zip(self.blocks, pasts, strict=True):
            x, state = block(x, angles, past)
            states.append(state)
        return Scores(logits=self.head(self.norm(x)), cache=(end, states) if use_cache else None)


class MaxWithGatheredExperts(MaxPort):
    """With the experts of each token alone."""

    experts = GatheredExperts


class TransposedLightning(LightningMixer):
    """The state with values first, and the products by einsum."""

    def prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mixed, state = super().prompt(q, k, v)
        return mixed, state.transpose(-1, -2).contiguous()

    def steps(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for at in range(q.shape[2]):
            state = self.fade(1) * state + torch.einsum("bhd,bhe->bhed", k[:, :, at], v[:, :, at])
            outs.append(torch.einsum("bhed,bhd->bhe", state, q[:, :, at]))
        return torch.stack(outs, 2), state


def minimax_with_states_transposed(reference: Any) -> Any:
    """States in another layout than the reference's."""
    port = MaxPort(reference)
    for block, layer in zip(port.blocks, reference.model.layers, strict=True):
        if isinstance(block.mix, LightningMixer):
            block.mix = TransposedLightning(layer.self_attn)
    return port


class ScoutMixer(nn.Module):
    """Attention within chunks with rotated and normed heads, or to all with longer and longer queries."""

    def __init__(self, attention: Any, chunk: int) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.size = linear(attention.o_proj.weight), attention.head_dim
        self.queries, self.groups = attention.num_attention_heads, attention.num_key_value_heads
        self.rotates, self.chunk = bool(attention.use_rope), chunk
        self.grows, self.floor = attention.attn_scale, attention.floor_scale
        self.eps = attention.qk_norm.eps if self.rotates else 0.0

    def unit(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.unit(turn_pairs(x, angles))

    def seen(self, length: int) -> Tensor:
        places = torch.arange(length)
        keep = causal(length, length)
        return keep & (places[:, None] // self.chunk == places // self.chunk) if self.rotates else keep

    def growth(self, length: int) -> Tensor:
        places = torch.arange(length).float()
        out: Tensor = torch.log1p(torch.floor((places + 1) / self.floor)) * self.grows + 1
        return out

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        every = heads(self.qkv(x), self.queries + 2 * self.groups)
        q, k, v = torch.split(every, [self.queries, self.groups, self.groups], 1)
        if self.rotates:
            q, k = self.turned(q, angles), self.turned(k, angles)
        else:
            q = (q * self.growth(x.shape[1])[:, None]).to(q.dtype)
        k, v = (part.repeat_interleave(self.queries // self.groups, 1) for part in (k, v))
        mixed = attend(q, k, v, scale=self.size**-0.5, keep=self.seen(x.shape[1]))
        out: Tensor = self.out(merged(mixed))
        return out


class NormedFirst(ScoutMixer):
    """Rotation keeps lengths, so that norms without gains may come before it."""

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        return turn_pairs(self.unit(x), angles)


class ScoutFeed(nn.Module):
    """One expert of several and the one that all tokens share."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        shared = moe.shared_expert
        self.score, self.count = linear(moe.router.weight), moe.top_k
        self.gate_up, self.down = kept(moe.experts.gate_up_proj), kept(moe.experts.down_proj)
        self.shared = Gated(shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)

    def squashed(self, scores: Tensor) -> Tensor:
        """Weights of all experts, zero for those that are not chosen."""
        best = scores.topk(self.count, -1)
        return torch.zeros_like(scores).scatter(-1, best.indices, best.values.float().sigmoid().to(scores))

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, -1)
        return gate, up

    def routed(self, x: Tensor, weights: Tensor) -> Tensor:
        given = x[:, :, None] * weights[..., None]
        gate, up = self.halves(torch.einsum("bted,edf->btef", given, self.gate_up))
        return torch.einsum("btef,efd->btd", functional.silu(gate) * up, self.down)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.squashed(self.score(x))
        out: Tensor = self.shared(x) + self.routed(x, weights)
        return out


class OneExpertEach(ScoutFeed):
    """The tokens of each expert together, the others left out."""

    def routed(self, x: Tensor, weights: Tensor) -> Tensor:
        rows, flat = x.flatten(0, 1), weights.flatten(0, 1)
        outs = torch.zeros_like(rows)
        for at in range(flat.shape[-1]):
            chosen = flat[:, at].nonzero()[:, 0]
            gate, up = ((rows[chosen] * flat[chosen, at, None]) @ self.gate_up[at]).chunk(2, -1)
            outs[chosen] += (functional.silu(gate) * up) @ self.down[at]
        return torch.unflatten(outs, 0, x.shape[:2])


class ScoutBlock(nn.Module):
    """A layer."""

    def __init__(self, layer: Any, chunk: int, mixer: type[ScoutMixer], feed: type[ScoutFeed]) -> None:
        super().__init__()
        mlp = layer.feed_forward
        self.pre_mix, self.mix = rms(layer.input_layernorm), mixer(layer.self_attn, chunk)
        self.pre_feed = rms(layer.post_attention_layernorm)
        self.feed = (
            feed(mlp)
            if layer.is_moe_layer
            else Gated(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.mix(self.pre_mix(x), angles)
        out: Tensor = x + self.feed(self.pre_feed(x))
        return out


class ScoutPort(nn.Module):
    """Llama 4."""

    mixer: type[ScoutMixer] = ScoutMixer
    feed: type[ScoutFeed] = ScoutFeed

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner, chunk = reference.model, reference.config.attention_chunk_size
        self.words = embedding(inner.embed_tokens.weight)
        self.frequencies = inner.rotary_emb.inv_freq.detach().clone()
        self.blocks = nn.ModuleList([ScoutBlock(x, chunk, self.mixer, self.feed) for x in inner.layers])
        self.norm, self.head = rms(inner.norm), linear(reference.lm_head.weight)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Scores:
        x = self.words(input_ids)
        angles = torch.arange(input_ids.shape[1]).float()[:, None] * self.frequencies.float()
        for block in self.blocks:
            x = block(x, angles)
        return Scores(logits=self.head(self.norm(x)))


class ScoutNormedFirst(ScoutPort):
    """With norms before rotation."""

    mixer = NormedFirst


class ScoutByExpert(ScoutPort):
    """With the tokens of each expert together."""

    feed = OneExpertEach
