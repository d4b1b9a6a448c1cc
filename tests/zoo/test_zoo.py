"""The zoo says the truth: each mistake is where it is said to be, and correct ports are correct."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from tests.zoo import run as running
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.catalogue import ENTRIES, MISTAKES
from tests.zoo.correct import AS_IT_IS, CORRECT, OTHERWISE
from tests.zoo.effect import (
    around,
    changed_sites,
    clean_calls,
    compare_modules,
    difference,
    effect,
    is_cured,
    is_exercised,
)
from tests.zoo.entry import DTYPES, Correct, Entry, Kind, Mistake, build
from tests.zoo.localisers import LOCALISERS, Suspect
from tests.zoo.scoring import Outcome, Score
from tests.zoo.second.catalogue import SECOND_MISTAKES

ROUNDING = 2e-6  # of float32 through three layers, relative; measured: 8e-7


def names(entries: Sequence[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def test_the_zoo_holds_many_mistakes_of_all_kinds_and_many_correct_ports() -> None:
    assert len(ENTRIES) == len(MISTAKES) + len(CORRECT)
    assert len(MISTAKES) > 80
    assert {mistake.kind for mistake in (*MISTAKES, *SECOND_MISTAKES)} == set(get_args(Kind))
    assert {mistake.architecture for mistake in MISTAKES} == set(ARCHITECTURES)
    assert min(Counter(mistake.architecture for mistake in MISTAKES).values()) >= 1
    assert len(AS_IT_IS) == len(ARCHITECTURES) == 14
    assert len(OTHERWISE) > 30


@pytest.mark.parametrize("mistake", MISTAKES, ids=names(MISTAKES))
def test_a_mistake_is_in_the_guilty_module_and_in_no_other(mistake: Mistake) -> None:
    dtype = "bfloat16" if mistake.kind == "precision" else "float32"
    changed = changed_sites(mistake, dtype)
    assert mistake.guilty in changed
    assert changed <= {mistake.guilty, *around(mistake.guilty)}
    if mistake.guilty != "@root":
        assert is_cured(mistake, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=names(MISTAKES))
def test_a_mistake_is_in_no_other_module_in_bfloat16(mistake: Mistake) -> None:
    assert changed_sites(mistake, "bfloat16") <= {mistake.guilty, *around(mistake.guilty)}
    if mistake.guilty != "@root":
        assert is_cured(mistake, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_inputs_do_not_exercise_is_known(dtype: str) -> None:
    idle = {mistake.name for mistake in MISTAKES if not is_exercised(mistake, dtype)}
    precision = {mistake.name for mistake in MISTAKES if mistake.kind == "precision"}
    assert idle == (precision if dtype == "float32" else {"vit_norm_eps"})


def test_an_effect_is_what_the_module_alone_does_otherwise() -> None:
    by_name = {mistake.name: mistake for mistake in MISTAKES}
    assert effect(by_name["gemma2_embedding_scale"], "float32") == pytest.approx(1 - 1 / 8)
    assert effect(by_name["t5_head_scale"], "float32") == pytest.approx(8 - 1)
    assert effect(by_name["vit_residual_twice"], "bfloat16") > 0.1
    assert effect(by_name["llama_norm_variance"], "float32") == 0


def test_planting_changes_neither_the_library_nor_other_models() -> None:
    before = clean_calls("gemma2")
    for mistake in MISTAKES:
        if mistake.architecture == "gemma2":
            build(mistake, "float32")
    after = clean_calls("gemma2")
    assert before.keys() == after.keys()
    for site, calls in before.items():
        assert difference(calls[0].result, after[site][0].result) == 0


@pytest.mark.parametrize("port", CORRECT, ids=names(CORRECT))
def test_a_correct_port_computes_the_same_in_float32(port: Correct) -> None:
    compared = compare_modules(port)
    assert len(compared.largest) >= 0.8 * compared.modules
    for site, largest in compared.largest.items():
        assert largest <= ROUNDING, site


def outcome(entry: str, *suspects: Suspect, is_exercised: bool = True, error: str | None = None) -> Outcome:
    return Outcome(ENTRIES[entry], "bfloat16", "none", is_exercised, suspects, 0.5, error)


def test_a_score_counts_places_hypotheses_and_wrong_accusations() -> None:
    score = Score(
        "none",
        "bfloat16",
        [
            outcome("llama_rope_theta", Suspect("model.rotary_emb", "rope")),
            outcome(
                "mamba_step_bias", Suspect("lm_head"), Suspect("backbone.layers.1.mixer.dt_proj", "bias")
            ),
            outcome("gemma2_one_plus", error="ValueError: no"),
            outcome("llama_head_tied", Suspect("lm_head", "bias")),
            outcome("vit_norm_eps", Suspect("vit"), is_exercised=False),
            outcome("llama_eager", Suspect("model"), is_exercised=False),
            outcome("llama_as_it_is", is_exercised=False),
        ],
    )
    assert score.as_json() == {
        "localiser": "none",
        "dtype": "bfloat16",
        "mistakes": 4,
        "first": 2,
        "first_three": 3,
        "innocent_first": 1,
        "hypothesis_right": 2,
        "correct_ports": 2,
        "correct_accused": 1,
        "not_exercised": 1,
        "not_exercised_accused": 1,
        "errors": 1,
        "seconds": 3.5,
    }
    assert score.lines() == [
        "none, bfloat16",
        "  guilty module first    2 of 4, 50 %",
        "  in the first three     3 of 4, 75 %",
        "  innocent module first  1 of 4, 25 %",
        "  hypothesis right       2 of 4, 50 %",
        "  correct ports accused  1 of 2",
        "  not exercised          vit_norm_eps",
        "    mamba_step_bias: lm_head, backbone.layers.1.mixer.dt_proj; right is backbone.layers.1.mixer",
        "    gemma2_one_plus: ValueError: no; right is model.layers.1.pre_feedforward_layernorm",
        "    llama_eager: model; right is nobody",
        "    vit_norm_eps: vit; right is nobody",
    ]


def test_a_localiser_is_asked_about_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def localise(*given: object) -> Sequence[Suspect]:
        asked.append(given)
        raise RuntimeError("found nothing")

    monkeypatch.setattr(running, "LOCALISERS", {**LOCALISERS, "failing": localise})
    chosen = [ENTRIES["llama_norm_eps"], ENTRIES["llama_rope_side_by_side"]]
    found = running.measure(chosen, ["float32"], ["first-divergence", "failing"], tmp_path)
    assert [(o.entry.name, o.localiser, o.rank, o.suspects, o.error) for o in found] == [
        (
            "llama_norm_eps",
            "first-divergence",
            1,
            [Suspect("model.layers.0.input_layernorm")],
            None,
        ),
        ("llama_norm_eps", "failing", None, (), "RuntimeError: found nothing"),
        ("llama_rope_side_by_side", "first-divergence", None, [], None),
        ("llama_rope_side_by_side", "failing", None, (), "RuntimeError: found nothing"),
    ]
    assert [(given[0], given[4]) for given in asked] == [
        (tmp_path / "reference.h5", None),
        (tmp_path / "reference.h5", tmp_path / "llama_rope_side_by_side.toml"),
    ]


def test_entries_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert running.main(["--only", "unheard_*"]) == 2
    assert capsys.readouterr().err == "no entry of the zoo is named unheard_*\n"


def test_halves_are_of_the_second_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--zoo", "second"], ["--half", "dev"]):
        with pytest.raises(SystemExit):
            running.main(arguments)
        assert "is measured by halves: --zoo second --half dev" in capsys.readouterr().err


@pytest.mark.slow
def test_scores_are_printed_for_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--only", "gpt2_qkv_*", "--only", "vit_norm_eps"]
    assert running.main([*chosen, "--localiser", "first-blame", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(s["dtype"], s["mistakes"], s["first"]) for s in found["scores"]] == [
        ("float32", 2, 1),
        ("bfloat16", 1, 1),
    ]
    assert [(o["name"], o["dtype"], o["rank"]) for o in found["outcomes"]] == [
        ("gpt2_qkv_order", "float32", 1),
        ("gpt2_qkv_order", "bfloat16", 1),
        ("vit_norm_eps", "float32", None),
        ("vit_norm_eps", "bfloat16", None),
    ]
