"""Llama, and what becomes of it in other hands."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import LlamaConfig, LlamaForCausalLM

from tests.rewrites.catalogue import BFLOAT16, FLOAT16, INT8, Family, Run, random_model, tokens
from tests.rewrites.layers import (
    Int8Linear,
    RootMeanSquare,
    Weights,
    Wrapper,
    attention,
    causal_mask,
    embedding_of,
    interleaved_rows,
    join_heads,
    linear,
    linear_of,
    replace,
    rotary_tables,
    rotate_halves,
    split_heads,
)

LAYERS, HEADS, KV_HEADS, SIZE, WIDE, VOCABULARY = 3, 4, 2, 64, 112, 101
HEAD: Final = SIZE // HEADS
IDS: Final = tokens(2, 12, VOCABULARY)
BASE: Final = 10000.0


def model(implementation: str = "sdpa", kv_heads: int = KV_HEADS) -> Any:
    return random_model(
        LlamaForCausalLM,
        LlamaConfig,
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=implementation,
    )


def run_of(port: Any) -> Run:
    return Run(port, {"input_ids": IDS, "use_cache": False})


def reference() -> Run:
    return run_of(model())


def reference_bfloat16() -> Run:
    return run_of(model().bfloat16())


def prefill_and_decode(port: Any, ids: Tensor) -> Any:
    first = port(input_ids=ids[:, :8], use_cache=True)
    cache = first.get("cache") if "cache" in first else first.past_key_values
    return port(
        input_ids=ids[:, 8:9], **{"cache" if "cache" in first else "past_key_values": cache}, use_cache=True
    )


def reference_decoding() -> Run:
    return Run(model(), (IDS,), prefill_and_decode)


FAMILY: Final = Family("llama", reference)


@FAMILY.correct("eager attention in the place of sdpa")
def eager_attention() -> Run:
    return run_of(model("eager"))


@FAMILY.correct("sdpa in the place of a reference in eager", reference=lambda: run_of(model("eager")))
def sdpa_attention() -> Run:
    return run_of(model("sdpa"))


@FAMILY.correct("an outer module with another argument that returns bare logits")
def wrapped() -> Run:
    return Run(Wrapper(model()), {"tokens": IDS})


@FAMILY.correct("the same in bfloat16", tolerance=BFLOAT16)
def bfloat16() -> Run:
    return run_of(model().bfloat16())


@FAMILY.correct("the same in float16", tolerance=FLOAT16)
def float16() -> Run:
    return run_of(model().half())


@FAMILY.correct(
    "a reference in bfloat16, the target in float32", reference=reference_bfloat16, tolerance=BFLOAT16
)
def float32_of_bfloat16() -> Run:
    return run_of(model().bfloat16().float())


@FAMILY.correct("logits of the last token alone", reference_view=lambda logits: logits[:, -1:])
def last_token() -> Run:
    return Run(model(), {"input_ids": IDS, "use_cache": False, "logits_to_keep": 1})


@FAMILY.correct("only the first row of the batch", reference_view=lambda logits: logits[:1])
def one_row() -> Run:
    return Run(model(), {"input_ids": IDS[:1], "use_cache": False})


@FAMILY.correct("linear layers of the blocks in int8, dequantised before use", tolerance=INT8)
def int8_weights() -> Run:
    port = model()
    for layer in port.model.layers:
        replace(layer, nn.Linear, Int8Linear)
    return run_of(port)


@FAMILY.correct("norms that take *args, by another name of class")
def norms_of_another_library() -> Run:
    class FusedNorm(nn.Module):
        def __init__(self, weight: Tensor, eps: float) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(weight.detach().clone()), eps

        def forward(self, *args: Tensor) -> Tensor:
            return F.rms_norm(args[0], (SIZE,), self.weight, self.eps)

    port = model()
    kind = type(port.model.norm)
    replace(port, kind, lambda norm: FusedNorm(norm.weight, norm.variance_epsilon))
    return run_of(port)


@FAMILY.correct("gains of the norms folded into the projections behind them")
def folded_norms() -> Run:
    port = model()
    with torch.no_grad():
        for layer in port.model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj):
                projection.weight *= layer.input_layernorm.weight
            for projection in (mlp.gate_proj, mlp.up_proj):
                projection.weight *= layer.post_attention_layernorm.weight
            layer.input_layernorm.weight.fill_(1)
            layer.post_attention_layernorm.weight.fill_(1)
        port.lm_head.weight *= port.model.norm.weight
        port.model.norm.weight.fill_(1)
    return run_of(port)


@FAMILY.correct("keys and values repeated in the weights: as many as there are heads")
def multi_head_weights() -> Run:
    source, port = model(), model(kv_heads=HEADS)
    weights = source.state_dict()
    for name in list(weights):
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            rows = weights[name].unflatten(0, (KV_HEADS, HEAD))
            weights[name] = rows.repeat_interleave(HEADS // KV_HEADS, 0).flatten(0, 1)
    port.load_state_dict(weights)
    return run_of(port)


@FAMILY.correct("every MLP compiled through aot_eager")
def compiled_mlps() -> Run:
    port = model()
    for layer in port.model.layers:
        layer.mlp = torch.compile(layer.mlp, backend="aot_eager")
    return run_of(port)


class TableRotary(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        cos, sin = rotary_tables(length, HEAD, BASE)
        self.register_buffer("cos_cached", torch.cat([cos, cos], -1)[None])
        self.register_buffer("sin_cached", torch.cat([sin, sin], -1)[None])

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos: Any = self.cos_cached
        sin: Any = self.sin_cached
        return cos[:, position_ids[0]], sin[:, position_ids[0]]


@FAMILY.correct("rotary tables made once and kept as buffers")
def rotary_as_buffers() -> Run:
    port = model()
    port.model.rotary_emb = TableRotary(64)
    return run_of(port)


# --- As a serving engine has it: fused projections, halves


class FusedAttention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.qkv_proj = linear_of(w, f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")
        self.o_proj = linear_of(w, f"{at}.o_proj")
        self.base, self.scale = BASE, HEAD**-0.5

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(hidden).split([SIZE, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
        q, k, v = split_heads(q, HEADS), split_heads(k, KV_HEADS), split_heads(v, KV_HEADS)
        tables = rotary_tables(hidden.shape[1], HEAD, self.base)
        q, k = rotate_halves(q, *tables).to(v.dtype), rotate_halves(k, *tables).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        out: Tensor = self.o_proj(join_heads(mixed))
        return out


class FusedMLP(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.gate_up_proj = linear_of(w, f"{at}.gate_proj", f"{at}.up_proj")
        self.down_proj = linear_of(w, f"{at}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class ServedLayer(nn.Module):
    """The residual is carried beside the hidden states and added by the next norm."""

    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.input_layernorm = RootMeanSquare(w[f"{at}.input_layernorm.weight"], 1e-5)
        self.self_attn, self.mlp = FusedAttention(w, f"{at}.self_attn"), FusedMLP(w, f"{at}.mlp")
        self.post_attention_layernorm = RootMeanSquare(w[f"{at}.post_attention_layernorm.weight"], 1e-5)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        residual = self.self_attn(self.input_layernorm(residual)) + residual
        return self.mlp(self.post_attention_layernorm(residual)), residual


class ServedLlama(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embed_tokens = embedding_of(w, "model.embed_tokens")
        self.layers = nn.ModuleList(ServedLayer(w, f"model.layers.{i}") for i in range(LAYERS))
        self.norm = RootMeanSquare(w["model.norm.weight"], 1e-5)
        self.lm_head = linear_of(w, "lm_head")

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        logits: Tensor = self.lm_head(self.norm(hidden + residual))
        return logits


def served(port: Any = None) -> ServedLlama:
    return ServedLlama((port or model()).state_dict()).eval()


def served_run(port: nn.Module) -> Run:
    return Run(port, (IDS, torch.arange(IDS.shape[1])))


@FAMILY.correct("as a serving engine has it: fused projections, the residual carried beside")
def serving_engine() -> Run:
    return served_run(served())


@FAMILY.correct("a serving engine's model in bfloat16", tolerance=BFLOAT16)
def serving_engine_bfloat16() -> Run:
    return served_run(served().bfloat16())


# --- As its authors had it: other names, interleaved rotation by complex numbers


class AuthorsAttention(nn.Module):
    def __init__(self, w: Weights, at: str, *, permuted: bool = True) -> None:
        super().__init__()
        wq, wk = w[f"{at}.q_proj.weight"], w[f"{at}.k_proj.weight"]
        if permuted:
            wq, wk = interleaved_rows(wq, HEADS), interleaved_rows(wk, KV_HEADS)
        self.wq, self.wk = linear(wq), linear(wk)
        self.wv, self.wo = linear_of(w, f"{at}.v_proj"), linear_of(w, f"{at}.o_proj")

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.wq, self.wk, self.wv))
        q, k = turn(q, freqs_cis), turn(k, freqs_cis)
        mixed = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        out: Tensor = self.wo(join_heads(mixed))
        return out


def turn(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate [batch, tokens, heads, size] by complex numbers [tokens, size / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(-2).to(x.dtype)


class AuthorsFeedForward(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (linear_of(w, f"{at}.{name}_proj") for name in ("gate", "down", "up"))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class AuthorsBlock(nn.Module):
    def __init__(self, w: Weights, at: str, *, permuted: bool = True) -> None:
        super().__init__()
        self.attention = AuthorsAttention(w, f"{at}.self_attn", permuted=permuted)
        self.feed_forward = AuthorsFeedForward(w, f"{at}.mlp")
        self.attention_norm = RootMeanSquare(w[f"{at}.input_layernorm.weight"], 1e-5)
        self.ffn_norm = RootMeanSquare(w[f"{at}.post_attention_layernorm.weight"], 1e-5)
        self.has_residual = True

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        fed: Tensor = self.feed_forward(self.ffn_norm(h))
        return h + fed if self.has_residual else fed


class AuthorsTransformer(nn.Module):
    freqs_cis: Tensor

    def __init__(self, w: Weights, *, permuted: bool = True, base: float = BASE) -> None:
        super().__init__()
        self.tok_embeddings = embedding_of(w, "model.embed_tokens")
        self.layers = nn.ModuleList(
            AuthorsBlock(w, f"model.layers.{i}", permuted=permuted) for i in range(LAYERS)
        )
        self.norm, self.output = RootMeanSquare(w["model.norm.weight"], 1e-5), linear_of(w, "lm_head")
        cos, sin = rotary_tables(64, HEAD, base)
        self.register_buffer("freqs_cis", torch.complex(cos, sin), persistent=False)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        h, length = self.tok_embeddings(tokens), tokens.shape[1]
        freqs_cis, mask = self.freqs_cis[start_pos : start_pos + length], causal_mask(length)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        logits: Tensor = self.output(self.norm(h))
        return logits


def authors(**options: Any) -> AuthorsTransformer:
    return AuthorsTransformer(model().state_dict(), **options).eval()


@FAMILY.correct("as its authors had it: w1, w2, w3, interleaved rotation by complex numbers")
def original_code() -> Run:
    return Run(authors(), (IDS,))


# --- One block that is called again and again with the weights of the next layer, as a scan does


class ScannedBlock(nn.Module):
    def forward(self, x: Tensor, w: Weights) -> Tensor:
        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (SIZE,), w[name], 1e-5)

        tables = rotary_tables(x.shape[1], HEAD, BASE)
        normed = norm(x, "input_layernorm.weight")
        q = split_heads(normed @ w["self_attn.q_proj.weight"].T, HEADS)
        k = split_heads(normed @ w["self_attn.k_proj.weight"].T, KV_HEADS)
        v = split_heads(normed @ w["self_attn.v_proj.weight"].T, KV_HEADS)
        mixed = attention(rotate_halves(q, *tables), rotate_halves(k, *tables), v, causal_mask(x.shape[1]))
        x = x + join_heads(mixed) @ w["self_attn.o_proj.weight"].T
        normed = norm(x, "post_attention_layernorm.weight")
        gated = F.silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
        return x + gated @ w["mlp.down_proj.weight"].T


class ScannedLlama(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embed, self.unembed = embedding_of(w, "model.embed_tokens"), linear_of(w, "lm_head")
        self.norm, self.block = RootMeanSquare(w["model.norm.weight"], 1e-5), ScannedBlock()
        start = "model.layers.0."
        self.names = [name.removeprefix(start) for name in w if name.startswith(start)]
        for name in self.names:
            stacked = torch.stack([w[f"model.layers.{i}.{name}"] for i in range(LAYERS)])
            self.register_parameter(name.replace(".", "_"), nn.Parameter(stacked))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in range(LAYERS):
            x = self.block(x, {name: getattr(self, name.replace(".", "_"))[i] for name in self.names})
        logits: Tensor = self.unembed(self.norm(x))
        return logits


@FAMILY.correct("layers stacked in one tensor a weight, one block that is called for each")
def scanned_layers() -> Run:
    return Run(ScannedLlama(model().state_dict()).eval(), (IDS,))


@FAMILY.correct("prefill and one token more, attention eager", reference=reference_decoding)
def decoding_in_eager() -> Run:
    return Run(model("eager"), (IDS,), prefill_and_decode)


@FAMILY.correct("prefill and one token more in bfloat16", reference=reference_decoding, tolerance=BFLOAT16)
def decoding_in_bfloat16() -> Run:
    return Run(model().bfloat16(), (IDS,), prefill_and_decode)


# --- Containers and adapters around the same modules


@FAMILY.correct("a prefix before every name, as of data parallelism, two deep")
def prefixed() -> Run:
    class Parallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs: Any, **named: Any) -> Any:
            return self.module(*inputs, **named)

    return run_of(Parallel(Parallel(model())).eval())


@FAMILY.correct("adapters of rank four around the projections that add nothing yet")
def adapters() -> Run:
    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = layer
            self.lora_A = nn.Linear(layer.in_features, 4, bias=False)
            self.lora_B = nn.Linear(4, layer.out_features, bias=False)
            nn.init.zeros_(self.lora_B.weight)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))
            return out

    port = model()
    for layer in port.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            Adapted(layer.self_attn.q_proj),
            Adapted(layer.self_attn.v_proj),
        )
    return run_of(port.eval())


class CachedAttention(AuthorsAttention):
    """Keys and values kept in buffers of a fixed length, as its authors had it."""

    cache_k: Tensor
    cache_v: Tensor

    def __init__(self, w: Weights, at: str, *, permuted: bool = True) -> None:
        super().__init__(w, at, permuted=permuted)
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(len(IDS), 16, KV_HEADS, HEAD), persistent=False)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.wq, self.wk, self.wv))
        end = mask.shape[1]
        start = end - x.shape[1]
        self.cache_k[:, start:end], self.cache_v[:, start:end] = turn(k, freqs_cis), v
        keys, values = self.cache_k[:, :end], self.cache_v[:, :end]
        mixed = attention(
            turn(q, freqs_cis).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask[start:]
        )
        out: Tensor = self.wo(join_heads(mixed))
        return out


@FAMILY.correct("prefill and one token more with a cache of its own", reference=reference_decoding)
def decoding_with_own_cache() -> Run:
    weights = model().state_dict()
    port: Any = authors()
    for i, block in enumerate(port.layers):
        block.attention = CachedAttention(weights, f"model.layers.{i}.self_attn")

    class Engine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = port

        def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
            end = start_pos + tokens.shape[1]
            h = self.net.tok_embeddings(tokens)
            for layer in self.net.layers:
                h = layer(h, self.net.freqs_cis[start_pos:end], causal_mask(end))
            logits: Tensor = self.net.output(self.net.norm(h))
            return logits

    def call(engine: nn.Module, ids: Tensor) -> Any:
        engine(ids[:, :8], 0)
        return engine(ids[:, 8:9], 8)

    return Run(Engine().eval(), (IDS,), call)


# --- Mistakes


@FAMILY.mistake("the rotary base of another model", guilty="model.rotary_emb", beside=original_code)
def rotary_base() -> Run:
    return Run(authors(base=500000.0), (IDS,))


@FAMILY.mistake(
    "interleaved rotation of weights that are in halves",
    guilty="model.layers.0.self_attn",
    beside=original_code,
)
def unpermuted_rotation() -> Run:
    return Run(authors(permuted=False), (IDS,))


@FAMILY.mistake("no residual around one MLP", guilty="model.layers.1", beside=original_code)
def missing_residual() -> Run:
    port: Any = authors()
    port.layers[1].has_residual = False
    return Run(port, (IDS,))


@FAMILY.mistake(
    "scores that are not scaled in one layer", guilty="model.layers.1.self_attn", beside=serving_engine
)
def missing_scale() -> Run:
    port: Any = served()
    port.layers[1].self_attn.scale = 1.0
    return served_run(port)


@FAMILY.mistake(
    "gate and up swapped in the fused projection", guilty="model.layers.2.mlp", beside=serving_engine
)
def gate_and_up_swapped() -> Run:
    port: Any = served()
    weight = port.layers[2].mlp.gate_up_proj.weight
    with torch.no_grad():
        weight.copy_(weight.roll(WIDE, 0))
    return served_run(port)


@FAMILY.mistake(
    "the key projection of the layer before", guilty="model.layers.2.self_attn.k_proj", beside=bfloat16
)
def keys_of_another_layer() -> Run:
    port = model()
    port.model.layers[2].self_attn.k_proj.load_state_dict(port.model.layers[1].self_attn.k_proj.state_dict())
    return run_of(port.bfloat16())


@FAMILY.mistake(
    "keys repeated head by head, not group by group",
    guilty="model.layers.0.self_attn.k_proj",
    beside=multi_head_weights,
)
def keys_repeated_in_the_wrong_order() -> Run:
    port = multi_head_weights().model
    for layer in port.model.layers:
        weight = layer.self_attn.k_proj.weight
        with torch.no_grad():
            weight.copy_(weight.unflatten(0, (HEADS, HEAD))[[0, 2, 1, 3]].flatten(0, 1))
    return run_of(port)


@FAMILY.mistake(
    "one scale of int8 weights for the whole matrix",
    guilty="model.layers.1.mlp.down_proj",
    beside=int8_weights,
)
def int8_scale_of_first_row() -> Run:
    port = int8_weights().model
    scale = port.model.layers[1].mlp.down_proj.scale
    scale.copy_(scale[:1].expand_as(scale) * 2)
    return run_of(port)


@FAMILY.mistake(
    "a decoded token at the position before its own", guilty="model.rotary_emb", beside=decoding_in_eager
)
def decoding_one_position_early() -> Run:
    def call(port: Any, ids: Tensor) -> Any:
        first = port(input_ids=ids[:, :8], use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"
        return port(
            input_ids=ids[:, 8:9], position_ids=torch.tensor([[7]]), use_cache=True, **{name: first[name]}
        )

    return Run(model("eager"), (IDS,), call)


@FAMILY.mistake(
    "gains folded into queries and keys, not into values",
    guilty="model.layers.1.self_attn.v_proj",
    beside=folded_norms,
)
def gain_not_folded_into_values() -> Run:
    port = folded_norms().model
    port.model.layers[1].self_attn.v_proj.load_state_dict(
        model().model.layers[1].self_attn.v_proj.state_dict()
    )
    return run_of(port)


@FAMILY.mistake("an adapter that adds something", guilty="model.layers.1.self_attn.q_proj", beside=adapters)
def adapter_left_on() -> Run:
    port = adapters().model
    adapter = port.model.layers[1].self_attn.q_proj
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        adapter.lora_B.weight.copy_(0.05 * torch.randn(adapter.lora_B.weight.shape, generator=generator))
    return run_of(port)


@FAMILY.mistake(
    "an epsilon that the new norms have of another model",
    guilty="model.layers.0.input_layernorm",
    beside=norms_of_another_library,
)
def epsilon_of_the_new_norms() -> Run:
    port = norms_of_another_library().model
    for module in port.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-3
    return run_of(port)


@FAMILY.mistake("layers stacked in another order", guilty="model.layers.1", beside=scanned_layers)
def layers_stacked_in_another_order() -> Run:
    port = ScannedLlama(model().state_dict()).eval()
    with torch.no_grad():
        for name in port.names:
            stacked: Any = getattr(port, name.replace(".", "_"))
            stacked.copy_(stacked[[0, 2, 1]])
    return Run(port, (IDS,))


@FAMILY.mistake(
    "sdpa told that one layer is not causal", guilty="model.layers.1.self_attn", beside=sdpa_attention
)
def not_causal_in_sdpa() -> Run:
    port = model("sdpa")
    port.model.layers[1].self_attn.is_causal = False
    return run_of(port)


@FAMILY.mistake(
    "a decoded token that does not see its own key",
    guilty="model.layers.1.self_attn",
    beside=decoding_with_own_cache,
)
def own_key_not_seen() -> Run:
    run = decoding_with_own_cache()

    def hide_last(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, freqs_cis, mask = inputs
        return (
            x,
            freqs_cis,
            mask if x.shape[1] > 1 else mask.index_fill(1, torch.tensor([mask.shape[1] - 1]), False),
        )

    run.model.net.layers[1].attention.register_forward_pre_hook(hide_last)
    return run
