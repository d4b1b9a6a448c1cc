"""Mistakes in the ports of what has a state or experts."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.planting import module_at
from tests.zoo.third.parts import having
from tests.zoo.third.sequences import DbrxPort, Mamba2Port, RwkvPort, TaggerPort

_MAMBA2: Final = "mamba2_two_groups"


def gate_after_norm(self: Any, x: Tensor, gate: Tensor) -> Any:
    return self.gain * self.normed(x.float()).to(gate.dtype) * functional.silu(gate)


def state_lost_at_chunks(self: Any, state: Tensor, at: int) -> Any:
    return torch.zeros_like(state) if at % 16 == 0 else state


def groups_in_turn(self: Any, x: Tensor) -> Any:
    return torch.unflatten(x, -1, (self.groups, -1)).repeat(1, 1, self.heads // self.groups, 1)


def exponential_step(self: Any, x: Tensor) -> Any:
    return torch.exp(self.to_step(x) + self.step_bias)


def state_read_before_it_is_written(self: Any, x: Tensor, step: Tensor, write: Tensor, read: Tensor) -> Any:
    state = x.new_zeros((*x[:, 0].shape, self.states)).float()
    decay = torch.exp(-torch.exp(self.log_decay.float()) * step.float())
    outputs = []
    for at in range(x.shape[1]):
        outputs.append((state * read[:, at, :, None].float()).sum(-1))
        new = (x[:, at].float() * step[:, at, :, None].float())[..., None] * write[:, at, :, None].float()
        state = state * decay[:, at, :, None, None] + new
    return torch.stack(outputs, 1) + self.skip[:, None] * x


def no_bonus(self: Any, key: Tensor) -> Any:
    return torch.exp(key)


def mix_of_the_other(self: Any, x: Tensor, mix: Tensor) -> Any:
    before = functional.pad(x, (0, 0, 1, -1))
    return x + (before - x) * mix


def shifted_in_a_circle(self: Any, x: Tensor, mix: Tensor) -> Any:
    """The first token has the last one before it."""
    before = x.roll(1, 1)
    return before + (x - before) * mix


def decay_of_the_logarithm(self: Any) -> Any:
    """The checkpoint's logarithm of the rate is taken for the rate."""
    return torch.exp(-functional.softplus(self.decay.float()))


def one_bound(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return (x.clamp(max=self.limit) for x in (q, k, v))


def shares_of_all(self: Any, scores: Tensor) -> Any:
    """The best experts keep their shares of the softmax over all."""
    shares = scores.softmax(-1)
    best, which = shares.topk(self.top, -1)
    return torch.zeros_like(shares).scatter(-1, which, best)


def experts_exchanged(model: Any) -> None:
    experts = module_at(model, "layers.2.moe.experts")
    experts[1], experts[4] = experts[4], experts[1]


def reset_before_the_product(self: Any, x: Tensor, reset: Tensor, h: Tensor) -> Any:
    rows = self.onward.out_features // 3
    hidden = functional.linear(reset * h, self.onward.weight[2 * rows :], self.onward.bias[2 * rows :])
    return torch.tanh(x + hidden)


def update_the_other_way(self: Any, update: Tensor, h: Tensor, new: Tensor) -> Any:
    return update * new + (1 - update) * h


def not_turned_back(self: Any, ahead: Tensor, back: Tensor) -> Any:
    return torch.cat((ahead, back), -1)


def forget_bias_added(model: Any) -> None:
    """One is added to the gate that forgets, as another library does by default."""
    with torch.no_grad():
        for side in (*model.reader.ahead, *model.reader.back):
            rows = side.inward.out_features // 4
            side.inward.bias[rows : 2 * rows] += 1


MISTAKES: Final = (
    PortedMistake(
        "mamba2_gate_after_norm",
        _MAMBA2,
        "backbone.layers.1.mixer.norm",
        "order",
        having("blocks.1.scan.norm", forward=gate_after_norm),
        also=("backbone.layers.1.mixer",),
        port=Mamba2Port,
        in_words="the gate is applied after the norm, not before it",
        words=("after", "before", "order", "gate"),
    ),
    PortedMistake(
        "mamba2_state_lost_at_chunks",
        _MAMBA2,
        "backbone.layers.0.mixer",
        "state",
        having("blocks.0.scan", carried=state_lost_at_chunks),
        port=Mamba2Port,
        in_words="the state is not carried from one chunk of 16 tokens to the next",
        words=("state", "chunk", "carried", "recurr"),
    ),
    PortedMistake(
        "mamba2_groups_in_turn",
        _MAMBA2,
        "backbone.layers.2.mixer",
        "groups",
        having("blocks.2.scan", spread=groups_in_turn),
        also_kinds=("heads", "permutation"),
        port=Mamba2Port,
        in_words="heads take the two groups in turn instead of half of them each",
        words=("group", "head", "repeat"),
    ),
    PortedMistake(
        "mamba2_exponential_step",
        _MAMBA2,
        "backbone.layers.1.mixer",
        "activation",
        having("blocks.1.scan", step=exponential_step),
        port=Mamba2Port,
        in_words="the step is the exponential, not softplus",
        words=("softplus", "activation", "exp", "step"),
    ),
    PortedMistake(
        "mamba2_state_read_too_early",
        _MAMBA2,
        "backbone.layers.0.mixer",
        "state",
        having("blocks.0.scan", scan=state_read_before_it_is_written),
        also_kinds=("order", "shift"),
        port=Mamba2Port,
        in_words="the output of a token does not have its own contribution to the state",
        words=("state", "current token", "own token", "before", "recurr", "shift"),
    ),
    PortedMistake(
        "rwkv_no_bonus",
        "rwkv",
        "rwkv.blocks.1.attention",
        "bias",
        having("mixers.1.time", current=no_bonus),
        also_kinds=("offset", "factor", "state"),
        port=RwkvPort,
        in_words="the token itself has no weight of its own",
        words=("time_first", "bonus", "current token", "own weight", "state"),
    ),
    PortedMistake(
        "rwkv_mix_of_the_other",
        "rwkv",
        "rwkv.blocks.0.feed_forward",
        "shift",
        having("mixers.0.channel", blend=mix_of_the_other),
        also_kinds=("wiring", "order", "factor"),
        port=RwkvPort,
        in_words="the token and the one before it are mixed the other way round",
        words=("time_mix", "mix", "shift", "previous", "token before", "swap", "exchang"),
    ),
    PortedMistake(
        "rwkv_shifted_in_a_circle",
        "rwkv",
        "rwkv.blocks.2.attention",
        "shift",
        having("mixers.2.time", blend=shifted_in_a_circle),
        also=("rwkv.blocks.2.attention.time_shift",),
        also_kinds=("padding",),
        port=RwkvPort,
        in_words="the first token is mixed with the last one instead of zeros",
        words=("shift", "roll", "circular", "first token", "padding", "wrap"),
    ),
    PortedMistake(
        "rwkv_decay_of_the_logarithm",
        "rwkv",
        "rwkv.blocks.1.attention",
        "state",
        having("mixers.1.time", shrink=decay_of_the_logarithm),
        also_kinds=("activation", "factor"),
        port=RwkvPort,
        in_words="decay by softplus of the rate instead of its exponential",
        words=("decay", "time_decay", "state", "softplus"),
    ),
    PortedMistake(
        "rwkv_sums_in_bfloat16",
        "rwkv",
        "rwkv.blocks.0.attention",
        "precision",
        having("mixers.0.time", state_dtype=torch.bfloat16),
        also_kinds=("state",),
        port=RwkvPort,
        in_words="the sums that are carried on are rounded to bfloat16",
        words=("bfloat16", "rounded", "precision", "state"),
    ),
    PortedMistake(
        "dbrx_one_bound",
        "dbrx",
        "transformer.blocks.1.norm_attn_norm.attn",
        "clip",
        having("layers.1.attention", cut=one_bound),
        also=("transformer.blocks.1.norm_attn_norm.attn.Wqkv",),
        port=DbrxPort,
        in_words="queries, keys and values are cut off above and not below",
        words=("clip", "clamp", "cut", "bound", "limit"),
    ),
    PortedMistake(
        "dbrx_shares_of_all",
        "dbrx",
        "transformer.blocks.0.ffn",
        "router_order",
        having("layers.0.moe", weigh=shares_of_all),
        also=("transformer.blocks.0.ffn.router", "transformer.blocks.0.ffn.experts"),
        also_kinds=("factor",),
        port=DbrxPort,
        in_words="weights of the chosen experts do not sum to 1",
        words=("normal", "sum to", "router", "softmax", "factor"),
    ),
    PortedMistake(
        "dbrx_experts_exchanged",
        "dbrx",
        "transformer.blocks.2.ffn.experts",
        "expert_order",
        experts_exchanged,
        also=("transformer.blocks.2.ffn", "transformer.blocks.2.ffn.experts.mlp"),
        also_kinds=("permutation", "other_weights"),
        port=DbrxPort,
        in_words="two experts stand in each other's place",
        words=("expert",),
    ),
    PortedMistake(
        "tagger_reset_before_the_product",
        "tagger",
        "smoother",
        "order",
        having("smooth", candidate=reset_before_the_product),
        also_kinds=("state", "activation"),
        port=TaggerPort,
        in_words="the reset gate of a GRU is applied before the product",
        words=("reset", "gate", "before", "recurr", "state"),
    ),
    PortedMistake(
        "tagger_update_the_other_way",
        "tagger",
        "smoother",
        "state",
        having("smooth", blend=update_the_other_way),
        also_kinds=("order", "activation", "factor"),
        port=TaggerPort,
        in_words="the update gate keeps where it should take",
        words=("update", "gate", "recurr", "state", "complement"),
    ),
    PortedMistake(
        "tagger_not_turned_back",
        "tagger",
        "encoder",
        "permutation",
        having("reader", join=not_turned_back),
        also_kinds=("order", "axis", "shift"),
        port=TaggerPort,
        in_words="outputs of the backward direction stay in reversed order",
        words=("revers", "flip", "order", "direction", "backward"),
    ),
    PortedMistake(
        "tagger_forget_bias_added",
        "tagger",
        "encoder",
        "bias",
        forget_bias_added,
        also_kinds=("offset", "state"),
        port=TaggerPort,
        in_words="one is added to the bias of the forget gate",
        words=("bias", "offset", "forget"),
    ),
)
