"""The Llama of `models.py` as somebody might rewrite it: other names and fused projections."""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import tensorcap
from examples.models import reference as original

HEADS, KV_HEADS, SIZE = 4, 2, 16


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scale `x` to length one, then by the gain."""
        return rms_norm(x, x.shape[-1:], self.gain, 1e-6)


class Mixer(nn.Module):
    """Attention, its three projections in one."""

    def __init__(self, w: dict[str, Tensor], at: str) -> None:
        super().__init__()
        self.qkv = fused(w, *(f"{at}.{name}_proj" for name in "qkv"))
        self.out = fused(w, f"{at}.o_proj")

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of `x`."""
        parts = self.qkv(x).split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], -1)
        q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(-2, -3) for part in parts)
        mixed = scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Gated(nn.Module):
    """The MLP, gate and up in one."""

    def __init__(self, w: dict[str, Tensor], at: str) -> None:
        super().__init__()
        self.gate_up = fused(w, f"{at}.gate_proj", f"{at}.up_proj")
        self.down = fused(w, f"{at}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """Gate `x`, token by token."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(silu(gate) * up)


class Block(nn.Module):
    """A layer."""

    def __init__(self, w: dict[str, Tensor], at: str) -> None:
        super().__init__()
        self.ln1, self.mixer = Norm(w[f"{at}.input_layernorm.weight"]), Mixer(w, f"{at}.self_attn")
        self.ln2, self.ff = Norm(w[f"{at}.post_attention_layernorm.weight"]), Gated(w, f"{at}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to `x`."""
        x = x + self.mixer(self.ln1(x))
        return x + self.ff(self.ln2(x))


class Decoder(nn.Module):
    """The model."""

    def __init__(self, w: dict[str, Tensor], layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding.from_pretrained(w["model.embed_tokens.weight"])
        self.blocks = nn.ModuleList(Block(w, f"model.layers.{i}") for i in range(layers))
        self.ln = Norm(w["model.norm.weight"])
        self.head = fused(w, "lm_head")

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of tokens."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def fused(w: dict[str, Tensor], *names: str) -> nn.Linear:
    """One linear layer of the weights of some."""
    weight = torch.cat([w[f"{name}.weight"] for name in names])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return layer


def turned(x: Tensor) -> Tensor:
    """Rotary embedding, halves."""
    angles = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE))
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def port() -> tensorcap.Workload:
    """The rewritten model, on the same tokens."""
    made = original()
    weights = made.model.state_dict()
    return tensorcap.Workload(Decoder(weights, 4).eval(), {"tokens": made.inputs["input_ids"]})


def wrong() -> tensorcap.Workload:
    """The same with a mistake: a weight of layer 2 was converted with a scale too much."""
    workload = port()
    with torch.no_grad():
        workload.model.blocks[2].ff.down.weight.mul_(1.05)
    return workload
