"""all-MiniLM-L6-v2, a trained BERT of six layers: its ports, right ones and with one mistake each.

The functions are workloads, so that each run is repeated as `tcap localize` does it: the folder of the
checkpoint is the environment variable MINILM.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BertModel

from tensorcap import Workload

SENTENCES: Final = (
    "The harbour was closed at noon, since a storm with waves of nine metres was expected.",
    "Fishermen stayed at home.",
    "Is a photograph of 1851 older than the telephone?",
    "She paid 12.50 for two tickets and a cup of coffee; the change came in small coins, mostly coppers.",
)
LAYER: Final = 2  # of the mistakes that one layer has


def folder() -> str:
    return os.environ["MINILM"]


def batch(count: int = len(SENTENCES)) -> dict[str, Tensor]:
    """Token ids, token types and mask `(count, tokens)` of the first sentences, padded to the longest."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder())
    return dict(tokenizer(list(SENTENCES[:count]), padding=True, return_tensors="pt"))


def model(precision: str = "float32", implementation: str = "sdpa") -> Any:
    dtype = getattr(torch, precision)
    return BertModel.from_pretrained(folder(), dtype=dtype, attn_implementation=implementation).eval()


@dataclass(frozen=True)
class Mistake:
    """A change of the model or its inputs.

    Attributes:
        plant: Changes the model, and may change the inputs.
        guilty: Where a first divergence may be: the module that is changed, one in it or one that holds it.
        named: What a report has to name if the error is smaller than a rounding of the precision, so that
            two archives alone cannot show it; "" if they can.
    """

    plant: Callable[[Any, dict[str, Tensor]], None]
    guilty: tuple[str, ...]
    named: str = ""


def approximate_gelu(port: Any, inputs: dict[str, Tensor]) -> None:
    for layer in port.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU(approximate="tanh")


def coarse_epsilon(port: Any, inputs: dict[str, Tensor]) -> None:
    for module in port.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5


def shifted_positions(port: Any, inputs: dict[str, Tensor]) -> None:
    port.embeddings.position_ids = port.embeddings.position_ids.roll(-1, 1)


def unmasked_padding(port: Any, inputs: dict[str, Tensor]) -> None:
    attention = port.encoder.layer[LAYER].attention.self
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args[:1], {**kwargs, "attention_mask": None}), with_kwargs=True
    )


def no_token_types(port: Any, inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        port.embeddings.token_type_embeddings.weight.zero_()


def wrong_scale(port: Any, inputs: dict[str, Tensor]) -> None:
    port.encoder.layer[LAYER].attention.self.scaling = port.config.hidden_size**-0.5


def swapped_queries_and_keys(port: Any, inputs: dict[str, Tensor]) -> None:
    attention = port.encoder.layer[LAYER].attention.self
    attention.query, attention.key = attention.key, attention.query


def residual_left_out(port: Any, inputs: dict[str, Tensor]) -> None:
    class Output(type(port.encoder.layer[LAYER].output)):  # type: ignore[misc] # the class of the model
        def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
            mixed: Tensor = self.LayerNorm(self.dense(hidden_states))
            return mixed

    port.encoder.layer[LAYER].output.__class__ = Output


def norms_exchanged(port: Any, inputs: dict[str, Tensor]) -> None:
    layer = port.encoder.layer[LAYER]
    one, other = layer.attention.output, layer.output
    one.LayerNorm, other.LayerNorm = other.LayerNorm, one.LayerNorm


def untransposed_heads(port: Any, inputs: dict[str, Tensor]) -> None:
    """Columns of the output projection by place in the head before the head, as some exporters order them."""
    dense = port.encoder.layer[LAYER].attention.output.dense
    heads, size = port.config.num_attention_heads, port.config.hidden_size
    with torch.no_grad():
        mixed = dense.weight.view(size, heads, size // heads).transpose(1, 2).reshape(size, size)
        dense.weight.copy_(mixed)


_ATTENTION: Final = f"encoder.layer.{LAYER}.attention"
MISTAKES: Final[Mapping[str, Mistake]] = {
    "approximate gelu": Mistake(approximate_gelu, ("encoder.layer.0.intermediate",), "GELU by tanh"),
    "epsilon 1e-5": Mistake(coarse_epsilon, ("embeddings.LayerNorm",), "eps"),
    "positions off by one": Mistake(shifted_positions, ("embeddings",)),
    "padding attended to": Mistake(unmasked_padding, (f"{_ATTENTION}.self",)),
    "no token types": Mistake(no_token_types, ("embeddings.token_type_embeddings",)),
    "wrong scale": Mistake(wrong_scale, (f"{_ATTENTION}.self",)),
    "queries and keys swapped": Mistake(swapped_queries_and_keys, (f"{_ATTENTION}.self",)),
    "residual left out": Mistake(residual_left_out, (f"encoder.layer.{LAYER}.output",)),
    "norms exchanged": Mistake(norms_exchanged, (f"{_ATTENTION}.output.LayerNorm",)),
    "heads and places exchanged": Mistake(untransposed_heads, (f"{_ATTENTION}.output.dense",)),
}


def workload(
    mistake: str = "", precision: str = "float32", implementation: str = "sdpa", count: int = len(SENTENCES)
) -> Workload:
    """A run of the model, right if no mistake is named."""
    port, inputs = model(precision, implementation), batch(count)
    if mistake:
        MISTAKES[mistake].plant(port, inputs)
    return Workload(port, inputs)


def trusted() -> Workload:
    return workload()


def trusted_eager() -> Workload:
    return workload(implementation="eager")


def trusted_sentence() -> Workload:
    return workload(count=1)
