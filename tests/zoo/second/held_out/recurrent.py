"""State spaces and gated recurrences: Mamba 2, RecurrentGemma."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.other_ways import linear
from tests.zoo.planting import computing, module_at, override, rebind, with_config, with_tensors, with_values

MIXER: Final = "backbone.layers.1.mixer"
RECURRENT: Final = "model.layers.1.temporal_block"
ROTARY: Final = "model.layers.2.temporal_block.rotary_emb"


def norm_before_gate(self: Any, hidden_states: Tensor, gate: Tensor) -> Any:
    x = hidden_states.float().unflatten(-1, (-1, self.group_size))  # type: ignore[no-untyped-call]
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)).flatten(-2)
    return self.weight * (x * functional.silu(gate.float())).to(hidden_states.dtype)


def global_of(model: Any, site: str, name: str) -> Any:
    """What a name means in the `forward` of a module."""
    return inspect.unwrap(type(module_at(model, site)).forward).__globals__[name]


def groups_tiled(model: Any) -> None:
    """Heads take turns with the groups, where neighbours have to share one."""
    scan = global_of(model, MIXER, "mamba2_chunk_scan")

    def scanned(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Any:
        count = x.shape[2] // b.shape[2]
        return scan(x, dt, a, b.repeat(1, 1, count, 1), c.repeat(1, 1, count, 1), **options)

    rebind(module_at(model, MIXER), mamba2_chunk_scan=scanned)


def chunks_apart(model: Any) -> None:
    """Each chunk begins without the state of the one before."""
    scan = global_of(model, MIXER, "mamba2_chunk_scan")

    def scanned(*given: Tensor, chunk_size: int, **options: Any) -> Tensor:
        x, dt, a, b, c = given
        parts = [
            scan(x[:, s], dt[:, s], a, b[:, s], c[:, s], chunk_size=chunk_size, **options)
            for s in (slice(at, at + chunk_size) for at in range(0, x.shape[1], chunk_size))
        ]
        return torch.cat(parts, 1)

    rebind(module_at(model, MIXER), mamba2_chunk_scan=scanned)


def step_without_bias(model: Any) -> None:
    """A step of decoding that forgets the bias of the step sizes, which the prompt's scan has."""
    update = global_of(model, MIXER, "mamba2_selective_state_update")
    rebind(
        module_at(model, MIXER),
        mamba2_selective_state_update=lambda *given, **options: update(
            *given, **{**options, "dt_bias": None}
        ),
    )


def other_branch_activated(self: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> Any:
    """The recurrent branch activated and not the one that gates it."""
    x = self.linear_x(input_states).transpose(1, 2)
    x = self.conv_1d(x)[..., : input_states.shape[1]].transpose(1, 2)
    x = self.act_fn(self.rg_lru(x, position_ids))
    return self.linear_out(x * self.linear_y(input_states)), None


def whole_head_turned(_: Tensor) -> Tensor:
    return 1 / 10000 ** (torch.arange(0, 16, 2) / 16)


MISTAKES: Final = (
    Mistake(
        "mamba2_norm_before_gate",
        "mamba2",
        f"{MIXER}.norm",
        "order",
        computing(f"{MIXER}.norm", norm_before_gate),
    ),
    Mistake("mamba2_groups_tiled", "mamba2", MIXER, "permutation", groups_tiled, also_kinds=("groups",)),
    Mistake("mamba2_chunks_apart", "mamba2", MIXER, "state", chunks_apart),
    Mistake("mamba2_step_without_bias", "mamba2_decode", MIXER, "bias", step_without_bias),
    Mistake(
        "recurrent_gemma_gates_transposed",
        "recurrent_gemma",
        f"{RECURRENT}.rg_lru",
        "transposition",
        with_tensors(f"{RECURRENT}.rg_lru", recurrent_gate_weight=lambda w: w.mT),
    ),
    Mistake(
        "recurrent_gemma_other_branch_activated",
        "recurrent_gemma",
        RECURRENT,
        "activation",
        computing(RECURRENT, other_branch_activated),
        also_kinds=("permutation",),
    ),
    Mistake(
        "recurrent_gemma_whole_head_turned",
        "recurrent_gemma",
        ROTARY,
        "rope",
        with_tensors(ROTARY, inv_freq=whole_head_turned),
    ),
    Mistake(
        "recurrent_gemma_not_normalized",
        "recurrent_gemma",
        "model",
        "factor",
        with_values("model", normalizer=torch.tensor(1.0)),
    ),
    Mistake(
        "recurrent_gemma_softcap",
        "recurrent_gemma",
        "@root",
        "softcap",
        with_config("@root", logits_soft_cap=1e6),
    ),
)


class InputParts(nn.Module):
    """The projection of the input in parts: gate, inputs with states, step sizes."""

    def __init__(self, whole: Any, sizes: list[int]) -> None:
        super().__init__()
        self.gate, self.inputs, self.steps = (linear(part) for part in whole.weight.split(sizes))

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat((self.gate(input), self.inputs(input), self.steps(input)), -1)


def split_inputs(model: Any) -> Any:
    for layer in model.backbone.layers:
        mixer = layer.mixer
        sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
        mixer.in_proj = InputParts(mixer.in_proj, sizes).eval()
    return model


def one_chunk(model: Any) -> Any:
    for layer in model.backbone.layers:
        layer.mixer.chunk_size = 32
    return model


def gates_as_matrices(model: Any) -> Any:
    """The gates' blocks in matrices with zeros around them."""

    def forward(self: Any, activations: Tensor, position_ids: Tensor) -> Any:
        def gate(weight: Tensor, bias: Tensor) -> Tensor:
            matrix: Tensor = torch.block_diag(*weight)  # type: ignore[no-untyped-call]
            return torch.sigmoid(activations @ matrix + bias.flatten())

        log_decay = -8.0 * gate(self.recurrent_gate_weight, self.recurrent_gate_bias)
        log_decay = log_decay * functional.softplus(self.recurrent_param)
        is_first = position_ids[..., None] == 0
        scale = torch.where(is_first, 1.0, (1 - (2 * log_decay).exp()).sqrt())
        x = activations * gate(self.input_gate_weight, self.input_gate_bias) * scale.to(activations.dtype)
        return self._rnn_scan(x, log_decay.exp(), is_first, None)[0]

    for module in list(model.modules()):
        if type(module).__name__ == "RecurrentGemmaRglru":
            override(module, forward)
    return model


CORRECT: Final = (
    Correct("mamba2_split_inputs", "mamba2", split_inputs),
    Correct("mamba2_one_chunk", "mamba2", one_chunk),
    Correct("mamba2_as_it_is", "mamba2", lambda model: model),
    Correct("recurrent_gemma_gates_as_matrices", "recurrent_gemma", gates_as_matrices),
    Correct("recurrent_gemma_as_it_is", "recurrent_gemma", lambda model: model),
)
