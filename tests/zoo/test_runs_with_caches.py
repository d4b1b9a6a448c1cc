"""Correct ports that decode token by token, pad, or keep their caches otherwise: nobody is accused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tests.zoo.architecture import VOCABULARY
from tests.zoo.architectures import make

PROMPT = 34
STEPS = 6
Run = Callable[..., None]


def tokens(rows: int, count: int, seed: int) -> Any:
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def kept(model: Any, out: Any) -> dict[str, Any]:
    """The cache, under the name that the model's class has for it."""
    known = inspect.signature(model.forward).parameters
    name = next(n for n in ("cache", "past_key_values", "cache_params") if n in known)
    return {name: out if isinstance(out, transformers.Cache) else out[name]}


def decode(model: Any, input_ids: Any) -> None:
    out = model(input_ids=input_ids[:, :PROMPT], use_cache=True)
    for at in range(PROMPT, PROMPT + STEPS):
        out = model(input_ids=input_ids[:, at : at + 1], use_cache=True, **kept(model, out))


def decode_padded(model: Any, input_ids: Any) -> None:
    mask = torch.ones_like(input_ids)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    start, out = 0, None
    for stop in range(PROMPT, PROMPT + STEPS):
        out = model(
            input_ids=input_ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            use_cache=True,
            **(kept(model, out) if out else {}),
        )
        start = stop


def decode_static(model: Any, input_ids: Any) -> None:
    past = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + STEPS + 4)
    start = 0
    for stop in range(PROMPT, PROMPT + STEPS):
        at = torch.arange(start, stop)
        model(input_ids=input_ids[:, start:stop], use_cache=True, cache_position=at, **kept(model, past))
        start = stop


def decode_from_encoder(model: Any, input_ids: Any) -> None:
    encoded = model.get_encoder()(input_ids=input_ids)
    out = None
    for at in range(STEPS):
        out = model(
            encoder_outputs=encoded,
            decoder_input_ids=input_ids[:, at : at + 1],
            use_cache=True,
            **(kept(model, out) if out else {}),
        )


@pytest.fixture
def archives(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def captured(
        name: str, dtype: str, run: Run, *, rows: int = 1, seed: int = 0, reference_run: Run | None = None
    ) -> tuple[Path, Path]:
        inputs = {"input_ids": tokens(rows, PROMPT + STEPS, seed)}
        capture_workload(Workload(make(name), inputs, reference_run or run), tmp_path / "ref.h5")
        capture_workload(Workload(make(name, dtype), inputs, run), tmp_path / "tgt.h5")
        return tmp_path / "ref.h5", tmp_path / "tgt.h5"

    return captured


@pytest.mark.spec("POL-30", "POL-13")
def test_a_correct_cached_run_is_green(archives: Any) -> None:
    reference, target = archives("llama", "bfloat16", decode)
    assert compare(reference, target).exit_status == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "run", "rows", "seed"),
    [
        ("mixtral", decode, 1, 1),
        ("mixtral", decode, 1, 2),
        ("gpt_oss", decode, 1, 1),
        ("gpt_oss", decode, 2, 0),
        ("gpt_oss", decode_padded, 2, 0),
    ],
)
def test_growth_behind_flipped_experts_makes_no_suspect(
    archives: Any, name: str, run: Run, rows: int, seed: int
) -> None:
    reference, target = archives(name, "bfloat16", run, rows=rows, seed=seed)
    found = compare(reference, target)
    assert (found.exit_status, found.divergence) == (0, None)
    inputs = {"input_ids": tokens(rows, PROMPT + STEPS, seed)}
    for workload in (None, Workload(make(name), inputs, run)):
        located = localize(reference, target, reference_model=workload)
        assert (located.suspects, located.exit_status) == ((), 0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "dtype", "run", "rows", "seed"),
    [
        ("qwen3", "bfloat16", decode, 1, 2),
        ("qwen3", "float16", decode, 1, 0),
        ("gemma2", "bfloat16", decode, 1, 0),
        ("gemma3", "bfloat16", decode, 1, 1),
        ("gpt2", "bfloat16", decode, 2, 0),
        ("mamba", "bfloat16", decode, 1, 1),
        ("llama", "bfloat16", decode_padded, 2, 0),
        ("llama", "float16", decode_static, 1, 0),
        ("gemma2", "bfloat16", decode_static, 1, 0),
        ("t5", "bfloat16", decode_from_encoder, 1, 0),
        ("t5", "float16", decode_from_encoder, 2, 0),
    ],
)
def test_a_correct_run_is_green_and_has_no_suspect(
    archives: Any, name: str, dtype: str, run: Run, rows: int, seed: int
) -> None:
    reference, target = archives(name, dtype, run, rows=rows, seed=seed)
    assert compare(reference, target).exit_status == 0
    inputs = {"input_ids": tokens(rows, PROMPT + STEPS, seed)}
    for workload in (None, Workload(make(name), inputs, run)):
        found = localize(reference, target, reference_model=workload)
        assert (found.suspects, found.exit_status) == ((), 0)


@pytest.mark.slow
@pytest.mark.spec("POL-31")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_of_padding_by_another_implementation_makes_no_suspect(tmp_path: Path, dtype: str) -> None:
    inputs = {"input_ids": tokens(2, PROMPT + STEPS, 0)}
    reference, eager = make("llama"), make("llama", dtype)
    eager.set_attn_implementation("eager")  # the mean of all values for a token that attends to none
    capture_workload(Workload(reference, inputs, decode_padded), tmp_path / "ref.h5")
    capture_workload(Workload(eager, inputs, decode_padded), tmp_path / "tgt.h5")
    for workload in (None, Workload(make("llama"), inputs, decode_padded)):
        found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=workload)
        assert (found.suspects, found.exit_status) == ((), 0)


@pytest.mark.slow
@pytest.mark.spec("CMP-40", "RPL-4", "LCL-4")
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_longer_cache_is_not_judged_and_makes_no_suspect(archives: Any, name: str, dtype: str) -> None:
    reference, target = archives(name, dtype, decode_static, reference_run=decode)
    inputs = {"input_ids": tokens(1, PROMPT + STEPS, 0)}
    for workload in (None, Workload(make(name), inputs, decode)):
        found = localize(reference, target, reference_model=workload)
        assert not found.suspects
        assert found.exit_status == 1  # what has another shape is told, and nobody knows what it holds
        assert "attention_mask" in found.open[0] or ".cache." in found.open[0]
