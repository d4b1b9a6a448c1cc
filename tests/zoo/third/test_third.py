"""The third zoo says the truth, which plain runs of the models and of the ports show: no judge is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch

from tests.zoo import run as running
from tests.zoo.architectures import ARCHITECTURES, make
from tests.zoo.catalogue import ALL_ENTRIES, ENTRIES
from tests.zoo.effect import difference, is_exercised, ported_effect
from tests.zoo.entry import Correct, Entry, Kind, build
from tests.zoo.localisers import Suspect
from tests.zoo.port_distance import Double, in_float64, outputs
from tests.zoo.scoring import Outcome, Score
from tests.zoo.second.architectures import SECOND_ARCHITECTURES
from tests.zoo.second.catalogue import HALVES
from tests.zoo.third.architectures import THIRD_ARCHITECTURES
from tests.zoo.third.catalogue import THIRD_CORRECT, THIRD_ENTRIES, THIRD_MISTAKES

REAL = (
    5e-5  # what a mistake changes at least, relative; correct ports are within 8e-7 of each other in float32
)
DOUBLE = 1e-12  # of float64, relative: the ports agree to 1e-15
ROUTED = 3  # times: of two experts that score alike, another may be chosen; others are 1 to 2 times as far
PORTS = list(dict.fromkeys((mistake.architecture, mistake.port) for mistake in THIRD_MISTAKES))


def names(entries: Sequence[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def distance(architecture: str, port: Any, *, double: bool) -> float:
    """How far a port's scores are from the reference's, those of tokens that the reference has."""
    if double:
        with Double():
            right = outputs(architecture, in_float64(architecture))
            ported = outputs(architecture, port(in_float64(architecture)).eval())
        assert all(tensor.dtype == torch.float64 for tensor in right)
    else:
        right = outputs(architecture, make(architecture))
        ported = outputs(architecture, port(make(architecture)).eval())
    cut = [theirs[..., : ours.shape[-1]] for ours, theirs in zip(right, ported, strict=True)]
    return difference(right, cut)


def test_mistakes_and_correct_ports_of_fourteen_models_are_registered() -> None:
    counts = Counter(mistake.architecture.partition("_stream")[0] for mistake in THIRD_MISTAKES)
    assert len(counts) == 14
    assert min(counts.values()) >= 2
    assert len(THIRD_MISTAKES) == 58
    assert len(THIRD_CORRECT) == 24
    assert len(THIRD_ENTRIES) == 58 + 24
    assert {e.architecture for e in THIRD_MISTAKES} == set(THIRD_ARCHITECTURES)
    assert {e.architecture for e in THIRD_CORRECT} == set(THIRD_ARCHITECTURES)
    assert THIRD_ENTRIES.items() <= ALL_ENTRIES.items()


def test_no_name_is_one_of_another_zoo() -> None:
    others = {*ENTRIES, *HALVES["dev"], *HALVES["held-out"]}
    assert others.isdisjoint(THIRD_ENTRIES)
    assert {*ARCHITECTURES, *SECOND_ARCHITECTURES}.isdisjoint(THIRD_ARCHITECTURES)


def test_the_third_zoo_is_run_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert running.main(["--zoo", "third", "--only", "unheard_*"]) == 2
    with pytest.raises(SystemExit):
        running.main(["--zoo", "third", "--half", "dev"])
    assert "measured by halves" in capsys.readouterr().err


def test_each_mistake_has_a_kind_of_the_zoos_and_words_of_its_own() -> None:
    for mistake in THIRD_MISTAKES:
        assert {mistake.kind, *mistake.also_kinds} <= set(get_args(Kind)), mistake.name
        assert mistake.in_words
        assert mistake.words
        assert all(word == word.lower() for word in mistake.words), mistake.name


def test_a_mistake_is_named_by_one_of_its_words_whatever_the_hypothesis_is_called() -> None:
    mistake = next(m for m in THIRD_MISTAKES if m.name == "dbrx_one_bound")

    def outcome(*suspects: Suspect) -> Outcome:
        return Outcome(mistake, "float32", "replay", True, suspects, 0.1)

    in_words = outcome(Suspect(mistake.guilty, "factor", "Values are Clamped above"))
    by_kind = outcome(Suspect(mistake.guilty, "clip", "values end at 2"))
    elsewhere = outcome(Suspect("lm_head", "clip", "values are clamped"))
    assert [o.is_named for o in (in_words, by_kind, elsewhere)] == [True, False, False]
    score = Score("replay", "float32", [in_words, by_kind, elsewhere])
    assert (score.explained, score.named, score.named_or_explained) == (1, 1, 2)
    assert "  named in words         1 of 3, 33 %" in score.lines()


@pytest.mark.entries
def test_guilty_modules_are_modules_of_the_reference() -> None:
    for architecture in THIRD_ARCHITECTURES:
        sites = {"@root", *(name for name, _ in make(architecture).named_modules())}
        for mistake in THIRD_MISTAKES:
            if mistake.architecture == architecture:
                assert {mistake.guilty, *mistake.also} <= sites, mistake.name


@pytest.mark.entries
@pytest.mark.parametrize("mistake", THIRD_MISTAKES, ids=names(THIRD_MISTAKES))
def test_a_mistake_changes_what_comes_out(mistake: Any) -> None:
    assert ported_effect(mistake, "float32") > REAL
    assert is_exercised(mistake, "float32")


@pytest.mark.entries
@pytest.mark.parametrize(("architecture", "port"), PORTS, ids=[architecture for architecture, _ in PORTS])
def test_without_its_mistake_a_port_gives_the_same_in_float64(architecture: str, port: Any) -> None:
    assert distance(architecture, port, double=True) < DOUBLE


@pytest.mark.entries
@pytest.mark.parametrize("port", THIRD_CORRECT, ids=names(THIRD_CORRECT))
def test_a_correct_port_gives_the_same_in_float64(port: Correct) -> None:
    assert distance(port.architecture, port.change, double=True) < DOUBLE


@pytest.mark.entries
@pytest.mark.parametrize("port", THIRD_CORRECT, ids=names(THIRD_CORRECT))
def test_a_correct_port_is_within_roundings_in_float32(port: Correct) -> None:
    assert distance(port.architecture, port.change, double=False) < 2e-6


@pytest.mark.entries
@pytest.mark.parametrize("port", THIRD_CORRECT, ids=names(THIRD_CORRECT))
def test_a_correct_port_in_bfloat16_is_about_as_far_as_the_same_model_is(port: Correct) -> None:
    reference = outputs(port.architecture, make(port.architecture))
    twin = outputs(port.architecture, make(port.architecture, "bfloat16"))
    ported = outputs(port.architecture, build(port, "bfloat16").target.model)
    cut = [theirs[..., : ours.shape[-1]] for ours, theirs in zip(reference, ported, strict=True)]
    assert difference(reference, cut) < ROUTED * difference(reference, twin)


@pytest.mark.entries
def test_mistakes_that_bfloat16_does_not_show_are_known() -> None:
    hidden = {m.name for m in THIRD_MISTAKES if not is_exercised(m, "bfloat16")}
    assert hidden == {"convnext_tanh_gelu", "stablelm_stream_half_precision_cache"}
