"""A small BERT of transformers, and the same written for JAX in three ways, with its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from jax import numpy as jnp
from transformers import BertConfig, BertModel

import tensorcap
from tensorcap_formats.dtypes import Array

HEADS = 4
EPSILON = 1e-12


def reference() -> tensorcap.Workload:
    """Two layers of 32, weights of seed 0; the second row has padding."""
    import torch

    torch.manual_seed(0)
    config: Any = BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=48,
        max_position_embeddings=16,
    )
    config._attn_implementation = "eager"
    model: Any = BertModel(config, add_pooling_layer=False)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # which transformers makes 0, 1 or small
            if "LayerNorm.weight" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3)
    return tensorcap.Workload(model, {name: torch.from_numpy(array) for name, array in inputs().items()})


def inputs() -> dict[str, Array]:
    ids = np.random.default_rng(0).integers(1, 97, (2, 10))
    mask = np.ones((2, 10), np.int64)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def weights() -> dict[str, Array]:
    return {name: value.numpy() for name, value in reference().model.state_dict().items()}


class Mistakes:
    """What a port has wrong: nothing by default."""

    def __init__(self, **changed: Any) -> None:
        self.approximate: set[int] = set(changed.get("approximate", ()))  # layers with the tanh form of gelu
        self.epsilon: Mapping[int, float] = changed.get("epsilon", {})
        self.unmasked: set[int] = set(changed.get("unmasked", ()))
        self.transposed: set[int] = set(changed.get("transposed", ()))  # layers whose output weight is


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    batch, length, width = q.shape

    def heads(x: Any) -> Any:
        return x.reshape(batch, length, HEADS, width // HEADS).transpose(0, 2, 1, 3)

    scores = heads(q) @ heads(k).swapaxes(-1, -2) / math.sqrt(width // HEADS)
    if mask is not None:
        scores = jnp.where(mask[:, None, None, :] == 0, jnp.finfo(scores.dtype).min, scores)
    return (jax.nn.softmax(scores) @ heads(v)).transpose(0, 2, 1, 3).reshape(batch, length, width)


class Attention(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs, *, is_masked: bool) -> None:
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key = nnx.Linear(width, width, rngs=rngs)
        self.value = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.is_masked = is_masked

    def __call__(self, x: Any, mask: Any) -> Any:
        mask = mask if self.is_masked else None
        return self.out(attend(self.query(x), self.key(x), self.value(x), mask))


class Block(nnx.Module):
    def __init__(self, number: int, wrong: Mistakes, rngs: nnx.Rngs) -> None:
        epsilon = wrong.epsilon.get(number, EPSILON)
        self.mixer = Attention(32, rngs, is_masked=number not in wrong.unmasked)
        self.attention_norm = nnx.LayerNorm(32, epsilon=epsilon, rngs=rngs)
        self.up = nnx.Linear(32, 48, rngs=rngs)
        self.down = nnx.Linear(48, 32, rngs=rngs)
        self.output_norm = nnx.LayerNorm(32, epsilon=epsilon, rngs=rngs)
        self.approximate = number in wrong.approximate

    def __call__(self, x: Any, mask: Any) -> Any:
        x = self.attention_norm(x + self.mixer(x, mask))
        hidden = nnx.gelu(self.up(x), approximate=self.approximate)
        return self.output_norm(x + self.down(hidden))


class Bert(nnx.Module):
    def __init__(self, wrong: Mistakes) -> None:
        rngs = nnx.Rngs(0)
        self.words = nnx.Embed(97, 32, rngs=rngs)
        self.positions = nnx.Embed(16, 32, rngs=rngs)
        self.kinds = nnx.Embed(2, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, epsilon=EPSILON, rngs=rngs)
        self.layers = nnx.List([Block(i, wrong, rngs) for i in range(2)])

    def __call__(self, input_ids: Any, attention_mask: Any) -> Any:
        positions = jnp.arange(input_ids.shape[1])[None]
        x = self.words(input_ids) + self.positions(positions) + self.kinds(jnp.zeros_like(input_ids))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


_ATTENTION = {"query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value"}
_BLOCK = {
    **{f"mixer.{name}": path for name, path in _ATTENTION.items()},
    "mixer.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "output_norm": "output.LayerNorm",
}
PARTNERS = {  # the modules of the port, and those of the reference that they stand for
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "kinds": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    **{f"layers.{i}.{own}": f"encoder.layer.{i}.{path}" for i in range(2) for own, path in _BLOCK.items()},
}


def flax_parameters(wrong: Mistakes) -> dict[str, dict[str, Any]]:
    """The weights as Flax has them, by module: kernels are [in, out]."""
    own = weights()
    found: dict[str, dict[str, Any]] = {}
    for path, partner in PARTNERS.items():
        weight, bias = own[f"{partner}.weight"], own.get(f"{partner}.bias")
        if "embeddings" in partner and bias is None:
            found[path] = {"embedding": weight}
        elif partner.endswith("LayerNorm"):
            found[path] = {"scale": weight, "bias": bias}
        else:
            is_transposed = path in {f"layers.{i}.mixer.out" for i in wrong.transposed}
            found[path] = {"kernel": weight if is_transposed else weight.T, "bias": bias}
    return found


def nnx_port(**mistakes: Any) -> tensorcap.Workload:
    wrong = Mistakes(**mistakes)
    model = Bert(wrong)
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for path, parameters in flax_parameters(wrong).items():
        for name, value in parameters.items():
            getattr(modules[path], name)[...] = jnp.asarray(value)
    return tensorcap.Workload(model, inputs())


class LinenBlock(linen.Module):
    approximate: bool = False

    @linen.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        q, k, v = (linen.Dense(32, name=name)(x) for name in ("query", "key", "value"))
        attended = linen.Dense(32, name="out")(attend(q, k, v, mask))
        x = linen.LayerNorm(epsilon=EPSILON, name="attention_norm")(x + attended)
        hidden = linen.gelu(linen.Dense(48, name="up")(x), approximate=self.approximate)
        return linen.LayerNorm(epsilon=EPSILON, name="output_norm")(x + linen.Dense(32, name="down")(hidden))


class LinenBert(linen.Module):
    approximate: tuple[int, ...] = ()

    @linen.compact
    def __call__(self, input_ids: Any, attention_mask: Any) -> Any:
        positions = jnp.arange(input_ids.shape[1])[None]
        x = linen.Embed(97, 32, name="words")(input_ids)
        x = x + linen.Embed(16, 32, name="positions")(positions)
        x = x + linen.Embed(2, 32, name="kinds")(jnp.zeros_like(input_ids))
        x = linen.LayerNorm(epsilon=EPSILON, name="norm")(x)
        for i in range(2):
            x = LinenBlock(i in self.approximate, name=f"layers_{i}")(x, attention_mask)
        return x


def linen_port(approximate: tuple[int, ...] = ()) -> tensorcap.Workload:
    parameters: dict[str, Any] = {}
    for path, own in flax_parameters(Mistakes()).items():
        names = path.replace("layers.", "layers_").replace("mixer.", "").split(".")
        inner = parameters
        for name in names:
            inner = inner.setdefault(name, {})
        inner.update(own)
    return tensorcap.Workload(tensorcap.JaxModel(LinenBert(approximate), {"params": parameters}), inputs())


def function_port(norm: Callable[..., Any] | None = None) -> tensorcap.Workload:
    """A function of which some values have names of modules."""
    parameters = flax_parameters(Mistakes())
    tap = tensorcap.JaxModel.tap

    def layer_norm(own: Mapping[str, Any], x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * own["scale"] + own["bias"]

    def linear(own: Mapping[str, Any], x: Any) -> Any:
        return x @ own["kernel"] + own["bias"]

    norm = norm or layer_norm

    def bert(parameters: Any, input_ids: Any, attention_mask: Any) -> Any:
        length = input_ids.shape[1]
        x = parameters["words"]["embedding"][input_ids] + parameters["positions"]["embedding"][:length]
        x = layer_norm(parameters["norm"], x + parameters["kinds"]["embedding"][0])
        x = tap("embeddings", x)
        for i in range(2):
            own = {name: parameters[f"layers.{i}.{name}"] for name in _BLOCK}
            q, k, v = (linear(own[f"mixer.{name}"], x) for name in _ATTENTION)
            attended = linear(own["mixer.out"], attend(q, k, v, attention_mask))
            x = tap(f"layers.{i}.attention", norm(own["attention_norm"], x + attended))
            hidden = jax.nn.gelu(tap(f"layers.{i}.up", linear(own["up"], x)), approximate=False)
            x = tap(f"layers.{i}", layer_norm(own["output_norm"], x + linear(own["down"], hidden)))
        return x

    return tensorcap.Workload(tensorcap.JaxModel(bert, parameters), inputs())
