"""Folders of tiny Hugging Face models with random weights, as `save_pretrained` writes them; needs no MAX."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", "the", "sky", "is", "blue")
VOCABULARY = 64
PROMPT = "the sky is blue"
IDS = (6, 7, 8, 9)  # of its words


def bert(folder: Path) -> Path:
    """An encoder without a head."""
    config = transformers.BertConfig(**_sizes(), hidden_size=32)
    return _save(folder, transformers.BertModel(config), _tokenizer("[CLS] $A [SEP]"))


def llama(folder: Path) -> Path:
    """A decoder with grouped heads."""
    config = transformers.LlamaConfig(**_decoder_sizes())
    return _save(folder, transformers.LlamaForCausalLM(config), _tokenizer("<s> $A"))


def gemma(folder: Path) -> Path:
    """A decoder for which MAX has one precision."""
    config = transformers.Gemma3TextConfig(**_decoder_sizes(), head_dim=16)
    return _save(folder, transformers.Gemma3ForCausalLM(config), _tokenizer("<s> $A"))


def mixtral(folder: Path) -> Path:
    """A decoder that MAX has no architecture for."""
    config = transformers.MixtralConfig(**_decoder_sizes(), num_local_experts=2)
    return _save(folder, transformers.MixtralForCausalLM(config), _tokenizer("<s> $A"))


def qwen3(folder: Path) -> Path:
    """A decoder that MAX makes on accelerators alone."""
    config = transformers.Qwen3Config(**_decoder_sizes(), head_dim=16)
    return _save(folder, transformers.Qwen3ForCausalLM(config), _tokenizer("<s> $A"))


def with_changed(folder: Path, copy: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a folder in which one weight is another."""
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    weights[name] = change(weights[name]).contiguous()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }


def _decoder_sizes() -> dict[str, Any]:
    own = {"hidden_size": 64, "num_key_value_heads": 2, "bos_token_id": 4, "eos_token_id": 5}
    return {**_sizes(), **own, "intermediate_size": 96}


def _tokenizer(template: str) -> transformers.PreTrainedTokenizerFast:
    numbers = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(word, numbers[word]) for word in template.split() if word in numbers]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        eos_token="</s>",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def _save(folder: Path, model: Any, tokenizer: Any) -> Path:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which begin as ones and zeros
            parameter.normal_(0.0, 0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
