"""What a tiny model of the zoo is made of: a class, a configuration, weights that show mistakes, and inputs.

Weights are drawn so that mistakes show: attention is neither uniform nor one-hot, norms scale each channel
by something else, biases are not zero, and windows, softcaps and the scaling of rotary tables are reached by
the inputs. All weights are rounded to bfloat16, as most checkpoints are, so that the float32 reference and
its low-precision twin have the same ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers
from torch import nn

from tensorcap.workload import Workload

VOCABULARY: Final = 256
MATRIX_STD: Final = 0.06
_QUERY_STD: Final = 0.15  # of the weights that make queries and keys
_EMBEDDING_STD: Final = 0.02
_NORM_SPREAD: Final = 0.2
_BIAS_STD: Final = 0.1
_QUERIES: Final = ("q_proj.weight", "k_proj.weight", ".query.weight", ".key.weight")
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "wpe.weight", "embeddings.weight")
_OWN_SCHEME: Final = ("A_log", "mixer.D", "dt_proj", "conv1d.weight", "cls_token", "relative_attention_bias")

TEXT: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": MATRIX_STD,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokens(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, count), generator=generator)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.bfloat16().float()


def text_inputs(count: int = 96) -> dict[str, Any]:
    return {"input_ids": tokens(count), "use_cache": False}


def padded(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of two rows, the second shorter."""
    ids, mask = tokens(count, rows=2), torch.ones(2, count, dtype=torch.long)
    ids[1, -7:] = 0
    mask[1, -7:] = 0
    return ids, mask


def decode(model: Any, input_ids: torch.Tensor) -> None:
    """Feed all but three tokens at once, and those one by one, with a cache."""
    start = input_ids.shape[1] - 3
    out = model(input_ids=input_ids[:, :start], use_cache=True)
    name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
    for at in range(start, input_ids.shape[1]):
        given = {name: getattr(out, name), "use_cache": True}
        out = model(input_ids=input_ids[:, at : at + 1], **given)


def redraw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    def drawn(std: float) -> torch.Tensor:
        return std * torch.randn(parameter.shape, generator=generator)

    if any(own in name for own in _OWN_SCHEME):
        return
    if parameter.ndim == 1 and name.endswith("weight"):  # of a norm
        parameter += drawn(_NORM_SPREAD)
    elif name.endswith(("bias", "sinks")):
        parameter += drawn(_BIAS_STD)
    elif name.endswith(_QUERIES):
        parameter.copy_(drawn(_QUERY_STD))
    elif name.endswith(_EMBEDDINGS):
        parameter.copy_(drawn(_EMBEDDING_STD))
    elif name.endswith("c_attn.weight"):  # queries, keys, values
        parameter[:, : 2 * parameter.shape[0]] *= _QUERY_STD / MATRIX_STD


@dataclass(frozen=True)
class Architecture:
    """A tiny model and what it is run on.

    Attributes:
        model: Name of the model's class in transformers, or a class of modules that needs no arguments.
        config: Name of the configuration's class; None for a class of modules.
        options: What the configuration is given.
        inputs: Makes the arguments, anew each time.
        attention: The implementation of attention, the library's choice if None.
        run: As in `Workload`.
        redraw: Draws a parameter, or a buffer that is saved, of a name.
    """

    model: str | type[nn.Module]
    config: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[], dict[str, Any]] = text_inputs
    attention: str | None = None
    run: Callable[..., Any] | None = None
    redraw: Callable[[str, torch.Tensor, torch.Generator], None] = redraw

    def workload(self, model: Any) -> Workload:
        """The model on the inputs, floating ones in the model's dtype."""
        dtype = next(model.parameters()).dtype
        inputs = {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in self.inputs().items()
        }
        return Workload(model, inputs, self.run)

    def create(self) -> Any:
        """A model in float32 with the weights that every model of this architecture has."""
        torch.manual_seed(0)
        model = self._untouched().eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in (*model.named_parameters(), *_saved_buffers(model)):
                self.redraw(name, parameter, generator)
                parameter.copy_(parameter.bfloat16())
        return model

    def cast(self, model: Any, dtype: torch.dtype) -> Any:
        """The model in low precision as `from_pretrained(dtype=…)` makes it.

        What is not saved, such as rotary tables, and what the class keeps in float32 stays so.
        """
        if not isinstance(self.model, str):
            return copy.deepcopy(model).to(dtype)
        config, weights = copy.deepcopy(model.config), dict(model.state_dict())
        return type(model).from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()

    def _untouched(self) -> Any:
        if not isinstance(self.model, str):
            return self.model()
        log: Any = transformers.logging  # its functions are not annotated
        log.set_verbosity_error()
        log.disable_progress_bar()
        options = dict(copy.deepcopy(self.options))
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        config = getattr(transformers, str(self.config))(**options)
        return getattr(transformers, self.model)(config)


def _saved_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    saved = model.state_dict().keys()
    return [(n, b) for n, b in model.named_buffers() if n in saved and b.is_floating_point()]
