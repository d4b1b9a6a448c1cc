"""Ports of dense decoders: Nemotron, EXAONE 4 with and without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.fifth.parts import by_blocks, embedding
from tests.zoo.fourth.parts import Rms, Scores
from tests.zoo.third.parts import attend, causal, fused, heads, kept, linear, merged, turn


class ShiftedNorm(nn.Module):
    """A layer norm whose gain has its one already."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.gain, self.shift, self.eps = kept(norm.weight + 1), kept(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.gain, self.shift, self.eps)


class NemotronMixer(nn.Module):
    """Attention with the first half of the channels of a head rotated."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.size = attention.o_proj, attention.head_dim
        self.queries, self.groups = attention.num_heads, attention.num_key_value_heads

    def parts(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        every = heads(self.qkv(x), self.queries + 2 * self.groups)
        q, k, v = torch.split(every, [self.queries, self.groups, self.groups], 1)
        k, v = (part.repeat_interleave(self.queries // self.groups, 1) for part in (turn(k, angles), v))
        return turn(q, angles), k, v

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, scale=self.size**-0.5, keep=causal(q.shape[2], k.shape[2]))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        out: Tensor = self.out(merged(self.mixed(*self.parts(x, angles))))
        return out


class BlockwiseMixer(NemotronMixer):
    """The same, a few keys at a time."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_blocks(q, k, v, causal(q.shape[2], k.shape[2]), scale=self.size**-0.5)


class NemotronFeed(nn.Module):
    """Two linears and the square of ReLU."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.grow, self.shrink = mlp.up_proj, mlp.down_proj

    def act(self, x: Tensor) -> Tensor:
        return functional.relu(x).square()

    def grown(self, x: Tensor) -> Tensor:
        return self.act(self.grow(x))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shrink(self.grown(x))
        return out


class NemotronBlock(nn.Module):
    """A layer."""

    def __init__(self, layer: Any, mixer: type[NemotronMixer]) -> None:
        super().__init__()
        self.pre_mix, self.mix = ShiftedNorm(layer.input_layernorm), mixer(layer.self_attn)
        self.pre_feed, self.feed = ShiftedNorm(layer.post_attention_layernorm), NemotronFeed(layer.mlp)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.mix(self.pre_mix(x), angles)
        out: Tensor = x + self.feed(self.pre_feed(x))
        return out


class NemotronPort(nn.Module):
    """Nemotron."""

    mixer = NemotronMixer

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.words = embedding(inner.embed_tokens.weight)
        self.frequencies = inner.rotary_emb.inv_freq.detach().clone()
        self.blocks = nn.ModuleList([NemotronBlock(layer, self.mixer) for layer in inner.layers])
        self.norm, self.head = ShiftedNorm(inner.norm), reference.lm_head

    def angles(self, length: int) -> Tensor:
        out: Tensor = torch.arange(length).float()[:, None] * self.frequencies.float()
        return out

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Scores:
        x, angles = self.words(input_ids), self.angles(input_ids.shape[1])
        for block in self.blocks:
            x = block(x, angles)
        return Scores(logits=self.head(self.norm(x)))


class NemotronByBlocks(NemotronPort):
    """With attention a few keys at a time."""

    mixer = BlockwiseMixer


def folded(gain: Tensor, shift: Tensor, layer: Any) -> nn.Linear:
    """A linear that has the gain and the shift of the norm before it."""
    return linear(layer.weight * gain, layer.bias + layer.weight @ shift)


def nemotron_with_norms_folded(reference: Any) -> Any:
    """Gains and shifts of the norms before linears are in these."""
    port: Any = NemotronPort(reference)
    with torch.no_grad():
        for block in port.blocks:
            for norm, owner, name in (
                (block.pre_mix, block.mix, "qkv"),
                (block.pre_feed, block.feed, "grow"),
            ):
                setattr(owner, name, folded(norm.gain, norm.shift, getattr(owner, name)))
                norm.gain.fill_(1.0)
                norm.shift.fill_(0.0)
    return port


class ExaoneMixer(nn.Module):
    """Attention with normed heads; rotated and to the last few, or to all as they are."""

    def __init__(self, attention: Any, window: int | None) -> None:
        super().__init__()
        self.query, self.key, self.value = attention.q_proj, attention.k_proj, attention.v_proj
        self.out, self.size, self.window = attention.o_proj, attention.head_dim, window
        self.query_norm = Rms(attention.q_norm.weight, attention.q_norm.variance_epsilon)
        self.key_norm = Rms(attention.k_norm.weight, attention.k_norm.variance_epsilon)
        self.queries, self.groups = attention.num_attention_heads, attention.num_key_value_heads
        self.rotates = window is not None

    def normed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (
            self.query_norm(heads(self.query(x), self.queries)),
            self.key_norm(heads(self.key(x), self.groups)),
        )

    def remembered(self, past: Any, k: Tensor, v: Tensor, places: Tensor) -> Any:
        """Keys, values and their places, with those of the calls before; the window's alone are kept."""
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            places = torch.cat((past[2], places))
        return k, v, places

    def kept_of(self, state: Any) -> Any:
        k, v, places = state
        if self.window is None:
            return state
        return k[:, :, -self.window + 1 :], v[:, :, -self.window + 1 :], places[-self.window + 1 :]

    def seen(self, places: Tensor, others: Tensor) -> Tensor:
        back = places[:, None] - others
        return (back >= 0) & (back < self.window) if self.window is not None else back >= 0

    def turned(self, q: Tensor, k: Tensor, places: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        angles = places.float()[:, None] * frequencies.float()
        return turn(q, angles), turn(k, angles)

    def forward(self, x: Tensor, places: Tensor, frequencies: Tensor, past: Any) -> tuple[Tensor, Any]:
        q, k = self.normed(x)
        v = heads(self.value(x), self.groups)
        if self.rotates:
            q, k = self.turned(q, k, places, frequencies)
        state = self.remembered(past, k, v, places)
        k, v = (part.repeat_interleave(self.queries // self.groups, 1) for part in state[:2])
        mixed = attend(q, k, v, scale=self.size**-0.5, keep=self.seen(places, state[2]))
        out: Tensor = self.out(merged(mixed))
        return out, self.kept_of(state)


class RingMixer(ExaoneMixer):
    """Keys and values of a window lie at their place modulo its size, whatever the order."""

    def kept_of(self, state: Any) -> Any:
        k, v, places = state
        if self.window is None:
            return state
        newest = places.argsort()[-self.window + 1 :]
        order = newest[(places[newest] % self.window).argsort()]
        return k[:, :, order], v[:, :, order], places[order]


class ExaoneFeed(nn.Module):
    """A gated feed-forward."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up, self.down = fused(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class ExaoneBlock(nn.Module):
    """A layer: what its parts give is normed, not what they are given."""

    def __init__(self, layer: Any, mixer: type[ExaoneMixer]) -> None:
        super().__init__()
        attention = layer.self_attn
        self.mix = mixer(attention, attention.sliding_window if attention.is_sliding else None)
        self.feed = ExaoneFeed(layer.mlp)
        after, end = layer.post_attention_layernorm, layer.post_feedforward_layernorm
        self.post_mix = Rms(after.weight, after.variance_epsilon)
        self.post_feed = Rms(end.weight, end.variance_epsilon)

    def fed(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.post_feed(self.feed(x))
        return out

    def forward(self, x: Tensor, places: Tensor, frequencies: Tensor, past: Any) -> tuple[Tensor, Any]:
        mixed, state = self.mix(x, places, frequencies, past)
        return self.fed(x + self.post_mix(mixed)), state


class ExaonePort(nn.Module):
    """EXAONE 4."""

    mixer = ExaoneMixer

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        self.words = kept(inner.embed_tokens.weight)
        self.frequencies = inner.rotary_emb.inv_freq.detach().clone()
        self.blocks = nn.ModuleList([ExaoneBlock(layer, self.mixer) for layer in inner.layers])
        self.norm = Rms(inner.norm.weight, inner.norm.variance_epsilon)
        self.head = linear(reference.lm_head.weight)

    def forward(self, input_ids: Tensor, use_cache: bool = True, cache: Any = None) -> Scores:
        x = self.words[input_ids]
        start, pasts = (0, [None] * len(self.blocks)) if cache is None else (cache[0], cache[1])
        places, states = torch.arange(start, start + input_ids.shape[1]), []
        for block, past in zip(self.blocks, pasts, strict=True):
            x, state = block(x, places, self.frequencies, past)
            states.append(state)
        left = (start + input_ids.shape[1], states) if use_cache else None
        return Scores(logits=self.head(self.norm(x)), cache=left)


class ExaoneWithRings(ExaonePort):
    """With rings for the windows."""

    mixer = RingMixer


def exaone_with_norms_in_queries(reference: Any) -> Any:
    """The gain of the norm of queries is that of keys as well, which are not scaled any more.

    A head's norm gives `gain * unit`; only products of queries and keys are used where nothing is rotated,
    so that in layers without rotation one gain may be moved to the other side.
    """
    port: Any = ExaonePort(reference)
    with torch.no_grad():
        for block in port.blocks:
            if not block.mix.rotates:
                block.mix.query_norm.gain *= block.mix.key_norm.gain
                block.mix.key_norm.gain.fill_(1.0)
    return port
