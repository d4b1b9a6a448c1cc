"""Ports of what has a state or experts: Mamba-2, RWKV, DBRX, and recurrent layers written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.third.parts import CentredNorm, attend, causal, heads, kept, linear, merged, turn


class GatedNorm(nn.Module):
    """The gate, then a norm of the root mean square of each group."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.gain, self.eps, self.size = kept(norm.weight), norm.variance_epsilon, norm.group_size

    def normed(self, x: Tensor) -> Tensor:
        parts = torch.unflatten(x, -1, (-1, self.size))
        return (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)).flatten(-2)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.gain * self.normed(x.float() * functional.silu(gate.float())).to(gate.dtype)


class RootNorm(nn.Module):
    """A norm of the root mean square."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = kept(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class TapConvolution(nn.Module):
    """A causal depthwise convolution as a sum of shifted copies."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.taps, self.offset = kept(convolution.weight[:, 0]), kept(convolution.bias)

    def forward(self, x: Tensor) -> Tensor:
        count = self.taps.shape[1]
        longer = functional.pad(x, (0, 0, count - 1, 0))
        shifted = [longer[:, at : at + x.shape[1]] * self.taps[:, at] for at in range(count)]
        return torch.stack(shifted).sum(0) + self.offset


class ScanMixer(nn.Module):
    """A state space of heads, one token after the other, its input projection divided in three."""

    chunk = 0  # tokens after which the state is told apart; 0: never

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        inner, size = mixer.intermediate_size, mixer.conv_dim
        gate, stream, step = mixer.in_proj.weight.split((inner, size, mixer.num_heads))
        self.to_gate, self.to_stream, self.to_step = linear(gate), linear(stream), linear(step)
        self.conv, self.norm, self.out = TapConvolution(mixer.conv1d), GatedNorm(mixer.norm), mixer.out_proj
        self.step_bias, self.log_decay, self.skip = kept(mixer.dt_bias), kept(mixer.A_log), kept(mixer.D)
        self.heads, self.groups, self.states = mixer.num_heads, mixer.n_groups, mixer.ssm_state_size

    def step(self, x: Tensor) -> Tensor:
        return functional.softplus(self.to_step(x) + self.step_bias)

    def spread(self, x: Tensor) -> Tensor:
        """Of each group to each of its heads."""
        return torch.unflatten(x, -1, (self.groups, -1)).repeat_interleave(self.heads // self.groups, 2)

    def scan(self, x: Tensor, step: Tensor, write: Tensor, read: Tensor) -> Tensor:
        state = x.new_zeros((*x[:, 0].shape, self.states)).float()
        decay = torch.exp(-torch.exp(self.log_decay.float()) * step.float())
        outputs = []
        for at in range(x.shape[1]):
            new = (x[:, at].float() * step[:, at, :, None].float())[..., None] * write[:, at, :, None].float()
            state = self.carried(state, at) * decay[:, at, :, None, None] + new
            outputs.append((state * read[:, at, :, None].float()).sum(-1))
        return torch.stack(outputs, 1) + self.skip[:, None] * x

    def carried(self, state: Tensor, at: int) -> Tensor:
        return state

    def forward(self, x: Tensor) -> Tensor:
        mixed = functional.silu(self.conv(self.to_stream(x)))
        width = self.groups * self.states
        inner, write, read = torch.split(mixed, [mixed.shape[-1] - 2 * width, width, width], -1)
        inner = torch.unflatten(inner, -1, (self.heads, -1))
        y = self.scan(inner, self.step(x), self.spread(write), self.spread(read))
        out: Tensor = self.out(self.norm(y.flatten(2), self.to_gate(x)))
        return out


class ScanBlock(nn.Module):
    """One layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.pre, self.scan = RootNorm(layer.norm.weight, layer.norm.variance_epsilon), ScanMixer(layer.mixer)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scan(self.pre(x.to(self.pre.gain.dtype)))
        return out


class Mamba2Port(nn.Module):
    """Mamba-2."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.backbone
        self.embedding, self.blocks = inner.embeddings, nn.ModuleList([ScanBlock(x) for x in inner.layers])
        self.post = RootNorm(inner.norm_f.weight, inner.norm_f.variance_epsilon)
        self.scores = reference.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.scores(self.post(x.to(self.post.gain.dtype)))
        return out


class TimeMix(nn.Module):
    """RWKV's attention as sums that decay, in float32."""

    state_dtype = torch.float32

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.key, self.value = attention.key, attention.value
        self.gate, self.out = attention.receptance, attention.output
        self.decay, self.bonus = kept(attention.time_decay), kept(attention.time_first)
        self.mix_k, self.mix_v = kept(attention.time_mix_key[0, 0]), kept(attention.time_mix_value[0, 0])
        self.mix_r = kept(attention.time_mix_receptance[0, 0])

    def blend(self, x: Tensor, mix: Tensor) -> Tensor:
        before = functional.pad(x, (0, 0, 1, -1))
        return before + (x - before) * mix

    def current(self, key: Tensor) -> Tensor:
        """The weight of the token itself."""
        return torch.exp(key + self.bonus.float())

    def shrink(self) -> Tensor:
        return torch.exp(-torch.exp(self.decay.float()))

    def sums(self, key: Tensor, value: Tensor) -> Tensor:
        above = torch.zeros_like(key[:, 0]).to(self.state_dtype)
        below = torch.zeros_like(above)
        outputs = []
        for k, v in zip(key.unbind(1), value.unbind(1), strict=True):
            now = self.current(k)
            outputs.append((above.float() + now * v) / (below.float() + now))
            above = (self.shrink() * above.float() + torch.exp(k) * v).to(self.state_dtype)
            below = (self.shrink() * below.float() + torch.exp(k)).to(self.state_dtype)
        return torch.stack(outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.key(self.blend(x, self.mix_k)), self.value(self.blend(x, self.mix_v))
        y = self.sums(k.float(), v.float()).to(x.dtype)
        out: Tensor = self.out(torch.sigmoid(self.gate(self.blend(x, self.mix_r))) * y)
        return out


class ChannelMix(nn.Module):
    """RWKV's feed-forward."""

    def __init__(self, feed: Any) -> None:
        super().__init__()
        self.key, self.value, self.gate = feed.key, feed.value, feed.receptance
        self.mix_k, self.mix_r = kept(feed.time_mix_key[0, 0]), kept(feed.time_mix_receptance[0, 0])

    def blend(self, x: Tensor, mix: Tensor) -> Tensor:
        before = functional.pad(x, (0, 0, 1, -1))
        return before + (x - before) * mix

    def act(self, x: Tensor) -> Tensor:
        return functional.relu(x).square()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.value(self.act(self.key(self.blend(x, self.mix_k))))
        out: Tensor = torch.sigmoid(self.gate(self.blend(x, self.mix_r))) * inner
        return out


class RwkvBlock(nn.Module):
    """One layer."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm_t, self.norm_c = block.ln1, block.ln2
        self.time, self.channel = TimeMix(block.attention), ChannelMix(block.feed_forward)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(self.norm_t(x))
        out: Tensor = x + self.channel(self.norm_c(x))
        return out


class RwkvPort(nn.Module):
    """RWKV's fourth version, without the shift that keeps sums small."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.rwkv
        self.emb, self.start = inner.embeddings, inner.blocks[0].pre_ln
        self.mixers = nn.ModuleList([RwkvBlock(x) for x in inner.blocks])
        self.end, self.head = inner.ln_out, reference.head

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = self.start(self.emb(input_ids))
        for mixer in self.mixers:
            x = mixer(x)
        out: Tensor = self.head(self.end(x))
        return out


class DbrxMixer(nn.Module):
    """Attention whose queries, keys and values are cut off."""

    def __init__(self, attention: Any, frequencies: Tensor) -> None:
        super().__init__()
        self.size, self.limit = attention.head_dim, attention.clip_qkv
        joint, rest = attention.Wqkv.weight, attention.num_key_value_heads * attention.head_dim
        parts = joint.split((attention.hidden_size, rest, rest))
        self.wq, self.wk, self.wv = (linear(part) for part in parts)
        self.wo, self.scale, self.frequencies = attention.out_proj, attention.scaling, frequencies

    def cut(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (x.clamp(-self.limit, self.limit) for x in (q, k, v))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.cut(self.wq(x), self.wk(x), self.wv(x))
        q, k, v = (heads(part, part.shape[-1] // self.size) for part in (q, k, v))
        angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies.float()
        q, k = turn(q, angles), turn(k, angles)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        out: Tensor = self.wo(merged(attend(q, k, v, scale=self.scale, keep=causal(*2 * x.shape[1:2]))))
        return out


class Expert(nn.Module):
    """A gated feed-forward."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(gate), linear(up), linear(down.T)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class ExpertMix(nn.Module):
    """Experts as modules of their own; every one of them is run on all tokens and weighed."""

    def __init__(self, ffn: Any) -> None:
        super().__init__()
        bank, count = ffn.experts.mlp, ffn.experts.num_experts
        stacks = (stack.unflatten(0, (count, -1)) for stack in (bank.w1, bank.v1, bank.w2))
        self.router = ffn.router.layer
        self.experts = nn.ModuleList([Expert(*parts) for parts in zip(*stacks, strict=True)])
        self.top = ffn.top_k

    def weigh(self, scores: Tensor) -> Tensor:
        """A weight of each expert, nought for those that are not chosen."""
        shares = scores.softmax(-1)
        best, which = shares.topk(self.top, -1)
        return torch.zeros_like(shares).scatter(-1, which, best / best.sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weigh(self.router(x))
        return torch.stack([weights[..., e, None] * f(x) for e, f in enumerate(self.experts)]).sum(0)


class DbrxLayer(nn.Module):
    """One layer."""

    def __init__(self, block: Any, frequencies: Tensor) -> None:
        super().__init__()
        inner = block.norm_attn_norm
        self.norm_1 = CentredNorm(inner.norm_1.weight, inner.norm_1.eps)
        self.norm_2 = CentredNorm(inner.norm_2.weight, inner.norm_2.eps)
        self.attention, self.moe = DbrxMixer(inner.attn, frequencies), ExpertMix(block.ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return self.finish(x, self.moe(self.norm_2(x)))

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class DbrxPort(nn.Module):
    """DBRX."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.transformer
        self.embed = inner.wte
        self.layers = nn.ModuleList([DbrxLayer(x, inner.rotary_emb.inv_freq) for x in inner.blocks])
        self.norm, self.scores = CentredNorm(inner.norm_f.weight, inner.norm_f.eps), reference.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.scores(self.norm(x))}


class OneWay(nn.Module):
    """An LSTM in one direction, a token at a time."""

    def __init__(self, lstm: Any, suffix: str) -> None:
        super().__init__()
        w, u, b, c = (
            getattr(lstm, name + suffix) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        self.inward, self.onward = linear(w, b), linear(u, c)

    def gates(self, x: Tensor, h: Tensor) -> Any:
        return (self.inward(x) + self.onward(h)).chunk(4, -1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.onward.in_features)
        c, outputs = torch.zeros_like(h), []
        for row in x.unbind(1):
            i, f, g, o = self.gates(row, h)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1)


class BothWays(nn.Module):
    """Layers of an LSTM in both directions."""

    def __init__(self, lstm: Any) -> None:
        super().__init__()
        count = range(lstm.num_layers)
        self.ahead = nn.ModuleList([OneWay(lstm, f"_l{at}") for at in count])
        self.back = nn.ModuleList([OneWay(lstm, f"_l{at}_reverse") for at in count])

    def join(self, ahead: Tensor, back: Tensor) -> Tensor:
        return torch.cat((ahead, back.flip(1)), -1)

    def forward(self, x: Tensor) -> Tensor:
        for ahead, back in zip(self.ahead, self.back, strict=True):
            x = self.join(ahead(x), back(x.flip(1)))
        return x


class Smoother(nn.Module):
    """A GRU, a token at a time."""

    def __init__(self, gru: Any) -> None:
        super().__init__()
        self.inward = linear(gru.weight_ih_l0, gru.bias_ih_l0)
        self.onward = linear(gru.weight_hh_l0, gru.bias_hh_l0)

    def candidate(self, x: Tensor, reset: Tensor, h: Tensor) -> Tensor:
        rows = self.onward.out_features // 3
        hidden = functional.linear(h, self.onward.weight[2 * rows :], self.onward.bias[2 * rows :])
        return torch.tanh(x + reset * hidden)

    def blend(self, update: Tensor, h: Tensor, new: Tensor) -> Tensor:
        return (1 - update) * new + update * h

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(x.shape[0], self.onward.in_features), []
        for row in x.unbind(1):
            r, z, n = self.inward(row).chunk(3, -1)
            hr, hz, _ = self.onward(h).chunk(3, -1)
            new = self.candidate(n, torch.sigmoid(r + hr), h)
            h = self.blend(torch.sigmoid(z + hz), h, new)
            outputs.append(h)
        return torch.stack(outputs, 1)


class TaggerPort(nn.Module):
    """The tagger with its recurrent layers written out."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.words, self.reader = reference.embedding, BothWays(reference.encoder)
        self.norm, self.smooth, self.label = reference.norm, Smoother(reference.smoother), reference.tags

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.label(self.smooth(self.norm(self.reader(self.words(input_ids)))))
        return out


class OneBias(OneWay):
    """An LSTM with one bias and its gates in the order of ONNX: input, output, forget, candidate."""

    def __init__(self, lstm: Any, suffix: str) -> None:
        super().__init__(lstm, suffix)
        i, f, g, o = torch.arange(self.inward.out_features).chunk(4)
        order = torch.cat((i, o, f, g))
        self.inward = linear(self.inward.weight[order], (self.inward.bias + self.onward.bias)[order])
        self.onward = linear(self.onward.weight[order])

    def gates(self, x: Tensor, h: Tensor) -> Any:
        i, o, f, g = super().gates(x, h)
        return i, f, g, o


def tagger_in_the_order_of_onnx(reference: Any) -> Any:
    """Gates in another order, both biases in one."""
    port, lstm = TaggerPort(reference), reference.encoder
    for at in range(lstm.num_layers):
        port.reader.ahead[at] = OneBias(lstm, f"_l{at}")
        port.reader.back[at] = OneBias(lstm, f"_l{at}_reverse")
    return port


def batched_lstm(model: Any) -> Any:
    """The tagger's own layers, told that the batch is second, with transposes around them."""

    class TimeFirst(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            inner.batch_first = False
            self.inner = inner

        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            out, state = self.inner(x.transpose(0, 1).contiguous())
            return out.transpose(0, 1), state

    model.encoder, model.smoother = TimeFirst(model.encoder), TimeFirst(model.smoother)
    return model
