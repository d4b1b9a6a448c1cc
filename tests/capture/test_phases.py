"""Steps of language models: what each is of, and what its cache held at that time."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import tensorcap
from tests.support.transformers_models import LLAMA, llama, random_model

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
PROMPT = [[5, 6, 7, 8]]
PARAMETERS = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"  # as transformers calls it, by its release


def phases(path: Path, model: nn.Module, run: Any) -> list[str]:
    with torch.no_grad(), tensorcap.capture(model, path, only="@root", inputs=False) as cap:
        run(model)
    assert cap.summary is not None
    with tensorcap.open_archive(path) as archive:
        found: list[str] = archive.run["phases"]
    assert sum(cap.summary.phases.values()) == len(found) == cap.summary.steps
    assert all(found.count(phase) == count for phase, count in cap.summary.phases.items())
    return found


def generate(model: Any, count: int = 3, **options: Any) -> torch.Tensor:
    ids = torch.tensor(options.pop("ids", PROMPT))
    tokens: torch.Tensor = model.generate(
        ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids), **options
    )
    return tokens


def plain(model: Any) -> None:
    model(input_ids=torch.tensor(PROMPT), use_cache=False)


def told_to_cache(model: Any) -> None:
    model(input_ids=torch.tensor(PROMPT), use_cache=True)


def by_hand(model: Any) -> None:
    cache = model(torch.tensor(PROMPT))[1]
    for token in (9, 10):
        model(torch.tensor([[token]]), **{CACHE: cache})


def in_chunks(model: Any) -> None:
    cache = transformers.DynamicCache(config=model.config)
    for ids in ([[5, 6]], [[7, 8]], [[9]]):
        model(input_ids=torch.tensor(ids), **{CACHE: cache})


def two_prompts(model: Any) -> None:
    generate(model, 2)
    generate(model, 2, ids=[[3]])


@pytest.mark.spec("CAP-56")
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        pytest.param(plain, ["forward"], id="without-a-cache"),
        pytest.param(generate, ["prefill", "decode", "decode"], id="generate"),
        pytest.param(
            lambda m: generate(m, 2, cache_implementation="static"), ["prefill", "decode"], id="static"
        ),
        pytest.param(
            lambda m: generate(m, 2, use_cache=False), ["forward"] * 2, id="generate-without-a-cache"
        ),
        pytest.param(told_to_cache, ["prefill"], id="told-to-make-one"),
        pytest.param(by_hand, ["prefill", "decode", "decode"], id="by-hand"),
        pytest.param(in_chunks, ["prefill", "prefill", "decode"], id="prompt-in-chunks"),
        pytest.param(two_prompts, ["prefill", "decode", "prefill", "decode"], id="prompt-of-one-token"),
    ],
)
def test_prefill_and_decode_are_told_apart(path: Path, run: Any, expected: list[str]) -> None:
    assert phases(path, llama(**SPECIAL), run) == expected


@pytest.mark.spec("CAP-56")
def test_phases_of_an_encoder_and_a_decoder(path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = random_model("T5ForConditionalGeneration", **sizes, decoder_start_token_id=0)
    assert phases(path, model, lambda m: generate(m, 3, eos_token_id=None)) == ["prefill", "decode", "decode"]


@pytest.mark.spec("CAP-56")
def test_phases_of_a_model_whose_cache_is_a_state(path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    model = random_model("MambaForCausalLM", **sizes, eos_token_id=None, pad_token_id=0)
    assert phases(path, model, generate) == ["prefill", "decode", "decode"]


class OldStyle(nn.Module):
    """A model whose cache is tuples of tensors, as before there were classes for it."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> Any:
        new = input_ids[:, None, :, None].float()
        if past_key_values is not None:
            new = torch.cat([past_key_values[0][0], new], 2)
        return new, ((new, new),)


@pytest.mark.spec("CAP-56")
def test_a_cache_of_tuples_is_a_cache(path: Path) -> None:
    def run(model: nn.Module) -> None:
        empty = torch.zeros(1, 1, 0, 1)
        _, past = model(torch.tensor([[5]]), ((empty, empty),))
        model(torch.tensor([[9]]), past)

    assert phases(path, OldStyle(), run) == ["prefill", "decode"]


@pytest.mark.spec("CAP-56")
def test_a_model_of_another_kind_has_plain_forwards(path: Path, small: Any) -> None:
    assert phases(path, small, lambda model: [model(torch.ones(1, 4)) for _ in range(2)]) == ["forward"] * 2


@pytest.mark.spec("CAP-56")
def test_the_root_that_calls_itself_has_the_phase_of_its_outermost_call(path: Path) -> None:
    class Nested(OldStyle):
        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None) -> Any:
            if past_key_values is None:
                return super().forward(input_ids)
            return self(input_ids)

    full = ((torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1)),)
    assert phases(path, Nested(), lambda model: model(torch.tensor([[9]]), full)) == ["decode"]


@pytest.mark.spec("CAP-57")
@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding"])
def test_the_cache_of_each_step_is_as_it_was_when_the_step_was_called(path: Path, kind: str) -> None:
    if kind == "sliding":
        model = random_model("MistralForCausalLM", **LLAMA, **SPECIAL, sliding_window=3)
    else:
        model = llama(**SPECIAL)
    options = {"cache_implementation": "static"} if kind == "static" else {}
    kept: list[list[torch.Tensor]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        layers = kwargs[CACHE].layers
        kept.append([t.clone() for x in layers if x.is_initialized for t in (x.keys, x.values)])

    with torch.no_grad():
        handle = model.register_forward_pre_hook(keep, with_kwargs=True)
        generate(model, 5, **options)
        handle.remove()
        with tensorcap.capture(model, path, only="@root"):
            generate(model, 5, **options)
    assert [len(tensors) for tensors in kept] == [0, 4, 4, 4, 4]  # of two layers, made by the first step
    with tensorcap.open_archive(path) as archive:
        for step, expected in enumerate(kept):
            found = [
                archive.load(record)
                for record in archive.records
                if record.key.step == step
                and record.key.slot.startswith(f"input.{CACHE}.layers.")
                and record.key.slot.endswith((".keys", ".values"))
            ]
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other.numpy())
    changed = [not torch.equal(one[0], two[0]) for one, two in itertools.pairwise(kept[1:])]
    assert all(changed)  # so that a cache kept by reference would be seen
