"""Ports of decoders that attend in some layers only: LFM2 with and without a cache, Qwen3-Next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.fourth.parts import Experts, Gated, Rms, Router, Scores, convolve
from tests.zoo.third.parts import attend, causal, fused, heads, kept, linear, merged, turn


class LfmMixer(nn.Module):
    """Attention with a norm of each head."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.size = attention.out_proj, attention.head_dim
        self.groups = attention.k_proj.out_features // self.size
        self.norm_q, self.norm_k = (
            Rms(norm.weight, norm.variance_epsilon) for norm in (attention.q_layernorm, attention.k_layernorm)
        )
        self.frequencies = frequencies

    def angles(self, start: int, length: int) -> Tensor:
        return torch.arange(start, start + length).float()[:, None] * self.frequencies.float()

    def forward(self, x: Tensor, start: int, past: Any) -> tuple[Tensor, Any]:
        q, k, v = heads(self.qkv(x), self.qkv.out_features // self.size).tensor_split(
            (-2 * self.groups, -self.groups), 1
        )
        angles = self.angles(start, x.shape[1])
        q, k = turn(self.norm_q(q), angles), turn(self.norm_k(k), angles)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        wide = [part.repeat_interleave(q.shape[1] // self.groups, 1) for part in (k, v)]
        mixed = attend(q, *wide, scale=self.size**-0.5, keep=causal(q.shape[2], k.shape[2]))
        out: Tensor = self.out(merged(mixed))
        return out, (k, v)


class ShortConvolution(nn.Module):
    """A gated convolution over the last three tokens, of which two are kept for the next call."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.into, self.out = conv.in_proj, conv.out_proj
        self.kernel = kept(conv.conv.weight[:, 0])

    def divided(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before, after, value = self.into(x).chunk(3, -1)
        return before, after, value

    def convolved(self, x: Tensor) -> Tensor:
        return convolve(x, self.kernel)

    def held(self, x: Tensor) -> Tensor:
        return x[..., 1 - self.kernel.shape[-1] :]

    def forward(self, x: Tensor, _: int, past: Any) -> tuple[Tensor, Any]:
        before, after, value = self.divided(x)
        gated = (before * value).transpose(1, 2)
        if past is not None:
            gated = torch.cat((past, gated), -1)
        y = self.convolved(gated)[..., -x.shape[1] :].transpose(1, 2)
        out: Tensor = self.out(after * y)
        return out, self.held(gated)


class LfmBlock(nn.Module):
    """A layer, of attention or of a convolution."""

    def __init__(self, layer: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.n1, self.n2 = (Rms(n.weight, n.variance_epsilon) for n in (layer.operator_norm, layer.ffn_norm))
        attends = layer.is_attention_layer
        self.mix = LfmMixer(layer.self_attn, frequencies) if attends else ShortConvolution(layer.conv)
        feed = layer.feed_forward
        self.feed = Gated(feed.w1.weight, feed.w3.weight, feed.w2.weight)

    def forward(self, x: Tensor, start: int, past: Any) -> tuple[Tensor, Any]:
        mixed, state = self.mix(self.n1(x), start, past)
        x = x + mixed
        return x + self.feed(self.n2(x)), state


class LfmPort(nn.Module):
    """LFM2; its cache is how much was read, and the state of each layer."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.table = kept(inner.embed_tokens.weight)
        self.blocks = nn.ModuleList([LfmBlock(x, inner.rotary_emb.inv_freq) for x in inner.layers])
        self.norm = Rms(inner.embedding_norm.weight, inner.embedding_norm.variance_epsilon)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.table[ids]

    def scored(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x) @ self.table.T
        return out

    def forward(self, input_ids: Tensor, use_cache: bool = True, cache: Any = None) -> Scores:
        first, *pasts = cache or [0, *[None for _ in self.blocks]]
        start = int(first)
        x, states = self.embedded(input_ids), []
        for block, past in zip(self.blocks, pasts, strict=True):
            x, state = block(x, start, past)
            states.append(state)
        after = (torch.tensor(start + input_ids.shape[1]), *states)
        return Scores(logits=self.scored(x), cache=after if use_cache else None)


class ShiftedConvolution(ShortConvolution):
    """The convolution as a sum of shifted products."""

    def convolved(self, x: Tensor) -> Tensor:
        taps = self.kernel.shape[-1]
        padded = functional.pad(x, (taps - 1, 0))
        parts = [padded[..., at : at + x.shape[-1]] * self.kernel[:, at, None] for at in range(taps)]
        return torch.stack(parts).sum(0)


def lfm2_with_shifted_products(reference: Any) -> Any:
    """No operator for convolutions is used."""
    port: Any = LfmPort(reference)
    for at in (0, 2):
        port.blocks[at].mix = ShiftedConvolution(reference.model.layers[at].conv)
    return port


class CentredRms(Rms):
    """A norm whose gain is kept as what it is above one, and applied in float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.gain.float())).to(x.dtype)


class DeltaMixer(nn.Module):
    """The gated delta rule, token by token."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.keys, self.values = net.num_k_heads, net.num_v_heads
        self.size, self.wide = net.head_k_dim, net.head_v_dim
        self.qkvz, self.rates = net.in_proj_qkvz, net.in_proj_ba
        self.kernel = kept(net.conv1d.weight[:, 0])
        self.decay, self.step = kept(net.A_log), kept(net.dt_bias)
        self.norm, self.eps = kept(net.norm.weight), net.norm.variance_epsilon
        self.out = net.out_proj

    def divided(self, x: Tensor) -> list[Tensor]:
        """Queries, keys, values, gates, each (batch, length, features)."""
        many = self.values // self.keys * self.wide
        parts = self.qkvz(x).unflatten(-1, (self.keys, -1)).split((self.size, self.size, many, many), -1)
        return [part.flatten(2) for part in parts]

    def speeds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How much is written and how much is kept, of each head."""
        write, keep = self.rates(x).unflatten(-1, (self.keys, -1)).chunk(2, -1)
        write, keep = write.flatten(2), keep.flatten(2)
        kept_share = (-self.decay.float().exp() * functional.softplus(keep.float() + self.step.float())).exp()
        return write.sigmoid().float(), kept_share

    def longer(self, x: Tensor) -> Tensor:
        """Heads of length one, spread to as many as values have."""
        x = x.float()
        x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        return x.repeat_interleave(self.values // self.keys, 1)

    def stepped(self, state: Tensor, k: Tensor, v: Tensor, write: Tensor, keep: Tensor) -> Tensor:
        """The state (batch, heads, keys, values) after a token."""
        state = state * keep[..., None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, k)
        return state + torch.einsum("bhk,bhv->bhkv", k, (v - known) * write[..., None])

    def normed(self, y: Tensor, z: Tensor) -> Tensor:
        wide = y.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return ((wide.to(y.dtype) * self.norm) * functional.silu(z.float())).to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, z = self.divided(x)
        mixed = functional.silu(convolve(torch.cat((q, k, v), -1).transpose(1, 2), self.kernel))
        width = self.keys * self.size
        parts = torch.split(mixed.transpose(1, 2), [width, width, self.values * self.wide], -1)
        q, k, v = (heads(p, n) for p, n in zip(parts, (self.keys, self.keys, self.values), strict=True))
        q, k, v = self.longer(q) * self.size**-0.5, self.longer(k), v.float()
        write, keep = self.speeds(x)
        state, outs = torch.zeros(*q.shape[:2], self.size, self.wide).to(q), []
        for at in range(x.shape[1]):
            state = self.stepped(state, k[:, :, at], v[:, :, at], write[:, at], keep[:, at])
            outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, at]))
        y = torch.stack(outs, 1).to(x.dtype)
        out: Tensor = self.out(self.normed(y, torch.unflatten(z, -1, (self.values, -1))).flatten(2))
        return out


class NextMixer(nn.Module):
    """Attention with norms of heads, a quarter of the channels rotated, and a gate on what comes out."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.size, self.out = attention.head_dim, attention.o_proj
        every = attention.q_proj.weight.unflatten(0, (-1, 2, self.size))
        self.to_q, self.gate = linear(every[:, 0].flatten(0, 1)), linear(every[:, 1].flatten(0, 1))
        self.kv = fused(attention.k_proj, attention.v_proj)
        self.norm_q, self.norm_k = (
            CentredRms(norm.weight, norm.eps) for norm in (attention.q_norm, attention.k_norm)
        )
        self.frequencies = frequencies

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.to_q(x), self.gate(x)

    def gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return mixed * gate.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.queries(x)
        q = heads(q, q.shape[-1] // self.size)
        k, v = (heads(part, part.shape[-1] // self.size) for part in self.kv(x).chunk(2, -1))
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies.float()
        q, k = turn(self.norm_q(q), angles), turn(self.norm_k(k), angles)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        mixed = attend(q, k, v, scale=self.size**-0.5, keep=causal(*2 * x.shape[1:2]))
        out: Tensor = self.out(self.gated(merged(mixed), gate))
        return out


class NextExperts(nn.Module):
    """Routed experts, and one for all tokens that has a gate."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.router, self.routed = NormedRouter(moe.gate), Experts(moe)
        shared = moe.shared_expert
        self.shared = Gated(shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        self.share = linear(moe.shared_expert_gate.weight)

    def common(self, x: Tensor) -> Tensor:
        out: Tensor = self.share(x).sigmoid() * self.shared(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.routed(x, self.router(x)) + self.common(x)
        return out


class NormedRouter(Router):
    """The weights of a token's experts sum to one."""

    def weigh(self, scores: Tensor) -> Tensor:
        best = scores.topk(self.count, -1)
        shares = best.values.softmax(-1, dtype=torch.float32)
        return torch.zeros_like(scores, dtype=torch.float32).scatter(-1, best.indices, shares)


class NextBlock(nn.Module):
    """A layer, of attention or of the delta rule, dense or with experts."""

    def __init__(self, layer: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.n1, self.n2 = (
            CentredRms(norm.weight, norm.eps)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        attends = layer.block_type == "full_attention"
        self.mix = NextMixer(layer.self_attn, frequencies) if attends else DeltaMixer(layer.linear_attn)
        mlp = layer.mlp
        self.feed = (
            NextExperts(mlp)
            if hasattr(mlp, "experts")
            else Gated(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.n1(x))
        out: Tensor = x + self.feed(self.n2(x))
        return out


class NextPort(nn.Module):
    """Qwen3-Next."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.words = inner.embed_tokens
        self.blocks = nn.ModuleList([NextBlock(x, inner.rotary_emb.inv_freq) for x in inner.layers])
        self.norm, self.head = CentredRms(inner.norm.weight, inner.norm.eps), reference.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


class LastPort(NextPort):
    """Scores of the last token only, as generation needs them."""

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x[:, -1:]))}
