"""Who wrote a wrong value into a cache or a state in place is accused, not who hands it on or reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

Run = Callable[[Any, Any], None]
WAYS = ("archives", "replay", "injection")
PROMPT = (torch.arange(20).reshape(2, 10) * 11 + 4) % 64


class Cell(nn.Module):
    def __init__(self, *, is_wrong: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.factor = 0.4 if is_wrong else 0.5

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x) + self.b(state))
        state.copy_((h + state) * self.factor)
        return h


class Recurrent(nn.Module):
    def __init__(self, wrong: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cell(is_wrong=layer == wrong) for layer in range(3))
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, states: list[torch.Tensor]) -> Any:
        for layer, state in zip(self.layers, states, strict=True):
            x = x + layer(x, state)
        return self.out(x)


def recurrent(wrong: int | None) -> Workload:
    torch.manual_seed(1)
    model = Recurrent(wrong).eval()

    def run(model: Any, x: Any) -> None:
        states = [torch.zeros(4, 32) for _ in range(3)]
        with torch.no_grad():
            for token in x:
                model(token, states)

    return Workload(model, {"x": torch.randn(3, 4, 32)}, run=run)


def llama(cache: Callable[[Any], Any], *, is_wrong: bool) -> Workload:
    """A Llama that decodes; the wrong one's layer 1 scales the values that it keeps of the prompt."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 64,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model.eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.15)
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if kwargs["hidden_states"].shape[1] > 1:
            kept: Any = next(value for value in kwargs.values() if isinstance(value, transformers.Cache))
            kept.layers[1].values.mul_(1.25)
        return output

    if is_wrong:
        attention.forward = forward

    def run(model: Any, input_ids: Any) -> None:
        past = cache(model.config)
        with torch.no_grad():
            for ids in (input_ids, torch.tensor([[17], [33]]), torch.tensor([[5], [40]])):
                model(ids, use_cache=True, cache=past)

    return Workload(model, {"input_ids": PROMPT}, run=run)


def static(config: Any) -> Any:
    return transformers.StaticCache(config=config, max_cache_len=16)


def dynamic(config: Any) -> Any:
    return transformers.DynamicCache(config=config)


def suspects(way: str, tmp_path: Path, make: Callable[[bool], Workload]) -> list[str]:
    for name, is_wrong in (("ref.h5", False), ("tgt.h5", True)):
        capture_workload(make(is_wrong), tmp_path / name)
    models: dict[str, Any] = {
        "archives": {},
        "replay": {"reference_model": make(False)},
        "injection": {"target_model": make(True)},
    }[way]
    localization = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", **models)
    assert localization.exit_status == 1
    assert localization.suspects[0].diagnosis is not None
    assert localization.suspects[0].diagnosis.kind == "factor"
    return [suspect.module for suspect in localization.suspects]


@pytest.mark.spec("CMP-130", "RPL-70", "INJ-80")
@pytest.mark.parametrize("way", WAYS)
def test_a_cell_that_writes_a_wrong_state_is_accused_alone(way: str, tmp_path: Path) -> None:
    accused = suspects(way, tmp_path, lambda is_wrong: recurrent(1 if is_wrong else None))
    assert accused == ["layers.1"]


@pytest.mark.slow
@pytest.mark.spec("CMP-130", "RPL-70")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", [static, dynamic])
def test_an_attention_that_keeps_wrong_values_is_accused_alone(
    way: str, cache: Callable[[Any], Any], tmp_path: Path
) -> None:
    accused = suspects(way, tmp_path, lambda is_wrong: llama(cache, is_wrong=is_wrong))
    assert accused == ["model.layers.1.self_attn"]


@pytest.mark.spec("CMP-130")
def test_the_first_divergence_is_of_the_module_that_wrote_the_state(tmp_path: Path) -> None:
    capture_workload(recurrent(None), tmp_path / "ref.h5")
    capture_workload(recurrent(2), tmp_path / "tgt.h5")
    divergence = compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").divergence
    assert divergence is not None
    assert divergence.pair.key == "1/@root/input.states.2"
    assert divergence.module == "layers.2"
    assert divergence.class_name.endswith(".Cell")
    assert not divergence.is_run_input


@pytest.mark.spec("INJ-80")
def test_what_a_call_writes_to_its_argument_reaches_the_caller_though_it_was_replaced(tmp_path: Path) -> None:
    capture_workload(recurrent(None), tmp_path / "ref.h5")
    localization = localize(tmp_path / "ref.h5", target_model=recurrent(None))
    assert localization.suspects == ()
    assert localization.exit_status == 0
