"""A tiny Llama, and the same in eight bits with two layers that rounding hits hard."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tensorcap.workload import Workload
from tests.rerun.quantised_layers import Bytes

OUTLIERS: Final = ("model.layers.1.mlp.down_proj", "model.layers.4.self_attn.o_proj")
IDS: Final = torch.randint(0, 99, (2, 24), generator=torch.Generator().manual_seed(1))


class Linear8(Bytes):
    """Without a bias too."""

    def __init__(self, layer: nn.Linear) -> None:
        whole = nn.Linear(layer.in_features, layer.out_features)
        with torch.no_grad():
            whole.weight.copy_(layer.weight)
            whole.bias.zero_()
        super().__init__(whole)


def llama(outliers: tuple[str, ...] = OUTLIERS) -> Any:
    """A model in which some weights have one value in each row that is far larger than the others."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=99, num_hidden_layers=6, num_key_value_heads=2, **sizes)
        model: Any = LlamaForCausalLM(config)
        model.train(False)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0, 0.06)
            model.model.embed_tokens.weight.normal_(0, 1)  # to which blocks add a part
            for name in outliers:
                weight = model.get_submodule(name).weight
                weight[torch.arange(len(weight)), torch.randint(0, weight.shape[1], (len(weight),))] *= 40
    return model


def quantised(outliers: tuple[str, ...] = OUTLIERS) -> Any:
    model = copy.deepcopy(llama(outliers))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], Linear8(module))
    return model


def reference() -> Workload:
    return Workload(llama(), {"input_ids": IDS})


def target() -> Workload:
    return Workload(quantised(), {"input_ids": IDS})


def uniform_reference() -> Workload:
    return Workload(llama(()), {"input_ids": IDS})


def uniform_target() -> Workload:
    return Workload(quantised(()), {"input_ids": IDS})
