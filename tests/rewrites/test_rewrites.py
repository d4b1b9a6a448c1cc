"""Compare without options calls correct ports right and planted mistakes wrong."""

from __future__ import annotations

from typing import Final

import pytest

from tests.rewrites.run import entries, outcome_of, problem_of, run

QUICK_PORTS: Final = (
    "gpt2/wrapped",
    "gpt2/rewritten",
    "llama/bfloat16",
    "llama/original-code",
    "llama/serving-engine",
    "gemma3/ones-in-the-norms",
    "qwen3-moe/rewritten",
    "bert/rewritten",
    "t5/encoder-alone",
    "vit/as-in-timm",
    "whisper/key-bias-of-zeros",
    "mamba/rewritten",
)
QUICK_MISTAKES: Final = (
    "gpt2/exact-gelu",
    "llama/rotary-base",
    "bert/epsilon",
    "t5/buckets-both-ways",
    "vit/positions-shifted",
    "mamba/b-and-c-swapped",
)


@pytest.mark.parametrize("name", QUICK_PORTS)
def test_correct_port_is_green(name: str) -> None:
    outcome = outcome_of(name)
    assert not outcome.problem
    assert outcome.exit_status == 0, outcome.report


@pytest.mark.parametrize("name", QUICK_MISTAKES)
def test_planted_mistake_is_red(name: str) -> None:
    outcome = outcome_of(name)
    assert not outcome.problem
    assert outcome.exit_status == 1, outcome.report


@pytest.mark.slow
def test_every_entry_proves_what_it_claims() -> None:
    catalogue = entries()
    problems = {name: problem_of(entry, catalogue)[1] for name, entry in catalogue.items()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


@pytest.mark.slow
def test_no_planted_mistake_is_green() -> None:
    mistakes = [name for name, entry in entries().items() if not entry.is_right]
    outcomes = run(mistakes, log=lambda line: None)
    assert [outcome.name for outcome in outcomes if outcome.exit_status != 1] == []
