"""Small models as PyTorch references of conversions to Core AI, with random weights, in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

Inputs = Mapping[str, Tensor]

WIDTH = 32
HEADS = 4
TOKENS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        for layer in (self.mix, self.up):  # so that a GELU gets values of size 1, as in a trained model
            nn.init.normal_(layer.weight, std=WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)  # line: norm of a block
        h = self.up(self.mix(h))
        out: Tensor = x + self.down(functional.gelu(h))
        return out


class Mlp(nn.Module):
    """Blocks with a layer norm, a square layer and a GELU each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class ConvNet(nn.Module):
    """Two convolutions, each with a batch norm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 8)
        for norm in (self.bn1, self.bn2):
            norm.running_mean = 0.2 * torch.randn(norm.num_features)
            norm.running_var = 0.2 + torch.rand(norm.num_features)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(image)))
        x = self.conv2(x)  # line: second convolution
        x = functional.relu(self.bn2(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Attention(nn.Module):
    """Causal attention over the tokens that are kept, with its softmax written out."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~allowed, -math.inf)
        out: Tensor = self.out(joined(torch.softmax(scores, -1) @ v))
        return out


def heads(x: Tensor) -> Tensor:
    """Split the last axis into heads: [batch, tokens, width] to [batch, head, token, channel]."""
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """Undo `heads`."""
    return x.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Two layers of masked attention."""

    causal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.register_buffer("causal", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        allowed = self.causal & (keep[:, None, None, :] > 0)
        for layer in self.layers:
            x = x + layer(x, allowed)
        return x


class RmsNorm(nn.Module):
    """RMS norm, computed in float32 whatever the dtype of the model; with the epsilon of its paper's code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.eps = 1e-8

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RmsNorm()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class Rms(nn.Module):
    """Two gated layers with an RMS norm each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(), Gated()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def llama() -> nn.Module:
    """A Llama of two layers, whose attention is written out."""
    config = LlamaConfig(  # type: ignore[call-arg] # it takes the implementation among its extra arguments
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        vocab_size=64,
        initializer_range=0.2,
        attn_implementation="eager",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def floats(name: str, *shape: int, scale: float = 1.0) -> Callable[[], Inputs]:
    """Normal values that float16 holds exactly, so that both sides of a conversion take the same."""
    return lambda: {name: (scale * torch.randn(shape)).half().float()}


def tokens_all_kept() -> Inputs:
    return {**floats("x", 2, TOKENS, WIDTH)(), "keep": torch.ones(2, TOKENS, dtype=torch.int32)}


def tokens_some_padded() -> Inputs:
    """A batch of two; of the second, the last two tokens are padding."""
    values = tokens_all_kept()
    values["keep"][1, -2:] = 0
    return values


def rows_some_quiet() -> Inputs:
    """Rows of which half are so small that their mean square is near the epsilon of `RmsNorm`."""
    x = torch.randn(2, TOKENS, WIDTH)
    x[:, ::2] *= 1e-4
    return {"x": x.half().float()}


def token_ids() -> Inputs:
    return {"input_ids": torch.randint(0, 64, (1, TOKENS), dtype=torch.int32)}


@dataclass(frozen=True)
class Model:
    """How to make a module, and inputs by the names of its forward's arguments."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


MODELS = {
    "mlp": Model(Mlp, floats("x", 4, WIDTH, scale=0.1)),
    "convnet": Model(ConvNet, floats("image", 1, 3, 16, 16)),
    "decoder": Model(Decoder, tokens_all_kept),
    "padded decoder": Model(Decoder, tokens_some_padded),
    "rms": Model(Rms, rows_some_quiet),
    "llama": Model(llama, token_ids),
}


def make(name: str) -> nn.Module:
    """A model of `MODELS` in float32; its weights are the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return MODELS[name].module().eval()


def make_inputs(name: str) -> Inputs:
    """The inputs of a model, the same at each call; what is floating is float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return MODELS[name].inputs()
