"""State spaces and gated recurrences: Mamba 2, RecurrentGemma."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.planting import computing, module_at, rebind, rebound

MIXER: Final = "backbone.layers.1.mixer"
UNIT: Final = "model.layers.1.temporal_block.rg_lru"


def norm_of_all_groups(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    x = hidden_states.float() * functional.silu(gate.float())
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    out: Tensor = self.weight * x.to(hidden_states.dtype)
    return out


def global_of(model: Any, site: str, name: str) -> Any:
    """What a name means in the `forward` of a module."""
    return inspect.unwrap(type(module_at(model, site)).forward).__globals__[name]


def bias_after_softplus(model: Any) -> None:
    scan = global_of(model, MIXER, "mamba2_chunk_scan")

    def scanned(
        x: Tensor, dt: Tensor, *given: Any, dt_bias: Tensor, dt_softplus: bool, **options: Any
    ) -> Any:
        return scan(x, functional.softplus(dt) + dt_bias, *given, **options)

    rebind(module_at(model, MIXER), mamba2_chunk_scan=scanned)


def taps_reversed(model: Any) -> None:
    convolve = global_of(model, MIXER, "causal_conv1d_fn")
    rebind(
        module_at(model, MIXER),
        causal_conv1d_fn=lambda x, weight, *given, **options: convolve(x, weight.flip(-1), *given, **options),
    )


def state_updated_twice(model: Any) -> None:
    """A step of decoding that puts the new input into the window before the step does so again."""
    update = global_of(model, MIXER, "causal_conv1d_update")

    def updated(x: Tensor, state: Tensor, *given: Any, **options: Any) -> Any:
        state.copy_(torch.cat((state[..., 1:], x), -1))
        return update(x, state, *given, **options)

    rebind(module_at(model, MIXER), causal_conv1d_update=updated)


def state_not_written(model: Any) -> None:
    """A step of decoding that reads the window of inputs and does not note the new one for the next step."""
    update = global_of(model, MIXER, "causal_conv1d_update")
    rebind(
        module_at(model, MIXER),
        causal_conv1d_update=lambda x, state, *given, **options: update(x, state.clone(), *given, **options),
    )


def recurrence(
    self: Any, activations: Any, position_ids: Tensor, strength: float, power: int, is_reset: bool
) -> Any:
    """The unit by its formula: decay `exp(-strength r softplus(p))`, input times `sqrt(1 - decay^power)`."""
    heads = activations.unflatten(-1, (self.num_attention_heads, -1))

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(torch.einsum("blhi,hij->blhj", heads, weight) + bias).flatten(2)

    log_decay = -strength * gate(self.recurrent_gate_weight, self.recurrent_gate_bias)
    log_decay = log_decay * functional.softplus(self.recurrent_param)
    scale = (1 - (power * log_decay).exp()).sqrt()
    if is_reset:
        scale = torch.where(position_ids[..., None] == 0, 1.0, scale)
    x = activations * gate(self.input_gate_weight, self.input_gate_bias) * scale.to(activations.dtype)
    state, out = torch.zeros_like(x[:, 0], dtype=torch.float32), []
    for at in range(x.shape[1]):
        state = log_decay[:, at].exp().float() * state + x[:, at].float()
        out.append(state.to(x.dtype))
    return torch.stack(out, 1)


def strength_of_one(self: Any, activations: Tensor, position_ids: Tensor) -> Any:
    return recurrence(self, activations, position_ids, 1.0, 2, True)


def decay_not_squared(self: Any, activations: Tensor, position_ids: Tensor) -> Any:
    return recurrence(self, activations, position_ids, 8.0, 1, True)


def first_not_reset(self: Any, activations: Tensor, position_ids: Tensor) -> Any:
    """The first token scaled as if there were a state before it."""
    return recurrence(self, activations, position_ids, 8.0, 2, False)


MISTAKES: Final = (
    Mistake(
        "mamba2_state_not_written",
        "mamba2_decode",
        MIXER,
        "state",
        state_not_written,
        also_kinds=("shift", "cache"),
    ),
    Mistake(
        "mamba2_norm_of_all_groups",
        "mamba2",
        f"{MIXER}.norm",
        "groups",
        computing(f"{MIXER}.norm", norm_of_all_groups),
        also_kinds=("axis", "statistics"),
    ),
    Mistake(
        "mamba2_bias_after_softplus", "mamba2", MIXER, "order", bias_after_softplus, also_kinds=("bias",)
    ),
    Mistake("mamba2_taps_reversed", "mamba2", MIXER, "permutation", taps_reversed, also=(f"{MIXER}.conv1d",)),
    Mistake(
        "mamba2_state_updated_twice",
        "mamba2_decode",
        MIXER,
        "state",
        state_updated_twice,
        also_kinds=("shift", "cache"),
    ),
    Mistake("recurrent_gemma_strength", "recurrent_gemma", UNIT, "factor", computing(UNIT, strength_of_one)),
    Mistake(
        "recurrent_gemma_decay_not_squared",
        "recurrent_gemma",
        UNIT,
        "factor",
        computing(UNIT, decay_not_squared),
        also_kinds=("state",),
    ),
    Mistake(
        "recurrent_gemma_first_not_reset",
        "recurrent_gemma",
        UNIT,
        "state",
        computing(UNIT, first_not_reset),
        also_kinds=("factor", "position"),
    ),
)


def step_by_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, dt_bias: Tensor, **given: Any
) -> Any:
    """The recurrence token by token, where the library computes chunks by matrix products."""
    step = functional.softplus(dt + dt_bias.to(dt.dtype)).float()
    b, c = (y.float().repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (b, c))
    state = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[-1], dtype=torch.float32)
    out = []
    for at in range(x.shape[1]):
        decay = (a.float() * step[:, at]).exp()[..., None, None]
        state = decay * state + (step[:, at, :, None] * x[:, at].float())[..., None] * b[:, at, :, None]
        out.append((state * c[:, at, :, None]).sum(-1))
    return torch.stack(out, 1) + given["D"][:, None] * x.float()


def scans_step_by_step(model: Any) -> Any:
    for layer in range(3):
        rebound(f"backbone.layers.{layer}.mixer", mamba2_chunk_scan=step_by_step)(model)
    return model


def by_doubling(
    hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Any, **_: Any
) -> Any:
    """The recurrence as a scan over distances 1, 2, 4, ….

    Of a pair (decay, input), the later one after the earlier one is (d2 d1, d2 x1 + x2).
    """
    decay, x = (recurrent_gate * ~reset).float(), hidden_states.float()
    distance = 1
    while distance < x.shape[1]:
        earlier_x = functional.pad(x, (0, 0, distance, 0))[:, :-distance]
        earlier_decay = functional.pad(decay, (0, 0, distance, 0))[:, :-distance]
        x, decay = decay * earlier_x + x, decay * earlier_decay
        distance *= 2
    return x.to(hidden_states.dtype), x[:, -1]


def scans_by_doubling(model: Any) -> Any:
    for module in model.modules():
        if type(module).__name__ == "RecurrentGemmaRglru":
            module._rnn_scan = by_doubling
    return model


CORRECT: Final = (
    Correct("mamba2_step_by_step", "mamba2", scans_step_by_step),
    Correct("mamba2_decode_as_it_is", "mamba2_decode", lambda model: model),
    Correct("recurrent_gemma_by_doubling", "recurrent_gemma", scans_by_doubling),
)
