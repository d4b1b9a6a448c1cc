"""The same computed in another way: fused, divided, laid out otherwise, written out, more precise."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.planting import interleaved, module_at, override, put, rebound, rotate_pairs, with_tensors

LAYERS: Final = range(3)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    made.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made


class FusedMLP(nn.Module):
    """Gate and up in one projection."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = linear(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        self.act_fn, self.down_proj = mlp.act_fn, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(self.act_fn(gate) * up)
        return out


def fused_gate_up(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp = FusedMLP(layer.mlp).eval()
    return model


def fused_queries_keys_values(attention: Any) -> None:
    """Queries, keys and values in one projection, in blocks."""
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    sizes = [part.out_features for part in parts]
    rotate = inspect.unwrap(type(attention).forward).__globals__["apply_rotary_pos_emb"]
    attention.qkv_proj = linear(
        torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
    )
    for name in ("q_proj", "k_proj", "v_proj"):
        delattr(attention, name)

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Any:
        given = self.qkv_proj(hidden_states).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in given)
        q, k = rotate(q, k, *position_embeddings)
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    override(attention, forward)


class RowParallel(nn.Module):
    """A projection whose input is divided among two devices, which add up what they get."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ParameterList(part.detach().clone() for part in whole.weight.chunk(2, 1))
        self.bias = whole.bias

    def forward(self, input: Tensor) -> Tensor:
        ranks = zip(input.chunk(2, -1), self.parts, strict=True)
        total: Tensor = sum(functional.linear(x, weight) for x, weight in ranks)  # type: ignore[assignment]  # not the 0 that sum starts with
        return total if self.bias is None else total + self.bias


class ColumnParallel(nn.Module):
    """A projection whose output is divided among two devices."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            linear(weight, None if whole.bias is None else whole.bias.chunk(2)[at])
            for at, weight in enumerate(whole.weight.chunk(2))
        )

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([functional.linear(input, part.weight, part.bias) for part in self.parts], -1)  # type: ignore[arg-type]  # they are linear


def tensor_parallel(model: Any) -> Any:
    for layer in LAYERS:
        at = f"model.layers.{layer}"
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            put(model, f"{at}.{name}", ColumnParallel(module_at(model, f"{at}.{name}")))
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            put(model, f"{at}.{name}", RowParallel(module_at(model, f"{at}.{name}")))
    return model


def pairs_side_by_side(model: Any) -> Any:
    """Rotary pairs side by side, and the rows that make queries and keys in that order."""
    for layer in LAYERS:
        at = f"model.layers.{layer}.self_attn"
        for name, count in (("q_proj", 4), ("k_proj", 2)):
            order = interleaved(count, 16)
            with_tensors(f"{at}.{name}", weight=lambda w, o=order: w[o], bias=lambda b, o=order: b[o])(model)  # type: ignore[misc]  # each has its own order
        rebound(at, apply_rotary_pos_emb=rotate_pairs)(model)
    return model


def padded_vocabulary(model: Any) -> Any:
    """Rows of the embedding and of the head up to a round number, which no token uses."""
    for site in ("model.embed_tokens", "lm_head"):
        with_tensors(site, weight=lambda w: torch.cat((w, w.new_zeros(16, w.shape[1]))))(model)
    return model


def fused_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def compiled_activation(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.compile(layer.mlp.act_fn, backend="aot_eager")
    return model


def compiled_norms(model: Any) -> Any:
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = torch.compile(norm.forward, backend="aot_eager")
    return model


def linear_for_conv1d(model: Any) -> Any:
    for block in model.transformer.h:
        for parent in (block.attn, block.mlp):
            for name, child in list(parent.named_children()):
                if type(child).__name__ == "Conv1D":
                    setattr(parent, name, linear(child.weight.T, child.bias))
    return model


def softmax_of_the_chosen(self: Any, hidden_states: Tensor) -> Any:
    """Top k first and softmax over them, which is the same as softmax, top k and normalisation."""
    logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    chosen, indices = torch.topk(logits.float(), self.top_k, -1)
    scores = torch.softmax(chosen, -1)
    if type(self).__name__.startswith("Qwen3"):
        scores = scores.to(logits.dtype)
    return logits, scores, indices


def every_expert(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any
) -> Tensor:
    """All experts for all tokens, those that are not chosen weighted with zero."""
    weights = torch.zeros(len(hidden_states), self.num_experts, dtype=top_k_weights.dtype)
    weights.scatter_(1, top_k_index, top_k_weights)
    gate, up = torch.einsum("td,eid->eti", hidden_states, self.gate_up_proj).chunk(2, -1)
    out = torch.einsum("eti,edi->etd", functional.silu(gate) * up, self.down_proj)
    return torch.einsum("etd,te->td", out.to(weights.dtype), weights).to(hidden_states.dtype)


def one_plus_stored(model: Any) -> Any:
    """Norms that hold one plus the weight, in float32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.weight = nn.Parameter(1 + module.weight.detach().float())
            override(module, lambda self, x: (self._norm(x.float()) * self.weight).type_as(x))
    return model


def scale_stored(model: Any) -> Any:
    """An embedding that holds scaled rows, so that it is no longer the head's."""
    model.model.embed_tokens.embed_scale = torch.tensor(1.0)
    with_tensors("model.embed_tokens", weight=lambda w: w * 8)(model)
    return model


def gates_in_blocks(model: Any) -> Any:
    """Gate and up one after the other, in the weights and in the code that reads them."""
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "gate_up_proj_bias"):
            before = getattr(experts, name).detach()
            setattr(experts, name, nn.Parameter(torch.cat((before[..., ::2], before[..., 1::2]), -1)))
        inner = experts._apply_gate
        experts._apply_gate = lambda x, inner=inner: inner(torch.stack(x.chunk(2, -1), -1).flatten(-2))
    return model


def sinks_afterwards(
    attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scaling: float, **_: Any
) -> Any:
    """Attention without sinks, scaled by what the sink leaves of each row."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scaling + mask
    share = torch.sigmoid(scores.logsumexp(-1, keepdim=True) - module.sinks[:, None, None])
    return (torch.softmax(scores, -1) * share @ v).transpose(1, 2).contiguous(), None


def precise_attention(
    attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **_: Any
) -> Any:
    """Attention in float32 throughout."""
    out = functional.scaled_dot_product_attention(
        q.float(),
        k.float(),
        v.float(),
        None if mask is None else mask.expand(-1, q.shape[1], -1, -1),
        scale=scaling,
    )
    return out.to(q.dtype).transpose(1, 2).contiguous(), None


def written_norm(self: Any, input: Tensor) -> Tensor:
    """LayerNorm by its formula, in float32."""
    x = input.float()
    x = x - x.mean(-1, keepdim=True)
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    scaled: Tensor = out * self.weight.float() + self.bias.float()
    return scaled.to(input.dtype)


def scores_scaled_later(attend: Any, module: Any, q: Tensor, *given: Any, **options: Any) -> Any:
    """The scale applied to the scores, where the library applies it to the queries."""
    return attend(module, q / module.scaling, *given, **{**options, "scaling": module.scaling})


def patches_by_linear(self: Any, pixel_values: Tensor) -> Tensor:
    """Patches cut out and multiplied with a matrix."""
    patches = functional.unfold(pixel_values, self.kernel_size, stride=self.stride).transpose(1, 2)
    out = functional.linear(patches, self.weight.flatten(1), self.bias)
    rows = pixel_values.shape[-2] // self.stride[0]
    return out.transpose(1, 2).reshape(*out.shape[::2], rows, -1)


def convolution_by_taps(x: Tensor, weight: Tensor, bias: Tensor, **_: Any) -> Tensor:
    """A causal convolution as a sum of shifted products."""
    count = weight.shape[-1]
    padded = functional.pad(x, (count - 1, 0))
    taps = [padded[..., at : at + x.shape[-1]] * weight[:, at, None] for at in range(count)]
    return functional.silu(torch.stack(taps).float().sum(0).to(x.dtype) + bias[:, None])


class Wrapped(nn.Module):
    """A model one level further down."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)
