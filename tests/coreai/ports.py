"""Sources given to Core AI's converter in place of a reference: rewritten, cast, quantised, or wrong.

A mistake in a source stands on a line that ends in a marker, `# line: WHAT`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.coreai.models import Attention, Block, RmsNorm, heads, joined

if TYPE_CHECKING:
    from torch.export import ExportedProgram

INT8_MAX = 127


def recast(model: Any, site: str, port: type[nn.Module]) -> Any:
    """Let the module of a site compute what another class does with its weights."""
    model.get_submodule(site).__class__ = port
    return model


def halved(model: Any) -> Any:
    """Parameters in float16; buffers, such as a table of frequencies, stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    return model


class BlockWithTanh(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.mix(self.norm(x)))
        h = functional.gelu(h, approximate="tanh")  # line: gelu by tanh
        out: Tensor = x + self.down(h)
        return out


class SoftmaxOverQueries(Attention):
    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~allowed, -math.inf)
        weights = torch.softmax(scores, -2)  # line: softmax over queries
        out: Tensor = self.out(joined(weights @ v))
        return out


class LeakyMask(Attention):
    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~allowed, -10.0)  # line: mask that leaks
        out: Tensor = self.out(joined(torch.softmax(scores, -1) @ v))
        return out


class FusedAttention(Attention):
    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        out: Tensor = self.out(joined(functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)))
        return out


class RotatedBackwards(LlamaAttention):
    """The library's attention, whose rotation of half the channels has the other sign."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        rotated = []
        for x in (q, k):
            left, right = x.chunk(2, -1)
            turned = torch.cat((right, -left), -1)  # line: sign of the rotation
            rotated.append(x * cos + turned * sin)
        q, k = rotated
        k, v = (x.repeat_interleave(self.num_key_value_groups, 1) for x in (k, v))
        weights = torch.softmax(q @ k.transpose(-2, -1) * self.scaling + attention_mask, -1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class RmsNormWithBuffer(RmsNorm):
    """The norm, with its epsilon in a buffer, which is cast with the model: 1e-8 is 0 in float16."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        variance = wide.square().mean(-1, keepdim=True)
        variance = variance + self.eps  # line: epsilon from a buffer
        return self.weight * (wide * torch.rsqrt(variance)).to(x.dtype)


def epsilon_cast(model: Any) -> Any:
    """The model in float16, buffers and all, with the epsilon of its first norm in a buffer."""
    norm = recast(model, "layers.0.norm", RmsNormWithBuffer).get_submodule("layers.0.norm")
    eps = torch.tensor(norm.eps)
    del norm.eps
    norm.register_buffer("eps", eps)
    return model.half()


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 [out, in] with a scale for each output, [out, 1]."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / INT8_MAX
        self.register_buffer("weight", torch.round(linear.weight.detach() / scale).to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale  # line: dequantisation
        return functional.linear(x, weight, self.bias)


def quantised(model: Any) -> Any:
    """Each linear layer with an int8 weight."""
    for site, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(site, Int8Linear(module))
    return model


def one_scale_of_the_tensor(model: Any) -> Any:
    """Quantised by the row, but one weight dequantised by the scale that the whole of it would have."""
    scale = quantised(model).get_submodule("model.layers.1.mlp.up_proj").scale
    scale.fill_(scale.max())
    return model


def other_epsilon(model: Any) -> Any:
    model.get_submodule("blocks.0.norm").eps = 1e-5
    return model


def scaled_by_the_width(model: Any) -> Any:
    """Scores divided by the root of the model's width, not of the head's."""
    attention = model.get_submodule("model.layers.1.self_attn")
    attention.scaling = attention.config.hidden_size**-0.5
    return model


def folded(model: Any) -> Any:
    """Each batch norm folded into the convolution before it."""
    for i in (1, 2):
        convolution = fuse_conv_bn_eval(model.get_submodule(f"conv{i}"), model.get_submodule(f"bn{i}"))
        model.set_submodule(f"conv{i}", convolution)
        model.set_submodule(f"bn{i}", nn.Identity())
    return model


def transposed(program: ExportedProgram) -> ExportedProgram:
    """A square weight of the state dict, transposed."""
    name = "model.layers.0.self_attn.o_proj.weight"
    program.state_dict[name] = nn.Parameter(program.state_dict[name].T.contiguous())
    return program


def without_bias(program: ExportedProgram) -> ExportedProgram:
    """The second convolution of the graph is given no bias."""
    node = next(node for node in program.graph.nodes if node.name == "convolution_1")
    node.update_arg(2, None)
    program.graph_module.recompile()
    return program
