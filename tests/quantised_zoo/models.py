"""Three references whose weights look trained: a decoder, an encoder and a convolutional network."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from tensorcap.workload import Workload
from tests.rewrites.catalogue import randomise
from tests.support.transformers_models import random_model

DECODER: Final = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
ENCODER: Final = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}


def _as_trained(model: Any, seed: int, outlier: float = 6) -> Any:
    """Rows of unlike size, and one channel of each norm that is larger than the others."""
    randomise(model, seed)
    draws = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                rows = torch.exp(0.4 * torch.randn(len(module.weight), generator=draws))
                module.weight.mul_(rows.view(-1, *[1] * (module.weight.ndim - 1)))
                if name.endswith(("q_proj", "k_proj", "query", "key")):
                    module.weight.mul_(0.3)  # attention that looks at several tokens
            elif type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
                module.weight[5] *= outlier
    return model.eval()


def decoder() -> Workload:
    """A Llama of three layers; logits `[2, 24, 200]`."""
    model = _as_trained(random_model("LlamaForCausalLM", **DECODER), 1)
    return Workload(model, {"input_ids": torch.arange(48).reshape(2, 24) * 7 % 200})


def encoder() -> Workload:
    """A BERT of three layers without a pooler, the second row padded; last hidden states `[2, 24, 64]`."""
    model = _as_trained(random_model("BertModel", **ENCODER), 2, 3)
    model.pooler = None
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, 17:] = 0
    return Workload(model, {"input_ids": torch.arange(48).reshape(2, 24) * 11 % 200, "attention_mask": mask})


class Block(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(size, size, 3, padding=1) for _ in range(2))
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.relu2(x + self.conv2(self.relu1(self.conv1(x))))


class Network(nn.Module):
    """Convolutions without norms (they are folded already), and a head."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size, 3, padding=1)
        self.relu = nn.ReLU()
        self.block1, self.block2 = Block(size), Block(size)
        self.head = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.block2(self.block1(self.relu(self.stem(x)))).mean((2, 3)))


def images(seed: int) -> Tensor:
    """Four images, `[4, 3, 12, 12]`."""
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def network() -> Workload:
    """A convolutional network; logits `[4, 10]`."""
    return Workload(_as_trained(Network(), 3), (images(0),))
