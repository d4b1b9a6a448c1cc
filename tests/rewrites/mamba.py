"""Mamba, and what becomes of it in other hands."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import MambaConfig, MambaForCausalLM

from tests.rewrites.catalogue import BFLOAT16, INT8, Family, Run, random_model, tokens
from tests.rewrites.layers import (
    Int8Linear,
    RootMeanSquare,
    Weights,
    Wrapper,
    embedding_of,
    linear,
    linear_of,
    replace,
)

LAYERS, SIZE, INNER, STATE, RANK, WINDOW, VOCABULARY = 2, 32, 64, 8, 4, 4, 101
IDS: Final = tokens(2, 9, VOCABULARY)
EPS: Final = 1e-5


def model() -> Any:
    port = random_model(
        MambaForCausalLM,
        MambaConfig,
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        state_size=STATE,
        num_hidden_layers=LAYERS,
        expand=INNER // SIZE,
        conv_kernel=WINDOW,
        time_step_rank=RANK,
        layer_norm_epsilon=EPS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.no_grad():
        for block in port.backbone.layers:
            block.mixer.A_log.mul_(0.2).add_(torch.arange(1.0, STATE + 1).log())
            block.mixer.dt_proj.bias.sub_(1.0)
    return port


def run_of(port: Any) -> Run:
    return Run(port, {"input_ids": IDS, "use_cache": False})


def reference() -> Run:
    return run_of(model())


FAMILY: Final = Family("mamba", reference)


@FAMILY.correct("the same in bfloat16", tolerance=BFLOAT16)
def bfloat16() -> Run:
    return run_of(model().bfloat16())


@FAMILY.correct("an outer module with another argument that returns bare logits")
def wrapped() -> Run:
    return Run(Wrapper(model()), (IDS,))


@FAMILY.correct("a cache that is filled, and not read")
def with_cache() -> Run:
    return Run(model(), {"input_ids": IDS, "use_cache": True})


@FAMILY.correct("projections in int8, dequantised before use", tolerance=INT8)
def int8_projections() -> Run:
    port = model()
    for block in port.backbone.layers:
        block.mixer.in_proj, block.mixer.out_proj = (
            Int8Linear(block.mixer.in_proj),
            Int8Linear(block.mixer.out_proj),
        )
    return run_of(port)


@FAMILY.correct("torch.nn.RMSNorm in the place of the model's own class")
def norms_of_torch() -> Run:
    def norm_of(theirs: Any) -> nn.RMSNorm:
        norm = nn.RMSNorm(SIZE, EPS)
        norm.weight = theirs.weight
        return norm

    port = model()
    replace(port, type(port.backbone.norm_f), norm_of)
    return run_of(port)


@FAMILY.correct("gains of the norms folded into the projections behind them")
def folded_norms() -> Run:
    port = model()
    port.lm_head.weight = nn.Parameter(port.lm_head.weight.detach() * port.backbone.norm_f.weight.detach())
    with torch.no_grad():
        for block in port.backbone.layers:
            block.mixer.in_proj.weight *= block.norm.weight
            block.norm.weight.fill_(1)
        port.backbone.norm_f.weight.fill_(1)
    return run_of(port)


class SelectiveMixer(nn.Module):
    """The state, token by token; the two halves of the first projection apart, A negated and no logarithm."""

    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        x, z = w[f"{at}.in_proj.weight"].chunk(2)
        self.x_in, self.z_in, self.out = linear(x), linear(z), linear_of(w, f"{at}.out_proj")
        self.kernel, self.kernel_bias = (
            nn.Parameter(w[f"{at}.conv1d.weight"][:, 0]),
            nn.Parameter(w[f"{at}.conv1d.bias"]),
        )
        self.to_parameters, self.to_delta = linear_of(w, f"{at}.x_proj"), linear_of(w, f"{at}.dt_proj")
        self.a, self.d = nn.Parameter(-w[f"{at}.A_log"].exp()), nn.Parameter(w[f"{at}.D"].clone())
        self.lookahead, self.skips, self.swaps_b_and_c = 0, True, False

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.x_in(hidden), self.z_in(hidden)
        left = WINDOW - 1 - self.lookahead
        windows = F.pad(x, (0, 0, left, self.lookahead)).unfold(1, WINDOW, 1)  # batch, token, channel, window
        u = F.silu((windows * self.kernel).sum(-1) + self.kernel_bias)
        delta, b, c = self.to_parameters(u).split([RANK, STATE, STATE], -1)
        if self.swaps_b_and_c:
            b, c = c, b
        delta = F.softplus(self.to_delta(delta))
        state = u.new_zeros(len(u), INNER, STATE)
        results = []
        for t in range(u.shape[1]):
            decay = torch.exp(delta[:, t, :, None] * self.a)
            state = decay * state + delta[:, t, :, None] * b[:, t, None, :] * u[:, t, :, None]
            results.append(torch.einsum("bds,bs->bd", state, c[:, t]))
        y = torch.stack(results, 1)
        if self.skips:
            y = y + u * self.d
        out: Tensor = self.out(y * F.silu(z))
        return out


class Residual(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.norm, self.mixer = RootMeanSquare(w[f"{at}.norm.weight"], EPS), SelectiveMixer(w, f"{at}.mixer")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mixer(self.norm(x)) + x
        return out


class Minimal(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embedding = embedding_of(w, "backbone.embeddings")
        self.layers = nn.ModuleList(Residual(w, f"backbone.layers.{i}") for i in range(LAYERS))
        self.norm_f, self.lm_head = RootMeanSquare(w["backbone.norm_f.weight"], EPS), linear_of(w, "lm_head")

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm_f(x))
        return logits


def minimal() -> Any:
    return Minimal(model().state_dict()).eval()


@FAMILY.correct("written anew, token by token, with names of its own")
def rewritten() -> Run:
    return Run(minimal(), (IDS,))


@FAMILY.correct("written anew, in bfloat16", tolerance=BFLOAT16)
def rewritten_bfloat16() -> Run:
    return Run(minimal().bfloat16(), (IDS,))


@FAMILY.mistake("no skip by D in one layer", guilty="backbone.layers.0.mixer", beside=rewritten)
def skip_missing() -> Run:
    port = minimal()
    port.layers[0].mixer.skips = False
    return Run(port, (IDS,))


@FAMILY.mistake(
    "a convolution that sees the token ahead", guilty="backbone.layers.1.mixer.conv1d", beside=rewritten
)
def convolution_sees_ahead() -> Run:
    port = minimal()
    port.layers[1].mixer.lookahead = 1
    return Run(port, (IDS,))


@FAMILY.mistake("B and C swapped", guilty="backbone.layers.1.mixer.x_proj", beside=rewritten)
def b_and_c_swapped() -> Run:
    port = minimal()
    port.layers[1].mixer.swaps_b_and_c = True
    return Run(port, (IDS,))


@FAMILY.mistake(
    "gate and input swapped in the first projection",
    guilty="backbone.layers.0.mixer.in_proj",
    beside=norms_of_torch,
)
def gate_and_input_swapped() -> Run:
    port = norms_of_torch().model
    weight = port.backbone.layers[0].mixer.in_proj.weight
    with torch.no_grad():
        weight.copy_(weight.roll(INNER, 0))
    return run_of(port)


@FAMILY.mistake(
    "the bias of the time step not loaded", guilty="backbone.layers.1.mixer.dt_proj", beside=bfloat16
)
def time_step_bias_not_loaded() -> Run:
    port = model()
    nn.init.zeros_(port.backbone.layers[1].mixer.dt_proj.bias)
    nn.init.zeros_(port.backbone.layers[0].mixer.dt_proj.bias)
    return run_of(port.bfloat16())
