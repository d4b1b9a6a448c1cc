"""Real architectures from transformers, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

import tensorcap
from tests.support.transformers_models import random_model

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])


class Case(NamedTuple):
    model: Any
    config: dict[str, Any]
    inputs: dict[str, Any]


TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CASES = {
    "llama": Case("Llama", {**TEXT, **HEADS}, {"input_ids": IDS}),
    "gpt2": Case("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}, {"input_ids": IDS}),
    "bert": Case("Bert", {**TEXT, "num_attention_heads": 4}, {"input_ids": IDS}),
    "t5": Case(
        "T5",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        {"input_ids": IDS, "decoder_input_ids": IDS[:, :2]},
    ),
    "vit": Case(
        "ViT",
        {**{k: v for k, v in TEXT.items() if k != "vocab_size"}, "num_attention_heads": 4, "image_size": 32},
        {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)},
    ),
    "qwen3-moe": Case(
        "Qwen3Moe",
        {
            **TEXT,
            **HEADS,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"input_ids": IDS},
    ),
    "mamba": Case(
        "Mamba",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        {"input_ids": IDS},
    ),
    "whisper": Case(
        "Whisper",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        {
            "input_features": torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32),
            "decoder_input_ids": IDS[:, :2],
        },
    ),
}


# Modules of which the forward passes use the weights alone, or nothing.
NEVER_CALLED = {
    "GPT2Model": ["h.0.attn.attn_dropout", "h.1.attn.attn_dropout"],
    "BertModel": ["encoder.layer.0.attention.self.dropout", "encoder.layer.1.attention.self.dropout"],
    "T5Model": ["shared"],
    "MambaModel": [
        f"layers.{layer}.mixer.{name}" for layer in (0, 1) for name in ("conv1d", "act", "dt_proj")
    ],
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    name, config, inputs = CASES[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, f"{name}Model")(made).eval(), inputs


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def test_outputs_are_bit_equal_and_every_module_is_accounted_for(
    case: tuple[Any, dict[str, Any]], path: Path, hooks: Callable[[nn.Module], int]
) -> None:
    model, inputs = case
    before = hooks(model)
    with torch.no_grad():
        expected = tensors(model(**inputs))
        with tensorcap.capture(model, path):
            found = tensors(model(**inputs))
        again = tensors(model(**inputs))
    assert hooks(model) == before
    assert expected
    for one, two, three in zip(expected, found, again, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    with tensorcap.open_archive(path) as archive:
        points = archive.run["points"]
        sites = [p["site"] for p in points]
        assert sites == ["@root", *(name for name, _ in model.named_modules() if name)]
        assert {p["status"] for p in points} <= {"captured", "never-called"}
        never = [p["site"] for p in points if p["status"] == "never-called" and "reason" not in p]
        assert never == NEVER_CALLED.get(type(model).__name__, [])
        last = archive.load(archive.get("0/@root/output.last_hidden_state"))
        assert (last == expected[0].numpy()).all()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["exception", "interrupt"])
def test_hooks_are_gone_after_an_error_in_the_last_module(
    case: tuple[Any, dict[str, Any]],
    path: Path,
    hooks: Callable[[nn.Module], int],
    error: type[BaseException],
) -> None:
    model, inputs = case
    before = hooks(model)
    calls: list[nn.Module] = []
    with torch.no_grad(), nn.modules.module.register_module_forward_pre_hook(lambda m, _: calls.append(m)):
        model(**inputs)

    def fail(module: nn.Module, args: Any) -> None:
        raise error

    with (
        calls[-1].register_forward_pre_hook(fail),
        pytest.raises(error),
        torch.no_grad(),
        tensorcap.capture(model, path),
    ):
        model(**inputs)
    assert hooks(model) == before
    with tensorcap.open_archive(path) as archive:
        assert not archive.is_complete
        assert len(archive) > 3


def test_each_distinct_tensor_is_stored_once(path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    model = random_model("LlamaModel", **sizes, **HEADS)
    with torch.no_grad(), tensorcap.capture(model, path):
        model(torch.arange(2 * 64).reshape(2, 64) % 64, use_cache=False)
    with tensorcap.open_archive(path) as archive:
        contents = {archive.read(r).tobytes() for r in archive.records}
        total = sum(r.nbytes for r in archive.records)
    distinct = sum(map(len, contents))
    assert total > 1.7 * distinct
    assert path.stat().st_size <= 1.1 * distinct
