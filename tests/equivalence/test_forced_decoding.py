"""Stages 1, 5 and 6 on transformers' models and on ports of our own code, right and wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from tensorcap.adapters import adapter_for
from tensorcap.adapters.torch.modules import cast_model
from tensorcap.equivalence import (
    ForcedComparison,
    ForcedLimits,
    SmokeTest,
    compare_forced,
    compare_generations,
)
from tensorcap.equivalence.forced_decoding import WAYS_BACK
from tensorcap.equivalence.token_runs import Prompt, TokenRun, forced_run, greedy_run, prompt_run
from tensorcap.workload import TokenModel, Workload
from tensorcap_formats.errors import UsageError
from tests.equivalence.own_models import Decoder, Encoder, bert, llama

SCHEMAS = json.loads((Path(__file__).parents[2] / "specs/equivalence-logits.schema.json").read_text())
TOKENS = 24
PROMPTS = [
    Prompt.of_tokens(row)
    for row in torch.randint(3, 256, (4, 12), generator=torch.Generator().manual_seed(5)).tolist()
]
MISTAKES = {  # of the decoder, each in one line
    "theta": "back to stage 2",
    "scale": "back to stage 2",
    "activation": "back to stage 2",
    "cap": "back to stage 2",
    "cache": "steps with a cache are another computation than the prompt: back to stage 0",
    "nan": "NaN or infinity, which begins in a component: back to stage 2",
}


def token_model(model: torch.nn.Module) -> TokenModel:
    ids = torch.tensor([prompt.tokens for prompt in PROMPTS])
    return adapter_for(model).token_model(Workload(model.eval(), {"input_ids": ids}))


@cache
def decoder_runs(kind: str) -> tuple[TokenRun, ...]:
    """Runs of transformers' decoder: free in float32, fed in bfloat16."""
    if kind == "source":
        model = token_model(llama())
        return tuple(greedy_run(model, prompt, TOKENS, vocabulary=256) for prompt in PROMPTS)
    return forced(token_model(llama(torch.bfloat16)))


@cache
def port(mistake: str = "") -> TokenModel:
    return token_model(Decoder(llama(torch.bfloat16).state_dict(), mistake))


def forced(model: TokenModel) -> tuple[TokenRun, ...]:
    return tuple(forced_run(model, run.prompt, run.tokens) for run in decoder_runs("source"))


@cache
def stages_5_and_6(mistake: str = "") -> ForcedComparison:
    return compare_forced(
        decoder_runs("source"), decoder_runs("twin"), forced(port(mistake)), vocabularies=[256]
    )


@cache
def stage_1(mistake: str = "") -> SmokeTest:
    target = tuple(greedy_run(port(mistake), prompt, TOKENS, vocabulary=256) for prompt in PROMPTS)
    return compare_generations(decoder_runs("source"), target, vocabularies=[256])


def logits(runs: tuple[TokenRun, ...]) -> np.ndarray[Any, Any]:
    return np.concatenate([run.logits for run in runs]).astype(np.float64)


@pytest.mark.spec("EQL-10", "EQL-30")
def test_a_right_port_passes_although_its_free_tokens_part_at_near_ties() -> None:
    free, fed = stage_1(), stages_5_and_6()
    parted = [one for one in free.prompts if one.first_divergence is not None]
    assert parted
    for one in parted:  # what the source hardly prefers
        assert one.rows[-1].margin < 0.1 < np.median([row.margin for row in free.rows])
    assert fed.passed
    assert fed.exit_status == 0
    assert fed.way_back is None
    assert [gate.passed for gate in fed.gates] == [True] * 4


@pytest.mark.spec("EQL-10", "EQL-13", "EQL-30")
def test_gates_are_of_the_numbers_that_plain_numpy_gives() -> None:
    s, w, t = (logits(runs) for runs in (decoder_runs("source"), decoder_runs("twin"), forced(port())))
    ratios = np.linalg.norm(t - s, axis=1) / np.linalg.norm(w - s, axis=1)
    cosines = (s * t).sum(1) / np.linalg.norm(s, axis=1) / np.linalg.norm(t, axis=1)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (s, t))
    kl = (p * np.log(p / q)).sum(1)
    values = {gate.name: gate.value for gate in stages_5_and_6().gates}
    assert values["R p95"] == pytest.approx(np.percentile(ratios, 95), rel=1e-9)
    assert values["cosine p5"] == pytest.approx(np.percentile(cosines, 5), rel=1e-12)
    # of several largest logits, as bfloat16 has them, any is the first choice
    assert values["top-1 agreement"] == (t[np.arange(len(t)), s.argmax(1)] == t.max(1)).mean()
    content = stages_5_and_6().to_json()
    assert content["aggregate"]["kl"]["p95"] == pytest.approx(np.percentile(kl, 95), rel=1e-6)
    assert content["per_prompt"][1]["per_position_r_ratio"] == pytest.approx(ratios[24:48].tolist(), rel=1e-9)
    errors = (w - s) / np.linalg.norm(w - s, axis=1, keepdims=True)
    squares = np.square(errors @ errors.T)
    directions = 1 / squares[~np.eye(len(squares), dtype=bool)].mean()
    below = math.log(np.percentile(ratios, 50) / np.percentile(ratios, 5)) / 1.645
    deviation = min(1 / math.sqrt(directions), below)
    by_chance = math.exp(deviation * (1.645 + 4.22 / math.sqrt(96)))
    assert stages_5_and_6().gates[1].limit == pytest.approx(1.2 * by_chance, rel=1e-9)


@pytest.mark.spec("EQL-30", "EQL-31")
@pytest.mark.sampled
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_port_fails_and_is_led_back(mistake: str) -> None:
    result = stages_5_and_6(mistake)
    assert not result.passed
    assert result.exit_status == 1
    assert len(result.gates) == 4  # all are decided
    assert result.way_back is not None
    assert MISTAKES[mistake] in result.way_back.text


@pytest.mark.spec("EQL-12", "EQL-30")
def test_nan_fails_everywhere_and_no_number_stands_for_it() -> None:
    result = stages_5_and_6("nan")
    assert [gate.passed for gate in result.gates] == [False] * 4
    content = result.to_json()
    assert content["aggregate"]["r_ratio"] == {"mean": None, "max": None, "p95": None}
    assert content["per_prompt"][0]["per_position_kl"] == [None] * TOKENS
    assert json.dumps(content, allow_nan=False)
    assert result.words[1] == (
        "At 96 positions the target's logits are no finite numbers, first at prompt 1, position 0: no number "
        "stands for them, and they fail."
    )


@pytest.mark.spec("EQL-12", "EQL-30")
def test_one_nan_of_many_positions_fails() -> None:
    runs = list(forced(port()))
    spoiled = runs[2].logits.copy()
    spoiled[5, 0] = math.nan
    runs[2] = replace(runs[2], logits=spoiled)
    result = compare_forced(decoder_runs("source"), decoder_runs("twin"), runs)
    assert not result.passed
    assert {gate.name for gate in result.gates if not gate.passed} == {
        "positions whose logits are not finite"
    }
    assert "first at prompt 3, position 5" in result.words[1]


@pytest.mark.spec("EQL-31")
@pytest.mark.parametrize(
    ("components", "stage"), [("not run", 2), ("failed", 3), ("passed", 0)], ids=lambda value: str(value)
)
def test_where_a_failure_leads_depends_on_the_components(components: Any, stage: int) -> None:
    way = replace(stages_5_and_6("scale"), components=components).way_back
    assert way is not None
    assert way.stage == stage


@pytest.mark.spec("EQL-31")
def test_each_failure_leads_back_to_a_stage() -> None:
    names = {name for way in WAYS_BACK for name in way.failed}
    limits = ForcedLimits(delta_kl=0.1, delta_kl_max=1.0)
    assert {gate.name for gate in replace(stages_5_and_6(), limits=limits).gates} == names


@pytest.mark.spec("EQL-31")
def test_a_precision_that_is_not_enough_is_no_fault_of_the_port() -> None:
    rng = np.random.default_rng(3)
    source, noise = rng.normal(size=(40, 64)), rng.normal(size=(2, 40, 64))
    runs = [
        (TokenRun(Prompt.of_tokens([1]), (0,) * 40, source + error)) for error in (np.zeros((40, 64)), *noise)
    ]
    result = compare_forced(*([run] for run in runs))
    assert not result.passed
    assert result.way_back is not None
    assert "the precision is not enough" in result.way_back.text


@pytest.mark.spec("EQL-32")
def test_kl_decides_once_there_are_measured_limits() -> None:
    result = stages_5_and_6()
    assert all("KL" not in gate.name for gate in result.gates)
    assert result.to_json()["aggregate"]["condition_c_passed"] is None
    tight = replace(result, limits=ForcedLimits(delta_kl=1e-6, delta_kl_max=1e-6))
    assert [gate.name for gate in tight.gates if not gate.passed] == ["KL p95", "largest KL"]
    assert tight.way_back is not None
    assert "probability is spread otherwise" in tight.way_back.text


@pytest.mark.spec("EQL-4", "EQL-30")
@pytest.mark.parametrize(("mistake", "passed"), [("", True), ("causal", False)], ids=["right", "causal mask"])
def test_an_encoder_is_compared_at_the_positions_of_its_prompts(mistake: str, passed: bool) -> None:
    models: list[Callable[[], torch.nn.Module]] = [
        bert,
        lambda: bert(torch.bfloat16),
        lambda: Encoder(bert(torch.bfloat16).state_dict(), mistake),
    ]
    runs = []
    for make in models:
        model = token_model(make())
        runs.append([prompt_run(model, prompt, vocabulary=256) for prompt in PROMPTS])
    result = compare_forced(*runs, generates=False)
    assert result.passed is passed
    assert len(result.rows) == 48
    assert result.to_json()["teacher_forced"] is False


@pytest.mark.spec("EQL-11", "EQL-30")
@pytest.mark.parametrize(("mistake", "passed"), [("", True), ("scale", False)], ids=["right", "scale"])
def test_a_port_in_float32_may_add_up_in_another_order(mistake: str, passed: bool) -> None:
    wide = llama()
    cast_model(wide, torch.float64)
    source = [greedy_run(token_model(wide), prompt, TOKENS, vocabulary=256) for prompt in PROMPTS]
    models = token_model(llama()), token_model(Decoder(llama().state_dict(), mistake))
    twin, target = ([forced_run(model, run.prompt, run.tokens) for run in source] for model in models)
    result = compare_forced(source, twin, target, dtype="float32")
    assert source[0].logits.dtype == np.float64
    assert result.passed is passed
    s, w = (np.concatenate([run.logits for run in runs]) for runs in (source, twin))
    own = np.median(np.linalg.norm(w - s, axis=1) / np.linalg.norm(s, axis=1))
    assert result.gates[1].limit == pytest.approx(math.hypot(1.2 * result.scatter, 4e-6 / own))
    assert "which another order of sums makes alone" in " ".join(result.words)


@pytest.mark.spec("EQL-34")
@pytest.mark.parametrize(
    ("mistake", "passed"), [("", True), ("activation", False)], ids=["right", "activation"]
)
def test_without_a_wider_precision_r_is_of_perturbed_inputs(mistake: str, passed: bool) -> None:
    model = llama(torch.bfloat16)
    ids = torch.tensor([prompt.tokens for prompt in PROMPTS])
    perturbed = adapter_for(model).perturb(Workload(llama(torch.bfloat16), {"input_ids": ids}), "bfloat16")
    source = [greedy_run(token_model(model), prompt, TOKENS, vocabulary=256) for prompt in PROMPTS]
    twin, target = (
        [forced_run(one, run.prompt, run.tokens) for run in source]
        for one in (adapter_for(model).token_model(perturbed), port(mistake))
    )
    result = compare_forced(source, twin, target, is_perturbed=True, dtype="bfloat16")
    assert result.passed is passed
    assert result.words[-1].startswith("The source has no wider precision: R is relative to")
    assert "rounds less" not in " ".join(result.words)


@pytest.mark.spec("EQL-11")
def test_a_source_in_one_precision_has_no_denominator() -> None:
    source = decoder_runs("source")
    with pytest.raises(UsageError, match="R has no denominator"):
        compare_forced(source, source, forced(port()))


@pytest.mark.spec("EQL-6")
def test_runs_of_unlike_prompts_or_tokens_are_refused() -> None:
    source, twin = decoder_runs("source"), decoder_runs("twin")
    with pytest.raises(UsageError, match="unlike prompts"):
        compare_forced(source, twin, forced(port())[:2])
    other = [replace(run, tokens=run.tokens[::-1]) for run in twin]
    with pytest.raises(UsageError, match="fed unlike tokens"):
        compare_forced(source, twin, other)
    with pytest.raises(UsageError, match="expected at least one"):
        compare_generations([], [])


@pytest.mark.spec("EQL-20", "EQL-21")
def test_greedy_tokens_are_counted_position_by_position() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4, 8))

    def run(*tokens: int) -> TokenRun:
        return TokenRun(Prompt("a", (1,)), tokens, rows[: len(tokens)])

    result = compare_generations([run(1, 2, 3, 4), run(5, 6)], [run(1, 2, 9, 4), run(5)])
    assert [one.first_divergence for one in result.prompts] == [2, 1]
    assert [(one.matching, one.compared) for one in result.prompts] == [(3, 4), (1, 2)]
    assert result.match_rate == 4 / 6
    assert [len(one.rows) for one in result.prompts] == [3, 1]  # as long as the text before is the same
    content = result.to_json()["token_matching"]
    assert (content["matching_tokens"], content["total_tokens_compared"]) == (4, 6)
    assert content["per_prompt_results"][0]["first_divergence_idx"] == 2
    assert compare_generations([run(1, 2)], [run(1, 2)]).prompts[0].first_divergence is None


@pytest.mark.spec("EQL-20", "EQL-21")
@pytest.mark.parametrize(
    ("mistake", "token_match", "passed", "meaning"),
    [
        pytest.param(
            "", 0.3, True, "Tokens match and logits agree: the port lives. This proves no", id="right"
        ),
        pytest.param("activation", 0.3, False, "decisions with small margins", id="margins"),
        pytest.param("cache", 0.3, False, "the port computes something else", id="wrong"),
        pytest.param("nan", 0.3, False, "no finite numbers, first at prompt 1, position 0", id="nan"),
    ],
)
def test_matches_and_cosines_have_a_meaning_together(
    mistake: str, token_match: float, passed: bool, meaning: str
) -> None:
    result = stage_1(mistake)
    assert result.passed is passed
    assert meaning in result.meaning[0]
    assert bool(result.meaning[1]) is not passed


@pytest.mark.spec("EQL-21")
def test_matching_tokens_of_unlike_logits_are_told() -> None:
    source = decoder_runs("source")
    odd = [replace(run, logits=np.where(run.logits > 3, run.logits, -run.logits)) for run in source]
    result = compare_generations(source, odd)
    assert result.passed
    assert "Tokens match although logits do not agree" in result.meaning[0]


@pytest.mark.spec("EQL-33")
@pytest.mark.parametrize("mistake", ["", "nan", "cache"])
def test_files_are_those_of_their_schemas(mistake: str) -> None:
    free, fed = stage_1(mistake).to_json(), stages_5_and_6(mistake).to_json()
    for content, kind in ((free, "stage1"), (fed, "teacher_forced")):
        jsonschema.validate(json.loads(json.dumps(content)), {**SCHEMAS, "$ref": f"#/$defs/{kind}"})


@pytest.mark.spec("EQL-33")
def test_schemas_are_also_those_of_the_originals_files() -> None:
    metrics = {
        "r_ratio": {"mean": 1.0, "p95": 1.1, "max": 1.2},
        "cosine": {"mean": 0.99, "min": 0.98, "p5": 0.985},
        "kl": {"mean": 0.01, "p95": 0.02, "max": 0.03},
    }
    prompt = {"prompt": "Water freezes at", "num_positions": 1, **metrics, "top1_agreement": 1.0}
    positions = {"per_position_cosine": [0.99], "per_position_kl": [0.01], "per_position_r_ratio": [1.0]}
    aggregate = {"condition_b_passed": True, **metrics, "num_positions": 1}
    forced = {"per_prompt": [{**prompt, **positions}], "aggregate": aggregate}
    matching = {"match_rate": 0.5, "per_prompt_results": [{"prompt": "Water freezes at", "match_rate": 0.5}]}
    for content, kind in (
        (forced, "teacher_forced"),
        ({"token_matching": matching, "passed": True}, "stage1"),
    ):
        jsonschema.validate(content, {**SCHEMAS, "$ref": f"#/$defs/{kind}"})
